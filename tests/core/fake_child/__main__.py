"""One that works."""

import sys
import time

from penstock.core.config import Config
from penstock.ipc import process
from penstock.ipc.parent import Parent, Word

config = process.inherited_config(sys.argv[1:], Config)
parent = Parent.of(sys.argv[1:])
parent.keep_telling_in_a_thread(config.ipc.heartbeat_interval)
parent.tell(Word.READY)
time.sleep(60)
