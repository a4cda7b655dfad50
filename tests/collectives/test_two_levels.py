"""Two levels: what a node's ranks exchange is what one rank of the node's mean would, against the float64 oracle."""

import os
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from onebit import OneBitAdam
from onebit.collectives import CompressedAllReduce, topology
from onebit.collectives.topology import Topology
from onebit.collectives.transport import transport_for
from onebit.collectives.transport.protocol import LocalTransport
from onebit.collectives.transport.torch import SMALL
from tests import internals
from tests.collectives import steps, work
from tests.collectives.steps import Case
from tests.onebit.runs import nodes_of, on_ranks
from tests.ranks import group, run_ranks

CASES = [
    Case((1000, 63, 129), chunks=2),
    Case((300, 7), chunks=3, norm="l2"),
    Case((300, 63), scale="tensor", norm="l2"),
    Case((1000, 5), chunks=2, reply="direct"),
    Case((300, 63), scale="tensor", chunks=2, reply="direct"),
    Case((300, 63), scale="tensor", chunks=2),
    Case((63,), dtype="bfloat16"),
]


def recorded(rank, size, nodes, each, cases):
    """Record cases on the first ranks of the pool."""
    made = group() if nodes * each == size else dist.new_group(range(nodes * each))
    if rank < nodes * each:
        return [steps.record(case, rank, nodes_of(made, each)) for case in cases]


@pytest.mark.parametrize(("nodes", "each"), [(2, 2), (3, 2), (2, 4)])
def test_nodes_are_ranks_to_the_network(nodes, each):
    """Two nodes of four with every other case."""
    cases = [replace(case, nodes=nodes) for case in (CASES[:6:2] if each == 4 else CASES)]
    runs = run_ranks(4 if nodes * each == 4 else 8, recorded, nodes, each, cases)[: nodes * each]
    for case, ranks in zip(cases, zip(*runs, strict=True), strict=True):
        steps.check(case, list(ranks))


@on_ranks(4)
def test_a_node_of_two_sends_a_third_of_the_bytes_of_two_ranks(rank):
    """It sends half of the elements; with one level each of its ranks sends to two others."""
    sent = []
    for node_group in (nodes_of(group(), 2).node, None):
        options = {"chunks": 1, "reply": 1, "process_group": group(), "node_group": node_group}
        average, x = CompressedAllReduce(2**18, **options), torch.full((2**18,), float(rank), requires_grad=True)
        average(x)
        assert x.mean().item() == pytest.approx(1.5)
        sent.append(average.wire_bytes)
    assert sent[1] == pytest.approx(3 * sent[0], rel=0.01)


@on_ranks(4)
def test_nodes_of_one_rank_are_one_level(rank):
    assert Topology.of(group(), transport_for(group()).split(rank)).node is None


EVEN = [(2, node, (2, place)) for node in (0, 1) for place in (0, 1)]
ALL_ALIKE = [(4, rank, None) for rank in range(4)]


@pytest.mark.parametrize("hosts, places, says", [
    ([0, 0, 1, 1], EVEN, "2 nodes of 2 ranks"),
    ([1, 0, 0, 1], [EVEN[0], EVEN[2], EVEN[1], EVEN[3]], "2 nodes of 2 ranks"),
    ([0, 0, 0, 1], ALL_ALIKE, "3, 1 ranks, not equally many"),
    ([0, 0, 0, 0], ALL_ALIKE, None),
    ([0, 1, 2, 3], ALL_ALIKE, None),
], ids=str)  # fmt: skip
@on_ranks(4)
def test_two_levels_where_hosts_have_equally_many_ranks(rank, hosts, places, says):
    """places: sizes and ranks of the groups of each rank."""
    with patch.dict(os.environ, {"GROUP_RANK": str(hosts[rank])}), work.logged() as said:
        found = Topology.of(group(), "auto")
    node = found.node and (found.node.size, found.node.rank)
    assert (found.replicas.size, found.replicas.rank, node) == places[rank]
    if rank == 0:
        assert any(says in line for line in said) if says else said == []


REFUSED = {
    "unequal": ([[0, 1, 2], [0, 1, 2], [0, 1, 2], [3]], "node_group: rank 3 has a node of 1, others have 3"),
    "an outsider": ([[0, 1]] * 4, "node_group of rank 2: this rank is not"),
    "overlapping": ([[0, 1], [1, 2], [2, 3], [0, 3]], "node_group: rank 0 has the ranks 0, 1, which have other groups"),
    "auto and none": (["auto", "auto", None, "auto"], "node_group"),
    "a group and auto": ([[0, 1], [0, 1], [2, 3], "auto"], "node_group is given on rank 0 and auto on rank 3"),
    "no group": (["hosts"] * 4, "can't communicate over a str"),
}


@on_ranks(4, once=True)
def test_nodes_that_do_not_fit_are_refused_on_all_ranks(rank):
    """The ranks that each rank calls its node; None and strings stand for themselves."""
    for nodes, says in REFUSED.values():
        lists = sorted({tuple(ranks) for ranks in nodes if isinstance(ranks, list)})
        groups = {ranks: dist.new_group(list(ranks)) for ranks in lists}
        own = groups[tuple(nodes[rank])] if isinstance(nodes[rank], list) else nodes[rank]
        with pytest.raises(ValueError, match=says):
            CompressedAllReduce(300, chunks=1, process_group=group(), node_group=own)(torch.ones(300))


def test_a_host_is_told_by_its_name_and_boot_and_by_torchrun(monkeypatch):
    """Each of several torchruns has a node 0."""
    names = []
    for host, node in (("one", None), ("another", None), ("another", "0"), ("one", "0"), ("one", "1")):
        monkeypatch.setattr(topology.socket, "gethostname", lambda host=host: host)
        monkeypatch.delenv("GROUP_RANK", raising=False)
        if node is not None:
            monkeypatch.setenv("GROUP_RANK", node)
        assert topology.this_host() == topology.this_host()
        names.append(topology.this_host())
    assert len(set(names)) == 5


@on_ranks(3)
def test_ranks_of_several_launchers_gather_alike(rank):
    """Torchrun's variables say of the last one alone that each host has one rank."""
    own = torch.full((1, SMALL + 1), rank, dtype=torch.uint8)
    with patch.dict(os.environ, {"WORLD_SIZE": "1" if rank == 2 else "2", "GROUP_WORLD_SIZE": "1"}):
        for node_group in ("auto", None):
            everyone = Topology.of(group(), node_group).everyone
            for ranks in (everyone.duplicate(), everyone, everyone.split(0)):
                out = torch.full((3, SMALL + 1), 255, dtype=torch.uint8)
                ranks.all_gather(out, own, "gathering").wait()
                assert out[:, -1].tolist() == [0, 1, 2]


def test_the_topology_of_a_process_alone_and_one_that_is_taken_as_it_is_where_it_fits_the_parameters():
    found, transport = Topology.of(), LocalTransport()
    assert isinstance(found.replicas, LocalTransport) and found.everyone is found.replicas
    assert (found.replicas.rank, found.replicas.size, found.replicas.name) == (0, 1, "local")
    assert Topology.of(transport).replicas is transport and Topology.of(found) is found
    with pytest.raises(TypeError, match="can't communicate over a str"):
        Topology.of("gloo")
    param = torch.nn.Parameter(torch.ones(3))
    assert internals.topology(OneBitAdam([param], process_group=found)) is found
    with pytest.raises(ValueError, match="a Topology of sharded parameters"):
        OneBitAdam([param], process_group=replace(found, shard=LocalTransport()))
