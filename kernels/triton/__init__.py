"""The Triton kernels and their launchers, one operation per file; related operations are in a folder.

Each launcher takes the same tensors as the public function of `penstock.kernels` that calls it on
CUDA. It picks tile sizes by plain rules, and launches. There is no autotuner, because that would cost
start-up time and cannot run inside a CUDA graph. The public functions check shapes.
"""

import os

# Read when a kernel is compiled. This is the current default; releases that will change it warn if it is unset.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
