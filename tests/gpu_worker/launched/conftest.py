"""These tests need Triton's interpreter: `tests/gpu_worker/test_interpreter.py` starts it for them."""

import os

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

collect_ignore_glob = [] if INTERPRETED else ["test_*.py"]

if INTERPRETED:
    from tests.kernels.fast_interpreter import speed_up_interpreter
    from tests.kernels.launch_forms import start_to_note
    from tests.kernels.ptx import interpret_assembly

    speed_up_interpreter()
    interpret_assembly()
    start_to_note()
