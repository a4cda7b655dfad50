"""A wrong option is refused with what is wrong, why, and what to do; docs/options.md and the help list every option."""

import ast
import dataclasses
import inspect
import pydoc
import re
import warnings
from math import inf, nan
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import onebit
from onebit.collectives.chunking import candidates
from onebit.kernels.data.layout import BLOCK_SIZE
from onebit.optim.options import OptionArguments, Options, without_markup
from tests import internals
from tests.onebit.optim.contract import options, started
from tests.onebit.runs import OPTIMIZERS, Case, bits, build, freezing_kinds, kinds, parameters, refused, run, step_by

OF_GROUPS = ("lr", "betas", "eps", "weight_decay")
WRONG: list[Any] = [  # the option, values, and what the message says, with the value for {}
    ("lr", [-1e-3, nan, inf, "fast"], "lr={}", "a finite number, 0 or more"),
    ("lr", [torch.tensor(-1e-3), torch.tensor(nan)], "lr=", "a finite number, 0 or more"),
    ("lr", [torch.tensor([1e-3, 1e-3])], "lr", "2 elements", "one number"),
    ("betas", [(1.0, 0.999), (0.9, 1.0), (-0.1, 0.9), (0.9, nan)], "betas={}", "at least 0 and below 1", "(0.9, 0."),
    ("betas", [(0.9,), 0.9], "betas={}", "two"),
    ("betas", [(torch.tensor([0.9, 0.9]), 0.9)], "betas", "each of one number"),
    ("betas", [(torch.tensor(1.5), 0.9)], "betas", "below 1"),
    ("eps", [-1e-8, nan], "eps={}", "finite", "0 or more", "denominator"),
    ("weight_decay", [-0.1, inf], "weight_decay={}", "finite", "0 or more"),
    ("freeze_step", [-1, 1.5, "soon", True, None], "freeze_step={}", "stage 1", "whole number", '"auto"'),
    ("zero_variance", ["alive"], "zero_variance={}", "floor", "hold"),
    ("update_limit", [0, -1.0, 1e-46, nan, inf, "off", True], "update_limit={}", "a number above 0"),
    ("check_every", [-1, 1.5, None], "check_every={}", "whole number", "0 never checks"),
    ("overlap", ["yes"], "overlap={}"),
    ("bias_correction", ["no", 1, None], "bias_correction={}", "True or False"),
    ("master_weights", ["no", 1, None], "master_weights={}", "True or False"),
    ("scale", ["row"], "scale", "{}", "block", "tensor"),
    ("norm", ["l3"], "norm", "{}", "l1", "l2", "unbiased"),
    ("chunks", [0, 1.5, "many"], "chunks={}", "positive", '"auto"'),
    ("gradient_dtype", [torch.float32, "bfloat16"], "gradient_dtype={}", "full-precision", "torch.bfloat16", "None"),
    ("block_size", [0, 48, 64.0], "block_size", "multiple of 32", "got {}", "2048"),
    ("block_size", [16384], "block_size", "at most 8192", "got {}"),
    ("block_size", ["auto"], "block_size must be a multiple of 32"),
]
WRONG_OF_LAMB: list[Any] = [
    ("coeff_beta", [-0.1, 1.0, 1.5, nan, inf], "coeff_beta", "{}"),
    ("min_coeff", [0.0, -0.1, 0.4, nan, inf], "coeff", "{}"),
    ("max_coeff", [0.0, -1.0, 0.005, nan, inf], "coeff", "{}"),
    ("factor_min", [0.0, -0.5, 4.5, nan, inf], "factor", "{}"),
    ("factor_max", [0.0, -4.0, 0.4, nan, inf], "factor", "{}"),
    ("factor_threshold", [0.0, -0.1, 1.0, 2.0, nan, inf], "factor_threshold", "{}"),
    ("ratio", ["", "Variance", "max", None, 1], "ratio", "{}"),
    ("freeze_step", [-1], "freeze_step={}"),
    ("eps", [-1], "eps={}"),
]
WRONG_OF_ZERO_ONE: list[Any] = [("scale", [-1], "scale"), ("eps", [-1], "eps={}")]
OF_KIND = {"OneBitAdam": WRONG, "OneBitLamb": WRONG_OF_LAMB, "ZeroOneAdam": WRONG_OF_ZERO_ONE}


