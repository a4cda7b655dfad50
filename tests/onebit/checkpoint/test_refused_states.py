"""States that are damaged or do not fit: an error with a word, and an optimizer that is bit for bit as it was."""

import functools
import itertools
import warnings

import numpy as np
import pytest
import torch

import onebit
from onebit.checkpoint.elements import decoded
from tests.checkpoints import Run
from tests.fuzz.states import mark
from tests.onebit.checkpoint.states import adamw_run
from tests.onebit.runs import Case, kinds, same, snapshot
from tests.ranks import group, run_ranks

CASE = Case(options={"freeze_step": 3, "betas": (0.9, 0.95)}, groups=({"lr": 1e-3}, {"weight_decay": 0.1}))
ONE, GROUP = ("state", 0), ("param_groups", 0)
NUMBERS = (*GROUP, "onebit")
ENDLESS = torch.zeros(1).expand(2**40)
nan, inf = float("nan"), float("inf")


def with_value(value):
    return lambda t: torch.cat([t.reshape(-1)[:-1], torch.tensor([value], dtype=t.dtype)]).view_as(t)


def first(n):
    return lambda t: t.reshape(-1)[:n].clone()


def with_steps(steps):
    return lambda state: {p: {**own, "step": torch.tensor(steps)} for p, own in state.items()}


