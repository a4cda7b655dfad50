"""The options of `onebit plan`: names, units, how they are read, and the papers' models and clusters as presets."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, get_args

from onebit.cli.plan.delay import Transport
from onebit.cli.plan.model import Cluster, Levels
from onebit.collectives.reply import AskedReply

LARGEST = 1e15  # beyond any cluster; what is computed of such numbers is finite
ITEMSIZES = {"float32": 4, "float16": 2, "bfloat16": 2}
PREFIXES = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "b": 1e9, "t": 1e12}

_BERT_LARGE = {"elements": "340e6", "dtype": "float16", "overlap": "none"}
MODELS: dict[str, dict[str, str]] = {
    # 1-bit Adam (Tang et al. 2021), Table 1: Ethernet, 64 GPUs, batch 1024; Table 2: 23K of 152K steps are warmup
    "bert-large": _BERT_LARGE | {"forward": "35.71", "backward": "60.81", "optimizer": "adam", "warmup": "0.1513"},
    # 1-bit LAMB (Li et al. 2021), Table 5: Ethernet, 256 GPUs, batch 64K in 16 micro-batches; section 6: 1000 of 5993
    # steps are warmup
    "bert-large-lamb": _BERT_LARGE
    | {"forward": "27.8", "backward": "57.4", "accumulation": "16", "optimizer": "lamb", "warmup": "0.1669"},
}
_V100 = {"memory": "900"}  # its data sheet
CLUSTERS: dict[str, dict[str, str]] = {
    # 1-bit Adam (Tang et al. 2021), section 3.1: 4 GPUs a node, 4.1 Gbit/s by iperf. Assumed: latency. Fitted to its
    # Table 1, one node: intra
    "ethernet-v100": _V100 | {"gpus_per_node": "4", "network": "4.1gbit", "latency": "50", "intra": "4.25"},
    # The same section: 8 GPUs a node. Assumed: latency. Fitted to Table 1, one node: intra; to 8 nodes, batch 1024:
    # network
    "infiniband-v100": _V100 | {"gpus_per_node": "8", "network": "30.9gbit", "latency": "5", "intra": "42.3"},
}


def number(text: str) -> float:
    """0.5, 340e6, 340M, 1.3b"""
    match = re.fullmatch(r"([\d_]*\.?\d+(?:e[+-]?\d+)?)([kmgbt]?)", text.strip().lower())
    value = float(match[1]) * PREFIXES[match[2]] if match else math.nan
    if value != 0 and not 1 / LARGEST <= value <= LARGEST:  # so for nan
        raise ValueError(f"{text!r} is not a number, 0 or from {1 / LARGEST:g} to {LARGEST:g}: write 0.5, 340e6, 1.3b")
    return value


def count(text: str) -> int:
    value = number(text)
    if value < 1 or value != int(value):
        raise ValueError(f"{text!r} is not a whole number above 0: write 64, 340e6 or 1.3b")
    return int(value)


def rate(text: str) -> float:
    """100gbit, 4.1Gbit/s, 800mbit"""
    match = re.fullmatch(r"([\d.]+)\s*([kmgt])bit(?:/s)?", text.strip().lower())
    value = number(match[1]) if match else 0.0
    if match is None or not value > 0:
        raise ValueError(f"{text!r} is no rate: write a number and a unit, as 100gbit, 4.1gbit or 800mbit")
    return value * PREFIXES[match[2]]


def one_of(*known: str | int) -> Callable[[str], str | int]:
    values = {str(each): each for each in known}

    def parsed(text: str) -> str | int:
        if text not in values:
            raise ValueError(f"{text!r} is none of {', '.join(values)}")
        return values[text]

    return parsed


def pass_rates(text: str) -> dict[str, float]:
    """B/s of every pass in a record of perf.kernels."""
    try:
        record = json.loads(Path(text).read_text(encoding="utf-8"))
        return {row["name"]: 1e9 * float(row["gb_per_s"]) for row in record["passes"]}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{text!r} is no record of perf.kernels ({error}): that command writes one") from error


@dataclass(frozen=True)
class Option:
    """An option of the command line, a key of a JSON file, and, times `scale`, a field of Model or Cluster."""

    read: Callable[[str], Any]
    help: str
    unit: str = ""
    scale: float | None = None

    def parse(self, text: str) -> Any:
        value = self.read(text)
        return value if self.scale is None else value * self.scale

    def show(self, value: Any) -> str:
        """A field's value as one would write it."""
        if isinstance(value, str):
            return value
        return f"{value / (self.scale or 1):.6g} {self.unit}".strip()


