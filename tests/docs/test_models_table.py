"""The page of models: chat formats of all families, and whose images are not seen."""

from docs.models_table import OF_NO_FAMILY, without_a_row
from penstock.models.parsing.text_part import _TEXT_PARTS
from penstock.models.parsing.vision.towers import _TOWERS
from tests.docs.fences import ROOT


def test_every_model_of_a_chat_format_has_a_row() -> None:
    assert without_a_row() == OF_NO_FAMILY


def test_models_whose_images_are_not_seen_are_named() -> None:
    text = (ROOT / "docs/models.md").read_text()
    [told] = [part for part in text.split("\n\n") if part.startswith("**Models that also take images or sound**")]
    blind = {name.removesuffix("ForConditionalGeneration").removesuffix("Moe") for name in _TEXT_PARTS.keys() - _TOWERS}
    sentence = "".join(told.split("in texts alone: ")[1].split(". ")[0].split())
    assert set(sentence.replace("and", ",").split(",")) == {name.replace("_", ".") for name in blind}
