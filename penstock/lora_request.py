"""`LoRARequest`: an adapter for a request, as vLLM spells it."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LoRARequest:
    """An adapter of the model. It is loaded when it is first asked for, and stays."""

    lora_name: str
    lora_int_id: int  # at least 1; adapters are told apart by their names, so it means nothing here
    lora_path: str  # its folder, or its name on the hub

    def __post_init__(self) -> None:
        if self.lora_int_id < 1:
            raise ValueError(f"lora_int_id must be at least 1, got {self.lora_int_id}")
        if not self.lora_name or not self.lora_path:
            raise ValueError("an adapter needs a name and a path")
