"""States that are damaged or do not fit: an error with a word, and an optimizer that is bit for bit as it was."""

import functools
import itertools
import json

import numpy as np
import pytest
import torch

import onebit
from onebit.collectives.transport.protocol import LocalTransport
from onebit.optim.flat_state import FlatState
from tests import internals
from tests.checkpoints import Run
from tests.fuzz.states import mark
from tests.onebit.checkpoint.states import adamw_run
from tests.onebit.runs import Case, kinds, on_warnings, same, snapshot

CASE = Case(options={"freeze_step": 3, "betas": (0.9, 0.95)}, groups=({"lr": 1e-3}, {"weight_decay": 0.1}))
ONE, GROUP = ("state", 0), ("param_groups", 0)
NUMBERS = (*GROUP, "onebit")
ENDLESS = torch.zeros(1).expand(2**40)
GONE, BOTH = object(), (ValueError, TypeError)
nan, inf = float("nan"), float("inf")


def with_value(value):
    return lambda t: torch.cat([t.reshape(-1)[:-1], torch.tensor([value], dtype=t.dtype)]).view_as(t)


def first(n):
    return lambda t: t.reshape(-1)[:n].clone()


def with_steps(steps):
    return lambda state: {p: {**own, "step": torch.tensor(steps)} for p, own in state.items()}


