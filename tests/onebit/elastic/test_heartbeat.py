"""Who is gone is known long before a collective's timeout, which is ten minutes here, and the others go on."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import time
from collections.abc import Callable
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import onebit
from onebit.collectives.signs_of_life import BYE, Peer, SignsOfLife
from onebit.collectives.transport import transport_for
from onebit.collectives.transport.protocol import collective_errors
from tests.faults.elastic import problems_of, strike_ranks
from tests.faults.striking import Fault
from tests.limits import HUNG
from tests.onebit.elastic.moves import HAS_IPV6, needs_ipv6
from tests.ranks import Ranks, run_ranks_once

SILENT = 4.0  # seconds: longer than a process of a busy machine stands still
# Of two levels a death is known to the other node by nothing but signs of life.
FAULTS = [
    ("OneBitAdam", Fault("stop", 1, 0)),
    ("ZeroOneAdam", Fault("stop", 9, 1)),
    ("OneBitLamb", Fault("kill", 7, 0)),
    ("OneBitAdam", Fault("kill", 11, 3)),
    ("ZeroOneAdam", Fault("orphan", 0, 2)),
]


@pytest.mark.parametrize(("kind", "fault"), FAULTS, ids=str)
def test_the_others_name_who_is_gone_and_go_on(kind: str, fault: Fault) -> None:
    found = strike_ranks(kind, fault, SILENT)
    assert len(found) == fault.at.ranks - 1 and not problems_of(found, fault)


def take_time(rank: int, size: int) -> list[int]:
    """Longer than `silent_after`, as all do when a machine sleeps."""
    with onebit.Heartbeat(silent_after=SILENT) as heart:
        if rank == 1:
            time.sleep(1.25 * SILENT)
        dist.barrier()
        ctypes.PyDLL(None).usleep(int(1.25e6 * SILENT))  # holds Python's lock, so that no thread of this process runs
        dist.barrier()
        time.sleep(1)
        assert heart.gone() == {}
        left = heart.left()
        dist.barrier()
        return left


def leave(rank: int, size: int) -> int:
    heart = onebit.Heartbeat(silent_after=SILENT)
    dist.barrier()
    if rank == 1:
        heart.stop()
        heart.stop()
        time.sleep(3 * SILENT)  # it lives, and is left
        return 0
    time.sleep(1)
    assert heart.gone() == {} and heart.left() == [0, 2, 3]
    heart.regroup()
    if rank == 2:
        with pytest.raises(KeyError), heart:
            raise KeyError
        time.sleep(2 * SILENT)
        return 0
    ones = torch.ones(1)
    with pytest.raises(RuntimeError):
        dist.all_reduce(ones)
    heart.regroup()
    dist.all_reduce(ones.fill_(1))
    heart.stop()
    return int(ones)


def wake(rank: int, size: int) -> int:
    heart = onebit.Heartbeat(silent_after=SILENT)
    me = os.getpid()
    dist.barrier()
    if rank == 1:
        if os.fork() == 0:  # goes on for a moment after the others have gone on
            time.sleep(2 * SILENT)
            os.kill(me, signal.SIGCONT)
            os._exit(0)
        os.kill(me, signal.SIGSTOP)
        with pytest.raises(ValueError, match="of 3 ranks can't go on"):
            heart.regroup()
        return 0
    heart.regroup()
    time.sleep(2 * SILENT)
    return dist.get_world_size()


def become_fewer(rank: int, size: int) -> int:
    """Lose one of five, and another one that stops before the others have made their group; then one more of three."""
    heart = onebit.Heartbeat(silent_after=SILENT)
    dist.barrier()
    if rank in (0, 3):
        os.kill(os.getpid(), signal.SIGSTOP if rank == 0 else signal.SIGKILL)
    heart.regroup()
    assert dist.get_world_size() == 3 and heart.gone() == {}
    dist.barrier()
    if rank == 4:
        os.kill(os.getpid(), signal.SIGKILL)
    assert heart.left() == [0, 1] and list(heart.gone()) == [2]
    heart.regroup()
    dist.barrier()
    left = dist.get_world_size()
    heart.stop()
    return left


def be_busy(rank: int, size: int) -> int:
    """One dies while another is in no collective for longer than it may be silent, as often as there are ranks."""
    with onebit.Heartbeat(silent_after=SILENT) as heart:
        if rank == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(rank * (size + 1) * SILENT)
        heart.regroup()
        dist.barrier()
    return dist.get_world_size()


def die_in_new_group(rank: int, size: int, how: str) -> float:
    heart, transport = onebit.Heartbeat(silent_after=SILENT), transport_for()
    dies = mock.patch.object(dist, "new_group", lambda *_args, **_options: os.kill(os.getpid(), signal.SIGKILL))
    with dies if rank == 1 else pytest.raises(onebit.CollectiveError, match="making a process group"):
        transport.duplicate() if how == "duplicate" else transport.split(0)
    heart.regroup()
    made: Any = transport_for().duplicate()
    made.all_sum(torch.ones(1), "test").wait()
    heart.stop()
    options = made.group._get_backend(torch.device("cpu")).options
    return getattr(options, "_timeout").total_seconds()  # noqa: B009


def meet_over_ipv6(rank: int, size: int) -> int:
    os.environ["MASTER_ADDR"] = "::1"
    del os.environ["GLOO_SOCKET_IFNAME"]
    with onebit.Heartbeat(silent_after=SILENT) as heart:
        if rank < 2:
            heart.regroup()
            dist.barrier()
    return dist.get_world_size()


def lose_the_other(rank: int, size: int, minimum: int | None) -> int:
    heart = onebit.Heartbeat(silent_after=SILENT, minimum=minimum)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if minimum:
        heart.regroup()
    else:
        with pytest.raises(
            ValueError, match=r"1 of 2 ranks can't go on .* \(rank 1: its process has ended\): 2 at least"
        ):
            heart.regroup()
    return dist.get_world_size()


# What ranks do, with which arguments; what each returns, and None of those that die

WORLDS: dict[str, tuple[Callable[..., Any], tuple[Any, ...], list[Any]]] = {
    "one that only takes its time is not gone": (take_time, (), [[0, 1, 2]] * 3),
    "one that leaves in good order is not gone, and one that leaves with an error is": (leave, (), [2, 0, 0, 2]),
    "one that was silent and wakes goes no further": (wake, (), [2, 0, 2]),
    "more than half go on, and no fewer": (become_fewer, (), [None, 2, 2, None, None]),
    "one that is busy is waited for": (be_busy, (), [2, 2, None]),
    "hosts may have IPv6 alone": (meet_over_ipv6, (), [2, 2, 3]),
    "half does not go on": (lose_the_other, (None,), [2, None]),
    "half may go on": (lose_the_other, (1,), [1, None]),
    **{
        f"a death is known before the group's timeout, {how}": (die_in_new_group, (how,), [HUNG, None, HUNG])
        for how in ("duplicate", "split")
    },
}


@pytest.fixture(scope="module")
def found() -> dict[str, Future[list[Any]]]:
    """What all of them return, three at a time: they wait most of the time."""
    started, running = {}, {}
    with ThreadPoolExecutor(3) as threads, contextlib.ExitStack() as ends:
        for name, (_, _, wanted) in WORLDS.items():
            if HAS_IPV6 or "IPv6" not in name:
                started[name] = Ranks(len(wanted), (len(wanted),), HUNG)
                ends.callback(started[name].close)
        for name, ranks in started.items():
            work, args, wanted = WORLDS[name]
            dead = [rank for rank, value in enumerate(wanted) if value is None]
            running[name] = threads.submit(ranks.run, len(wanted), work, args, HUNG / 4, dead)
        futures.wait(running.values())
    return running


@pytest.mark.parametrize("name", [pytest.param(name, marks=[needs_ipv6] * ("IPv6" in name)) for name in WORLDS])
def test_who_is_gone_is_known_and_the_others_go_on(name: str, found: dict[str, Future[list[Any]]]) -> None:
    assert found[name].result() == WORLDS[name][2]


def test_an_error_that_ends_the_watch_is_heard(caplog: pytest.LogCaptureFixture) -> None:
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    with there, mock.patch.object(Peer, "beat", side_effect=KeyError("unforeseen")):
        signs = SignsOfLife([Peer(1, here, time.monotonic())], 1.0)
        with pytest.raises(RuntimeError, match=r"ended the watch.*KeyError\('unforeseen'\)"):
            signs.wait_for_news(1)
        with pytest.raises(onebit.CollectiveError, match="a rank died"), collective_errors("a phase", "gloo"):
            raise RuntimeError("connection closed")
        signs.stop(bye=False)
    assert "ended the watch" in caplog.text


def test_a_departure_does_not_hide_who_is_silent() -> None:
    (one, departs), (another, silent) = (socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM) for _ in range(2))
    for each in (one, another):
        each.setblocking(False)
    with departs, silent:
        departs.send(BYE)
        signs = SignsOfLife([Peer(1, one, time.monotonic()), Peer(2, another, time.monotonic())], 1.0)
        signs.wait_for_news(HUNG)
        assert signs.departed() == {1} and list(signs.gone()) == [2]
        signs.stop(bye=False)


class Unconnected(socket.socket):
    def connect(self, address: Any) -> None:
        raise OSError(f"no way to {address[0]}")


def test_a_wrong_argument_on_one_rank_is_an_error_on_all() -> None:
    assert run_ranks_once(2, give_wrong_arguments, (), group_timeout=60.0) == [None, None]


def give_wrong_arguments(rank: int, size: int) -> None:
    for number, (silent_after, minimum, said) in enumerate(
        [
            (0.1, None, "give seconds"),
            ("10", None, "give seconds"),
            (60.0, None, "the process group's timeout is 0:01:00"),
            (10.0, 3, "a number of ranks from 1 to 2"),
            (10.0, 0, "a number of ranks from 1 to 2"),
            (10.0, 1, "ranks were given other"),
        ]
    ):
        own = {"silent_after": silent_after, "minimum": minimum} if number % 2 == rank else {}
        with pytest.raises(ValueError, match=said):
            onebit.Heartbeat(**own)
    with onebit.Heartbeat(silent_after=10.0), pytest.raises(ValueError, match="there is a Heartbeat"):
        onebit.Heartbeat()
    without_way = mock.patch.object(socket, "socket", Unconnected) if rank else contextlib.nullcontext()
    with without_way, pytest.raises(ValueError, match=r"no Heartbeat: rank 1: no way to 127\.0\.0\.1"):
        onebit.Heartbeat(silent_after=2.0)
    deaf = mock.patch.object(Peer, "beat") if rank else contextlib.nullcontext()
    with deaf, pytest.raises(ValueError, match=r"rank 0: no datagram came from ranks \[1\].*rank 1: no .*let UDP"):
        onebit.Heartbeat(silent_after=2.0)
    dist.destroy_process_group()
    with pytest.raises(ValueError, match=r"call torch\.distributed\.init_process_group first"):
        onebit.Heartbeat()
