"""chunks="auto": measured once on the group, the same on all ranks, cached; foreign entries count for nothing."""

import json
from dataclasses import replace

import pytest

from onebit.collectives import CompressedAllReduce
from onebit.collectives.chunking import CANDIDATES, candidates
from tests.collectives import steps, work_chunks
from tests.collectives.steps import Case
from tests.ranks import run_ranks

SIZE = 3
CASE = Case((12_288,), 32, chunks="auto", steps=2)  # 8 chunks * 3 ranks * 16 blocks * 32 elements
ALL = [1, 2, 4, 8]
SECONDS = [[1.0, 5.0, 9.0, 9.0], [9.0, 4.0, 1.0, 9.0], [8.0, 2.0, 8.0, 1.0]]  # rank 0 alone would take 1, rank 1 take 4
COMPARED = 2 * [f"{event} comparing the ranks' layouts (all-gather)" for event in ("start", "wait")]  # lengths, text
ASKING = "all_max finding out whether all ranks are on one host (all-reduce of two numbers)"
AGREEING = "all_max agreeing on the number of chunks (all-reduce of one number)"
BEST = 2  # of the slowest rank's seconds: 9, 5, 9, 9


@pytest.fixture
def folders(tmp_path):
    """A cache folder for each rank, as on machines of their own."""
    made = [tmp_path / f"rank-{rank}" for rank in range(SIZE)]
    for folder in made:
        folder.mkdir()
    return [str(folder) for folder in made]


def entries(folder):
    return json.loads(open(f"{folder}/kernels.json").read())["choices"]


def write(folder, key, choice):
    with open(f"{folder}/kernels.json", "w") as file:
        json.dump({"onebit": 1, "choices": {key: choice}}, file)


KEY = f"gloo, {SIZE} ranks, one host, cpu, 2^{(12_288).bit_length()} elements, chunks"


def agreed(answers):
    """What every rank answered, which must be the same."""
    assert all(answer == answers[0] for answer in answers), answers
    return answers[0]


def test_candidates_have_a_chunk_worth_its_latency():
    assert CANDIDATES == (1, 2, 4, 8)
    for chunks in (2, 4, 8):
        enough = chunks * 3 * 16 * 2048
        assert candidates(enough, 3, 2048)[-1] == chunks
        assert candidates(enough - 1, 3, 2048)[-1] == chunks // 2
    assert candidates(1, 1, 32) == candidates(10_000, 64, 2048) == [1]
    assert candidates(10**12, 64, 2048) == list(CANDIDATES)


def test_all_ranks_use_what_is_fastest_for_the_slowest(folders):
    (choice,) = agreed(run_ranks(SIZE, work_chunks.choices, [CASE], folders, SECONDS))
    assert (choice.chunks, choice.measured) == (BEST, 1)
    assert entries(folders[0]) == {KEY: {"chunks": BEST}}


def test_of_equally_fast_ones_the_fewest_chunks(folders):
    (choice,) = agreed(run_ranks(SIZE, work_chunks.choices, [CASE], folders, [[3.0, 2.0, 2.0, 2.0]] * SIZE))
    assert choice.chunks == 2


@pytest.mark.parametrize("fresh", [False, True])
def test_measured_once_and_cached(folders, fresh):
    """By rank 0 for all: other ranks may have caches of their own, or none."""
    similar = replace(CASE, numels=(12_000, 500), scale="tensor")
    first, *later = agreed(run_ranks(SIZE, work_chunks.choices, [CASE, CASE, similar], folders, SECONDS, fresh))
    assert (first.chunks, first.measured) == (BEST, 1)
    for choice in later:
        assert (choice.chunks, choice.measured) == (BEST, 0)
        assert choice.phases == [
            *COMPARED,
            ASKING,
            "all_max agreeing on the number of chunks (all-reduce of one number)",
        ]


def test_another_size_is_measured_anew(folders):
    larger = replace(CASE, numels=(40_000,))
    first, second = agreed(run_ranks(SIZE, work_chunks.choices, [CASE, larger], folders, SECONDS))
    assert (first.measured, second.measured) == (1, 1)
    assert len(entries(folders[0])) == 2


