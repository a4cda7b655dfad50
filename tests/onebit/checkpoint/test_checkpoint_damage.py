"""Checkpoints that are damaged, foreign or planted: the same error on every rank, and nothing has changed."""

import ast
import functools
import json
import pickle
import shutil
import zipfile
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
import torch

from onebit.checkpoint.files import INDEX, MANIFEST
from onebit.optim.flat_state import FlatState
from tests import checkpoints
from tests.checkpoints import Payload, Run, forge, forge_value, put_manifest, written_files
from tests.onebit.runs import Case, on_ranks, same
from tests.ranks import group

ROOT = Path(__file__).resolve().parents[3]
CASE = Case(steps=6, options={"freeze_step": 3})
FILES = ("checkpoint.json", ".metadata", "__0_0.distcp", "index.json")


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    folder = tmp_path_factory.mktemp("written")
    Run(CASE, 6).save(folder)
    return folder


@pytest.fixture
def saved(written, tmp_path):
    """A copy of its own, to be damaged."""
    shutil.copytree(written, tmp_path / "saved")
    return tmp_path / "saved"


@functools.cache
def loader():
    """What has refused a checkpoint is as it was, and takes the next."""
    return Run(CASE.but(seed=1), 5)


def assert_refused(folder, match, errors=ValueError, run=None):
    run = run or loader()
    before = run.all()
    with pytest.raises(errors, match=match):
        run.load(folder)
    assert same(run.all(), before)


def assert_loads(folder):
    run = Run(CASE, 2)
    run.load(folder)
    assert same(run.all(), Run(CASE, 6).all())


def path_of(folder, name):
    return next(path for path in written_files(folder) if path.name == name)


def flip(path, place, bit):
    content = bytearray(path.read_bytes())
    content[int(place * (len(content) - 1))] ^= 1 << bit
    path.write_bytes(content)


DAMAGE = {
    "missing": lambda path: path.unlink(),
    "empty": lambda path: path.write_bytes(b""),
    "cut": lambda path: path.write_bytes(path.read_bytes()[:-1]),
    "a byte more": lambda path: path.write_bytes(path.read_bytes() + b" x"),
    "zeros": lambda path: path.write_bytes(bytes(path.stat().st_size)),
    "a bit": lambda path: flip(path, 0.5, 3),
    "a folder": lambda path: (path.unlink(), path.mkdir()),
}


@pytest.mark.parametrize("name", FILES)
def test_a_damaged_file_is_found(name, saved):
    """Bits all over a file: `python -m tests.fuzz`."""
    assert sorted(path.name for path in written_files(saved)) == sorted(FILES)
    path = path_of(saved, name)
    content = path.read_bytes()
    for damage, do in DAMAGE.items():
        do(path)
        match = name.replace(".", r"\.")
        if damage == "missing":
            match = "holds no checkpoint" if name == MANIFEST else "missing"
        if damage in ("empty", "cut", "a byte more") and name != MANIFEST:
            match += " holds [0-9]+ bytes, [0-9]+ were written"
        assert_refused(saved, match)
        if path.is_dir():
            path.rmdir()
        path.write_bytes(content)
    assert_loads(saved)


def test_the_folder_of_a_runs_checkpoints_is_none_itself(saved):
    assert_refused(saved.parent, f"its folders do: give one, such as {saved}")


def test_another_manifest_is_refused(saved):
    """It is refused even if its checksum fits."""
    whole = checkpoints.manifest(saved)
    for change, match in (
        ({"version": 0}, "version 0"),
        ({"version": 2}, "version 2 of the format, this onebit reads 1: load it with the onebit that saved it"),
        ({"version": True}, "version True"),
        ({"kind": "another"}, "not written by onebit"),
        ({"data": "../elsewhere"}, "damaged"),
        ({"data": "data-0000000000000000"}, "missing"),
        ({"files": {}}, "damaged"),
        ({"files": {"../../secret": [1, ""], "index.json": [1, ""]}}, "damaged"),
        ({"layout": {}}, "what model"),
        ({"layout": []}, "damaged"),
    ):
        put_manifest(saved, {**whole, **change})
        assert_refused(saved, match)


def test_what_another_program_left_is_refused(tmp_path):
    assert_refused(tmp_path / "nowhere", f"there is no folder {tmp_path}/nowhere")
    for content in (b"{}", b"[]", b"null", b"\xff\xfe", b"[" * 100_000, b'{"a": 1' + b"0" * 5000 + b"}"):
        (tmp_path / MANIFEST).write_bytes(content)
        assert_refused(tmp_path, "not written by onebit|not JSON")


