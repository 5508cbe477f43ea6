"""What a request may do without: one folder for each part, with a file for each process in which it runs.

    README.md      what it does, and what it asks of the others
    options.py     its options
    messages.py    what its processes tell each other
    scheduler.py   in the scheduler's process
    samplers.py    samplers: read by frontends, run in workers; uses tensors, imports no torch
    worker.py      in the workers: the only file that may import torch
    frontend.py    in the frontends: routes, metrics
    child.py       in a process that a frontend starts, and may kill
    metrics.py     what `/metrics` shows of it
    checkpoints.py which checkpoints it needs beside the model's

A part has only the files that it needs, and a file may be a folder of that name. The processes work without this
folder: `penstock.config.parts` finds what is here by the names below. Only what looks at them from outside imports
parts: the laboratory, the replay of recordings, and `penstock run-batch`.
"""

NAMES = (
    "grammars", "host", "disk", "images", "handover", "pooling", "encoders", "experts", "drafts", "background",
    "policies", "batching", "routing", "recording", "watching", "open_inference", "scores", "adapters",
    "samplers", "responses", "anthropic", "ollama", "batches", "beam_search",
)  # fmt: skip
"""The parts, in the order in which they are asked."""