# Optimizers and steps after which a state was saved: 2 are stage 1, 6 are stage 2
STAGE_1, STAGE_2, LAMB = (("OneBitAdam", 2),), (("OneBitAdam", 6),), (("OneBitLamb", 6),)
EITHER, ZERO_ONE = STAGE_1 + STAGE_2, (("ZeroOneAdam", 6),)
ALL_1, ALL_2 = (tuple((kind, steps) for kind in ("OneBitAdam", "OneBitLamb", "ZeroOneAdam")) for steps in (2, 6))
OF_NUMBERS = [  # whose state, what of param_groups[0]["onebit"], other values, words of the error
    (EITHER, "steps", [-1, 2.5, 2**64, nan, None, [6]], "steps is"),
    (EITHER, "skipped_steps", ["x", -1], "skipped_steps"),
    (EITHER, "senders", [0, 2**40, "1"], "senders is"),
    (EITHER, "wire_bytes", [-1, 2**64, inf], "wire_bytes is"),
    (EITHER, "settings", [[1], None], "settings is a dict"),
    (EITHER, "optimizer", [3, None], "optimizer is a name"),
    (EITHER, "mean_norm", [0.0, [0.0] * 3, [0.0, 0.0, nan, 0.0], ["x"] * 4], "list of 4 numbers"),
    (EITHER, "mean_norm", [[1, 1, 9, 5.0], [1, 1, 9, -0.5], [1, 0, 9, 0.5], [1, 1, 0.5, 0.5]], "that go together"),
    (EITHER, "trace", ["[[1.0]]", {}, [["x"]], [[]], [1.0], [[nan]], [[1.0], [1.0, 2.0]]], "trace is a list of equ"),
    (EITHER, "chunks", [3, {"a": 1}], "chunks is a list"),
    (EITHER, "chunks", [[2**31], [0], [1.5], ["x"], [[1]]], "chunks is"),
    (EITHER, "messages", [3, None, ["x"]], "messages is words"),
    (EITHER, "compressing", ["yes", 1, None], "compressing is true or false"),
    (EITHER, "bias_correction", ["yes", 1], "bias_correction is true or false"),
    (STAGE_2, "chunks", [[1, 1], []], "parameters of (2|0) dtypes, here they have 1"),
    *(
        (EITHER, name, [GONE], f"no {name}")
        for name in ("optimizer", "senders", "steps", "skipped_steps", "compressing", "chunks", "messages",
                     "bias_correction", "wire_bytes", "settings", "mean_norm", "trace")
    ),
]  # fmt: skip
FOREIGN = [  # whose state, where, what is there instead, words of the ValueError
    (EITHER, ("param_groups",), [GONE], "param_groups"),
    (EITHER, ("state",), [GONE], "param_groups"),
    (EITHER, ("param_groups",), [lambda groups: groups[:1]], "groups"),
    (EITHER, (*GROUP, "params"), [lambda keys: keys[:-1]], "groups"),
    (EITHER, (*GROUP, "params"), [[0, 0]], "twice"),
    (ALL_1 + ALL_2, (*NUMBERS, "version"), [2, 4], "version [24] .*this onebit reads 3: load it with the onebit that"),
    (EITHER, (*NUMBERS, "version"), [GONE, True, "3", [3]], "version (None|True|'3'|.3.)"),
    (EITHER, NUMBERS, ["{", "x", "[" * 100_000, '{"version": 3'], "no JSON"),
    (EITHER, (*GROUP, "maximize"), [True], "maximize"),
    (ALL_1, (*ONE, "exp_avg"), [first(-1)], "exp_avg"),
    (STAGE_1, (*ONE, "exp_avg"), [GONE], "exp_avg"),
    (STAGE_1, (*ONE, "exp_avg_sq"), [GONE], "exp_avg_sq"),
    (STAGE_2 + ZERO_ONE, (*NUMBERS, "optimizer"), ["OneBitOther"], "OneBitOther in stage 2: .*onebit.adamw_state"),
    (ALL_2, (*ONE, "exp_avg"), [first(-1), GONE], "exp_avg"),
    (ALL_2, (*ONE, "exp_avg_sq"), [first(-1), GONE], "exp_avg_sq"),
    (LAMB, (*ONE, "denominator"), [first(-1), GONE], "denominator"),
    (ZERO_ONE, (*ONE, "least_root"), [GONE], "least_root"),
    (ZERO_ONE, (*ONE, "root_at_zero"), [GONE], "root_at_zero"),
    (ALL_2, ONE, [GONE, {}], "no (exp_avg|denominator|exp_avg_sq) for parameter"),
    (ALL_2, (*ONE, "residual"), [first(1), first(-1)], "residual"),
    (STAGE_2, (*ONE, "step"), [torch.tensor(5.0)], "different numbers of steps"),
    (STAGE_2, ("state",), [with_steps(5.0)], "of step 6, and its parameters have taken 5"),
]
DAMAGED = [  # the same, with a ValueError or a TypeError
    *((whose, (*NUMBERS, name), values, match) for whose, name, values, match in OF_NUMBERS),
    (EITHER, NUMBERS, [[1], {}, None, 3, b"{}", torch.zeros(3)], "onebit' of the first param group is a"),
    (EITHER, NUMBERS, ["[1]", "3", '"x"', "null"], "in JSON"),
    (EITHER, ("state",), [[]], "state is not a dict"),
    (EITHER, ONE, [[]], "state is not a dict"),
    (EITHER, ("param_groups",), [{}], "not a list of dicts"),
    (EITHER, GROUP, [3], "not a list of dicts"),
    (EITHER, (*GROUP, "params"), [3], "no list of parameters"),
    (EITHER, (*GROUP, "params"), [[[0], [1]]], "other things than numbers and names"),
    (EITHER + LAMB, (*GROUP, "lr"), [GONE], "has no lr"),
    (EITHER, (*GROUP, "lr"), ["fast", 1e39, 10**400], "lr=('fast'|1e|1000)"),
    (EITHER, (*GROUP, "lr"), [torch.empty(1, device="meta")], "without a value"),
    (EITHER, (*GROUP, "betas"), [GONE], "has no betas"),
    (EITHER, (*GROUP, "betas"), [ENDLESS], "betas="),
    (EITHER, (*GROUP, "amsgrad"), [torch.zeros(3)], "neither true nor false"),
    (EITHER, (*ONE, "step"), [torch.tensor(-1.0), torch.ones(3), "7"], "step is (-1|a number|'7')"),
    (STAGE_1, (*ONE, "exp_avg"), [with_value(nan)], "exp_avg .* nan"),
    (STAGE_1, (*ONE, "exp_avg"), [lambda t: with_value(1e300)(t.double())], "exp_avg .* inf"),
    (STAGE_1, (*ONE, "exp_avg_sq"), [with_value(inf), with_value(-1.0)], "exp_avg_sq .* (inf|-1)"),
    (STAGE_1, (*ONE, "exp_avg"), [lambda t: t.long()], "dtype torch.int64"),
    (STAGE_1, (*ONE, "exp_avg"), [lambda t: t.tolist()], "is a list, not a tensor"),
    (STAGE_1, (*ONE, "exp_avg"), [lambda t: t.to("meta"), lambda t: t.to_sparse()], "no values"),
    (ALL_2, (*ONE, "exp_avg_sq"), [with_value(-1.0), with_value(nan)], "exp_avg_sq .* (-1|nan)"),
    (ALL_2, (*ONE, "exp_avg"), [with_value(nan), with_value(-inf)], "exp_avg .* (nan|-inf)"),
    (ALL_2, (*ONE, "residual"), [with_value(nan), with_value(inf)], "residual .* (nan|inf)"),
    (STAGE_2, (*ONE, "residual"), [lambda t: t.long(), lambda t: t.tolist()], "residual .* (dtype torch.int64|a list)"),
    (LAMB, (*ONE, "denominator"), [with_value(-1.0)], "denominator .* -1"),
    (ZERO_ONE, (*ONE, "least_root"), [torch.tensor([-1.0]), ENDLESS], "least_root .*(-1|elements, not one)"),
    (ZERO_ONE, (*ONE, "root_at_zero"), [torch.tensor([nan])], "root_at_zero .* nan"),
    (ALL_2, (*ONE, "usual_step"), [torch.tensor([nan]), torch.ones(2), "x"], "usual_step .*(nan|2 elements|is a str)"),
    (LAMB, (*ONE, "coefficient_average"), [torch.tensor(nan)], "coefficient_average .* nan"),
    (LAMB, (*ONE, "coefficient_average"), [ENDLESS], "elements, not one"),
    (LAMB, (*ONE, "coefficient_steps"), [torch.tensor(-1.0)], "coefficient_steps is -1"),
    (LAMB, (*ONE, "ratio"), [torch.tensor(-1.0), "x"], "ratio .* (-1|is a str)"),
    (LAMB, (*ONE, "gamma"), [torch.tensor([-1.0]), torch.ones(2)], "gamma .*(-1|2 elements)"),
    (LAMB, (*ONE, "counted"), [torch.zeros(1, dtype=torch.uint8)], "counted .* shape"),
    (LAMB, (*ONE, "counted"), [lambda t: t.float()], "counted .* dtype torch.float32"),
]


