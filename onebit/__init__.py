"""Communication-compressed training: what crosses the network is 1 bit an element, or a few."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

try:
    from onebit import collectives, kernels
except ImportError as _error:
    if _error.name != "onebit":
        raise
    raise ImportError(
        f"Python takes onebit from the clone {Path(__file__).resolve().parents[1]}, where kernels and collectives lie "
        f"beside it, and not the installed package: run pip install -e . there, or start Python in another folder"
    ) from None
from onebit.checkpoint.convert import adamw_state
from onebit.collectives import CollectiveError, CompressedAllReduce
from onebit.collectives.heartbeat import Heartbeat
from onebit.elastic.following import follow
from onebit.elastic.giving import Giver
from onebit.elastic.reform import reform
from onebit.optim.algorithm import Algorithm
from onebit.optim.fields import Field
from onebit.optim.freeze import FreezeRule
from onebit.optimizers.of_algorithms import OneBitAdam, OneBitLamb, ZeroOneAdam
from onebit.optimizers.optimizer import OneBitOptimizer
from onebit.parallel.attach import attach
from onebit.parallel.compression import Compression, compress_gradients
from onebit.parallel.watch import DivergenceError

if TYPE_CHECKING:
    from onebit.checkpoint.save_load import load, save

__all__ = [
    "Algorithm",
    "CollectiveError",
    "CompressedAllReduce",
    "Compression",
    "DivergenceError",
    "Field",
    "FreezeRule",
    "Giver",
    "Heartbeat",
    "OneBitAdam",
    "OneBitLamb",
    "OneBitOptimizer",
    "ZeroOneAdam",
    "adamw_state",
    "attach",
    "compress_gradients",
    "follow",
    "load",
    "reform",
    "save",
]

_FOLDER = Path(__file__).resolve().parent
for _part in (kernels, collectives):  # inside the package or, in a checkout, beside it
    _place = Path(_part.__path__[0]).resolve().parent
    if _place not in (_FOLDER, _FOLDER.parent):
        raise ImportError(
            f"onebit is loaded from {_FOLDER} and {_part.__name__} from {_place}: two checkouts are mixed. Take one of "
            f"them out of PYTHONPATH, or install the one that you mean with pip install -e"
        )

_LATE = {
    "load": "onebit.checkpoint.save_load",
    "save": "onebit.checkpoint.save_load",
}


def __getattr__(name: str) -> Any:
    """Those that need torch.distributed.checkpoint, on their first use: it takes a second to import."""
    if name in _LATE:
        return getattr(import_module(_LATE[name]), name)
    raise AttributeError(f"module 'onebit' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
