"""What the scripted model says in the tests of agents: one story, told by every framework.

    "What is it like in Ulm?"  ->  get_weather  ->  get_time  ->  an answer (a text, an object or a call)
    "And in Bonn?"             ->  both at once  ->  a text

How the answer is asked for stands in the user's question: "as an object", or "by the tool NAME".
"""

import json
from typing import Any

from tests.agents.families import Family

WEATHER = {"Ulm": "rain, 12 degrees", "Bonn": "sun, 21 degrees"}
TIME = {"Ulm": "14:05", "Bonn": "14:07"}
QUESTION, NEXT_QUESTION = "What is it like in Ulm?", "And in Bonn?"
AS_OBJECT = "Answer as an object."
THOUGHT = "Two tools know."
ANSWER = "In Ulm there is rain, 12 degrees, at 14:05 (\u00fcberall)."
NEXT_ANSWER = "In Bonn there is sun, 21 degrees, at 14:07."
REPORT: dict[str, Any] = {"city": "Ulm", "degrees": 12, "notes": ["rain", "14:05"]}
PATCH = '*** Begin Patch\n*** Add File: a.txt\n+It "rains".\n*** End Patch\n'
"""The input of a custom tool."""
EDIT_QUESTION, EDITED, EDIT_ANSWER = "Write a.txt.", "Success: A a.txt", "It is written."
ANSWER_TOOLS = ("final_result", "Report", "PartialReport")


def by_tool(name: str) -> str:
    """What a question says whose answer is to be a call of this tool."""
    return f"Answer by the tool {name}."


def rules(family: Family) -> list[dict[str, Any]]:
    """The script for a family's way of writing."""
    say = family.say
    told = TIME["Ulm"]
    report = json.dumps(REPORT)
    found: list[dict[str, Any]] = [
        {"after": QUESTION, "say": say(calls=[("get_weather", {"city": "Ulm"})], thought=THOUGHT)},
        {"after": WEATHER["Ulm"], "say": say(calls=[("get_time", {"city": "Ulm"})])},
        {"after": told, "say": say(ANSWER, thought=THOUGHT)},
        {"after": told, "seen": [AS_OBJECT], "say": report},
        {"after": ANSWER, "say": say(calls=[("Report", REPORT)])},  # asked once more for the same as an object
        {
            "after": NEXT_QUESTION,
            "say": say(calls=[("get_weather", {"city": "Bonn"}), ("get_time", {"city": "Bonn"})]),
        },
        {"after": WEATHER["Bonn"], "say": NEXT_ANSWER},
        {"after": TIME["Bonn"], "say": NEXT_ANSWER},
        {"after": "Describe Ulm.", "say": report},
        {"after": "Hello", "say": "Good day."},
        {"after": EDIT_QUESTION, "say": say(calls=[("apply_patch", {"input": PATCH})], thought=THOUGHT)},
        {"after": EDITED, "say": EDIT_ANSWER},
    ]
    for name in ANSWER_TOOLS:
        call = say(calls=[(name, REPORT)])
        found.append({"after": told, "seen": [by_tool(name)], "say": call})
        found.append({"after": "Describe Ulm.", "seen": [by_tool(name)], "say": call})
        found.append({"after": by_tool(name), "seen": ["Describe Ulm."], "say": call})
    return found
