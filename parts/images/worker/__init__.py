"""Embeddings of pictures, in a worker."""

from penstock.gpu_worker.images.rows import Images

PARTS = (Images,)
