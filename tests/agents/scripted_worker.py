"""The worker process with the scripted model in the place of the clockwork model."""

import sys
from unittest.mock import patch

from penstock.gpu_worker import __main__ as worker
from penstock.gpu_worker.startup import loaded
from tests.agents.scripted_model import ScriptedModel

if __name__ == "__main__":
    with patch.object(loaded, "load_model", lambda checkpoint, config, *_, **__: ScriptedModel(checkpoint, config)):
        sys.exit(worker.main(sys.argv[1:]))
