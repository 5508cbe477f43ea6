"""The worker process: it owns the device, the weights and the KV pool, and executes plans."""

import os

# OpenMP reads this when torch is first imported. If threads spin at their barriers while another process has the core,
# a 6 ms step of a small model takes 160 ms. On an idle machine, threads that sleep cost a few microseconds each.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
