"""What the records of a folder reached of what they were to reach.

    python -m perf.summary [perf/results]

Of each record that has targets: how many are met, and those that are missed.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from perf.records import RESULTS, read_record
from perf.targets import Target


def targets_of(path: Path) -> list[Target]:
    """Of one record; none where it has none, or is not a record."""
    try:
        record = read_record(path)
    except (OSError, json.JSONDecodeError):
        return []
    found = record.get("targets", []) if isinstance(record, dict) else []
    return [Target(each["what"], each["reached"], each["needed"]) for each in found]


def summary(folder: Path) -> str:
    lines = []
    for path in sorted(folder.glob("*.json")):
        targets = targets_of(path)
        if targets:
            lines += [f"{path.name}: {sum(t.met for t in targets)} of {len(targets)} met"]
            lines += [f"    {target}" for target in targets if not target.met]
    return "\n".join(lines) or f"no record with a target in {folder}"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m perf.summary", description="Targets of the records in a folder.")
    parser.add_argument("folder", type=Path, nargs="?", default=RESULTS)
    print(summary(parser.parse_args(argv).folder))
    return 0


if __name__ == "__main__":
    sys.exit(main())
