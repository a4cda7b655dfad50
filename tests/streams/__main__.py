"""python -m tests.streams

Every scenario on the simulated device, then every call that orders, left out: which scenario finds it, by which fault.
The exit status is 1 where a scenario has a fault, or none finds a call that is left out.
"""

from __future__ import annotations

import sys
import time

from tests.streams.runs import clean, found_by, ranks, why_elsewhere
from tests.streams.scenarios import SCENARIOS
from tests.streams.sites import calls


def main() -> int:
    start, wrong, left_out = time.monotonic(), 0, 0
    with ranks():
        for name in SCENARIOS:
            for fault in clean(name)[0]:
                wrong += 1
                print(f"{name}: {fault}")
        for call in calls():
            if why := why_elsewhere(call):
                print(f"{call}\n    not here: {why}")
                continue
            left_out += 1
            found = found_by(call)
            wrong += found is None
            print(f"{call}\n    {'NOT FOUND' if found is None else f'{found[0]}: {found[1]}'}")
    print(f"{len(SCENARIOS)} scenarios, {left_out} calls left out in {time.monotonic() - start:.0f} s: {wrong} wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
