"""chunks="auto": measured once on the group and cached; before that nothing that one rank does waits for the others."""

import json
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch

from onebit.collectives import chunking
from onebit.collectives.chunking import CANDIDATES, Chunking, candidates
from onebit.collectives.topology import Topology
from onebit.collectives.two_phases import TwoPhases
from onebit.kernels.tuning import tuner
from tests.collectives.steps import Case
from tests.collectives.work import Noting, logged
from tests.onebit.runs import on_ranks, same
from tests.ranks import group, run_ranks

RUNS = 3  # timed for each number of chunks
SECONDS = [[1.0, 5.0, 9.0, 9.0], [9.0, 4.0, 1.0, 9.0], [8.0, 2.0, 8.0, 1.0]]  # rank 0 alone would take 1, rank 1 take 4


def choices(rank, size, cases: list[Case], folders: list[str], seconds=SECONDS, small: int = 0) -> list[Any]:
    """Choose for one case after the other, in a process that has read nothing yet: the chunks, how often candidates
    were measured for it, and the phases of its collectives. Models of `small` elements take one chunk, for their
    flags."""
    made, real = [], Chunking.measure

    def measure(own: Chunking, options: Sequence[int]) -> dict[int, float]:
        readings = [t for s in seconds[rank] for t in [0.0, s] * RUNS]  # however long it really takes
        with patch.object(chunking, "time", Mock(perf_counter=Mock(side_effect=readings))):
            return real(own, options)

    few = patch.object(chunking, "MOST_ELEMENTS", small)
    own = patch.dict(os.environ, {"ONEBIT_CACHE_DIR": folders[rank]})
    tuner.forget()
    with own, few, patch.object(Chunking, "measure", autospec=True, side_effect=measure) as measured:
        for case in cases:
            transport, before = Noting(group()), measured.call_count
            chunks = case.all_reduce(transport).prepare().layout.chunks
            made.append((chunks, measured.call_count - before, transport.events))
    tuner.forget()
    return made


SIZE = 3
CASE = Case((12_288,), 32, chunks="auto", steps=2)  # 8 chunks * 3 ranks * 16 blocks * 32 elements
LAYOUTS = "comparing the ranks' layouts (all-gather of facts)"
ASKING = "finding out whether all ranks are on one host (all-reduce of two numbers)"
AGREEING = "agreeing on the number of chunks (all-reduce of one number)"
COMPARED, ASKED, AGREED = ([f"start {phase}", f"wait {phase}"] for phase in (LAYOUTS, ASKING, AGREEING))
BEST = 2  # of the slowest rank's seconds: 9, 5, 9, 9


@pytest.fixture
def folders(tmp_path):
    """A cache folder for each rank, as on machines of their own."""
    made = [tmp_path / f"rank-{rank}" for rank in range(SIZE)]
    for folder in made:
        folder.mkdir()
    return [str(folder) for folder in made]


def entries(folder):
    return json.loads(Path(folder, "kernels.json").read_text())["choices"]


def write(folder, key, choice):
    Path(folder, "kernels.json").write_text(json.dumps({"onebit": 1, "choices": {key: choice}}))


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


def test_measured_once_and_cached_for_a_size_and_for_one_host_or_several(folders):
    """Rank 0 does it for all: other ranks may have caches of their own, or none. Later processes read it."""
    similar, larger = replace(CASE, numels=(12_000, 500), scale="tensor"), replace(CASE, numels=(40_000,))
    first, *later = agreed(run_ranks(SIZE, choices, [CASE, CASE, similar], folders))
    assert first[:2] == (BEST, 1)
    assert entries(folders[0]) == {KEY: {"chunks": BEST}}
    for choice in [*later, *agreed(run_ranks(SIZE, choices, [similar, CASE], folders))]:
        assert choice == (BEST, 0, [*COMPARED, *COMPARED, *ASKED, *AGREED])
    of_hosts = [agreed(run_ranks(SIZE, choices_on_hosts, folders)) for _ in range(2)]
    assert [[measured for _, measured, _ in found] for found in of_hosts] == [[1], [0]]
    assert set(entries(folders[0])) == {KEY, KEY.replace(", one host", "")}
    alike = [[3.0, 2.0, 2.0, 2.0]] * SIZE  # of equally fast ones the fewest chunks
    others = [larger, replace(CASE, bits=4), replace(CASE, reply="direct")]
    assert [each[:2] for each in agreed(run_ranks(SIZE, choices, others, folders, alike))] == [(2, 1)] * 3
    kinds = [key.removeprefix(KEY.removesuffix(", chunks")) for key in entries(folders[0]) if "2^14" in key]
    assert len(entries(folders[0])) == 5 and {", 4 bits, chunks", ", reply direct, chunks"} < set(kinds)


