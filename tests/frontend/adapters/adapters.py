"""What tests of adapters share: folders of adapters, and a scheduler's half that loads them at once."""

import json
from pathlib import Path

from penstock.ipc.channel import PeerId
from penstock.ipc.messages import FrontendHello, Message
from penstock.parts.adapters.messages import AdapterNews, AdapterStage, AdapterState, LoadAdapter, UnloadAdapter
from tests.frontend.fake_scheduler import FakeScheduler


def write_adapter(folder: Path, content: str = "", **texts: str) -> Path:
    """A folder as PEFT writes it; nobody reads the weights here. `texts`: further files, `.` in their names is `_`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 8, "why": content}))
    (folder / "adapter_model.safetensors").write_bytes(content.encode())
    for name, text in texts.items():
        stem, _, suffix = name.rpartition("_")
        (folder / f"{stem}.{suffix}").write_text(text)
    return folder


class Loader:
    """The adapters of a fake scheduler."""

    def __init__(self, scheduler: FakeScheduler) -> None:
        self._scheduler = scheduler
        self.adapters: dict[str, AdapterState] = {}
        self.orders: list[LoadAdapter | UnloadAdapter] = []
        self.error = ""  # of every further load
        self.state: AdapterStage = "ready"  # of every further load
        scheduler.on_other = self._take

    def _take(self, peer: PeerId, message: Message) -> None:
        if isinstance(message, FrontendHello):
            self._scheduler.router.send(peer, self._news())
        elif isinstance(message, LoadAdapter):
            self.orders.append(message)
            state: AdapterStage = "failed" if self.error else "leaving" if message.is_leaving else self.state
            self.set(message.key, message.path, state, self.error)
        elif isinstance(message, UnloadAdapter):
            self.orders.append(message)
            if message.key in self.adapters:
                del self.adapters[message.key]
                self.tell()

    def set(self, key: str, path: str, state: AdapterStage, error: str = "") -> None:
        """An adapter is in this state now; all frontends hear of it."""
        self.adapters[key] = AdapterState(key, path, state, error)
        self.tell()

    def tell(self) -> None:
        """Send the news."""
        self._scheduler.tell(self._news())

    def _news(self) -> AdapterNews:
        return AdapterNews(tuple(self.adapters.values()))
