"""1-bit Adam as an optimizer. Its equations: `onebit.optim.adam`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

from torch import Tensor
from typing_extensions import Unpack

from onebit.optim.adam import Adam
from onebit.optim.options import OptionArguments, shows_options
from onebit.optimizers.optimizer import OneBitOptimizer


@shows_options
class OneBitAdam(OneBitOptimizer):
    """AdamW that, once its variance has settled, averages momentum with 1 bit an element instead of gradients.

        optimizer = onebit.OneBitAdam(model.parameters(), lr=1e-3, weight_decay=0.01)
        onebit.attach(ddp_model, optimizer)        # with DDP; without it the optimizer communicates alone

    params, lr, betas, eps, weight_decay: as torch.optim.AdamW has them; betas, eps, lr and weight_decay by param group.
    process_group: a torch.distributed group, an mpi4py communicator, or None for the default group, if there is one.
    node_group: the ranks of this rank's node, which average uncompressed, and are one rank to the network: a group, or
        "auto" for the ranks of a host, where there are several hosts and each has equally many; None for one level.
    """

    algorithm: ClassVar[type[Adam]] = Adam

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        process_group: Any = None,
        node_group: Any = "auto",
        **options: Unpack[OptionArguments],
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(
            params, defaults, self.algorithm(), process_group=process_group, node_group=node_group, **options
        )
