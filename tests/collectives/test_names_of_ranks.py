"""Errors name ranks by their numbers among all processes, and the host of one that runs elsewhere."""

import socket

import pytest
import torch

from onebit.collectives.agreement import listed
from onebit.collectives.transport import transport_for
from onebit.collectives.transport.grid import Grid
from tests.onebit.checkpoint.test_sharded import made
from tests.onebit.parallel.test_fsdp import mesh_of
from tests.ranks import run_ranks_once


def names(rank, size):
    """Two hosts of two ranks: HSDP's error where the options of rank 3 are others, and names in groups."""
    host = socket.gethostname
    socket.gethostname = lambda: f"node-{rank // 2}"
    try:
        mesh = mesh_of(2, 2)
        net, optimizer = made(mesh, freeze_step=7 if rank == 3 else 8)
        with pytest.raises(ValueError) as caught:
            net(torch.ones(2, 16)).sum().backward()
            optimizer.step()
        replicas, shard = transport_for(mesh.get_group("replicate")), transport_for(mesh.get_group("shard"))
        return str(caught.value), [listed([i], Grid(replicas, shard)) for i in range(4)], listed([0, 1], replicas)
    finally:
        socket.gethostname = host


def test_ranks_of_a_mesh():
    answers = run_ranks_once(4, names)
    for rank, (error, of_grid, of_replicas) in enumerate(answers):
        assert "rank 3 has freeze_step 7 where rank" in error.replace(" (on node-1)", "") or rank in (0, 2)
        other = 2 * (1 - rank // 2) + rank % 2  # the same place on the other host
        elsewhere = f"{other} (on node-{other // 2})"
        assert f"rank {elsewhere}" in of_grid
        assert [text.split(" (")[0] for text in of_grid] == [f"rank {i}" for i in range(4)]
        assert elsewhere in of_replicas
