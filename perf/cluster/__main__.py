"""python -m perf.cluster"""

import sys

from perf.cluster.comparison import main

sys.exit(main())
