"""A process follows a run and then joins: next to nothing is sent within `reform`, and the bits are the others'."""

from __future__ import annotations

import gc
import math
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import onebit
from onebit.checkpoint import restore
from onebit.collectives.agreement import all_gather_json
from onebit.collectives.hand_over import receive_tensors
from onebit.collectives.link import Listener, connect
from onebit.collectives.transport import TorchTransport, Work, transport_for
from onebit.elastic import following
from tests import internals
from tests.onebit.checkpoint.states import other_parameters
from tests.onebit.elastic.moves import group_of, needs_ipv6
from tests.onebit.elastic.test_halfway import take
from tests.onebit.elastic.test_reform import AUTO, CHUNKS, FULL, LOCAL, SYNCS, TENSOR, case
from tests.onebit.optim.test_memory import living
from tests.onebit.runs import Case, bits, on_warnings, step_by
from tests.ranks import group, run_ranks

A, L, Z = "OneBitAdam", "OneBitLamb", "ZeroOneAdam"
HOST, CPU = "127.0.0.1", torch.device("cpu")
BY_ITSELF = {"freeze_step": onebit.FreezeRule(0.5, window=4)}
APART = ({}, {"lr": 3e-3, "compress": False})


@dataclass(frozen=True)
class Following:
    """Two ranks train; a third follows from one step on, and joins after another."""

    case: Case
    begins: int
    joins: int
    reforms: int = 0  # the step after which the two that are there go on as another group
    then: str = ""  # what becomes of the giver, or of the run, before ranks change


FOLLOWED = {
    "stage 1": Following(case(A), 1, 2),
    "through the freeze": Following(case(A, **CHUNKS), 1, 6),
    "stage 2": Following(case(A), 4, 8),
    "1-bit LAMB, stage 2": Following(case(L), 4, 8),
    "local steps, from one on": Following(case(Z, **SYNCS), 9, 12),
    "1-bit LAMB, through the freeze": Following(case(L, **CHUNKS), 2, 7),
    "direct before": Following(case(L, **AUTO), 3, 7),
    "a scale a message": Following(case(L, **TENSOR), 2, 6),
    "full steps between": Following(case(Z, **FULL), 2, 10),
    "local steps": Following(case(Z, **LOCAL), 2, 9),
    "local steps and a limit": Following(case(Z, **LOCAL, update_limit="auto"), 2, 9),
    "local steps, after a sync": Following(case(Z, **SYNCS), 6, 12),
    "bfloat16": Following(case(A).but(dtype="bfloat16"), 2, 6),
    "bfloat16, local steps": Following(case(Z, **LOCAL).but(dtype="bfloat16"), 2, 9),
    "a limit of steps": Following(case(Z, **FULL, update_limit="auto"), 2, 10),
    "some uncompressed": Following(case(L).but(groups=APART), 2, 6),
    "steps that are skipped": Following(case(A).but(bad=((2, 0, float("nan")), (6, 1, float("inf")))), 1, 7),
    "one node": Following(case(A).but(each=2), 2, 6),
    "stage 1 that ends by itself": Following(case(A).but(options=BY_ITSELF), 2, 5),
    "gradients that are clipped": Following(case(A).but(clip=0.5), 1, 5),
    "overlap": Following(case(A, **CHUNKS, overlap=True), 4, 7),
    "ranks that change meanwhile": Following(case(A, **CHUNKS), 2, 8, reforms=5),
}


@pytest.mark.parametrize("name", FOLLOWED)
def test_the_one_that_followed_has_the_same_bits(name: str) -> None:
    followed = run_ranks(3, work, FOLLOWED[name])
    assert followed[0] == followed[1] == followed[2]
    assert followed[0].sent == 0


@pytest.mark.parametrize("then", ["the giver ends", "parameters are changed by hand"])
def test_a_state_that_is_not_the_others_is_sent_again(then: str) -> None:
    found = run_ranks(3, work, Following(case(L), 2, 6, then=then))
    assert found[0] == found[1] == found[2]
    assert found[0].sent > 8 * sum(math.prod(shape) for shape in case(L).shapes)


@dataclass(frozen=True)
class Found:
    """All that ranks have the same, after the reform and five more steps; bytes that one rank has sent to one other."""

    at_once: bytes
    rates: list[float]
    later: bytes
    sent: int


