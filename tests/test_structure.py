"""The shape of the house: layers point one way, kernels <- collectives <- onebit <- perf, tests; no module imports one
that imports it; nothing outside a class touches its underscored members; one module has one name.
"""

from __future__ import annotations

import ast
import functools
import inspect
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

import onebit
from onebit.collectives.store import tcp_store
from tests.limits import HUNG

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = {"onebit": "onebit", "kernels": "onebit.kernels", "collectives": "onebit.collectives", "perf": "perf"}
INTERNALS = Path("tests/internals.py")  # the one place where tests reach into classes
# What a layer may import of this repository, and what it may not import of others.
OWN = {"onebit", "kernels", "collectives", "perf", "tests"}
MAY = {
    "kernels": {"onebit.kernels"},
    "collectives": {"onebit.kernels", "onebit.collectives"},
    "onebit": {"onebit"},
    "perf": {"onebit", "perf"},
}
MAY_NOT = {"kernels": {"torch.distributed", "torch.optim"}}
LOOPS = {"transformers", "accelerate", "lightning", "pytorch_lightning", "torchft"}  # that a user may not have
# Underscored names that are no class's of ours: NamedTuple's methods, and what torch and numba have no other name for.
OF_OTHERS = {
    "_fields", "_make", "_replace", "_asdict", "_version", "_get_backend", "_cache", "_reduce", "_per_optimizer_states",
    "_join_config", "_comm_hooks", "_ddp", "_reset_state", "_get_default_store", "_schema",
}  # fmt: skip
# A docstring that begins with one of these says nothing without the name: "Of that group.", "And what they have".
FRAGMENT = re.compile(
    "(about|above|across|after|against|along|also|although|and|as|at|because|before|behind|below|beside|besides|between|"
    "but|by|despite|during|except|for|from|if|in|inside|into|like|neither|nor|not|of|off|on|once|onto|or|out|outside|"
    "over|past|per|since|so|than|then|though|through|till|to|under|unless|until|up|upon|via|when|where|whereas|whether|"
    "while|with|within|without|yet)(?=[\\s,:])",
    re.IGNORECASE,
)
LONGEST_SUBJECT, SUBJECTS_SINCE = 72, "94f4a1d"


@functools.cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def sources(*folders: str) -> dict[Path, ast.Module]:
    """Every file of the folders, relative to the root."""
    paths = [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]
    return {path.relative_to(ROOT): parsed(path) for path in paths}


