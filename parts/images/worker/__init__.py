"""The embeddings of pictures."""

from penstock.parts.images.worker.rows import Images

PARTS = (Images,)
