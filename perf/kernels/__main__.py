"""python -m perf.kernels"""

import sys

from perf.kernels.benchmark import main

sys.exit(main())