def imports(tree: ast.Module) -> set[str]:
    """Names a source imports, in functions and under TYPE_CHECKING too (`from a import b` gives a.b)."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            prefix = "." * node.level + (node.module or "") + ("." if node.module else "")
            names |= {prefix + alias.name for alias in node.names}
    return names


def named_modules(tree: ast.Module) -> set[str]:
    """What a source reaches as an attribute of torch, and modules that it names in strings: one that is its dotted
    name, or what follows -m, in it or in a list."""
    names = set()
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=ast.Name(id="torch"), attr=attr):
                names.add(f"torch.{attr}")
            case ast.Constant(value=str(text)):
                names |= {text} if re.fullmatch(r"(onebit|perf|tests)(\.\w+)+", text) else set()
                names |= set(re.findall(r"(?:^|\s)-m\s*([a-z_][\w.]*)", text))
            case ast.List(elts=items) | ast.Tuple(elts=items):
                texts = [item.value if isinstance(item, ast.Constant) else None for item in items]
                names |= {b for a, b in pairwise(texts) if a == "-m" and isinstance(b, str)}
    return names


def violations(layer: str, tree: ast.Module) -> set[str]:
    """Imports that a file of `layer` must not have, and modules of higher layers that it starts."""

    def inside(name: str, packages: set[str]) -> bool:
        return any(name == package or name.startswith(package + ".") for package in packages)

    names = imports(tree) | named_modules(tree)
    upward = {name for name in names if inside(name, OWN) and not inside(name, MAY[layer])}
    return upward | {name for name in names if name.startswith(".") or inside(name, MAY_NOT.get(layer, set()))}


def test_layers_point_one_way() -> None:
    files = sources(*MAY)
    assert {path.parts[0] for path in files} == MAY.keys()
    assert not {str(path): wrong for path, tree in files.items() if (wrong := violations(path.parts[0], tree))}


def test_a_wrong_import_is_found_and_a_right_one_is_not() -> None:
    wrong = [
        ("kernels", "from onebit import layout"),
        ("kernels", "def f():\n    import onebit.collectives.transport.protocol"),
        ("kernels", "from torch import distributed"),
        ("kernels", "from torch.distributed import all_to_all_single"),
        ("kernels", "import torch\ntorch.distributed.barrier()"),
        ("kernels", "from . import wire"),
        ("kernels", "from collectives import transport"),
        ("kernels", "start(('-m', 'onebit', 'tune'))"),
        ("collectives", "from onebit import OneBitAdam"),
        ("collectives", "start('-mperf.lab')"),
        ("onebit", "import tests.ranks"),
        ("onebit", "import kernels"),
        ("onebit", "lab = ['perf.lab', '--hosts']"),
        ("onebit", "run([sys.executable, '-m', 'perf'])"),
        ("onebit", "run(f'{python} -m perf.lab --hosts {n}')"),
        ("perf", "module = 'tests.faults.training'"),
    ]
    right = [
        ("kernels", "import torch\nimport triton.language as tl\nfrom onebit.kernels.data.wire import Message"),
        ("kernels", "import kernels_of_others"),
        ("collectives", "import torch.distributed as dist\nfrom onebit.kernels import wire"),
        ("onebit", "from torch.optim import Optimizer\nstart(['onebit.cli.demo.train'])"),
        ("onebit", "'a record of perf.kernels: its rates. -maximum perf.'"),
        ("perf", "run(['-m', 'perf.lab', '-m', 'onebit.cli.demo.train'])"),
    ]
    assert [row for row in wrong if not violations(row[0], ast.parse(row[1]))] == []
    assert [row for row in right if violations(row[0], ast.parse(row[1]))] == []


def circle(graph: dict[str, set[str]]) -> list[str]:
    """Some modules that import each other in a circle, if there are any."""
    done: set[str] = set()

    def visit(name: str, path: list[str]) -> list[str]:
        if name in path:
            return [*path[path.index(name) :], name]
        found: list[str] = []
        for other in sorted(graph[name] - done):
            found = found or visit(other, [*path, name])
        done.add(name)
        return found

    return next((found for name in sorted(graph) if (found := visit(name, []))), [])


def test_no_module_imports_one_that_imports_it() -> None:
    def module_name(path: Path) -> str:
        folder, *rest = path.with_suffix("").parts
        return ".".join(part for part in (FOLDERS[folder], *rest) if part != "__init__")

    trees = {module_name(path): tree for path, tree in sources(*FOLDERS).items()}
    imported = {name: imports(tree) for name, tree in trees.items()}
    graph = {
        name: {each if each in trees else each.rpartition(".")[0] for each in names} & trees.keys() - {name}
        for name, names in imported.items()
    }
    assert len(graph) > 80 and sum(map(len, graph.values())) > 300
    assert not circle(graph), " -> ".join(circle(graph))
    assert circle({"a": {"b"}, "b": {"c"}, "c": {"a"}}) == ["a", "b", "c", "a"]
    assert circle({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == []


def touched(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and name of every underscored member that is reached from outside its class, and of every underscored name
    that is imported from a module of ours."""
    foreign = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = {(alias.asname or alias.name).split(".")[0] for alias in node.names}
            foreign |= names - {"onebit", "perf", "tests"}
        elif isinstance(node, ast.ImportFrom) and node.module:
            ours = node.module.split(".")[0] in ("onebit", "perf", "tests")
            if ours:
                yield from ((node.lineno, a.name) for a in node.names if is_private(a.name))
            else:
                foreign |= {alias.asname or alias.name for alias in node.names}
    yield from _touched_in(tree, foreign, set())


def _touched_in(node: ast.AST, foreign: set[str], own: set[str]) -> Iterator[tuple[int, str]]:
    if isinstance(node, ast.ClassDef):
        own = own | members(node)
    if isinstance(node, ast.Attribute) and is_private(node.attr) and node.attr not in OF_OTHERS | own:
        base: ast.expr = node.value
        while isinstance(base, (ast.Attribute, ast.Call)):
            base = base.value if isinstance(base, ast.Attribute) else base.func
        name = base.id if isinstance(base, ast.Name) else ""
        if not (isinstance(node.value, ast.Name) and name in ("self", "cls")) and name not in foreign:
            yield node.lineno, node.attr
    for child in ast.iter_child_nodes(node):
        yield from _touched_in(child, foreign, own)


