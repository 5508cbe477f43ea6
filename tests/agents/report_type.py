"""What the agents answer with when they are to answer with an object."""

import pydantic


class Report(pydantic.BaseModel):
    """A city's weather."""

    city: str
    degrees: int
    notes: list[str]