@functools.cache
def saved(kind, steps):
    state = snapshot(Run(CASE.but(kind=kind, options={**CASE.options, "lr": 0.5}), steps).optimizer.state_dict())
    state["param_groups"][0]["maximize"] = False
    return state


@functools.cache
def loader(kind, here):
    """What has refused a state is as it was, and takes the next."""
    return Run(CASE.but(kind=kind, seed=1), here)


def changed(state, path, value):
    state = snapshot(state)
    if path[: len(NUMBERS)] == NUMBERS and len(path) > len(NUMBERS):
        numbers = json.loads(state["param_groups"][0]["onebit"])
        state["param_groups"][0]["onebit"] = json.dumps(changed(numbers, path[len(NUMBERS) :], value))
        return state
    *way, last = path
    place = functools.reduce(lambda place, key: place[key], way, state)
    if value is GONE:
        del place[last]
    else:
        place[last] = value(place[last]) if callable(value) else value
    return state


def assert_refused(on, state, match, errors=ValueError):
    before, current = mark(on), internals.state(on.optimizer)
    shown = {p: snapshot(own) for p, own in on.optimizer.state.items()}
    with on_warnings("ignore"), pytest.raises(errors, match=match):
        on.optimizer.load_state_dict(state)
    assert mark(on) == before and internals.state(on.optimizer) is current
    assert all(same(snapshot(on.optimizer.state[p]), own) for p, own in shown.items())


ROWS = [(*row, errors) for table, errors in ((FOREIGN, ValueError), (DAMAGED, BOTH)) for row in table]


@pytest.mark.parametrize(
    ("whose", "path", "values", "match", "errors"),
    ROWS,
    ids=[f"{' '.join(map(str, row[1]))}: {row[3]:.30}" for row in ROWS],
)
def test_what_no_run_leaves_behind_is_refused(whose, path, values, match, errors):
    """It is refused in the stage it was saved in; a state of stage 2 in stage 1 too."""
    for kind, steps in whose:
        for value in values:
            for here in sorted({2, steps}):
                assert_refused(loader(kind, here), changed(saved(kind, steps), path, value), match, errors)


@kinds
def test_after_a_refusal_a_run_goes_on_as_if_nothing_had_been_tried(kind):
    for here in (2, 6):
        on, undisturbed = (Run(CASE.but(kind=kind, seed=1), here) for _ in range(2))
        for path, value, match in (
            (("param_groups",), GONE, "param_groups"),
            ((*ONE, "step"), torch.tensor(nan), "step is nan"),
            ((*ONE, "residual"), with_value(nan), "residual .* nan"),
        ):
            assert_refused(on, changed(saved(kind, 6), path, value), match)
        for each in (on, undisturbed):
            each.on(here + 1, here + 2)
        assert same(on.all(), undisturbed.all())


