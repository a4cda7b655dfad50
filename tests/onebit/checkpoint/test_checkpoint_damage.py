"""Checkpoints that are damaged, foreign or planted: the same error on every rank, and nothing has changed."""

from __future__ import annotations

import ast
import json
import pickle
import shutil
import zipfile
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import onebit
from onebit.checkpoint.files import INDEX, MANIFEST
from tests import checkpoints
from tests.checkpoints import Payload, Run, forge, forge_value, put_manifest, written_files
from tests.onebit.runs import Case, kinds, same
from tests.ranks import group, run_ranks

ROOT = Path(__file__).resolve().parents[3]
CASE = Case(steps=6, options={"freeze_step": 3})
FILES = ("checkpoint.json", ".metadata", "__0_0.distcp", "index.json")


def assert_refused(run: Run, folder: Path, match: str) -> None:
    before = run.all()
    with pytest.raises(ValueError, match=match):
        run.load(folder)
    assert same(run.all(), before)


def saved(folder: Path, case: Case = CASE, steps: int = 6) -> Path:
    Run(case, steps).save(folder)
    return folder


def path_of(folder: Path, name: str) -> Path:
    return next(path for path in written_files(folder) if path.name == name)


def flip(path: Path, place: float, bit: int) -> None:
    content = bytearray(path.read_bytes())
    content[int(place * (len(content) - 1))] ^= 1 << bit
    path.write_bytes(content)


DAMAGE: dict[str, Callable[[Path], Any]] = {
    "missing": lambda path: path.unlink(),
    "empty": lambda path: path.write_bytes(b""),
    "cut": lambda path: path.write_bytes(path.read_bytes()[:-1]),
    "cut in half": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "a byte more": lambda path: path.write_bytes(path.read_bytes() + b" x"),
    "zeros": lambda path: path.write_bytes(bytes(path.stat().st_size)),
    "a bit at the start": lambda path: flip(path, 0, 0),
    "a bit in the middle": lambda path: flip(path, 0.5, 3),
    "a bit near the end": lambda path: flip(path, 0.97, 6),
    "a folder": lambda path: (path.unlink(), path.mkdir()),
}


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("name", FILES)
def test_a_damaged_file_is_found(name: str, damage: str, tmp_path: Path) -> None:
    path = path_of(saved(tmp_path), name)
    DAMAGE[damage](path)
    error = OSError if (name, damage) == (MANIFEST, "a folder") else ValueError
    run = Run(CASE.but(seed=1), 5)
    before = run.all()
    with pytest.raises(error, match=name.replace(".", r"\.") if damage != "missing" else "missing|holds no checkpoint"):
        run.load(tmp_path)
    assert same(run.all(), before)


def test_these_are_all_files_there_are(tmp_path: Path) -> None:
    """So that the damage above reaches every one."""
    assert sorted(path.name for path in written_files(saved(tmp_path))) == sorted(FILES)


@kinds
@pytest.mark.parametrize("steps", [2, 6])
def test_any_flipped_bit_is_found(kind: str, steps: int, tmp_path: Path) -> None:
    """Bits drawn from every file: none may pass."""
    folder, case = tmp_path / "saved", CASE.but(kind=kind)
    saved(folder, case, steps)
    run, source = Run(case.but(seed=1), 5), np.random.default_rng(0)
    before = run.all()
    for path in written_files(folder):
        content = path.read_bytes()
        for _ in range(25):
            flip(path, source.random(), int(source.integers(8)))
            with pytest.raises(ValueError):
                run.load(folder)
            path.write_bytes(content)
    assert same(run.all(), before)
    run.load(folder)
    assert not same(run.all(), before)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"version": 0}, "version 0"),
        ({"version": 2}, "version 2"),
        ({"version": True}, "version True"),
        ({"version": "1"}, "version '1'"),
        ({"kind": "another"}, "not written by onebit"),
        ({"data": "../elsewhere"}, "damaged"),
        ({"data": "data-0000000000000000"}, "missing"),
        ({"files": {}}, "damaged"),
        ({"files": {"../../secret": [1, ""], "index.json": [1, ""]}}, "damaged"),
        ({"layout": {}}, "what model"),
        ({"layout": []}, "damaged"),
    ],
)
def test_another_manifest_is_refused(change: dict[str, Any], match: str, tmp_path: Path) -> None:
    """Also with a checksum that fits."""
    put_manifest(saved(tmp_path), {**checkpoints.manifest(tmp_path), **change})
    assert_refused(Run(CASE, 2), tmp_path, match)


def test_what_another_program_left_is_refused(tmp_path: Path) -> None:
    for content in (b"{}", b"[]", b"null", b"\xff\xfe", b"[" * 100_000, b'{"a": 1' + b"0" * 5000 + b"}"):
        (tmp_path / MANIFEST).write_bytes(content)
        assert_refused(Run(CASE, 2), tmp_path, "not written by onebit|not JSON")


