"""What a user may choose, checked once: a ValueError says what is wrong, why, and what to pass instead."""

from __future__ import annotations

import difflib
import inspect
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cache
from typing import Any, Literal, NoReturn, TypedDict, TypeVar, get_args

import numpy as np
import torch
from torch import Tensor

from onebit.collectives.reply import AskedReply, check_reply
from onebit.kernels.data.checks import is_finite, is_one_of, is_whole
from onebit.kernels.data.layout import BLOCK_SIZE, MOST_CHUNKS, check_block_size
from onebit.kernels.data.wire import Scale, check_scale
from onebit.optim.freeze import MOST_STEPS, FreezeRule, ZeroVariance
from onebit.optim.param_groups import COMPRESS, PROGRESS, beta_of, check_parameters, device_of

FreezeStep = int | Literal["auto"] | FreezeRule
AskedNorm = Literal["auto", "l1", "l2", "unbiased"]

LARGEST_FLOAT = torch.finfo(torch.float32).max  # kernels hold numbers in fp32
SMALLEST_FLOAT = torch.finfo(torch.float32).tiny

MASK = "mask"  # of a param group: see onebit.optim.masks
_OF_SCHEDULERS = {"initial_lr", "swa_lr", "max_lr", "min_lr", "max_momentum", "base_momentum"}
KEYS_OF_OTHERS = {"params", "param_names", "name", "lr_scale", PROGRESS} | _OF_SCHEDULERS
_HOW_ADAMW_RUNS = {"foreach", "capturable", "fused"}  # and not what it computes
_CHANGES_THE_UPDATE = {
    "amsgrad": "a compressed step has no new variance to take the maximum of. Leave it out",
    "maximize": "steps go down. Negate the loss instead",
    "differentiable": "a step writes to each parameter by its address, which autograd does not see. Leave it out",
}
_OF_OTHER_OPTIMIZERS = {"exp_avg_mask": MASK, "momentum": "betas"}
OF_ADAMW = {"decoupled_weight_decay"} | _HOW_ADAMW_RUNS | _CHANGES_THE_UPDATE.keys()


class OptionArguments(TypedDict, total=False):
    """What every optimizer takes beside its own arguments, for type checkers and editors."""

    freeze_step: FreezeStep
    bias_correction: bool
    zero_variance: ZeroVariance
    variance_floor: float
    update_limit: float | Literal["auto"] | None
    scale: Scale
    norm: AskedNorm
    reply: AskedReply
    block_size: int
    chunks: int | Literal["auto"]
    master_weights: bool
    overlap: bool
    elastic: bool
    check_every: int
    gradient_dtype: torch.dtype | None
    foreach: bool | None
    capturable: bool | None
    fused: bool | None
    amsgrad: bool | None
    maximize: bool | None
    differentiable: bool | None
    process_group: Any
    node_group: Any


Takes = Callable[[Any], bool]


def _one_of(*names: str) -> Takes:
    return lambda value: is_one_of(value, names)


def _option(default: Any, description: str, takes: Takes | None, must: str = "") -> Any:
    """A row of the table: what documentation says, and which values are taken. takes: None where `must` is not said
    here, but by the check that others have, too."""
    return field(default=default, metadata={"description": description, "takes": takes, "must": must})


_FLAG: tuple[Takes, str] = (lambda value: isinstance(value, bool), "it must be True or False")


