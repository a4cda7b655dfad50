"""Who is gone, found fast, and a group of the ranks that are left: over a store of theirs, whoever died."""

from __future__ import annotations

import os
import queue
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from onebit.collectives.signs_of_life import Peer, SignsOfLife, longest_silence, who_is_gone
from onebit.collectives.store import tcp_store
from onebit.collectives.transport.protocol import CollectiveError

SIOCGIFADDR = 0x8915  # asks Linux for an interface's address


class Heartbeat:
    """Tells which ranks died or are silent, ends the waits for them, and makes a group of the ranks that are left.

        heart = onebit.Heartbeat(silent_after=10.0)          # on every rank, after init_process_group
        try:
            optimizer.step()
        except onebit.CollectiveError:
            onebit.reform(optimizer, heart.regroup())

    The default process group is watched: Gloo, and UDP between its hosts. While nobody is gone each rank sends every
    other rank four datagrams a second, and a step is as fast as without. To build it is a collective call.

    Args:
        silent_after: seconds without a sign of life after which a rank counts as gone. This is the one time to choose:
            more than the longest pause of a process (a debugger, a compiler that holds Python's lock), less than the
            timeout of the process group. A process that ends is known sooner.
        minimum: fewer ranks do not go on. By default more than half must be left, so that two halves never train apart.
    """

    def __init__(self, *, silent_after: float = 10.0, minimum: int | None = None) -> None:
        _check_world()
        self._minimum, self._generation, self._me = minimum, 0, dist.get_rank()
        others = [rank for rank in range(dist.get_world_size()) if rank != self._me]
        sockets: dict[int, socket.socket] = {}

        def offer() -> tuple[str, int, dict[int, int]]:
            self._timeout = _checked(silent_after, minimum)
            address = own_address()
            self._store = tcp_store(address, 0, is_master=True, wait_for_workers=False)
            sockets.update({rank: _bound(address) for rank in others})
            return address, self._store.port, {rank: each.getsockname()[1] for rank, each in sockets.items()}

        everyone = _of_all(offer, (silent_after, minimum))
        self._stores = [(address, port) for address, port, _ in everyone]

        def meet() -> None:
            for rank, each in sockets.items():
                each.connect((everyone[rank][0], everyone[rank][2][self._me]))

        _of_all(meet, None)
        self._signs = SignsOfLife([Peer(rank, each, time.monotonic()) for rank, each in sockets.items()], silent_after)
        try:
            _of_all(self._hear_all, None)
        except Exception:
            self._signs.stop(bye=True)
            raise

    def _hear_all(self) -> None:
        """A ValueError where datagrams do not come through: nobody is to be taken for silent for that."""
        stop = time.monotonic() + self._signs.silent_after / 2
        while (unheard := self._signs.unheard()) and time.monotonic() < stop:
            time.sleep(self._signs.interval / 4)
        if unheard:
            raise ValueError(
                f"no datagram came from ranks {unheard} within {self._signs.silent_after / 2} s: let UDP between the "
                f"hosts through, and set GLOO_SOCKET_IFNAME to the interface between them"
            )

    def gone(self) -> dict[int, str]:
        """Tell which ranks are gone.

        Returns:
            What is known of each, by its rank in the default process group.
        """
        return self._signs.gone()

    def left(self) -> list[int]:
        """Tell which ranks are there, after an error: waits until it is known who is gone, `silent_after` seconds at
        most.

        Returns:
            Their ranks in the default process group.
        """
        self._signs.wait_for_news(self._signs.silent_after + 2 * self._signs.interval)
        return sorted(set(range(len(self._stores))) - self.gone().keys() - self._signs.departed())

    def regroup(self) -> Any:
        """Make a new default process group of those that are left, all of whom call this. The old one is destroyed.

        They wait as long as its timeout for a rank that is busy and gives signs of life. The store is that of the first
        of them, so that any rank may die, at any time.

        Returns:
            The group, with the timeout of the old one.
        """
        tries, stop = len(self._stores), time.monotonic() + self._timeout.total_seconds()
        while True:
            tries -= 1
            try:
                return self._group_of(self.left())
            except CollectiveError:
                if tries <= 0 and time.monotonic() > stop:
                    raise

    def _group_of(self, chosen: Sequence[int]) -> Any:
        there, patience = len(self._stores), timedelta(seconds=self._signs.silent_after)
        least = there // 2 + 1 if self._minimum is None else self._minimum
        if len(chosen) < least:
            raise ValueError(
                f"{len(chosen)} of {there} ranks can't go on without the others ({self._known()}): {least} at least "
                f"must be left. Restart from the last checkpoint, or build Heartbeat(minimum=...)"
            )
        try:
            store = self._store_of(chosen, patience)
            self._signs.keep(chosen)  # all who have come agree: whatever happens next, these are their numbers
            self._stores, self._me = [self._stores[rank] for rank in chosen], chosen.index(self._me)
            self._generation += 1
            if dist.is_initialized():
                dist.destroy_process_group()
            dist.init_process_group("gloo", None, patience, len(chosen), self._me, store)
        except RuntimeError as error:
            raise CollectiveError(
                f"not all of ranks {chosen} came to a new group ({self._known()}): did one go on without regroup? "
                f"Restart from the last checkpoint"
            ) from error
        dist.distributed_c10d._set_pg_timeout(self._timeout, dist.group.WORLD)
        return dist.group.WORLD

    def stop(self) -> None:
        """End in good order: the others do not take this rank for dead, and go on without it after `regroup`."""
        self._signs.stop(bye=True)

    def __enter__(self) -> Heartbeat:
        return self

    def __exit__(self, kind: object, *_error: object) -> None:
        """End in good order, or, with an error, so that the rank counts as dead."""
        self._signs.stop(bye=kind is None)

    def _store_of(self, chosen: Sequence[int], patience: timedelta) -> Any:
        """Return a store of the chosen ranks when all have come to it, and have chosen the same. A thread connects: a
        process that is stopped may still take the connection, and then answers nothing."""
        address, port = self._stores[chosen[0]]
        came: queue.SimpleQueue[Any] = queue.SimpleQueue()

        def come() -> None:
            try:
                own = chosen[0] == self._me
                store = self._store if own else tcp_store(address, port, is_master=False, timeout=patience)
                came_to = PrefixStore(f"generation {self._generation + 1} of {chosen}", store)
                came_to.set(str(self._me), "here")
                came_to.wait([str(rank) for rank in chosen], patience)
                came.put(came_to)
            except RuntimeError as error:
                came.put(error)

        threading.Thread(target=come, name="onebit regroup", daemon=True).start()
        try:
            found = came.get(timeout=2 * patience.total_seconds())
        except queue.Empty:
            found = RuntimeError(f"the store of rank {chosen[0]} does not answer")
        if isinstance(found, RuntimeError):
            raise found
        return found

    def _known(self) -> str:
        return who_is_gone() or "nobody is known to be gone"


