"""python -m perf.methods"""

import sys

from perf.methods.command import main

sys.exit(main())
