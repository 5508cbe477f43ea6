"""A spare that never forks anything; FAKE_SPARE=imported lets it say that it could."""

import os
import sys
import time

from penstock.core.config import Config
from penstock.ipc import process
from penstock.ipc.parent import Parent, Word

process.inherited_config(sys.argv[1:], Config)
if os.environ.get("FAKE_SPARE") == "imported":
    Parent.of(sys.argv[1:]).tell(Word.IMPORTED)
time.sleep(60)
