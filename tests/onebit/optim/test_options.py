"""What a user can get wrong: messages say what is wrong, why, and what to do; nothing hangs, nothing half happens."""

import ast
import dataclasses
import inspect
import pydoc
import re
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import onebit
from onebit.optim.options import OptionArguments, Options
from tests.onebit.runs import Case, arrays, bits, kinds, run, same, snapshot, take
from tests.ranks import group, run_ranks


def parameters(*shapes):
    return [
        nn.Parameter(torch.randn(shape, generator=torch.Generator().manual_seed(i))) for i, shape in enumerate(shapes)
    ]


def build(kind, params=None, **options):
    return getattr(onebit, kind)(parameters((3, 2), (5,)) if params is None else params, **options)


def assert_says(caught, *parts):
    """Every part is in the message, which is also long enough to say why."""
    text = str(caught.value)
    for part in parts:
        assert part in text, f"{part!r} is not in: {text}"


nan, inf = float("nan"), float("inf")
WRONG = [
    ("lr", -1e-3, ["lr=-0.001", "0 or more"]),
    ("lr", nan, ["lr=nan", "finite"]),
    ("lr", inf, ["lr=inf", "finite"]),
    ("lr", "fast", ["lr='fast'", "number"]),
    ("lr", torch.tensor([1e-3, 1e-3]), ["lr", "2 elements", "one number"]),
    ("lr", torch.tensor(-1e-3), ["lr", "0 or more"]),
    ("lr", torch.tensor(nan), ["lr", "finite"]),
    ("betas", (1.0, 0.999), ["betas=(1.0, 0.999)", "below 1", "(0.9, 0.999)"]),
    ("betas", (0.9, 1.0), ["betas=(0.9, 1.0)", "below 1"]),
    ("betas", (-0.1, 0.9), ["betas=(-0.1, 0.9)", "at least 0"]),
    ("betas", (0.9, nan), ["betas=(0.9, nan)"]),
    ("betas", (0.9,), ["betas=(0.9,)", "two"]),
    ("betas", 0.9, ["betas=0.9", "two"]),
    ("eps", -1e-8, ["eps=-1e-08", "0 or more", "denominator"]),
    ("eps", nan, ["eps=nan", "finite"]),
    ("weight_decay", -0.1, ["weight_decay=-0.1", "0 or more"]),
    ("weight_decay", inf, ["weight_decay=inf", "finite"]),
    ("freeze_step", -1, ["freeze_step=-1", "stage 1", "whole number", '"auto"']),
    ("freeze_step", 1.5, ["freeze_step=1.5", "whole number", '"auto"']),
    ("freeze_step", "soon", ["freeze_step='soon'", "whole number", '"auto"']),
    ("freeze_step", True, ["freeze_step=True", "whole number"]),
    ("freeze_step", None, ["freeze_step=None", "whole number"]),
    ("freeze_threshold", 0.0, ["freeze_threshold=0.0", "between 0 and 1", "0.96"]),
    ("freeze_threshold", 1.0, ["freeze_threshold=1.0", "between 0 and 1"]),
    ("freeze_threshold", 4, ["freeze_threshold=4", "between 0 and 1"]),
    ("freeze_threshold", nan, ["freeze_threshold=nan", "between 0 and 1"]),
    ("freeze_threshold", "high", ["freeze_threshold='high'", "between 0 and 1"]),
    ("freeze_window", 0, ["freeze_window=0", "1 or more", "None"]),
    ("freeze_window", 2.5, ["freeze_window=2.5", "1 or more"]),
    ("zero_variance", "alive", ["zero_variance='alive'", "floor", "hold"]),
    ("scale", "row", ["scale", "'row'", "block", "tensor"]),
    ("norm", "l3", ["norm", "'l3'", "l1", "l2"]),
    ("chunks", 0, ["chunks=0", "positive", '"auto"']),
    ("chunks", 1.5, ["chunks=1.5", "positive", '"auto"']),
    ("chunks", "many", ["chunks='many'", '"auto"']),
    ("gradient_dtype", torch.float32, ["gradient_dtype=torch.float32", "stage 1", "torch.bfloat16", "None"]),
    ("gradient_dtype", "bfloat16", ["gradient_dtype='bfloat16'", "torch.bfloat16"]),
    ("block_size", 0, ["block_size", "multiple of 32", "got 0", "2048"]),
    ("block_size", 48, ["block_size", "multiple of 32", "got 48"]),
    ("block_size", 32768, ["block_size", "at most 16384", "got 32768"]),
    ("block_size", 64.0, ["block_size", "multiple of 32", "got 64.0"]),
]


