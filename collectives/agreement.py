"""Before the first exchange: do all ranks mean the same thing? A difference is an error on every rank, not a hang."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from onebit.collectives.transport import Transport

_NBYTES = 2048
_PIECE = 2**20
_PRIME = 1000003


def agree(transport: Transport, device: torch.device, facts: Mapping[str, float | str]) -> None:
    """Compare `facts` over all ranks; raise a ValueError on each that names who differs and in what."""
    text = json.dumps(facts, sort_keys=True).encode()
    if len(text) > _NBYTES:
        raise ValueError(f"{len(text)} bytes of facts to compare, {_NBYTES} at most")
    sent = torch.tensor(list(text.ljust(_NBYTES)), dtype=torch.uint8, device=device)
    everyone = gathered(transport, sent, "comparing the ranks' layouts (all-gather)")
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


def gathered(transport: Transport, values: Tensor, phase: str) -> Tensor:
    """`values`, a vector, of every rank: [size, len(values)]."""
    sent = values.view(torch.uint8)[None]
    everyone = torch.empty((transport.size, sent.shape[1]), dtype=torch.uint8, device=values.device)
    transport.all_gather(everyone, sent, phase).wait()
    return everyone.view(values.dtype)


def agree_on_values(transport: Transport, tensors: Sequence[Tensor], name: Callable[[int], str]) -> None:
    """Compare tensors bit for bit by a checksum of each; raise a ValueError on every rank that names the first."""
    everyone = gathered(transport, checksums(tensors), "comparing the ranks' parameters (all-gather)").cpu()
    common = everyone.mode(dim=0).values
    zeros = (everyone == everyone[0]).sum(0) >= (everyone == common).sum(0)  # rank 0 is right where opinions are even
    usual = torch.where(zeros, everyone[0], common)
    differs = (everyone != usual).nonzero()
    if len(differs) == 0:
        return
    first = int(differs[:, 1].min())
    ranks = sorted({int(rank) for rank, tensor in differs.tolist() if tensor == first})
    others = len({tensor for _, tensor in differs.tolist()}) - 1
    raise ValueError(
        f"the ranks do not agree: {name(first)} has other values on {_listed(ranks)} than on the rest"
        f"{f', and so have {others} more parameters' if others else ''}. Start every rank from the same "
        f"parameters: the same seed or checkpoint, or a broadcast from one rank"
    )


def checksums(tensors: Sequence[Tensor]) -> Tensor:
    """int64 [tensors]: a sum over the bits of each, weighted by their places."""
    return torch.stack([_checksum(t.detach()) for t in tensors])


def _checksum(tensor: Tensor) -> Tensor:
    words = tensor.contiguous().view(-1).view({4: torch.int32, 2: torch.int16, 8: torch.int64}[tensor.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for start in range(0, len(words), _PIECE):
        piece = words[start : start + _PIECE].long()
        places = torch.arange(start, start + len(piece), device=tensor.device)
        total = total * _PRIME + (piece * (2 * places + 1)).sum()
    return total


def _listed(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