class Sends(TorchTransport):
    """Counts the bytes of states."""

    sent = 0

    def send(self, values: torch.Tensor, to: int, phase: str) -> Work:
        self.sent += values.nbytes
        return super().send(values, to, phase)


def work(rank: int, size: int, following: Following) -> Found:
    with on_warnings("ignore", UserWarning):  # of the variance: other tests are of these
        return _work(rank, following)


def _work(rank: int, following: Following) -> Found:
    with run_until_joined(rank, following) as (optimizer, params):
        everyone = Sends(group(3))
        onebit.reform(optimizer, everyone)
        sent = sum(all_gather_json(transport_for(group(3)), CPU, everyone.sent, "bytes"))
    at_once = same_on_all(optimizer)
    for step in range(following.joins + 1, following.joins + 6):
        take(following.case, rank, optimizer, params, step)
    optimizer.synchronize()
    return Found(at_once, [g["lr"] for g in optimizer.param_groups], same_on_all(optimizer), sent)


def same_on_all(optimizer: Any) -> bytes:
    """The bits that all ranks share; of 0/1 Adam between two exchanges the parameters after the last one."""
    with optimizer.at_last_sync():
        params = [p for group in optimizer.param_groups for p in group["params"]]
        shared = [t for _, t in internals.shared(optimizer)] if optimizer.synchronized else []
        return bits([*params, *shared])


@contextmanager
def run_until_joined(rank: int, following: Following) -> Iterator[tuple[Any, Any]]:
    """Run up to the step after which the third joins, with rates as a schedule leaves them."""
    case, world = following.case, transport_for(group(3))
    two = group_of(range(2), rank)
    params = case.parameters() if rank < 2 else other_parameters(case)
    optimizer = case.build(params, two) if rank < 2 else case.but(each=1).build(params, group(3))
    giver = onebit.Giver(optimizer, HOST) if rank == 1 else None
    address = all_gather_json(world, CPU, giver and giver.address, "address")[1]
    if rank == 2:
        dist.barrier(group(3))  # before the step with which it begins
        onebit.follow(optimizer, address)
    else:
        for step in range(1, following.joins + 1):
            if step == following.begins:
                dist.barrier(group(3))
                wait_for_follower(giver)
                dist.barrier(two)
            take(following.case, rank, optimizer, params, step)
            for g in optimizer.param_groups:
                g["lr"] *= 0.9
            if step == following.reforms:
                onebit.reform(optimizer, two)
        if following.then == "parameters are changed by hand":
            torch._foreach_mul_([p.data for p in params], 0.5)
    if following.then == "the giver ends":
        dist.barrier(group(3))  # when the one that follows has the state
    if giver is not None and following.then == "the giver ends":
        giver.close()
    yield optimizer, params
    if giver is not None and not following.then:
        giver.close()


def wait_for_follower(giver: onebit.Giver | None) -> None:
    stop = time.monotonic() + 60
    while giver is not None and not giver.followers:
        assert time.monotonic() < stop, "nobody follows"
        time.sleep(0.002)


def alone(*sizes: int, **options: Any) -> Any:
    """A run of one process, in stage 1 unless options say otherwise."""
    params = [torch.nn.Parameter(torch.ones(size)) for size in sizes]
    return onebit.OneBitAdam(params, **{"freeze_step": 1000, **options})


def test_where_more_piles_up_than_a_state_has_the_state_is_sent_anew() -> None:
    run = alone(2**20)
    giver = onebit.Giver(run, HOST)
    link, kinds, received = connect(giver.address), [], 0
    wait_for_follower(giver)
    for _ in range(12):
        step_by(run)
    giver.end()
    while not kinds or kinds[-1]["kind"] != "end":
        value, tensors = receive_tensors(link, 0, CPU, "test")
        kinds.append(value)
        received += sum(t.nbytes for t in tensors)
    giver.close()
    assert [each["kind"] for each in kinds].count("state") > 1
    assert received < 12 * 2**20 + 11 * 4 * 2**20


def test_what_is_given_waits_while_the_giver_is_in_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onebit.collectives.link, "MOST_WAITING", 1e6)
    monkeypatch.setattr(onebit.collectives.link, "MOST_AT_ONCE", 1e3)
    run = alone(2**22)
    giver = onebit.Giver(run, HOST)
    link, kinds = connect(giver.address), list[str]()
    wait_for_follower(giver)
    step_by(run)  # the state fills what the connection holds: nobody receives
    receiving = threading.Thread(target=lambda: kinds.append(receive_tensors(link, 0, CPU, "test")[0]["kind"]))
    with giver.paused():
        receiving.start()
        received = -1
        while link.received > received:
            received = link.received
            time.sleep(0.5)
        assert receiving.is_alive() and not kinds
    receiving.join(60)
    assert kinds == ["state"]
    with mock.patch.object(onebit.Giver, "paused", autospec=True, side_effect=onebit.Giver.paused) as gives_way:
        step_by(run)
    gives_way.assert_called_once()
    giver.close()
    link.close()