@pytest.mark.parametrize(("name", "value", "parts"), WRONG, ids=[f"{name}={value!r}" for name, value, _ in WRONG])
@kinds
def test_a_wrong_option_is_refused_at_once(kind, name, value, parts):
    with pytest.raises(ValueError) as caught:
        build(kind, **{name: value})
    assert_says(caught, *parts)


GROUP_WRONG = [entry for entry in WRONG if entry[0] in ("lr", "betas", "eps", "weight_decay")]


@pytest.mark.parametrize(("name", "value", "parts"), GROUP_WRONG, ids=[f"{name}={v!r}" for name, v, _ in GROUP_WRONG])
@kinds
def test_so_is_one_of_a_param_group(kind, name, value, parts):
    first, second = parameters((3,), (4,))
    with pytest.raises(ValueError) as caught:
        build(kind, [{"params": [first]}, {"params": [second], name: value}])
    assert_says(caught, *parts)


@kinds
def test_an_unknown_keyword_is_a_type_error(kind):
    with pytest.raises(TypeError, match="freeze_steps"):
        build(kind, freeze_steps=3)
    with pytest.raises(TypeError):
        build(kind, parameters((3,)), 1e-3, (0.9, 0.999), 1e-8, 0.0, 100)  # freeze_step is given by name


@pytest.mark.parametrize(
    "options",
    [
        {"lr": 0.0, "betas": (0.0, 0.0), "eps": 0.0},
        {"lr": torch.tensor(1e-3), "betas": [0.9, 0.99]},
        {"freeze_step": 0, "freeze_threshold": 0.5, "freeze_window": 1, "chunks": 3},
        {"block_size": 32, "zero_variance": "hold", "scale": "tensor", "norm": "l2"},
        {"block_size": 16384, "bias_correction": False, "master_weights": False, "weight_decay": 1},
    ],
)
@kinds
def test_what_is_at_the_edge_is_taken(kind, options):
    params = parameters((3, 2), (5,))
    optimizer = build(kind, params, **options)
    if optimizer.param_groups[0]["eps"] > 0 and options.get("freeze_step") != 0:
        for p in params:
            p.grad = torch.ones_like(p)
        optimizer.step()
        assert all(torch.isfinite(p).all() for p in params)


@kinds
def test_double_parameters(kind):
    with pytest.raises(TypeError) as caught:
        build(kind, [*parameters((4,)), nn.Parameter(torch.zeros(3, 2, dtype=torch.float64))])
    assert_says(caught, "parameter 1 (shape (3, 2))", "float64", "float32, bfloat16 and float16", ".float()")


@kinds
def test_a_parameter_that_is_not_contiguous(kind):
    with pytest.raises(ValueError) as caught:
        build(kind, [*parameters((4,)), nn.Parameter(torch.zeros(3, 2).t())])
    assert_says(caught, "parameter 1 (shape (2, 3), strides (1, 2))", "not contiguous", "contiguous()")


