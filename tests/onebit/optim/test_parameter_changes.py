"""Parameters and groups that change during a run: accepted in stage 1, refused in stage 2, and never half done."""

from unittest import mock

import pytest
import torch
from torch import nn

import onebit
from onebit.kernels import backend
from onebit.optim import flat_state
from tests import internals
from tests.onebit.optim.contract import started
from tests.onebit.runs import Case, bits, build, kinds, on_ranks, parameters, refused, run, same, snapshot, step_by
from tests.ranks import group

SHAPES = ((7, 9), (33,))


def step_refused(optimizer, params, error, *parts):
    """A step is refused, and nothing has changed."""
    before = bits(params)
    with refused(error, *parts):
        optimizer.step()
    assert bits(params) == before


@pytest.mark.parametrize(("moment", "freeze_step", "last"), [(1, "auto", 10), (5, 7, 7)])
@pytest.mark.parametrize("saved", [False, True])
def test_a_parameter_that_is_added_moves_as_adamws_and_others_keep_their_state(moment, freeze_step, last, saved):
    """AdamW counts each parameter's steps by itself."""
    case = Case(shapes=(*SHAPES, (130,)))
    params, theirs = case.parameters(), case.parameters()
    own = {"lr": 1e-2, "betas": (0.9, 0.95), "weight_decay": 0.1}
    ours = {"freeze_step": freeze_step, "block_size": 32, **own}
    optimizer, second = build("OneBitAdam", params[:2], **ours), {"lr": 5e-3, "weight_decay": 0.1}
    adamw = torch.optim.AdamW([{"params": theirs[:2]}, {"params": theirs[2:], **second}], **own)
    for step in range(1, last + 1):
        if step == moment + 1:
            before = snapshot([optimizer.state[p] for p in params[:2]])
            optimizer.add_param_group({"params": params[2:], **second})
            assert same(before, snapshot([optimizer.state[p] for p in params[:2]]))
        if step == moment + 2 and saved:
            state = optimizer.state_dict()
            optimizer = build("OneBitAdam", [{"params": params[:2]}, {"params": params[2:], **second}], **ours)
            optimizer.load_state_dict(state)
        for i, g in enumerate(case.gradients(0, step)):
            late = i == 2 and step <= moment
            params[i].grad, theirs[i].grad = (None, None) if late else (g, g.clone())
        optimizer.step()
        adamw.step()
        for p, q in zip(params, theirs, strict=True):
            assert (p - q).abs().max() <= 1e-6 * q.abs().max()
    assert not optimizer.compressing
    optimizer.step()
    assert optimizer.compressing == (freeze_step == 7)


@kinds
@pytest.mark.parametrize("compress", [True, False])
@on_ranks(2)
def test_a_parameter_that_is_added_moves_as_with_an_optimizer_of_its_own(rank, kind, compress):
    """compress=False: also after the freeze."""
    case = Case(kind, shapes=SHAPES, options={"block_size": 32})
    options = {"block_size": 32, "process_group": group()}
    options |= {"var_update_scaler": 7} if kind == "ZeroOneAdam" else {"freeze_step": 8}
    (first, second), (_, alone), (other, _) = case.parameters(), case.parameters(), case.parameters()
    optimizer, twin = build(kind, [first], **options), None
    for step in range(1, 8 if compress else 12):
        if step == 4:
            optimizer.add_param_group({"params": [second], "compress": compress})
            twin = build(kind, [{"params": [alone], "compress": compress}, {"params": [other]}], **options)
        first.grad, second.grad = case.gradients(rank, step)
        other.grad, alone.grad = case.gradients(rank, step)
        optimizer.step()
        if twin is not None:
            twin.step()
            assert (second - alone).abs().max() <= 1e-6 * alone.abs().max()
    assert optimizer.compressing != compress


@pytest.mark.filterwarnings("ignore:onebit. freeze_step=4 without")
@kinds
@pytest.mark.parametrize(("saved", "corrected"), [(False, True), (True, True), (False, False)])
def test_the_variance_of_an_added_parameter_is_frozen_as_that_of_the_others(kind, saved, corrected):
    """It has weights of fewer steps: what is divided by is what AdamW, which counts them by itself, would divide by.
    Without bias correction it stays as it is."""
    options = {"betas": (0.9, 0.999), "variance_floor": 0.0, "bias_correction": corrected}
    options |= {"var_update_scaler": 3} if kind == "ZeroOneAdam" else {"freeze_step": 4}
    first, second = parameters((40,), (33,))
    optimizer = build(kind, [first], **options)
    for step in range(5):
        if step == 3:
            optimizer.add_param_group({"params": [second]})
        if step == 4 and saved:
            state = optimizer.state_dict()
            optimizer = build(kind, [{"params": [first]}, {"params": [second]}], **options)
            optimizer.load_state_dict(state)
        first.grad, second.grad = torch.full_like(first, 2.0), torch.full_like(second, 2.0)
        optimizer.step()
    assert optimizer.compressing
    weights = [1 - 0.999**n for n in (4, 4 if corrected else 1)]
    if kind == "ZeroOneAdam":
        found, expected = [optimizer.state[p]["exp_avg_sq"] for p in (first, second)], [4.0 * w for w in weights]
    else:
        [state], expected = internals.states(optimizer), [0.5 if corrected else 0.5 * w**-0.5 for w in weights]
        found = [state.view("denominator", i) for i in range(2)]
    for values, value in zip(found, expected, strict=True):
        torch.testing.assert_close(values, torch.full_like(values, value), rtol=1e-4, atol=0)


