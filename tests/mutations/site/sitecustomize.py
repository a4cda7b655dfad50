"""Records what commands reach that a test starts, while `python -m tests.mutations` has this folder on PYTHONPATH."""

import atexit
import os
import sys

# The server that ranks are forked from serves many tests: its ranks record by themselves.
if os.environ.get("ONEBIT_REACH") and not any("forkserver" in word for word in sys.orig_argv):
    sys.path.insert(0, os.environ["ONEBIT_REACH_ROOT"])
    from tests import reach

    sys.path.pop(0)
    _recording = reach.recording(reach.this_test())
    _recording.__enter__()
    atexit.register(_recording.__exit__, None, None, None)
