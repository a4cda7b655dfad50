"""The compressed all-reduce against torch.distributed's in fp32, fp16 and bf16: time, and bytes on the wire.

    python -m perf.all_reduce --lab [--hosts 4] [--rates 100mbit,1gbit,10gbit] [--elements 2**20,25_000_000]
    torchrun ... -m perf.all_reduce [--elements 2**28]

The first needs root on Linux: it builds a network of hosts on this machine (perf.network_lab) and starts a rank in
each. The second measures on the group that it is started in: Gloo on CPUs, NCCL on GPUs.

A time is the slowest rank's, the median of several calls after one that does not count, a barrier before each. Bytes
are what the interface's own counter says of all these calls: headers, acknowledgements and barriers are in it. They
are read where each rank has an interface for itself, named by GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME. Results are
checked before the timed calls and after: a wrong one gets no figure. In the lab chunks="auto" measures every network
anew; its links let 64 KiB through at once, which flatters messages that are not much larger, below 2**20 elements.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import platform
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from onebit import cli
from onebit.collectives import CollectiveError, CompressedAllReduce
from onebit.collectives.exchange import Chunk
from onebit.kernels import tuning
from onebit.kernels.hyper import Hyper, hyper_table
from onebit.kernels.machine import device_name, triton_version
from onebit.kernels.pointers import Pointers
from perf import plots
from perf.network_lab import LabUnavailable, NetworkLab, RankFailed, parse_rate

KINDS = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
ONE_BIT = "1 bit"
STANDARD = {
    "hosts": [4],
    "rates": ["100mbit", "300mbit", "1gbit", "3gbit", "10gbit"],
    "elements": [2**16, 2**18, 2**20, 2**22, 25_000_000],
    "chunks": "auto",
}
SPEED_TARGETS = {"1gbit": 4.0, "100mbit": 12.0}  # times fp32's speed: 4 hosts, 25 M elements, 2 cores
SPEED_TARGET_HOSTS, SPEED_TARGET_ELEMENTS = 4, 25_000_000
BYTES_TARGETS = {"fp32": 28.0, "fp16": 14.0}  # times fewer bytes
BYTES_TARGET_ELEMENTS = 2**21  # and more: in less, barriers and headers count
CHECKED_CALLS = 3
CHECKED_ELEMENTS = 2**16
WORKER = ("-m", "perf.all_reduce")  # what a host of the lab runs
SAYS, FAILS = "@progress ", "@wrong "  # rank 0's lines that are meant for the driver
UNSHAPED = "unshaped"
ROOT = Path(__file__).resolve().parents[1]


class WrongResult(Exception):
    """A compressed all-reduce that does not compute what it is to compute."""


@dataclass(frozen=True)
class Row:
    """One kind of all-reduce, of one size, on one network."""

    hosts: int
    rate: str | None  # of each link of the lab: "1gbit", "unshaped"; None outside it
    elements: int
    kind: str
    seconds: float | None = None
    calls: tuple[float, ...] = ()  # seconds of each, the slowest rank's
    bytes: float | None = None  # sent a call, by the rank that sends most
    chunks: int | None = None
    phases: dict[str, float] | None = None  # seconds of each alone, unpipelined
    error: str | None = None


@dataclass(frozen=True)
class Target:
    what: str
    reached: float
    needed: float

    @property
    def met(self) -> bool:
        return self.reached >= self.needed

    def __str__(self) -> str:
        return f"{self.reached:.1f} times {self.what}, to reach {self.needed:g}: {'met' if self.met else 'missed'}"


class Ranks:
    """One rank's view of the group: barriers, clocks and counters."""

    def __init__(self, device: torch.device, say: Callable[[str], None]) -> None:
        self.device, self._say, self._said = device, say, 0.0
        self.rank, self.size = dist.get_rank(), dist.get_world_size()

    def say(self, text: str) -> None:
        """A line of progress, one every two seconds."""
        if self.rank == 0 and time.monotonic() - self._said > 2:
            self._said = time.monotonic()
            self._say(text)

    def barrier(self) -> None:
        self.most(torch.zeros(1))
        self.synchronize()

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def most(self, values: Tensor) -> Tensor:
        """The maximum over ranks, elementwise."""
        on_device = values.to(self.device)
        dist.all_reduce(on_device, dist.ReduceOp.MAX)
        return on_device.cpu()

    def slowest(self, seconds: Sequence[float]) -> tuple[float, ...]:
        return tuple(self.most(torch.tensor(seconds, dtype=torch.float64)).tolist())

    def seconds(self, run: Callable[[], object]) -> float:
        """Of one call on this rank; all ranks begin together."""
        self.barrier()
        start = time.perf_counter()
        run()
        self.synchronize()
        return time.perf_counter() - start

    def bytes_sent(self) -> int | None:
        """This rank's interface's counter; None where it has none for itself."""
        names = (os.environ.get(f"{library}_SOCKET_IFNAME") for library in ("GLOO", "NCCL"))
        name = next((name for name in names if name), None)
        counters = Path("/proc/net/dev")
        if name is None or os.environ.get("LOCAL_WORLD_SIZE") != "1" or not counters.exists():
            return None
        line = re.search(rf"^\s*{re.escape(name)}:(.*)$", counters.read_text(encoding="ascii"), re.MULTILINE)
        return int(line[1].split()[8]) if line else None