@pytest.mark.parametrize(("kind", "row"), [(kind, row) for kind, rows in OF_KIND.items() for row in rows])
def test_a_wrong_option_is_refused_at_once(kind, row):
    """A param group's is refused, too, if it is one of a group's."""
    name, values, *parts = row
    first, second = parameters((3,), (4,))
    for value in values:
        given = [{name: value}]
        if name in OF_GROUPS:
            given.append({"params": [{"params": [first]}, {"params": [second], name: value}]})
        for own in given:
            with refused(ValueError, *(part.replace("{}", repr(value)) for part in parts)):
                build(kind, **own)


@kinds
def test_wrong_betas_are_refused_when_a_schedule_sets_them(kind):
    optimizer = build(kind)
    for betas in ((1.0, 0.999), (0.9, 1.0), (nan, 0.9), (0.9,)):
        optimizer.param_groups[0]["betas"] = betas
        with refused(ValueError, f"betas={betas!r}", "at least 0 and below 1"):
            optimizer.step()


@pytest.mark.parametrize(
    ("name", "values", "parts"),
    [("threshold", [0.0, 1.0, 4, nan, inf, "high", None], ("between 0 and 1", "0.96")),
     ("window", [0, 2.5, True, 2**40, "long"], ("1 or more", "None"))],
)  # fmt: skip
def test_a_freeze_rule_that_cannot_be_is_refused(name, values, parts):
    for value in values:
        with refused(ValueError, f"{name}={value!r}", *parts):
            onebit.FreezeRule(**{name: value})


@kinds
def test_an_unknown_keyword_is_a_type_error(kind):
    with pytest.raises(TypeError, match=r"gradients_dtype' \(did you mean gradient_dtype\?\): "):
        build(kind, gradients_dtype=torch.bfloat16)
    with pytest.raises(TypeError):
        build(kind, parameters((3,)), 1e-3, (0.9, 0.999), 1e-8, 0.0, 100)  # freeze_step is given by name


@freezing_kinds
def test_values_at_the_limits_are_accepted(kind):
    for own in (
        {"lr": 0.0, "betas": (0.0, 0.0), "eps": 0.0},
        {"lr": torch.tensor(1e-3), "betas": [0.9, 0.99]},
        {"freeze_step": onebit.FreezeRule(0.5, window=1), "chunks": 3},
        {"freeze_step": 0},
        {"block_size": 32, "zero_variance": "hold", "scale": "tensor", "norm": "l2"},
        {"block_size": 8192, "bias_correction": False, "master_weights": False, "weight_decay": 1},
    ):
        params = parameters((3, 2), (5,))
        optimizer = build(kind, params, **own)
        if optimizer.param_groups[0]["eps"] > 0 and own.get("freeze_step") != 0:
            step_by(optimizer)
            assert all(torch.isfinite(p).all() for p in params)


NUMBERS = {
    "OneBitAdam": {"freeze_step": 5, "update_limit": 2.0, "check_every": 7, "chunks": 2, "block_size": 64, "reply": 1},
    "OneBitLamb": {"variance_floor": 0.5, "coeff_beta": 0.5, "max_coeff": 0.5, "factor_min": 0.25, "factor_max": 8},
    "ZeroOneAdam": {"var_update_scaler": 3, "var_freeze_step": 9, "local_step_scaler": 2, "local_step_clipper": 4},
}


@kinds
def test_numbers_of_numpy_are_numbers(kind):
    """They become numbers in what ranks compare as JSON, and in a state that torch.load(weights_only=True) is to
    read."""
    numbers, found = NUMBERS[kind], []
    of_numpy = {name: (np.float32 if isinstance(v, float) else np.int64)(v) for name, v in numbers.items()}
    for own in (numbers, of_numpy):
        optimizer = build(kind, **own)
        chosen = {**vars(internals.options(optimizer)), **internals.algorithm(optimizer).settings()}
        found.append({name: (value, type(value)) for name, value in chosen.items()})
    assert found[0] == found[1]


