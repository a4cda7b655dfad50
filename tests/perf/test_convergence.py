"""The convergence study: what it runs, resumes and says; a small one for real; and its GAN."""

import functools
import gzip
import json
import math
import re
import struct
import zlib
from copy import deepcopy
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch

from onebit.cli.progress import Progress
from onebit.collectives.transport import LocalTransport
from perf import plots
from perf.convergence import data, gan, records, report, study, virtual
from perf.convergence.data import DataMissing
from perf.convergence.models import ResNet8
from perf.convergence.plan import (
    BETA1,
    DEFAULTS,
    FREEZE,
    LAST_LAYER,
    MAIN,
    MORE,
    SWEEPS,
    TASKS,
    TRIED_IN_EVENTS,
    VARIANTS,
    Run,
    family_of,
    plan,
)
from perf.convergence.runs import SGD, batch_of, build_part, enlarge_gradients, event_factor, lr_at, sends, share, train
from perf.convergence.tasks import Prepared
from perf.convergence.virtual import run_ranks as run_virtual_ranks
from perf.lab.processes import RankFailed
from perf.records import read_record
from perf.train_step import volume
from tests import internals
from tests.onebit import runs as training
from tests.onebit.runs import Case, bits, kinds, same, snapshot
from tests.ranks import group, run_ranks

ROOT = Path(__file__).parents[2]
RUN = Run.standard("quick", "onebit_adam", 0)
ALONE = LocalTransport()


def record(run, loss, **more):
    steps = run.freeze if isinstance(run.freeze, int) else run.steps - 1
    about = {"cpu": "a cpu", "cpu_count": 2, "versions": {"torch": "2"}, "measured": "2026-01-01", "seconds": 1.0}
    sizes = dict.fromkeys(("elements", "padded"), 2048 * 1000)
    return {
        **{"config": run.config, "data": "none", "loss": loss, "accuracy": None, **about, **sizes},
        "train": [[run.steps, loss]],
        "valid": [[run.steps // 2, loss + 1], [run.steps, loss]],
        "uncompressed_steps": steps,
        "compressed_bytes": (run.steps - steps) * 2048 * 1000 / 8.0 * 1.016,
        **more,
    }


def write(out, run, loss, **more):
    path = records.record_path(out, run)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record(run, loss, **more)))


def test_the_plan_has_every_run_once_the_main_comparison_first():
    runs = list(plan(["lm", "images"], [MAIN, *SWEEPS], 3))
    assert len({(run.task, run.name) for run in runs}) == len(set(runs)) == len(runs)
    of_tasks = [v for task in ("lm", "images") for v in VARIANTS if family_of(v) in TASKS[task].families]
    main = 3 * (len(of_tasks) - 2 * len(BETA1))
    assert all(run == Run.standard(run.task, run.variant, run.seed) for run in runs[:main])
    assert all(run != Run.standard(run.task, run.variant, run.seed) for run in runs[main:])
    assert {run.seed for run in runs if run.ranks == 8 and run.variant == "direct_adam"} == {0}
    assert {run.ranks for run in runs} == {2, 4, 8, 16, 32} and "auto" in {run.freeze for run in runs}
    tried = {task: {run.variant for run in plan([task], [MAIN], 1)} & BETA1.keys() for task in ("lm", "gan")}
    assert tried == {"lm": set(), "gan": BETA1.keys()}
    assert all(run.freeze is None for run in plan(["gan"], [MAIN], 1, list(BETA1)))


def test_what_is_saved_is_all_of_a_runs_state():
    resumable = {*FREEZE, *DEFAULTS[2], *DEFAULTS[MORE]}
    saved = [run for run in plan(list(TASKS), [MAIN, *SWEEPS], 1) if run.save_every]
    assert {run.task for run in saved} == {"lm", "lm-long"} and {run.variant for run in saved} <= resumable


