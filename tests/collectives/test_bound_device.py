"""A world with a device of its own, as init_process_group(device_id=...) makes it: groups of some of its ranks."""

import torch
import torch.distributed as dist

from onebit.collectives.transport import transport_for
from tests.ranks import run_ranks_once


def made(rank, size):
    """Which device the world was bound to when torch was asked for a group; ranks 0 and 1 alone make some."""
    world, bound = dist.group.WORLD, torch.device("cuda", 0)
    some, seen, new_group = dist.new_group([0, 1]), [], dist.new_group

    def recording(*args, **kwargs):
        seen.append(world.bound_device_id)
        world.bound_device_id = None  # without a GPU nothing can be split
        return new_group(*args, **kwargs)

    world.bound_device_id = bound
    dist.new_group = recording
    try:
        if rank < 2:
            transport = transport_for(some)
            transport.duplicate()
            transport.split(rank)
        return seen, world.bound_device_id == bound
    finally:
        dist.new_group, world.bound_device_id = new_group, None


def test_no_group_of_ours_splits_the_worlds_communicator():
    for rank, (seen, bound) in enumerate(run_ranks_once(3, made)):
        assert bound and all(each is None for each in seen)
        assert len(seen) >= 2 or rank == 2
