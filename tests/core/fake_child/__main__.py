"""One that works. FAKE_REFUSAL=1: a worker of this rank says that its configuration cannot work, and ends."""

import os
import sys
import time

from penstock.config import Config
from penstock.config.ranks import Rank
from penstock.ipc import process
from penstock.ipc.parent import Parent, Word

if "--rank" in sys.argv and f"{Rank.of(sys.argv[1:]).number}" == os.environ.get("FAKE_REFUSAL"):
    sys.exit(2)
config = process.inherited_config(sys.argv[1:], Config)
parent = Parent.of(sys.argv[1:])
parent.keep_telling_in_a_thread(config.ipc.heartbeat_interval)
parent.tell(Word.READY)
time.sleep(60)
