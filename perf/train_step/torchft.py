"""torchft's own DiLoCo (`pip install torchft`, for Python 3.11), set up as users do without spare replicas: a manager a
rank, and on rank 0 the lighthouse that all of them ask who takes part in the coming exchange.

It takes the steps of `perf.train_step.diloco`, but for rounding (tests/perf/test_torchft.py), so that only their times
are measured.
"""

from __future__ import annotations

import atexit
import importlib.util
import os
import socket
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from onebit.collectives.store import tcp_store
from onebit.collectives.transport.protocol import Transport
from perf.train_step.diloco import LocalSGD

PATIENCE = timedelta(minutes=10)


def missing() -> str | None:
    """Why there is nothing to measure, if so."""
    return None if importlib.util.find_spec("torchft") else "torchft is not installed: pip install torchft"


def manager_of(name: object, address: str, pg: Any, own: str = "127.0.0.1", **options: Any) -> Any:
    """Make the manager of a replica of one process, which others reach at `own`; `address`: of the lighthouse."""
    from torchft import Manager

    store = tcp_store(own, 0, is_master=True, wait_for_workers=False)
    place: dict[str, Any] = {"rank": 0, "world_size": 1, "store_addr": own, "store_port": store.port, "hostname": own}
    usual: dict[str, Any] = {"load_state_dict": None, "state_dict": None, "use_async_quorum": False}
    usual |= {"timeout": PATIENCE, "quorum_timeout": PATIENCE, "min_replica_size": 2}
    manager: Any = Manager(pg, lighthouse_addr=address, replica_id=str(name), **{**place, **usual, **options})
    manager.store = store  # as long as the manager
    return manager


class TorchftDiLoCo(LocalSGD):
    """torchft's DiLoCo on the default process group, which its ranks find each other by."""

    def __init__(
        self, params: Any, transport: Transport, every: int = 16, outer_lr: float = 0.7, mu: float = 0.9, **inner: Any
    ) -> None:
        from torchft import ProcessGroupGloo
        from torchft.coordination import LighthouseServer
        from torchft.local_sgd import DiLoCo

        params = list(params)
        super().__init__(params, every, **inner)
        own, lighthouse = own_address(), None
        found = [""]
        if transport.rank == 0:
            lighthouse = LighthouseServer(bind="[::]:0", min_replicas=transport.size)
            port = lighthouse.address().rpartition(":")[2]  # after a name that other hosts may not know
            found = [f"http://{own}:{port}"]
        dist.broadcast_object_list(found)
        options = {"min_replica_size": transport.size, "init_sync": False}
        manager = manager_of(f"rank{transport.rank}", found[0], ProcessGroupGloo(PATIENCE), own, **options)
        self._inner = torch.optim.AdamW(params, **inner)
        self._inner.param_groups = self.param_groups  # of which schedules set the rate
        outer = torch.optim.SGD(params, lr=outer_lr, momentum=mu, nesterov=True)
        model = torch.nn.ParameterList(params)
        self._diloco = DiLoCo(
            manager, [model], self._inner, outer, sync_every=every, pin_memory=False, use_bucketization=True
        ).__enter__()
        self._servers = (manager, lighthouse)
        atexit.register(self.close)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = self._inner.step(closure)
        self.taken += 1
        self.synchronized = self.taken % self.every == 0
        return loss

    def synchronize(self) -> None:
        if not self.synchronized:
            raise NotImplementedError("torchft takes its outer step when it is due, and at no other time")

    def close(self) -> None:
        """End its servers. A collective call, where the group is still there."""
        atexit.unregister(self.close)
        manager, lighthouse = self._servers
        self._diloco.__exit__(None, None, None)
        if dist.is_initialized():
            dist.barrier()
        manager.shutdown(wait=False)
        if lighthouse is not None:
            lighthouse.shutdown()


def own_address() -> str:
    """The address by which the other ranks reach this one."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
        s.connect((os.environ.get("MASTER_ADDR", "127.0.0.1"), 9))  # sends nothing
        return str(s.getsockname()[0])
