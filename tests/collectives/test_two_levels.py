"""Two levels: what a node's ranks exchange is what one rank of the node's mean would, against the float64 oracle."""

import logging
import os
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from onebit.collectives import CompressedAllReduce, topology
from onebit.collectives.topology import Topology
from tests.collectives import steps, work
from tests.collectives.steps import Case
from tests.ranks import group, run_ranks, run_ranks_once

CASES = [
    Case((1000, 63, 129), chunks=2),
    Case((300, 7), chunks=3, norm="l2", reply=2),
    Case((300, 63), scale="tensor", norm="l2"),
    Case((1000, 5), chunks=2, reply="direct"),
    Case((300, 63), scale="tensor", chunks=2, reply="direct"),
    Case((300, 63), scale="tensor", chunks=2, reply=2),
    Case((63,), dtype="bfloat16"),
]


def own_node(rank, nodes, each):
    """The group of this rank's node, which all ranks make."""
    groups = [dist.new_group(list(range(n * each, (n + 1) * each))) for n in range(nodes)]
    return groups[rank // each]


def recorded(rank, size, nodes, cases):
    node = own_node(rank, nodes, size // nodes)
    return [steps.record(case, rank, None, all_reduce=case.all_reduce(group(), node_group=node)) for case in cases]


@pytest.mark.parametrize(
    ("nodes", "each"), [(2, 2), *(pytest.param(*s, marks=pytest.mark.slow) for s in ((3, 2), (2, 4), (4, 2)))]
)
def test_nodes_are_ranks_to_the_network(nodes, each):
    cases = [replace(case, nodes=nodes) for case in CASES if each == 2 or case.dtype == "float32"]
    runs = run_ranks_once(nodes * each, recorded, (nodes, cases))
    for case, ranks in zip(cases, zip(*runs, strict=True), strict=True):
        steps.check(case, list(ranks))


def level_of(rank, size):
    return Topology.of(group(), [dist.new_group([r]) for r in range(size)][rank]).node is None


def test_nodes_of_one_rank_are_one_level():
    assert run_ranks_once(3, level_of) == [True] * 3


def sent(rank, size, nodes, elements):
    node = own_node(rank, nodes, size // nodes)
    found = []
    for node_group in (node, None):
        average = CompressedAllReduce(elements, chunks=1, reply=1, process_group=group(), node_group=node_group)
        average(torch.randn(elements))
        found.append(average.wire_bytes)
    return found


def test_a_node_sends_what_one_rank_would():
    """With one level a node of 2 sends to 2 others twice 2/4 of the elements, of each of its ranks."""
    runs = run_ranks_once(4, sent, (2, 2**18))
    two, one = (sum(found[i] for found in runs[:2]) for i in (0, 1))
    assert one == pytest.approx(3 * two, rel=0.01)


def states_go_on(rank, size, case):
    node = own_node(rank, 2, 2)
    whole = steps.record(case, rank, None, all_reduce=case.all_reduce(group(), node_group=node))
    first = case.all_reduce(group(), node_group=node)
    steps.record(replace(case, steps=3), rank, None, all_reduce=first)
    second = case.all_reduce(group(), node_group=node)
    second.load_state_dict(first.state_dict())
    rest = steps.record(case, rank, None, first=3, all_reduce=second)
    return steps.same_state(whole.states[-1], rest.states[-1])


@pytest.mark.parametrize("reply", [1, *(pytest.param(r, marks=pytest.mark.slow) for r in (2, "direct"))])
def test_a_saved_state_goes_on_bit_for_bit(reply):
    assert run_ranks_once(4, states_go_on, (Case((300, 63), chunks=2, reply=reply),)) == [True] * 4


def with_a_bad_value(rank, size):
    average = CompressedAllReduce(300, chunks=2, process_group=group(), node_group=own_node(rank, 2, 2))
    average(torch.randn(300))
    before = {k: v.clone() for k, v in average.exchange.state_dict().items()}
    x = torch.randn(300)
    if rank == 3:
        x[7] = float("inf")
    average(x)
    same = all(torch.equal(v, before[k]) for k, v in average.exchange.state_dict().items())
    return bool(torch.isnan(x).all()), same


def test_what_is_not_finite_on_one_rank_gives_nan_on_all():
    assert run_ranks_once(4, with_a_bad_value) == [(True, True)] * 4


def auto(rank, size, hosts):
    """Sizes and places of this rank's groups, and what was logged."""
    os.environ["GROUP_RANK"] = str(hosts[rank])
    records = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())
    logging.getLogger("onebit").addHandler(handler)
    logging.getLogger("onebit").setLevel(logging.INFO)
    topology = Topology.of(group(), "auto")
    node = topology.node
    return topology.replicas.size, topology.replicas.rank, node and (node.size, node.rank), records


def test_hosts_are_found():
    assert [found[:3] for found in run_ranks_once(4, auto, ([0, 0, 1, 1],))] == [
        (2, 0, (2, 0)), (2, 0, (2, 1)), (2, 1, (2, 0)), (2, 1, (2, 1))
    ]  # fmt: skip
    mixed = run_ranks_once(4, auto, ([1, 0, 0, 1],))
    assert [found[:3] for found in mixed] == [(2, 0, (2, 0)), (2, 1, (2, 0)), (2, 0, (2, 1)), (2, 1, (2, 1))]
    assert any("2 nodes of 2 ranks" in line for line in mixed[0][3])


@pytest.mark.parametrize(
    "hosts", [[0, 0, 0, 1], *(pytest.param(h, marks=pytest.mark.slow) for h in ([0, 0, 0, 0], [0, 1, 2, 3]))], ids=str
)
def test_one_level_where_hosts_do_not_ask_for_two(hosts):
    found = run_ranks_once(4, auto, (hosts,))
    assert [each[:3] for each in found] == [(4, rank, None) for rank in range(4)]
    assert any("3, 1 ranks, not equally many" in line for line in found[0][3]) == (hosts == [0, 0, 0, 1])


def refused(rank, size, nodes):
    """The message of the error, for the ranks that each rank calls its node; None and "auto" stand for themselves."""
    wanted = nodes[rank]
    lists = sorted({tuple(ranks) for ranks in nodes if isinstance(ranks, list)})
    groups = {ranks: dist.new_group(list(ranks)) for ranks in lists}
    own = groups[tuple(wanted)] if isinstance(wanted, list) else wanted
    errors = []
    with work.error_of(errors):
        CompressedAllReduce(300, chunks=1, process_group=group(), node_group=own)(torch.ones(300))
    return errors


QUICK = ("unequal", "overlapping")
REFUSED = {
    "unequal": ([[0, 1, 2], [0, 1, 2], [0, 1, 2], [3]], "node_group: rank 3 has a node of 1, others have 3"),
    "an outsider": ([[0, 1]] * 4, "node_group of rank 2: this rank is not"),
    "overlapping": ([[0, 1], [1, 2], [2, 3], [0, 3]], "node_group: rank 0 has the ranks 0, 1, which have other groups"),
    "auto and none": (["auto", "auto", None, "auto"], "node_group"),
    "a group and auto": ([[0, 1], [0, 1], [2, 3], "auto"], "node_group is given on rank 0 and auto on rank 3"),
}


@pytest.mark.parametrize(
    ("nodes", "says"),
    [pytest.param(*own, id=name, marks=[pytest.mark.slow] * (name not in QUICK)) for name, own in REFUSED.items()],
)
def test_nodes_that_do_not_fit_are_refused_on_all_ranks(nodes, says):
    for errors in run_ranks_once(4, refused, (nodes,)):
        assert says in errors[0] and errors[0].startswith("ValueError")


def differing(rank, size, options):
    """Rank 0 has other options than the rest."""
    own = {"chunks": 1, **(options if rank == 0 else {})}
    errors, x = [], torch.ones(own.pop("numel", 300), dtype=own.pop("dtype", torch.float32))
    with work.error_of(errors):
        CompressedAllReduce(x.numel(), process_group=group(), node_group=own_node(rank, 2, 2), **own)(x)
    return errors


DIFFERENT = [
    {"block_size": 64}, {"chunks": 2}, {"scale": "tensor"}, {"reply": 1}, {"numel": 301}, {"dtype": torch.bfloat16}
]  # fmt: skip


@pytest.mark.parametrize(
    "options", [DIFFERENT[0], *(pytest.param(o, marks=pytest.mark.slow) for o in DIFFERENT[1:])], ids=str
)
def test_a_rank_that_differs_is_an_error_on_all_ranks(options):
    for errors in run_ranks_once(4, differing, (options,)):
        assert "the ranks do not agree: rank 0 has" in errors[0]


def of_parameters(rank, size):
    tensors = [torch.nn.Parameter(torch.full((40, 3), float(rank))), torch.nn.Parameter(torch.ones(5))]
    average = CompressedAllReduce([120, 5], chunks=1, process_group=group(), node_group=own_node(rank, 2, 2))
    average(tensors)
    return [float(t.mean()) for t in tensors]


def test_parameters_are_averaged_in_place():
    for first, second in run_ranks_once(4, of_parameters):
        assert first == pytest.approx(1.5) and second == pytest.approx(1.0)


def misplaced(rank, size):
    """A state of ranks 0 and 1 on one node, loaded where 0 and 2 are."""
    saved = CompressedAllReduce(300, chunks=1, process_group=group(), node_group=own_node(rank, 2, 2))
    saved(torch.randn(300))
    pairs = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    errors = []
    with work.error_of(errors):
        other = CompressedAllReduce(300, chunks=1, process_group=group(), node_group=pairs[rank % 2])
        other.load_state_dict(saved.state_dict())
    return errors


def test_a_state_of_another_place_is_refused():
    found = run_ranks_once(4, misplaced)
    assert [bool(errors) for errors in found] == [False, True, True, False]
    assert "the state was saved with slice 1, here it is 0" in found[1][0]


def test_a_host_is_told_by_its_name_and_boot_or_by_torchrun(monkeypatch):
    monkeypatch.delenv("GROUP_RANK", raising=False)
    here = topology.this_host()
    assert here == topology.this_host() and len(here) == 64
    monkeypatch.setattr(topology.socket, "gethostname", lambda: "another")
    assert topology.this_host() != here
    monkeypatch.setenv("GROUP_RANK", "3")
    assert topology.this_host() == "node 3"


def test_a_string_that_is_no_group():
    for errors in run_ranks(2, not_a_group):
        assert "can't communicate over a str" in errors[0]


def not_a_group(rank, size):
    errors = []
    with work.error_of(errors):
        Topology.of(group(), "hosts")
    return errors
