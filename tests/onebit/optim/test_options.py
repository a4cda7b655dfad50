"""A wrong option is refused with what is wrong, why, and what to do; docs/options.md and the help list every option."""

import ast
import dataclasses
import inspect
import pydoc
import re
from math import inf, nan
from pathlib import Path

import pytest
import torch
from torch import nn

import onebit
from onebit.optim.options import OptionArguments, Options
from tests.onebit.runs import assert_message, bits, build, freezing_kinds, kinds, parameters

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
    ("norm", "l3", ["norm", "'l3'", "l1", "l2", "unbiased", "rotated"]),
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
@freezing_kinds
def test_a_wrong_option_is_refused_at_once(kind, name, value, parts):
    with pytest.raises(ValueError) as caught:
        build(kind, **{name: value})
    assert_message(caught, *parts)


GROUP_WRONG = [entry for entry in WRONG if entry[0] in ("lr", "betas", "eps", "weight_decay")]


@pytest.mark.parametrize(("name", "value", "parts"), GROUP_WRONG, ids=[f"{name}={v!r}" for name, v, _ in GROUP_WRONG])
@kinds
def test_a_wrong_option_of_a_param_group_is_refused(kind, name, value, parts):
    first, second = parameters((3,), (4,))
    with pytest.raises(ValueError) as caught:
        build(kind, [{"params": [first]}, {"params": [second], name: value}])
    assert_message(caught, *parts)


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
@freezing_kinds
def test_values_at_the_limits_are_accepted(kind, options):
    params = parameters((3, 2), (5,))
    optimizer = build(kind, params, **options)
    if optimizer.param_groups[0]["eps"] > 0 and options.get("freeze_step") != 0:
        for p in params:
            p.grad = torch.ones_like(p)
        optimizer.step()
        assert all(torch.isfinite(p).all() for p in params)


@kinds
def test_float64_parameters_are_refused(kind):
    with pytest.raises(TypeError) as caught:
        build(kind, [*parameters((4,)), nn.Parameter(torch.zeros(3, 2, dtype=torch.float64))])
    assert_message(caught, "parameter 1 (shape (3, 2))", "float64", "float32, bfloat16 and float16", ".float()")


@kinds
def test_parameters_on_several_devices_are_refused(kind):
    with pytest.raises(ValueError) as caught:
        build(kind, [*parameters((4,)), nn.Parameter(torch.zeros(3, device="meta"))])
    assert_message(caught, "several devices", "cpu", "meta", "one for each device")
    optimizer = build(kind)
    with pytest.raises(ValueError) as caught:
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(3, device="meta"))]})
    assert_message(caught, "several devices")
    assert len(optimizer.param_groups) == 1


@kinds
def test_no_parameter_to_optimize_is_refused(kind):
    """Frozen ones are none: see test_parameter_changes."""
    with pytest.raises(ValueError, match="no param group has a parameter"):
        build(kind, [{"params": []}])
    assert len(build(kind, [{"params": []}, {"params": parameters((3,))}]).param_groups) == 2
    with pytest.raises(ValueError, match="empty parameter list"):
        build(kind, [])


@kinds
def test_parameters_without_requires_grad_do_not_change(kind):
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


def test_the_page_of_options_has_every_argument_with_its_default_and_no_other():
    page = (Path(__file__).resolve().parents[3] / "docs" / "options.md").read_text(encoding="utf-8")
    documented = {}
    for row in (line.split("|") for line in page.splitlines() if line.startswith("| `")):
        names, defaults = (re.findall("`([^`]+)`", cell) for cell in row[1:3])
        documented |= dict(zip(names, map(ast.literal_eval, defaults), strict=True))
    real = {}
    for kind in (onebit.OneBitAdam, onebit.OneBitLamb, onebit.ZeroOneAdam):
        arguments = inspect.signature(kind.__init__).parameters.values()
        real |= {a.name: a.default for a in arguments if a.kind is not a.VAR_KEYWORD}
    assert {name: default for name, default in real.items() if name not in ("self", "params")} == documented


@pytest.mark.parametrize("kind", [onebit.OneBitAdam, onebit.OneBitLamb, onebit.ZeroOneAdam])
def test_the_signature_and_the_help_show_every_option(kind):
    shown, help_text = inspect.signature(kind).parameters, pydoc.plain(pydoc.render_doc(kind))
    described = (kind.__doc__ or "").replace("\n", ", ")
    for field in dataclasses.fields(Options):
        if field.name in kind.without_options:
            assert field.name not in shown and f"\n{field.name}:" not in (kind.__doc__ or "")
            continue
        assert shown[field.name].default == field.default
        assert f"{field.name}: {field.metadata['description']}" in help_text.replace("\n |  ", "\n").replace(" |  ", "")
    for name in shown:
        assert re.search(rf"(^|[ ,]){name}(, [a-z_0-9, ]+)?: [a-z0-9\"']", described), name


def test_the_typed_arguments_are_the_options():
    others = {"foreach", "capturable", "fused", "amsgrad", "maximize", "differentiable"}
    assert OptionArguments.__annotations__.keys() - others == {f.name for f in dataclasses.fields(Options)}


@pytest.mark.parametrize("kind", [onebit.OneBitAdam, onebit.OneBitLamb, onebit.ZeroOneAdam])
def test_an_unknown_argument_is_an_error(kind):
    with pytest.raises(TypeError, match="unexpected keyword argument 'fredze_step'"):
        kind([nn.Parameter(torch.ones(3))], fredze_step=3)


@pytest.mark.parametrize(
    "kind, options, norm",
    [
        ("OneBitAdam", {}, "l1"),
        ("OneBitLamb", {}, "l1"),
        ("ZeroOneAdam", {}, "unbiased"),
        ("ZeroOneAdam", {"norm": "auto"}, "unbiased"),
        ("ZeroOneAdam", {"scale": "tensor"}, "l1"),
        ("ZeroOneAdam", {"norm": "l2"}, "l2"),
        ("OneBitAdam", {"norm": "unbiased"}, "unbiased"),
        ("OneBitLamb", {"norm": "rotated"}, "rotated"),
    ],
)
def test_what_a_scale_is_made_of_where_nothing_is_said_is_the_optimizers_own(kind, options, norm):
    optimizer = build(kind, **options)
    assert optimizer.setup.norm == norm
    for p in optimizer.param_groups[0]["params"]:
        p.grad = torch.randn_like(p)
    optimizer.step()


@kinds
def test_an_unbiased_scale_is_a_blocks(kind):
    with pytest.raises(ValueError) as caught:
        build(kind, scale="tensor", norm="unbiased")
    assert_message(caught, "unbiased", "tensor", 'scale="block"', 'norm="l1"')
