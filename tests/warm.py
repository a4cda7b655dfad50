"""Imported once, by the process that ranks are forked from: a fork has the compiled loops in memory, and shares with it
what the collector of garbage does not write to."""

import gc

from onebit.kernels import cpu
from onebit.kernels.tuning.workload import Workload

for _each in Workload([100]).passes(cpu).values():
    _each.run()
gc.collect()
gc.freeze()