def test_the_last_step_before_a_group_is_added_is_measured_without_it():
    """Each number of a model of two dtypes is corrected by the beta2 of its group."""
    ratios = []
    for added in (False, True):
        params = [nn.Parameter(torch.ones(40, dtype=dtype)) for dtype in (torch.float32, torch.bfloat16)]
        optimizer = build("OneBitAdam", params, betas=(0.9, 0.5), freeze_step=onebit.FreezeRule(window=1))
        for step in range(3):
            if added and step == 2:
                optimizer.add_param_group({"params": parameters((4,)), "betas": (0.9, 0.999)})
            for p in params:
                p.grad = torch.full_like(p, 3.0**step)
            optimizer.step()
        ratios.append(optimizer.freeze_ratio)
    assert ratios[0] == ratios[1] is not None


@kinds
@on_ranks(2)
def test_ranks_add_a_param_group_before_the_freeze_and_are_refused_one_after_it(rank, kind):
    case = Case(kind, shapes=(*SHAPES, (130,)))
    params = case.parameters()
    optimizer = build(kind, params[:2], freeze_step=6, block_size=32, process_group=group())
    run(case, rank, optimizer, params, 1, 3)
    optimizer.add_param_group({"params": params[2:], "lr": 5e-3})
    run(case, rank, optimizer, params, 4, 12)
    with refused(ValueError, "stage 2 has begun", "before the freeze", "new optimizer"):
        optimizer.add_param_group({"params": parameters((4,))})
    assert len(optimizer.param_groups) == 2 and optimizer.compressing
    return bits(params)


def test_a_wrong_param_group_is_not_added():
    params = parameters((40,))
    optimizer = build("OneBitAdam", params)
    for wrong, error in (
        ({"params": parameters((4,)), "lr": -1.0}, ValueError),
        ({"params": [nn.Parameter(torch.zeros(4).double())]}, TypeError),
        ({"params": [nn.Parameter(torch.zeros(3, device="meta"))]}, ValueError),
        ({"params": params}, ValueError),
    ):
        with pytest.raises(error):
            optimizer.add_param_group(wrong)
        assert len(optimizer.param_groups) == 1
    step_by(optimizer)


def change(p, what):
    """torch lets a gradient be assigned only in the parameter's dtype; one that changes under the parameter."""
    p.grad, p.data = None, torch.zeros(34) if what == "shape" else p.data.half()
    if what == "shape":
        p.grad = torch.ones(34)
    elif what == "gradient's dtype":
        p.grad = torch.ones(33, dtype=torch.float16)
        p.data = p.data.float()


@pytest.mark.parametrize("freeze_step", [50, 2], ids=["stage 1", "stage 2"])
def test_a_parameter_that_has_become_another_is_refused(freeze_step):
    for what, error, *parts in (
        ("shape", ValueError, "parameter 1", "34 elements", "33", "new one"),
        ("dtype", TypeError, "parameter 1", "float16", "float32"),
        ("gradient's dtype", TypeError, "gradient 1", "float16", "float32"),
    ):
        params, optimizer = started(Case(shapes=SHAPES, options={"freeze_step": freeze_step}), 4)
        change(params[1], what)
        step_refused(optimizer, params, error, *parts)


@pytest.mark.parametrize("switched", [False, True])
def test_requires_grad_changed_after_the_freeze_is_refused(switched):
    case = Case(shapes=SHAPES, options={"freeze_step": 2})
    params = case.parameters()
    params[1].requires_grad_(not switched)
    optimizer = case.build(params)
    run(case, 0, optimizer, params, 1, 4)
    params[1].requires_grad_(switched)
    step_refused(optimizer, params, ValueError, "changed after the freeze", "requires_grad", "Put them back", "new op")
    params[1].requires_grad_(not switched)
    before = bits(params)
    run(case, 0, optimizer, params, 5, 5)
    assert bits(params) != before


