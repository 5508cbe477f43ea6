#!/usr/bin/env bash
# Everything that needs a GPU, in one command: correctness first, then the benchmarks, then one table.
#
#     bench/gpu.sh [--only tests|bench] [RESULTS_FOLDER]    on a machine with an NVIDIA GPU
#     bench/gpu.sh --dry [RESULTS_FOLDER]                   the same code at tiny sizes on the CPU; less than a minute
#
# It ends within LIMIT seconds (540), what it takes to begin included: parts that no longer fit are left out with a line
# that says so. Tests and benchmarks together may need more than that on a slow host: then run one and then the other.
#
# Needs torch >= 2.11, triton >= 3.6 and numpy; what else there must be is in bench/gpu/requirements.in. Parts whose
# modules are missing are left out with a line that says so. Nothing is fetched. WHEELS may name a folder that
# bench/gpu/wheels.sh has filled: its packages go to a temporary folder, which only this run sees. PYTHON names the
# interpreter; PYTHONPATH may name a folder with modules that it lacks.
#
# Everything that was written is in RESULTS_FOLDER, and once more in its results.tar.gz.
set -u -o pipefail
START=$(date +%s)
LIMIT=${LIMIT:-540}
ROOT=$(cd "$(dirname "$0")/.." && pwd)
PYTHON=${PYTHON:-python3}
DRY=""; ONLY="all"
while [ $# -gt 0 ]; do
    case "$1 ${2:-}" in
    "--dry "*) DRY="--dry" ;;
    "--only tests" | "--only bench") ONLY=$2; shift ;;
    -*) echo "usage: bench/gpu.sh [--dry] [--only tests|bench] [RESULTS_FOLDER]"; exit 2 ;;
    *) break ;;
    esac
    shift
