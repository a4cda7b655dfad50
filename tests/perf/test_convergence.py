"""The convergence study: what it runs, resumes and says; and a small one on Python's documentation for real."""

from __future__ import annotations

import gzip
import json
import struct
import zlib
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from onebit.cli.progress import Progress
from perf.convergence import data, records, report, study
from perf.convergence.data import DataMissing
from perf.convergence.launch import launch
from perf.convergence.plan import BETA1, GAN_ALONE, MAIN, ONE_SEED, SWEEPS, TASKS, VARIANTS, Run, plan
from perf.convergence.runs import batch_of, lr_at, share
from perf.lab.processes import RankFailed

RUN = Run.standard("quick", "onebit_adam", 0)


def record(run: Run, loss: float, **more: Any) -> dict[str, Any]:
    steps = run.freeze if isinstance(run.freeze, int) else run.steps
    return {
        "config": asdict(run),
        "data": "none",
        "loss": loss,
        "accuracy": None,
        "train": [[run.steps, loss]],
        "valid": [[run.steps // 2, loss + 1], [run.steps, loss]],
        "seconds": 1.0,
        "elements": 2048 * 1000,
        "padded": 2048 * 1000,
        "uncompressed_steps": steps,
        "compressed_bytes": (run.steps - steps) * 2048 * 1000 / 8.0 * 1.016,
        "cpu": "a cpu",
        "cpu_count": 2,
        "versions": {"torch": "2"},
        "measured": "2026-01-01",
        **more,
    }


def write(out: Path, run: Run, loss: float, **more: Any) -> None:
    path = records.record_path(out, run)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record(run, loss, **more)))


def test_the_plan_has_every_run_once_the_main_comparison_first() -> None:
    runs = list(plan(["lm", "images"], [MAIN, *SWEEPS], 3, 2))
    assert len({(run.task, run.name) for run in runs}) == len(set(runs)) == len(runs)
    main = 2 * (3 * (len(VARIANTS) - len(GAN_ALONE)) - 2 * len(ONE_SEED))
    assert all(run == Run.standard(run.task, run.variant, run.seed) for run in runs[:main])
    assert all(run != Run.standard(run.task, run.variant, run.seed) for run in runs[main:])
    assert {run.seed for run in runs if run.ranks == 8} == {0}
    assert {run.ranks for run in runs} == {1, 2, 4, 8} and "auto" in {run.freeze for run in runs}


def test_only_gans_try_other_betas_and_a_layer_apart() -> None:
    tried = {task: {run.variant for run in plan([task], [MAIN], 1, 2)} & GAN_ALONE for task in ("lm", "gan")}
    assert tried == {"lm": set(), "gan": GAN_ALONE} and len(GAN_ALONE) > len(BETA1)
    assert all(run.freeze is None for run in plan(["gan"], [MAIN], 1, 2, list(GAN_ALONE)))


def test_a_steps_global_batch_is_the_same_for_any_number_of_ranks() -> None:
    items = (torch.arange(100),)
    run = replace(RUN, batch=24)
    epoch = torch.cat([batch_of(items, run, step)[0][0] for step in range(4)])
    assert len(epoch.unique()) == 96
    assert not torch.equal(epoch[:24], batch_of(items, replace(run, seed=1), 0)[0][0])
    whole, _ = batch_of(items, run, 5)
    for size in (1, 2, 4):
        assert torch.equal(torch.cat([share(whole, rank, size)[0] for rank in range(size)]), whole[0])


def test_the_learning_rate_rises_and_falls_to_almost_0() -> None:
    rates = [lr_at(RUN, step) for step in range(1, RUN.steps + 1)]
    assert max(rates) == pytest.approx(RUN.lr) and rates.index(max(rates)) == 29
    assert 0 < rates[-1] < 0.01 * RUN.lr and rates[0] == pytest.approx(RUN.lr / 30)


def test_text_splits_into_spans() -> None:
    train, valid = data.spans(1000, every=10, length=20)
    assert sorted([*train, *valid]) == list(range(1000)) and len(valid) == 100
    assert bytes(data.tokenize(["é1"], 256).astype(np.uint8)).decode() == "é1"


