"""Model architectures: functions of plain tensors, driven by `ModelConfig`."""