def test_a_trial_on_one_host_says_nothing_of_several(folders):
    """Where messages pass a network it is measured anew, and both are kept."""
    first = agreed(run_ranks(SIZE, work_chunks.choices, [CASE], folders, SECONDS))
    again, later = (
        agreed(run_ranks(SIZE, work_chunks.choices_on_hosts, [CASE], folders, SECONDS, [0, 0, 1])) for _ in range(2)
    )
    assert [[c.measured for c in found] for found in (first, again, later)] == [[1], [1], [0]]
    assert set(entries(folders[0])) == {KEY, KEY.replace(", one host", "")}


def test_the_cache_of_rank_0_counts_for_all(folders):
    """Whatever is in the caches of the others."""
    write(folders[0], KEY, {"chunks": 4})
    write(folders[1], KEY, {"chunks": 8})
    (choice,) = agreed(run_ranks(SIZE, work_chunks.choices, [CASE], folders, SECONDS))
    assert (choice.chunks, choice.measured) == (4, 0)


def test_the_cache_of_another_rank_counts_for_nothing(folders):
    write(folders[1], KEY, {"chunks": 8})
    (choice,) = agreed(run_ranks(SIZE, work_chunks.choices, [CASE], folders, SECONDS))
    assert (choice.chunks, choice.measured) == (BEST, 1)


@pytest.mark.parametrize(
    "foreign",
    [
        {"chunks": 3},
        {"chunks": 16},
        {"chunks": 0},
        {"chunks": -1},
        {"chunks": "4"},
        {"rows": 4},
        {"chunks": None},
        {"chunks": [4]},
    ],
    ids=str,
)
def test_a_foreign_value_is_measured_over(folders, foreign):
    write(folders[0], KEY, foreign)
    (choice,) = agreed(run_ranks(SIZE, work_chunks.choices, [CASE], folders, SECONDS))
    assert (choice.chunks, choice.measured) == (BEST, 1)
    assert entries(folders[0])[KEY] == {"chunks": BEST}


@pytest.mark.parametrize("size, numels", [(1, (12_288,)), (SIZE, (3_071,))], ids=["one rank", "a small tensor"])
def test_where_there_is_nothing_to_choose_nothing_is_measured(folders, size, numels):
    (choice,) = agreed(run_ranks(size, work_chunks.choices, [replace(CASE, numels=numels)], folders, SECONDS))
    assert choice == work_chunks.Choice(1, 0, COMPARED)


@pytest.mark.parametrize("small, chunks, measured", [(12_288, 1, 0), (12_287, BEST, 1)])
def test_a_model_whose_message_carries_its_flags_has_one_chunk(folders, small, chunks, measured):
    (choice,) = agreed(run_ranks(SIZE, work_chunks.choices, [CASE], folders, SECONDS, False, small))
    assert (choice.chunks, choice.measured) == (chunks, measured)


def test_a_real_measurement_and_a_run_with_what_it_chose(folders):
    answers = run_ranks(SIZE, work_chunks.really_measured, CASE, folders[0])
    options, seen, _ = answers[0]
    assert options == ALL and [chunks for chunks, _ in seen] == ALL
    assert all(seconds > 0 for _, seconds in seen)
    assert all(answer[1] == seen for answer in answers), "the ranks do not agree on the slowest rank's seconds"
    recorded = [answer[2] for answer in answers]
    chosen = agreed([run.states[0]["chunks"] for run in recorded])
    assert chosen == entries(folders[0])[KEY]["chunks"]
    steps.check(replace(CASE, chunks=chosen), recorded)


def test_a_state_brings_its_number_of_chunks():
    """No measurement, and no collective: one rank may load alone."""
    answers = run_ranks(SIZE, work_chunks.loaded_alone, replace(CASE, numels=(700,), chunks=5), 1)
    assert answers == [None, (5, 0, True), None]


def test_a_state_with_other_chunks_than_those_in_use_replaces_them():
    saved, other = (CompressedAllReduce(500, block_size=32, chunks=chunks) for chunks in (3, "auto"))
    assert other.prepare().layout.chunks == 1
    other.load_state_dict(saved.state_dict())
    assert other.chunks == 3


def test_no_bytes_are_counted_before_the_first_use():
    assert CompressedAllReduce(10**6).wire_bytes == 0
