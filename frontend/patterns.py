"""Regular expressions for whole texts."""


def anchored(pattern: str) -> str:
    """The expression for a whole text, whether or not it says so already."""
    if pattern.startswith("^"):
        pattern = pattern[1:]
    slashes = len(pattern) - 1 - len(pattern[:-1].rstrip("\\"))
    if pattern.endswith("$") and slashes % 2 == 0:
        pattern = pattern[:-1]
    return f"^(?:{pattern})$"


def unanchored(pattern: str) -> str:
    """The expression within `anchored`; empty if it is not of that form."""
    if not (pattern.startswith("^(?:") and pattern.endswith(")$")):
        return ""
    depth, at, in_class = 0, 1, False
    while at < len(pattern) - 1:
        character = pattern[at]
        if character == "\\":
            at += 2
            continue
        if in_class:
            in_class = character != "]"
        elif character == "[":
            in_class = True
            at += len(pattern[at + 1 : at + 3]) - len(pattern[at + 1 : at + 3].lstrip("^]"))  # "]" may come first
        elif character == "(":
            depth += 1
        elif character == ")":
            depth -= 1
            if depth == 0:
                return pattern[4:-2] if at == len(pattern) - 2 else ""
        at += 1
    return ""
