"""What every test needs: Triton's interpreter where there is no GPU, few threads, repeatable hypothesis runs."""

import os
import signal
import tempfile

# A background job of a shell starts with Ctrl-C ignored, and so would what the tests start to interrupt it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Workers share the machine; must stand before torch is imported.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")

# Measured kernel shapes of this user neither help nor hinder a test.
if "ONEBIT_CACHE_DIR" not in os.environ:
    _cache = tempfile.TemporaryDirectory(prefix="onebit-tests-")
    os.environ["ONEBIT_CACHE_DIR"] = _cache.name

import hypothesis
import torch

# Triton decides at the definition of a kernel whether it will be interpreted: must stand before triton is imported.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)

hypothesis.settings.register_profile("onebit", deadline=None, derandomize=True, database=None)
hypothesis.settings.load_profile("onebit")
