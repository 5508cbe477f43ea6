"""The Triton kernels and their launchers, one operation per file; what belongs together is in a folder.

Each launcher takes the same tensors as the public function of `penstock.kernels` that calls it on
CUDA, picks tile sizes by plain rules (no autotuner: it would cost start-up time and cannot run inside
a CUDA graph) and launches. Shapes are checked by the public functions.
"""

import os

# Read when a kernel is compiled. It is the current default; releases that will change it warn while it is unset.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
