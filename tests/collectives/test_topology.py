"""Who is who: the ranks that average with this one, and those that must agree."""

import dataclasses

import pytest
import torch
import torch.distributed as dist

import onebit
from onebit.collectives.topology import Topology
from onebit.collectives.transport.protocol import LocalTransport
from tests.collectives import work
from tests.ranks import group, run_ranks_once


def test_a_process_alone():
    topology = Topology.of()
    assert isinstance(topology.replicas, LocalTransport)
    assert (topology.replicas.rank, topology.replicas.size) == (0, 1)
    assert topology.everyone is topology.replicas


def test_a_transport_is_taken_as_it_is():
    transport = LocalTransport()
    assert Topology.of(transport).replicas is transport


def test_it_does_not_change():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Topology.of().replicas = LocalTransport()


def seen(rank, size):
    """Of the group of ranks, and of a subgroup of it: rank and size."""
    pair = dist.new_group([1, 2])
    topology = Topology.of(group())
    found = [(topology.replicas.rank, topology.replicas.size), (topology.everyone.rank, topology.everyone.size)]
    errors = []
    with work.error_of(errors):
        inner = Topology.of(pair)
        found.append((inner.replicas.rank, inner.replicas.size))
    return found, errors


def test_groups_of_ranks():
    answers = run_ranks_once(3, seen)
    for rank, (found, errors) in enumerate(answers):
        assert found[:2] == [(rank, 3)] * 2
        assert found[2:] == ([(rank - 1, 2)] if rank in (1, 2) else [])
        assert bool(errors) == (rank not in (1, 2))
    assert "not in the process group" in answers[0][1][0]


def test_what_is_no_group():
    with pytest.raises(TypeError, match="can't communicate over a str"):
        Topology.of("gloo")


def test_a_topology_is_taken_as_it_is_where_it_fits_the_parameters():
    topology = Topology.of()
    param = torch.nn.Parameter(torch.ones(3))
    assert Topology.of(topology) is topology
    assert onebit.OneBitAdam([param], process_group=topology).setup.topology is topology
    sharded = dataclasses.replace(topology, shard=LocalTransport())
    with pytest.raises(ValueError, match="a Topology of sharded parameters"):
        onebit.OneBitAdam([param], process_group=sharded)