def same_everywhere(ranks: Ranks, x: Tensor, when: str) -> None:
    """WrongResult on every rank unless all have the same bits."""
    digest = hashlib.blake2b(x.cpu().view(torch.uint8).numpy().data, digest_size=7).digest()
    number = int.from_bytes(digest, "little")
    most = ranks.most(torch.tensor([number, -number]))
    if most[0] != -most[1]:
        raise WrongResult(f"the ranks' results of {x.numel():,} elements differ {when}")


def check(ranks: Ranks, average: CompressedAllReduce, elements: int) -> None:
    """A few calls: all ranks get the same, and sum of results + mean residual + E = sum of mean inputs.

    The sums are looked at on elements an odd stride apart, so that no place within a block is left out.
    """
    generator = torch.Generator(ranks.device).manual_seed(ranks.rank)
    x = torch.empty(elements, device=ranks.device)
    looked_at = torch.arange(0, elements, elements // CHECKED_ELEMENTS | 1, device=ranks.device)
    given, got = (torch.zeros(len(looked_at), dtype=torch.float64, device=ranks.device) for _ in range(2))
    for call in range(1, CHECKED_CALLS + 1):
        given += x.normal_(generator=generator)[looked_at]
        average(x)
        same_everywhere(ranks, x, f"after call {call}")
        got += x[looked_at]
    layout, owned = average.exchange.layout, average.exchange.server_residual.value
    server = torch.zeros(layout.all().elements, device=ranks.device)
    for chunk, part in enumerate(owned.chunk(layout.chunks)):
        layout.shard(chunk, ranks.rank).of(server).copy_(part)
    expected = (given - average.exchange.residual.value[looked_at]) / ranks.size - server[looked_at]
    dist.all_reduce(expected)
    error, limit = float((got - expected).abs().max()), 1e-5 * float(1 + expected.abs().max())
    if not error <= limit:
        raise WrongResult(
            f"after {CHECKED_CALLS} calls with {elements:,} elements the sum of the results plus the mean residuals "
            f"differs from the sum of the mean inputs by {error:.3g}, more than rounding's {limit:.3g}"
        )


def measure(ranks: Ranks, elements: int, chunks: Any, repeats: int, phases: bool) -> list[Row]:
    """The rows of one size. A collective call."""
    what = f"{elements:,} elements"
    ranks.say(f"{what}: checking results")
    average = CompressedAllReduce(elements, device=ranks.device, chunks=chunks)
    check(ranks, average, elements)
    generator = torch.Generator(ranks.device).manual_seed(ranks.rank)
    source = torch.randn(elements, generator=generator, device=ranks.device)
    x = torch.empty_like(source)
    row = _timed(ranks, Row(ranks.size, None, elements, ONE_BIT), source, x, lambda: average(x), repeats, what)
    same_everywhere(ranks, x, "after the timed calls")
    row = replace(row, chunks=average.chunks, phases=_phases(ranks, average, x, repeats) if phases else None)
    return [row, *(_uncompressed(ranks, kind, source, repeats, what) for kind in KINDS)]


def _uncompressed(ranks: Ranks, kind: str, source: Tensor, repeats: int, what: str) -> Row:
    row, inputs = Row(ranks.size, None, source.numel(), kind), source.to(KINDS[kind])
    if error := _refusal(inputs):
        return replace(row, error=error)
    x = torch.empty_like(inputs)
    return _timed(ranks, row, inputs, x, lambda: dist.all_reduce(x), repeats, what)


def _refusal(like: Tensor) -> str | None:
    """What the backend says if it can't add this dtype; it says so on every rank, before anything is sent."""
    try:
        dist.all_reduce(torch.zeros_like(like[:1]))
    except (RuntimeError, ValueError, TypeError) as error:
        if isinstance(error, dist.DistError):
            raise
        return str(error).strip().splitlines()[0]
    return None


def _timed(
    ranks: Ranks, row: Row, source: Tensor, x: Tensor, run: Callable[[], object], repeats: int, what: str
) -> Row:
    seconds, before = [], None
    for call in range(repeats + 1):
        x.copy_(source)
        ranks.say(f"{what}: {row.kind}, call {call + 1} of {repeats + 1}")
        if call == 1:
            ranks.barrier()  # what the call before has sent, has left
            before = ranks.bytes_sent()
        seconds.append(ranks.seconds(run))
    ranks.barrier()
    after = ranks.bytes_sent()
    calls = ranks.slowest(seconds)[1:]
    sent = math.nan if before is None or after is None else (after - before) / repeats
    sent = ranks.slowest([sent])[0]
    return replace(row, seconds=statistics.median(calls), calls=calls, bytes=None if math.isnan(sent) else sent)


def _phases(ranks: Ranks, average: CompressedAllReduce, x: Tensor, repeats: int) -> dict[str, float]:
    """Seconds of each phase alone on all ranks at once: what pipelining has to overlap."""
    exchange, transport = average.exchange, average.transport
    backend, everything = exchange.backend, exchange.layout.all()
    pointers, hyper = Pointers.to(exchange.layout, [x]), hyper_table([Hyper()], ranks.device)
    flags = torch.zeros(1, dtype=torch.int32, device=ranks.device)

    def of_chunk(c: Chunk) -> list[tuple[str, Callable[[], object]]]:
        return [
            ("compress", lambda: backend.compress(c.span, pointers, None, c.residual, hyper, flags, c.sent)),
            ("all-to-all", lambda: transport.all_to_all(c.received.buffer, c.sent.buffer, "gather").wait()),
            ("average", lambda: backend.average(c.shard, c.received, c.server_residual, c.reply)),
            ("all-gather", lambda: transport.all_gather(c.replies.buffer, c.reply.buffer, "scatter").wait()),
            ("decode", lambda: backend.decode(c.span, c.replies, pointers)),
        ]

    parts: list[tuple[str, Callable[[], object]]] = [
        ("scan", lambda: backend.scan(everything, pointers, hyper, flags)),
        ("agree", lambda: transport.all_max(flags, "agree")),
        *(part for chunk in exchange.chunks for part in of_chunk(chunk)),
    ]
    runs = [ranks.slowest([ranks.seconds(run) for _, run in parts]) for _ in range(repeats)]
    medians = [statistics.median(calls) for calls in zip(*runs, strict=True)]
    names = dict.fromkeys(name for name, _ in parts)
    return {n: sum(s for s, (name, _) in zip(medians, parts, strict=True) if name == n) for n in names}


def run_rank(arguments: argparse.Namespace, say: Callable[[str], None]) -> tuple[list[Row], dict[str, Any], int]:
    """Measure on this process's group: the rows, which are the same on all ranks, what group it is, and our rank."""
    own = not dist.is_initialized()
    device = cli.pick_device(arguments.device)
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)) % torch.cuda.device_count())
        torch.cuda.set_device(device)
    if own:
        backend = arguments.backend or ("nccl" if device.type == "cuda" else "gloo")
        dist.init_process_group(backend, timeout=timedelta(seconds=arguments.timeout))
    try:
        ranks = Ranks(device, say)
        if ranks.size == 1:
            raise cli.CommandError("a group of one rank has nothing to send: start two or more")
        group = {
            "device": device_name(device),
            "backend": str(dist.get_backend()),
            "ranks": ranks.size,
            "threads": torch.get_num_threads(),
            "cpu_tile": tuning.cpu_tile(),
        }
        rows = []
        for elements in arguments.elements:
            rows += measure(ranks, elements, arguments.chunks, arguments.repeats, arguments.phases)
        return rows, group, ranks.rank
    finally:
        if own:
            dist.destroy_process_group()


