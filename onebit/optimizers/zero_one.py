"""0/1 Adam as an optimizer. Its equations: `onebit.optim.zero_one`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar, NamedTuple

from torch import Tensor
from typing_extensions import Unpack

from onebit.kernels.data.checks import is_whole
from onebit.optim.algorithm import Kind
from onebit.optim.options import OptionArguments, shows_options
from onebit.optim.schedule import SyncSchedule, VarianceSchedule
from onebit.optim.zero_one import ZeroOne
from onebit.optimizers.optimizer import OneBitOptimizer


class Schedule(NamedTuple):
    """What the coming steps are."""

    step: int  # the number of the coming one
    kind: Kind
    next_full_step: int | None  # the next after it
    next_sync: int | None  # with local steps: this one or the next after it with which ranks agree again


@shows_options
class ZeroOneAdam(OneBitOptimizer):
    """AdamW that averages gradients at a few steps, ever farther apart, and momentum at all others, with 1 bit each.

        optimizer = onebit.ZeroOneAdam(model.parameters(), lr=1e-3, weight_decay=0.01)
        onebit.attach(ddp_model, optimizer)        # with DDP; without it the optimizer communicates alone

    The first var_update_scaler + 1 steps are AdamW's. Then compressed steps begin, with var_update_scaler
    full-precision ones 2 steps apart, as many 4 steps apart, and so on: of 1,200 steps 33, where it is 4.

    With local_step_scaler ranks do not communicate in every step after var_freeze_step: each moves by its own gradient
    until the next exchange (`schedule`, `synchronized`), after which all have the same parameters again.

    params, lr, betas, eps, weight_decay: as torch.optim.AdamW has them; betas, eps, lr and weight_decay by param group.
    var_update_scaler: how many full-precision steps come before their distance doubles.
    var_freeze_step: no full-precision step comes after this one; None for no end.
    local_step_scaler: after var_freeze_step so many steps are compressed ones; after as many again the distance between
        two exchanges doubles. None: every step communicates.
    local_step_clipper: the most steps from one exchange to the next.
    process_group: a torch.distributed group, an mpi4py communicator, or None for the default group, if there is one.
    node_group: the ranks of this rank's node, which average uncompressed, and are one rank to the network: a group, or
        "auto" for the ranks of a host, where there are several hosts and each has equally many; None for one level.
    """

    without_options: ClassVar[frozenset[str]] = frozenset({"freeze_step"})

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        var_update_scaler: int = 4,
        var_freeze_step: int | None = None,
        local_step_scaler: int | None = None,
        local_step_clipper: int = 16,
        process_group: Any = None,
        node_group: Any = "auto",
        **options: Unpack[OptionArguments],
    ) -> None:
        if not is_whole(var_update_scaler, least=1):
            raise ValueError(
                f"var_update_scaler={var_update_scaler!r}: it is how many full-precision steps come before their "
                f"distance doubles, 1 or more"
            )
        if var_freeze_step is not None and not is_whole(var_freeze_step, least=1):
            raise ValueError(
                f"var_freeze_step={var_freeze_step!r}: it is the last step that may update the variance, 1 or more, "
                f"or None"
            )
        schedule = VarianceSchedule(var_update_scaler, var_freeze_step)
        self._algorithm = ZeroOne(schedule, _syncs(var_freeze_step, local_step_scaler, local_step_clipper))
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(
            params, defaults, self._algorithm, process_group=process_group, node_group=node_group, **options
        )

    @property
    def schedule(self) -> Schedule:
        """What the coming step is, the next full-precision one after it, and the next exchange. Reading it waits for
        the device."""
        algorithm, coming = self._algorithm, self.steps + 1
        syncs = algorithm.syncs
        return Schedule(
            coming,
            algorithm.kind(coming),
            algorithm.schedule.next_full(coming),
            None if syncs is None else syncs.next_sync(coming - 1),
        )


def _syncs(after: int | None, scaler: int | None, clipper: int) -> SyncSchedule | None:
    if not is_whole(clipper, least=1):
        raise ValueError(
            f"local_step_clipper={clipper!r}: it is the most steps from one exchange to the next, 1 or more"
        )
    if scaler is None:
        return None
    if not is_whole(scaler, least=1):
        raise ValueError(
            f"local_step_scaler={scaler!r}: it is how many steps come before the distance between two exchanges "
            f"doubles, 1 or more, or None for no local steps"
        )
    if after is None:
        raise ValueError(
            f"local_step_scaler={scaler} without var_freeze_step: ranks that move alone need a variance that stays as "
            f"it is. Give var_freeze_step=N, after which local steps may begin"
        )
    return SyncSchedule(after, scaler, clipper)