@kinds
def test_parameters_on_several_devices(kind):
    with pytest.raises(ValueError) as caught:
        build(kind, [*parameters((4,)), nn.Parameter(torch.zeros(3, device="meta"))])
    assert_says(caught, "several devices", "cpu", "meta", "one for each device")
    optimizer = build(kind)
    with pytest.raises(ValueError) as caught:
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(3, device="meta"))]})
    assert_says(caught, "several devices")
    assert len(optimizer.param_groups) == 1


@kinds
def test_nothing_to_optimize(kind):
    frozen = parameters((3,), (4,))
    for p in frozen:
        p.requires_grad_(False)
    for params in (frozen, [{"params": []}]):
        with pytest.raises(ValueError, match="no parameter requires a gradient"):
            build(kind, params)
    with pytest.raises(ValueError, match="empty parameter list"):
        build(kind, [])


@kinds
def test_parameters_without_requires_grad_stay_as_they_are(kind):
    params = parameters((40,), (33,))
    params[0].requires_grad_(False)
    before = bits(params[:1])
    optimizer = build(kind, params, weight_decay=0.1, freeze_step=2)
    for _ in range(5):
        params[1].grad = torch.randn(33)
        optimizer.step()
    assert optimizer.compressing
    assert bits(params[:1]) == before
    assert params[0] not in optimizer.state


# Changes under way


@pytest.mark.parametrize("freeze_step", ["auto", 12, 7])
@pytest.mark.parametrize("moment", [1, 5])
def test_add_param_group_before_the_freeze_keeps_the_state_of_others(moment, freeze_step):
    """As AdamW, which counts each parameter's steps by itself: here the gradients before were zero."""
    case = Case(shapes=((7, 9), (33,), (130,)), steps=10)
    params, theirs = case.parameters(), case.parameters()
    optimizer = build("OneBitAdam", params[:2], lr=1e-2, betas=(0.9, 0.95), freeze_step=freeze_step, block_size=32)
    adamw = torch.optim.AdamW([{"params": theirs[:2]}, {"params": theirs[2:], "lr": 0}], lr=1e-2, betas=(0.9, 0.95))
    for o in (optimizer, adamw):
        for g in o.param_groups:
            g["weight_decay"] = 0.1
    last = case.steps if freeze_step == "auto" else min(case.steps, freeze_step)
    for step in range(1, last + 1):
        if step == moment + 1:
            before = snapshot([optimizer.state[p] for p in params[:2]])
            optimizer.add_param_group({"params": params[2:], "lr": 5e-3, "weight_decay": 0.1})
            adamw.param_groups[1]["lr"] = 5e-3
            assert same(before, snapshot([optimizer.state[p] for p in params[:2]]))
        for i, g in enumerate(case.gradients(0, step)):
            late = i == 2 and step <= moment
            params[i].grad = None if late else g
            theirs[i].grad = torch.zeros_like(g) if late else g.clone()
        optimizer.step()
        adamw.step()
        for a, b in zip(arrays(params), arrays(theirs), strict=True):
            assert abs(a - b).max() <= 1e-6 * abs(b).max()
    assert not optimizer.compressing
    if last == freeze_step:
        optimizer.step()
        assert optimizer.compressing


def adding(rank, size, kind):
    case = Case(kind, shapes=((7, 9), (33,), (130,)), steps=12)
    params = case.parameters()
    optimizer = build(kind, params[:2], freeze_step=6, block_size=32, process_group=group())
    for step in range(1, case.steps + 1):
        if step == 4:
            optimizer.add_param_group({"params": params[2:], "lr": 5e-3})
        take(case, rank, optimizer, params, step)
    return optimizer.compressing, bits(params)


@kinds
def test_ranks_that_add_a_param_group_stay_together(kind):
    found = run_ranks(2, adding, kind)
    assert found[0][0]
    assert found[0] == found[1]


def in_stage_2(kind):
    case = Case(kind, shapes=((7, 9), (33,)), options={"freeze_step": 2})
    params = case.parameters()
    optimizer = case.build(params)
    run(case, 0, optimizer, params, 1, 4)
    assert optimizer.compressing
    return case, params, optimizer