@dataclass(frozen=True)
class Options:
    """The choices that hold for a whole optimizer, the same on all ranks; those of a param group stay in the group.

    Documentation, checks, the comparison of ranks and the fingerprint of a checkpoint are made of this table.
    """

    freeze_step: FreezeStep = _option(
        "auto",
        "the last step of [stage 1](#when-stage-1-ends): a number, or a `FreezeRule`, which ends stage 1 when the "
        'variance (LAMB: the coefficients) is stable; `"auto"`: `FreezeRule()`; without effect on a loaded state of '
        "stage 2",
        lambda value: (
            isinstance(value, FreezeRule) or is_one_of(value, ("auto",)) or is_whole(value, least=0, most=MOST_STEPS)
        ),
        'the last step of stage 1 must be a whole number, 0 or more, "auto", or an onebit.FreezeRule. Papers use 15 '
        "to 25 % of all steps",
    )
    bias_correction: bool = _option(True, "as torch.optim.AdamW; `False` for the papers' BertAdam", *_FLAG)
    zero_variance: ZeroVariance = _option(
        "floor",
        "what an element without a variance at the freeze does: take the mean variance of its parameter's other "
        'elements (`"floor"`), or never move (`"hold"`). A parameter without any variance never moves: rank 0 warns',
        _one_of(*get_args(ZeroVariance)),
        f"it must be one of {get_args(ZeroVariance)}",
    )
    variance_floor: float = _option(
        1e-2,
        "the least frozen variance of an element, as a part of its parameter's mean variance; papers: 0",
        lambda value: is_finite(value, LARGEST_FLOAT) and 0 <= value <= 1,
        "it is the least variance of an element at the freeze, as a part of the mean of its parameter's, and must lie "
        "between 0 (as the papers have it) and 1",
    )
    update_limit: float | Literal["auto"] | None = _option(
        "auto",
        "the [most](#gradients-that-grow) that the root mean square of a parameter's update (lr multiplies the update) "
        'may be while the variance stays frozen; a larger update is shortened. `"auto"`: twice the usual root mean '
        "square of this parameter (1-bit LAMB: up to 4 times stays, more is shortened to 1.5 times), and 1/4 at least; "
        "`None`: no limit, as in the papers",
        lambda value: (
            value is None
            or is_one_of(value, ("auto",))
            or (is_finite(value, LARGEST_FLOAT) and value >= SMALLEST_FLOAT)
        ),
        "it is the most that the root mean square of a step over lr may be: a number above 0, 2**-126 at least, "
        '"auto" for a multiple of what is usual for a parameter, or None',
    )
    scale: Scale = _option(
        "block", 'one scale for each `"block"`, or one for each message (`"tensor"`), as in the papers', None
    )
    norm: AskedNorm = _option(
        "auto",
        'how a [scale](#scales) is made of the elements of its block or message: the mean size (`"l1"`: the least '
        'error), the root mean square (`"l2"`), or the sum of squares over the sum of sizes (`"unbiased"`: nothing '
        'comes late, but with noise); `"auto"`: unbiased with block scales, else l1',
        _one_of(*get_args(AskedNorm)),
        f"it must be one of {get_args(AskedNorm)}",
    )
    reply: AskedReply = _option(
        "auto",
        "[what comes back for a message](usage.md#what-comes-back-for-a-message): the mean, compressed to 1 bit once "
        'more (`1`), as in the papers, or the messages of all N ranks (`"direct"`): nothing is compressed twice, and '
        'N / 2 times as many bytes are sent; `"auto"`: direct with two ranks, else 1',
        None,
    )
    block_size: int = _option(
        BLOCK_SIZE,
        "the most elements that a block has: a multiple of 32, up to 8192; those of an [embedding](#scales) are a row "
        "each",
        None,
    )
    chunks: int | Literal["auto"] = _option(
        "auto",
        "into how many [pieces](tuning.md#chunks) a message is cut: while one piece is sent, the next is compressed; "
        '`"auto"` measures some numbers once',
        lambda value: is_one_of(value, ("auto",)) or is_whole(value, least=1, most=MOST_CHUNKS),
        f'it must be a positive number up to {MOST_CHUNKS}, or "auto"',
    )
    master_weights: bool = _option(
        True,
        "parameters of 16 bits keep an fp32 copy: 4 bytes more an element. Write to them under `torch.no_grad()`; "
        "in-place writes to `p.data` are undone",
        *_FLAG,
    )
    overlap: bool = _option(
        False,
        "in stage 2 messages leave [while backward still computes](tuning.md#overlap-with-backward); clipping or "
        "scaling of gradients ends the overlap",
        *_FLAG,
    )
    elastic: bool = _option(
        False,
        "a compressed step in which a rank dies can be [taken back](elastic.md) on the others, by `onebit.reform`: "
        "residuals and messages are kept as they were before, 4 + 4 / N bytes an element and more",
        *_FLAG,
    )
    check_every: int = _option(
        1000,
        "steps between two checks that all ranks hold the same bits; if not, every rank raises a `DivergenceError`; "
        "0: no checks",
        lambda value: is_whole(value, least=0, most=MOST_STEPS),
        "it is the number of steps between two checks that all ranks hold the same bits, and must be a whole number; "
        "0 never checks",
    )
    gradient_dtype: torch.dtype | None = _option(
        None,
        "the [16 bits](#gradients-in-16-bits) that fp32 gradients are rounded to for the network in full-precision "
        "steps, and inside a node: `torch.bfloat16`, `torch.float16`, or `None`, which sends fp32",
        lambda value: value is None or (isinstance(value, torch.dtype) and value in (torch.bfloat16, torch.float16)),
        "it is what gradients are rounded to on the wire in full-precision steps, and must be torch.bfloat16, "
        "torch.float16, or None (they are sent as they are)",
    )

    @classmethod
    def of(cls, arguments: Mapping[str, Any], without: Mapping[str, str]) -> Options:
        """Read options from the keyword arguments of an optimizer, AdamW's included. without: those that it does not
        take, and what to do."""
        arguments = _without_those_of_adamw(arguments)
        names = [each.name for each in fields(cls) if each.name not in without]
        unknown = sorted(arguments.keys() - set(names))
        if unknown:
            known = f"beside its own arguments, this optimizer takes the options {', '.join(names)}"
            why = f", which is of other optimizers ({without[unknown[0]]})" if unknown[0] in without else ""
            for near in [] if why else difflib.get_close_matches(unknown[0], names, 1):
                why = f" (did you mean {near}?)"
            raise TypeError(f"got an unexpected keyword argument {unknown[0]!r}{why}: {known}")
        return cls(**arguments)

    @property
    def fixed_freeze_step(self) -> int | None:
        """The last step of stage 1, where no rule finds it."""
        return None if isinstance(self.freeze_step, (str, FreezeRule)) else self.freeze_step

    @property
    def freeze_rule(self) -> FreezeRule:
        return self.freeze_step if isinstance(self.freeze_step, FreezeRule) else FreezeRule()

    def __post_init__(self) -> None:
        to_python_numbers(self)
        for each in fields(self):
            value, takes = getattr(self, each.name), each.metadata["takes"]
            if takes is not None and not takes(value):
                raise ValueError(f"{each.name}={value!r:.80}: {each.metadata['must']}")
        check_reply(self.reply)
        check_block_size(self.block_size)
        check_scale(self.scale, "l1" if self.norm == "auto" else self.norm)


