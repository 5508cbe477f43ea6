"""Measurements that are run again, from a clone of the repository; `load/` and `quality/` are installed, too, in
`penstock.bench`. `results/` has what was found, also by studies whose programs are in the history alone.

Rooms from the bottom up, with those that they import. All but the first two may import the files of this folder, which
are what the rooms share, and `step.py`, which reads the step trace of a server:

    load         clients that put load on a server, and what they measure
    quality      what quantization costs in quality
    kernels      single operations
    engine       scheduler and model runner in one process, or the scheduler alone; this checkout beside another one
    serving      the frontend alone, and servers beside their simulation: load
    gpu          what `gpu.sh` runs on a GPU machine: load
    peers        Penstock beside other engines: engine, load
"""