def test_another_models_checkpoint_is_refused(written):
    for change, match in (
        ({"shapes": ((7, 9), (33,), (2,), (131,))}, r"held\.3 has shape \[130\] there and \[131\] here"),
        ({"shapes": ((7, 9), (33,), (2,))}, r"held\.3 is only there"),
        ({"shapes": ((7, 9), (33,), (2,), (130,), (1,))}, r"held\.4 is only here"),
        ({"shapes": ((7, 9), (33,), (2,), (130,), *((1,),) * 6)}, r"held\.8 is only here; and 1 more\."),
        ({"groups": ({}, {})}, "param groups"),
        ({"kind": "OneBitLamb"}, "OneBitAdam"),
        ({"kind": "ZeroOneAdam"}, "OneBitAdam"),
    ):
        assert_refused(written, match, run=Run(CASE.but(**change), 5))
    run = Run(CASE, 0)
    run.optimizer = CASE.build(run.params[::-1])
    assert_refused(written, "parameters in another order", run=run)


# On several ranks


def no_memory(*args):
    raise MemoryError("no memory")


@on_ranks(3)
def test_what_one_rank_finds_is_an_error_on_all(rank, tmp_path):
    """Damage in the file that it reads; then rank 1 has another model, another folder, or none; or no memory."""
    one, other, names = tmp_path / "5", tmp_path / "6", ("__0_0.distcp", "__2_0.distcp", "index.json")
    for saved, steps in ((one, 5), (other, 6)):
        Run(CASE, steps, rank, group()).save(saved)
    if rank == 0:
        for name in names:
            shutil.copytree(one, tmp_path / name)
            flip(path_of(tmp_path / name, name), 0.5, 1)
    torch.distributed.barrier(group())
    texts, alone = [], r"rank 1: |ranks \[1\]"
    for case, folder, match in (
        *((CASE, tmp_path / name, f"{name}.*sha256") for name in names),
        (CASE.but(shapes=((7, 9), (34,))) if rank == 1 else CASE, one, alone),
        (CASE, other if rank == 1 else one, alone),
        (CASE, tmp_path / "none" if rank == 1 else one, alone),
    ):
        run = Run(case.but(seed=1), 0, rank, group())
        before = run.all()
        with pytest.raises(ValueError, match=match) as caught:
            run.load(folder)
        assert same(run.all(), before)
        texts.append(str(caught.value))
    run = Run(CASE, 0, rank, group())
    with pytest.MonkeyPatch.context() as patch, pytest.raises(RuntimeError, match="rank 1: no memory"):
        if rank == 1:
            patch.setattr(run.model, "state_dict", no_memory)
        run.load(one)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(RuntimeError, match="rank 1: no memory"):
        if rank == 1:
            patch.setattr(FlatState, "add", no_memory)  # when all ranks have found that it fits
        run.load(one)
    run.load(one)
    run.on(6, 6)
    assert run.optimizer.steps == 6
    return texts[: len(names)]


# Nothing is unpickled


def torch_saved(value, hidden=None):
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


LR, ZEROS = "optimizer.param_groups.0.lr", torch.zeros(7, 9)
PLANTS = (  # where, and what of the payload
    (INDEX, Payload.pickled),
    (LR, lambda mark: torch_saved(1.0, mark.pickled())),
    (LR, Payload.pickled),
    (LR, torch_saved),
    ("model.held.0", torch_saved),
    ("optimizer.state.0.exp_avg_sq", lambda mark: torch_saved(ZEROS, mark.pickled())),
)


def test_a_planted_pickle_does_not_run(saved, tmp_path):
    """.metadata is for other programs: with a checksum that fits, a load succeeds without it."""
    mark, whole = tmp_path / "it ran", tmp_path / "whole"
    shutil.copytree(saved, whole)
    for where, made in PLANTS:
        plant = forge if where == INDEX else forge_value
        plant(saved, where, made(Payload(mark)))
        assert_refused(saved, r"damaged|reading a checkpoint failed")
        shutil.rmtree(saved)
        shutil.copytree(whole, saved)
    forge(saved, ".metadata", Payload(mark).pickled())
    assert_loads(saved)
    (saved / MANIFEST).write_bytes(Payload(mark).pickled())
    assert_refused(saved, "damaged")
    (saved / MANIFEST).unlink()
    (saved / ".metadata").write_bytes(Payload(mark).pickled())
    assert_refused(saved, "holds no optimizer.*pickle")
    assert not mark.exists()
    for unpickle in (  # whoever unpickles it runs it: the above could fail
        lambda: pickle.loads(Payload(mark).pickled()),
        lambda: torch.load(BytesIO(torch_saved(1.0, Payload(mark).pickled())), weights_only=False),
    ):
        unpickle()
        assert mark.exists()
        mark.unlink()