def run_worker(arguments: argparse.Namespace) -> int:
    """A rank of the lab: what it says and finds goes to the driver."""
    try:
        rows, group, rank = run_rank(arguments, lambda text: print(SAYS + text, flush=True))
    except WrongResult as error:
        print(f"{FAILS}{error}", flush=True)
        return 1
    if rank == 0:
        found = {"rows": [asdict(row) for row in rows], "group": group}
        arguments.worker.write_text(json.dumps(found), encoding="utf-8")
    return 0


def run_lab(arguments: argparse.Namespace, progress: cli.Progress) -> tuple[list[Row], dict[str, Any]]:
    """Every network in turn, one process a host."""
    rows: list[Row] = []
    group: dict[str, Any] = {}
    for hosts in arguments.hosts:
        progress.show(f"{hosts} hosts: setting up the network")
        with NetworkLab(hosts) as lab:
            for rate in arguments.rates:
                lab.set_rate(_shaped(rate))
                found, group = _on_lab(lab, rate, arguments, progress)
                rows += found
    progress.clear()
    return rows, group


def _on_lab(
    lab: NetworkLab, rate: str, arguments: argparse.Namespace, progress: cli.Progress
) -> tuple[list[Row], dict[str, Any]]:
    network = f"{lab.hosts} hosts, {rate}"
    wrong: list[str] = []

    def on_line(rank: int, line: str) -> None:
        if rank == 0 and line.startswith(SAYS):
            progress.show(f"{network}: {line.removeprefix(SAYS)}")
        elif line.startswith(FAILS):
            wrong.append(line.removeprefix(FAILS))

    progress.show(f"{network}: starting the ranks")
    with tempfile.TemporaryDirectory(prefix="onebit-all-reduce-") as folder:
        path = Path(folder, "found.json")
        options = {"elements": ",".join(map(str, arguments.elements)), "worker": path}
        options |= {name: getattr(arguments, name) for name in ("chunks", "repeats", "timeout")}
        argv = [*WORKER, "--device=cpu", *(f"--{name}={value}" for name, value in options.items())]
        search = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        env = {"PYTHONPATH": search, "ONEBIT_CACHE_DIR": folder}
        try:
            argv += ["--phases"] * arguments.phases
            lab.run(argv, timeout=arguments.timeout, launcher="env", env=env, on_line=on_line)
        except RankFailed as error:
            raise (WrongResult(f"{network}: {wrong[0]}") if wrong else error) from error
        found = json.loads(path.read_text(encoding="utf-8"))
    return [Row(**{**row, "rate": rate, "calls": tuple(row["calls"])}) for row in found["rows"]], found["group"]


