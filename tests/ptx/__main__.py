"""`python -m tests.ptx`: every variant of every kernel, compiled for sm_90, run on the CPU.

    python -m tests.ptx                  all variants in four orders of warps; exit status 1 if anything is wrong
    python -m tests.ptx --quick          a few of them
    python -m tests.ptx --only bf16      those with this in their name; --orders forward,random: in these orders
    python -m tests.ptx --mutations      faults put into the PTX, one at a time: which of them are found
    python -m tests.ptx --jobs 16        in so many processes, of which each runs a variant or a mutant

Seconds are a processor's, not the clock's. Unused: launches where a load races with a store, and a second run, in which
it gets anything, stores the same bytes: its value is not used.
"""

from __future__ import annotations

import argparse
import functools
import os
import sys

import torch

from onebit.cli.arguments import whole_number
from onebit.cli.progress import Progress
from onebit.kernels.tuning.machine import triton_version
from tests.ptx import cases, mutants
from tests.ptx.jobs import in_turn
from tests.ptx.machine import ORDERS

ROW = "{:42} {:>8} {:>13} {:>6} {:>8}  {}"


def main() -> int:
    parser = argparse.ArgumentParser("python -m tests.ptx", description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="the variants that every run of the tests does")
    parser.add_argument("--only", default="", help="variants with this in their name")
    parser.add_argument("--orders", default=",".join(ORDERS), help=f"some of {', '.join(ORDERS)}")
    parser.add_argument("--mutations", action="store_true", help="are faults in the PTX found?")
    parser.add_argument("--jobs", type=whole_number, default=os.cpu_count() or 1, help="default: %(default)s")
    options = parser.parse_args()
    names = [name for name in (cases.QUICK if options.quick else cases.VARIANTS) if options.only in name]
    orders = tuple(options.orders.split(","))
    if not names:
        parser.error(f"no variant has {options.only!r} in its name: there are {', '.join(cases.VARIANTS)}")
    if unknown := set(orders) - set(ORDERS):
        parser.error(f"no order is called {', '.join(sorted(unknown))}: there are {', '.join(ORDERS)}")
    torch.use_deterministic_algorithms(True, warn_only=True)  # torch.empty fills with NaN
    torch.set_num_threads(1)
    return mutants.report(options.jobs) if options.mutations else report(names, orders, options.jobs)


def report(names: list[str], orders: tuple[str, ...], jobs: int) -> int:
    """A row for each variant, and below it what is wrong."""
    progress, total, wrong = Progress(), cases.Outcome(), 0
    print(f"Triton {triton_version()}, {len(names)} variants in the orders {', '.join(orders)}")
    print(ROW.format("variant", "kernels", "instructions", "unused", "seconds", "result"))
    run = functools.partial(cases.run, orders=orders)
    for name, found in zip(names, in_turn(run, [cases.VARIANTS[name] for name in names], jobs, progress), strict=True):
        progress.clear()
        print(_row(name, found), flush=True)
        for problem in found.problems:
            print(f"    {problem}")
        wrong += bool(found.problems)
        total.add(found)
    print(_row("all", total))
    return int(wrong > 0)


def _row(name: str, found: cases.Outcome) -> str:
    result = f"{len(found.problems)} faults" if found.problems else "right"
    return ROW.format(name, found.kernels, f"{found.instructions:,}", found.unused, f"{found.seconds:.1f}", result)


if __name__ == "__main__":
    sys.exit(main())
