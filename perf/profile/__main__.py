import sys

from perf.profile.benchmark import main

sys.exit(main())
