"""The Open Inference Protocol, as KServe's probes and clients expect it."""