def unsafe_loads(source):
    nodes = ast.walk(ast.parse(source)) if "torch.load" in source else ()
    calls = [node for node in nodes if isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.load"]
    return sum("weights_only=True" not in map(ast.unparse, call.keywords) for call in calls)


def test_every_load_of_the_repository_says_weights_only():
    """Two do not: the one above, and one of a whole model that a test has saved. No code but tests imports pickle, and
    the cache of machine code: who can write there can write what runs in any case."""
    unsafe = []
    for layer in ("onebit", "kernels", "collectives", "perf", "examples", "tests"):
        for path in (ROOT / layer).rglob("*.py"):
            source = path.read_text(encoding="utf-8")
            unsafe += [path.name] * unsafe_loads(source)
            if layer != "tests" and path != ROOT / "kernels/cpu/compile.py":
                assert not {"import pickle", "from pickle"} & {line[:13].strip() for line in source.splitlines()}, path
    assert sorted(unsafe) == sorted([Path(__file__).name, "test_attach.py"])
    assert unsafe_loads("torch.load(x)")


# What can't be loaded is not saved


def test_what_could_not_be_loaded_is_not_saved_and_numbers_of_numpy_are_numbers(tmp_path):
    run, other = Run(CASE, 5), Run(CASE, 2)
    run.optimizer.param_groups[0]["lr"] = np.float64(0.25)
    run.save(tmp_path)
    before = checkpoints.manifest(tmp_path)
    run.optimizer.param_groups[0]["note"] = Path()
    with pytest.raises(ValueError, match=r"Path.*could be saved and not be loaded"):
        run.save(tmp_path)
    assert checkpoints.manifest(tmp_path) == before
    other.load(tmp_path)
    lr = other.optimizer.param_groups[0]["lr"]
    assert type(lr) is float and lr == 0.25


def test_a_false_index_is_refused(saved):
    """Its checksums fit: no room is made that the files could not fill, no file is read beyond its end."""
    whole = checkpoints.index(saved)
    key = "optimizer.state.0.exp_avg_sq"
    piece = whole[key]["pieces"][0]
    for change, match in (
        ({"size": [2**40, 9]}, "not the whole of it"),  # which no file holds
        ({"size": [7, 8]}, "does not fit"),
        ({"size": None}, "no dtype or no size"),
        ({"dtype": "float31"}, "no dtype or no size"),
        ({"dtype": "uint8"}, "dtype torch.uint8"),
        ({"path": []}, "has no path"),
        ({"path": ["optimizer", [1]]}, "other things than names and numbers"),
        ({"pieces": []}, "lies nowhere"),
        ({"pieces": [piece, piece]}, "not the whole of it"),
        ({"pieces": [[*piece[:3], 2**40, piece[4]]]}, "lies beyond the end"),
        ({"pieces": [[*piece[:2], "/etc/passwd", 0, 10]]}, "lies in no file"),
        ({"pieces": [[*piece[:3], -1, piece[4]]]}, "lies in no file"),
        ({"pieces": [[*piece[:4], True]]}, "lies nowhere"),
        *(({"pieces": [[[odd, 0], *piece[1:]]]}, "does not fit") for odd in (-1, True, 0.0, "0")),
        ({"pieces": [[[2**62, 0], [7, 9], *piece[2:]]], "size": [2**62 + 7, 9]}, "does not fit"),
        ({"pieces": [[*piece[:3], piece[3] + 1, piece[4]]]}, "."),  # another's place
    ):
        forge(saved, INDEX, json.dumps({**whole, key: {**whole[key], **change}}).encode())
        assert_refused(saved, match, (ValueError, TypeError))
    for index, match in (
        ([], "no table of entries"),
        ({**whole, LR: [1]}, "has no path"),
        ({**whole, LR: {**whole[LR], "pieces": 2 * whole[LR]["pieces"]}}, "not the whole of it"),
    ):
        forge(saved, INDEX, json.dumps(index).encode())
        assert_refused(saved, match)
    for lacks, match in ((key, "exp_avg_sq"), ("param_groups", "holds no optimizer: it is damaged")):
        forge(saved, INDEX, json.dumps({k: v for k, v in whole.items() if lacks not in k}).encode())
        assert_refused(saved, match)
