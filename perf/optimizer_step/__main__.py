"""python -m perf.optimizer_step"""

import sys

from perf.optimizer_step.benchmark import main

sys.exit(main())
