"""Gradients of 1, 4 and 8 bits under any optimizer, with real ranks: against a loop that averages by hand, over DDP's
bucket rebuild, and over a restart."""

import copy
import io
import itertools
import re
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import onebit
from onebit.optim.sharding import local
from onebit.parallel.compression import UNCOMPRESSED
from tests.onebit.runs import bits, nodes_of, on_ranks, on_warnings, same, snapshot
from tests.ranks import group, run_ranks

FORGOTTEN = {"residuals": {}, "sent": 0, "steps": UNCOMPRESSED}  # what a run past its first steps would have saved


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 1))


def loss_of(net, step, rank, size):
    data = torch.Generator().manual_seed(step * size + rank)
    x = torch.randn(32, 64, generator=data)
    return ((net(x) - torch.tanh(x.sum(1, keepdim=True) / 8)) ** 2).mean()


class Run:
    """A model with compressed gradients under AdamW. how: "ddp", "compiled" (DDP's), "plain", "hsdp" (2 x 2)."""

    def __init__(self, how="ddp", bits=4, reply="auto", each=1, sgd=False, **options):
        self.net = self.wrapped = model()
        self.how, ranks = how, group()
        if how == "hsdp":
            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
            fully_shard(self.net, mesh=mesh["shard"])
            self.net.set_force_sum_reduction_for_comms(True)  # Gloo's average is a sum
            ranks = mesh.get_group("replicate")
        elif how != "plain":
            size = 25 if how == "compiled" else 0.03  # of a bucket: torch.compile does not take one that is so small
            self.wrapped = DistributedDataParallel(self.net, process_group=ranks, **{"bucket_cap_mb": size, **options})
        if how == "compiled":
            self.wrapped = torch.compile(self.wrapped, backend="eager")
        node_group = None if each == 1 else nodes_of(group(), each).node
        own = {} if how in ("ddp", "compiled") else {"process_group": ranks}  # DDP's is known
        self.compression = onebit.compress_gradients(self.wrapped, bits, reply=reply, node_group=node_group, **own)
        kind = partial(torch.optim.SGD, lr=0.02, momentum=0.9) if sgd else partial(torch.optim.AdamW, fused=True)
        self.optimizer = kind(self.net.parameters())

    def steps(self, steps, rank, size, before=lambda: None):
        for step in steps:
            self.optimizer.zero_grad()
            loss_of(self.wrapped, step, rank, size).backward()
            if self.how in ("plain", "hsdp"):
                self.compression()
            before()
            self.optimizer.step()
        return self.end()

    def end(self):
        return bits([local(p).detach() for p in self.net.parameters()])

    def state(self):
        """What a checkpoint has of it; of a sharded model this rank's part."""
        self.compression.synchronize()
        return {
            "net": self.net.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "compression": self.compression.state_dict(),
        }

    def load(self, state):
        self.net.load_state_dict(state["net"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.compression.load_state_dict(state["compression"])


def parts(state):
    return [local(each) for each in state["compression"]["residuals"].values()]


def with_the_hook(rank, size, of_bits, reply, each=1):
    run, sent = Run("ddp", of_bits, reply, each, sgd=True), []
    run.steps(range(12), rank, size, before=lambda: sent.append(run.compression.wire_bytes))
    return list(run.net.parameters()), sent


def by_hand(rank, size, of_bits, reply, each=1):
    """The first steps' gradients are averaged in full precision."""
    run = Run("plain", of_bits, reply, each, sgd=True)
    run.compression.__class__ = type("ByHand", (type(run.compression),), {"__call__": lambda self: None})
    parameters, node_group = list(run.net.parameters()), None if each == 1 else nodes_of(group(), each).node
    options = {"bits": of_bits, "reply": reply, "process_group": group(), "node_group": node_group}
    average, count = onebit.CompressedAllReduce([p.numel() for p in parameters], chunks=1, **options), itertools.count()

    def average_gradients():
        if next(count) >= UNCOMPRESSED:
            average([p.grad for p in parameters])
        else:
            for p in parameters:
                p.grad.div_(size)
                torch.distributed.all_reduce(p.grad, group=group())

    run.steps(range(12), rank, size, before=average_gradients)
    return parameters


@pytest.mark.parametrize(
    ("size", "of_bits", "reply", "each"),
    [(2, 4, "direct", 1), (3, 8, 1, 1), (3, 1, 1, 1), (4, 4, 1, 2), (4, 8, "direct", 2)],
)
def test_the_hook_gives_what_averaging_by_hand_gives(size, of_bits, reply, each):
    """Scales do not depend on who averages which bucket. Bit for bit where a mean is of two numbers: the order of more
    depends on the bucket."""
    found = run_ranks(size, with_the_hook, of_bits, reply, each)
    expected = run_ranks(size, by_hand, of_bits, reply, each)[0]
    for parameters, sent in found:
        assert bits(parameters) == bits(found[0][0])
        if size == 2:
            assert bits(parameters) == bits(expected)
        else:
            torch.testing.assert_close(parameters, expected, rtol=0, atol=1e-4)
        assert sent[:UNCOMPRESSED] == [0] * UNCOMPRESSED
        assert sent[-1] == 8 * (sent[-1] - sent[-2]) > 0
    if each > 1:
        assert found[0][1][-1] < 0.6 * run_ranks(2, with_the_hook, of_bits, "direct")[0][1][-1]


@on_ranks(2)
def test_ddp_its_compiled_form_and_a_call_after_backward_give_the_same(rank, size):
    """Two ranks' mean does not depend on the order."""
    ends = [
        Run(how, each_bits).steps(range(8), rank, size) for how in ("ddp", "plain", "compiled") for each_bits in (4, 8)
    ]
    assert ends[:2] == ends[2:4] == ends[4:] and ends[0] != ends[1]
    return ends


@on_ranks(2)
def test_a_whole_step_that_is_compiled_gives_the_same(rank, size):
    """What the hook and a call do is not compiled."""
    ends = []
    for how in ("ddp", "plain"):
        for compiled in (False, True):
            run = Run(how, bucket_cap_mb=25)

            def step(x, run=run, how=how):
                run.optimizer.zero_grad()
                run.wrapped(x).square().mean().backward()
                if how == "plain":
                    run.compression()
                run.optimizer.step()

            once = torch.compile(step, backend="eager") if compiled else step
            for each in range(UNCOMPRESSED + 2):
                once(torch.randn(8, 64, generator=torch.Generator().manual_seed(size * each + rank)))
            ends.append(run.end())
            assert run.compression.wire_bytes > 0
    assert len(set(ends)) == 1
    return ends


@pytest.mark.parametrize(("size", "how", "each"), [(3, "ddp", 1), (3, "plain", 1), (4, "ddp", 2), (3, "forgotten", 1)])
@on_ranks()
def test_a_resumed_run_goes_on_bit_for_bit_unless_it_forgets_its_residuals(rank, size, how, each):
    return resumed(rank, size, how, each)


def resumed(rank, size, how, each=1):
    kind = "ddp" if how == "forgotten" else how
    run, again = (Run(kind, each=each) for _ in range(2))  # DDP rebuilds the buckets of both, at other steps
    run.steps(range(7), rank, size)
    saved, file = run.state(), io.BytesIO()
    if how == "hsdp":
        loaded = copy.deepcopy(saved)  # a file would have this rank's parts alone
    else:
        torch.save(saved, file)
        file.seek(0)
        loaded = torch.load(file, weights_only=True)
    if how == "forgotten":
        loaded["compression"]["residuals"] = {}
    again.load(loaded)
    residuals = parts(saved)
    assert all(each.any() for each in residuals if each.numel() > 1)
    if how != "forgotten":
        assert bits(parts(again.state())) == bits(residuals)
    sent = again.compression.wire_bytes
    assert again.compression.report().sent == 0 < sent
    expected = run.steps(range(7, 12), rank, size)
    assert (again.steps(range(7, 12), rank, size) == expected) == (how != "forgotten")
    return expected, saved["compression"]


def steps_of(rank, size, saved, loads, steps):
    """Return where a run of so many ranks ends, and its state; `loads`: the ranks that load one."""
    run = Run()
    if saved is not None:
        run.load(saved if rank in loads else {**saved, "compression": FORGOTTEN})
    run.steps(steps, rank, size)
    return snapshot(run.state())


def test_a_state_is_the_same_on_all_ranks_and_loads_on_another_number():
    """One of them alone loads it, too: then its residuals are a third in the mean, and no rank waits for another."""
    saved = run_ranks(3, steps_of, None, (), range(7))
    assert same(saved[0], saved[1])
    shapes = {name: each.shape for name, each in model().named_parameters()}
    assert {name: each.shape for name, each in saved[0]["compression"]["residuals"].items()} == shapes
    ends = []
    for size, loads in ((2, (0, 1)), (2, (1,)), (2, ()), (3, (0, 1, 2))):
        found = run_ranks(size, steps_of, saved[0], loads, range(7, 10))
        assert all(same(own["net"], found[0]["net"]) for own in found)
        assert all(same(*(each["compression"]["residuals"] for each in (own, found[0]))) for own in found)
        ends.append(found[0]["net"])
    assert not any(same(*pair) for pair in itertools.combinations(ends, 2))


@on_ranks(4, once=True)  # a mesh is of all ranks of the default group
def test_shards_of_a_node_are_averaged_over_the_replicas(rank, size):
    """HSDP 2 x 2 sends less, and ends where DDP does but for what other messages round. It resumes bit for bit, and a
    gradient of one shard that is not finite is seen by all."""
    resumed(rank, size, "hsdp")
    with_a_bad_gradient(rank, size, "hsdp")
    ends = {}
    for how in ("hsdp", "ddp"):
        run = Run(how, bits=8)
        run.steps(range(12), rank, size)
        ends[how] = torch.cat([getattr(p, "full_tensor", p.detach)().flatten() for p in run.net.parameters()])
        ends[how, "sent"] = run.compression.wire_bytes
    start = torch.cat([p.detach().flatten() for p in model().parameters()])
    assert (ends["hsdp"] - ends["ddp"]).norm() < 0.05 * (ends["ddp"] - start).norm()
    assert 0 < ends["hsdp", "sent"] < 0.4 * ends["ddp", "sent"]
    return ends["hsdp"]


@pytest.mark.parametrize("how", ["ddp", "plain"])
@on_ranks(2)
def test_accumulated_gradients_are_averaged_once(rank, size, how):
    """Two half batches in a step: as many messages as steps, and gradients that are their sum."""
    run, once = Run(how), Run(how)
    for step in range(8):
        for each in (run, once):
            each.optimizer.zero_grad()
        with run.wrapped.no_sync() if how == "ddp" else nullcontext():
            loss_of(run.wrapped, step, rank, size).backward()
        loss_of(run.wrapped, step + 50, rank, size).backward()
        (loss_of(once.wrapped, step, rank, size) + loss_of(once.wrapped, step + 50, rank, size)).backward()
        for each in (run, once):
            if how == "plain":
                each.compression()
        found, expected = ([p.grad for p in each.net.parameters()] for each in (run, once))
        scale = max(float(g.abs().max()) for g in expected)
        torch.testing.assert_close(found, expected, rtol=0, atol=scale / 7)
        for each in (run, once):
            each.optimizer.step()
    assert run.compression.wire_bytes == once.compression.wire_bytes > 0
    return run.end()


@pytest.mark.parametrize("how", ["ddp", "plain"])
@on_ranks(2)
def test_a_parameter_that_a_rank_does_not_use_counts_as_zeros(rank, size, how):
    run = Run(how, find_unused_parameters=True) if how == "ddp" else Run(how)
    for step in range(8):
        run.optimizer.zero_grad()
        loss_of(run.wrapped, step, rank, size).backward()
        if how == "plain":
            if rank == 1:
                run.net[2].weight.grad = None
            run.compression()
        run.optimizer.step()
    assert all(p.grad.any() for p in run.net.parameters())
    return run.end()


@pytest.mark.parametrize("how", ["ddp", "plain"])
@on_ranks(4)
def test_a_gradient_that_is_not_finite_on_one_rank_is_seen_by_the_scaler_of_all(rank, size, how):
    return with_a_bad_gradient(rank, size, how)


def with_a_bad_gradient(rank, size, how):
    """The step is skipped on every rank."""
    run, scaler = Run(how), torch.amp.GradScaler("cpu", init_scale=8.0)
    ends = []
    for step in range(8):
        run.optimizer.zero_grad()
        loss = loss_of(run.wrapped, step, rank, size)
        bad = (rank, step) == (1, 6)
        scaler.scale(loss * (torch.inf if bad and how == "ddp" else 1.0)).backward()
        if how != "ddp":
            local(run.net[0].weight.grad)[0, 0] += torch.inf if bad else 0.0  # of a shard, in hsdp
            run.compression()
        scaler.unscale_(run.optimizer)
        if step == 6:
            found = [local(p.grad).isnan().all() for p in run.net.parameters()]
            assert all(found)
        scaler.step(run.optimizer)
        scaler.update()
        ends.append(run.end())
    assert ends[6] == ends[5] != ends[7] and scaler.get_scale() == 4.0
    return ends[7]


@on_ranks(2)
def test_residuals_are_zero_with_one_warning_where_ranks_differ(rank, size):
    """A state has the same names before the first step, so that loaders that fill a state in place find all."""
    run = Run()
    first = run.compression.state_dict()
    run.steps(range(6), rank, size)
    with on_warnings() as said:
        found = run.compression.state_dict()
    zeros = {name: torch.zeros_like(each) for name, each in run.net.named_parameters()}
    assert same([first, found], [{"residuals": zeros, "sent": 0, "steps": 0}, {**found, "residuals": zeros}])
    assert (found["sent"], found["steps"]) == (run.compression.wire_bytes, 6)
    assert len(said) == 1 and "Call synchronize() on every rank before state_dict()" in said[0]


@on_ranks(3)
def test_a_parameter_that_is_frozen_keeps_its_residual(rank, size):
    """It is the mean over ranks, and the server's, when all are synchronized; and what was sent is not forgotten."""
    run, other = Run("plain"), Run("plain")
    for each in (run, other):
        each.steps(range(7), rank, size)
    expected = run.state()["compression"]["residuals"]["0.weight"]
    sent = other.compression.wire_bytes
    other.net[0].weight.requires_grad_(False)
    other.steps(range(7, 8), rank, size)
    with on_warnings() as said:
        assert not any(each.any() for each in other.compression.state_dict()["residuals"].values())
    assert len(said) == 1
    found = other.state()["compression"]
    torch.testing.assert_close(found["residuals"]["0.weight"], expected, rtol=0, atol=float(expected.abs().max()) / 200)
    assert found["residuals"].keys() == run.compression.state_dict()["residuals"].keys()
    assert sent < found["sent"] < 4 / 3 * sent
    return found["residuals"]["0.weight"]


@on_ranks(2)
def test_the_report_compares_with_the_first_steps(rank, size):
    run = Run(bits=4)
    assert "no verdict yet" in str(run.compression.report())
    run.steps(range(10), rank, size)
    report = run.compression.report()
    assert (report.uncompressed.taken, report.compressed.taken, report.bits, report.skipped) == (4, 6, 4, None)
    elements = sum(p.numel() for p in run.net.parameters())
    assert report.sent == run.compression.wire_bytes + 4 * 4 * elements
    assert report.sent_by_fp32 == 10 * 4 * elements
    assert "4-bit steps" in str(report) and re.search("\n4 bits +6 steps", str(report))


def alone(net, of_bits=4):
    """Compression of one process's gradients, past its first steps."""
    compression = onebit.compress_gradients(net, of_bits)
    compression.load_state_dict(FORGOTTEN)
    return compression


def one_step(net, **options):
    compression, source = alone(net, **options), torch.Generator().manual_seed(1)
    for p in net.parameters():
        p.grad = torch.empty_like(p).copy_(torch.randn(p.shape, generator=source))
    compression()
    return compression


def test_names_are_those_of_the_model_wrapped_or_not():
    nested = nn.Module()
    nested.weight, nested.module = nn.Parameter(torch.ones(2)), nn.Linear(2, 2, bias=False)
    nested.frozen = nn.Parameter(torch.ones(2), requires_grad=False)
    assert list(one_step(nested).state_dict()["residuals"]) == ["weight", "module.weight"]


def test_residuals_move_to_other_parameters_together_and_to_other_strides():
    """Residuals are in the order of a parameter's memory, and saved in its shape."""
    net, other = nn.Conv2d(2, 3, 2), nn.Conv2d(2, 3, 2).to(memory_format=torch.channels_last)
    saved = one_step(net).state_dict()
    assert all(each.any() for each in saved["residuals"].values())
    again = alone(other)
    again.load_state_dict(saved)
    assert same(again.state_dict(), saved)
    other.bias.requires_grad_(False)  # the reducer is another one
    other.weight.grad = torch.zeros_like(other.weight, memory_format=torch.contiguous_format)
    again()
    found, left = other.weight.grad, again.state_dict()["residuals"]
    assert found.stride() == other.weight.stride() and found.any()
    torch.testing.assert_close(found + left["weight"], saved["residuals"]["weight"], rtol=0, atol=1e-3)
    assert torch.equal(left["bias"], saved["residuals"]["bias"])
    again.load_state_dict(saved)
    assert same(again.state_dict(), saved)


def test_parameters_of_two_dtypes_have_messages_of_their_own():
    net = nn.Sequential(nn.Linear(64, 8).bfloat16(), nn.Linear(8, 4))
    compression = one_step(net)
    assert [p.grad.dtype for p in net.parameters()] == [torch.bfloat16] * 2 + [torch.float32] * 2
    assert all(p.grad.any() for p in net.parameters())
    assert compression.state_dict()["residuals"].keys() == dict(net.named_parameters()).keys()


def test_a_state_of_something_else_is_refused_and_changes_nothing():
    net = nn.Linear(2, 2)
    compression = one_step(net)
    saved = compression.state_dict()
    weight = saved["residuals"]["weight"]
    for residuals, error, message in (
        ({"weight": weight, "body": weight}, ValueError, r"no parameter 'body'"),
        (
            {"weight": weight, "bias": torch.zeros(3)},
            ValueError,
            r"bias has shape \[3\] in the state, here it is \[2\]",
        ),
        ({"bias": torch.zeros(2), "weight": weight * torch.inf}, ValueError, "weight has values .* not finite"),
        ({"weight": weight + 2.0**41}, ValueError, "weight has values .* beyond 2"),
        ({"weight": weight.long()}, TypeError, "floating-point"),
        ([weight], TypeError, "a dict by parameter names, not a list"),
    ):
        with pytest.raises(error, match=message):
            compression.load_state_dict({**saved, "residuals": residuals})
    for other, error, message in (
        ({"weight": weight}, ValueError, "not a state of compressed gradients"),
        ({**saved, "sent": None}, ValueError, "'sent' .* not None"),
        ({**saved, "steps": -1}, ValueError, "'steps' .* not -1"),
        (None, TypeError, "NoneType"),
    ):
        with pytest.raises(error, match=message):
            compression.load_state_dict(other)
    assert same(compression.state_dict(), saved)


@on_ranks(2)
def test_a_wrong_call_is_an_error_that_says_what_to_do(rank, size):
    net = model()
    ddp = DistributedDataParallel(net, process_group=group())
    for wrong, error, message in (
        (lambda: onebit.compress_gradients(net, bits=2), ValueError, "bits=2: an element has 1, 4 or 8"),
        (lambda: onebit.compress_gradients(net, reply=2), ValueError, "reply=2: it must be one of"),
        (lambda: onebit.compress_gradients(net.parameters()), TypeError, "needs a model, a torch.nn.Module"),
        (onebit.compress_gradients(ddp), RuntimeError, "leave this call out"),
        (lambda: onebit.compress_gradients(ddp), ValueError, "has a communication hook already"),
    ):
        with pytest.raises(error, match=message):
            wrong()
    with pytest.raises(ValueError, match="a model with parameters"):
        onebit.compress_gradients(nn.ReLU())
    later = model()
    compression = onebit.compress_gradients(later, process_group=group())
    later.append(nn.Linear(1, 1))
    with pytest.raises(ValueError, match="when the model has all its parameters, after fully_shard"):
        compression()


@pytest.mark.parametrize("how", ["ddp", "plain"])
@pytest.mark.parametrize(
    ("kind", "error", "message"),
    [
        ("sparse", ValueError, r"layout torch\.sparse_coo"),
        ("float64", TypeError, "dtype torch.float64 are not supported"),
        ("complex64", TypeError, "dtype torch.complex64 are not supported"),
    ],
)
@on_ranks(2)
def test_a_gradient_that_cannot_be_compressed_is_refused_from_the_first_step_on(rank, how, kind, error, message):
    if kind == "sparse":
        net, x = nn.Embedding(4, 2, sparse=True), torch.tensor([1])
    else:
        net, x = (made(4, 4, dtype=getattr(torch, kind)) for made in (nn.Linear, torch.ones))
    wrapped = DistributedDataParallel(net, process_group=group()) if how == "ddp" else net
    compression = onebit.compress_gradients(wrapped, process_group=group())
    for steps in (0, UNCOMPRESSED):
        compression.load_state_dict({**FORGOTTEN, "steps": steps})
        net.zero_grad()
        with pytest.raises(error, match=message):
            wrapped(x).abs().sum().backward()
            compression()
        if how == "ddp":
            return  # DDP does not go on after an error


@pytest.mark.parametrize("what", ["bits", "node_group", "steps", "frozen"])
@on_ranks(2)
def test_ranks_that_differ_are_told_in_the_first_step(rank, what):
    net, options = model(), {"bits": 8, "node_group": "auto"}
    net[0].bias.requires_grad_((what, rank) != ("frozen", 1))
    own = {what: options[what]} if what in options and rank == 1 else {}
    compression = onebit.compress_gradients(net, process_group=group(), **own)
    if (what, rank) == ("steps", 1):
        compression.load_state_dict(FORGOTTEN)
    net(torch.ones(1, 64)).sum().backward()
    with pytest.raises(ValueError, match=r"do not agree: .*rank 1"):
        compression()
