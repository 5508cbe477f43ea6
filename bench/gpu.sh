#!/usr/bin/env bash
# Everything that needs a GPU, in one command: correctness first, then the benchmarks, then one table.
#
#     bench/gpu.sh [--only GROUP,GROUP] [RESULTS_FOLDER]    on a machine with an NVIDIA GPU
#     bench/gpu.sh --dry [RESULTS_FOLDER]                   the same code at tiny sizes on the CPU
#
# It ends within LIMIT seconds (540): parts that no longer fit are left out with a line that says so. What ended well
# is not run again in the same folder, so call it again until all of it is there. bench/gpu/run.py lists the parts.
#
# Needs torch >= 2.11, triton >= 3.6 and numpy; what else there must be is in bench/gpu/requirements.in. Parts whose
# modules are missing are left out with a line that says so. Nothing is fetched. WHEELS may name a folder that
# bench/gpu/wheels.sh has filled: its packages go to a temporary folder, which only this run sees. PYTHON names the
# interpreter; PYTHONPATH may name a folder with modules that it lacks.
#
# Everything that was written is in RESULTS_FOLDER, and once more in ARCHIVE (its results.tar.gz).
set -u -o pipefail
ROOT=$(cd "$(dirname "$0")/.." && pwd)
PYTHON=${PYTHON:-python3}
IMPORTS=$(mktemp -d) || exit 2
trap 'rm -rf "$IMPORTS"' EXIT
export PYTHONPATH=$IMPORTS:$ROOT${PYTHONPATH:+:$PYTHONPATH}
export TRITON_DEFAULT_FP_FUSION=1 HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1
IS_DRY=""
for word in "$@"; do if [ "$word" = --dry ]; then IS_DRY=yes; fi; done
if [ -n "$IS_DRY" ]; then export CUDA_VISIBLE_DEVICES=""; fi
if [ -n "${WHEELS:-}" ]; then
    "$PYTHON" -m pip install --quiet --no-index --no-deps --target "$IMPORTS" "$WHEELS"/*.whl || exit 2
fi
for module in torch triton numpy; do
    "$PYTHON" -c "import $module" || exit 2
done
if [ -z "$IS_DRY" ] && ! "$PYTHON" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
    echo "no CUDA device here; bench/gpu.sh --dry runs the same code on the CPU"
    exit 2
fi
"$PYTHON" -m bench.gpu.run "$@"