def by_kind(rows: Sequence[Row]) -> list[dict[str, Row]]:
    """The rows of one size on one network together."""
    together: dict[tuple[int, str | None, int], dict[str, Row]] = {}
    for row in rows:
        together.setdefault((row.hosts, row.rate, row.elements), {})[row.kind] = row
    return list(together.values())


def faster(group: dict[str, Row], kind: str) -> float | None:
    """How many times as fast as `kind` the compressed all-reduce is."""
    ours, theirs = group[ONE_BIT].seconds, group[kind].seconds
    return theirs / ours if ours and theirs else None


def smaller(group: dict[str, Row], kind: str) -> float | None:
    """How many times fewer bytes than `kind` it sends."""
    ours, theirs = group[ONE_BIT].bytes, group[kind].bytes
    return theirs / ours if ours and theirs else None


def table(rows: Sequence[Row]) -> str:
    kinds = (*KINDS, ONE_BIT)
    lines = [
        f"{'':26} | {'milliseconds':^43} | {'times faster than':^20} | {'MB a call and rank':^18} | times fewer than",
        f"{'hosts':5} {'rate':>8} {'elements':>11} | {' '.join(f'{kind:>10}' for kind in kinds)} | "
        f"{' '.join(f'{kind:>6}' for kind in KINDS)} | {'fp32':>9} {ONE_BIT:>8} | {'fp32':>7} {'fp16':>7}",
    ]
    for group in by_kind(rows):
        own = group[ONE_BIT]
        times = " ".join(_cell(group[kind].seconds, "10.2f", 1e3) for kind in kinds)
        speed = " ".join(_cell(faster(group, kind), "6.1f") for kind in KINDS)
        sent = f"{_cell(group['fp32'].bytes, '9.3f', 1e-6)} {_cell(own.bytes, '8.3f', 1e-6)}"
        fewer = " ".join(_cell(smaller(group, kind), "7.2f") for kind in BYTES_TARGETS)
        where = f"{own.hosts:5} {own.rate or '-':>8} {own.elements:>11,}"
        lines.append(f"{where} | {times} | {speed} | {sent} | {fewer}")
    lines += [f"{row.kind} was not measured: {row.error}" for row in {r.error: r for r in rows if r.error}.values()]
    return "\n".join(lines)