def test_the_thread_that_follows_chooses_its_device_first() -> None:
    def choose(stream: Any) -> None:
        raise RuntimeError(f"chosen in {threading.current_thread().name}")

    listener = Listener(HOST)
    optimizer = onebit.OneBitAdam([torch.nn.Parameter(torch.ones(8))], freeze_step=2)
    chooses = mock.patch.object(following, "streams", choose_device=choose)
    receives = mock.patch.object(following, "receive_tensors", side_effect=RuntimeError("received"))
    with chooses, receives, pytest.raises(RuntimeError, match="chosen in onebit follower"):
        onebit.follow(optimizer, listener.address)
    listener.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_that_follows_has_two_copies_at_most(dtype: torch.dtype) -> None:
    """One of them has no residuals; both have m, which the run has in messages alone."""
    numel = 2**18
    copy, most = run_ranks(2, follow_and_count, numel, dtype)
    assert copy < most < 2 * copy - 8 * numel + 2 * 4 * numel


def follow_and_count(rank: int, size: int, numel: int, dtype: torch.dtype) -> int:
    """Bytes of the parameters and the optimizer's state in a run, and the most of one that follows the run, to whom the
    state is sent three times."""
    world, before = transport_for(group()), sum(living().values())
    counts = list[int]()

    def counted(work: Any) -> Any:
        def counting(*args: Any, **kwargs: Any) -> Any:
            done = work(*args, **kwargs)
            counts.append(sum(living().values()) - before)
            return done

        return counting

    params = [torch.nn.Parameter(torch.ones(numel, dtype=dtype))]
    optimizer = onebit.OneBitAdam(params, freeze_step=2, process_group=transport_for(group()).split(rank))
    if rank == 1:
        address = all_gather_json(world, CPU, None, "address")[0]
        receiving = mock.patch.object(following, "receive_tensors", counted(receive_tensors))
        restoring = mock.patch.object(restore, "restored", counted(restore.restored))
        with receiving, restoring:
            onebit.follow(optimizer, address)
            for _ in range(2):
                known = len(counts)
                dist.barrier(group())
                while optimizer.follower.follows and len(counts) < known + 2:  # received, and restored
                    time.sleep(0.002)
            while optimizer.follower.follows:
                time.sleep(0.002)
        assert optimizer.follower.why_not == ""
        dist.barrier(group())
        return max(counts)
    for _ in range(4):
        step_by(optimizer)
    params[0].grad = None
    counted(lambda: None)()
    giver = onebit.Giver(optimizer, HOST)
    all_gather_json(world, CPU, giver.address, "address")
    wait_for_follower(giver)
    step_by(optimizer)
    for _ in range(2):
        dist.barrier(group())
        giver.parameters_changed()
        step_by(optimizer)
    giver.end()
    dist.barrier(group())  # all has been sent
    return counts[0]


@needs_ipv6
@pytest.mark.parametrize("host", ["::1", "a host of IPv6 alone"])
def test_an_address_may_be_of_ipv6(host: str) -> None:
    found = socket.getaddrinfo

    def resolved(name: str, *args: Any, **kwargs: Any) -> Any:
        return found(name.replace("a host of IPv6 alone", "::1"), *args, **kwargs)

    with mock.patch.object(socket, "getaddrinfo", resolved):
        giver = onebit.Giver(alone(30), host)
        link = connect(giver.address)
        wait_for_follower(giver)
    giver.close()
    link.close()


def test_a_giver_ends_with_its_optimizer() -> None:
    others, run = set(threading.enumerate()), alone(30)
    address = onebit.Giver(run, HOST).address
    link = connect(address)
    wait_for_follower(run.giver)
    step_by(run)
    own = set(threading.enumerate()) - others
    assert {thread.name for thread in own} == {"onebit giver", "onebit log"}
    del run
    gc.collect()
    for thread in own:
        thread.join(10)
    assert not any(thread.is_alive() for thread in own)
    link.close()