# where, what is there instead (None: nothing), words of the error; in any stage, in stage 1, in stage 2
FOREIGN = {
    "no param_groups": (("param_groups",), None, "param_groups"),
    "no state": (("state",), None, "param_groups"),
    "a group too few": (("param_groups",), lambda groups: groups[:1], "groups"),
    "a parameter too few": ((*GROUP, "params"), lambda keys: keys[:-1], "groups"),
    "a parameter twice": ((*GROUP, "params"), [0, 0], "twice"),
    "a later version": ((*NUMBERS, "version"), 3, r"version 3 .*this onebit reads 2: load it with the onebit that"),
    "no version": ((*NUMBERS, "version"), None, "version None"),
    "a version that is a bool": ((*NUMBERS, "version"), True, "version True"),
    "maximize": ((*GROUP, "maximize"), True, "maximize"),
}
FOREIGN_1 = {
    **FOREIGN,
    "shape of exp_avg": ((*ONE, "exp_avg"), first(-1), "exp_avg"),
    "no exp_avg": ((*ONE, "exp_avg"), None, "exp_avg"),
    "no exp_avg_sq": ((*ONE, "exp_avg_sq"), None, "exp_avg_sq"),
}
FOREIGN_2 = {
    **FOREIGN,
    "another optimizer's": ((*NUMBERS, "optimizer"), "OneBitOther", "OneBitOther"),
    "shape of denominator": ((*ONE, "denominator"), first(-1), "denominator"),
    "no denominator": ((*ONE, "denominator"), None, "denominator"),
    "no parameter": (ONE, None, "no denominator for parameter"),
    "no bits": ((*ONE, "momentum_bits"), None, "momentum_bits"),
    "no scales": ((*ONE, "momentum_scales"), None, "momentum_scales"),
    "bits of fewer blocks": ((*ONE, "momentum_bits"), lambda b: b[:1], "momentum_bits"),
    "scales of fewer blocks": ((*ONE, "momentum_scales"), lambda s: s[:0], "momentum_scales"),
    "no server residual": ((*ONE, "server_residual_of_rank_0"), None, "server_residual"),
    "number for a residual": ((*ONE, "residual_of_rank_0"), first(1), "residual_of_rank_0"),
    "shape of server residual": ((*ONE, "server_residual_of_rank_0"), first(-1), "server_residual_of_rank_0"),
    "another step": ((*ONE, "step"), torch.tensor(5.0), "different numbers of steps"),
    "other steps": (("state",), with_steps(5.0), "of step 6, and its parameters have taken 5"),
}
DAMAGED = {
    "state is a list": (("state",), [], "state is not a dict"),
    "a parameter's state is a list": (ONE, [], "state is not a dict"),
    "param_groups is a dict": (("param_groups",), {}, "not a list of dicts"),
    "a group is a number": (GROUP, 3, "not a list of dicts"),
    "params is a number": ((*GROUP, "params"), 3, "no list of parameters"),
    "params are lists": ((*GROUP, "params"), [[0], [1]], "other things than numbers and names"),
    "no lr": ((*GROUP, "lr"), None, "has no lr"),
    "no betas": ((*GROUP, "betas"), None, "has no betas"),
    "lr is a word": ((*GROUP, "lr"), "fast", "lr='fast'"),
    "lr beyond fp32": ((*GROUP, "lr"), 1e39, "lr=1e"),
    "lr beyond any float": ((*GROUP, "lr"), 10**400, "lr="),
    "lr without a value": ((*GROUP, "lr"), torch.empty(1, device="meta"), "without a value"),
    "betas without end": ((*GROUP, "betas"), ENDLESS, "betas="),
    "amsgrad is a tensor": ((*GROUP, "amsgrad"), torch.zeros(3), "neither true nor false"),
    "numbers are a list": (NUMBERS, [1], "is a list"),
    "version is a tensor": ((*NUMBERS, "version"), torch.zeros(3), "version"),
    "negative steps": ((*NUMBERS, "steps"), -1, "steps is -1"),
    "half a step": ((*NUMBERS, "steps"), 2.5, "steps is 2.5"),
    "steps beyond int64": ((*NUMBERS, "steps"), 2**64, "steps is"),
    "skipped is a word": ((*NUMBERS, "skipped_steps"), "x", "skipped_steps"),
    "no ranks": ((*NUMBERS, "ranks"), 0, "ranks is 0"),
    "ranks without end": ((*NUMBERS, "ranks"), 2**40, "ranks is"),
    "half a node": ((*NUMBERS, "slices"), 2, "1 ranks in nodes of 2"),
    "no shards": ((*NUMBERS, "shards"), 0, "shards is 0"),
    "settings are a list": ((*NUMBERS, "settings"), [1], "settings is a dict"),
    "fields are a list": ((*NUMBERS, "fields"), ["denominator"], "fields is a string"),
    "no trace": ((*NUMBERS, "trace"), None, "no trace"),
    "trace is a list": ((*NUMBERS, "trace"), [[1.0]], "trace is no JSON"),
    "trace is cut": ((*NUMBERS, "trace"), "[[1.0]", "trace is no JSON"),
    "trace of words": ((*NUMBERS, "trace"), '[["x"]]', "list of lists of numbers"),
    "trace of nothing": ((*NUMBERS, "trace"), "[[]]", "list of lists of numbers"),
    "trace with rows of other lengths": ((*NUMBERS, "trace"), "[[1.0], [1.0, 2.0]]", "different lengths"),
    "chunks are a tensor": ((*NUMBERS, "chunks"), torch.ones(2), "not a Tensor"),
    "compressing is a word": ((*NUMBERS, "compressing"), "yes", "in which stage"),
    "a negative step": ((*ONE, "step"), torch.tensor(-1.0), "step is -1"),
    "steps in a tensor": ((*ONE, "step"), torch.ones(3), "step is a number"),
    "steps in a word": ((*ONE, "step"), "7", "step is '7'"),
}
DAMAGED_1 = {
    **DAMAGED,
    "a moment that is NaN": ((*ONE, "exp_avg"), with_value(nan), "exp_avg .* nan"),
    "an infinite variance": ((*ONE, "exp_avg_sq"), with_value(inf), "exp_avg_sq .* inf"),
    "a negative variance": ((*ONE, "exp_avg_sq"), with_value(-1.0), "exp_avg_sq .* -1"),
    "a moment of whole numbers": ((*ONE, "exp_avg"), lambda t: t.long(), "dtype torch.int64"),
    "a moment in a list": ((*ONE, "exp_avg"), lambda t: t.tolist(), "is a list, not a tensor"),
    "a moment without values": ((*ONE, "exp_avg"), lambda t: t.to("meta"), "no values"),
    "a sparse moment": ((*ONE, "exp_avg"), lambda t: t.to_sparse(), "no values"),
    "a moment beyond fp32": ((*ONE, "exp_avg"), lambda t: with_value(1e300)(t.double()), "exp_avg .* inf"),
}
DAMAGED_2 = {
    **DAMAGED,
    "a negative denominator": ((*ONE, "denominator"), with_value(-1.0), "denominator .* -1"),
    "bits that are floats": ((*ONE, "momentum_bits"), lambda t: t.float(), "dtype torch.float32"),
    "a negative scale": ((*ONE, "momentum_scales"), with_value(-1.0), "momentum_scales .* -1"),
    "a residual that is NaN": ((*ONE, "residual_of_rank_0"), with_value(nan), "residual_of_rank_0 .* nan"),
    "an infinite E": ((*ONE, "server_residual_of_rank_0"), with_value(inf), "server_residual_of_rank_0 .* inf"),
    "swapped": ((*ONE, "residual_of_rank_0"), lambda t: torch.zeros(3, dtype=torch.uint8), "shape"),
    "blocks of no size": ((*NUMBERS, "block_size"), 33, "block_size"),
    "blocks of a float": ((*NUMBERS, "block_size"), 32.0, "block_size"),
    "an unknown scale": ((*NUMBERS, "scale"), "row", "scale is 'row'"),
    "scale is a tensor": ((*NUMBERS, "scale"), torch.zeros(3), "scale is"),
    "an unknown reply": ((*NUMBERS, "reply"), 2, "reply is 2"),
    "chunks without end": ((*NUMBERS, "chunks"), [2**31], "chunks is"),
    "no chunks": ((*NUMBERS, "chunks"), [0], "chunks is 0"),
    "chunks of two dtypes": ((*NUMBERS, "chunks"), [1, 1], "parameters of 2 dtypes, here they have 1"),
}


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
    *way, last = path
    place = functools.reduce(lambda place, key: place[key], way, state)
    if value is None:
        del place[last]
    else:
        place[last] = value(place[last]) if callable(value) else value
    return state


