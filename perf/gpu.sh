#!/usr/bin/env bash
# Every check and benchmark that needs a GPU, in one go: the kernels' tests on the device, several NCCL ranks on one
# GPU, the kernels' tuning and benchmark. Records go to the folder named, perf/results by default.
#     bash perf/gpu.sh [OUT]
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
out=${1:-perf/results}
python=${PYTHON:-python3}
mkdir -p "$out"
out=$(cd "$out" && pwd)
"$python" -c 'import torch, sys; sys.exit(not torch.cuda.is_available())' ||
    { echo "error: no GPU that torch can use: run this where torch.cuda.is_available()"; exit 2; }

# The three folders under one name, as `make types` links them: no install needed, and none gets in the way.
links=$(mktemp -d)
trap 'rm -rf "$links"' EXIT
mkdir "$links/onebit"
ln -s "$PWD"/onebit/* "$PWD/kernels" "$PWD/collectives" "$links/onebit/"
ln -s "$PWD"/{tests,perf,pyproject.toml} "$links/"
cd "$links"

failed=0
"$python" -m pytest -q -p no:cacheprovider tests/kernels tests/collectives/test_gpu.py \
    tests/onebit/optim/test_gpu.py tests/perf/test_kernels_benchmark.py 2>&1 | tee "$out/gpu-tests.log" || failed=1
"$python" -m onebit tune --device cuda 2>&1 | tee "$out/gpu-tune.log" || failed=1
"$python" -m perf.kernels --device cuda --out "$out" 2>&1 | tee "$out/gpu-kernels.log" || failed=1
exit "$failed"