@kinds
def test_add_param_group_after_the_freeze(kind):
    case, params, optimizer = in_stage_2(kind)
    with pytest.raises(ValueError) as caught:
        optimizer.add_param_group({"params": parameters((4,))})
    assert_says(caught, "stage 2 has begun", "before the freeze", "new optimizer")
    assert len(optimizer.param_groups) == 1
    take(case, 0, optimizer, params, 5)


@kinds
def test_a_wrong_param_group_is_not_added(kind):
    params = parameters((40,))
    optimizer = build(kind, params)
    for wrong, error in (
        ({"params": parameters((4,)), "lr": -1.0}, ValueError),
        ({"params": [nn.Parameter(torch.zeros(4).double())]}, TypeError),
        ({"params": params}, ValueError),
    ):
        with pytest.raises(error):
            optimizer.add_param_group(wrong)
        assert len(optimizer.param_groups) == 1
    params[0].grad = torch.ones(40)
    optimizer.step()


def changed(kind, frozen):
    """An optimizer in either stage with gradients for its next step, and the bits before."""
    case = Case(kind, shapes=((7, 9), (33,)), options={"freeze_step": 2 if frozen else 50})
    params = case.parameters()
    optimizer = case.build(params)
    run(case, 0, optimizer, params, 1, 4)
    for p, g in zip(params, case.gradients(0, 5), strict=True):
        p.grad = g
    return params, optimizer


@pytest.mark.parametrize("frozen", [False, True])
@kinds
def test_a_parameter_that_changes_its_shape(kind, frozen):
    params, optimizer = changed(kind, frozen)
    params[1].grad = None
    params[1].data = torch.zeros(34)
    params[1].grad = torch.ones(34)
    before = bits(params)
    with pytest.raises(ValueError) as caught:
        optimizer.step()
    assert_says(caught, "parameter 1", "34 elements", "33", "new one")
    assert bits(params) == before


@pytest.mark.parametrize("frozen", [False, True])
@kinds
def test_a_parameter_that_changes_its_dtype(kind, frozen):
    params, optimizer = changed(kind, frozen)
    params[1].grad = None
    params[1].data = params[1].data.half()
    before = bits(params)
    with pytest.raises(TypeError) as caught:
        optimizer.step()
    assert_says(caught, "parameter 1", "float16", "float32")
    assert bits(params) == before


@pytest.mark.parametrize("frozen", [False, True])
@kinds
def test_a_gradient_of_another_dtype(kind, frozen):
    """torch lets a gradient be assigned only in the parameter's dtype; one that changes under the parameter."""
    params, optimizer = changed(kind, frozen)
    params[1].data = params[1].data.half()
    params[1].grad = torch.ones(33, dtype=torch.float16)
    params[1].data = params[1].data.float()
    before = bits(params)
    with pytest.raises(TypeError) as caught:
        optimizer.step()
    assert_says(caught, "gradient 1", "float16", "float32")
    assert bits(params) == before


@pytest.mark.parametrize("switched", [False, True])
@kinds
def test_requires_grad_switched_after_the_freeze(kind, switched):
    case = Case(kind, shapes=((7, 9), (33,)), options={"freeze_step": 2})
    params = case.parameters()
    params[1].requires_grad_(not switched)
    optimizer = case.build(params)
    for step in range(1, 5):
        take(case, 0, optimizer, params, step)
    before = bits(params)
    params[1].requires_grad_(switched)
    with pytest.raises(ValueError) as caught:
        take(case, 0, optimizer, params, 5)
    assert_says(caught, "changed after the freeze", "requires_grad", "Put them back", "new optimizer")
    assert bits(params) == before
    params[1].requires_grad_(not switched)
    take(case, 0, optimizer, params, 5)
    assert bits(params) != before


