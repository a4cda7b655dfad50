"""Ranks that die, never come, or mean something else: an error on every other rank, in time, and never a hang."""

import re
from dataclasses import replace

import pytest

from tests.collectives import work_failures
from tests.collectives.steps import Case
from tests.limits import HUNG
from tests.ranks import run_ranks, run_ranks_once

TIMEOUT = 4.0  # of the group
SLACK = 4.0
CASE = Case((300,), chunks=2, steps=5)

GATHER = "the gather phase (all-to-all of chunk 1)"
SCATTER = "the scatter phase (all-gather of chunk 0)"
FINITE = "agreeing on finite values"


def check_errors(outcomes, who, *phases):
    for rank, outcome in enumerate(outcomes):
        if rank == who:
            assert outcome is None
            continue
        assert any(outcome.error.startswith(phase) for phase in phases), outcome
        assert "a rank died, did not come within the group's timeout" in outcome.error
        assert outcome.seconds < TIMEOUT + SLACK, outcome


@pytest.mark.parametrize("phase", [FINITE, GATHER, SCATTER])
@pytest.mark.parametrize("how", ["dies", "stays away"])
def test_the_others_name_the_phase_in_which_a_rank_is_missing(phase, how):
    outcomes = run_ranks_once(
        3, work_failures.run_until_error, (CASE, 1, phase, how), timeout=HUNG, group_timeout=TIMEOUT, expect_dead=[1]
    )
    check_errors(outcomes, 1, phase)
    assert [outcomes[rank].steps for rank in (0, 2)] == [1, 1]


def test_a_rank_that_never_comes_at_all():
    case = replace(CASE, steps=1)
    outcomes = run_ranks_once(
        3, work_failures.never_come, (case, 2), timeout=HUNG, group_timeout=TIMEOUT, expect_dead=[2]
    )
    check_errors(outcomes, 2, "comparing the ranks' layouts (all-gather)")


def test_a_rank_killed_at_any_moment():
    case = replace(CASE, steps=100_000)
    outcomes = run_ranks_once(
        4, work_failures.run_until_killed, (case, 0, 0.5), timeout=HUNG, group_timeout=TIMEOUT, expect_dead=[0]
    )
    check_errors(outcomes, 0, "the gather phase", "the scatter phase", FINITE)
    assert all(outcome.steps > 0 for outcome in outcomes[1:])


USUAL = Case((300, 63), 64, chunks=2, steps=2)
OTHERS = {
    "sizes": (replace(USUAL, numels=(300, 64)), "elements", 364, 363),
    "sizes of one sum": (replace(USUAL, numels=(63, 300)), "checksum of sizes", None, None),
    "number of tensors": (replace(USUAL, numels=(363,)), "parameters", 1, 2),
    "block_size": (replace(USUAL, block_size=32), "block_size", 32, 64),
    "scale": (replace(USUAL, scale="tensor"), "scale", "tensor", "block"),
    "norm": (replace(USUAL, norm="l2"), "norm", "l2", "l1"),
    "chunks": (replace(USUAL, chunks=1), "chunks", 1, 2),
}
FACTS = {fact for _, fact, *_ in OTHERS.values()}


@pytest.mark.parametrize("who", [0, 2])
@pytest.mark.parametrize("name", OTHERS)
def test_a_rank_that_means_something_else_is_named_on_every_rank(name, who):
    case, fact, theirs, usual = OTHERS[name]
    others = sorted({0, 1, 2} - {who})
    for error, untouched in run_ranks(3, work_failures.disagree, {-1: USUAL, who: case}):
        assert error.startswith("ValueError: the ranks do not agree: "), error
        pattern = rf"rank {who} has {fact} {theirs!r} where rank {others[0]} has {usual!r}[;.]"
        assert re.search(pattern.replace("None", r"\d+"), error), error
        assert not any(f"rank {rank} has {fact}" in error for rank in others for fact in FACTS), error
        assert untouched


def test_two_ranks_that_differ_are_both_named():
    cases = {-1: USUAL, 1: OTHERS["scale"][0], 3: OTHERS["norm"][0]}
    for error, _ in run_ranks(4, work_failures.disagree, cases):
        assert "rank 1 has scale 'tensor' where rank 0 has 'block'" in error
        assert "rank 3 has norm 'l2' where rank 0 has 'l1'" in error


def test_one_of_two():
    for error, _ in run_ranks(2, work_failures.disagree, {-1: USUAL, 1: OTHERS["block_size"][0]}):
        assert "rank 1 has block_size 32 where rank 0 has 64" in error


@pytest.mark.parametrize(
    "other",
    [
        {"numels": (20_000,)},
        {"scale": "tensor"},
        {"numels": (500,)},
        {"block_size": 2048},
        {"chunks": 2},
    ],
    ids=str,
)
def test_ranks_that_differ_and_measure(other):
    """With chunks="auto" the ranks talk before the layout is known."""
    usual = Case((8_000,), 32, chunks="auto", steps=2)
    outcomes = run_ranks_once(
        3, work_failures.disagree, ({-1: usual, 1: replace(usual, **other)},), timeout=HUNG, group_timeout=TIMEOUT
    )
    for error, untouched in outcomes:
        assert error.startswith("ValueError: the ranks do not agree: "), error
        assert "rank 1 has " in error
        assert untouched


def test_ranks_compare_once():
    for events in run_ranks(2, work_failures.agreed_again, USUAL):
        assert events == 2 * ["start comparing the ranks' layouts (all-gather)"]  # lengths, text