def phase_table(rows: Sequence[Row]) -> str:
    """Milliseconds of each phase alone, beside those of the whole call."""
    measured = [row for row in rows if row.phases]
    if not measured:
        return ""
    names = list(measured[0].phases or {})
    lines = [
        "\nmilliseconds of each phase alone, unpipelined, and of the call",
        f"{'hosts':5} {'rate':>8} {'elements':>11} {'chunks':>6} | {' '.join(f'{n:>10}' for n in names)} |       call",
    ]
    for row in measured:
        parts = " ".join(_cell(seconds, "10.2f", 1e3) for seconds in (row.phases or {}).values())
        where = f"{row.hosts:5} {row.rate or '-':>8} {row.elements:>11,} {row.chunks:>6}"
        lines.append(f"{where} | {parts} | {_cell(row.seconds, '10.2f', 1e3)}")
    return "\n".join(lines)


def targets(rows: Sequence[Row]) -> list[Target]:
    """Those that these rows are a measurement of."""
    groups = by_kind(rows)
    found = []
    for group in groups:
        own, ratio = group[ONE_BIT], faster(group, "fp32")
        needed = next((x for rate, x in SPEED_TARGETS.items() if _bits(rate) == _bits(own.rate)), None)
        if (own.hosts, own.elements) == (SPEED_TARGET_HOSTS, SPEED_TARGET_ELEMENTS) and needed and ratio:
            what = f"as fast as fp32 ({own.hosts} hosts, {own.rate}, {own.elements:,} elements)"
            found.append(Target(what, ratio, needed))
    for kind, needed in BYTES_TARGETS.items():
        large = [group for group in groups if group[ONE_BIT].elements >= BYTES_TARGET_ELEMENTS]
        ratios = [ratio for group in large if (ratio := smaller(group, kind))]
        if ratios:
            where = f"the least of {len(ratios)} networks and sizes, {BYTES_TARGET_ELEMENTS:,} elements or more"
            found.append(Target(f"fewer bytes than {kind} ({where})", min(ratios), needed))
    return found


