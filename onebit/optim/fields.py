"""What an algorithm keeps from step to step, declared once. Saving, loading and its checks, the watch over the ranks
and diagnostics follow from it: no algorithm writes a line for them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Per = Literal["element", "slice", "parameter", "bit"]
Values = Literal["finite", "non-negative", "whole", "any"]


@dataclass(frozen=True)
class Field:
    """One tensor of state.

    Args:
        name: its key in `optimizer.state[p]` and in saved states.
        per: one fp32 number an "element", or an element of this rank's "slice" (with one level those are all), one fp32
            number a "parameter", or one "bit" an element, packed.
        values: what a run can leave in it. A saved state with other values is refused.
        initial: what it holds before the first step.
        required: whether a saved state must have it. If it is not required and not there, it starts from `initial`.
        always: whether every run has it. False for a field that is added only if it is needed: a state has its initial
            value if it is not there, and a load adds it if a state has another.
        saved: False for what every step computes anew, or what follows from other fields.
        same_on_all_ranks: False for what is each rank's own: `optimizer.synchronize()` makes it the same.
        shown_as: the name under which diagnostics show it, a field with one number an element by its norm.
    """

    name: str
    per: Per = "element"
    values: Values = "finite"
    initial: float = 0.0
    required: bool = True
    always: bool = True
    saved: bool = True
    same_on_all_ranks: bool = True
    shown_as: str | None = None


MOMENTUM = Field("exp_avg")
"""m. It is there in stage 2 from a save or a load until the next step begins: no message and no residual has any."""
FOLDED_MOMENTUM = Field("folded_momentum", saved=False, always=False)
"""m that was added to the residual, for those that need it until the next compressed step was taken."""
LAST_MOMENTUM = Field("last_momentum", saved=False, always=False)
"""m that local steps have begun from and no message has, until the next exchange."""
RESIDUAL = Field("residual", per="slice", required=False, same_on_all_ranks=False)
VARIANCE = Field("exp_avg_sq", values="non-negative", shown_as="variance_norm")
JOINED = Field("joined_after_step", per="parameter", values="whole", required=False, always=False)
"""The number of steps that had been taken before each parameter, in stage 1 of a run to which some were added."""
LEAST_ROOT = Field("least_root", per="parameter", values="non-negative")  # of a variance in use
ROOT_AT_ZERO = Field("root_at_zero", per="parameter", values="non-negative")  # where the variance is 0
MASTER = Field("master", values="any", required=False, always=False)  # fp32 copy of 16-bit parameters
