#!/bin/sh
# Installs the build of torch that suits a machine: the package index's, which is for CUDA and takes gigabytes, where
# there is an NVIDIA driver, else PyTorch's own for CPUs. uv knows where that one is.
#
#   deploy/install-torch.sh PYTHON [PIP OPTION...]
#
# TORCH_BACKEND: auto (by this machine's driver), cpu, or cuda. TORCH_INDEX_URL: an index to take it from instead.
set -eu
python=$1
shift
backend=${TORCH_BACKEND:-auto}
if [ "$backend" = auto ]; then
    backend=cpu
    if [ -e /proc/driver/nvidia/version ] || nvidia-smi -L >/dev/null 2>&1 ||
        ldconfig -p 2>/dev/null | grep -q libcuda.so.1; then
        backend=cuda
    fi
fi
if [ -n "${TORCH_INDEX_URL:-}" ]; then
    exec "$python" -m pip install -q --no-compile --index-url "$TORCH_INDEX_URL" "$@" torch
fi
if [ "$backend" = cpu ]; then
    if { "$python" -m uv --version || "$python" -m pip install -q --no-compile uv; } >/dev/null 2>&1 &&
        UV_HTTP_TIMEOUT=20 UV_HTTP_RETRIES=1 \
            "$python" -m uv pip install -q --python "$python" --torch-backend cpu "$@" torch; then
        exit 0
    fi
    echo "torch: the build for CPUs could not be installed (see above); taking the usual package index's"
fi
exec "$python" -m pip install -q --no-compile "$@" torch
