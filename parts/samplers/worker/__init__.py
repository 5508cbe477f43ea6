"""Samplers in a worker: the rows that have some."""

from penstock.parts.samplers.worker.rows import SamplerRows

PARTS = (SamplerRows,)
