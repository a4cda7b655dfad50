"""The benchmark in which GPT-2 small learns: what is run, that it goes on where it stopped, its text, its report."""

import gzip
import math
import os
import re
import signal
import sys
import time
from dataclasses import replace

import numpy as np
import pytest
import torch

from onebit.cli.arguments import CommandError
from perf.convergence.plan import DEFAULTS, MORE
from perf.convergence.virtual import run_ranks
from perf.lab.processes import RankFailed
from perf.learn import command, prepare, report, sources
from perf.learn.checkpoint import Checkpoint
from perf.learn.model import gpt2
from perf.learn.plan import GPT2_SMALL, REHEARSAL, TITLES, Setting, Shape, config, plan
from perf.learn.tokens import Tokens, read_tokens, write_tokens
from perf.learn.train import GO_ON, SAVE, STOP, Learner
from perf.records import read_record, write_record
from tests import forked
from tests.limits import HUNG

TINY = Setting("tiny", Shape(1, 16, 2, 8, 64), 2, 2, 10, 2, 4, 6, lr={"adam": 1e-2, "lamb": 5e-2})
RUNS = {run.variant: run for run in plan(TINY, 1)}


def some_tokens():
    source = np.random.default_rng(0)
    train, held_out = (source.integers(0, 64, n).astype(np.uint16) for n in (400, 90))
    return Tokens(train, held_out, {"digest": "some", "vocabulary": 64, "train": 400})


def learn(run, path, setting=TINY, due=lambda: GO_ON, device="cpu"):
    learner = Learner(setting, some_tokens(), torch.device(device), due, lambda step, loss: None)
    found = learner.learn(run, Checkpoint(path, {"of": run.variant}, run.ranks))
    return found if isinstance(found, int) else {k: v for k, v in found.items() if k != "seconds"}


def test_every_optimizer_is_run_once_with_a_seed_and_its_defaults():
    runs = list(plan(GPT2_SMALL, 2))
    assert [run.variant for run in runs] == 2 * list(TITLES) and {run.seed for run in runs[:5]} == {0}
    assert set(TITLES) == {"adam", "lamb", *DEFAULTS[MORE]}
    assert {(run.ranks, run.batch, run.steps) for run in runs} == {(8, 32, 500)}
    assert GPT2_SMALL.tokens == 500 * 32_768
    assert [run.freeze for run in runs[:5]] == [None, None, 100, None, 150]
    text = {"digest": "a"}
    configs = [config(run, setting, text) for run in runs[:1] for setting in (GPT2_SMALL, replace(GPT2_SMALL, clip=2))]
    assert configs[0] != configs[1] and configs[0] != config(runs[0], GPT2_SMALL, {"digest": "b"})


def test_the_model_is_gpt2_small():
    def elements(shape):
        of_layer = 12 * shape.width**2 + 13 * shape.width
        return (shape.vocabulary + shape.length + 2) * shape.width + shape.layers * of_layer

    shape = Shape(2, 128, 2, 16, 500)
    torch.manual_seed(0)
    model = gpt2(shape).requires_grad_(False)
    assert sum(p.numel() for p in model.parameters()) == elements(shape) and elements(Shape()) == 124_439_808
    assert all(not p.any() for name, p in model.named_parameters() if name.endswith("bias"))
    last = 0.02 / math.sqrt(4)
    for name, p in model.named_parameters():
        if p.dim() == 2:
            expected = last if ".mix." in name or ".down." in name else 0.02
            assert float(p.std()) == pytest.approx(expected, rel=0.05), name


