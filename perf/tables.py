"""Cells and tables, of text and of Markdown."""

from __future__ import annotations

from collections.abc import Sequence


def cell(value: float | None, form: str, unit: float = 1) -> str:
    """A number in this format, or a dash as wide."""
    return f"{'-':>{form.partition('.')[0]}}" if value is None else f"{value * unit:{form}}"


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]], numbers: Sequence[int] = ()) -> str:
    """A Markdown table; columns of numbers, given by their index, are aligned to the right."""
    rules = ["---:" if i in numbers else "---" for i in range(len(head))]
    return "\n".join(f"| {' | '.join(line)} |" for line in (head, rules, *rows))
