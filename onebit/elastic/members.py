"""What ranks say of themselves before anything changes: an error that one of them has is an error on all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from onebit.collectives.agreement import listed
from onebit.collectives.transport.protocol import Ranks
from onebit.elastic.moving import group_values
from onebit.optim.steps import Step, SyncStep
from onebit.optimizers.optimizer import OneBitOptimizer

NEW = "On a rank that joins build a new model and optimizer, take no step and load nothing"


def is_new(inner: OneBitOptimizer) -> bool:
    """Return whether a rank has begun no step and loaded nothing. Reading it waits for the device."""
    return not inner.run.state.ranks_agree and not bool(inner.run.state.stages.counts.any())


@dataclass(frozen=True)
class Member:
    """A rank of the new group, in a form that JSON can hold."""

    new: bool
    reforms: int  # how often the run has gone on with other ranks
    ranks: int  # of the group that there was
    kept: list[int]  # the places in it of those whose residuals this rank goes on with
    before: dict[str, Any]  # the same of the group before the last reform: see `Own.go_on`
    attempts: int  # steps taken or skipped, with a local one whose exchange is still to come
    skipped: int
    mean_norm: list[float]  # what clipping knows of gradients
    alone: int  # local steps since the last exchange
    local: list[Any]  # what they have come to
    open: bool  # whether the exchange after local steps has begun, or is due
    under_way: bool  # whether an exchange has begun, and its step has not ended
    can_undo: bool
    has_averages: bool  # of a full step that has not ended
    compressing: bool
    chunks: list[int]
    overlaps: bool  # whether overlap is wanted, and was not turned off
    follows: bool  # whether a rank that joins has a state by onebit.follow
    cannot_give: str  # why this rank can give no state to one that joins

    @classmethod
    def of(cls, inner: OneBitOptimizer, kept: list[int]) -> Member:
        state, coming, topology = inner.run.state, inner.coming, inner.setup.topology
        counts, under_way, alone = state.stages.counts.tolist(), state.under_way, state.local_steps_taken
        ends_local_steps = under_way is not None and (coming is None or isinstance(coming, SyncStep))
        is_due = alone > 0 and inner.setup.algorithm.kind(counts[0]) == "sync"
        return cls(
            new=is_new(inner),
            reforms=inner.reforms,
            ranks=topology.nodes * topology.slices,
            kept=kept,
            before=inner.before_reform,
            attempts=sum(counts) + (ends_local_steps and coming is not None),
            skipped=counts[1],
            mean_norm=state.mean_norm.numbers.tolist(),
            alone=alone,
            local=state.local_progress,
            open=ends_local_steps or is_due,
            under_way=under_way is not None,
            can_undo=under_way is None or bool(under_way.undo),
            has_averages=type(coming) is Step and inner.begun,
            compressing=state.stages.compressing,
            chunks=[each.layout.chunks for each in state.compressed],
            overlaps=inner.overlap.wanted,
            follows=inner.follower is not None,
            cannot_give=_why_not(lambda: group_values(inner)),
        )

    @property
    def met(self) -> int:
        """The last step after which this rank had the same parameters as others."""
        return self.attempts - self.alone

    def known_as(self, reforms: int) -> tuple[int, list[int]] | None:
        """Return what the group after so many reforms knew: its number of ranks, and whose residuals this rank had.
        None if the rank has taken steps since."""
        if reforms == self.reforms:
            return self.ranks, self.kept
        if reforms == self.reforms - 1 and self.before["attempts"] == self.attempts:
            return self.before["ranks"], self.before["kept"]
        return None


def _why_not(work: Callable[[], Any]) -> str:
    try:
        work()
    except Exception as error:
        return str(error)
    return ""


@dataclass(frozen=True)
class Members:
    """All ranks of the new group."""

    everyone: Ranks
    rows: Sequence[Member]

    @property
    def stayers(self) -> list[int]:
        return [rank for rank, each in enumerate(self.rows) if not each.new]

    @property
    def joining(self) -> list[int]:
        """None where all ranks are new: these begin a run."""
        return [rank for rank, each in enumerate(self.rows) if each.new and self.stayers]

    @property
    def reforms(self) -> int:
        """Which group all have been in: a rank that died in the last reform may have left some in the one before."""
        return min((self.rows[rank].reforms for rank in self.stayers), default=0)

    @property
    def kept(self) -> list[list[int]]:
        """Each rank's list of the places in the group before the reform of those whose residuals the rank goes on
        with."""
        return [[] if each.new else self._known(each)[1] for each in self.rows]

    @property
    def ranks_before(self) -> int:
        """The size of the group before the reform."""
        return self._known(self.rows[self.stayers[0]])[0]

    @property
    def gone(self) -> list[int]:
        """The places in that group of those whose residuals are lost."""
        return sorted(set(range(self.ranks_before)) - {place for places in self.kept for place in places})

    @property
    def left(self) -> int:
        """How many ranks of that group are not there any more."""
        return self.ranks_before - len(self.stayers)

    @property
    def overlap(self) -> bool:
        """Return whether all want overlap: a rank that joins has not seen it turned off."""
        return all(each.overlaps for each in self.rows)

    def name(self, rank: int) -> str:
        return listed([rank], self.everyone)

    def check(self) -> None:
        """A ValueError, the same on all ranks, where they can't go on from one run."""
        if not self.stayers and any(row.follows for row in self.rows):
            raise ValueError(
                "none of the ranks is one of the run that was followed, whose state would be lost: load the last "
                "checkpoint, or begin anew with a new optimizer"
            )
        first = self.rows[self.stayers[0]].known_as(self.reforms) if self.stayers else None
        for rank in self.stayers:
            known = self.rows[rank].known_as(self.reforms)
            if known is None or first is None or known[0] != first[0]:
                raise ValueError(
                    f"{self.name(rank)} has gone on with other ranks than others have, or was in a group of another "
                    f"size: they do not go on from one run. {NEW}"
                )
            if self.joining and self.rows[rank].cannot_give:
                raise ValueError(f"{self.name(rank)}: {self.rows[rank].cannot_give}")
        kept = [place for places in self.kept for place in places]
        if len(set(kept)) < len(kept):
            raise ValueError(
                f"ranks say that they were {sorted(kept)} of one group: they do not belong to one run. {NEW}"
            )

    def _known(self, member: Member) -> tuple[int, list[int]]:
        known = member.known_as(self.reforms)
        assert known is not None, "check comes first"
        return known
