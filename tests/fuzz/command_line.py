"""Random command lines: exit status 0 or 2 and a message, and no demo is started."""

from __future__ import annotations

import argparse
import contextlib
import functools
import io
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

from onebit.cli import main as cli
from onebit.cli.arguments import CommandError, pick_device
from onebit.cli.plan import command as plan
from onebit.cli.plan.options import OPTIONS
from onebit.report.plots import check_plot
from tests.fuzz.mutate import Source, pick

_WORDS = (
    "demo", "tune", "plan", "--help", "-h", "--optimizer", "adam", "lamb", "--ranks", "2", "64", "65", "1", "0", "-1",
    "--steps", "10", "10001", "400", "--seed", "2147483648", "1gbit", "100mbit", "--codec", "--out",
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
_PRESETS = (("--model", ("bert-large", "bert-large-lamb")), ("--cluster", ("ethernet-v100", "infiniband-v100")))
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
            return _outcome("device", CommandError, pick_device, self._word(source))
        return self._plot(self._word(source)) if kind < 0.12 else _main(words)

    def _word(self, source: Source) -> str:
        if source.random() < 0.85:
            return str(pick(source, _WORDS))
        codes = source.integers(1, 0x3000, size=int(source.integers(0, 12)))
        return "".join(map(chr, codes))

    def _plot(self, name: str) -> str:
        """Where a plot would go: a file that was not there is not left behind."""
        room = Path(self.room.name)
        before = os.listdir(room)
        outcome = _outcome("plot", ValueError, check_plot, room / name.replace("/", "_"))
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
            arguments.plot = arguments.map = None
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


def _outcome(what: str, refusal: type[Exception], check: Callable[[Any], object], given: object) -> str:
    try:
        check(given)
    except refusal:
        return f"{what}, refused"
    return f"{what}, accepted"