done
RESULTS=${1:-$ROOT/bench/results/gpu-$(date +%Y%m%d-%H%M%S)}
case $RESULTS in /*) ;; *) RESULTS=$PWD/$RESULTS ;; esac
mkdir -p "$RESULTS" || exit 2
IMPORTS=$(mktemp -d) || exit 2
trap 'rm -rf "$IMPORTS"' EXIT
mkdir "$IMPORTS/penstock"
for path in api/*.py bench core demo frontend gpu_worker ipc kernels; do ln -s "$ROOT"/$path "$IMPORTS/penstock/"; done
export PYTHONPATH=$IMPORTS:$ROOT${PYTHONPATH:+:$PYTHONPATH}
export TRITON_DEFAULT_FP_FUSION=1 HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 PYTHONDONTWRITEBYTECODE=1
if [ -n "$DRY" ]; then export CUDA_VISIBLE_DEVICES=""; fi
cd "$ROOT" || exit 2
FAILED=""; PARTS=""
if [ -n "${WHEELS:-}" ]; then
    "$PYTHON" -m pip install --quiet --no-index --no-deps --target "$IMPORTS" "$WHEELS"/*.whl || exit 2
fi

has() {  # has PART MODULE...: whether all modules are there; says which are not
    part=$1; shift
    missing=$("$PYTHON" -c 'import importlib.util as u, sys
print(" ".join(m for m in sys.argv[1:] if not u.find_spec(m)))' "$@") || return 1
    if [ -n "$missing" ]; then echo "== $part: left out, this Python lacks: $missing"; return 1; fi
}

left() { echo $((START + LIMIT - $(date +%s))); }  # seconds until the time is over

least() { if [ "$1" -lt "$2" ]; then echo "$1"; else echo "$2"; fi; }

part() {  # part NAME SECONDS COMMAND...: run one part under a limit, keep its output; in the dry form side by side
    if [ "$(left)" -lt 30 ]; then echo "== $1: left out, the $LIMIT seconds are over"; FAILED="$FAILED $1"; return; fi
    if [ -n "$DRY" ]; then run_part "$@" & PARTS="$PARTS $1"; else run_part "$@"; PARTS="$PARTS $1"; fi
}

run_part() {
    name=$1; limit=$2; shift 2
    limit=$(least "$limit" "$(left)")
    begin=$(date +%s)
    # `timeout` signals the whole group: a server that the part started ends with it.
    timeout --kill-after=20 "$limit" "$@" > "$RESULTS/$name.log" 2>&1
    code=$?
    echo $code > "$RESULTS/$name.code"
    if [ $code -eq 0 ]; then tail -n 8 "$RESULTS/$name.log"; else tail -n 40 "$RESULTS/$name.log"; fi
    echo "== $name: exit code $code, $(($(date +%s) - begin)) s"
}

tests() {  # tests FILE...: each in a process of its own, side by side; they share one GPU
    pids=(); names=()
    # The dry form proves that they can be collected: without a GPU all of them are skipped.
    if [ -n "$DRY" ]; then
        part precompile 90 "$PYTHON" -m bench.gpu.precompile --dry
        part tests 240 "$PYTHON" -m pytest -c bench/gpu/pytest.ini --rootdir "$ROOT" -m gpu --collect-only "$@"
        return
    fi
    for group in kernels engine; do
        files=(); for file in "$@"; do case $file in tests/"$group"/*|tests/gpu_worker/*) [ "${file#tests/kernels}" = "$file" ] && g=engine || g=kernels; [ $g = $group ] && files+=("$file") ;; esac; done
        [ ${#files[@]} -gt 0 ] || continue
        timeout --kill-after=20 "$(least "${TEST_LIMIT:-300}" "$(left)")" "$PYTHON" -m pytest -c bench/gpu/pytest.ini --rootdir "$ROOT" \
            -m "gpu and not long" -n "${TEST_JOBS:-10}" --timeout 150 --durations 15 --junitxml "$RESULTS/tests-$group.xml" "${files[@]}" > "$RESULTS/tests-$group.log" 2>&1 &
        pids+=($!); names+=("tests-$group")
    done
    if [ -n "$ENGINE_TESTS" ] && [ "$ONLY" != tests ]; then  # compile what the benchmarks will need, meanwhile
        for shape in qwen3-0.6b qwen3-8b llama-3.1-8b; do
            timeout --kill-after=20 "$(least 240 "$(left)")" "$PYTHON" -m bench.gpu.precompile --shape $shape \
                > "$RESULTS/precompile-$shape.log" 2>&1 &
            pids+=($!); names+=("precompile-$shape")
        done
    fi
    for i in "${!pids[@]}"; do
        wait "${pids[$i]}"; code=$?
        if [ $code -ne 0 ]; then FAILED="$FAILED ${names[$i]}"; tail -n 40 "$RESULTS/${names[$i]}.log"; fi
        echo "== ${names[$i]}: exit code $code: $(tail -n 1 "$RESULTS/${names[$i]}.log")"
    done
}

has everything torch triton numpy || exit 2
if [ -z "$DRY" ] && ! "$PYTHON" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
    echo "no CUDA device here; bench/gpu.sh --dry runs the same code on the CPU"; exit 2
fi

ENGINE_TESTS=""
if has "engine tests" transformers pytest_timeout xdist msgspec structlog safetensors tqdm llguidance; then
    ENGINE_TESTS=$(echo tests/gpu_worker/cuda/test_*.py)
fi
# shellcheck disable=SC2086 - a list of files
if [ "$ONLY" != bench ] && has "tests" pytest; then
    tests tests/kernels/launched/test_attention.py tests/kernels/launched/test_sampling.py \
        tests/kernels/launched/test_small_kernels.py tests/kernels/launched/test_quantized.py \
        tests/kernels/launched/test_quantized_kv.py tests/kernels/launched/test_experts.py \
        tests/kernels/launched/test_latent_attention.py tests/kernels/launched/test_scan.py \
        tests/kernels/launched/test_trees.py $ENGINE_TESTS
fi
if [ "$ONLY" != tests ]; then
part kernels 150 "$PYTHON" -m bench.kernels $DRY --out "$RESULTS/kernels.json"
if has "steps and offline" msgspec structlog safetensors tqdm llguidance; then
    for shape in qwen3-0.6b llama-3.1-8b; do
        part "step-$shape" 120 \
            "$PYTHON" -m bench.engine.decode_step $DRY --shape $shape --out "$RESULTS/step-$shape.json"
        if [ -n "$DRY" ]; then break; fi
    done
    part offline-uniform-qwen3-0.6b 90 \
        "$PYTHON" -m bench.engine.offline $DRY --shape qwen3-0.6b --out "$RESULTS/offline-uniform-qwen3-0.6b.json"
    part offline-1024x1024-qwen3-8b 120 "$PYTHON" -m bench.engine.offline $DRY --shape qwen3-8b \
        --workload 1024x1024 --out "$RESULTS/offline-1024x1024-qwen3-8b.json"
    for kv in int8 fp8_e4m3; do
        part "offline-1024x1024-qwen3-8b-kv-$kv" 120 "$PYTHON" -m bench.engine.offline $DRY --shape qwen3-8b \
            --kv-cache-dtype $kv --workload 1024x1024 --out "$RESULTS/offline-1024x1024-qwen3-8b-kv-$kv.json"
        if [ -n "$DRY" ]; then break; fi
    done
fi
if has "served" zmq aiohttp uvloop msgspec structlog rich tokenizers transformers jinja2 prometheus_client setproctitle \
    llguidance
then
    part served 180 "$PYTHON" -m bench.gpu.serve $DRY --shape qwen3-0.6b --out "$RESULTS"
fi
if [ -z "$DRY" ] && has "offline, second shape" msgspec structlog safetensors tqdm llguidance; then
    part offline-uniform-qwen3-8b 90 \
        "$PYTHON" -m bench.engine.offline --shape qwen3-8b --out "$RESULTS/offline-uniform-qwen3-8b.json"
fi
fi
wait
for name in $PARTS; do
    if [ "$(cat "$RESULTS/$name.code" 2>/dev/null)" != 0 ]; then FAILED="$FAILED $name"; fi
    rm -f "$RESULTS/$name.code"
done
{ git rev-parse HEAD 2>/dev/null || echo "no commit: this is no checkout"; } > "$RESULTS/commit.txt"
"$PYTHON" -m bench.gpu.table "$RESULTS" | tee "$RESULTS/table.txt" || FAILED="$FAILED table"
tar -czf "$IMPORTS/results.tar.gz" -C "$RESULTS" --exclude results.tar.gz . && mv "$IMPORTS/results.tar.gz" "$RESULTS/" \
    || FAILED="$FAILED results.tar.gz"
echo "results in $RESULTS"
if [ -n "$FAILED" ]; then echo "FAILED:$FAILED"; exit 1; fi