def assert_refused(on, state, match, errors=ValueError):
    before, current = mark(on), on.optimizer.current
    shown = {p: snapshot(own) for p, own in on.optimizer.state.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(errors, match=match):
            on.optimizer.load_state_dict(state)
    assert mark(on) == before and on.optimizer.current is current
    assert all(same(snapshot(on.optimizer.state[p]), own) for p, own in shown.items())


NAMES = {  # all on 1-bit Adam; of each table some on the others
    "OneBitAdam": {**FOREIGN_1, **FOREIGN_2, **DAMAGED_1, **DAMAGED_2}.keys(),
    "OneBitLamb": ("a later version", "shape of exp_avg", "shape of denominator", "an infinite E", "no lr"),
    "ZeroOneAdam": ("a later version", "shape of exp_avg", "another optimizer's", "no bits", "an infinite E"),
}
BOTH = (ValueError, TypeError)
TABLES = ((2, FOREIGN_1, ValueError), (6, FOREIGN_2, ValueError), (2, DAMAGED_1, BOTH), (6, DAMAGED_2, BOTH))
ROWS = {
    f"{kind}, {steps} steps, {name}": (kind, steps, *table[name], errors)
    for kind, names in NAMES.items()
    for steps, table, errors in TABLES
    for name in table
    if name in names
}


@pytest.mark.parametrize("row", ROWS)
def test_what_no_run_leaves_behind_is_refused(row):
    """In the stage it was saved in; a state of stage 2 in stage 1 too."""
    kind, steps, path, value, match, errors = ROWS[row]
    state = changed(saved(kind, steps), path, value)
    for here in sorted({2, steps}):
        assert_refused(loader(kind, here), state, match, errors)


@kinds
def test_after_a_refusal_a_run_goes_on_as_if_nothing_had_been_tried(kind):
    for here in (2, 6):
        on, undisturbed = (Run(CASE.but(kind=kind, seed=1), here) for _ in range(2))
        for path, value, match in (
            (("param_groups",), None, "param_groups"),
            ((*ONE, "step"), torch.tensor(nan), "step is nan"),
            ((*ONE, "residual_of_rank_0"), with_value(nan), "residual_of_rank_0 .* nan"),
        ):
            assert_refused(on, changed(saved(kind, 6), path, value), match)
        for each in (on, undisturbed):
            each.on(here + 1, here + 2)
        assert same(on.all(), undisturbed.all())


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


def test_damage_to_lambs_own_state_is_refused():
    for what, value, match in (
        ("coefficient_average", torch.tensor(nan), "coefficient_average"),
        ("coefficient_average", ENDLESS, "elements, not one"),
        ("ratio", torch.tensor(-1.0), "ratio"),
        ("ratio", "x", "is a str"),
        ("coefficient_steps", torch.tensor(-1.0), "coefficient_steps is -1"),
        ("first_momentum", torch.zeros(3), "first_momentum .* shape"),
        ("counted_bits", torch.zeros(1, dtype=torch.uint8), "counted_bits .* shape"),
    ):
        state = changed(saved("OneBitLamb", 6), (*NUMBERS, "fields"), lambda names, what=what: f"{names} {what}")
        state["state"][0][what] = value
        assert_refused(loader("OneBitLamb", 6), state, match, BOTH)


def test_messages_by_element_load_as_blocks_do_and_one_too_many_is_refused():
    """The form of sharded parameters. With one rank a server has what it averages of every element."""
    state, here = snapshot(saved("OneBitAdam", 6)), Run(CASE.but(seed=1), 2)
    size = state["param_groups"][0]["onebit"]["block_size"]
    for own in state["state"].values():
        d = own["denominator"]
        values = decoded(own.pop("momentum_bits"), own.pop("momentum_scales"), d.numel(), size)
        own["momentum_of_message_0"] = values.view(d.shape)
        own["server_residual_of_rank_0"] = own["server_residual_of_rank_0"].view(d.shape)
    second = changed(state, (*ONE, "momentum_of_message_1"), state["state"][0]["momentum_of_message_0"])
    assert_refused(here, second, "more than 1 message")
    assert_refused(here, changed(state, (*ONE, "momentum_of_message_0"), None), "no momentum_bits")
    here.optimizer.load_state_dict(state)
    loaded, expected = snapshot(here.optimizer.state_dict()), saved("OneBitAdam", 6)
    assert same(loaded["state"], expected["state"])


def test_merge_states_refuses_damaged_states():
    good = saved("OneBitAdam", 6)
    for path, value, match in (
        (NUMBERS, [1], "is a list"),
        ((*NUMBERS, "steps"), torch.ones(3), "steps is"),
        (ONE, None, "number 1 is not of the parameters"),
        (("state",), [], "state is not a dict"),
        ((*NUMBERS, "steps"), 5, "number 1 has steps 5 where the first has 6"),
        ((*NUMBERS, "version"), 3, "version 3"),
    ):
        with pytest.raises(BOTH, match=match):
            onebit.merge_states([good, changed(good, path, value)])
    with pytest.raises(ValueError, match="no states"):
        onebit.merge_states([])


# Parameters of two dtypes


def save_two_dtypes(rank, size, steps):
    params = CASE.parameters()
    params[1].data = params[1].data.bfloat16()
    optimizer = CASE.build(params, group())
    for step in range(1, steps + 1):
        for p, g in zip(params, CASE.gradients(rank, step), strict=True):
            p.grad = g.to(p.dtype)
        optimizer.step()
    return snapshot(optimizer.state_dict())


def load_one_dtype(rank, size, states, moments):
    """Saved with parameters in two dtypes, which lie in two flat states; here in one, so that E lies on other ranks."""
    run = Run(CASE, 6, rank, group())
    assert_refused(run, states[rank], "dtype")
    run.on(7, 8)
    fresh = Run(CASE, 0, rank, group()).optimizer
    fresh.load_state_dict(moments)
    loaded = snapshot(fresh.state_dict()["state"])
    for p, own in moments["state"].items():
        assert all(same(loaded[p][name], own[name]) for name in ("step", "exp_avg", "exp_avg_sq"))


def test_a_state_of_other_dtypes_changes_nothing_and_moments_fit_any():
    run_ranks(2, load_one_dtype, run_ranks(2, save_two_dtypes, 6), run_ranks(2, save_two_dtypes, 2)[0])


# Found by fuzzing: values that can't be compared, or have no end


def test_arguments_of_a_wrong_type_are_refused_by_name():
    odd = [torch.zeros(3), torch.zeros(0), np.zeros(3), 10**400, nan, [1]]
    of_lamb = ("coeff_beta", "min_coeff", "factor_max", "factor_threshold", "ratio")
    of_adam = ("freeze_step", "zero_variance", "scale", "norm", "chunks", "variance_floor")
    for kind, names, values in (
        (onebit.OneBitLamb, of_lamb, [*odd, None, "x"]),
        (onebit.OneBitAdam, of_adam, [*odd, 2**63]),
    ):
        for name, value in itertools.product(names, values):
            with pytest.raises(ValueError, match="coeff|factor|ratio" if names == of_lamb else name):
                kind(CASE.parameters(), **{name: value})
    optimizer = onebit.OneBitAdam(CASE.parameters())
    for wrong in ({}, {"lr": 0.1}, [], None, 3):
        with pytest.raises(TypeError, match="params"):
            optimizer.add_param_group(wrong)
    assert len(optimizer.param_groups) == 1
    for numel in (None, 1.5, "7", [1.5], torch.empty(3, device="meta"), ENDLESS):
        with pytest.raises(TypeError, match="numel="):
            onebit.CompressedAllReduce(numel)
