"""Frames a second of the Scheduler room's timeline, with steps of an engine that is not there, in a headless Chromium.

    python -m bench.observing.timeline [--rows 256] [--chromium /usr/bin/chromium]

At widths from milliseconds to minutes: how often the browser asked for a frame in some seconds (at most 60 times a
second), and how long drawing one took. Rendering is by software, without a GPU.
"""

import argparse
import json
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

from playwright.sync_api import sync_playwright

from bench.machine import commit, machine
from bench.observing.watching import serving

_WIDTHS = (0.02, 0.2, 2.0, 10.0, 60.0, 120.0)
_SECONDS = 5
_MEASURE = """async ([width, seconds]) => {
  const room = document.querySelector("scheduler-room"), timeline = room.timeline, draw = timeline.draw;
  room.view.seconds = width;
  let frames = 0, spent = 0;
  timeline.draw = function () {
    const began = performance.now();
    draw.call(timeline);
    spent += performance.now() - began;
    frames++;
  };
  const began = performance.now();
  await new Promise((resolve) => setTimeout(resolve, 1000 * seconds));
  delete timeline.draw;
  return [(1000 * frames) / (performance.now() - began), spent / frames];
}"""


def main() -> None:

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--chromium", default="/usr/bin/chromium")
    args = parser.parse_args()
    found = {}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        server = stack.enter_context(serving(sys.executable, folder, 1))
        browsers = stack.enter_context(sync_playwright())
        browser = browsers.chromium.launch(executable_path=args.chromium, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1280, "height": 900})
        page.goto(f"{server.url}/#/scheduler?synthetic={args.rows}")
        page.locator("scheduler-room[data-has-steps]").wait_for()
        for width in _WIDTHS:
            frames, drawing = page.evaluate(_MEASURE, [width, _SECONDS])
            found[str(width)] = {"frames_per_s": round(frames, 1), "drawing_ms": round(drawing, 2)}
        version = browser.version
        browser.close()
    told = {"machine": machine(), "commit": commit(), "chromium": version, "rows": args.rows, "seconds_wide": found}
    print(json.dumps(told, indent=2))


if __name__ == "__main__":
    main()