def test_those_of_a_freeze_rule_too():
    rule = onebit.FreezeRule(np.float32(0.5), np.int64(7))
    assert repr(rule) == "FreezeRule(threshold=0.5, window=7)"
    assert internals.window(build("OneBitAdam", freeze_step=rule)) == 7


def test_a_schedule_may_leave_numbers_of_numpy_in_a_param_group(tmp_path):
    """They are saved as what torch.load(weights_only=True) reads."""
    params, optimizer = started(Case(), 3)
    group = optimizer.param_groups[0]
    group["lr"], group["betas"] = np.float64(0.01) * np.cos(0.5), (np.float32(0.5), 0.75)
    run(Case(), 0, optimizer, params, 4, 5)
    torch.save(optimizer.state_dict(), tmp_path / "state")
    saved = torch.load(tmp_path / "state", weights_only=True)["param_groups"][0]
    assert (saved["lr"], saved["betas"]) == (group["lr"], (0.5, 0.75))


def test_lambs_limits_may_be_equal():
    """Coefficients of 0.2, and ratios of 2: also of a parameter that was added in stage 1, whose average has its own
    steps alone."""
    first, second = (nn.Parameter(torch.full((3,), float(i + 1))) for i in range(2))
    limits = {"min_coeff": 0.2, "max_coeff": 0.2, "factor_min": 2.0, "factor_max": 2.0}
    optimizer = build("OneBitLamb", [first], freeze_step=6, block_size=32, **limits)
    for step in range(1, 8):
        if step == 4:
            optimizer.add_param_group({"params": [second]})
        first.grad, second.grad = torch.ones(3), torch.ones(3)
        optimizer.step()
    assert optimizer.compressing
    [state] = internals.states(optimizer)
    assert state["coefficient_average"].tolist() == pytest.approx([0.2, 0.2], rel=1e-6)
    assert state["coefficient"].tolist() == pytest.approx([0.4, 0.4], rel=1e-6)


# Wrong parameters, and arguments of AdamW

ONE = nn.Parameter(torch.ones(3))
WRONG_PARAMETERS: list[tuple[Any, type[Exception], str]] = [
    (ONE, TypeError, "iterable"),
    ([ONE, 3], TypeError, "one of the params is int"),
    ([ONE * 2], ValueError, "non-leaf"),
    ([], ValueError, "empty parameter list"),
    ([{"params": []}], ValueError, "no param group has a parameter"),
    ([{"params": {ONE}}], TypeError, "ordered"),
    ([{"lr": 0.1}], TypeError, "params"),
    ([nn.Parameter(ONE.detach().to(torch.complex64))], TypeError, "complex64"),
    ([nn.Parameter(ONE.detach().double())], TypeError, "float64.*float32, bfloat16 and float16"),
    ([ONE, ONE], ValueError, "parameter 1 .* given twice"),
    ([{"params": [ONE]}, {"params": [ONE]}], ValueError, "more than one parameter gr"),
    ([ONE, nn.Parameter(torch.zeros(3, device="meta"))], ValueError, "several.*cpu, meta.*one for each device"),
]


def test_wrong_parameters_are_refused() -> None:
    for params, error, match in WRONG_PARAMETERS:
        with warnings.catch_warnings(), pytest.raises(error, match=match):
            warnings.simplefilter("ignore")  # torch only warns of a parameter that is there twice
            build("OneBitAdam", params)


def test_arguments_of_adamw_that_change_nothing_are_taken() -> None:
    case, given = Case(options={"freeze_step": 2}), {"maximize": False, "differentiable": False, "amsgrad": False}
    ends = set()
    for more in ({}, *({"foreach": v, "fused": v, "capturable": v} for v in (None, False, True)), given):
        params, optimizer = started(options(case, **more), 4)
        ends.add((bits(params), *optimizer.state_dict()["param_groups"][0]))
    assert len(ends) == 1


