#!/usr/bin/env bash
# Every check and benchmark that needs a GPU, by stages that fit ten minutes each, the most important first:
#     link       a training step of GPT-2 small (random tokens, bf16 autocast) and an all-reduce of two ranks that share
#                the GPU, over NCCL on links of 1 and 10 Gbit/s (paced sockets: any user); four ranks: two nodes of two,
#                HSDP 2 x 2
#     learn      GPT-2 small learns, 8 ranks as threads on the GPU; stops in time, and goes on when started again. Wants
#                build/learn/tokens.xz: python -m perf.learn --prepare
#     check      the kernels' tests on the device, in parallel
#     sanitizer  compute-sanitizer on odd sizes, where it is installed
#     kernels    every pass in fp32 and bf16 against a copy, after tuning; ncu on each kernel, where it works; an
#                optimizer's step beside AdamW's
#     ranks      2 to 4 ranks over NCCL and Gloo on the one GPU: optimizers, DDP, overlap, the hook, ranks that leave and
#                join, the examples
#     step       a training step of two ranks over NCCL: on links of 1 and 10 Gbit/s, where root, ip and tc are there; else
#                on loopback, which tells if it is right, and is no figure for a network
#     profile    one device's step beside AdamW(fused): time, memory at each stage
#
#     bash perf/gpu.sh [--rehearse] [--out DIR] STAGE... | all
#
# Records and logs go to DIR, perf/results by default; DIR/gpu-stages.txt has how each command ended. --rehearse runs the
# same commands on a CPU, small, where there is no GPU; tests that need one are only collected.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
root=$PWD out=perf/results device=cuda rehearse= stages=()
python=${PYTHON:-python3}
while [ $# -gt 0 ]; do
    case $1 in
        --rehearse) rehearse=1 device=cpu ;;
        --out) out=${2:?--out needs a folder}; shift ;;
        all) stages+=(link learn check sanitizer kernels ranks step profile) ;;
        link | learn | check | sanitizer | kernels | ranks | step | profile) stages+=("$1") ;;
        *) echo "error: no stage is called '$1': link, learn, check, sanitizer, kernels, ranks, step, profile or all" >&2; exit 2 ;;
    esac
    shift
