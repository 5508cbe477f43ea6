"""The JSON type of a value."""


def type_of(value: object) -> str:
    """The JSON type of a value; whole numbers are integers, however they are written."""
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int():
            return "integer"
        case float():
            return "integer" if value.is_integer() else "number"
        case str():
            return "string"
        case dict():
            return "object"
    return "array"
