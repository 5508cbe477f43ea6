"""Batches: files of requests that are answered within a day, behind everybody who waits: `/v1/batches`."""
