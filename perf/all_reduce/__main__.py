"""python -m perf.all_reduce"""

import sys

from perf.all_reduce.benchmark import main

sys.exit(main())
