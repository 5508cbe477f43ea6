"""Batches (`/v1/batches`): files of requests that are answered within a day, after all that a client waits for."""