@kinds
def test_requires_grad_switched_before_the_freeze(kind):
    """A part of the model that is thawed during stage 1, while the rest keeps its state."""
    case = Case(kind, shapes=((7, 9), (33,)), steps=8, options={"freeze_step": 5})
    params = case.parameters()
    params[1].requires_grad_(False)
    optimizer = case.build(params)
    run(case, 0, optimizer, params, 1, 2)
    before = snapshot(optimizer.state[params[0]])
    assert params[1] not in optimizer.state
    params[1].requires_grad_(True)
    take(case, 0, optimizer, params, 3)
    after = optimizer.state[params[0]]["exp_avg"]
    expected = 0.9 * before["exp_avg"] + 0.1 * case.gradients(0, 3)[0]
    torch.testing.assert_close(after, expected)
    run(case, 0, optimizer, params, 4, 8)
    assert optimizer.compressing


def sparse_gradient(rank, size, kind, frozen):
    embedding = nn.Embedding(50, 4, sparse=True)
    with torch.no_grad():
        embedding.weight.fill_(0.5)
    optimizer = build(kind, embedding.parameters(), freeze_step=1, process_group=group() if size > 1 else None)
    if frozen:
        for step in range(2):
            embedding.weight.grad = torch.full((50, 4), 1.0 + rank + step)
            optimizer.step()
        embedding.weight.grad = None
    before = bits([embedding.weight])
    embedding(torch.tensor([1, 2, rank])).sum().backward()
    try:
        optimizer.step()
    except ValueError as error:
        assert bits([embedding.weight]) == before
        return str(error)
    return "no error"


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("size", [1, 2])
@kinds
def test_sparse_gradients(kind, size, frozen):
    found = run_ranks(2, sparse_gradient, kind, frozen) if size == 2 else [sparse_gradient(0, 1, kind, frozen)]
    for text in found:
        assert "sparse" in text
        assert "sparse=False" in text


# Ranks that do not agree


def disagreeing(rank, size, kind, odd, options):
    """Rank `odd` is given other things; what each rank is told."""
    own = dict(options) if rank == odd else {}
    params = parameters(*own.pop("shapes", [(33,), (7, 9)]))
    if own.pop("values", False):
        with torch.no_grad():
            params[1][0, 0] += 1e-6
    dtype = own.pop("dtype", torch.float32)
    params = [nn.Parameter(p.detach().to(dtype)) for p in params]
    optimizer = build(kind, params, **{"freeze_step": 5, "process_group": group(), **own})
    for p in params:
        p.grad = torch.ones_like(p) + rank
    before = bits(params)
    try:
        optimizer.step()
    except ValueError as error:
        assert bits(params) == before
        return str(error)
    return "no error"


DIFFERENT = [
    ({"lr": 2e-3}, ["lr", "0.002", "0.001"]),
    ({"betas": (0.8, 0.999)}, ["betas", "0.8", "0.9"]),
    ({"eps": 1e-6}, ["eps", "1e-06", "1e-08"]),
    ({"weight_decay": 0.1}, ["weight_decay", "0.1", "0.0"]),
    ({"freeze_step": 6}, ["freeze_step", "6", "5"]),
    ({"freeze_step": "auto"}, ["freeze_step", "auto", "5"]),
    ({"freeze_threshold": 0.9}, ["freeze_threshold", "0.9", "0.96"]),
    ({"freeze_window": 7}, ["freeze_window", "7", "1000"]),
    ({"bias_correction": False, "freeze_step": 5}, ["bias_correction", "False", "True"]),
    ({"zero_variance": "hold"}, ["zero_variance", "hold", "floor"]),
    ({"scale": "tensor"}, ["scale", "tensor", "block"]),
    ({"norm": "l2"}, ["norm", "l2", "l1"]),
    ({"block_size": 64}, ["block_size", "64", "2048"]),
    ({"chunks": 2}, ["chunks", "2", "auto"]),
    ({"gradient_dtype": torch.bfloat16}, ["gradient_dtype", "torch.bfloat16", "None"]),
    ({"dtype": torch.bfloat16}, ["dtypes", "bfloat16", "float32"]),
    ({"master_weights": False}, ["master_weights", "False", "True"]),
    ({"shapes": [(33,), (7, 9), (2,)]}, ["parameters", "3", "2"]),
    ({"shapes": [(33,), (7, 10)]}, ["elements", "103", "96"]),
    ({"shapes": [(33,), (9, 7)]}, ["other values", "parameter"]),
]


