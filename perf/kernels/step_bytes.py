"""Bytes of device memory that a step moves, an element, in each way of running it.

    python -m perf.kernels.step_bytes [--ranks 8]

Computed from what each pass reads and writes. The collectives' own reads and writes are left out of all rows; DDP's
copies into its buckets and back are not (gradient_as_bucket_view=True spares AdamW and stage 1 those).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from onebit.cli.arguments import whole_number_from
from onebit.kernels.passes import bytes_per_element

ADAMW = 7 * 4  # g, m, v, x read; m, v, x written
BUCKETS = 4 * 4  # every gradient read and written twice
PACKED = 4 * 4  # averaged without DDP, over NCCL, which divides: put together and put back


def passes(ranks: int, direct: bool = False) -> dict[str, float]:
    """Bytes an element of each, of fp32 parameters; of `average` on this rank's share."""
    copies = ranks if direct else 1

    def of(name: str) -> float:
        return bytes_per_element(name, 4, master=False, packed=True, ranks=ranks, copies=copies)

    names = ("scan", "compress", "adam_warmup", "adam_update", "lamb_warmup", "lamb_statistics", "lamb_update")
    found = {name: of(name) for name in names}
    return {**found, "average": 0.0 if direct else of("average") / ranks}


def undo(ranks: int, direct: bool = False) -> float:
    """With overlap: compress and average write residuals as they were, and replies are copied. Nothing is read again
    unless the step is skipped."""
    server, own, replies = (0.0, 1 / 8, ranks / 8) if direct else (4 / ranks, 1 / 8 / ranks, 1 / 8)
    return 4 + server + 2 * (own + replies)


def rows(ranks: int, direct: bool = False) -> list[tuple[str, float]]:
    p = passes(ranks, direct)
    adam = p["scan"] + p["compress"] + p["average"] + p["adam_update"]
    lamb = p["scan"] + p["compress"] + p["average"] + p["lamb_statistics"] + p["lamb_update"]
    return [
        ("AdamW(fused), one rank", ADAMW),
        ("AdamW(fused) under DDP", ADAMW + BUCKETS),
        ("1-bit Adam, stage 1, under DDP", p["scan"] + p["adam_warmup"] + BUCKETS),
        ("1-bit Adam, stage 1, without DDP", p["scan"] + p["adam_warmup"] + PACKED),
        ("1-bit Adam, stage 2, with DDP or without", adam),
        ("1-bit Adam, stage 2, `overlap=True`", adam + undo(ranks, direct)),
        ("1-bit LAMB, stage 1, under DDP", p["scan"] + p["lamb_warmup"] + BUCKETS),
        ("1-bit LAMB, stage 2, with DDP or without", lamb),
        ("1-bit LAMB, stage 2, `overlap=True`", lamb + undo(ranks, direct)),
    ]


def table(ranks: int) -> str:
    lines = [f"| bytes an element, {ranks} ranks | replies of 1 bit | direct |", "| --- | --- | --- |"]
    direct = dict(rows(ranks, True))
    lines += [f"| {name} | {moved:.1f} | {direct[name]:.1f} |" for name, moved in rows(ranks)]
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m perf.kernels.step_bytes", description="Bytes a step moves.")
    parser.add_argument("--ranks", type=whole_number_from(1, 2**20), default=8)
    print(table(parser.parse_args(argv).ranks))
    return 0


if __name__ == "__main__":
    sys.exit(main())
