"""Now and then: do all ranks still hold the same bits? A difference is an error on every rank.

Ranks that hold the same parameters and average the same messages move alike, bit for bit. A bit that flips in one
rank's memory, or on its way to one rank, ends that, and nothing else would show it: each rank trains on, on a model of
its own. What is compared is all that must be equal, by a checksum of each tensor; residuals and buffers of the model
are each rank's own.

A check reads 4 + 4 + 1/8 bytes an element in stage 2 of 1-bit Adam, and sends 8 bytes a tensor.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from torch import Tensor

from onebit.collectives.agreement import Mismatch, find_mismatches, listed
from onebit.collectives.transport.protocol import Ranks
from onebit.optim.run import Run


class DivergenceError(RuntimeError):
    """Ranks that must hold the same bits do not."""


class Watch:
    """Counts the calls of `step`, which are the same on all ranks, and compares after every `every` of them."""

    def __init__(self, every: int) -> None:
        self._every, self._calls, self._due = every, 0, False

    def check(self, run: Run) -> None:
        """Compare the ranks at the end of a step if a check is due, which is a collective call; between two exchanges
        of local steps it waits for the next."""
        setup, transport = run.setup, run.setup.topology.data_parallel
        self._calls += 1
        self._due |= bool(self._every) and self._calls % self._every == 0
        if not self._due or not run.state.synchronized or transport.size == 1:
            return
        self._due = False
        failed = _compare(transport, run)
        others = "the replicas of another part of the parameters do not hold the same bits: their error says which"
        setup.topology.raise_together(failed, setup.device, others)


def _compare(transport: Ranks, run: Run) -> DivergenceError | None:
    """What to raise, if anything."""
    tensors = dict(shared_tensors(run))
    found = find_mismatches(transport, list(tensors.values()), "comparing the ranks' state (all-gather)")
    if not found:
        return None
    text = _description(list(tensors), found, transport)
    if not all(one.majority for one in found.values()):
        text += ". No values are held by more than half of the ranks, which alone would show who is right"
    steps = int(run.state.stages.counts[0])
    return DivergenceError(
        f"after {steps} steps the ranks do not hold the same bits: {text}. Load the last checkpoint on all ranks"
    )


def shared_tensors(run: Run) -> Iterator[tuple[str, Tensor]]:
    """All that is equal on every rank, by name: each parameter and its state, then what parameters have in common."""
    for state in run.state.states:
        for i, p in enumerate(state.stored(state.values_now())):
            name = run.setup.name_of(state.params[i])
            assert p is not None
            yield f"parameter {name}", p.detach()
            for field in state.fields.values():
                if field.per == "element" and field.same_on_all_ranks:
                    yield f"{field.name} of parameter {name}", state.elements_of(state[field.name], i)
    for part in run.state.parts:
        yield from ((f"{k} of all {part.state.dtype} parameters", v) for k, v in part.shared_tensors())
    yield "the count of steps", run.state.stages.counts
    yield "what clipping knows of gradients", run.state.mean_norm.numbers


def _description(names: Sequence[str], found: Mapping[int, Mismatch], of: Ranks) -> str:
    first, *others = sorted(found)
    usual = listed([found[first].usual], of)
    text = f"{names[first]} has other values on {listed(found[first].ranks, of)} than on {usual}"
    if others:
        ranks = listed(sorted({rank for i in others for rank in found[i].ranks}), of)
        text += f", and {len(others)} more tensors differ on {ranks} (the first is {names[others[0]]})"
    return text
