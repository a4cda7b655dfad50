"""What a benchmark is to reach."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Target:
    """A target: at least so many times what `what` says, 4.2 times as fast as fp32. at_most: `what` follows the number
    alone."""

    what: str
    reached: float
    needed: float
    at_most: bool = False

    @property
    def met(self) -> bool:
        return self.reached <= self.needed if self.at_most else self.reached >= self.needed

    @property
    def title(self) -> str:
        return self.what if self.at_most else f"times {self.what}"

    @property
    def shown(self) -> str:
        """What was reached, with two decimals where they decide."""
        return f"{self.reached:.2f}" if self.reached < 2 else f"{self.reached:.1f}"

    def __str__(self) -> str:
        bound = "at most" if self.at_most else "to reach"
        return f"{self.shown} {self.title}, {bound} {self.needed:.3g}: {'met' if self.met else 'missed'}"


def as_json(targets: Sequence[Target]) -> list[dict[str, Any]]:
    return [{**asdict(target), "met": target.met} for target in targets]


def targets_of(record: Mapping[str, Any]) -> list[Target]:
    """Those that a benchmark has written into its record."""
    found = record.get("targets", [])
    return [Target(each["what"], each["reached"], each["needed"], each.get("at_most", False)) for each in found]