@pytest.mark.parametrize("variant", ["adam", "direct_unbiased_adam", "direct_unbiased_lamb", "zero_one_unbiased_adam"])
def test_a_run_that_is_interrupted_goes_on_from_what_is_saved(tmp_path, variant):
    """It ends as one that was not, in whose pieces new optimizers load what the last ones have saved, too."""
    task = replace(TASKS["quick"], width=32, vocabulary=32)
    tokens = torch.randint(32, (64, task.length + 1), generator=torch.Generator().manual_seed(0))
    given, run = Prepared((tokens,), (tokens[:16],), "noise"), Run.standard("quick", variant, 0)
    run = replace(run, steps=14, batch=8, freeze=run.freeze and 4, save_every=5)
    torch.manual_seed(0)
    model = task.model(given)

    def result(kept, run=run, last=run.steps):
        def show(step, loss):
            shown.append(step)
            if step > last:
                raise InterruptedError

        shown = []
        of_ranks = run_virtual_ranks(2, lambda rank: train(run, given, deepcopy(model), rank, show, kept))
        return {**of_ranks[0], "seconds": 0, "shown": shown}

    whole, interrupted = result(tmp_path / "whole.pt"), tmp_path / "interrupted.pt"
    with pytest.raises(RankFailed):
        result(interrupted, last=11)
    assert torch.load(interrupted, weights_only=True)["so_far"]["step"] == 10
    rest = result(interrupted)
    assert rest.pop("shown") == [11, 12, 13, 14] and whole.pop("shown") == [*range(1, 15)]
    assert rest == whole and len(whole["train"]) == len(whole["valid"]) == len(whole["sent"]) == 14
    at_once = result(tmp_path / "none.pt", replace(run, save_every=0))
    alike = 14 if variant == "adam" else 5  # a synchronize changes what is sent next
    assert at_once["valid"][:alike] == whole["valid"][:alike] and at_once["sent"] == whole["sent"]
    result(interrupted, replace(run, lr=2 * run.lr), last=20)  # other settings begin anew


def test_a_steps_batch_and_learning_rate_are_the_same_for_any_number_of_ranks():
    items = (torch.arange(100),)
    run = replace(RUN, batch=24)
    epoch = torch.cat([batch_of(items, run, step)[0][0] for step in range(4)])
    assert len(epoch.unique()) == 96
    assert not torch.equal(epoch[:24], batch_of(items, replace(run, seed=1), 0)[0][0])
    whole, _ = batch_of(items, run, 5)
    for size in (1, 2, 4):
        assert torch.equal(torch.cat([share(whole, rank, size)[0] for rank in range(size)]), whole[0])
    # The learning rate rises, and falls to almost 0.
    rates = [lr_at(RUN, step) for step in range(1, RUN.steps + 1)]
    assert max(rates) == pytest.approx(RUN.lr) and rates.index(max(rates)) == 29
    assert 0 < rates[-1] < 0.01 * RUN.lr and rates[0] == pytest.approx(RUN.lr / 30)


def test_data_are_read_and_split(tmp_path):
    """Data come from a folder of one's own, and from R packages."""
    train, valid = data.spans(1000, every=10, length=20)
    assert sorted([*train, *valid]) == list(range(1000)) and len(valid) == 100
    assert bytes(data.tokenize(["é1"], 256).astype(np.uint8)).decode() == "é1"
    (tmp_path / "b.txt").write_text("two")
    (tmp_path / "a.txt").write_text("one")
    assert data.prose(tmp_path) == "one\n\ntwo"
    for part, n in (("train", 3), ("t10k", 2)):
        images = bytes(16) + bytes(range(n)) * 784
        (tmp_path / f"{part}-images-idx3-ubyte.gz").write_bytes(gzip.compress(images))
        (tmp_path / f"{part}-labels-idx1-ubyte.gz").write_bytes(gzip.compress(bytes(8) + bytes(range(n))))
    found = data.fashion(tmp_path)
    assert found[0][0].shape == (3, 28, 28) and found[1][1].tolist() == [0, 1]
    texts = (b"It is a truth", b"", b"\xc3\xa9")
    strings = [b"\x00\x04\x00\x09" + struct.pack(">i", len(text)) + text for text in texts]
    stream = b"1234" + zlib.compress(b"X\n" + bytes(30) + b"".join(strings))
    assert list(data.r_strings(2 * stream)) == 2 * ["It is a truth\n\né"]