def all_disagreeing(rank, size, kind, odd):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # freeze_step=5 without bias correction
        return [disagreeing(rank, size, kind, odd, options) for options, _ in DIFFERENT[:-1]]


@pytest.mark.parametrize(("size", "odd"), [(2, 1), (3, 0)])
@kinds
def test_ranks_that_differ_are_told_who_and_in_what(kind, size, odd):
    told = run_ranks(size, all_disagreeing, kind, odd)
    for (options, parts), texts in zip(DIFFERENT[:-1], zip(*told, strict=True), strict=True):
        for text in texts:
            assert text.startswith("the ranks do not agree"), f"{options}: {text}"
            assert f"rank {odd} has" in text
            assert all(part in text for part in (*parts, "Give every rank the same")), f"{options}: {text}"


@pytest.mark.parametrize(("size", "odd"), [(2, 1), (3, 0), (3, 2)])
@kinds
def test_ranks_that_start_from_other_parameters_are_told(kind, size, odd):
    for text in run_ranks(size, disagreeing, kind, odd, {"values": True}):
        assert f"other values on rank {odd}" in text
        assert "parameter 1 of group 0 (shape (7, 9))" in text
        assert "same seed or checkpoint" in text


@kinds
def test_ranks_that_agree_are_not_told(kind):
    assert run_ranks(2, disagreeing, kind, 0, {}) == ["no error"] * 2


# DDP


