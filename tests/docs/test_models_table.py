"""The page of models: chat formats of all families, and whose images are not seen."""

from docs.models_table import OF_NO_FAMILY, without_a_row
from penstock.models.parsing.text_part import WHOLE_MODELS
from penstock.models.parsing.vision.foreign import FOREIGN, NOT_SERVED, TEXT_ONLY
from penstock.models.parsing.vision.towers import TOWERS


def test_every_model_of_a_chat_format_has_a_row() -> None:
    assert without_a_row() == OF_NO_FAMILY


def test_what_becomes_of_images_is_told_once_for_each_architecture() -> None:
    told = [*TOWERS, *(FOREIGN.keys() - TOWERS), *TEXT_ONLY, *NOT_SERVED]
    assert len(set(told)) == len(told)
    assert {*WHOLE_MODELS} <= {*told}
