"""python -m perf.lab"""

import sys

from perf.lab.command import main

sys.exit(main())
