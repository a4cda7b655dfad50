"""`onebit plan`: what a step would take on a cluster that is not at hand, uncompressed and with 1 bit.

    onebit plan --model bert-large --cluster ethernet-v100 --gpus 64
    onebit plan --elements 7e9 --dtype bfloat16 --forward 150 --backward 300 --gpus 256 --network 100gbit

Every constant of the model (onebit.cli.plan.model) is an option. A preset or a JSON file (--constants) gives many at
once, under the options' names and in their units. The command line goes before the file, the file before presets.

    --map FILE    which method ends a run first, over network rates and round trips: a picture and a table
    --scale       the same model on 8 to 4,096 ranks, in a rack and between sites
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from onebit.cli.plan.map import TABLE, Map, draw, table
from onebit.cli.plan.model import Cluster, Model
from onebit.cli.plan.options import CLUSTERS, ITEMSIZES, MODEL_OPTIONS, MODELS, OF_CPUS, OPTIONS, help_of
from onebit.cli.plan.report import describe, plot, results
from onebit.cli.plan.scale import scale_as_json, scale_table
from onebit.report.plots import check_plot


class PlanError(Exception):
    """Something the user can put right."""

    code = 2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", choices=MODELS, help="a preset: a model of the papers, with times on their V100")
    parser.add_argument("--cluster", choices=CLUSTERS, help="a preset: a cluster of the papers")
    parser.add_argument("--constants", type=Path, metavar="FILE", help="a JSON object of any of the options below")
    for name, option in OPTIONS.items():
        flag = f"--{name.replace('_', '-')}"
        parser.add_argument(flag, type=_argument(option.parse), metavar=name.upper(), help=help_of(name))
    parser.add_argument("--plot", type=Path, metavar="FILE", help="step time and speed-up over GPUs and network rates")
    parser.add_argument("--map", type=Path, metavar="FILE", help="what is first over network rates and round trips")
    parser.add_argument("--scale", action="store_true", help="8 to 4,096 ranks, in a rack and between sites")
    parser.add_argument("--json", action="store_true", help="print JSON, in seconds and bytes, instead of the table")


def run(arguments: argparse.Namespace) -> None:
    model, cluster = planned(arguments)
    pictures = {"--plot": (arguments.plot, plot), "--map": (arguments.map, draw)}
    wanted = {option: (path, drawing) for option, (path, drawing) in pictures.items() if path}
    for option, (path, _) in wanted.items():
        _check_plot(path, option)
    mapped = None
    if arguments.map:
        if cluster.nodes == 1:
            raise PlanError(
                "--map is of the network between nodes, and there is one node: give more --gpus, or fewer "
                "--gpus-per-node"
            )
        mapped = Map.of(model, cluster, *TABLE)
    if arguments.json:
        found = results(model, cluster)
        found |= {"map": mapped.as_json()} if mapped else {}
        found |= {"scale": scale_as_json(model, cluster)} if arguments.scale else {}
        print(json.dumps(found, indent=1))
    else:
        parts = [describe(model, cluster)]
        parts += [table(mapped, model.steps)] if mapped else []
        parts += [scale_table(model, cluster)] if arguments.scale else []
        print("\n\n".join(parts))
    for option, (path, drawing) in wanted.items():
        try:
            drawing(model, cluster, path)
        except OSError as error:
            raise PlanError(f"the plot could not be written ({error}): choose another {option}") from error
    if wanted and not arguments.json:
        print()
        for option, (path, _) in wanted.items():
            print(f"{option[2:].title()}: {path}")


def planned(arguments: argparse.Namespace) -> tuple[Model, Cluster]:
    """The options, the file and the presets, merged."""
    values: dict[str, Any] = {"dtype": "float16", "levels": 2}
    for preset in (MODELS.get(arguments.model), CLUSTERS.get(arguments.cluster)):
        values |= _parsed(preset or {}, "preset")
    if arguments.constants:
        values |= _from_file(arguments.constants)
    values |= {name: value for name in OPTIONS if (value := getattr(arguments, name)) is not None}
    if values.get("transport") == "gloo":
        values = {name: value for name, (value, _) in OF_CPUS.items()} | values
    for name in ("elements", "forward", "backward", "gpus", "network"):
        if name not in values:
            other = " or a --model" if name in MODEL_OPTIONS else " or a --cluster" if name == "network" else ""
            raise PlanError(f"--{name} is missing: give it{other}")
    values["itemsize"] = ITEMSIZES[values["dtype"]]
    try:
        return (
            Model(**{each.name: values[each.name] for each in fields(Model) if each.name in values}),
            Cluster(**{each.name: values[each.name] for each in fields(Cluster) if each.name in values}),
        )
    except ValueError as error:
        raise PlanError(str(error)) from error


def _check_plot(out: Path, option: str) -> None:
    """Found out before the work."""
    try:
        drawable = check_plot(out)
    except ValueError as error:
        raise PlanError(f"{error}; choose another {option}") from error
    if not drawable:
        raise PlanError(f"{option} needs matplotlib: pip install matplotlib")


def _from_file(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise PlanError(f"--constants {path} can't be read ({error}): give a JSON object of options") from error
    if not isinstance(found, dict):
        raise PlanError(f'--constants {path} is no JSON object: write such as {{"network": "100gbit", "gpus": 64}}')
    return _parsed({name.replace("-", "_"): str(value) for name, value in found.items()}, f"--constants {path}")


def _parsed(texts: Mapping[str, str], where: str) -> dict[str, Any]:
    unknown = sorted(texts.keys() - OPTIONS.keys())
    if unknown:
        raise PlanError(f"{where}: there is no option {unknown[0]!r}. The options are {', '.join(OPTIONS)}")
    values = {}
    for name, text in texts.items():
        try:
            values[name] = OPTIONS[name].parse(text)
        except ValueError as error:
            raise PlanError(f"{where}: {name}: {error}") from error
    return values


def _argument(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    def parsed(text: str) -> Any:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return parsed