def plot(rows: Sequence[Row], title: str, path: Path) -> None:
    """Time against size, speed-up against bandwidth, bytes on the wire: each as far as it was measured."""
    groups = by_kind(rows)
    own = [group[ONE_BIT] for group in groups]
    hosts = SPEED_TARGET_HOSTS if any(row.hosts == SPEED_TARGET_HOSTS for row in own) else own[-1].hosts
    rate = "1gbit" if any(row.rate == "1gbit" for row in own) else own[-1].rate
    largest = max(row.elements for row in own)
    sizes = [group for group in groups if (group[ONE_BIT].hosts, group[ONE_BIT].rate) == (hosts, rate)]
    times = {kind: [(g[kind].elements, 1e3 * s) for g in sizes if (s := g[kind].seconds)] for kind in (*KINDS, ONE_BIT)}
    where = f"{hosts} ranks" + (f", {rate}" if rate else "")
    panels = [plots.lines(f"Time, {where}", "elements", "milliseconds", times)]
    speeds: dict[str, list[tuple[float, float]]] = {}
    for group in groups:
        row, bits = group[ONE_BIT], _bits(group[ONE_BIT].rate)
        for kind in ("fp32", "fp16"):
            if bits and row.elements == largest and (ratio := faster(group, kind)):
                speeds.setdefault(f"{kind}, {row.hosts} hosts", []).append((bits / 1e9, ratio))
    if speeds:
        shown = plots.lines(f"Speed-up, {largest:,} elements", "link, Gbit/s", "times as fast as", speeds, logy=False)
        goals = [(_bits(r) or 0, x) for r, x in SPEED_TARGETS.items()] if largest == SPEED_TARGET_ELEMENTS else []
        panels.append(plots.marked(shown, [(bits / 1e9, x) for bits, x in goals], "target, fp32, 4 hosts"))
    biggest = sizes[-1]
    sent = {kind: 1e-6 * nbytes for kind in (*KINDS, ONE_BIT) if (nbytes := biggest[kind].bytes)}
    if sent:
        notes = {kind: f"{mb:.3g} MB\n{mb / sent[ONE_BIT]:.1f} x" for kind, mb in sent.items()}
        panels.append(
            plots.bars(f"Bytes on the wire, {biggest[ONE_BIT].elements:,} elements", "MB a call and rank", sent, notes)
        )
    plots.save(path, panels, title)


def slug(arguments: argparse.Namespace, group: dict[str, Any]) -> str:
    """The record's file name: the device, and in what it differs from the standard run."""
    parts = ["all_reduce", group["device"]]
    if not arguments.lab:
        parts += [group["backend"], f"{group['ranks']}-ranks"]
    for name in ("hosts", "rates", "elements") if arguments.lab else ("elements",):
        value = getattr(arguments, name)
        if value != STANDARD[name]:
            parts += [name, *map(str, value)]
    if arguments.chunks != STANDARD["chunks"]:
        parts += ["chunks", str(arguments.chunks)]
    return "-".join(re.sub(r"[^a-z0-9_]+", "-", part.lower()).strip("-") for part in parts)


def _about(arguments: argparse.Namespace, group: dict[str, Any], load: float | None) -> dict[str, Any]:
    return {
        **group,
        "lab": arguments.lab,
        "cpu": device_name(torch.device("cpu")),
        "cpu_count": os.cpu_count(),
        "load_before": load,
        "chunks": arguments.chunks,
        "repeats": arguments.repeats,
        "versions": {
            "python": platform.python_version(),
            "torch": str(torch.__version__),
            "triton": triton_version(),
            "cuda": torch.version.cuda,
            "system": f"{platform.system()} {platform.machine()}",
        },
        "measured": datetime.now(timezone.utc).date().isoformat(),
    }


def _shaped(rate: str | None) -> str | None:
    """What the network lab calls it."""
    return None if rate == UNSHAPED else rate


def _bits(rate: str | None) -> int | None:
    return parse_rate(_shaped(rate))


def _cell(value: float | None, form: str, unit: float = 1) -> str:
    return f"{'-':>{form.partition('.')[0]}}" if value is None else f"{value * unit:{form}}"


def report(arguments: argparse.Namespace, rows: list[Row], group: dict[str, Any], load: float | None) -> int:
    """The table, the targets, the record and the plot."""
    where = f"{group['device']}, {os.cpu_count()} cores, {group['backend']}, threads a rank: {group['threads']}"
    print(f"{where}, load before: {load}\n\n{table(rows)}")
    if phases := phase_table(rows):
        print(phases)
    reached = targets(rows)
    print("".join(f"\n{target}" for target in reached))
    record: dict[str, Any] = _about(arguments, group, load)
    record["targets"] = [{**asdict(target), "met": target.met} for target in reached]
    record["rows"] = [asdict(row) for row in rows]
    path = arguments.out / f"{slug(arguments, group)}.json"
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(f"\n{path}")
    try:
        plot(rows, where, path.with_suffix(".png"))
        print(path.with_suffix(".png"))
    except ModuleNotFoundError:
        print("No plot: matplotlib is not installed. For one: pip install matplotlib")
    if arguments.check and not reached:
        print("perf.all_reduce: --check: no target speaks of these hosts, rates and elements", file=sys.stderr)
    return int(arguments.check and (not reached or any(not target.met for target in reached)))


