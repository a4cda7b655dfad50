"""What onebit computes, in float64 numpy, written from the specification and the papers alone.

Nothing here imports onebit. Values are lists of float64 arrays, one a parameter, or one flat array that
`Layout` makes of them. Functions return new arrays and change none of their arguments, except
`SimulatedAllReduce`, which keeps the residuals of N ranks between calls.

A bit is unsure where |c| is within rounding of 0: every `Message` keeps its c, so that a test can leave
such elements out. `Message.sure(tolerance)` says which are safe to compare.
"""

from tests.oracle.adam import (
    Hyper,
    adamw_step,
    averaged_momentum,
    freeze,
    gradient,
    local_momentum,
    moments,
    onebit_adam_step,
    onebit_adam_update,
    zeros,
)
from tests.oracle.codec import (
    Arrays,
    Gradients,
    Layout,
    Message,
    SimulatedAllReduce,
    blocks,
    compress,
    compress_two_bits,
    magnitude,
    mixed,
    packed,
    rotated_back,
    rotation,
    sigma,
    turned,
)
from tests.oracle.lamb import (
    LambFrozen,
    LambHyper,
    clipped_ratio,
    coefficient,
    debiased,
    freeze_lamb,
    lamb_step,
    momentum_scaling,
    onebit_lamb_step,
    onebit_lamb_update,
    variance_ratio,
)

__all__ = [
    "Arrays", "Gradients", "Hyper", "LambFrozen", "LambHyper", "Layout", "Message", "SimulatedAllReduce", "adamw_step",
    "averaged_momentum", "blocks", "clipped_ratio", "coefficient", "compress", "compress_two_bits", "debiased",
    "freeze", "freeze_lamb", "gradient", "lamb_step", "local_momentum", "magnitude", "mixed", "moments",
    "momentum_scaling", "onebit_adam_step", "onebit_adam_update", "onebit_lamb_step", "onebit_lamb_update", "packed",
    "rotated_back", "rotation", "sigma", "turned", "variance_ratio", "zeros",
]  # fmt: skip