def test_missing_data_are_one_line_that_says_how_to_get_them(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(data, "roots", lambda given: [tmp_path])
    with pytest.raises(DataMissing, match="apt-get download dataset-fashion-mnist"):
        TASKS["images"].prepare(None)
    assert study.main(["--tasks=images", "--seeds=1", f"--out={tmp_path}"]) == 2
    assert "apt-get download dataset-fashion-mnist" in capsys.readouterr().err.splitlines()[-1]


def study_of(out, monkeypatch, run):
    monkeypatch.setattr(study, "launch", lambda r, data, show, kept: run(r))
    monkeypatch.setattr(study.Study, "prepared_data", lambda self, task: Path())
    return study.Study(out, None, Progress())


def test_a_study_goes_on_where_it_was_interrupted(tmp_path, monkeypatch):
    runs, made = list(plan(["quick"], [MAIN], 2)), []

    def one(run):
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


def test_the_page_is_up_to_date(tmp_path, monkeypatch):
    """docs/convergence.md is what the command writes from the committed records: figures of it are not drawn again."""
    monkeypatch.chdir(ROOT)
    out, docs, read = study.STANDARD["out"], Path("docs/convergence.md"), records.load
    there = {path: read_record(path)["config"] for path in out.glob("*/*.json")}
    monkeypatch.setattr(records, "load", functools.cache(lambda path, run: read(path, run) if path in there else None))
    monkeypatch.setattr(plots, "save", lambda path, panels, title: path)
    monkeypatch.setattr(Path, "write_text", lambda self, text, **_: written.update({self: text}))
    written = {}
    assert report.report(out, docs) == str(docs)
    assert written[docs] == docs.read_text(encoding="utf-8"), "run python -m perf.convergence --report"


LONG, SMALL, GAN = "A larger language model in 10,000 steps", "Causal language model", "DCGAN, distance of samples"
README = [
    *((LONG, name, 0) for name in ("0/1 Adam", "Adam")), (LONG, "0/1 Adam", 3),
    *((SMALL, name, 0) for name in ("0/1 Adam", "Adam", "Adam, 8-bit gradients", "Adam, 4-bit gradients")),
    *((SMALL, name, 0) for name in ("Muon, 8-bit gradients", "Muon, 4-bit gradients", "Muon")),
    (GAN, "Adam", 0), *((GAN, f"Adam, {bits}-bit gradients", 1) for bits in (8, 4)),
]  # fmt: skip


def test_the_readmes_losses_are_the_pages():
    """Tables' cells, rounded: of a section, a row and a column."""
    page, readme = ((ROOT / path).read_text(encoding="utf-8") for path in ("docs/convergence.md", "README.md"))
    (text,) = re.findall(r"\n0/1 Adam ends near Adam: .*?\[study\]", readme, re.DOTALL)
    said = re.findall(r"\d[\d.]*(?: ± [\d.]+)?(?= (?:for|after|with|and|from|farther|times)|\. A|\s\(16)", text)
    assert len(said) == len(README), said
    for (section, name, column), figure in zip(README, said, strict=True):
        table = page.split(f"\n## {section}\n")[1].split("\n## ")[0]
        (cells,) = re.findall(rf"^\| {name} \| (.*) \|$", table, re.MULTILINE)
        exact = re.findall(r"[\d.]+", cells.split(" | ")[column])
        digits = [len(part.partition(".")[2]) for part in figure.split(" ± ")]
        assert figure == " ± ".join(f"{float(n):.{d}f}" for n, d in zip(exact, digits, strict=False)), (name, figure)


def test_a_page_is_made_of_what_there_is(tmp_path, capsys):
    """What is not within is bold; sweeps have what is not in a task's table; a variant's baseline may be missing."""
    out = tmp_path / "out"
    docs = out / "convergence.md"
    for run in [*plan(["lm"], [MAIN], 3), *plan(["lm"], ["freeze"], 1)]:
        write(out, run, 2.0 + 0.01 * run.seed + (run.variant == report.NAIVE_START))
    for run in plan(["lm"], ["ranks", "event", "lr"], 1):
        if run.ranks == 32 or run.event == "x 100" or run.lr == 4 * TASKS["lm"].lr[family_of(run.variant)]:
            lost = run.variant in TRIED_IN_EVENTS[:1] and run.event
            write(out, run, math.nan if lost else 1.9 if run.ranks == 32 else 4.0)
    (out / report.CONCLUSION).write_text("A person's words.\n")
    assert study.main(["--report", f"--out={out}"]) == 0 and str(docs) in capsys.readouterr().out
    page = docs.read_text()
    assert "python -m perf.convergence --tasks lm --sweeps main,ranks,event,freeze,lr --seeds 3" in page
    parts = ("Ranks", "Grad", "Share", "Learn")
    ranks, event, freeze, rates = (page.split(f"### {start}")[1].split("##")[0] for start in parts)
    assert "| 32 | -0.100 (1.02) | -0.100 (1.02) | -0.100 (1.02) | -0.100 (1.02) |" in ranks  # the baseline has 2
    assert "| x 100 | 4.000 (1) | +0.000 | +0.000 | +0.000 | 4.000 (1) | +0.000 | 1 of 1 lost |" in event  # of this row
    assert "| x 4 | 4.000 (1) | +0.000 | +0.000 | +0.000 | 4.000 (1) | +0.000 |" in rates and "| x 1 |" not in rates
    best = ("2.010 ± 0.010", *3 * ["+0.000 ± 0.000"], "2.010 ± 0.010", "+0.000 ± 0.000")
    assert f"| {' | '.join([report.BEST, *best])} |" in rates
    lost, found = ({"adam": {0: {"loss": loss}}} for loss in (math.nan, 3.0))
    assert report.with_best({"x 2": found}, lost)[report.BEST] == found
    assert "](lm-rates.png)" in rates and (out / "lm-rates.png").exists()
    assert "| 50 % | +0.000 (300) | +0.000 (300) |" in freeze and "| standard |" not in page
    assert "](lm.png)" in page and (out / "lm.png").exists()
    top = ("in 3 of 3 comparisons", "naive from the start | **+1.000 ± 0.000** |", "\n\nA person's words.\n\n## How")
    assert sorted(top, key=page.index) == list(top)
    alone = tmp_path / "alone"
    write(alone, Run.standard("lm", "direct_zero_one_2_adam", 0), 2.0)
    assert study.main(["--report", f"--out={alone}"]) == 0
    assert "| 0/1 Adam, norm l1, kappa 2 | 2.000 (1) |" in (alone / "convergence.md").read_text()


def test_runs_that_were_made_with_other_data_are_not_compared_unnoticed(tmp_path):
    """The classifier that judges a GAN's samples is another on another machine."""
    for made_with, compared in (("another judge", "+0.500, other data"), ("one judge", "+0.500")):
        write(tmp_path, replace(RUN, variant="adam", freeze=None), 2.0, data="one judge")
        write(tmp_path, RUN, 2.5, data=made_with)
        table = report.main_table("quick", records.main_runs(tmp_path, "quick"))
        assert f"| 1-bit Adam (paper's) | 2.500 (1) | {compared} |" in table


@dataclass(frozen=True)
class Exact(Case):
    """Its gradients have sums over ranks that no order of adding changes."""

    def gradients(self, rank, step):
        return [g.mul(64).round().div(64) for g in super().gradients(rank, step)]


def trained(rank, size, case, transport=None):
    params = case.parameters()
    optimizer = case.build(params, transport or group())
    training.run(case, rank, optimizer, params, 1, case.steps)
    return snapshot(optimizer.state_dict()), bits(params), optimizer.wire_bytes, bits(internals.left_out(optimizer))


@kinds
@pytest.mark.parametrize("options", [{"norm": "unbiased", "update_limit": "auto"}, {"reply": "direct"}])
def test_virtual_ranks_compute_what_processes_do(kind, options):
    case = Exact(kind, options={"freeze_step": 5, **options})
    virtual = run_virtual_ranks(4, lambda transport: trained(transport.rank, 4, case, transport))
    for own, other in zip(run_ranks(4, trained, case), virtual, strict=True):
        assert same(own, other)


def test_a_rank_that_fails_ends_the_run(tmp_path, monkeypatch):
    with pytest.raises(FileNotFoundError):
        study.launch(RUN, tmp_path / "none.pt", lambda step, loss: None, tmp_path)

    def fail(transport):
        if transport.rank == 1:
            raise KeyError("rank 1's")
        transport.wait_for_all()

    with pytest.raises(RankFailed, match=r"(?s)rank 1: .*KeyError: .rank 1's"):
        run_virtual_ranks(3, fail)
    monkeypatch.setattr(virtual, "HUNG", 1.0)
    with pytest.raises(RankFailed, match="the same collectives"):
        run_virtual_ranks(2, lambda transport: transport.rank and transport.wait_for_all())


def test_an_event_enlarges_the_gradients_of_its_steps():
    run = Run.standard("lm", "adam", 0)
    assert [event_factor(run.at({"event": "x 100"}), step) for step in (1, 300, 301, 600)] == [1, 1, 100, 100]
    assert [event_factor(run.at({"event": "x 30"}), step) for step in (300, 301, 450, 451)] == [1, 30, 30, 1]
    assert event_factor(run, 301) == 1
    assert run.config == {k: v for k, v in asdict(run).items() if k not in ("event", "save_every")}
    params = [torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(3))]
    optimizer = torch.optim.SGD([{"params": [p]} for p in params], lr=1.0)
    for p in params:
        p.grad = torch.full_like(p, 2.0)
    enlarge_gradients(optimizer, 30.0)
    assert all(torch.equal(p.grad, torch.full_like(p, 60.0)) for p in params)