@kinds
def test_another_models_checkpoint_is_refused(kind: str, tmp_path: Path) -> None:
    case = CASE.but(kind=kind)
    saved(tmp_path, case)
    for shapes, match in (
        (((7, 9), (33,), (2,), (131,)), r"held\.3 has shape \[130\] there and \[131\] here"),
        (((7, 9), (33,), (2,)), r"held\.3 is only there"),
        (((7, 9), (33,), (2,), (130,), (1,)), r"held\.4 is only here"),
    ):
        assert_refused(Run(case.but(shapes=shapes), 5), tmp_path, match)
    assert_refused(Run(case.but(groups=({}, {})), 5), tmp_path, "param groups")
    assert_refused(Run(case.but(kind="OneBitLamb" if kind == "OneBitAdam" else "OneBitAdam"), 5), tmp_path, kind)


# On several ranks


def refused_on(rank: int, size: int, folder: str, own: str | None) -> str:
    """This rank's error; rank 1 loads from the folder `own`, or has another model."""
    case = CASE.but(shapes=((7, 9), (34,))) if own == "model" and rank == 1 else CASE
    run = Run(case.but(seed=1), 0, rank, group())
    before = run.all()
    with pytest.raises(ValueError) as caught:
        run.load(own if own != "model" and own and rank == 1 else folder)
    assert same(run.all(), before)
    return str(caught.value)


def save_on(rank: int, size: int, folder: str, steps: int) -> None:
    Run(CASE, steps, rank, group()).save(folder)


@pytest.mark.parametrize("name", ["__0_0.distcp", "__2_0.distcp", "index.json"])
def test_damage_that_one_rank_finds_is_an_error_on_all(name: str, tmp_path: Path) -> None:
    run_ranks(3, save_on, str(tmp_path), 5)
    flip(path_of(tmp_path, name), 0.5, 1)
    texts = run_ranks(3, refused_on, str(tmp_path), None)
    assert len(set(texts)) == 1
    assert name in texts[0]
    assert "sha256" in texts[0]


@pytest.mark.parametrize("own", ["model", "another folder", "no folder"])
def test_a_wrong_folder_or_model_on_one_rank_is_an_error_on_all(own: str, tmp_path: Path) -> None:
    run_ranks(3, save_on, str(tmp_path / "one"), 5)
    run_ranks(3, save_on, str(tmp_path / "another folder"), 6)
    given = own if own == "model" else str(tmp_path / own)
    texts = run_ranks(3, refused_on, str(tmp_path / "one"), given)
    assert all("rank 1 of 3" in text or "ranks [1]" in text for text in texts)


# Nothing is unpickled


def entries(folder: Path) -> dict[str, Any]:
    return checkpoints.index(folder)


def torch_saved(value: Any, hidden: bytes | None = None) -> bytes:
    """A file as torch.save makes it, with `hidden` for its pickle."""
    file = BytesIO()
    torch.save(value, file)
    if hidden is None:
        return file.getvalue()
    there, made = zipfile.ZipFile(file), BytesIO()
    with zipfile.ZipFile(made, "w", zipfile.ZIP_STORED) as archive:
        for name in there.namelist():
            archive.writestr(name, hidden if name.endswith("data.pkl") else there.read(name))
    return made.getvalue()


PLANTS: dict[str, Callable[[Path, Path], None]] = {
    "manifest": lambda folder, mark: (folder / MANIFEST).write_bytes(Payload(mark).pickled()),
    "index": lambda folder, mark: forge(folder, INDEX, Payload(mark).pickled()),
    "a number": lambda folder, mark: forge_value(
        folder, "optimizer.param_groups.0.lr", torch_saved(1.0, Payload(mark).pickled())
    ),
    "a number, bare": lambda folder, mark: forge_value(folder, "optimizer.param_groups.0.lr", Payload(mark).pickled()),
    "a number, saved": lambda folder, mark: forge_value(
        folder, "optimizer.param_groups.0.lr", torch_saved(Payload(mark))
    ),
    "a tensor": lambda folder, mark: forge_value(folder, "model.held.0", torch_saved(Payload(mark))),
    "a tensor of state": lambda folder, mark: forge_value(
        folder, "optimizer.state.0.denominator", torch_saved(torch.zeros(7, 9), Payload(mark).pickled())
    ),
}


@pytest.mark.parametrize("plant", PLANTS)
def test_a_planted_pickle_does_not_run(plant: str, tmp_path: Path) -> None:
    mark = tmp_path / "it ran"
    folder = saved(tmp_path / "point")
    assert "optimizer.param_groups.0.lr" in entries(folder)
    PLANTS[plant](folder, mark)
    assert_refused(Run(CASE, 2), folder, r"damaged|reading a checkpoint failed")
    assert not mark.exists()


def test_a_planted_pickle_in_torchs_own_index_is_not_read(tmp_path: Path) -> None:
    """.metadata is for other programs: with a checksum that fits, a load succeeds without it."""
    mark, folder = tmp_path / "it ran", saved(tmp_path / "point")
    forge(folder, ".metadata", Payload(mark).pickled())
    run = Run(CASE, 2)
    run.load(folder)
    assert same(run.all(), Run(CASE, 6).all())
    assert not mark.exists()


