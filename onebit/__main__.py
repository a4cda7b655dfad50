"""python -m onebit"""

import sys

from onebit.cli import main

sys.exit(main())