@pytest.mark.parametrize("variant", ["adam", "zero_one_unbiased_adam", "unbiased_lamb"])
def test_a_run_that_stops_and_goes_on_is_the_same_bit_for_bit(variant, tmp_path):
    """The other run saves after the same steps: this one stops twice, once in stage 2, and saves once more in
    between."""
    due = iter([GO_ON, GO_ON, SAVE, SAVE, GO_ON, GO_ON, SAVE, *[GO_ON] * 3])
    whole = learn(RUNS[variant], tmp_path / "whole.pt", due=lambda: next(due))
    assert [int(point[0]) for point in whole["curve"]] == [2, 4, 6, 8, 10]
    due = iter([GO_ON, GO_ON, STOP, SAVE, GO_ON, GO_ON, STOP, *[GO_ON] * 3])
    path = tmp_path / "parts.pt"
    assert [learn(RUNS[variant], path, due=lambda: next(due)) for _ in range(2)] == [3, 7]
    assert learn(RUNS[variant], path, due=lambda: next(due)) == whole


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("variant", RUNS)
def test_ranks_on_a_gpu_learn_as_those_on_a_cpu(variant, tmp_path):
    """They have the same parameters at the end, or `learn` raises; a run goes on there, too."""
    due = iter([*[GO_ON] * 6, STOP, *[GO_ON] * 3])
    path = tmp_path / "gpu.pt"
    assert learn(RUNS[variant], path, due=lambda: next(due), device="cuda:0") == 7
    ours = learn(RUNS[variant], path, due=lambda: next(due), device="cuda:0")
    for a, b in zip(learn(RUNS[variant], tmp_path / "cpu.pt")["curve"], ours["curve"], strict=True):
        assert a == pytest.approx(b, rel=0.02)


def test_stage_1_clips_the_mean_of_the_gradients_as_the_baseline_does(tmp_path):
    setting = replace(TINY, clip=0.2, every=1)
    plain, ours = (learn(replace(RUNS[v], freeze=f), tmp_path / "none.pt", setting)["curve"]
                   for v, f in (("adam", None), ("unbiased_adam", 8)))  # fmt: skip
    for a, b in zip(plain[:8], ours[:8], strict=True):
        assert a == pytest.approx(b, rel=5e-5)
    assert plain[8][3] > ours[8][3] > ours[7][3]  # bytes sent
    free = learn(RUNS["adam"], tmp_path / "none.pt", replace(setting, clip=1e6))["curve"]
    assert free[7][1] != pytest.approx(plain[7][1], rel=1e-4)


def test_a_checkpoint_has_equal_tensors_once_and_stays_until_the_next_is_whole(tmp_path, monkeypatch):
    checkpoint = Checkpoint(tmp_path / "run.pt", {"seed": 0}, 4)

    def save(transport, value):
        state = {"same": [torch.full((10_000,), value)], "own": torch.tensor([float(transport.rank)]), "name": "x"}
        checkpoint.save(state, transport)

    run_ranks(4, lambda transport: save(transport, 1.0))
    assert checkpoint.path.stat().st_size < 2 * 40_000
    monkeypatch.setattr(torch, "save", lambda state, path: path.write_bytes(b"half") and sys.exit("killed"))
    with pytest.raises(RankFailed, match="killed"):
        run_ranks(4, lambda transport: save(transport, 2.0))
    again = Checkpoint(checkpoint.path, {"seed": 0}, 4)
    assert again.read()
    states = [again.take(rank) for rank in range(4)]
    assert [float(state["own"]) for state in states] == [0, 1, 2, 3]
    states[0]["same"][0].zero_()
    assert all(bool((state["same"][0] == 1).all()) for state in states[1:])
    with pytest.raises(ValueError, match="other settings"):
        Checkpoint(checkpoint.path, {"seed": 1}, 4).read()
    assert not Checkpoint(tmp_path / "none.pt", {}, 4).read()


def test_ranks_that_take_turns_compute_one_at_a_time():
    inside = []

    def work(transport):
        for _ in range(3):
            inside.append(transport.rank)
            time.sleep(0.005)
            assert len(inside) == 1
            inside.remove(transport.rank)
            transport.wait_for_all()
        return transport.rank

    assert run_ranks(3, work, turns=True) == [0, 1, 2]
    with pytest.raises(RankFailed, match="rank 1: "):
        run_ranks(3, lambda transport: 1 / (transport.rank - 1) and transport.wait_for_all(), turns=True)


