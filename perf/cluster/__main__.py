"""python -m perf.cluster"""

import sys

from perf.cluster.report import main

sys.exit(main())
