"""These tests launch the Triton kernels on CPU tensors, which works only under Triton's interpreter.

`tests/kernels/test_interpreter.py` runs them in a child process with TRITON_INTERPRET=1; without it they
are not collected, since the kernels are then compiled for a GPU.
"""

import os

collect_ignore_glob = [] if os.environ.get("TRITON_INTERPRET") == "1" else ["test_*.py"]
