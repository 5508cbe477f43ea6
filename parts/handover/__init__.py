"""Prefill and decode apart: KV pages that go from engine to engine."""
