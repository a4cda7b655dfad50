"""What a benchmark is to reach."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Target:
    """`what` follows "times": 4.2 times as fast as fp32."""

    what: str
    reached: float
    needed: float

    @property
    def met(self) -> bool:
        return self.reached >= self.needed

    def __str__(self) -> str:
        verdict = "met" if self.met else "missed"
        return f"{self.shown} times {self.what}, to reach {self.needed:.3g}: {verdict}"

    @property
    def shown(self) -> str:
        """What was reached, with two decimals where they decide."""
        return f"{self.reached:.2f}" if self.reached < 2 else f"{self.reached:.1f}"


class Limit(Target):
    """`reached` is to be at most `needed`; `what` follows the number."""

    @property
    def met(self) -> bool:
        return self.reached <= self.needed

    def __str__(self) -> str:
        return f"{self.shown} {self.what}, at most {self.needed:.3g}: {'met' if self.met else 'missed'}"


def as_json(targets: Sequence[Target]) -> list[dict[str, Any]]:
    return [{**asdict(target), "at_most": isinstance(target, Limit), "met": target.met} for target in targets]


def from_json(found: dict[str, Any]) -> Target:
    numbers = found["reached"], found["needed"]
    return Limit(found["what"], *numbers) if found.get("at_most") else Target(f"times {found['what']}", *numbers)


def check_status(command: str, targets: Sequence[Target], check: bool) -> int:
    """The exit status: with --check, 1 if a target was missed or nothing that has one was measured."""
    if check and not targets:
        print(f"{command}: --check: no target speaks of what was measured", file=sys.stderr)
    return int(check and (not targets or any(not target.met for target in targets)))