@pytest.mark.timeout(900)
def test_a_quick_study_learns_and_is_not_run_twice(tmp_path, monkeypatch):
    """It learns real text: 300 steps a run."""
    command = ["--quick", "--variants=adam,onebit_adam,onebit_lamb", "--seeds=1", f"--out={tmp_path}"]
    assert study.main(command) == 0
    runs = [Run.standard("quick", variant, 0) for variant in ("adam", "onebit_adam", "onebit_lamb")]
    plain, ours, lamb = found = [records.load(records.record_path(tmp_path, run), run) for run in runs]
    for each in found:
        assert each["train"][0][1] > 3.3 and each["loss"] < 2.8
    assert ours["loss"] < plain["loss"] + 0.08
    at = [step for step, _ in ours["valid"]].index(60)
    assert ours["valid"][at][1] == pytest.approx(plain["valid"][at][1], rel=1e-5)  # stage 1 is the baseline
    for each in (ours, lamb):
        formula = volume.formula(each["uncompressed_steps"] / each["config"]["steps"], 32)
        assert abs(report.fewer_bytes({**each, "padded": each["elements"]}) / formula - 1) < 0.05
    assert not plain["ratio"] and not ours["ratio"]
    ratio = lamb["ratio"]
    assert ratio[0][0] > lamb["config"]["freeze"] and ratio[-1][0] == lamb["config"]["steps"]
    assert all(0.5 <= low <= middle <= high <= 4.0 for _, low, middle, high in ratio) and ratio[-1][3] > 1.0
    page = (tmp_path / "convergence.md").read_text()
    assert f"| 1-bit LAMB (paper's) | {lamb['loss']:.3f} (1) |" in page
    monkeypatch.delattr(study, "launch")
    assert study.main(command) == 0


