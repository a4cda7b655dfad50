"""Layers point one way: kernels <- collectives <- onebit <- perf, tests. One module, one name."""

import ast
import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# What a layer may import of this repository, and what it may not import of others.
OWN = {"onebit", "kernels", "collectives", "perf", "tests"}
MAY = {
    "kernels": {"onebit.kernels"},
    "collectives": {"onebit.kernels", "onebit.collectives"},
    "onebit": {"onebit"},
    "perf": {"onebit", "perf"},
}
MAY_NOT = {"kernels": {"torch.distributed", "torch.optim"}}


def inside(name: str, packages: set[str]) -> bool:
    return any(name == package or name.startswith(package + ".") for package in packages)


def imports(source: str) -> set[str]:
    """Names a source imports (`from a import b` gives a.b), and what it reaches as an attribute of torch."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Import():
                names |= {alias.name for alias in node.names}
            case ast.ImportFrom():
                prefix = "." * node.level + (node.module or "") + ("." if node.module else "")
                names |= {prefix + alias.name for alias in node.names}
            case ast.Attribute(value=ast.Name(id="torch"), attr=attr):
                names.add(f"torch.{attr}")
    return names


def named_modules(source: str) -> set[str]:
    """Modules that a source names in strings: one that is its dotted name, or what follows -m, in it or in a list."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Constant(value=str(text)):
                names |= {text} if re.fullmatch(r"(onebit|perf|tests)(\.\w+)+", text) else set()
                names |= set(re.findall(r"(?:^|\s)-m\s*([a-z_][\w.]*)", text))
            case ast.List(elts=items) | ast.Tuple(elts=items):
                texts = [item.value if isinstance(item, ast.Constant) else None for item in items]
                names |= {b for a, b in pairwise(texts) if a == "-m" and isinstance(b, str)}
    return names


def violations(layer: str, source: str) -> set[str]:
    """Imports that `source`, a file of `layer`, must not have, and modules of higher layers that it starts."""
    names = imports(source) | named_modules(source)
    upward = {name for name in names if inside(name, OWN) and not inside(name, MAY[layer])}
    foreign = {name for name in names if inside(name, MAY_NOT.get(layer, set()))}
    relative = {name for name in names if name.startswith(".")}
    return upward | foreign | relative


FILES = [
    pytest.param(layer, path, id=str(path.relative_to(ROOT)))
    for layer in MAY
    for path in sorted((ROOT / layer).rglob("*.py"))
]


def test_every_layer_is_there():
    assert {"kernels", "collectives", "onebit"} <= {param.values[0] for param in FILES}


@pytest.mark.parametrize("layer, path", FILES)
def test_layers_point_one_way(layer, path):
    found = violations(layer, path.read_text(encoding="utf-8"))
    assert not found


@pytest.mark.parametrize(
    "layer, source",
    [
        ("kernels", "import onebit"),
        ("kernels", "from onebit import layout"),
        ("kernels", "import onebit.collectives.transport.protocol"),
        ("kernels", "def f():\n    from onebit.layout import Layout"),
        ("kernels", "import torch.distributed as dist"),
        ("kernels", "from torch import distributed"),
        ("kernels", "from torch.distributed import all_to_all_single"),
        ("kernels", "import torch\ntorch.distributed.barrier()"),
        ("kernels", "from torch.optim import Optimizer"),
        ("kernels", "from . import wire"),
        ("kernels", "from .wire import Message"),
        ("kernels", "import kernels.wire"),
        ("kernels", "from collectives import transport"),
        ("collectives", "from onebit.layout import Layout"),
        ("collectives", "from onebit import OneBitAdam"),
        ("collectives", "from kernels import wire"),
        ("onebit", "from perf import network_lab"),
        ("onebit", "import tests.ranks"),
        ("onebit", "import kernels"),
        ("perf", "from collectives import all_reduce"),
        ("onebit", "lab = ['perf.lab', '--hosts']"),
        ("onebit", "run([sys.executable, '-m', 'perf'])"),
        ("onebit", "run(f'{python} -m perf.lab --hosts {n}')"),
        ("onebit", "importlib.import_module('tests.ranks')"),
        ("collectives", "start('-mperf.lab')"),
        ("collectives", "start('onebit.cli.main')"),
        ("kernels", "start(('-m', 'onebit', 'tune'))"),
        ("perf", "module = 'tests.faults.training'"),
    ],
)
def test_a_wrong_import_is_found(layer, source):
    assert violations(layer, source)


@pytest.mark.parametrize(
    "layer, source",
    [
        ("kernels", "import torch\nimport triton.language as tl\nfrom onebit.kernels.data.wire import Message"),
        ("kernels", "from onebit import kernels"),
        ("kernels", "import kernels_of_others"),
        ("collectives", "import torch.distributed as dist\nfrom onebit.kernels import wire"),
        ("onebit", "from torch.optim import Optimizer\nfrom onebit.collectives import all_reduce"),
        ("perf", "from onebit.kernels import compress\nfrom perf import plots"),
        ("perf", "run(['-m', 'perf.lab', '-m', 'onebit.cli.demo.train'])"),
        ("onebit", "start(['onebit.cli.demo.train'])"),
        ("onebit", "'a record of perf.kernels: its rates'"),
        ("onebit", "'Tests. -maximum perf.'"),
    ],
)
def test_a_right_import_is_not(layer, source):
    assert not violations(layer, source)


def test_one_module_one_name():
    """Run where bare `kernels` and `collectives` could be imported, nobody imports them."""
    code = (
        "import sys, onebit, onebit.kernels, onebit.collectives\n"
        "print(*sorted({'kernels', 'collectives'} & sys.modules.keys()))"
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == ""


def test_import_leaves_checkpoints_for_later():
    code = (
        "import sys, onebit; late = 'torch.distributed.checkpoint' not in sys.modules; "
        "print(late, onebit.save.__name__, onebit.load.__name__, hasattr(onebit, 'restore'))"
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == ["True", "save", "load", "False"]


def test_import_leaves_other_peoples_loops_alone():
    """Neither onebit nor any module of it, but the one for it, imports the package of somebody's training loop."""
    others = {"transformers", "accelerate", "lightning", "pytorch_lightning"}
    code = (
        "import sys, onebit, onebit.integrations, onebit.integrations.whole_state\n"
        f"print(*{others!r} & {{name.split('.')[0] for name in sys.modules}})"
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == ""
    for path in sorted((ROOT / "onebit").rglob("*.py")):
        found = {name.split(".")[0] for name in imports(path.read_text(encoding="utf-8"))} & others
        assert found <= ({path.stem} if path.parent.name == "integrations" else set()), path


def test_two_optimizers_share_one_mechanism():
    """adam.py and lamb.py have no run of six lines in common: what both need is in one place."""
    adam, lamb = (
        [
            line.strip()
            for line in (ROOT / "onebit" / "optim" / name).read_text(encoding="utf-8").splitlines()
            if line.strip()
        ]
        for name in ("adam.py", "lamb.py")
    )
    runs = {tuple(adam[i : i + 6]) for i in range(len(adam) - 5)}
    assert not [run for i in range(len(lamb) - 5) if (run := tuple(lamb[i : i + 6])) in runs]