def test_a_folder_of_ones_own_is_read(tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_text("two")
    (tmp_path / "a.txt").write_text("one")
    assert data.prose(tmp_path) == "one\n\ntwo"
    for part, n in (("train", 3), ("t10k", 2)):
        images = bytes(16) + bytes(range(n)) * 784
        (tmp_path / f"{part}-images-idx3-ubyte.gz").write_bytes(gzip.compress(images))
        (tmp_path / f"{part}-labels-idx1-ubyte.gz").write_bytes(gzip.compress(bytes(8) + bytes(range(n))))
    found = data.fashion(tmp_path)
    assert found["train"][0].shape == (3, 28, 28) and found["t10k"][1].tolist() == [0, 1]


def test_strings_of_r_packages_are_read() -> None:
    strings = b"".join(
        b"\x00\x04\x00\x09" + struct.pack(">i", len(s)) + s for s in (b"It is a truth", b"", b"\xc3\xa9")
    )
    stream = b"1234" + zlib.compress(b"X\n" + bytes(30) + strings)
    assert list(data.r_strings(2 * stream)) == 2 * ["It is a truth\n\né"]


def test_missing_data_are_one_line_that_says_how_to_get_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(data, "roots", lambda given: [tmp_path])
    with pytest.raises(DataMissing, match="apt-get download dataset-fashion-mnist"):
        TASKS["images"].prepare(None)
    assert study.main(["--tasks=images", "--seeds=1", f"--out={tmp_path}"]) == 2
    assert "apt-get download dataset-fashion-mnist" in capsys.readouterr().err.splitlines()[-1]


def study_of(out: Path, monkeypatch: pytest.MonkeyPatch, run: Callable[[Run], dict[str, Any]]) -> study.Study:
    monkeypatch.setattr(study, "launch", lambda r, data, show: run(r))
    monkeypatch.setattr(study.Study, "prepared_data", lambda self, task: Path())
    return study.Study(out, None, Progress())


def test_a_study_goes_on_where_it_was_interrupted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs, made = list(plan(["quick"], [MAIN], 2, 2)), []

    def one(run: Run) -> dict[str, Any]:
        if len(made) == 5:
            raise KeyboardInterrupt
        made.append(run)
        return {"loss": 1.0}

    with pytest.raises(KeyboardInterrupt):
        study_of(tmp_path, monkeypatch, one).run(runs)
    assert made == runs[:5]
    rest = study_of(tmp_path, monkeypatch, lambda run: made.append(run) or {"loss": 1.0})
    assert rest.run(runs) == len(runs) - 5 and made == runs
    assert rest.run(runs) == 0 and made == runs
    assert rest.run([replace(runs[0], lr=0.5)]) == 1  # other settings are another run
    records.record_path(tmp_path, runs[3]).write_text("{half")
    assert rest.run(runs) == 1 and made[-1] == runs[3]


@pytest.mark.parametrize("losses, verdict", [((2.0, 2.2), "yes"), ((2.2, 2.3), "no"), ((1.0, 1.0), "yes")])
def test_within_one_standard_deviation_or_better(tmp_path: Path, losses: tuple[float, ...], verdict: str) -> None:
    for seed, loss in enumerate((2.0, 2.1)):  # a deviation of 0.07
        write(tmp_path, Run.standard("quick", "adam", seed), loss, compressed_bytes=0)
    for seed, loss in enumerate(losses):
        write(tmp_path, replace(RUN, seed=seed), loss)
    runs = records.main_runs(tmp_path, "quick", 2)
    assert report.within(runs["onebit_adam"], runs["adam"]) == verdict
    assert f"| {verdict} |" in report.main_table("quick", runs)
    assert report.within({0: runs["onebit_adam"][0]}, runs["adam"]) == "one seed: open"


def test_volume_is_held_against_the_formula() -> None:
    small = record(RUN, 2.0)
    for bits, formula in ((32, 1 / (0.2 + 0.8 / 32)), (16, 1 / (0.2 + 0.8 / 16))):
        expected, measured = report.reduction(small, bits)
        assert expected == pytest.approx(formula)
        assert 0.99 * formula < measured < formula  # scales cost 1.6 % of stage 2
    padded = {**small, "padded": 2 * small["elements"], "compressed_bytes": 2 * small["compressed_bytes"]}
    row = report.volume_table({"onebit_adam": {0: padded}})
    assert "without padding" in row and "-0." in row


def test_the_page_has_tables_figures_and_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    docs = tmp_path / "docs" / "page.md"
    for run in plan(["lm"], [MAIN, "freeze"], 2, 2):
        write(tmp_path / "out", run, 2.0 + 0.01 * run.seed)
    (tmp_path / "out" / "lm.md").write_text("A remark on these runs.\n")
    arguments = ["--report", f"--out={tmp_path / 'out'}", f"--docs={docs}"]
    assert study.main(arguments) == 0 and str(docs) in capsys.readouterr().out
    page = docs.read_text()
    assert "python -m perf.convergence --tasks lm --sweeps main,freeze --seeds 2" in page
    for name in ("lm", "lm-sweeps"):
        assert f"(../out/{name}.png)" in page and (tmp_path / "out" / f"{name}.png").exists()
    assert "a cpu, 2 cores" in page and "| auto |" in page and "workers" not in page
    assert page.count("A remark on these runs.") == 1
    assert page.startswith("# Convergence\n\nWith 1 bit the validation loss is within one standard deviation")
    assert "in 2 of 2 comparisons; the largest mean difference is +0.000" in " ".join(page.split())
    assert study.main(["--report", f"--out={tmp_path / 'none'}"]) == 2


def test_runs_that_were_made_with_other_data_are_not_compared_unnoticed(tmp_path: Path) -> None:
    """The classifier that judges a GAN's samples is another on another machine."""
    for run, made_with in ((replace(RUN, variant="adam", freeze=None), "one judge"), (RUN, "another")):
        write(tmp_path, run, 2.0, data=made_with)
    runs = records.main_runs(tmp_path, "quick", 2)
    assert "can't be compared: another; one judge" in report.settings("quick", runs, 2)
    assert "Data: another." in report.settings("quick", {"onebit_adam": runs["onebit_adam"]}, 2)


def test_runs_that_no_curve_shows_make_a_page_too(tmp_path: Path) -> None:
    """Without their baseline, and of a variant that is in tables only."""
    write(tmp_path / "out", Run.standard("lm", "zero_one_8_adam", 0), 2.0)
    assert study.main(["--report", f"--out={tmp_path / 'out'}", f"--docs={tmp_path / 'page.md'}"]) == 0
    assert "| 0/1 Adam, kappa 8 | - | 2.000 (one seed) |" in (tmp_path / "page.md").read_text()


def test_a_sweep_compares_runs_of_the_same_seeds(tmp_path: Path) -> None:
    """The main comparison has seeds that the sweep has not."""
    for run in [*plan(["lm"], [MAIN], 3, 2), *plan(["lm"], ["freeze"], 1, 2)]:
        write(tmp_path, run, 2.0 + 0.01 * run.seed)
    runs = records.sweep_runs(tmp_path, "lm", "freeze", 2)
    assert {tuple(records) for at in runs.values() for records in at.values()} == {(0,)}
    text = report.sweep_table("freeze", runs)
    assert text.startswith("One seed.") and "| standard | 2.000 | 2.000 | +0.000 |" in text and "open" not in text


def test_a_rank_that_fails_ends_the_run(tmp_path: Path) -> None:
    with pytest.raises(RankFailed, match=r"(?s)rank \d: .*No such file"):
        launch(RUN, tmp_path / "none.pt", lambda step, loss: None)


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("convergence")
    variants = "adam,onebit_adam,naive_adam_start,lamb,onebit_lamb"
    assert study.main(["--quick", f"--variants={variants}", "--seeds=1", f"--out={out}"]) == 0
    return out


@pytest.mark.slow
@pytest.mark.timeout(900)
class TestQuick:
    """Real ranks on real text: 300 steps a run."""

    @staticmethod
    def of(out: Path, variant: str) -> Any:
        run = Run.standard("quick", variant, 0)
        return records.load(records.record_path(out, run), run)

    @pytest.mark.parametrize("family", ["adam", "lamb"])
    def test_1_bit_learns_as_its_baseline_does(self, quick: Path, family: str) -> None:
        plain, ours = self.of(quick, family), self.of(quick, f"onebit_{family}")
        for found in (plain, ours):
            assert found["train"][0][1] > 3.3 and found["loss"] < 2.8
        assert ours["loss"] < plain["loss"] + 0.08
        at = [step for step, _ in ours["valid"]].index(60)
        assert ours["valid"][at][1] == pytest.approx(plain["valid"][at][1], rel=1e-5)  # stage 1 is the baseline

    def test_naive_compression_ends_worse(self, quick: Path) -> None:
        assert self.of(quick, "naive_adam_start")["loss"] > self.of(quick, "onebit_adam")["loss"] + 0.3

    @pytest.mark.parametrize("variant", ["onebit_adam", "onebit_lamb"])
    def test_bytes_are_those_of_the_formula(self, quick: Path, variant: str) -> None:
        formula, measured = report.reduction(self.of(quick, variant), 32)
        assert abs(measured / formula - 1) < 0.05

    def test_the_ratios_of_lamb_are_in_its_record_and_on_the_page(self, quick: Path) -> None:
        assert not self.of(quick, "lamb")["ratio"] and not self.of(quick, "onebit_adam")["ratio"]
        found = self.of(quick, "onebit_lamb")
        assert found["ratio"][0][0] > found["config"]["freeze"] and found["ratio"][-1][0] == found["config"]["steps"]
        for _, low, middle, high in found["ratio"]:
            assert 0.5 <= low <= middle <= high <= 4.0
        assert found["ratio"][-1][3] > 1.0
        page = (quick / "convergence.md").read_text()
        assert f"{found['ratio'][-1][2]:.2f} at its end" in page and "(one seed)" in page

    def test_nothing_is_run_twice(self, quick: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delattr(study, "launch")
        assert study.main(["--quick", "--variants=adam,onebit_lamb", "--seeds=1", f"--out={quick}"]) == 0
        assert "1-bit LAMB" in (quick / "convergence.md").read_text()
