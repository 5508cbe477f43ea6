"""Measurements, run from a clone of the repository; `load/` and `quality/` are installed, too, in `penstock.bench`.

Rooms from the bottom up, with those that they import. All but the first two may import the files of this folder, which
are what the rooms share, and `step.py`, which reads the step trace of a server:

    load         clients that put load on a server, and what they measure
    quality      what quantization costs in quality
    kernels      single operations
    kv           tiers of pages, and snapshots of states
    scheduling   the scheduler, its policies and batching kinds, on servers and in virtual time: load
    serving      a whole server: streams beside a batch, overload, the frontend alone
    gpu          what `gpu.sh` runs on a GPU machine: load
    engine       scheduler and model runner in one process, and this checkout beside another one: scheduling
    observing    what recording and watching cost: scheduling
    speculation  what guessing tokens is worth, and what it costs the scheduler: scheduling
    images       streams beside images, and simulations of images: serving
    parallel     ranks, stages, and several engines: engine, load
    peers        Penstock beside other engines: engine, load
    formats      formats of weights, of keys and values, and of files: engine, peers
"""
