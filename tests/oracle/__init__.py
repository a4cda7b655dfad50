"""What onebit computes, in float64 numpy, written from the specification and the papers alone: nothing imports onebit.

Values are lists of float64 arrays, one a parameter, or one flat array that `Layout` makes of them. Functions return new
arrays and change no argument; `SimulatedAllReduce` keeps the residuals of N ranks between calls. A bit is unsure where
|c| is within rounding of 0: `Message.sure(tolerance)` says which elements are safe to compare.
"""

from tests.oracle.adam import *  # noqa: F403
from tests.oracle.codec import *  # noqa: F403
from tests.oracle.lamb import *  # noqa: F403