@kinds
def test_requires_grad_may_change_before_the_freeze(kind):
    """A part of the model that is thawed during stage 1, while the rest keeps its state."""
    case = Case(kind, shapes=SHAPES, options={"freeze_step": 5})
    params = case.parameters()
    params[1].requires_grad_(False)
    optimizer = case.build(params)
    run(case, 0, optimizer, params, 1, 2)
    before = snapshot(optimizer.state[params[0]])
    assert params[1] not in optimizer.state
    params[1].requires_grad_(True)
    run(case, 0, optimizer, params, 3, 3)
    after = optimizer.state[params[0]]["exp_avg"]
    torch.testing.assert_close(after, 0.9 * before["exp_avg"] + 0.1 * case.gradients(0, 3)[0])
    run(case, 0, optimizer, params, 4, 8)
    assert optimizer.compressing


@on_ranks(2)
def test_sparse_gradients_are_refused(rank):
    for frozen in (False, True):
        embedding = nn.Embedding.from_pretrained(torch.full((50, 4), 0.5), freeze=False, sparse=True)
        optimizer = build("OneBitAdam", embedding.parameters(), freeze_step=1, process_group=group())
        for step in range(2 * frozen):
            embedding.weight.grad = torch.full((50, 4), 1.0 + rank + step)
            optimizer.step()
        embedding.weight.grad = None
        embedding(torch.tensor([1, 2, rank])).sum().backward()
        step_refused(optimizer, [embedding.weight], ValueError, "torch.sparse_coo", "sparse=False")


@pytest.mark.parametrize("kind", ["OneBitAdam", "ZeroOneAdam"])
@on_ranks(2)
def test_groups_that_are_frozen(rank, kind):
    """A step does nothing while nothing trains, as torch's optimizers; and it is no other run when the rest does. Here
    the first group, all of them until the third step, and at last of one rank alone."""
    params, twins, late = (parameters((4, 3), (7,)) for _ in range(3))
    first = [p.requires_grad_(False) for p in parameters((3, 2), (5,))]
    for p in late:
        p.requires_grad_(False)
    part, whole, _ = optimizers = [
        build(kind, own, freeze_step=2, process_group=group())
        for own in ([{"params": first}, {"params": params}], late, twins)
    ]
    for _ in range(2):
        assert float(whole.clip_grad_norm_(1.0)) == 0
        whole.step()
        whole.zero_grad()
    assert bits(late) == bits(twins) and whole.steps == 0
    whole.load_state_dict(whole.state_dict())
    for p in late:
        p.requires_grad_(True)
    for step in range(5):
        for own in (params, twins, late):
            source = torch.Generator().manual_seed(10 * step + rank)
            for p in own:
                p.grad = torch.randn(p.shape, generator=source)
        for optimizer in optimizers:
            optimizer.step()
    part.load_state_dict(part.state_dict())
    assert bits(params) == bits(twins) == bits(late)
    assert all(optimizer.compressing for optimizer in optimizers)
    differ = build(kind, [p.requires_grad_(rank == 0) for p in parameters((3, 2))], process_group=group())
    with pytest.raises(ValueError, match="the ranks do not agree"):
        differ.step()


@kinds
@on_ranks(2)
def test_parameters_may_move_to_another_device_before_the_first_step(rank, kind):
    """A trainer moves a model that has its optimizer. The other device is "meta", where nothing can be sent."""
    case = Case(kind, SHAPES, steps=6, options={"freeze_step": 3, "block_size": 32})
    moved = [nn.Parameter(torch.empty_like(p, device="meta")) for p in case.parameters()]
    with mock.patch.object(flat_state, "backend", lambda device: backend(torch.device("cpu"))):
        optimizer = case.build(moved, group())
    params = case.parameters()
    move(moved, [nn.Parameter(p.detach().clone()) for p in params])
    other = case.build(params, group())
    optimizer.load_state_dict(other.state_dict())  # accelerate loads before the first step
    for each, its in ((optimizer, moved), (other, params)):
        run(case, rank, each, its, 1, case.steps)
    assert bits(moved) == bits(params) and optimizer.compressing


@on_ranks(2)
def test_the_model_of_a_rank_that_joins_may_have_moved(rank):
    case = Case(shapes=SHAPES, steps=6, options={"freeze_step": 3, "block_size": 32})
    params = case.parameters()
    given = [nn.Parameter(torch.empty_like(p, device="meta")) for p in params] if rank else params
    with mock.patch.object(flat_state, "backend", lambda device: backend(torch.device("cpu"))):
        optimizer = case.build(given, group(0 if rank else 1))
    if rank == 0:
        run(case, rank, optimizer, given, 1, 4)
    if rank:
        move(given, [nn.Parameter(torch.zeros_like(p)) for p in params])
    onebit.reform(optimizer, group())
    run(case, rank, optimizer, given, 5, case.steps)
    return bits(given)