def test_the_rehearsal_stops_at_sigterm_goes_on_and_reports(tmp_path, capsys):
    arguments = ["--rehearse", f"--out={tmp_path}", f"--work={tmp_path}"]
    process = forked.Popen([sys.executable, "-m", "perf.learn", *arguments], dict(os.environ))
    while not list(tmp_path.glob("*seed-0.json")) and process.poll() is None:
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    assert process.wait(HUNG) == 0
    last = process.stdout.read().splitlines()[-1]
    assert "of 5 runs are left. Go on with:  python -m perf.learn --rehearse --out=" in last
    assert command.main([*arguments, "--seconds=0"]) == 0
    assert re.search(r"Stopped after step \d of 10 of .*: [1-4] of 5 runs are left", capsys.readouterr().out)
    assert command.main([*arguments, f"--out={tmp_path / 'other'}", "--steps=12", "--seconds=0"]) == 0
    assert "Stopped after step 1 of 12 of Adam, seed 0: 5 of 5" in capsys.readouterr().out
    (tmp_path / "rehearsal-adam-seed-0.pt").unlink()
    made = {path: path.stat().st_mtime_ns for path in tmp_path.glob("*seed-0.json")}
    assert command.main(arguments) == 0
    page = capsys.readouterr().out
    assert (
        all(f"| {title} | 1 |" in page for title in TITLES.values()) and "says nothing about ranks on a network" in page
    )
    assert (tmp_path / "learn.md").read_text() in page and (tmp_path / "learn.png").exists()
    assert not list(tmp_path.glob("*.pt"))
    assert made and all(path.stat().st_mtime_ns == at for path, at in made.items())
    for run in plan(REHEARSAL, 1):
        record = read_record(report.record_path(tmp_path, run))
        assert record["curve"][-1][0] == 10 and record["loss"] < math.log(256) and record["device"]