def to_python_numbers(chosen: object) -> None:
    """NumPy's numbers among the fields become Python's, which JSON and torch.load(weights_only=True) take."""
    for name, value in vars(chosen).items():
        object.__setattr__(chosen, name, in_python(value))


def in_python(value: Any) -> Any:
    """The same for one number, or a tuple or list of some; anything else as it is."""
    if type(value) in (tuple, list):
        return type(value)(map(in_python, value))
    return value.item() if isinstance(value, np.generic) else value


def with_python_numbers(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """A hook of state_dict, where a schedule has left NumPy's in param groups."""
    for group in state["param_groups"]:
        group.update({name: in_python(value) for name, value in group.items()})


def without_markup(text: str) -> str:
    """Return a description as help() shows it: without links and backticks."""
    return re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text).replace("`", "")


T = TypeVar("T", bound=type)
_RANKS = {
    "process_group": "a torch.distributed group, an mpi4py communicator, or None: the default group, if there is one.",
    "node_group": "the ranks of this rank's node, which average uncompressed, and are one rank to the network: a "
    'group, or "auto" for the ranks of a host, if there are several hosts and each has equally many; None: one level.',
}


def shows_options(optimizer: T) -> T:
    """Show each option in the signature, and in the Args that end the docstring, of a class whose __init__ ends with
    **options."""
    signature = inspect.signature(optimizer.__init__)  # type: ignore[misc]
    taken = [f for f in fields(Options) if f.name not in optimizer.without_options]  # type: ignore[attr-defined]
    own = [p for p in signature.parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
    shared = [(f.name, f.default, f.type) for f in taken] + [("process_group", None, Any), ("node_group", "auto", Any)]
    kind = inspect.Parameter.KEYWORD_ONLY
    parameters = [*own, *(inspect.Parameter(name, kind, default=d, annotation=a) for name, d, a in shared)]
    optimizer.__init__.__signature__ = signature.replace(parameters=parameters)  # type: ignore[misc]
    text = inspect.cleandoc(optimizer.__doc__ or "")
    described = {f.name: f"{without_markup(f.metadata['description'])}." for f in taken} | _RANKS
    shown = "\n".join(f"    {name}: {description}" for name, description in described.items())
    optimizer.__doc__ = f"{text}\n{shown}\n"
    return optimizer


def check_group(group: Mapping[str, Any]) -> None:
    """The numbers of one param group."""
    lr = group["lr"]
    if isinstance(lr, Tensor):
        if lr.numel() != 1:
            raise ValueError(f"lr is a tensor of {lr.numel()} elements: a learning rate is one number")
        if lr.is_meta or lr.is_complex() or lr.is_quantized or lr.layout is not torch.strided:
            raise ValueError(f"lr is a tensor of {lr.dtype} without a value: a learning rate is one number")
        lr = float(lr)
    if not is_finite(lr, LARGEST_FLOAT) or lr < 0:
        raise ValueError(f"lr={lr!r}: a learning rate is a finite number, 0 or more")
    _check_betas(group["betas"])
    for name, why in (("eps", "it is added to a denominator and"), ("weight_decay", "it")):
        if not is_finite(group[name], LARGEST_FLOAT) or group[name] < 0:
            raise ValueError(f"{name}={group[name]!r}: {why} must be a finite number, 0 or more")
    if not isinstance(group[COMPRESS], bool):
        raise ValueError(
            f"compress={group[COMPRESS]!r}: a param group's parameters are compressed in stage 2 (True) or averaged "
            f"uncompressed in every step (False)"
        )


def _check_betas(betas: Any) -> None:
    if isinstance(betas, (tuple, list)):
        betas = tuple(map(beta_of, betas))
    if not isinstance(betas, tuple) or len(betas) != 2 or not all(is_finite(b) and 0 <= b < 1 for b in betas):
        raise ValueError(f"betas={betas!r}: two decay rates are needed, each at least 0 and below 1, as (0.9, 0.999)")


def check_groups(groups: Sequence[Mapping[str, Any]], options: Collection[str]) -> None:
    """What a schedule may have made of them since: every step, so no more than what would make parameters NaN."""
    for group in groups:
        check_keys(group, options)
        betas = group["betas"]
        plain = type(betas) is tuple and list(map(type, betas)) == [float, float]
        if not plain or not 0 <= min(betas) <= max(betas) < 1:
            _check_betas(betas)
        for name in ("lr", "eps", "weight_decay"):
            value = group[name]
            if type(value) is float and -LARGEST_FLOAT <= value <= LARGEST_FLOAT:
                continue
            if not isinstance(value, Tensor) and not is_finite(value, LARGEST_FLOAT):
                raise ValueError(
                    f"{name}={value!r} in a param group: all its parameters would become NaN. Look at the schedule "
                    f"that has set it"
                )


def _without_those_of_adamw(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Scripts pass them on: what changes nothing here is taken, and not kept."""
    theirs = _HOW_ADAMW_RUNS | _CHANGES_THE_UPDATE.keys()
    for name in sorted(arguments.keys() & theirs):
        if arguments[name] is not None and not isinstance(arguments[name], bool):
            raise ValueError(f"{name}={arguments[name]!r}: as in torch.optim.AdamW it must be True, False or None")
        if arguments[name] and name in _CHANGES_THE_UPDATE:
            raise ValueError(f"{name}=True: {_CHANGES_THE_UPDATE[name]}")
    return {name: value for name, value in arguments.items() if name not in theirs}


def check_keys(group: Mapping[str, Any], options: Collection[str]) -> None:
    """Raise a ValueError for a key of a param group that is meant as an option, and is none. Labels are taken."""
    if MASK in group:
        raise ValueError(
            f"a param group has {MASK!r}, which was put there later, and nothing would be done with it. Give it with "
            f"its parameters when the optimizer is built, or to add_param_group"
        )
    for name in group.keys() - options - KEYS_OF_OTHERS:
        if name in _CHANGES_THE_UPDATE and group[name]:
            raise ValueError(f"a param group has {name}={group[name]!r}: {_CHANGES_THE_UPDATE[name]}")
        if name not in OF_ADAMW and (meant := _almost_names(name, frozenset(options))):
            where = "" if meant in {MASK, *options} else ", which goes to the constructor"
            raise ValueError(
                f"a param group has {name!r}, with which nothing would be done: do you mean {meant}{where}? The "
                f"options of a group are {', '.join(sorted({MASK, *options}))}. Take {name!r} out of the group; labels "
                f"of your own are taken unless they look like an option"
            )


@cache
def _almost_names(key: object, options: frozenset[str]) -> str | None:
    """Return the option that a key of a param group misses by little, or names where it does nothing."""
    if not isinstance(key, str):
        return None
    near = difflib.get_close_matches(key, {*options, MASK, *(each.name for each in fields(Options))}, 1, cutoff=0.8)
    return _OF_OTHER_OPTIMIZERS.get(key, near[0] if near else None)


def check_last_group(groups: Sequence[Mapping[str, Any]], options: Collection[str]) -> None:
    """A group that was added."""
    check_keys(groups[-1], options)
    check_group(groups[-1])
    check_parameters(groups[-1]["params"])
    if any(group["params"] for group in groups):
        device_of(groups)


def refuse_attribute(optimizer: type, name: str, defaults: Collection[str]) -> NoReturn:
    """Raise an AttributeError: setting this attribute of an optimizer would change nothing."""
    where = f"the groups: for group in optimizer.param_groups: group[{name!r}] = ..."
    instead = where if name in defaults else f"the constructor: {optimizer.__name__}(..., {name}=...)"
    raise AttributeError(f"{name} set on the optimizer would change nothing. It belongs to {instead}")


@cache
def options_named(optimizer: Any) -> frozenset[str]:
    """What is chosen when an optimizer is built, under the names of its arguments."""
    taken = inspect.signature(optimizer.__init__).parameters.values()
    named = {p.name for p in taken if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)}
    return frozenset(named | OptionArguments.__annotations__.keys()) - {"self", "params", "defaults", "algorithm"}


def check_sharded(options: Options, without_nodes: bool) -> None:
    """What does not go with parameters that are sharded."""
    if options.overlap:
        raise ValueError(
            "overlap=True with sharded parameters: FSDP has their gradients only when its own reduce-scatter is over. "
            "Pass overlap=False"
        )
    if not without_nodes:
        raise ValueError(
            "node_group with sharded parameters: sharding inside a node is the first level already. Leave it out"
        )
