"""Measurements, run from a clone of the repository; `load/` alone is installed, as `penstock.bench.load`."""
