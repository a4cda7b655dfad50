"""`onebit plan`: what a step would take on a cluster that is not at hand, uncompressed and with 1 bit.

    onebit plan --model bert-large --cluster ethernet-v100 --gpus 64
    onebit plan --elements 7e9 --dtype bfloat16 --forward 150 --backward 300 --gpus 256 --network 100gbit

The command line goes before presets.
"""

from __future__ import annotations

import argparse
from dataclasses import fields
from pathlib import Path
from typing import Any

from onebit.cli.arguments import CommandError, check_picture, writing_picture
from onebit.cli.plan.cluster import Cluster
from onebit.cli.plan.model import Model
from onebit.cli.plan.options import CLUSTERS, GLOO_MEMORY, ITEMSIZES, MODELS, OPTIONS
from onebit.cli.plan.pictures import draw_map, table
from onebit.cli.plan.report import describe


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", choices=MODELS, help="a preset: the model of the papers, with times on their V100")
    parser.add_argument("--cluster", choices=CLUSTERS, help="a preset: a cluster of the papers")
    for name, (read, text) in OPTIONS.items():
        flag = f"--{name.replace('_', '-')}"
        parser.add_argument(flag, type=read, metavar=name.upper(), help=text.replace("%", "%%"))
    parser.add_argument("--map", type=Path, metavar="FILE", help="what is first over network rates and round trips")


def run(arguments: argparse.Namespace) -> None:
    model, cluster = planned(arguments)
    path: Path | None = arguments.map
    if path is not None:
        _check_map(path, cluster)
    print(describe(model, cluster))
    if path is not None:
        print(f"\n{table(model, cluster)}")
        with writing_picture("--map"):
            draw_map(model, cluster, path)
        print(f"\nMap: {path}")


def planned(arguments: argparse.Namespace) -> tuple[Model, Cluster]:
    """The options and the presets, merged."""
    values: dict[str, Any] = {"dtype": "float16", **MODELS.get(arguments.model, {})}
    values |= CLUSTERS.get(arguments.cluster, {})
    values |= {name: value for name in OPTIONS if (value := getattr(arguments, name)) is not None}
    if values.get("transport") == "gloo":
        values.setdefault("memory", GLOO_MEMORY)
    missing = [name for name in ("elements", "forward", "backward", "gpus", "network") if name not in values]
    if missing:
        preset = {"gpus": "", "network": " or a --cluster"}.get(missing[0], " or a --model")
        raise CommandError(f"--{missing[0]} is missing: give it{preset}")
    values["itemsize"] = ITEMSIZES[values["dtype"]]
    try:
        return _filled(Model, values), _filled(Cluster, values)
    except ValueError as error:
        raise CommandError(str(error)) from error


def _filled(kind: type[Any], values: dict[str, Any]) -> Any:
    return kind(**{each.name: values[each.name] for each in fields(kind) if each.name in values})


def _check_map(out: Path, cluster: Cluster) -> None:
    """Find out before the work whether there can be a map."""
    if cluster.nodes == 1:
        raise CommandError(
            "--map is of the network between nodes, and there is one node: give more --gpus, or fewer --gpus-per-node"
        )
    if not check_picture(out, "--map"):
        raise CommandError("--map needs matplotlib: pip install matplotlib")