@kinds
def test_after_a_load_that_found_no_memory_nothing_but_a_load_goes_on(kind):
    """The state before it is gone by then: the new one is built in its place."""
    for here in (2, 6):
        on, undisturbed = (Run(CASE.but(kind=kind, seed=1), here) for _ in range(2))
        state = snapshot(undisturbed.optimizer.state_dict())
        with pytest.MonkeyPatch.context() as patch, pytest.raises(MemoryError):
            patch.setattr(FlatState, "add", no_memory)
            on.optimizer.load_state_dict(state)
        step = functools.partial(on.on, here + 1, here + 1)
        reform = functools.partial(onebit.reform, on.optimizer, LocalTransport())
        for act in (step, reform, on.optimizer.state_dict, on.optimizer.synchronize):
            with pytest.raises(ValueError, match="after a load that an error or an interrupt has ended"):
                act()
        on.optimizer.load_state_dict(state)
        for each in (on, undisturbed):
            each.on(here + 1, here + 2)
        assert same(on.all(), undisturbed.all())


def no_memory(*args):
    raise MemoryError("no memory")


def test_what_is_no_state_or_does_not_fit_of_adamw_is_refused():
    for state in (None, 3, [], ENDLESS):
        assert_refused(loader("OneBitAdam", 6), state, "a state is a dict", TypeError)
    for case, options, lacking, match in (
        (Case(missing=((2, 0, 1), (4, 0, 1))), {}, (), r"different numbers of steps \(\[3, 5\]\)"),
        (Case(), {"maximize": True}, (), "maximize"),
        (Case(), {}, ("step",), "moments of parameter 1 and no step"),
    ):
        state = snapshot(adamw_run(case, 5, **options)[1].state_dict())
        for name in lacking:
            del state["state"][1][name]
        assert_refused(Run(case.but(options=CASE.options, seed=1), 2), state, match)
        assert_refused(loader("OneBitAdam", 2), state, "groups")


def test_a_schedule_that_was_another_is_an_error_before_the_freeze_too():
    for steps, scaler, fits in ((90, 4, False), (6, 4, False), (5, 4, True), (90, 100, True)):  # 5: both decided alike
        run, other = (Run(Case("ZeroOneAdam", ((5,),), options={"var_update_scaler": s}), n)
                      for s, n in ((100, steps), (scaler, 0)))  # fmt: skip
        assert not run.optimizer.compressing
        if fits:
            other.optimizer.load_state_dict(run.optimizer.state_dict())
            assert other.optimizer.steps == steps
        else:
            assert_refused(other, run.optimizer.state_dict(), "var_update_scaler=100")


def test_a_state_of_other_dtypes_changes_nothing_and_moments_fit_any():
    """Parameters of two dtypes lie in two flat states."""
    mixed, here = CASE.but(last_dtype="bfloat16"), Run(CASE.but(seed=1), 6)
    assert_refused(here, Run(mixed, 6).optimizer.state_dict(), "dtype")
    here.on(7, 8)
    moments = snapshot(Run(mixed, 2).optimizer.state_dict())
    here.optimizer.load_state_dict(moments)
    loaded = here.optimizer.state_dict()["state"]
    for p, own in moments["state"].items():
        assert all(same(loaded[p][name], own[name]) for name in ("step", "exp_avg", "exp_avg_sq"))


def test_arguments_of_a_wrong_type_are_refused_by_name():
    """Found by fuzzing: values that can't be compared, or have no end."""
    of_lamb = ("coeff_beta", "min_coeff", "factor_max", "factor_threshold", "ratio")
    of_adam = ("freeze_step", "zero_variance", "scale", "norm", "chunks", "variance_floor")
    odd = [torch.zeros(3), torch.zeros(0), np.zeros(3), 10**400, nan, [1]]
    for kind, names, words in ((onebit.OneBitLamb, of_lamb, "coeff|factor|ratio"), (onebit.OneBitAdam, of_adam, "")):
        for name, value in itertools.product(names, odd):
            with pytest.raises(ValueError, match=words or name):
                kind(CASE.parameters(), **{name: value})
