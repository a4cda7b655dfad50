"""Whole runs in `onebit plan`: steps of each kind by the oracle's schedules, times what each takes."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from onebit.cli import main as cli
from onebit.cli.plan.model import (
    Cluster,
    Model,
    local_step,
    pass_seconds,
    sent_compressed,
    sent_uncompressed,
    stage_1,
    stage_2,
    uncompressed,
)
from onebit.cli.plan.runs import runs
from tests.oracle.zero_one import full_steps, sync_steps

SLOW = Cluster(gpus=16, gpus_per_node=4, network=8e9, latency=1e-3, intra=4e9, intra_latency=1e-4, memory=1e11)
BERT = Model(340_000_000, 2, 0.036, 0.061, overlap="none", steps=3000, warmup=0.2)


@pytest.mark.parametrize("levels", [1, 2])
def test_a_run_is_its_steps(levels):
    model = replace(BERT, levels=levels)
    found, zero_one = runs(model, SLOW), replace(model, optimizer="zero_one")
    fast, (_, sent) = stage_2(zero_one, SLOW), sent_uncompressed(model, SLOW)
    packed = sent_compressed(model, SLOW, fast.chunks)[1]
    full = len(full_steps(3000, 4))
    run = found["0/1 Adam"]
    assert (run.uncompressed, run.compressed, run.local) == (full, 3000 - full, 0)
    assert run.seconds == pytest.approx(full * stage_1(zero_one, SLOW).total + (3000 - full) * fast.total)
    assert run.sent == pytest.approx(full * sent + (3000 - full) * packed)
    full = len(full_steps(3000, 4, 600))
    syncs = [step for step in sync_steps(3000, 600, 200, 16) if step > 600]
    run = found["and local steps"]
    assert (run.uncompressed, run.compressed, run.local) == (full, 600 - full + len(syncs), 2400 - len(syncs))
    alone = local_step(zero_one, SLOW).total
    assert run.seconds == pytest.approx(
        full * stage_1(zero_one, SLOW).total + run.compressed * fast.total + run.local * alone
    )
    assert run.sent == pytest.approx(full * sent + run.compressed * packed)
    run = found["1-bit Adam"]
    assert (run.uncompressed, run.compressed) == (600, 2400)
    assert run.seconds == pytest.approx(600 * stage_1(model, SLOW).total + 2400 * stage_2(model, SLOW).total)
    assert found["fp16"].seconds == pytest.approx(3000 * uncompressed(model, SLOW, 2).total)
    assert found["fp32"].sent == pytest.approx(2 * found["fp16"].sent)


def test_a_local_step_sends_nothing_between_nodes():
    slower = replace(SLOW, network=1e6, latency=1.0)
    two = replace(BERT, levels=2)
    assert local_step(BERT, SLOW) == local_step(BERT, slower) and local_step(two, SLOW) == local_step(two, slower)
    update = sum(pass_seconds(name, BERT.elements, SLOW, 2) for name in ("zero_one_local", "scan"))
    assert local_step(BERT, SLOW).total == pytest.approx(0.036 + 0.061 + update)
    mean = 2 * 3 / 4 * 680e6 / 4e9 + 6 * 1e-4
    assert local_step(two, SLOW).total == pytest.approx(0.036 + 0.061 + update + mean)


def test_lamb_has_no_such_runs():
    assert list(runs(replace(BERT, optimizer="lamb"), SLOW)) == ["fp32", "fp16", "1-bit LAMB"]


def test_the_command_shows_runs(capsys):
    asked = ["--model=bert-large", "--cluster=ethernet-v100", "--gpus=64", "--steps=3000", "--var-update-scaler=2"]
    assert cli.main(["plan", *asked, "--local-step-clipper=4"]) == 0
    lines = capsys.readouterr().out.splitlines()
    start = lines.index(next(line for line in lines if line.startswith("a run of 3,000 steps")))
    assert lines[start].split()[5:] == ["fp32", "fp16", "1-bit", "Adam", "0/1", "Adam", "and", "local", "steps"]
    full = [str(len(full_steps(3000, 2, last))) for last in (None, 600)]
    assert lines[start + 1].split()[2:] == ["3,000", "3,000", "454", *full]
    assert lines[start + 6].split()[:5] == ["times", "fp16's", "speed", "0.51", "1.00"]
    assert cli.main(["plan", *asked, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["runs"]["0/1 Adam"]["uncompressed"] == int(full[0])


@pytest.mark.parametrize("name", ["steps", "var_update_scaler", "local_step_clipper"])
@pytest.mark.parametrize("value", [0, 1.5, 10**12])
def test_numbers_that_cannot_be(name, value):
    with pytest.raises(ValueError, match=f"{name} is .*: it is a whole number from 1 to 10,000,000"):
        replace(BERT, **{name: value})
