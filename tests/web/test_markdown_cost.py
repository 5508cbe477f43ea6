"""The page's markdown patterns cost a time that grows with the line, not with its square."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

_SOURCE = Path(__file__).parents[2] / "frontend" / "web" / "static" / "parts" / "markdown.js"
_LINES = [
    "```" + " " * 60_000 + "`",
    "# " + " " * 60_000 + "x" + " " * 60_000 + "#x",
    "#" + "\t" * 60_000,
    "- " * 60_000 + "x",
    " " * 60_000 + "-x",
    "|" + " " * 60_000 + "-x",
    "-" + " " * 60_000 + "x",
    "--" + " " * 60_000 + "x",
    "| -" * 20_000 + " " * 20_000 + "x",
    "> " * 60_000 + "x",
    "1" * 60_000,
]


@pytest.mark.skipif(shutil.which("node") is None, reason="needs Node.js")
def test_no_line_is_costly() -> None:
    patterns = re.findall(r"^const [A-Z]+ = (/.*/);$", _SOURCE.read_text(), re.MULTILINE)
    assert len(patterns) >= 5
    script = f"""
      for (const line of {_LINES!r})
        for (const pattern of [{", ".join(patterns)}]) {{
          const before = process.cpuUsage();
          pattern.test(line);
          const {{ user, system }} = process.cpuUsage(before);
          if (user + system > 300000) console.log(pattern.source, user + system);
        }}
    """
    said = subprocess.run(["node", "-"], input=script, capture_output=True, text=True, check=True).stdout
    assert said == ""
