"""Formats of a JSON schema's strings, as patterns of bounded length.

The grammar library knows these formats too, but sets no limit to their parts, so that a small model may write digits or
letters until its tokens are used up. Its dates may also be the 29th of any February. Formats that have a limit by
themselves (`ipv4`, `ipv6`, `uuid`) are left to it.
"""

from penstock.parts.grammars.child.json_schema import Schema

_LEAP_YEAR = "(?:[0-9][0-9](?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
_YEAR = "(?:000[1-9]|00[1-9][0-9]|0[1-9][0-9]{2}|[1-9][0-9]{3})"
_DATE = (
    rf"(?:{_YEAR}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    rf"|02-(?:0[1-9]|1[0-9]|2[0-8]))|{_LEAP_YEAR}-02-29)"
)
_TIME = r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{1,9})?(?:[zZ]|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"

_LABEL = "[a-zA-Z0-9](?:[a-zA-Z0-9-]{0,61}[a-zA-Z0-9])?"
_HOST = rf"{_LABEL}(?:\.{_LABEL}){{0,7}}"
_ATOM = r"[a-zA-Z0-9!#$%&'*+\-/=?\^_`{|}~]"
_LOCAL_PART = rf"(?:{_ATOM}{{1,64}}|{_ATOM}{{1,15}}(?:\.{_ATOM}{{1,15}}){{1,3}})"

_COUNT = "[0-9]{1,9}"
_OF_DAY = rf"T(?:{_COUNT}H(?:{_COUNT}M(?:{_COUNT}S)?)?|{_COUNT}M(?:{_COUNT}S)?|{_COUNT}S)"
_OF_DATE = rf"(?:{_COUNT}Y(?:{_COUNT}M(?:{_COUNT}D)?)?|{_COUNT}M(?:{_COUNT}D)?|{_COUNT}D)"
_DURATION = rf"P(?:{_OF_DATE}(?:{_OF_DAY})?|{_OF_DAY}|{_COUNT}W)"

_IN_PATH = r"(?:[a-zA-Z0-9\-._~!$&'()*+,;=:@/]|%[0-9a-fA-F]{2})"
_URI = (
    rf"[a-zA-Z][a-zA-Z0-9+\-.]{{0,15}}:(?://(?:[a-zA-Z0-9\-._~]{{1,64}}@)?(?:{_HOST}|\[[0-9a-fA-F:]{{2,39}}\])"
    rf"(?::[0-9]{{1,5}})?(?:/{_IN_PATH}{{0,255}})?|[a-zA-Z0-9\-._~@/]{_IN_PATH}{{0,255}})"
    rf"(?:\?(?:{_IN_PATH}|\?){{0,255}})?(?:\#(?:{_IN_PATH}|\?){{0,64}})?"
)

_PATTERNS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}[tT]{_TIME}",
    "duration": _DURATION,
    "email": f"{_LOCAL_PART}@{_HOST}",
    "hostname": _HOST,
    "uri": _URI,
}

MAX_LENGTH = 2**31 - 1
"""Longer limits of lengths mean nothing, and the library's patterns cannot hold them."""


def bound_texts(schema: Schema) -> None:
    """Replace a schema's format by a pattern, and leave out limits that no text reaches; in place."""
    for keyword in ("maxLength", "maxItems", "maxProperties"):
        limit = schema.get(keyword)
        if isinstance(limit, int | float) and not isinstance(limit, bool) and limit > MAX_LENGTH:
            del schema[keyword]
    name = schema.get("format")
    pattern = _PATTERNS.get(name) if isinstance(name, str) else None
    if pattern is None:
        return
    del schema["format"]
    if "pattern" not in schema:
        schema["pattern"] = f"^(?:{pattern})$"
        return
    kinds = {"type": schema["type"]} if "type" in schema else {}
    parts = schema.get("allOf")
    schema["allOf"] = [*(parts if isinstance(parts, list) else ()), {**kinds, "pattern": f"^(?:{pattern})$"}]
