"""Transports, which bring the bytes of KV pages from another worker: one file each, with one interface."""
