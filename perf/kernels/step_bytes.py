"""Bytes of device memory that a step moves, an element, in each way of running it.

    python -m perf.kernels.step_bytes

Computed from what each pass reads and writes. The collectives' own reads and writes are left out of all rows; DDP's
copies into its buckets and back are not (gradient_as_bucket_view=True spares AdamW and stage 1 those).
"""

from __future__ import annotations

from onebit.kernels.passes import Storage, bytes_per_element

RANKS = 8
ADAMW = 7 * 4  # g, m, v, x read; m, v, x written
BUCKETS = 4 * 4  # every gradient read and written twice
PACKED = 4 * 4  # averaged without DDP, over NCCL, which divides: put together and put back


def passes(direct: bool) -> dict[str, float]:
    """Bytes an element of each, of fp32 parameters; of `average` on this rank's share."""
    storage = Storage(4, master=False, packed=True, ranks=RANKS, senders=RANKS if direct else 1)

    def of(name: str) -> float:
        return bytes_per_element(name, storage)

    names = ("scan", "compress", "adam_warmup", "adam_update", "lamb_warmup", "lamb_statistics", "lamb_update")
    found = {name: of(name) for name in names}
    return {**found, "average": 0.0 if direct else of("average") / RANKS}


def undo(direct: bool) -> float:
    """Bytes an element with overlap: compress and average write residuals as they were, and replies are copied. Nothing
    is read again unless the step is skipped."""
    server, own, replies = (0.0, 1 / 8, RANKS / 8) if direct else (4 / RANKS, 1 / 8 / RANKS, 1 / 8)
    return 4 + server + 2 * (own + replies)


def rows(direct: bool) -> list[tuple[str, float]]:
    p = passes(direct)
    adam = p["scan"] + p["compress"] + p["average"] + p["adam_update"]
    lamb = p["scan"] + p["compress"] + p["average"] + p["lamb_statistics"] + p["lamb_update"]
    return [
        ("AdamW(fused), one rank", ADAMW),
        ("AdamW(fused) under DDP", ADAMW + BUCKETS),
        ("1-bit Adam, stage 1, under DDP", p["scan"] + p["adam_warmup"] + BUCKETS),
        ("1-bit Adam, stage 1, without DDP", p["scan"] + p["adam_warmup"] + PACKED),
        ("1-bit Adam, stage 2, with DDP or without", adam),
        ("1-bit Adam, stage 2, `overlap=True`", adam + undo(direct)),
        ("1-bit LAMB, stage 1, under DDP", p["scan"] + p["lamb_warmup"] + BUCKETS),
        ("1-bit LAMB, stage 2, with DDP or without", lamb),
        ("1-bit LAMB, stage 2, `overlap=True`", lamb + undo(direct)),
    ]


def table() -> str:
    lines = [f"| bytes an element, {RANKS} ranks | replies of 1 bit | direct |", "| --- | --- | --- |"]
    direct = dict(rows(direct=True))
    lines += [f"| {name} | {moved:.1f} | {direct[name]:.1f} |" for name, moved in rows(direct=False)]
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