def test_a_giver_that_is_closed_twice_leaves_the_next_one() -> None:
    run = alone(30)
    first = onebit.Giver(run, HOST)
    first.close()
    second = onebit.Giver(run, HOST)
    first.close()
    assert run.giver is second
    second.close()
    assert run.giver is None


def test_what_does_not_fit_is_said() -> None:
    run = alone(30)
    with pytest.raises(ValueError, match="address of a Giver"):
        onebit.follow(alone(30), "localhost")
    giver = onebit.Giver(run, HOST)
    with pytest.raises(ValueError, match="has a Giver already"):
        onebit.Giver(run, HOST)
    with pytest.raises(ValueError, match="has taken steps"):
        step_by(run)
        onebit.follow(run, giver.address)
    for other, name in ((alone(31), "elements 30, this process 31"), (alone(30, block_size=64), "block_size")):
        said = heard_while_it_steps(run, other)
        assert len(said) == 1 and name in said[0] and "arguments that the others have" in said[0]
    giver.close()
    with pytest.raises(onebit.CollectiveError, match="nobody gives a state"):
        onebit.follow(alone(30), giver.address)


def test_what_can_not_be_given_is_an_error_of_the_one_that_follows() -> None:
    run = alone(30)
    run.param_groups[0]["name"] = torch.float32
    giver = onebit.Giver(run, HOST)
    assert "'name' of param group 0" in heard_while_it_steps(run, alone(30))[0]
    giver.close()


def test_one_that_follows_takes_no_step_and_gives_nothing() -> None:
    run, new = alone(30), alone(30)
    giver = onebit.Giver(run, HOST)
    assert heard_while_it_steps(run, new) == []
    with pytest.raises(ValueError, match=r"call onebit\.reform first"):
        step_by(new)
    with pytest.raises(ValueError, match=r"after onebit\.reform"):
        onebit.Giver(new, HOST)
    giver.end()
    with pytest.raises(ValueError, match="none of the ranks is one of the run"):
        onebit.reform(new, None)
    giver.close()


def test_where_a_state_that_comes_anew_has_no_room_none_was_followed() -> None:
    run, new = alone(30), alone(30)
    giver = onebit.Giver(run, HOST)
    assert heard_while_it_steps(run, new) == []
    with mock.patch.object(restore, "restored", side_effect=MemoryError("no memory")):
        giver.parameters_changed()
        step_by(run)
        while new.follower.follows:
            time.sleep(0.002)
    assert new.follower.end() is None and new.follower.why_not == "no memory"
    giver.close()


def test_a_state_that_comes_anew_does_not_end_the_wait_for_the_first() -> None:
    run, new = alone(30), alone(30)
    restored, catch_up = restore.restored, following.Follower.catch_up
    states, ended = list[int](), threading.Event()

    def slow(*args: Any, **options: Any) -> Any:
        states.append(1)
        if len(states) == 2:
            ended.wait(10)
        return restored(*args, **options)

    def late(follower: Any) -> None:
        while len(states) < 2:
            time.sleep(0.002)
        catch_up(follower)

    giver = onebit.Giver(run, HOST)
    thread = threading.Thread(target=onebit.follow, args=(new, giver.address))
    slowly = mock.patch.object(restore, "restored", slow)
    with slowly, mock.patch.object(following.Follower, "catch_up", late):
        thread.start()
        wait_for_follower(giver)
        step_by(run)
        while not states:
            time.sleep(0.002)
        giver.parameters_changed()
        step_by(run)
        thread.join()
        ended.set()
    giver.end()
    giver.close()
    assert new.follower is not None


def heard_while_it_steps(run: Any, other: Any) -> list[str]:
    """The error of another process that follows, if there is one. The run goes on until then."""
    said: list[str] = []

    def follow() -> None:
        try:
            onebit.follow(other, run.giver.address)
        except ValueError as error:
            said.append(str(error))

    thread = threading.Thread(target=follow)
    thread.start()
    wait_for_follower(run.giver)
    while thread.is_alive():
        step_by(run)
    return said


def test_a_stranger_gets_nothing() -> None:
    run = alone(30)
    giver = onebit.Giver(run, HOST)
    place, word = giver.address.split("/")
    link = connect(f"{place}/{word[::-1]}")
    with pytest.raises(onebit.CollectiveError, match="has closed the connection"):
        receive_tensors(link, 0, CPU, "test")
    assert giver.followers == 0
    giver.close()