def members(node: ast.ClassDef) -> set[str]:
    """What a class defines or assigns on itself."""
    found = set()
    for child in ast.walk(node):
        if isinstance(child, ast.Attribute) and isinstance(child.value, ast.Name) and child.value.id in ("self", "cls"):
            found.add(child.attr)
        elif isinstance(child, (ast.FunctionDef, ast.ClassDef)):
            found.add(child.name)
        elif isinstance(child, (ast.Assign, ast.AnnAssign)):
            targets = child.targets if isinstance(child, ast.Assign) else [child.target]
            found |= {target.id for target in targets if isinstance(target, ast.Name)}
    return found


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def test_one_file_names_streams_and_events() -> None:
    """What tests put a recorder in place of: tests/streams."""
    of_torch = re.compile(
        r"torch\.cuda\.(Stream|Event|stream|synchronize|is_current_stream_capturing)\b|current_stream\(|"
        r"record_stream|wait_stream|wait_event|pin_memory=True"
    )
    files = {path: (ROOT / path).read_text(encoding="utf-8") for path in sources("onebit", "kernels", "collectives")}
    assert [str(path) for path, text in files.items() if of_torch.search(text)] == ["kernels/streams.py"]


def test_two_files_log_and_warn() -> None:
    """They put the package's name into every text."""
    of_python = re.compile(r"getLogger|logging\.(debug|info|warning|error|exception|log)\(|warnings\.warn\(")
    files = {path: (ROOT / path).read_text(encoding="utf-8") for path in sources("onebit", "kernels", "collectives")}
    speaking = [str(path) for path, text in files.items() if of_python.search(text)]
    assert speaking == ["onebit/warning.py", "kernels/log.py"]


def test_one_file_makes_stores() -> None:
    """They are without libuv, which not every torch has."""
    files = {path: (ROOT / path).read_text(encoding="utf-8") for path in sources(*FOLDERS)}
    assert [str(path) for path, text in files.items() if "TCPStore" in text] == ["collectives/store.py"]
    assert not tcp_store("127.0.0.1", 0, is_master=True, wait_for_workers=False).libuvBackend


def test_nothing_outside_a_class_touches_its_underscored_members() -> None:
    files = sources(*FOLDERS, "tests", "examples")
    assert [f"{path}:{at} {name}" for path in files if path != INTERNALS for at, name in touched(files[path])] == []
    for source, expected in (
        ("f(x)._states", ["_states"]),
        ("from onebit.optim.lamb import _debiased", ["_debiased"]),
        ("import onebit\nfrom onebit import optim\nx = optim.adam._nonzero", ["_nonzero"]),
        ("class A:\n    def f(self):\n        return self._x, other._y", ["_y"]),
        ("class A:\n    def f(self, other):\n        self._x = other._x", []),
        ("import torch\ntorch._foreach_add_(a, b)\nhyper._replace(lr=1)\nx.__dict__", []),
    ):
        assert [name for _, name in touched(ast.parse(source))] == expected


def upward(folder: str, tree: ast.Module) -> list[str]:
    """Imports of folders of onebit/ that are above this one: optim <- parallel, checkpoint, report <- optimizers."""
    above = {"optim": ["parallel", "checkpoint", "report", "optimizers"]}.get(folder, ["optimizers"])
    return [n for n in imports(tree) if n.startswith(tuple(f"onebit.{each}." for each in above))]


def test_what_an_optimizer_is_made_of_knows_no_optimizer() -> None:
    """What users call with one has to know its class."""
    called = {"parallel": {"attach", "attached", "unwrap"}, "checkpoint": {"save_load"}}
    for folder in ("optim", "parallel", "checkpoint", "report"):
        files = sources(f"onebit/{folder}")
        assert files and {path.stem for path, tree in files.items() if upward(folder, tree)} == called.get(
            folder, set()
        )
    assert upward("optim", ast.parse("def f():\n    from onebit.checkpoint.restore import restored"))
    assert not upward("report", ast.parse("from onebit.optim.setup import Setup"))


def fragments(tree: ast.Module) -> list[str]:
    """Docstrings, of attributes too, that begin with a preposition or a conjunction."""
    constants = [n.value for n in ast.walk(tree) if isinstance(n, ast.Expr) and isinstance(n.value, ast.Constant)]
    return [each.value for each in constants if isinstance(each.value, str) and FRAGMENT.match(each.value)]


def test_docstrings_begin_with_a_subject_or_a_verb() -> None:
    files = sources(*FOLDERS, "tests", "examples")
    assert not {str(path): found for path, tree in files.items() if (found := fragments(tree))}
    assert fragments(ast.parse('"""A module."""\nclass A:\n    """Of that group."""')) == ["Of that group."]
    assert fragments(ast.parse('x = 1\n"""Also, and why."""')) == ["Also, and why."]


