"""Model architectures: functions of plain tensors, driven by `ModelConfig`."""

from penstock.gpu_worker.models.dense import DenseModel
from penstock.gpu_worker.models.native_dense import NativeDenseModel

Model = DenseModel | NativeDenseModel
"""What a runner drives."""