GAN = TASKS["gan"]


def prepared():
    torch.manual_seed(0)
    images, labels = torch.randint(256, (40, 28, 28), dtype=torch.uint8), torch.arange(40) % 10
    classifier = ResNet8().eval()
    weights = {**classifier.state_dict(), gan.REAL: gan.features(classifier, gan.pixels(images))}
    valid = torch.randn(48, gan.NOISE), torch.arange(48) // 4 % 10
    return Prepared((images, labels), valid, "noise", weights)


def covariance(width, seed):
    x = torch.randn(width, width, generator=torch.Generator().manual_seed(seed)).double()
    return x @ x.T


def test_the_distance_of_two_normal_distributions():
    a, b, zero = covariance(6, 0), covariance(6, 1), torch.zeros(6).double()
    assert gan.distance(zero, a, zero, a) == pytest.approx(0, abs=1e-6 * float(a.trace()))
    shift = torch.arange(6).double()
    assert gan.distance(shift, a, zero, a) == pytest.approx(55, rel=1e-6)
    values = np.linalg.eigvals((a @ b).numpy())
    expected = float(a.trace() + b.trace()) - 2 * np.sqrt(values.real.clip(0)).sum()
    assert gan.distance(zero, a, zero, b) == pytest.approx(expected, rel=1e-6) == gan.distance(zero, b, zero, a)
    assert gan.distance(zero, 4 * torch.eye(6).double(), zero, torch.eye(6).double()) == pytest.approx(6)