def _check_world() -> None:
    if not (dist.is_available() and dist.is_initialized()):
        raise ValueError("Heartbeat watches the default process group: call torch.distributed.init_process_group first")
    config = dist.get_backend_config(dist.group.WORLD)
    if "nccl" in config or "gloo" not in config:
        raise ValueError(
            f"the default process group is {config}: Heartbeat ends the waits of Gloo alone. Leave it out, and set the "
            f"timeout of init_process_group"
        )


def _of_all(own: Callable[[], Any], same: Any) -> list[Any]:
    """What each rank has; a ValueError on all where one has an error, or not the `same` as the others."""
    try:
        found, failed = own(), ""
    except (ValueError, RuntimeError, OSError) as error:
        found, failed = None, f"rank {dist.get_rank()}: {error}"
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (found, failed, same))
    if reasons := [reason for _, reason, _ in everyone if reason]:
        raise ValueError(f"no Heartbeat: {'; '.join(reasons)}")
    if len({repr(asked) for *_, asked in everyone}) > 1:
        raise ValueError(
            f"no Heartbeat: ranks were given other (silent_after, minimum): {[asked for *_, asked in everyone]!s:.400}"
        )
    return [found for found, *_ in everyone]


def _checked(silent_after: float, minimum: int | None) -> timedelta:
    """The timeout of the default process group."""
    size = dist.get_world_size()
    if longest_silence() is not None:
        raise ValueError("there is a Heartbeat in this process already: stop() it before you build another one")
    if not isinstance(silent_after, (int, float)) or not 0.2 <= silent_after < float("inf"):
        raise ValueError(f"silent_after={silent_after!r}: give seconds, 0.2 at least")
    if minimum is not None and (not isinstance(minimum, int) or not 1 <= minimum <= size):
        raise ValueError(f"minimum={minimum!r}: give a number of ranks from 1 to {size}, or None")
    world: Any = dist.group.WORLD
    timeout: timedelta = getattr(world._get_backend(torch.device("cpu")).options, "_timeout")  # noqa: B009
    if timeout <= timedelta(seconds=silent_after):
        raise ValueError(
            f"silent_after={silent_after} s, and the process group's timeout is {timeout}: collectives would end "
            f"before a silent rank is known. Give init_process_group a longer timeout"
        )
    return timeout


def own_address() -> str:
    """The address by which others reach this host: that of GLOO_SOCKET_IFNAME, or on the way to the store."""
    if name := os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]:
        import fcntl

        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            found = fcntl.ioctl(probe.fileno(), SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
        return socket.inet_ntoa(found[20:24])
    host = os.environ.get("MASTER_ADDR") or socket.gethostname()
    places = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)
    family, *_, place = min(places, key=lambda each: each[0] != socket.AF_INET)  # IPv6 where there is nothing else
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(place)  # sends nothing
        return str(probe.getsockname()[0])


def _bound(address: str) -> socket.socket:
    bound = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_DGRAM)
    bound.bind((address, 0))
    bound.setblocking(False)
    return bound
