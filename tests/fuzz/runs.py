"""Random runs: an optimizer, a wrapper, dtypes, options, gradients that are missing or not finite, clipping,
accumulation, a GradScaler; saved after a random step, in a random way, and loaded into new objects. Each goes on as the
run that was not interrupted, bit for bit, or was refused on all ranks, and its collectives are as NCCL asks.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import logging
import os
import tempfile
import traceback
import warnings
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import onebit
from onebit.optim.sharding import local
from tests.fuzz import collectives
from tests.fuzz.mutate import Source, pick
from tests.onebit.runs import OPTIMIZERS, bits, nodes_of
from tests.ranks import group, run_ranks, run_ranks_once

STEPS = 12


class Net(nn.Module):
    """A table, whose blocks are rows, a layer that is left out of some steps, norms, and a head of one element."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.table, self.first = nn.Linear(4, 100), nn.Linear(100, 40)
        self.between, self.head = nn.Linear(40, 40), nn.Linear(40, 1)
        self.norm = nn.LayerNorm(40)
        self.to(dtype)

    def forward(self, x: Tensor, whole: bool) -> Tensor:
        x = self.norm(self.first(self.table(x[:, :4].to(self.head.weight.dtype))))
        return self.head(torch.tanh(self.between(x) if whole else x))


def drawn(source: Source) -> dict[str, Any]:
    def one(*of: Any) -> Any:
        return pick(source, of)

    kind, wrapper = one(*OPTIMIZERS, "AdamW"), one("none", "ddp", "ddp", "unused", "nodes", "fsdp")
    options = {
        "reply": one("auto", "auto", 1, "direct"), "norm": one("auto", "auto", "l1", "l2", "unbiased"),
        "scale": one("block", "block", "block", "tensor"), "chunks": one(1, 2, 3), "block_size": one(32, 64, 2048),
        "overlap": one(False, False, True), "gradient_dtype": one(None, None, torch.bfloat16),
        "zero_variance": one("floor", "hold"),
        "update_limit": one("auto", "auto", None, 0.1), "variance_floor": one(0.0, 0.01), "lr": one(1e-3, 1e-2),
        "master_weights": one(True, True, False), "check_every": one(0, 0, 3), "weight_decay": one(0.0, 0.1),
    }  # fmt: skip
    if kind == "AdamW":  # torch's, of gradients with few bits
        options = {"bits": one(1, 4, 4, 8), "reply": options["reply"]}
    elif kind == "ZeroOneAdam":
        options |= {"var_update_scaler": one(1, 2, 4), "var_freeze_step": one(None, 2, 5)}
        if one(False, False, True):
            options |= {"local_step_scaler": one(1, 2), "local_step_clipper": one(2, 4)}
    else:
        rule = onebit.FreezeRule(window=2)
        options |= {"freeze_step": one(1, 2, 4, 7, 30, rule), "bias_correction": one(True, False)}
    if wrapper == "fsdp" and kind != "AdamW":
        options["overlap"] = False
    scaler = one(False, False, False, True)
    half = torch.bfloat16 if kind == "AdamW" else torch.float16  # of which torch's AdamW makes NaN
    return {
        "kind": kind, "wrapper": wrapper, "options": options,
        "ranks": {"nodes": 4, "fsdp": 4, "none": one(1, 2, 3)}.get(wrapper, 2),
        "dtype": one(torch.float32, torch.float32, torch.bfloat16, half), "apart": one(False, False, True),
        "left_out": sorted({int(step) for step in source.integers(0, STEPS, 3)}) if one(False, True) else [],
        "clip": one(None, None, "torch" if kind == "AdamW" else "onebit", "torch"), "accumulate": one(1, 1, 2),
        "scaler": scaler,
        "bad": (int(source.integers(STEPS)), 0) if one(False, False, True) and (scaler or kind != "AdamW") else None,
        "saved": int(source.integers(1, STEPS)),
        "way": "state_dict" if kind == "AdamW" else one("onebit", "onebit", "state_dict"),
    }  # fmt: skip


@functools.cache
def mesh() -> Any:
    """Two replicas of two shards."""
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))


