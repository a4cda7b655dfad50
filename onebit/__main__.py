"""python -m onebit"""

import sys

from onebit.cli.main import main

sys.exit(main())
