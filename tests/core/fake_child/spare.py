"""A spare that never forks anything: the first one dies, later ones import for ever. FAKE_SPARE=imported: all say that
they could."""

import os
import sys
import time

from penstock.config import Config
from penstock.ipc import process
from penstock.ipc.parent import Parent, Word

process.inherited_config(sys.argv[1:], Config)
if os.environ.get("FAKE_SPARE") == "imported":
    Parent.of(sys.argv[1:]).tell(Word.IMPORTED)
elif "--eager" in sys.argv:
    sys.exit(1)
time.sleep(60)
