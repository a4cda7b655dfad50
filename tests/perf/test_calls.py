"""How many calls of our own a step and a load take: few, and no more than are recorded here."""

import re

from perf import calls

MOST = {
    ("1-bit Adam", "a compressed step"): 280,
    ("1-bit LAMB", "a compressed step"): 300,
    ("0/1 Adam", "a compressed step"): 300,
    ("1-bit Adam", "onebit.load"): 1250,
    ("1-bit LAMB", "onebit.load"): 1480,
    ("0/1 Adam", "onebit.load"): 1320,
}  # a change that needs more says why


def test_a_step_and_a_load_call_no_more_than_before(capsys):
    assert calls.main([]) == 0
    table = capsys.readouterr().out
    found = {
        (name, what): [int(n) for n in numbers.split()]
        for name, what, numbers in re.findall(r"^(\S+ \S+) +(a compressed step|onebit.load) (.*)$", table, re.M)
    }
    assert found.keys() == MOST.keys()
    for row, (count, files, changes) in found.items():
        assert 0 < changes < 2 * count <= 2 * MOST[row] and 10 < files < 60