@kinds
def test_arguments_of_adamw_that_would_change_something_are_refused(kind: str) -> None:
    rows = [("maximize", True, "Negate the loss"), ("differentiable", True, "by its address")]
    rows += [("amsgrad", True, "no new variance")]
    rows += [(name, "yes", "True, False or None") for name in ("foreach", "fused", "capturable", "maximize")]
    for name, value, why in rows:
        with refused(ValueError, f"{name}={value!r}", why):
            build(kind, **{name: value})


# What is shown of options


def test_the_page_of_options_has_every_argument_with_its_default_and_no_other():
    page = (Path(__file__).resolve().parents[3] / "docs" / "options.md").read_text(encoding="utf-8")
    documented = {}
    for row in (line.split("|") for line in page.splitlines() if line.startswith("| `")):
        names, defaults = (re.findall("`([^`]+)`", cell) for cell in row[1:3])
        documented |= dict(zip(names, map(ast.literal_eval, defaults), strict=True))
    real = {}
    for kind in OF_KIND:
        arguments = inspect.signature(getattr(onebit, kind).__init__).parameters.values()
        real |= {a.name: a.default for a in arguments if a.kind is not a.VAR_KEYWORD}
    assert {name: default for name, default in real.items() if name not in ("self", "params")} == documented
    for field in dataclasses.fields(Options):
        default = repr(field.default).replace("'", '"')
        assert f"| `{field.name}` | `{default}` | {field.metadata['description']} |" in page.splitlines()


@kinds
def test_the_signature_and_the_help_show_every_option(kind):
    kind = getattr(onebit, kind)
    shown, help_text = inspect.signature(kind).parameters, pydoc.plain(pydoc.render_doc(kind))
    described = (kind.__doc__ or "").replace("\n", ", ")
    for field in dataclasses.fields(Options):
        if field.name in kind.without_options:
            assert field.name not in shown and not re.search(rf"\n *{field.name}:", kind.__doc__ or "")
            continue
        assert shown[field.name].default == field.default
        row = f"{field.name}: {without_markup(field.metadata['description'])}."
        assert row in help_text.replace("\n |  ", "\n").replace(" |  ", "")
    for name in shown:
        assert re.search(rf"(^|[ ,]){name}(, [a-z_0-9, ]+)?: [a-z0-9\"']", described), name


def test_the_typed_arguments_are_the_options():
    others = {"foreach", "capturable", "fused", "amsgrad", "maximize", "differentiable", "process_group", "node_group"}
    assert OptionArguments.__annotations__.keys() - others == {f.name for f in dataclasses.fields(Options)}


def test_scales_of_blocks_are_unbiased_where_nothing_is_said():
    for kind, own, norm in (
        *((kind, {}, "unbiased") for kind in OPTIMIZERS),
        ("OneBitLamb", {"norm": "auto"}, "unbiased"),
        ("ZeroOneAdam", {"scale": "tensor"}, "l1"),
        ("ZeroOneAdam", {"norm": "l2"}, "l2"),
        ("OneBitAdam", {"norm": "l1"}, "l1"),
    ):
        optimizer = build(kind, **own)
        assert internals.norm(optimizer) == norm
        step_by(optimizer, torch.randn_like)


def test_chunks_of_a_tensor_scale_are_never_chosen():
    """Each has a scale of its own: they are in the numerics."""
    for scale, chunks in (("tensor", 1), ("block", max(candidates(2**21, 1, BLOCK_SIZE)))):
        optimizer = build("OneBitAdam", parameters((2**21,)), scale=scale, overlap=True)
        [state] = internals.states(optimizer)
        assert optimizer.setup.choose_chunks(state) == chunks and (chunks > 1) == (scale == "block")


def test_an_unbiased_scale_is_a_blocks():
    with refused(ValueError, "unbiased", "tensor", 'scale="block"', 'norm="l1"'):
        build("OneBitAdam", scale="tensor", norm="unbiased")