def _make_folder(out: Path) -> None:
    """Before minutes of measuring, not after."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise cli.CommandError(f"--out {str(out)!r} is no folder to write to ({error}): choose another") from error


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status 1: no figures, or with --check a missed target. 2: this can't be measured here."""
    arguments = _arguments(argv)
    load = round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None
    progress = cli.Progress()
    try:
        if arguments.worker:
            return run_worker(arguments)
        _make_folder(arguments.out)
        if arguments.lab:
            return report(arguments, *run_lab(arguments, progress), load)
        if not dist.is_initialized() and "WORLD_SIZE" not in os.environ:
            raise cli.CommandError(
                "there is no group to measure on: start it with torchrun, or give it --lab (root on Linux)"
            )
        rows, group, rank = run_rank(arguments, progress.show)
        progress.clear()
        return 0 if rank else report(arguments, rows, group, load)
    except (LabUnavailable, cli.CommandError, ValueError) as error:
        print(f"perf.all_reduce: error: {error}", file=sys.stderr)
        return 2
    except WrongResult as error:
        print(f"perf.all_reduce: no figures, since a result is wrong: {error}", file=sys.stderr)
        return 1
    except (RankFailed, CollectiveError, TimeoutError) as error:
        print(f"perf.all_reduce: no figures, since a rank failed: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def _list_of(parse: Callable[[str], Any]) -> Callable[[str], list[Any]]:
    def parsed(text: str) -> list[Any]:
        try:
            return [parse(part) for part in text.split(",")]
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return parsed


def _hosts(text: str) -> int:
    hosts = int(text) if text.strip().isdecimal() else 0
    if not 2 <= hosts <= 64:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of hosts: give 2 to 64, as in 2,4,8")
    return hosts


def _rate(text: str) -> str:
    rate = text.strip().lower()
    try:
        _bits(rate)
    except ValueError:
        raise ValueError(f'{text!r} is no rate from 1mbit to 100gbit: write "100mbit", "2.5gbit", "unshaped"') from None
    return rate


def _chunks(text: str) -> int | str:
    return text if text == "auto" else cli.whole_number(text)


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = _parser()
    arguments = parser.parse_args(argv)
    idle = ("device", "backend") if arguments.lab else ("hosts", "rates")
    given = [f"--{name}" for name in idle if getattr(arguments, name) is not None]
    if given:
        parser.error(f"{' and '.join(given)}: only {'without' if arguments.lab else 'with'} --lab")
    arguments.device = arguments.device or "auto"
    for name in ("hosts", "rates"):
        setattr(arguments, name, getattr(arguments, name) or STANDARD[name])
    return arguments


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m perf.all_reduce", description="The compressed all-reduce against fp32, fp16 and bf16."
    )
    parser.add_argument("--lab", action="store_true", help="on networks made on this machine: root on Linux")
    parser.add_argument("--hosts", type=_list_of(_hosts), help="of the lab, such as 2,4,8")
    parser.add_argument("--rates", type=_list_of(_rate), help="of the lab's links: 100mbit,1gbit,unshaped")
    parser.add_argument(
        "--elements", type=_list_of(cli.whole_number), default=STANDARD["elements"], help="such as 2**20,25_000_000"
    )
    parser.add_argument("--chunks", type=_chunks, default=STANDARD["chunks"], help="pipeline stages (default: auto)")
    parser.add_argument("--repeats", type=cli.whole_number, default=5, help="calls that a median is taken of")
    parser.add_argument("--phases", action="store_true", help="also each phase of the compressed one alone")
    parser.add_argument("--device", help="without --lab: auto, cpu or cuda (default: auto)")
    parser.add_argument("--backend", choices=("gloo", "nccl"), help="without --lab: gloo on a CPU, nccl on a GPU")
    parser.add_argument(
        "--timeout", type=cli.whole_number, default=1800, help="seconds for one network of the lab, or for one call"
    )
    parser.add_argument("--check", action="store_true", help="exit with 1 if a target is missed")
    parser.add_argument("--out", type=Path, default=Path("perf/results"), help="folder of the record and the plot")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)  # a rank of --lab: where rank 0 writes
    return parser


if __name__ == "__main__":
    sys.exit(main())