MODEL_OPTIONS = {
    "elements": Option(count, "parameters of the model, such as 340e6 or 1.3b"),
    "dtype": Option(one_of(*ITEMSIZES), f"of parameters and gradients: {', '.join(ITEMSIZES)} (default: float16)"),
    "forward": Option(number, "of one micro-batch on one GPU", "ms", 1e-3),
    "backward": Option(number, "the same, with no communication in it", "ms", 1e-3),
    "accumulation": Option(count, "micro-batches a step (default: 1)"),
    "optimizer": Option(one_of("adam", "lamb"), "adam or lamb (default: adam)"),
    "warmup": Option(number, "share of the steps that are stage 1 (default: 0.15)"),
    "steps": Option(count, "of a run (default: 10,000)"),
    "var_update_scaler": Option(count, "of 0/1 Adam: full-precision steps until their distance doubles (default: 4)"),
    "local_step_clipper": Option(count, "of 0/1 Adam: the most steps between two exchanges (default: 16)"),
    "overlap": Option(
        one_of("none", "uncompressed", "both"),
        "which all-reduces hide behind backward: none; uncompressed, as DDP does it (default); both",
    ),
    "reply": Option(
        one_of(*get_args(AskedReply)),
        "what comes back of messages: auto, direct or 1, as the option of the optimizers (default: auto)",
    ),
    "levels": Option(
        one_of(*get_args(Levels)),
        "of ranks in stage 2: 2, a node is one rank to the network, as with node_group='auto' (default); 1, with None",
    ),
    "local": Option(
        number, "of the optimizer's own work in any stage (default: from the bytes of its passes)", "ms", 1e-3
    ),
}
CLUSTER_OPTIONS = {
    "gpus": Option(count, "in all"),
    "gpus_per_node": Option(count, "that share a node's network (default: 8)"),
    "network": Option(rate, "what arrives of what a node sends, by iperf for one: 100gbit, 4.1gbit"),
    "latency": Option(number, "of a message between nodes that no other message hides", "us", 1e-6),
    "rtt": Option(number, "round trip between nodes, as ping tells it: messages wait for it side by side", "ms", 1e-3),
    "transport": Option(one_of(*get_args(Transport)), "nccl or gloo: how often a step waits for the round trip"),
    "intra": Option(number, "sent by a GPU within its node", "GB/s", 1e9),
    "intra_latency": Option(number, "of a message within a node", "us", 1e-6),
    "memory": Option(number, "of a GPU's memory", "GB/s", 1e9),
    "efficiency": Option(number, "share of it that a pass reaches"),
    "cores": Option(number, "of a CPU that a rank has to itself, at most 1"),
    "rates": Option(pass_rates, "a record of perf.kernels: its rates in the place of memory and efficiency"),
}
# What stands in the place of a GPU's with --transport gloo, and where it is from.
OF_CPUS = {
    "memory": (11.2e9, "a copy on one core of an Intel Xeon, measured (perf.kernels)"),
    "efficiency": (1.0, "of CPUs: passes reach 0.7 to 1.7 times a copy's rate"),
}
OPTIONS = {**MODEL_OPTIONS, **CLUSTER_OPTIONS}
CONSTANTS = {each.name: each for each in fields(Cluster) if "source" in each.metadata}


def help_of(name: str) -> str:
    option, text = OPTIONS[name], OPTIONS[name].help
    if option.scale is not None:
        text = f"{option.unit}, {text}"
    if name in CONSTANTS:
        text += f" (default: {option.show(CONSTANTS[name].default)}; {CONSTANTS[name].metadata['source']})"
    return text.replace("%", "%%")