def test_samples_are_held_against_real_images():
    """Samples come in one part or two: means over ranks are of all samples."""
    given = prepared()
    model = GAN.model(given).eval()
    with torch.no_grad():
        whole = GAN.validate(model, given.valid, lambda numbers: numbers)
        sums = []
        for rank in range(2):
            GAN.validate(model, share(given.valid, rank, 2), lambda numbers: sums.append(numbers) or numbers)
        both = GAN.validate(model, share(given.valid, 0, 2), lambda _: np.mean(sums, 0).tolist())
        own = gan.features(model.judge[0], model.generator(*given.valid)).double()
    assert both == pytest.approx(whole, rel=1e-6)
    real = given.weights[gan.REAL].double()
    moments = [f(x) for x in (own, real) for f in (lambda x: x.mean(0), lambda x: torch.cov(x.T, correction=0))]
    assert whole[0] == pytest.approx(gan.distance(*moments), rel=1e-4)  # features are fp32
    right = (model.judge[0].head(own.float()).argmax(1) == given.valid[1]).double().mean()
    assert whole[1] == pytest.approx(float(right))


@pytest.mark.parametrize(
    ("variant", "beta1"), [("adam", 0.5), ("onebit_adam", 0.5), ("direct_zero_one_unbiased_last_beta_25_adam", 0.25)]
)
def test_both_models_train_each_with_its_optimizer(variant, beta1):
    given, run = prepared(), Run.standard("gan", variant, 0)
    model = GAN.model(given).train()
    optimizers = [build_part(run, GAN, part, ALONE) for part in GAN.parts(model)]
    owned = [{id(p) for group in o.param_groups for p in group["params"]} for o in optimizers]
    assert owned == [{id(p) for p in part.parameters()} for part in (model.discriminator, model.generator)]
    assert all(group["betas"] == (beta1, 0.999) for o in optimizers for group in o.param_groups)
    apart = [sum(sum(state.numels) for state in internals.uncompressed(o)) for o in optimizers if "last" in variant]
    assert apart == ([64 * 49 + 1, 0] if "last" in variant else [])
    judge = bits(model.judge[0].state_dict().values())
    for _ in range(2):
        before = [bits(part.parameters()) for part in GAN.parts(model)]
        items = GAN.draw(given.train, torch.Generator().manual_seed(0))
        assert float(GAN.step(model, optimizers, items)) > 0
        assert all(bits(p.parameters()) != b for p, b in zip(GAN.parts(model), before, strict=True))
    assert bits(model.judge[0].state_dict().values()) == judge


