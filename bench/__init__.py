"""Measurements, run from a clone of the repository; `load/` and `quality/` are installed, too, in `penstock.bench`."""
