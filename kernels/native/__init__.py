"""Penstock's own CPU kernels: C++ without other libraries, compiled once for this processor."""