@pytest.mark.parametrize("task", ["gan", "lm", "images"])
def test_every_variant_of_the_plan_is_built_with_its_options(task):
    model = torch.nn.ModuleDict({"head": torch.nn.Linear(4, 1)}) if task == "gan" else torch.nn.Linear(4, 1)
    for run in plan([task], [MAIN], 1):
        if run.variant in LAST_LAYER:
            continue
        optimizer = build_part(run, TASKS[task], model, ALONE)
        (group, *_) = optimizer.param_groups
        if family_of(run.variant) == "sgd":
            assert {name: group[name] for name in SGD} == SGD and group["lr"] == run.lr
            continue
        assert group["betas"][0] == BETA1.get(run.variant, TASKS[task].betas[0]), run.variant
        assert all((group["lr"], group["weight_decay"]) == (run.lr, 0.01) for group in optimizer.param_groups)


@pytest.mark.parametrize(("variant", "count"), [("bits_8_adam", 8), ("bits_4_sgd", 4), ("bits_4_muon", 4)])
def test_gradients_travel_with_as_many_bits_as_a_variant_says(variant, count):
    run = Run.standard("images" if "sgd" in variant else "lm", variant, 0)
    grads = torch.randn(2, 64, 64)

    def step(transport):
        model = torch.nn.Linear(64, 64, bias=True)
        model.weight.grad, model.bias.grad = grads[transport.rank].clone(), torch.zeros(64)
        optimizer = build_part(run, TASKS[run.task], model, transport)
        optimizer.step()
        return model.weight.grad, sends(optimizer), 8 * optimizer.wire_bytes / (64 * 64 + 64)

    (own, sent, of_an_element), (other, *_) = run_virtual_ranks(2, step)
    half_a_code = grads.abs().max() / (2 ** (count - 1) - 1) / 2
    assert torch.equal(own, other) and 0 < (own - grads.mean(0)).abs().max() < half_a_code
    assert sent == "compressed" and count < of_an_element < count + 0.3


def test_muon_has_the_matrices_that_are_no_embeddings():
    """Its wrapper steps as torch's two optimizers do, and rates reach both."""
    torch.manual_seed(0)
    build = functools.partial(torch.nn.Sequential, torch.nn.Embedding(5, 4), torch.nn.Linear(4, 3))
    model, run = build(), Run.standard("lm", "muon", 0)
    twin = deepcopy(model)
    optimizer = build_part(run, TASKS["lm"], model, ALONE)
    alike = {"lr": 0.5 * run.lr, "weight_decay": 0.01}
    table, matrix, bias = twin.parameters()
    theirs = [
        torch.optim.AdamW([table, bias], **alike),
        torch.optim.Muon([matrix], adjust_lr_fn="match_rms_adamw", **alike),
    ]
    for each in optimizer.param_groups:
        each["lr"] *= 0.5
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        p.grad = q.grad = torch.randn_like(p)
    for each in (optimizer, *theirs):
        each.step()
    assert bits(model.parameters()) == bits(twin.parameters())


def test_noise_is_of_the_global_batch_and_samples_have_all_classes():
    items = GAN.draw(prepared().train, torch.Generator().manual_seed(3))
    assert torch.equal(torch.cat([share(items, rank, 2)[2] for rank in range(2)]), items[2])
    assert not torch.equal(share(items, 0, 2)[2], share(items, 1, 2)[2])
    assert set(prepared().valid[1][::4].tolist()) == set(range(10))