class Run:
    def __init__(self, case: dict[str, Any]) -> None:
        torch.manual_seed(0)
        self.case, self.net = case, Net(case["dtype"])
        self.model: nn.Module = self.net
        if case["wrapper"] in ("ddp", "unused"):
            unused = case["wrapper"] == "unused"
            self.model = DistributedDataParallel(self.net, process_group=group(), find_unused_parameters=unused)
        ranks = nodes_of(group(), 2) if case["wrapper"] == "nodes" else group()
        if case["wrapper"] == "fsdp":
            ranks = mesh().get_group("replicate")
            for module in (self.net.table, self.net.first, self.net.between, self.net.head, self.net):
                fully_shard(module, mesh=mesh()["shard"])
                module.set_force_sum_reduction_for_comms(True)  # type: ignore[attr-defined] # Gloo's average is a sum
        norms = [p for name, p in self.net.named_parameters() if "norm" in name]
        others = [p for name, p in self.net.named_parameters() if "norm" not in name]
        groups = [{"params": others}, {"params": norms, "compress": not case["apart"], "weight_decay": 0.0}]
        self.compression = None
        if case["kind"] == "AdamW":
            self.optimizer: Any = torch.optim.AdamW([{"params": each["params"]} for each in groups])
            self.compression = onebit.compress_gradients(self.model, process_group=ranks, **case["options"])
        else:
            self.optimizer = getattr(onebit, case["kind"])(groups, process_group=ranks, **case["options"])
        self.scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=3, enabled=case["scaler"])
        if self.compression is None and (self.model is not self.net or case["wrapper"] == "fsdp"):
            onebit.attach(self.model, self.optimizer)

    def train(self, rank: int, first: int, last: int) -> None:
        case, optimizer = self.case, self.optimizer
        for step in range(first, last):
            optimizer.zero_grad()
            for again in range(case["accumulate"]):
                more = again + 1 < case["accumulate"]
                ddp, ours = self.model is not self.net, self.compression is None
                hold = more and (self.model if ddp else optimizer if ours else None)
                if case["wrapper"] == "fsdp":
                    self.net.set_requires_gradient_sync(not more)  # type: ignore[operator]
                x = torch.randn(4, 5, generator=torch.Generator().manual_seed(100 * step + 10 * again + rank))
                whole = case["wrapper"] == "ddp" or step not in case["left_out"]
                with hold.no_sync() if hold else contextlib.nullcontext():
                    loss = self.model(x, whole).float().square().mean()
                    bad = case["bad"] == (step, rank) and not more
                    self.scaler.scale(loss * torch.nan if bad and not ours else loss).backward()
            if bad and ours:
                local(self.net.first.bias.grad)[0] = torch.nan  # type: ignore[arg-type]
            if self.compression is not None and not ddp:
                self.compression()
            if case["clip"] and not case["scaler"]:
                clip = optimizer.clip_grad_norm_ if case["clip"] == "onebit" else self._clipped_by_torch
                clip(0.5)
            self.scaler.step(optimizer)
            self.scaler.update()
            if step + 1 == case["saved"]:
                (self.compression or optimizer).synchronize()

    @property
    def parts(self) -> list[Any]:
        """All that has a state."""
        return [self.net, self.optimizer, self.scaler, *([] if self.compression is None else [self.compression])]

    def _clipped_by_torch(self, norm: float) -> None:
        nn.utils.clip_grad_norm_(self.net.parameters(), norm)


def resumed(rank: int, case: dict[str, Any], folder: str) -> str:
    run = Run(case)
    run.train(rank, 0, case["saved"])
    extra = {"scaler": run.scaler}
    if case["way"] == "onebit":
        onebit.save(folder, run.model, run.optimizer, extra=extra)
    state = copy.deepcopy([each.state_dict() for each in run.parts])
    run.train(rank, case["saved"], STEPS)
    again = Run(case)
    if case["way"] == "onebit":
        onebit.load(folder, again.model, again.optimizer, extra={"scaler": again.scaler})
    else:
        for each, own in zip(again.parts, state, strict=True):
            each.load_state_dict(own)
    again.train(rank, case["saved"], STEPS)
    ends = [list(map(local, each.net.parameters())) for each in (run, again)]
    if bits(ends[0]) != bits(ends[1]):
        raise AssertionError(f"the resumed run ends elsewhere, from step {case['saved']} of {STEPS} on")
    if not all(bool(torch.isfinite(p).all()) for p in ends[0]):
        raise AssertionError("parameters are not finite")
    return f"goes on, {'compressing' if (run.compression or run.optimizer).compressing else 'in stage 1'}"


def work(rank: int, size: int, case: dict[str, Any], folder: str) -> tuple[str, collectives.Seen]:
    """What came of a case, which is wrong where it begins with WRONG, and the collectives."""
    logging.getLogger("onebit").setLevel(logging.ERROR)
    os.environ["ONEBIT_QUIET"] = "1"
    with warnings.catch_warnings(), collectives.recorded() as seen:
        warnings.simplefilter("ignore")
        try:
            return resumed(rank, case, folder), seen
        except (ValueError, TypeError) as error:
            return f"refused: {error!s:.40}", seen
        except Exception:
            return f"WRONG {traceback.format_exc()}", seen


class Runs:
    """Runs of ranks that are the same for all cases. Sharded parameters are written by all of a default group."""

    def case(self, source: Source) -> str:
        case = drawn(source)
        with tempfile.TemporaryDirectory() as folder:
            if case["wrapper"] == "fsdp":
                answers = run_ranks_once(case["ranks"], work, (case, folder))
            else:
                answers = run_ranks(case["ranks"], work, case, folder)
        ends = [end for end, _ in answers]
        wrong = ends if len(set(ends)) > 1 else [end for end in ends[:1] if end.startswith("WRONG")]
        wrong += collectives.faults([seen for _, seen in answers])
        if wrong:
            raise AssertionError("\n".join([str(case), *wrong]))
        return ends[0].partition(":")[0]