def choices_on_hosts(rank, size, folders):
    """Choose on two hosts, numbered as torchrun does."""
    with patch.dict(os.environ, {"GROUP_RANK": str([0, 0, 1][rank])}):
        return choices(rank, size, [CASE], folders)


def choices_where_memory_is_short(rank, size, folders, most):
    """Choose while rank 1 has no memory for an exchange of more chunks than `most`."""

    class Large(TwoPhases):
        def __init__(self, topology, layout, *more):
            if rank == 1 and layout.chunks > most:
                raise torch.OutOfMemoryError("CUDA out of memory")
            super().__init__(topology, layout, *more)

    own = patch.dict(os.environ, {"ONEBIT_CACHE_DIR": folders[rank]})
    tuner.forget()
    with own, patch.object(chunking, "MOST_ELEMENTS", 0), logged() as texts:
        chunks = Chunking(
            Topology.of(group()), 12_288, torch.device("cpu"), block_size=32, exchange_class=Large
        ).choose()
    tuner.forget()
    return chunks, [text for text in texts if ("measured on the group" if most == 8 else "no memory") in text]


@pytest.mark.parametrize("most", [0, 1, 2, 8])
def test_a_rank_without_memory_to_measure_ends_the_measuring_on_all(folders, most):
    """It does not end the run, at its freeze. What was not compared with all others is not remembered. With 8 chunks
    there is memory for all, and rank 0 says what was measured."""
    found = run_ranks(SIZE, choices_where_memory_is_short, folders, most)
    assert {chunks for chunks, _ in found} <= {1, *CANDIDATES[: most.bit_length()]} and len({c for c, _ in found}) == 1
    assert [len(texts) for _, texts in found] == [1, 0, 0]
    assert Path(folders[0], "kernels.json").exists() == (most == 8)


FOREIGN = [{"rows": 4}, *({"chunks": each} for each in (3, 16, 0, -1, "4", None, [4]))]


def test_the_cache_of_rank_0_counts_for_all_and_no_other_and_a_foreign_value_is_measured_over(folders):
    write(folders[1], KEY, {"chunks": 8})
    for own, found in ((None, (BEST, 1)), ({"chunks": 4}, (4, 0)), *((each, (BEST, 1)) for each in FOREIGN)):
        if own:
            write(folders[0], KEY, own)
        (choice,) = agreed(run_ranks(SIZE, choices, [CASE], folders))
        assert choice[:2] == found, own
        assert entries(folders[0])[KEY] == {"chunks": found[0]}


@pytest.mark.parametrize("size, numel, small", [(1, 12_288, 0), (SIZE, 3_071, 0), (SIZE, 12_288, 12_288)])
def test_where_there_is_nothing_to_choose_nothing_is_measured(folders, size, numel, small):
    """One rank, a small tensor, or a model whose message carries its flags."""
    (choice,) = agreed(run_ranks(size, choices, [replace(CASE, numels=(numel,))], folders, SECONDS, small))
    assert choice == (1, 0, [*COMPARED, *COMPARED])  # lengths, text
    (choice,) = agreed(run_ranks(SIZE, choices, [CASE], folders, SECONDS, 12_287))
    assert choice[1] == 1


@on_ranks(SIZE)
def test_properties_and_states_are_no_collectives(rank):
    """Rank 1 reads every property and saves, while the others do nothing; then all prepare, and call it."""
    transport = Noting(group())
    all_reduce = CASE.all_reduce(transport)
    if rank == 1:
        assert (all_reduce.exchange, all_reduce.chunks, all_reduce.wire_bytes) == (None, None, 0)
        zeros = {"residual": [torch.zeros(numel) for numel in CASE.numels], "wire_bytes": 0}
        assert all_reduce.synchronized and same(all_reduce.state_dict(), zeros)
        all_reduce.load_state_dict(zeros)
    all_reduce.synchronize()  # before the first call there is nothing to do
    assert transport.events == []
    exchange = all_reduce.prepare()
    measured = len(transport.events)
    assert measured > 0 and all_reduce.exchange is exchange is all_reduce.prepare()
    tensors = CASE.inputs(rank, 0)
    all_reduce(tensors)
    assert all_reduce.exchange is exchange
    assert not any("number of chunks" in event for event in transport.events[measured:])
    return all_reduce.chunks, tensors
