"""A store over TCP of any torch: not every one has libuv (Debian's has not), which a few ranks do not need."""

from functools import partial
from typing import Any

import torch.distributed as dist

_TCPStore: Any = getattr(dist, "TCPStore")  # noqa: B009 - torch does not list it for type checkers
tcp_store = partial(_TCPStore, use_libuv=False)
