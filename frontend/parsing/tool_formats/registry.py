"""All tool formats, and which of them a chat template teaches."""

from penstock.frontend.parsing.calls.format import ToolFormat
from penstock.frontend.parsing.tool_formats.functionary import FunctionaryV31, FunctionaryV32
from penstock.frontend.parsing.tool_formats.gemma4 import FunctionGemma, Gemma4
from penstock.frontend.parsing.tool_formats.generic import Generic
from penstock.frontend.parsing.tool_formats.gigachat import GigaChat, GigaChat3
from penstock.frontend.parsing.tool_formats.glm import Glm, Glm47, Hy3
from penstock.frontend.parsing.tool_formats.harmony import Harmony
from penstock.frontend.parsing.tool_formats.invoke import DeepSeekV4, DeepSeekV32, Glimmer, MiniMaxM2, MiniMaxM3
from penstock.frontend.parsing.tool_formats.json_blocks import (
    Apertus,
    CommandR,
    CommandRPlus,
    FireFunction,
    Granite,
    Hermes,
    Hunyuan,
    InternLm,
    MiniMaxM1,
    Nemotron,
    Phi4Mini,
)
from penstock.frontend.parsing.tool_formats.kimi_k3 import KimiK3
from penstock.frontend.parsing.tool_formats.llama import Llama3Json
from penstock.frontend.parsing.tool_formats.minicpm5 import MiniCpm5
from penstock.frontend.parsing.tool_formats.mistral import Mistral, MistralNamed
from penstock.frontend.parsing.tool_formats.pythonic import Gemma3, Lfm2, Olmo3, Pythonic
from penstock.frontend.parsing.tool_formats.qwen3_coder import Qwen3Coder, SeedOss
from penstock.frontend.parsing.tool_formats.sections import DeepSeekV3, DeepSeekV31, KimiK2, SolarOpen

_ALL: tuple[ToolFormat, ...] = (
    # A template is compared with them in this order: a format whose marks are part of another's comes after it.
    Harmony(),
    MistralNamed(),
    Mistral(),
    DeepSeekV4(),
    DeepSeekV32(),
    DeepSeekV3(),
    DeepSeekV31(),
    KimiK2(),
    KimiK3(),
    MiniMaxM3(),
    MiniMaxM2(),
    Glimmer(),
    SolarOpen(),
    Hy3(),
    MiniCpm5(),
    GigaChat3(),
    GigaChat(),
    SeedOss(),
    Qwen3Coder(),
    Glm(),
    Glm47(),
    Gemma4(),
    FunctionGemma(),
    Gemma3(),
    CommandR(),
    CommandRPlus(),
    Nemotron(),
    Apertus(),
    InternLm(),
    Lfm2(),
    Olmo3(),
    FunctionaryV32(),
    FunctionaryV31(),
    FireFunction(),
    Phi4Mini(),
    Granite(),
    Hermes(),
    MiniMaxM1(),
    Hunyuan(),
    Pythonic(),
    Llama3Json(),
    Generic(),
)
TOOL_FORMATS = {tool_format.name: tool_format for tool_format in _ALL}


def tool_format_of(template: str) -> ToolFormat:
    """The format that a chat template teaches; the generic one if it teaches no known format."""
    return next(tool_format for tool_format in _ALL if tool_format.is_taught_by(template))
