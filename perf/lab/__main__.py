"""python -m perf.lab"""

import sys

from perf.lab.network import main

sys.exit(main())
