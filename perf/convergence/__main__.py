"""python -m perf.convergence"""

import sys

from perf.convergence.study import main

sys.exit(main())
