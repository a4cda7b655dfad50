"""The options of `onebit plan`: how they are read, and the papers' model and clusters as presets."""

from __future__ import annotations

import json
from argparse import ArgumentTypeError
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

from onebit.cli.arguments import bit_rate, number_of, whole_number_from
from onebit.cli.plan.cluster import Levels, Transport
from onebit.cli.plan.model import Overlap
from onebit.collectives.reply import AskedReply

LARGEST = 1e15  # beyond any cluster; what is computed of such numbers is finite
count, steps = whole_number_from(1, int(LARGEST)), whole_number_from(1, 10**7)
ITEMSIZES = {"float32": 4, "float16": 2, "bfloat16": 2}
GLOO_MEMORY = 11.2e9  # B/s: a copy on one core of an Intel Xeon, measured (perf.kernels); passes reach 0.7 to 1.7 of it

MODELS: dict[str, dict[str, Any]] = {
    # 1-bit Adam (Tang et al. 2021), Table 1: Ethernet, 64 GPUs, batch 1024; Table 2: 23K of 152K steps are warmup
    "bert-large": {
        "elements": 340_000_000,
        "forward": 35.71e-3,
        "backward": 60.81e-3,
        "warmup": 0.1513,
        "overlap": "none",
    },
}
_V100 = {"memory": 810e9}  # 90 % of its data sheet's
CLUSTERS: dict[str, dict[str, Any]] = {
    # 1-bit Adam (Tang et al. 2021), section 3.1: 4 GPUs a node, 4.1 Gbit/s by iperf. Assumed: latency. Fitted to its
    # Table 1, one node: intra
    "ethernet-v100": {**_V100, "gpus_per_node": 4, "network": 4.1e9, "latency": 50e-6, "intra": 4.25e9},
    # The same section: 8 GPUs a node. Assumed: latency. Fitted to Table 1, one node: intra; to 8 nodes, batch 1024:
    # network
    "infiniband-v100": {**_V100, "gpus_per_node": 8, "network": 30.9e9, "latency": 5e-6, "intra": 42.3e9},
}


def number(text: str) -> float:
    """0.5, 340e6, 340M, 1.3b"""
    value = number_of(text)
    if value != 0 and not 1 / LARGEST <= value <= LARGEST:  # so for nan
        raise ArgumentTypeError(
            f"{text!r} is not a number, 0 or from {1 / LARGEST:g} to {LARGEST:g}: write 0.5, 340e6, 1.3b"
        )
    return value


def share(text: str) -> float:
    value = number(text)
    if value > 1:
        raise ArgumentTypeError(f"{text!r} is no share: give a number from 0 to 1")
    return value


def gigabytes(text: str) -> float:
    if not (value := number(text)):
        raise ArgumentTypeError(f"{text!r} is no rate of memory or links: give GB/s, above 0")
    return 1e9 * value


def one_of(*known: str | int) -> Callable[[str], str | int]:
    values = {str(each): each for each in known}

    def parsed(text: str) -> str | int:
        if text not in values:
            raise ArgumentTypeError(f"{text!r} is none of {', '.join(values)}")
        return values[text]

    return parsed


def pass_rates(text: str) -> dict[str, float]:
    """B/s of every pass in a record of perf.kernels."""
    try:
        record = json.loads(Path(text).read_text(encoding="utf-8"))
        return {row["name"]: 1e9 * float(row["gb_per_s"]) for row in record["passes"]}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ArgumentTypeError(f"{text!r} is no record of perf.kernels ({error}): that command writes one") from error


# By the name of a field of Model or Cluster: how it is read, and what it is.
OPTIONS: dict[str, tuple[Callable[[str], Any], str]] = {
    "elements": (count, "parameters of the model, such as 340e6 or 1.3b"),
    "dtype": (one_of(*ITEMSIZES), f"of parameters and gradients: {', '.join(ITEMSIZES)} (default: float16)"),
    "forward": (lambda text: 1e-3 * number(text), "ms, of one micro-batch on one GPU"),
    "backward": (lambda text: 1e-3 * number(text), "ms, the same, with no communication in it"),
    "accumulation": (count, "micro-batches a step (default: 1)"),
    "optimizer": (one_of("adam", "lamb"), "adam or lamb (default: adam)"),
    "warmup": (share, "share of the steps that are stage 1 (default: 0.15)"),
    "steps": (steps, "of a run (default: 10,000)"),
    "var_update_scaler": (steps, "of 0/1 Adam: full-precision steps until their distance doubles (default: 4)"),
    "local_step_clipper": (steps, "of 0/1 Adam: the most steps between two exchanges (default: 16)"),
    "overlap": (
        one_of(*get_args(Overlap)),
        "all-reduces behind backward: none, uncompressed, as DDP's (default), both",
    ),
    "reply": (one_of(*get_args(AskedReply)), "what comes back of messages: auto (default), direct or 1"),
    "levels": (one_of(*get_args(Levels)), "of ranks in stage 2: 2, as node_group='auto' (default), or 1, as with None"),
    "gpus": (count, "in all"),
    "gpus_per_node": (count, "that share a node's network (default: 8)"),
    "network": (bit_rate, "what arrives of what a node sends, by iperf for one: 100gbit, 4.1gbit"),
    "rtt": (lambda text: 1e-3 * number(text), "ms, round trip between nodes, by ping (default: 0)"),
    "latency": (lambda text: 1e-6 * number(text), "us, of a message that no other hides (default: 20, assumed)"),
    "transport": (one_of(*get_args(Transport)), "nccl (default) or gloo: how often a step waits for the round trip"),
    "intra": (gigabytes, "GB/s, sent by a GPU within its node (default: 360, 80 % of an H100's NVLink)"),
    "memory": (gigabytes, "GB/s that passes reach (default: 3015, 90 % of an H100's; 11.2, a CPU core's, over gloo)"),
    "rates": (pass_rates, "a record of perf.kernels: its rates in the place of memory"),
}