def test_the_planted_pickle_runs_if_unpickled(tmp_path: Path) -> None:
    """Whoever unpickles it runs it: the tests above could fail."""
    mark = tmp_path / "it ran"
    pickle.loads(Payload(mark).pickled())
    assert mark.exists()
    mark.unlink()
    torch.load(BytesIO(torch_saved(1.0, Payload(mark).pickled())), weights_only=False)
    assert mark.exists()


def test_a_folder_of_torch_alone_is_not_unpickled(tmp_path: Path) -> None:
    mark = tmp_path / "it ran"
    (tmp_path / ".metadata").write_bytes(Payload(mark).pickled())
    assert_refused(Run(CASE, 2), tmp_path, "holds no optimizer.*pickle")
    assert not mark.exists()


def calls(source: str) -> list[ast.Call]:
    return [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]


def loads_without_weights_only(call: ast.Call) -> bool:
    given = {k.arg: ast.unparse(k.value) for k in call.keywords}
    return ast.unparse(call.func) == "torch.load" and given.get("weights_only") != "True"


def test_every_load_of_the_repository_says_weights_only() -> None:
    """But for the one above that shows what it is good for, and one of a whole model that a test has saved. No code
    but tests imports pickle, and the cache of machine code: who can write there can write what runs in any case, so
    only a folder of the user's own is read."""
    unsafe = []
    for layer in ("onebit", "kernels", "collectives", "perf", "examples", "tests"):
        for path in (ROOT / layer).rglob("*.py"):
            source = path.read_text(encoding="utf-8")
            unsafe += [path.name for call in calls(source) if loads_without_weights_only(call)]
            if layer != "tests" and path != ROOT / "kernels/cpu/compile.py":
                assert not {"import pickle", "from pickle"} & {line[:13].strip() for line in source.splitlines()}, path
    assert sorted(unsafe) == sorted([Path(__file__).name, "test_wrappers.py"])
    assert loads_without_weights_only(calls("torch.load(x)")[0])


# What can't be loaded is not saved


class Unknown:
    pass


def test_what_could_not_be_loaded_is_not_saved(tmp_path: Path) -> None:
    run = Run(CASE, 5)
    run.save(tmp_path)
    before = checkpoints.manifest(tmp_path)
    run.optimizer.param_groups[0]["note"] = Unknown()
    with pytest.raises(ValueError, match=r"Unknown.*could be saved and not be loaded"):
        run.save(tmp_path)
    assert checkpoints.manifest(tmp_path) == before


def test_numbers_of_numpy_are_saved_as_numbers(tmp_path: Path) -> None:
    run = Run(CASE, 5)
    run.optimizer.param_groups[0]["lr"] = np.float64(0.25)
    run.save(tmp_path)
    other = Run(CASE, 2)
    other.load(tmp_path)
    assert type(other.optimizer.param_groups[0]["lr"]) is float
    assert other.optimizer.param_groups[0]["lr"] == 0.25


def test_a_checkpoint_may_be_moved(tmp_path: Path) -> None:
    saved(tmp_path / "here")
    shutil.move(tmp_path / "here", tmp_path / "there")
    run = Run(CASE, 2)
    onebit.load(tmp_path / "there", run.model, run.optimizer)
    assert same(run.all(), Run(CASE, 6).all())


def test_a_false_index_is_refused(tmp_path: Path) -> None:
    """With checksums that fit: no room is made that the files could not fill, no file is read beyond its end."""
    folder = saved(tmp_path)
    whole = entries(folder)
    key = "optimizer.state.0.denominator"
    piece = whole[key]["pieces"][0]
    for name, change in {
        "a size that no file holds": {"size": [2**40, 9]},
        "another size": {"size": [7, 8]},
        "no size": {"size": None},
        "an unknown dtype": {"dtype": "float31"},
        "another dtype": {"dtype": "uint8"},
        "no path": {"path": []},
        "a path of lists": {"path": ["optimizer", [1]]},
        "no pieces": {"pieces": []},
        "a piece twice": {"pieces": [piece, piece]},
        "a piece beyond the file": {"pieces": [[*piece[:3], 2**40, piece[4]]]},
        "a piece of another file": {"pieces": [[*piece[:2], "/etc/passwd", 0, 10]]},
        "a piece before the file": {"pieces": [[*piece[:3], -1, piece[4]]]},
        "another piece's place": {"pieces": [[*piece[:3], piece[3] + 1, piece[4]]]},
    }.items():
        forge(folder, INDEX, json.dumps({**whole, key: {**whole[key], **change}}).encode())
        run = Run(CASE, 2)
        before = run.all()
        with pytest.raises((ValueError, TypeError)):
            run.load(folder)
            pytest.fail(name)
        assert same(run.all(), before)
    forge(folder, INDEX, json.dumps({k: v for k, v in whole.items() if k != key}).encode())
    assert_refused(Run(CASE, 2), folder, "denominator")
