"""Do all ranks have the same options, and hold the same bits? A difference is an error on every rank, not a hang."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from onebit.collectives.transport.protocol import FACTS, CollectiveError, LocalTransport, Ranks, all_gather_values
from onebit.kernels.data.wire import MessageError

NODES = "node_group"  # a fact: ranks that differ in it have nothing else to compare
_MOST_JSON = 2**24  # bytes of one rank's text
_MOST_TEXTS = 5  # errors that are told of where ranks have different ones
_PIECE, _CUDA_PIECE = 2**16, 2**22  # words: what stays in a cache, what keeps a GPU busy
_PRIME = 1000003
LOCAL = LocalTransport()
_KINDS = {kind.__name__: kind for kind in (CollectiveError, TypeError, ValueError, OSError)}
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def agree(transport: Ranks, device: torch.device, facts: Mapping[str, float | str]) -> None:
    """Compare `facts` over all ranks; raise a ValueError on each that names who differs and in what."""
    everyone = all_gather_json(transport, device, dict(facts), f"comparing the ranks' layouts {FACTS}")
    texts = [json.dumps(each, sort_keys=True) for each in everyone]
    if len(set(texts)) == 1:
        return
    reference = texts.index(Counter(texts).most_common(1)[0][0])
    usual = everyone[reference]
    apart = [theirs for theirs in everyone if theirs.get(NODES) != usual.get(NODES)]
    names = {NODES} if apart else {name for theirs in everyone for name in theirs}
    differences = [
        f"{listed([rank], transport)} has {name} {theirs.get(name)!r} where {listed([reference], transport)} has "
        f"{usual.get(name)!r}"
        for rank, theirs in enumerate(everyone)
        for name in sorted(names)
        if theirs.get(name) != usual.get(name)
    ]
    raise ValueError(
        f"the ranks do not agree: {'; '.join(differences)}. Give every rank the same model and the same options"
    )


def raise_on_all(everyone: Ranks, device: torch.device, failed: Exception | None, others: str) -> None:
    """`failed`, if this rank has found something; where another one has, a ValueError that says `others`."""
    found = torch.tensor([int(failed is not None)], dtype=torch.int32, device=device)
    everyone.all_max(found, "comparing what was found (all-reduce of one number)")
    if failed is not None:
        raise failed
    if int(found):
        raise ValueError(others)


def gathered(everyone: Ranks, device: torch.device, work: Callable[[], Any], phase: str) -> list[Any]:
    """What `work` returns on every rank, which JSON can hold. Where `work` fails on some ranks, an error on all that
    says on which, and why."""
    value, failure, reason = None, None, None
    try:
        value = work()
    except Exception as error:
        kind = next((name for name, each in _KINDS.items() if isinstance(error, each)), "")
        failure, reason = error, [kind, str(error)]
    rows = all_gather_json(everyone, device, [value, reason], phase)
    failed: dict[str, list[int]] = {}  # ranks by what they say
    for rank, (_, why) in enumerate(rows):
        if why is not None:
            failed.setdefault(why[1], []).append(rank)
    if failed:
        on = [text if len(of) == everyone.size else f"{listed(of, everyone)}: {text}" for text, of in failed.items()]
        kind = next(why[0] for _, why in rows if why is not None)
        more = [f"and {len(on) - _MOST_TEXTS} more errors"] if len(on) > _MOST_TEXTS else []
        raise _KINDS.get(kind, RuntimeError)("; ".join([*on[:_MOST_TEXTS], *more])) from failure
    return [value for value, _ in rows]


def all_gather_json(transport: Ranks, device: torch.device, value: Any, phase: str) -> list[Any]:
    """`value`, which JSON can hold, of every rank. Nothing that comes from another rank is unpickled.

    Lengths first, then the texts, padded. A MessageError where a length or a text can't be what a rank has sent: no
    damaged length makes this rank allocate what no machine has.
    """
    text = json.dumps(value).encode()
    length = torch.tensor([len(text)], dtype=torch.int64, device=device)
    lengths = all_gather_values(transport, length, phase).view(-1).tolist()
    for rank, each in enumerate(lengths):
        if not 0 < each <= _MOST_JSON or (rank == transport.rank and each != len(text)):
            raise MessageError(
                f"{phase}: {listed([rank], transport)} announces {each} bytes, where 1 to {_MOST_JSON} are possible "
                f"and this rank has {len(text)}: the message was damaged on the way, or the rank runs another onebit"
            )
    sent = torch.frombuffer(bytearray(text.ljust(max(lengths))), dtype=torch.uint8).to(device)
    found = []
    for rank, row in enumerate(all_gather_values(transport, sent, phase).cpu()):
        try:
            found.append(json.loads(row.numpy().tobytes()))
        except ValueError as error:
            raise MessageError(
                f"{phase}: what came from {listed([rank], transport)} is no JSON ({error}): it was damaged on the "
                f"way, or the rank runs another onebit"
            ) from error
    return found


@dataclass(frozen=True)
class Mismatch:
    """A tensor on whose bits the ranks do not agree."""

    ranks: list[int]  # those that hold other values than `usual`
    usual: int  # a rank with the values that most ranks hold; rank 0 where opinions are even
    majority: bool  # whether more than half of all ranks hold them


def find_mismatches(transport: Ranks, tensors: Sequence[Tensor], phase: str) -> dict[int, Mismatch]:
    """Compare tensors bit for bit by a checksum of each: what is odd, by its number, the same on every rank."""
    everyone = all_gather_values(transport, checksums(tensors), phase).cpu()
    common = everyone.mode(dim=0).values
    zeros = (everyone == everyone[0]).sum(0) >= (everyone == common).sum(0)
    same = everyone == torch.where(zeros, everyone[0], common)
    found = {}
    for i in (~same.all(0)).nonzero().view(-1).tolist():
        agrees = same[:, i].tolist()
        odd = [rank for rank, good in enumerate(agrees) if not good]
        found[i] = Mismatch(odd, agrees.index(True), 2 * len(odd) < len(agrees))
    return found


def agree_on_values(transport: Ranks, tensors: Sequence[Tensor], name: Callable[[int], str]) -> None:
    """Raise a ValueError on every rank that names the first tensor on which they differ."""
    odd = find_mismatches(transport, tensors, "comparing the ranks' parameters (all-gather)")
    if not odd:
        return
    first, others = min(odd), len(odd) - 1
    ranks = listed(odd[first].ranks, transport)
    raise ValueError(
        f"the ranks do not agree: {name(first)} has other values on {ranks} than on the rest"
        f"{f', and so have {others} more parameters' if others else ''}. Start every rank from the same "
        f"parameters: the same seed or checkpoint, or a broadcast from one rank"
    )


def checksums(tensors: Sequence[Tensor]) -> Tensor:
    """int64 [tensors]: a sum over the bits of each, weighted by their places, modulo 2^64.

    Weights are odd, and those of a piece differ by less than 2^23: no flipped bit goes unseen, and no two words (of 32
    bits or less) of a piece that changed places.
    """
    return torch.stack([_checksum(t.detach()) for t in tensors])


def _checksum(tensor: Tensor) -> Tensor:
    words = tensor.contiguous().view(-1).view(_WORDS[tensor.element_size()])
    size = _CUDA_PIECE if tensor.is_cuda else _PIECE
    weights = torch.arange(1, 1 + 2 * min(size, len(words)), 2, device=tensor.device)
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for piece in words.split(size):
        total = total * _PRIME + (piece * weights[: len(piece)]).sum()
    return total


def listed(ranks: Sequence[int], of: Ranks = LOCAL) -> str:
    """Name ranks by their numbers among all processes, with their hosts."""
    hosts = {rank: of.host_of(rank) for rank in ranks}
    names = [f"{of.world_rank(rank)}" + (f" (on {host})" if host else "") for rank, host in hosts.items()]
    return f"rank{'s' * (len(names) > 1)} {', '.join(names)}"