done
[ ${#stages[@]} -gt 0 ] || { sed -n '2,/^set/p' "${BASH_SOURCE[0]}" | sed '$d; s/^# \?//'; exit 2; }
mkdir -p "$out" && out=$(cd "$out" && pwd)
[ "$rehearse" ] || "$python" -c 'import torch, sys; sys.exit(not torch.cuda.is_available())' ||
    { echo "error: no GPU that torch can use: run this where torch.cuda.is_available()" >&2; exit 2; }

# The three folders under one name, as `make types` links them: no install needed, and none gets in the way.
links=$(mktemp -d)
trap 'rm -rf "$links"' EXIT
mkdir "$links/onebit"
ln -s "$root"/onebit/* "$root/kernels" "$root/collectives" "$links/onebit/"
ln -s "$root"/{tests,perf,examples,pyproject.toml} "$links/"
cd "$links"
export PYTHONPATH=$links${PYTHONPATH:+:$PYTHONPATH}

failed=0
run() { # NAME COMMAND...: its output to a log, at most nine and a half minutes
    local name=$1 since=$SECONDS status
    shift
    timeout 570 "$@" 2>&1 | tee "$out/gpu-$name.log"
    status=${PIPESTATUS[0]}
    echo "$name: exit $status after $((SECONDS - since)) s" | tee -a "$out/gpu-stages.txt"
    [ "$status" = 0 ] || failed=1
}
has() { [ ! "$rehearse" ] && command -v "$1" >/dev/null; }

link() {
    local model=gpt2 rates=1gbit,10gbit elements=25_000_000 repeats=3 workers=(-n 4 --dist load)
    [ "$rehearse" ] && model=gpt2-tiny rates=20mbit elements=2**16 repeats=1 workers=(--collect-only)
    local variants=fp32,bf16,adamw-8,adamw-4,powersgd-1-soon,powersgd-4-soon,adam-1,adam-2,adam-2-overlap,zero-one
    # ranks that share a GPU would disturb each other's tuning
    run link-step env ONEBIT_TUNE=0 "$python" -m perf.train_step --paced --model "$model" --device "$device" \
        --rates "$rates" --variants "$variants" --repeats "$repeats" --name "$model" --out "$out"
    run link-all-reduce env ONEBIT_TUNE=0 "$python" -m perf.all_reduce --paced --device "$device" --rates "$rates" \
        --direct --elements "$elements" --repeats "$repeats" --out "$out"
    run link-ranks env ONEBIT_TUNE=0 "$python" -m pytest -q -p no:cacheprovider --timeout 300 -m gpu "${workers[@]}" \
        tests/onebit/parallel/test_nccl_nodes.py
}
learn() {
    local words=(--device "$device" --out "$out/learn" --work "$root/build/learn" --seconds 480)
    if [ "$rehearse" ]; then
        words=(--rehearse --out "$out/learn" --work "$links/learn")
        run learn-stop "$python" -m perf.learn "${words[@]}" --seconds 0
    fi
    run learn "$python" -m perf.learn "${words[@]}"
}
check() {
    local files workers=(-n 10 --dist load)
    files=$(ls tests/kernels/test_*.py | grep -v -e test_aot -e test_tuning -e test_compiled)
    [ "$rehearse" ] && workers=(--collect-only)
    # what each process would tune takes longer than its tests
    run check env ONEBIT_TUNE=0 "$python" -m pytest -q -p no:cacheprovider --timeout 150 "${workers[@]}" $files
}
sanitizer() {
    has compute-sanitizer &&
        run sanitizer env ONEBIT_TUNE=0 compute-sanitizer --error-exitcode 1 "$python" -m perf.kernels --device cuda \
            --elements 100003 --repeats 1 --out "$links"
}
kernels() {
    local size=()
    [ "$rehearse" ] && size=(--elements 2**16 --repeats 1)
    [ "$rehearse" ] || run tune "$python" -m onebit tune --device "$device"
    run kernels "$python" -m perf.kernels --device "$device" --out "$out" "${size[@]}"
    run kernels-bf16 "$python" -m perf.kernels --device "$device" --dtype bfloat16 --out "$out/bf16" "${size[@]}"
    has ncu && run ncu ncu --set basic --kernel-id '::regex:.*_kernel:3' "$python" -m perf.kernels --device cuda \
        --elements 2**26 --repeats 2 --out "$links"
    [ "$rehearse" ] || run optimizer "$python" -m perf.optimizer_step --device "$device" --out "$out"
}
ranks() {
    local workers=(-n 4 --dist load)
    [ "$rehearse" ] && workers=(--collect-only)
    run ranks env ONEBIT_TUNE=0 "$python" -m pytest -q -p no:cacheprovider --timeout 150 -m gpu "${workers[@]}" \
        tests/onebit/parallel/test_nccl.py tests/collectives/test_gpu.py tests/onebit/optim/test_gpu.py \
        tests/onebit/elastic/test_gpu.py tests/test_examples.py
}
step() {
    local backend=nccl size=(--width 1024 --layers 8 --repeats 10)
    [ "$rehearse" ] && backend=gloo size=(--width 32 --layers 1 --batch 1 --repeats 1)
    local variants=fp32,bf16,powersgd-1,adam-1,adam-2,adam-2-overlap,lamb-2,zero-one rates=1gbit,10gbit
    [ "$rehearse" ] && variants=fp32,adam-2-overlap,zero-one rates=1gbit
    if command -v tc >/dev/null && ip netns add onebit-probe 2>/dev/null; then
        ip netns del onebit-probe
        run step-lab "$python" -m perf.train_step --lab --hosts 2 --rates "$rates" --share 0 --device "$device" \
            --out "$out" "${size[@]}" --variants "$variants" --name lab
    fi
    # several ranks on one GPU: see tests/collectives/test_gpu.py
    NCCL_NET=Socket NCCL_IB_DISABLE=1 NCCL_SOCKET_IFNAME=lo run step "$python" -m torch.distributed.run --standalone \
        --nproc-per-node 2 --no-python bash -c 'NCCL_HOSTID=r$RANK exec "$@"' rank "$python" -m perf.train_step \
        --device "$device" --backend "$backend" --out "$out" "${size[@]}" --variants "$variants" --name loopback
}
profile() {
    local size=()
    [ "$rehearse" ] && size=(--width 32 --layers 1 --batch 1 --repeats 1)
    run profile "$python" -m perf.profile --device "$device" --out "$out" "${size[@]}"
}

: >"$out/gpu-stages.txt"
for stage in "${stages[@]}"; do "$stage"; done
exit "$failed"
