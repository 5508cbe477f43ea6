"""The worker process: it owns the device, the weights and the KV pool, and executes plans."""

import os

# OpenMP reads this when torch is first imported. Threads that spin at their barriers while another process has the
# core turn a 6 ms step of a small model into 160 ms; threads that sleep cost an idle machine a few microseconds each.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
