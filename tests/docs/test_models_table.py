"""The table of families tells which chat formats its models write."""

from docs.models_table import OF_NO_FAMILY, without_a_row


def test_every_model_of_a_chat_format_has_a_row() -> None:
    assert without_a_row() == OF_NO_FAMILY
