"""What parts of a saved state are called, beside the fields of the algorithm (see `onebit.checkpoint.schema`)."""

from __future__ import annotations

import re

BITS, SCALES = "momentum_bits", "momentum_scales"
ORDER = "memory_order"


def residual_name(rank: int) -> str:
    return f"residual_of_rank_{rank}"


def server_residual_name(rank: int) -> str:
    return f"server_residual_of_rank_{rank}"


def message_name(rank: int) -> str:
    return f"momentum_of_message_{rank}"


def rank_of(name: object) -> int | None:
    """Whose residual a name says it is."""
    return _number("residual_of_rank_", name)


def server_rank_of(name: object) -> int | None:
    return _number("server_residual_of_rank_", name)


def _number(prefix: str, name: object) -> int | None:
    found = re.fullmatch(rf"{prefix}([0-9]{{1,9}})", str(name))
    return int(found[1]) if found else None
