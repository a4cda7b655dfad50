"""python -m perf.train_step"""

import sys

from perf.train_step.benchmark import main

sys.exit(main())
