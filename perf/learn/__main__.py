"""python -m perf.learn"""

import sys

from perf.learn.command import main

sys.exit(main())