def undescribed(call: Any) -> set[str]:
    """Parameters that the Args of a docstring lack, and a result without Returns."""
    signature, text = inspect.signature(call), inspect.getdoc(call) or ""
    lists = re.findall(r"^    (\w+(?:, \w+)*): ", text.partition("Args:\n")[2], re.M)
    returns = not isinstance(call, type) and signature.return_annotation not in (None, "None")
    lacks = {"Returns"} if returns and "Returns:\n" not in text else set()
    return lacks | signature.parameters.keys() - {"self", *", ".join(lists).split(", ")}


def test_public_calls_have_args_and_returns() -> None:
    """The page of the API lists them. An algorithm's methods all get the same, which its class describes."""
    page = (ROOT / "docs/api.md").read_text(encoding="utf-8")
    calls = {}
    for name, members in re.findall(r":: (\w+)\n(?:   :members: (.+))?", page.partition("## Errors")[0]):
        public = getattr(onebit, name, None)
        if public is not None and name != "Algorithm":
            calls |= {name: public}
            calls |= {f"{name}.{each}": getattr(public, each) for each in members.split(", ") if members}
    properties = {name: call for name, call in calls.items() if isinstance(call, property)}
    assert len(properties) > 10 and all(call.__doc__ for call in properties.values())
    assert len(calls) > 50
    assert not {name: lacks for name in calls.keys() - properties.keys() if (lacks := undescribed(calls[name]))}


def test_commit_subjects_are_short() -> None:
    """Those of old commits may be longer: the last fifty are read if a shallow clone does not have the first one."""

    def git(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=HUNG)

    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("needs git's history")
    known = git("merge-base", "--is-ancestor", SUBJECTS_SINCE, "HEAD").returncode == 0
    log = git("log", "--no-merges", "--format=%s", f"{SUBJECTS_SINCE}..HEAD" if known else "-50")
    if log.returncode:
        pytest.skip(f"git does not read its history: {log.stderr}")
    assert [subject for subject in log.stdout.splitlines() if len(subject) > LONGEST_SUBJECT] == []


def test_an_import_brings_what_it_must_and_nothing_else() -> None:
    """Run where bare `kernels` and `collectives` could be imported, nobody imports them. Checkpoints of torch come when
    they are first needed, the package of somebody's training loop with the module for it alone."""
    code = (
        "import json, sys, onebit, onebit.kernels, onebit.collectives\n"
        "early = 'torch.distributed.checkpoint' in sys.modules\n"
        "import onebit.integrations.attaching\n"
        "names = onebit.save.__name__, onebit.load.__name__, hasattr(onebit, 'restore')\n"
        "print(json.dumps([sorted(sys.modules), early, *names]))"
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=HUNG)
    assert result.returncode == 0, result.stderr
    loaded, *names = json.loads(result.stdout)
    assert not ({"kernels", "collectives"} | LOOPS) & {name.split(".")[0] for name in loaded}
    assert names == [False, "save", "load", False]
    for path, tree in sources("onebit").items():
        found = {name.split(".")[0] for name in imports(tree)} & LOOPS
        assert found <= ({path.stem} if path.parent.name == "integrations" else set()), path


def test_two_optimizers_share_one_mechanism() -> None:
    """adam.py and lamb.py have no run of six lines in common: what both need is in one place."""
    adam, lamb = (
        [line.strip() for line in (ROOT / "onebit/optim" / name).read_text().splitlines() if line.strip()]
        for name in ("adam.py", "lamb.py")
    )
    assert not {tuple(adam[i : i + 6]) for i in range(len(adam) - 5)} & {
        tuple(lamb[i : i + 6]) for i in range(len(lamb) - 5)
    }


def test_the_demo_of_make_draws_into_an_ignored_folder() -> None:
    """A fresh clone stays clean."""
    if shutil.which("make") is None:
        pytest.skip("needs make")
    recipe = subprocess.run(["make", "-n", "demo"], cwd=ROOT, capture_output=True, text=True, timeout=HUNG).stdout
    (out,) = re.findall(r"onebit demo .*--out (\S+)", recipe)
    assert f"{Path(out).parts[0]}/" in (ROOT / ".gitignore").read_text(encoding="utf-8").split()
    assert f"mkdir -p {Path(out).parent}\n" in recipe
