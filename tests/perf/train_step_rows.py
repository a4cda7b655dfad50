"""Rows and runs of the training-step benchmark, made up for tests."""

from perf.train_step.measure import Row, Run
from perf.train_step.variants import OURS

ABOUT = {"device": "Some CPU", "cpu_count": 2, "ranks": 4, "backend": "gloo", "elements": 9, "load_before": 0.5}


def row(variant, seconds, rate="25mbit", share=0.93, nbytes=19e6, **other):
    local = (1 - share) * seconds
    parts = {"forward": 0.2 * local, "backward": 0.5 * local, "step": 0.3 * local, "all_reduce": share * seconds}
    return Row(rate, variant, seconds, (seconds,), bytes=nbytes, **{**parts, **other})


def run(variant, losses, seed=0, steps=100, freeze=20):
    curve = tuple((round(i * steps / (len(losses) - 1)), loss) for i, loss in enumerate(losses))
    return Run(variant, seed, steps, freeze, 1e-3, curve, losses[-1])


ROWS = [row("fp32", 8.0, nbytes=38e6), row("fp16", 4.0), row("powersgd-1", 0.6, share=0.5), row(OURS, 0.7, share=0.5)]
ROWS += [row("adam-1", 9.0)]
RUNS = [run("fp32", [4.5, 3.0, 2.0]), run("powersgd-1", [4.5, 3.2, 2.5]), run(OURS, [4.5, 3.0, 2.5, 2.2, 2.0])]