def test_what_is_due_after_a_step(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    due, endless = command.Due(1000), command.Due(None)
    for now[0], expected in ((1, GO_ON), (300, SAVE), (301, GO_ON), (599, GO_ON), (601, SAVE), (1000, STOP)):
        assert due() == expected
    former = signal.getsignal(signal.SIGTERM)
    with endless.at_sigterm():
        assert endless() == SAVE and endless() == GO_ON
        signal.raise_signal(signal.SIGTERM)
        assert endless() == STOP
    assert signal.getsignal(signal.SIGTERM) is former


def test_tokens_come_back_and_windows_of_held_out_text_are_of_all_of_it(tmp_path, capsys):
    path = tmp_path / "tokens.xz"
    train, held_out = np.arange(50_000, dtype=np.uint16), np.arange(1000, dtype=np.uint16)
    write_tokens(path, train, held_out, {"vocabulary": 50_000})
    tokens = read_tokens(path)
    assert np.array_equal(tokens.train, train) and np.array_equal(tokens.held_out, held_out)
    assert tokens.about["vocabulary"] == 50_000 and (tokens.about["train"], tokens.about["held_out"]) == (50_000, 1000)
    windows = tokens.windows(100)
    assert windows.shape == (499, 101) and windows[-1, -1] == 49_900  # more than int16 has
    assert tokens.held_out_windows(100, 3)[:, 0].tolist() == [0, 400, 800]
    assert command.main([f"--work={tmp_path / 'none'}", f"--out={tmp_path}"]) == 2
    assert "python -m perf.learn --prepare" in capsys.readouterr().err


def words(n, seed):
    source = np.random.default_rng(seed)
    return "\n\n".join(" ".join(f"w{k}" for k in source.integers(0, 5000, 20)) for _ in range(n))


def test_text_is_cleaned_and_held_out_by_documents(tmp_path, monkeypatch):
    licence = "Permission is granted to copy, in this long paragraph, which some files have and nobody reads. " * 2
    text = [f"{words(40, 300 + k)} &amp; so" for k in range(30)]
    pages = [f"<head>no</head><p>Menu</p><p>Here</p>\n<p>{each}</p><!-- no -->" for each in text]
    pages[0] += "<p>Once</p>\n<p>again</p>"
    files = {"texts": [f"{licence * (k < 9)}\n\n{words(40, k)}\n" for k in range(200)], "pages": pages}
    kinds = {"texts": sources.plain, "pages": sources.page}
    folder = tmp_path / "packages"
    for name, contents in files.items():
        (folder / name).mkdir(parents=True)
        (folder / f"{name}_1.2_all.deb").touch()
        for i, content in enumerate(contents):
            (folder / name / f"{i}.gz").write_bytes(gzip.compress(content.encode()))
    found = [sources.Source(name, "MIT", "*.gz", kinds[name]) for name in files]
    monkeypatch.setattr(prepare, "SOURCES", [*found, sources.Source("no-such-package", "MIT", "*")])
    asked = []
    monkeypatch.setattr(sources.subprocess, "run", lambda words, **_: asked.append(words[-1]))  # no network
    monkeypatch.setattr(prepare, "standard_library", lambda: [words(40, 0), "short"])
    setting = replace(TINY, shape=replace(TINY.shape, vocabulary=300))
    said = prepare.prepare(tmp_path, setting)
    assert "| texts | 1.2 | MIT | 200 |" in said and "| pages | 1.2 | MIT | 30 |" in said
    assert set(asked) == {"no-such-package"} and "no-such-package" not in said
    assert "| PSF | 0 | 0 |" in said  # it was there before
    tokens = read_tokens(tmp_path / "tokens.xz")
    assert tokens.about["vocabulary"] == 300 > tokens.train.max() and len(tokens.about["from"]) == 3
    ends = [int((part == 0).sum()) for part in (tokens.train, tokens.held_out)]
    assert sum(ends) == 230 and 1 <= ends[1] <= 12
    origins = list(prepare.gather(folder, command.Progress(silent=True)))
    every = [text for origin in origins for text in origin.texts]
    assert sum(licence.strip() in text for text in every) == 1
    assert not any("<" in text or "no" in text.split() for text in origins[1].texts)
    assert all("& so" in text and "Menu" not in text for text in origins[1].texts) and "Once" in origins[1].texts[0]
    assert sum(map(prepare.is_held_out, every)) == ends[1]
    with pytest.raises(CommandError, match="not 60000: add text"):
        prepare.tokenize(every, 60_000)


def test_dictionaries_are_cut_between_entries():
    entries = [f"entry {k}\n{'x' * 900}" for k in range(100)]
    documents = list(sources.dictionary("\n\n".join(entries).encode()))
    assert "\n\n".join(documents).split("\n\n") == entries and max(map(len, documents)) < 1.1 * sources.PIECE
    line = "02084071 05 n 03 domestic_dog 0 dog 0 000 | a member of the genus Canis  "
    assert list(sources.glosses(f"  1 a licence\n{line}\n".encode())) == ["domestic dog: a member of the genus Canis"]


def test_the_report_compares_means_over_seeds_with_the_baseline(tmp_path):
    def write(variant, seed, loss, sent, text="a"):
        (run,) = (each for each in plan(REHEARSAL, seed + 1) if (each.variant, each.seed) == (variant, seed))
        text = {"digest": text, "train": 1_000_000}
        write_record(report.record_path(tmp_path, run), {
            "config": config(run, REHEARSAL, text), "text": text, "elements": 1000, "windows": 80, "held_out": 8,
            "curve": [[5, 6, 6, sent / 2], [10, 5, loss, sent]],
            "device": "a GPU", "loss": loss, "uncompressed_steps": 10,
        })  # fmt: skip

    with pytest.raises(CommandError, match="leave --report out"):
        report.write_report(tmp_path, REHEARSAL)
    for seed in range(2):
        write("adam", seed, 3.0 + seed, 40_000)
    write("zero_one_unbiased_adam", 0, 3.75, 4000)
    page = report.write_report(tmp_path, REHEARSAL)
    assert "| Adam | 2 | 10 of 10 | 3.500 | - | 4e-05 | 1.0 |" in page and "On a GPU." in page
    assert "| 0/1 Adam | 1 | 10 of 10 | 3.750 | +0.250 | 4e-06 | 10.0 |" in page
    assert "0.5 times the 1.0 million tokens" in page
    write("lamb", 0, 3.75, 4000, "b")
    with pytest.raises(CommandError, match="text or steps"):
        report.write_report(tmp_path, REHEARSAL)
