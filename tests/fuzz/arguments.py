"""Random arguments of everything public that takes numbers: a ValueError or TypeError, or what works; and of command
lines: exit status 0 or 2 and a message, and no demo is started.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import io
import os
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn

import onebit
from onebit.cli import main as cli
from onebit.cli.arguments import CommandError, check_picture, pick_device
from onebit.cli.plan import command as plan
from onebit.cli.plan.options import OPTIONS
from onebit.kernels.data.layout import Layout
from onebit.kernels.data.wire import Format
from tests.fuzz.mutate import ERRORS, Source, junk, pick

_SENSIBLE: dict[str, tuple[Any, ...]] = {
    "lr": (1e-3, 0, 0.1, torch.tensor(1e-2)), "betas": ((0.9, 0.999), [0.0, 0.0], (0.5, 0.9)), "eps": (1e-8, 0.0, 1.0),
    "weight_decay": (0.0, 0.1), "bias_correction": (True, False), "master_weights": (True, False),
    "freeze_step": (0, 1, 2, "auto", onebit.FreezeRule(0.5), onebit.FreezeRule(window=3)),
    "zero_variance": ("floor", "hold"), "variance_floor": (0.0, 0.01, 1.0), "scale": ("block", "tensor"),
    "norm": ("auto", "l1", "l2", "unbiased"), "block_size": (32, 64, 2048), "chunks": (1, 2, 3, "auto"),
    "overlap": (False, True), "elastic": (False, True), "check_every": (0, 1, 1000),
    "gradient_dtype": (None, torch.bfloat16, torch.float16),
}  # fmt: skip
_LAMB: dict[str, tuple[Any, ...]] = {
    "coeff_beta": (0.9, 0.0), "min_coeff": (0.01, 0.1), "max_coeff": (0.3, 10.0), "factor_min": (0.5,),
    "factor_max": (4.0,), "factor_threshold": (0.1,), "ratio": ("variance", "denominator"),
}  # fmt: skip
_FREE = {"bias_correction", "master_weights"}  # whatever is true or false


class Arguments:
    def case(self, source: Source) -> str:
        work = pick(source, (_optimizer, _optimizer, _group, _all_reduce, _layout))
        try:
            what = work(source)
        except ERRORS as error:
            if not str(error):
                raise AssertionError("an error without a word") from error
            return f"{work.__name__[1:]}, {type(error).__name__}"
        return f"{work.__name__[1:]}, {what}"


def _drawn(source: Source, names: dict[str, tuple[Any, ...]], wild: float) -> dict[str, Any]:
    chosen = [name for name in names if source.random() < 0.4]
    return {
        name: junk(source) if source.random() < wild and name not in _FREE else pick(source, names[name])
        for name in chosen
    }


def _parameters(source: Source) -> list[nn.Parameter]:
    shapes = [tuple(source.integers(0, 9, size=int(source.integers(0, 3)))) for _ in range(int(source.integers(1, 4)))]
    dtype = pick(source, (torch.float32, torch.float32, torch.bfloat16, torch.float16))
    return [nn.Parameter(torch.randn([int(n) for n in shape]).to(dtype)) for shape in shapes]


def _optimizer(source: Source) -> str:
    kind = pick(source, (onebit.OneBitAdam, onebit.OneBitLamb, onebit.ZeroOneAdam))
    names = {name: of for name, of in _SENSIBLE.items() if name not in kind.without_options}
    names |= _LAMB if kind is onebit.OneBitLamb else {}
    params = _parameters(source)
    optimizer = kind(params, **_drawn(source, names, pick(source, (0.0, 0.3))))
    for _ in range(int(source.integers(0, 4))):
        for p in params:
            p.grad = None if source.random() < 0.1 else torch.randn_like(p)
        optimizer.step()
    if optimizer.compressing:
        optimizer.diagnostics()
    return "accepted"


def _group(source: Source) -> str:
    params, more = _parameters(source), _parameters(source)
    optimizer = onebit.OneBitAdam(params, block_size=32)
    before = [dict(group) for group in optimizer.param_groups]
    names = {name: _SENSIBLE[name] for name in ("lr", "betas", "eps", "weight_decay")}
    group: Any = {"params": more, **_drawn(source, names, 0.4)}
    if source.random() < 0.1:
        group = junk(source)
    elif source.random() < 0.2:
        group["params"] = junk(source)
    try:
        optimizer.add_param_group(group)
    except ERRORS:
        if [dict(each) for each in optimizer.param_groups] != before:
            raise AssertionError("a refused group was added") from None
        raise
    finally:
        for p in params:
            p.grad = torch.randn_like(p)
        optimizer.step()
    return "accepted"


def _all_reduce(source: Source) -> str:
    """Try few numels: memory is another matter."""
    few = (1, 7, [3, 5], [0, 4], 100, 0, -1, 10**400, 1.5, float("nan"), None, "x", b"", {}, [], [[]], [None], [2.0, 1])
    names = {name: _SENSIBLE[name] for name in ("scale", "norm", "block_size", "chunks")} | {"bits": (1, 4, 8)}
    average = onebit.CompressedAllReduce(pick(source, few), **_drawn(source, names, 0.2))
    average([torch.randn(n) for n in average.numels])
    return "accepted"


def _layout(source: Source) -> str:
    sensible = {"block_size": (32, 64), "ranks": (1, 2), "chunks": (1, 2)}
    given = {name: pick(source, (*values, junk(source))) for name, values in sensible.items()}
    layout = Layout([int(n) for n in source.integers(0, 2**37, size=3)], **given)
    form = Format(layout, pick(source, ("block", "tensor", junk(source))), pick(source, ("l1", junk(source))))
    if form.nbytes % 16 or (layout.shards[1:] <= layout.shards[:-1]).any():
        raise AssertionError("a shard without a block")
    return "accepted"


_WORDS = (
    "demo", "tune", "plan", "--help", "-h", "--optimizer", "adam", "lamb", "--ranks", "2", "64", "65", "1", "0", "-1",
    "--steps", "10", "10001", "400", "--seed", "2147483648", "1gbit", "100mbit", "--out",
    "a.png", "a.exe", ".", "", "a", "--device", "cpu", "cuda", "cuda:99", "cuda:-1", "meta", "mps", "auto", "--dtype",
    "float32", "float64", "--elements", "2**24", "2**99", "99**99", "1_000", "1e6", "--", "--elements=", "--out=x.png",
    "--ran", "@file", "%s", "{}", "\u0663", "\udc80", "é", "\n", "-",
)  # fmt: skip
_PAIRS = (
    ("--device", ("cpu", "cuda", "cuda:99", "meta", "", "é")),
    ("--elements", ("2**24", "2**99", "0", "1e6", "99**99", "2**40", "2**41")),
    ("--dtype", ("float32", "float64")),
    ("--ranks", ("2", "65", "-1")),
    ("--steps", ("10", "9", "x")),
    ("--out", ("a.png", "", "a/b")),
)
_NUMBERS = (
    "0", "1", "0.5", "64", "1000", "340e6", "1.3b", "1e30", "1e308", "-1", "nan", "inf", "1gbit", "1e-300", "none", "",
)  # fmt: skip
_PLAN = tuple((f"--{name.replace('_', '-')}", _NUMBERS) for name in OPTIONS)
_PRESETS = (("--model", ("bert-large",)), ("--cluster", ("ethernet-v100", "infiniband-v100")))
_parser = functools.cache(cli.parser)  # most of a case's time


class CommandLine:
    def __init__(self) -> None:
        self.room = tempfile.TemporaryDirectory()

    def case(self, source: Source) -> str:
        words = [self._word(source) for _ in range(int(source.integers(0, 7)) if source.random() < 0.5 else 0)]
        command = pick(source, ("demo", "tune", "plan"))
        pairs = [pick(source, _PLAN if command == "plan" else _PAIRS) for _ in range(int(source.integers(0, 3)))]
        for option, values in (*(_PRESETS if command == "plan" else ()), *pairs):
            words += [option, str(pick(source, values))]
        if source.random() < 0.8:
            words.insert(0, command)
        kind = source.random()
        if kind < 0.1:
            return _outcome("device", pick_device, self._word(source))
        return self._plot(self._word(source)) if kind < 0.12 else _main(words)

    def _word(self, source: Source) -> str:
        if source.random() < 0.85:
            return str(pick(source, _WORDS))
        codes = source.integers(1, 0x3000, size=int(source.integers(0, 12)))
        return "".join(map(chr, codes))

    def _plot(self, name: str) -> str:
        """Check a path for a plot: a file that was not there is not left behind."""
        room = Path(self.room.name)
        before = os.listdir(room)
        outcome = _outcome("plot", partial(check_picture, option="--out"), room / name.replace("/", "_"))
        if os.listdir(room) != before:
            raise AssertionError(f"{name!r} was left behind")
        return outcome


def _main(words: list[str]) -> str:
    """`onebit WORDS`: the plan without its pictures, other commands that do nothing but check the device."""
    started = []

    def run(arguments: argparse.Namespace) -> None:
        started.append(arguments)
        if arguments.command == "tune":
            pick_device(arguments.device)
        if arguments.command == "plan":
            arguments.map = None
            plan.run(arguments)

    out, errors = (io.TextIOWrapper(io.BytesIO(), "utf-8", errors="backslashreplace") for _ in range(2))
    with (
        mock.patch.object(cli, "COMMANDS", dict.fromkeys(cli.COMMANDS, run)),
        mock.patch.object(cli, "parser", _parser),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(errors),
    ):
        try:
            code = cli.main(words)
        except SystemExit as end:
            code = end.code  # type: ignore[assignment]
    errors.flush()
    text = errors.buffer.getvalue()  # type: ignore[attr-defined]
    if code not in (0, 2) or (code == 2) != (b"error" in text) or b"Traceback" in text:
        raise AssertionError(f"onebit {words} ended with {code} and wrote {text!r}")
    return f"exit {code}"


def _outcome(what: str, check: Callable[[Any], object], given: object) -> str:
    try:
        check(given)
    except CommandError:
        return f"{what}, refused"
    return f"{what}, accepted"
