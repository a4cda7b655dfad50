"""Before the first exchange: do all ranks mean the same thing? A difference is an error on every rank, not a hang."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping

import torch

from onebit.collectives.transport import Transport

_NBYTES = 1024


def agree(transport: Transport, device: torch.device, facts: Mapping[str, int | str]) -> None:
    """Compare `facts` over all ranks; raise a ValueError on each that names who differs and in what."""
    text = json.dumps(facts, sort_keys=True).encode()
    if len(text) > _NBYTES:
        raise ValueError(f"{len(text)} bytes of facts to compare, {_NBYTES} at most")
    sent = torch.tensor(list(text.ljust(_NBYTES)), dtype=torch.uint8, device=device)[None]
    everyone = torch.empty((transport.size, _NBYTES), dtype=torch.uint8, device=device)
    transport.all_gather(everyone, sent, "comparing the ranks' layouts (all-gather)").wait()
    texts = [bytes(row.tolist()).rstrip() for row in everyone.cpu()]
    if len(set(texts)) == 1:
        return
    usual = json.loads(Counter(texts).most_common(1)[0][0])
    reference = next(rank for rank, t in enumerate(texts) if json.loads(t) == usual)
    differences = [
        f"rank {rank} has {name} {theirs.get(name)!r} where rank {reference} has {usual.get(name)!r}"
        for rank, theirs in enumerate(map(json.loads, texts))
        for name in sorted(usual.keys() | theirs.keys())
        if theirs.get(name) != usual.get(name)
    ]
    raise ValueError(
        f"the ranks do not agree: {'; '.join(differences)}. Give every rank the same model and the same options"
    )
