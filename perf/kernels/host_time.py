"""What the host does in a step on a GPU, counted without one: launches, and microseconds of Python.

    python -m perf.kernels.host_time [--parameters 300] [--ranks 8] [--steps 200] [--out DIR]

The Triton passes are launched as on a GPU, their arguments checked and looked up by Triton itself; its driver is a stub
that runs nothing. Parameters are small tensors on the CPU, messages are not sent. Left out is what CUDA's own calls
take (a launch some 3 us), and added is what the CPU takes for torch's own small operations. Microseconds are those that
the thread had a processor.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
import warnings
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

import onebit
from onebit.cli.arguments import whole_number
from onebit.collectives.transport import LocalTransport
from onebit.kernels import backends
from onebit.kernels.data.wire import Messages
from perf.command import add_out, exit_status, make_folder
from perf.records import cpu_name, machine, provenance, slug, write_record
from perf.tables import markdown

ELEMENTS = 64  # a parameter
STAGE_1 = 20  # steps
SETTLED = 8  # steps of a kind after which nothing is compiled or built any more
CASES: dict[str, tuple[str, Mapping[str, Any]]] = {
    "1-bit Adam": ("OneBitAdam", {"freeze_step": STAGE_1}),
    "1-bit LAMB": ("OneBitLamb", {"freeze_step": STAGE_1}),
    "0/1 Adam": ("ZeroOneAdam", {}),
    "0/1 Adam, local steps": (
        "ZeroOneAdam", {"var_freeze_step": 20, "local_step_scaler": 4, "local_step_clipper": 4},
    ),
}  # fmt: skip


class Driver:
    """A GPU to Triton, on which a launch is only counted."""

    def __init__(self) -> None:
        self.launches, self.utils, self.launcher_cls = 0, self, self._launcher

    def _launcher(self, source: object, metadata: object) -> Any:
        def launch(*arguments: object) -> None:
            self.launches += 1

        return launch

    def load_binary(self, *arguments: object) -> tuple[int, int, int, int, int]:
        module, function, registers, spilled, threads = 1, 1, 32, 0, 1024
        return module, function, registers, spilled, threads

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": 2**18, "multiprocessor_count": 132}

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


class Unsent(LocalTransport):
    """Rank 0 of several, whose messages go nowhere: each other rank seems to have sent what it has."""

    def __init__(self, size: int) -> None:
        self.size = size


class Operations(TorchDispatchMode):
    """Counts torch's operations that write memory: on a GPU a launch or a copy each."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func.namespace == "aten" and not func.is_view and func is not torch.ops.aten.empty.memory_format
        return func(*args, **(kwargs or {}))


def stub_the_gpu() -> Driver:
    """Give tensors on the CPU the GPU's passes from here on, over a driver that runs nothing; no message is read."""
    stub, load = Driver(), backends.load
    driver.set_active(stub)
    backends.load = lambda name: load("gpu")
    Messages.check = lambda self, phase: None  # type: ignore[method-assign]
    return stub


@dataclass(frozen=True)
class Row:
    """A kind of step: medians over its steps, and the time of the fastest."""

    optimizer: str
    kind: str
    launches: float  # of passes
    operations: float  # of torch
    microseconds: float


def measure(parameters: int, ranks: int, steps: int) -> list[Row]:
    rows, stub = [], stub_the_gpu()
    for name in CASES:
        timed = _by_kind(stub, name, parameters, ranks, steps, counting=False)
        counted = _by_kind(stub, name, parameters, ranks, steps, counting=True)  # which takes time of its own
        for kind in timed:
            median = [statistics.median(column) for column in zip(*counted[kind], strict=True)]
            seconds = min(spent for *_, spent in timed[kind])
            rows.append(Row(name, kind, median[0], median[1], 1e6 * seconds))
    return rows


def _by_kind(
    stub: Driver, name: str, parameters: int, ranks: int, steps: int, counting: bool
) -> dict[str, list[tuple[int, int, float]]]:
    """Launches, operations and a processor's seconds of each step; the first of a kind, which compile, are left out."""
    kind_of_optimizer, options = CASES[name]
    params = [torch.nn.Parameter(torch.ones(ELEMENTS)) for _ in range(parameters)]
    found: dict[str, list[tuple[int, int, float]]] = defaultdict(list)
    optimizer = getattr(onebit, kind_of_optimizer)(params, lr=1e-3, process_group=Unsent(ranks), **options)
    for _ in range(steps):
        for p in params:
            p.grad = torch.ones_like(p)
        launches, mode, start = stub.launches, Operations(), time.thread_time()
        with mode if counting else nullcontext():
            optimizer.step()
        kind = optimizer.setup.algorithm.kind(optimizer.steps) if optimizer.compressing else "stage 1"
        found[kind].append((stub.launches - launches, mode.count, time.thread_time() - start))
        if not optimizer.compressing:
            for own in optimizer.state.values():
                own["exp_avg_sq"].fill_(1)  # no pass has run, and a variance of 0 can't be frozen
    return {kind: rows[SETTLED:] for kind, rows in found.items() if len(rows) > SETTLED}


def table(rows: Sequence[Row]) -> str:
    head = ["optimizer", "step", "launches of passes", "operations of torch", "microseconds"]
    cells = [
        [row.optimizer, row.kind, f"{row.launches:g}", f"{row.operations:g}", f"{row.microseconds:.0f}"] for row in rows
    ]
    return markdown(head, cells, numbers=(2, 3, 4))


def run(arguments: argparse.Namespace) -> int:
    make_folder(arguments.out)
    about = {name: getattr(arguments, name) for name in ("parameters", "ranks", "steps")}
    rows = measure(**about)
    print(table(rows))
    path = arguments.out / f"{slug('host_time', cpu_name())}.json"
    write_record(path, {**about, **machine(), **provenance(), "rows": [asdict(row) for row in rows]})
    print(f"\n{path}")
    return 0


def main() -> int:
    """Exit status 2: there is no folder to write to."""
    parser = argparse.ArgumentParser("python -m perf.kernels.host_time", description=__doc__.partition("\n")[0])
    parser.add_argument("--parameters", type=whole_number, default=300)
    parser.add_argument("--ranks", type=whole_number, default=8)
    parser.add_argument("--steps", type=whole_number, default=200)
    add_out(parser, "the record")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    os.environ["ONEBIT_QUIET"] = "1"
    warnings.filterwarnings("ignore", "all ranks have the same gradients")
    return exit_status("perf.kernels.host_time", lambda: run(arguments))


if __name__ == "__main__":
    sys.exit(main())