@kinds
@on_ranks(2)
def test_a_model_may_be_cast_before_the_first_step(rank, kind):
    case = Case(kind, SHAPES, steps=6, options={"freeze_step": 3, "block_size": 32})
    params, cast = case.parameters(), case.but(dtype="bfloat16")
    others, optimizer = cast.parameters(), case.build(params, group())
    for p in params:
        p.data = p.data.bfloat16()
    for each, its in ((optimizer, params), (cast.build(others, group()), others)):
        run(cast, rank, each, its, 1, case.steps)
    assert bits(params) == bits(others) and optimizer.compressing


@pytest.mark.parametrize("steps", [2, 5], ids=["stage 1", "stage 2"])
def test_a_model_that_is_cast_later_goes_on_with_a_load(steps):
    case = Case(shapes=SHAPES, steps=8, options={"freeze_step": 3, "block_size": 32})
    params = case.parameters()
    optimizer = case.build(params)
    run(case, 0, optimizer, params, 1, steps)
    for p in params:
        p.data, p.grad = p.data.bfloat16(), None
    case = case.but(dtype="bfloat16")
    words = ("parameter 0 has dtype torch.bfloat16, and had torch.float32", "was cast", "load_state_dict")
    with refused(TypeError, *words):
        run(case, 0, optimizer, params, steps + 1, steps + 1)
    optimizer.load_state_dict(optimizer.state_dict())
    before = [p.detach().clone() for p in params]
    run(case, 0, optimizer, params, steps + 1, case.steps)
    assert all(bool((p != x).any()) and bool(p.isfinite().all()) for p, x in zip(params, before, strict=True))


def test_a_state_that_is_there_moves_with_a_load():
    """Accelerate moves it so."""
    case = Case(shapes=SHAPES, steps=6, options={"freeze_step": 3, "block_size": 32})
    params, others = case.parameters(), case.parameters()
    optimizer, twin = case.build(params), case.build(others)
    for each, its in ((optimizer, params), (twin, others)):
        run(case, 0, each, its, 1, 2)
    homes = [nn.Parameter(p.detach().clone()) for p in params]
    with mock.patch.object(flat_state, "backend", lambda device: backend(torch.device("cpu"))):
        move(params, [nn.Parameter(torch.empty_like(p, device="meta")) for p in params])
        with refused(ValueError, "moved to meta", "is on cpu", "load_state_dict(optimizer.state_dict())"):
            optimizer.step()
        state = snapshot(optimizer.state_dict())
        optimizer.load_state_dict(state)
        assert internals.device(optimizer).type == optimizer.gradients.flags.device.type == "meta"
        assert {state.device.type for state in internals.states(optimizer)} == {"meta"}
    move(params, homes)
    optimizer.load_state_dict(state)
    for each, its in ((optimizer, params), (twin, others)):
        run(case, 0, each, its, 3, case.steps)
    assert bits(params) == bits(others) and optimizer.compressing


def test_frozen_parameters_may_be_of_any_kind_and_elsewhere_and_do_not_change():
    case = Case(shapes=SHAPES, steps=6, options={"freeze_step": 3, "block_size": 32, "weight_decay": 0.5})
    params, others = case.parameters(), case.parameters()
    frozen = [nn.Parameter(torch.zeros(4, dtype=torch.uint8), requires_grad=False)]
    frozen += [nn.Parameter(torch.ones(3, 4).t(), requires_grad=False)]
    before, elsewhere = bits(frozen), nn.Parameter(torch.empty(3, device="meta"), requires_grad=False)
    optimizer, twin = case.build([*frozen, *params]), case.build(others)
    optimizer.param_groups[0]["params"].insert(0, elsewhere)
    for each, its in ((optimizer, params), (twin, others)):
        run(case, 0, each, its, 1, case.steps)
    assert bits(params) == bits(others) and optimizer.compressing
    assert bits(frozen) == before and list(optimizer.state) == params


def test_a_move_that_is_not_possible_changes_nothing():
    params = parameters((4,))
    optimizer = build("OneBitAdam", params)
    here = nn.Parameter(params[0].detach().clone())
    move(params, [nn.Parameter(torch.empty(4, device="meta"))])
    for _ in range(2):
        with refused(ValueError, "no kernels for tensors on meta"):
            optimizer.find_ranks()
    move(params, [here])
    step_by(optimizer)


def move(params, to):
    """Move parameters as Module.to does."""
    for p, there in zip(params, to, strict=True):
        p.grad = None
        torch.utils.swap_tensors(p, there)
