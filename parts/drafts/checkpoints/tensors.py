"""Checks the tensors of a head's checkpoint against its layout."""

from array import array
from collections.abc import Mapping

from penstock.models.check import ModelTensors
from penstock.models.files.source import LoadError, StoredTensor
from penstock.models.formats.format import FLOATS, Shape

_MOST_NAMED = 3
_INTEGERS = {"I64": "q", "I32": "i"}


def head_tensors(
    method: str,
    found: Mapping[str, StoredTensor],
    shapes: Mapping[str, Shape],
    integers: Mapping[str, Shape],
    ignored: tuple[str, ...] = (),
) -> ModelTensors:
    """Return the tensors of a layout, checked.

    Args:
        method: its name, for messages.
        found: all tensors of the checkpoint, by the layout's names.
        shapes: of all required tensors of floats.
        integers: the same for integers.
        ignored: beginnings of the names of other tensors that are allowed.

    Raises:
        LoadError: tensors are missing, unexpected, of other shapes or dtypes.
    """
    wanted = {**shapes, **integers}
    if missing := [name for name in wanted if name not in found]:
        raise LoadError(f"it lacks {_some(missing)}, which a head of method {method} has")
    if others := [name for name in found if name not in wanted and not name.startswith(ignored)]:
        raise LoadError(f"it has {_some(others)}, which a head of method {method} has not")
    for name, shape in wanted.items():
        if found[name].shape != shape:
            raise LoadError(f"its {name} has shape {list(found[name].shape)}, but should have {list(shape)}")
        dtypes = FLOATS if name in shapes else tuple(_INTEGERS)
        if found[name].dtype not in dtypes:
            raise LoadError(f"its {name} is of type {found[name].dtype}; it is read in {', '.join(dtypes)}")
    return ModelTensors({name: found[name] for name in wanted}, {}, {})


def check_token_ids(name: str, stored: StoredTensor, vocab_size: int, *, are_offsets: bool) -> None:
    """Refuse a list of tokens that has unknown tokens, or one twice.

    With `are_offsets`, entry i is an offset that is added to i.
    """
    numbers = array(_INTEGERS[stored.dtype], bytes(stored.read()))
    tokens = {i + number if are_offsets else number for i, number in enumerate(numbers)}
    if len(tokens) < len(numbers) or min(tokens, default=0) < 0 or max(tokens, default=0) >= vocab_size:
        raise LoadError(f"its {name} does not name {len(numbers)} different tokens of this model's {vocab_size}")


def _some(names: list[str]) -> str:
    rest = len(names) - _MOST_NAMED
    return ", ".join(names[:_MOST_NAMED]) + (f" and {rest} more" if rest > 0 else "")
