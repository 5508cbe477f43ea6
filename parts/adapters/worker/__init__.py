"""Adapters in a worker: a thread reads them beside the steps, and rows get theirs."""

from penstock.parts.adapters.worker.rows import AdapterRows

PARTS = (AdapterRows,)
