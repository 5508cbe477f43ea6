"""The grammars of rows, in a worker."""

from penstock.gpu_worker.grammars.masks import Grammars

PARTS = (Grammars,)
