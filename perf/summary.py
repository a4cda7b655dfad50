"""What the records of a folder reached of what they were to reach.

    python -m perf.summary [perf/results]

Of each record that has targets: how many are met, and those that are missed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from perf.records import RESULTS, read_record
from perf.targets import targets_of


def summary(folder: Path) -> str:
    lines = []
    for path in sorted(folder.glob("*.json")):
        if path.name != "bench.json" and (targets := targets_of(read_record(path))):  # that repeats the others'
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
