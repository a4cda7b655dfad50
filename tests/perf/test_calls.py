"""How many calls of our own a step takes: few, and no more than are recorded here."""

import re

from perf import calls

MOST = {
    "1-bit Adam": 280,
    "1-bit LAMB": 300,
    "0/1 Adam": 300,
}  # in a compressed step; a change that needs more says why


def test_a_step_calls_no_more_than_before(capsys):
    assert calls.main([]) == 0
    table = capsys.readouterr().out
    found = {
        name: [int(n) for n in numbers.split()]
        for name, numbers in re.findall(r"^(\S+ \S+) +a compressed step(.*)$", table, re.M)
    }
    assert found.keys() == MOST.keys()
    for name, (count, files, changes) in found.items():
        assert 0 < changes < 2 * count <= 2 * MOST[name] and 10 < files < 60
    assert table.count("onebit.load") == len(MOST)
