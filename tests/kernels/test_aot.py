"""Every Triton kernel compiles for every target with no GPU present; the PTX is read for wide accesses and spills.

A block of 2048 fp32 elements on w warps is 2048 / (32 w) elements a thread, so each fp32 stream takes
2048 / (128 w) accesses of 16 bytes. Compiling needs kernels that are not interpreted, hence a process of its own.
"""

import json
import os
import subprocess
import sys

import pytest

from tests.limits import HUNG

BLOCK = 2048
TARGETS = ["sm_80", "sm_90", "sm_100", "gfx942"]
KERNELS = {
    "compress_kernel",
    "average_kernel",
    "decode_kernel",
    "scan_kernel",
    "adam_warmup_kernel",
    "adam_update_kernel",
    "lamb_moments_kernel",
    "lamb_apply_kernel",
    "lamb_statistics_kernel",
    "zero_one_full_kernel",
    "zero_one_update_kernel",
    "zero_one_local_kernel",
    "zero_one_sync_kernel",
    "restore_kernel",
}
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
    "zero_one_local_kernel": (["g", "v", "m", "x", "e"], ["m", "x", "e"]),
    "zero_one_sync_kernel": (["v", "anchor"], ["x", "anchor", "m"]),
    "restore_kernel": ([], []),  # rarely does anything
}


@pytest.fixture(scope="module")
def report():
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "onebit.kernels.gpu.aot", *TARGETS]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=HUNG)
    assert result.returncode == 0, result.stderr[-4000:]
    return json.loads(result.stdout)


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
def test_every_kernel_compiles_in_every_variant(report, target):
    compiled = {(row["kernel"], row["variant"]) for row in report if row["target"] == target}
    variants = {variant for _, variant in compiled}
    assert len(variants) >= 6
    assert compiled == {(kernel, variant) for kernel in KERNELS for variant in variants}


@pytest.mark.slow
@pytest.mark.parametrize("target", [t for t in TARGETS if t.startswith("sm_")])
def test_no_kernel_spills_registers(report, target):
    spilled = {(row["kernel"], row["variant"]): row["spilled"] for row in report if row["target"] == target}
    assert spilled
    assert not any(spilled.values()), spilled


@pytest.mark.slow
@pytest.mark.parametrize("kernel", sorted(KERNELS))
@pytest.mark.parametrize("target", [t for t in TARGETS if t.startswith("sm_")])
@pytest.mark.parametrize("variant", ["fp32", "fp32, masked", "fp32, tensor scale, masked, scaled"])
def test_every_fp32_stream_moves_16_bytes_an_access(report, variant, target, kernel):
    rows = [r for r in report if (r["target"], r["kernel"], r["variant"]) == (target, kernel, variant)]
    assert rows
    loads, stores = STREAMS[kernel]
    for row in rows:
        accesses = BLOCK // (128 * row["warps"])
        assert (row["loads"], row["stores"]) == (len(loads) * accesses, len(stores) * accesses)
