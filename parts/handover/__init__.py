"""Disaggregated prefill: KV pages that go from engine to engine (docs/prefill-decode.md)."""
