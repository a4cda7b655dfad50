"""Triton kernels compile with no GPU present; the PTX is read for wide accesses and spills.

`python -m onebit.kernels.gpu.aot` compiles every kernel in every variant for every target, which takes minutes. Here is
every kernel once, and what reads and writes messages in the variants that have branches of their own. A block of 2048
elements on w warps is 2048 / (32 w) a thread, so each fp32 stream takes 2048 / (128 w) accesses of 16 bytes.
"""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

from onebit.kernels import gpu
from onebit.kernels.gpu import aot
from tests.limits import HUNG

BLOCK = 2048
# fp32 streams of an all-fp32 model with packed momentum that are read and written in wide accesses.
STREAMS = {
    "compress_kernel": (["g", "c"], ["c"]),
    "average_kernel": (["E"], ["E"]),
    "decode_kernel": ([], ["x"]),
    "scan_kernel": (["g"], []),
    "adam_warmup_kernel": (["g", "m", "v", "x"], ["m", "v", "x"]),
    "adam_update_kernel": (["d", "x"], ["x"]),
    "lamb_moments_kernel": (["g", "m", "v", "x"], ["m", "v"]),
    "lamb_apply_kernel": (["m", "v", "x"], ["x"]),
    "lamb_statistics_kernel": (["v", "d"], ["v"]),
    "zero_one_full_kernel": (["g", "v", "x", "e"], ["v", "x", "e"]),
    "zero_one_update_kernel": (["v", "x"], ["x"]),
    "zero_one_length_kernel": (["g", "v", "m"], []),
    "zero_one_local_kernel": (["g", "v", "m", "x", "e"], ["m", "x", "e"]),
    "zero_one_sync_kernel": (["v", "anchor"], ["x", "anchor", "m"]),
    "restore_kernel": ([], []),  # rarely does anything
    "step_squares_kernel": ([], []),
    "step_limit_kernel": ([], []),
}
DENSE = "fp32, tensor scale, l2, dense momentum"
ON_MESSAGES = {"compress_kernel", "average_kernel", "decode_kernel", "lamb_statistics_kernel"}
VARIANTS = {
    "fp32": set(STREAMS),
    "fp32, tensor scale, masked, scaled": ON_MESSAGES,
    "fp32, messages of 2 ranks": ON_MESSAGES,
    DENSE: {"zero_one_full_kernel"},
}
WIDE = ("fp32", "fp32, tensor scale, masked, scaled", DENSE)  # others unpack what they read
CODE = rf"""
import json
import re
import torch
from onebit.kernels.gpu import aot
variants = {VARIANTS!r}
rows = aot.report(["sm_90"], lambda variant, kernel: kernel in variants.get(variant, ()))
rows += aot.report(["gfx942"], lambda variant, kernel: (variant, kernel) == ("fp32", "compress_kernel"))
from onebit.kernels import gpu
from onebit.kernels.data.layout import MOST_BLOCK_SIZE
from onebit.kernels.gpu.launch import recorded
from onebit.kernels.tuning.workload import Workload
with recorded() as launches:
    for each in Workload([20_000], block_size=MOST_BLOCK_SIZE, masked=True).passes(gpu).values():
        each.run()
wanted = ("lamb_moments_kernel", "zero_one_local_kernel")
those = [each for each in launches if each.kernel.__name__ in wanted]
largest = [aot.compile_launch(each, "sm_90") for each in those]
spilled = [aot.assembled(each).spilled for each in largest]
free = {{name for each in launches for name, p in zip(each.kernel.arg_names, each.kernel.params)
         if p.do_not_specialize_on_alignment}}
said = [len(re.findall(r"!tt.ptr<\w+> {{tt.divisibility = 16", each.asm["ttir"])) for each in largest]
aligned = [sum(isinstance(value, torch.Tensor) and name not in free for name, value in each.arguments.items())
           for each in those]
print(json.dumps([rows, spilled, sorted(free), [said, aligned]]))
"""


def test_kernels_compile_without_spills_and_every_fp32_stream_moves_16_bytes_an_access():
    """It takes a process of its own, whose kernels are not interpreted."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    result = subprocess.run([sys.executable, "-c", CODE], env=environment, capture_output=True, text=True, timeout=HUNG)
    assert result.returncode == 0, result.stderr[-4000:]
    (*rows, of_amd), of_largest_blocks, any_alignment, (said, aligned) = json.loads(result.stdout)
    assert of_largest_blocks == [0, 0] and said == aligned and min(said) > 3
    assert set(any_alignment) >= {"flags", "sums", "counts", "live", "residual_partial", "least_root"}
    assert (of_amd["target"], of_amd["kernel"]) == ("gfx942", "compress_kernel")
    assert {row["target"] for row in rows} == {"sm_90"}
    for variant, kernels in VARIANTS.items():
        assert {row["kernel"] for row in rows if row["variant"] == variant} == kernels
    for row in rows:
        assert row["spilled"] == 0, row
        if row["variant"] in WIDE:
            loads, stores = STREAMS[row["kernel"]]
            loads = [*loads, "m"] if row["variant"] == DENSE else loads
            accesses = BLOCK // (128 * row["warps"])
            assert (row["loads"], row["stores"]) == (len(loads) * accesses, len(stores) * accesses), row


def test_variants_are_what_their_names_say():
    for name, work in aot.variants().items():
        found = {"masked": work.storage.masked, "scaled": work.scaled, "kept": work.storage.kept}
        assert found == {each: each in name for each in found}, name


def test_no_condition_chains_more_than_two():
    """Which Triton 3.3 can't compile."""
    for path in Path(gpu.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and any(
                "jit" in ast.unparse(d) or "entry" in ast.unparse(d) for d in node.decorator_list
            ):
                chained = [each.lineno for each in ast.walk(node) if isinstance(each, ast.BoolOp) and each.values[2:]]
                assert not chained, f"{path.name}, lines {chained}"