def attach_to(rank, size, kind, case):
    """What is said to a user who gets `attach` wrong."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    ddp = DistributedDataParallel(model, process_group=group())
    params = list(model.parameters())
    target, optimizer = ddp, None
    if case == "no DDP":
        target, optimizer = model, build(kind, params, process_group=group())
    elif case == "no onebit":
        optimizer = torch.optim.AdamW(params)
    elif case == "a parameter lacks":
        optimizer = build(kind, params[:2], process_group=group())
    elif case == "another group":
        optimizer = build(
            kind, params, process_group=torch.distributed.new_group([rank], use_local_synchronization=True)
        )
    elif case == "twice":
        optimizer = build(kind, params, process_group=group())
        onebit.attach(ddp, optimizer)
    try:
        onebit.attach(target, optimizer)
    except (TypeError, ValueError, RuntimeError) as error:
        return type(error).__name__, str(error)
    return "no error", ""


ATTACH = {
    "no DDP": ("TypeError", ["DistributedDataParallel", "Sequential", "averages gradients itself"]),
    "no onebit": ("TypeError", ["an optimizer of onebit", "AdamW"]),
    "a parameter lacks": ("ValueError", ["'1.weight'", "1 more", "all parameters", "requires_grad=False"]),
    "another group": ("ValueError", ["2 ranks", "process_group="]),
    "twice": ("RuntimeError", ["register_comm_hook"]),  # DDP says so itself
}


@pytest.mark.parametrize("case", ATTACH)
@kinds
def test_attach_says_what_is_wrong(kind, case):
    error, parts = ATTACH[case]
    for name, text in run_ranks(2, attach_to, kind, case):
        assert name == error, text
        assert all(part in text for part in parts), text


def ddp_run(rank, size, kind, attached):
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    ddp = DistributedDataParallel(model, process_group=group())
    optimizer = build(kind, model.parameters(), freeze_step=2, process_group=group())
    if attached:
        onebit.attach(ddp, optimizer)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(5):
            optimizer.zero_grad()
            data = torch.Generator().manual_seed(step * size + rank)
            ddp(torch.randn(8, 4, generator=data)).square().mean().backward()
            optimizer.step()
    return [str(w.message) for w in caught if w.category is UserWarning and "onebit" in str(w.message)]


@kinds
def test_forgetting_attach_warns_once(kind):
    (told,), nothing = run_ranks(2, ddp_run, kind, False)
    assert all(
        part in told for part in ("DistributedDataParallel", "onebit.attach(model, optimizer)", "nothing is saved")
    )
    assert nothing == []
    assert run_ranks(2, ddp_run, kind, True) == [[], []]


def bystander(rank, size, kind):
    """Without DDP, gradients of its own on every rank, or zeros: no reason to warn."""
    said = []
    for zero in (False, True):
        params = parameters((4, 3))
        optimizer = build(kind, params, freeze_step=2, process_group=group())
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            params[0].grad = torch.zeros(4, 3) if zero else torch.ones(4, 3) + rank
            optimizer.step()
        said += [str(w.message) for w in caught]
    return said


@kinds
def test_without_ddp_nobody_warns(kind):
    assert run_ranks(2, bystander, kind) == [[], []]


def test_the_page_of_options_has_every_argument_with_its_default_and_no_other():
    page = (Path(__file__).resolve().parents[3] / "docs" / "options.md").read_text(encoding="utf-8")
    told = {}
    for row in (line.split("|") for line in page.splitlines() if line.startswith("| `")):
        names, defaults = (re.findall("`([^`]+)`", cell) for cell in row[1:3])
        told |= dict(zip(names, map(ast.literal_eval, defaults), strict=True))
    real = {}
    for kind in (onebit.OneBitAdam, onebit.OneBitLamb):
        arguments = inspect.signature(kind.__init__).parameters.values()
        real |= {a.name: a.default for a in arguments if a.kind is not a.VAR_KEYWORD}
    assert {name: default for name, default in real.items() if name not in ("self", "params")} == told


@pytest.mark.parametrize("kind", [onebit.OneBitAdam, onebit.OneBitLamb])
def test_the_signature_and_the_help_show_every_option(kind):
    shown, help_text = inspect.signature(kind).parameters, pydoc.plain(pydoc.render_doc(kind))
    described = (kind.__doc__ or "").replace("\n", ", ")
    for field in dataclasses.fields(Options):
        assert shown[field.name].default == field.default
        assert f"{field.name}: {field.metadata['description']}" in help_text.replace("\n |  ", "\n").replace(" |  ", "")
    for name in shown:
        assert re.search(rf"(^|[ ,]){name}(, [a-z_0-9, ]+)?: [a-z0-9\"']", described), name


def test_type_checkers_see_the_options_there_are():
    assert OptionArguments.__annotations__.keys() - {"dead"} == {f.name for f in dataclasses.fields(Options)}


@pytest.mark.parametrize(("old", "new"), [("floor", "floor"), ("freeze", "hold")])
@pytest.mark.parametrize("kind", [onebit.OneBitAdam, onebit.OneBitLamb])
def test_dead_is_the_old_name_of_zero_variance(kind, old, new):
    with pytest.warns(DeprecationWarning, match=f"pass zero_variance='{new}' for dead='{old}'") as caught:
        optimizer = kind([nn.Parameter(torch.ones(3))], dead=old)
    assert optimizer.setup.options.zero_variance == new
    assert caught[0].filename == __file__
    with pytest.raises(TypeError, match="zero_variance and dead are one argument"):
        kind([nn.Parameter(torch.ones(3))], dead=old, zero_variance=new)
    with pytest.raises(TypeError, match="unexpected keyword argument 'fredze_step'"):
        kind([nn.Parameter(torch.ones(3))], fredze_step=3)
