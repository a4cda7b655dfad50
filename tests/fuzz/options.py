"""Random arguments of everything public that takes numbers: a ValueError or TypeError, or what works."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import onebit
from onebit.kernels.data.layout import Layout
from onebit.kernels.data.wire import Format
from tests.fuzz.mutate import ERRORS, Source, junk, pick

_SENSIBLE: dict[str, tuple[Any, ...]] = {
    "lr": (1e-3, 0, 0.1, torch.tensor(1e-2)),
    "betas": ((0.9, 0.999), [0.0, 0.0], (0.5, 0.9)),
    "eps": (1e-8, 0.0, 1.0),
    "weight_decay": (0.0, 0.1),
    "freeze_step": (0, 1, 2, "auto"),
    "freeze_threshold": (0.96, 0.5),
    "freeze_window": (None, 1, 3, 17),
    "bias_correction": (True, False),
    "zero_variance": ("floor", "hold"),
    "variance_floor": (0.0, 0.01, 1.0),
    "scale": ("block", "tensor"),
    "norm": ("auto", "l1", "l2", "unbiased", "rotated"),
    "block_size": (32, 64, 2048),
    "chunks": (1, 2, 3, "auto"),
    "master_weights": (True, False),
    "overlap": (False, True),
    "check_every": (0, 1, 1000),
    "on_divergence": ("raise", "broadcast"),
    "gradient_dtype": (None, torch.bfloat16, torch.float16),
}
_LAMB: dict[str, tuple[Any, ...]] = {
    "coeff_beta": (0.9, 0.0),
    "min_coeff": (0.01, 0.1),
    "max_coeff": (0.3, 10.0),
    "factor_min": (0.5,),
    "factor_max": (4.0,),
    "factor_threshold": (0.1,),
    "ratio": ("variance", "denominator"),
}
_FREE = {"bias_correction", "master_weights"}  # whatever is true or false


class Arguments:
    def case(self, source: Source) -> str:
        work = pick(source, (_optimizer, _optimizer, _group, _all_reduce, _layout))
        try:
            what = work(source)
        except ERRORS as error:
            if not str(error):
                raise AssertionError("an error without a word") from error
            return f"{work.__name__[1:]}, {type(error).__name__}"
        return f"{work.__name__[1:]}, {what}"


def _drawn(source: Source, names: dict[str, tuple[Any, ...]], wild: float) -> dict[str, Any]:
    chosen = [name for name in names if source.random() < 0.4]
    return {
        name: junk(source) if source.random() < wild and name not in _FREE else pick(source, names[name])
        for name in chosen
    }


def _parameters(source: Source) -> list[nn.Parameter]:
    shapes = [tuple(source.integers(0, 9, size=int(source.integers(0, 3)))) for _ in range(int(source.integers(1, 4)))]
    dtype = pick(source, (torch.float32, torch.float32, torch.bfloat16, torch.float16))
    return [nn.Parameter(torch.randn([int(n) for n in shape]).to(dtype)) for shape in shapes]


def _optimizer(source: Source) -> str:
    kind = pick(source, (onebit.OneBitAdam, onebit.OneBitLamb, onebit.ZeroOneAdam))
    names = {name: of for name, of in _SENSIBLE.items() if name not in kind.without_options}
    names |= _LAMB if kind is onebit.OneBitLamb else {}
    params = _parameters(source)
    optimizer = kind(params, **_drawn(source, names, pick(source, (0.0, 0.3))))
    for _ in range(int(source.integers(0, 4))):
        for p in params:
            p.grad = None if source.random() < 0.1 else torch.randn_like(p)
        optimizer.step()
    if optimizer.compressing:
        optimizer.diagnostics()
    return "accepted"


def _group(source: Source) -> str:
    params, more = _parameters(source), _parameters(source)
    optimizer = onebit.OneBitAdam(params, block_size=32)
    before = [dict(group) for group in optimizer.param_groups]
    names = {name: _SENSIBLE[name] for name in ("lr", "betas", "eps", "weight_decay")}
    group: Any = {"params": more, **_drawn(source, names, 0.4)}
    if source.random() < 0.1:
        group = junk(source)
    elif source.random() < 0.2:
        group["params"] = junk(source)
    try:
        optimizer.add_param_group(group)
    except ERRORS:
        if [dict(each) for each in optimizer.param_groups] != before:
            raise AssertionError("a refused group was added") from None
        raise
    finally:
        for p in params:
            p.grad = torch.randn_like(p)
        optimizer.step()
    return "accepted"


def _all_reduce(source: Source) -> str:
    """Not of any numel: memory is another matter."""
    few = (1, 7, [3, 5], [0, 4], 100, 0, -1, 10**400, 1.5, float("nan"), None, "x", b"", {}, [], [[]], [None], [2.0, 1])
    names = {name: _SENSIBLE[name] for name in ("scale", "norm", "block_size", "chunks")}
    average = onebit.CompressedAllReduce(pick(source, few), **_drawn(source, names, 0.2))
    average([torch.randn(n) for n in average.numels])
    return "accepted"


def _layout(source: Source) -> str:
    sensible = {"block_size": (32, 64), "ranks": (1, 2), "chunks": (1, 2)}
    given = {name: pick(source, (*values, junk(source))) for name, values in sensible.items()}
    layout = Layout([int(n) for n in source.integers(0, 2**37, size=3)], **given)
    form = Format(layout, pick(source, ("block", "tensor", junk(source))), pick(source, ("l1", junk(source))))
    if form.nbytes % 16 or (layout.shards[1:] <= layout.shards[:-1]).any():
        raise AssertionError("a shard without a block")
    return "accepted"
