"""1-bit LAMB as an optimizer. Its equations: `onebit.optim.lamb`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

from torch import Tensor
from typing_extensions import Unpack

from onebit.optim.lamb import Lamb, Ratio
from onebit.optim.options import OptionArguments, shows_options
from onebit.optimizers.optimizer import OneBitOptimizer


@shows_options
class OneBitLamb(OneBitOptimizer):
    """LAMB that, once its coefficients have settled, averages momentum with 1 bit an element instead of gradients.

    params, lr, betas, eps, weight_decay: as torch.optim.AdamW has them; betas, eps, lr and weight_decay by param group.
    coeff_beta: how the coefficients of stage 1 are averaged. min_coeff, max_coeff: their bounds in stage 1.
    factor_min, factor_max, factor_threshold: bounds of the ratio in stage 2, and of its relative change in a step.
    ratio: of the variances (Algorithm 1, line 17), or of the denominators, as DeepSpeed computes it.
    process_group: a torch.distributed group, an mpi4py communicator, or None for the default group, if there is one.
    node_group: the ranks of this rank's node, which average uncompressed, and are one rank to the network: a group, or
        "auto" for the ranks of a host, where there are several hosts and each has equally many; None for one level.
    """

    algorithm: ClassVar[type[Lamb]] = Lamb

    def __init__(
        self, params: Iterable[Any], lr: float | Tensor = 1e-3, betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8, weight_decay: float = 0.0, *,
        coeff_beta: float = 0.9, min_coeff: float = 0.01, max_coeff: float = 0.3,
        factor_min: float = 0.5, factor_max: float = 4.0, factor_threshold: float = 0.1, ratio: Ratio = "variance",
        process_group: Any = None, node_group: Any = "auto", **options: Unpack[OptionArguments],
    ) -> None:  # fmt: skip
        lamb = self.algorithm(
            coeff_beta=coeff_beta, min_coeff=min_coeff, max_coeff=max_coeff, factor_min=factor_min,
            factor_max=factor_max, factor_threshold=factor_threshold, ratio=ratio,
        )  # fmt: skip
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, defaults, lamb, process_group=process_group, node_group=node_group, **options)
