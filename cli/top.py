"""`penstock top`: what a server is doing, in the terminal: rows, queue, rates, latencies, pages, tiers, engines.

It reads /metrics, /debug/requests and /engines of a running server, and costs no more than these requests.
"""

import argparse
import os
import select
import signal
import sys
import termios
import time
import tty
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from penstock.cli.engines import RefusedError, Server, add_server_options
from penstock.cli.figures import Look, Span, number, read_look, seconds
from penstock.config.parser import Parser
from penstock.config.sizes import size

WINDOW_SECONDS = 60.0
"""Time that percentiles cover."""

_BAR = 30
_BOLD, _DIM, _RED, _PLAIN = "\033[1m", "\033[2m", "\033[31m", "\033[0m"
_ENTER, _LEAVE = "\033[?1049h\033[?25l", "\033[?25h\033[?1049l"
_LATENCIES = (
    ("first token", "time_to_first_token_seconds"),
    ("between tokens", "inter_token_latency_seconds"),
    ("in the queue", "request_queue_time_seconds"),
    ("whole request", "e2e_request_latency_seconds"),
)


@dataclass
class View:
    """The samples so far, and the page made from them."""

    looks: deque[Look] = field(default_factory=deque)
    requests: dict[str, Any] = field(default_factory=dict)
    engines: list[dict[str, Any]] = field(default_factory=list)
    name: str = ""
    error: str = ""
    hidden: str = ""  # why requests and engines are hidden

    def look(self, server: Server, limit: int) -> None:
        """Query the server, and note what it does not answer."""
        try:
            self.looks.append(read_look(server.text("/metrics")))
            self.error = ""
        except (RefusedError, ValueError) as error:
            self.error = str(error)
            return
        while self.looks[-1].at - self.looks[0].at > WINDOW_SECONDS and len(self.looks) > 2:
            self.looks.popleft()
        try:
            self.requests = server.get(f"/debug/requests?limit={max(1, min(limit, 1000))}")
            self.engines = list(server.engines().values())
            self.hidden = ""
        except RefusedError as error:
            self.requests, self.engines, self.hidden = {}, [], str(error)

    def lines(self, width: int, height: int) -> list[str]:
        """Return the page, cut to this size."""
        lines = [f"{_BOLD}penstock top{_PLAIN}  {plain(self.name)}  {_DIM}q quits{_PLAIN}"]
        if self.error:
            lines.append(f"{_RED}{plain(self.error)}{_PLAIN}")
        if self.looks:
            lines += self._figures()
            lines += self._engines()
            lines += self._requests()
        return [cut(line, width) for line in lines[:height]]

    def _figures(self) -> Iterator[str]:
        now = self.looks[-1]
        last = Span(self.looks[-2] if len(self.looks) > 1 else Look({}, now.at), now)
        window = Span(self.looks[0], now) if len(self.looks) > 2 else Span(Look({}, now.at), now)
        rows, running = now.total("num_rows"), now.total("num_requests_running")
        waiting, paused = now.total("num_requests_waiting"), now.total("num_requests_paused")
        reasons = now.by("num_requests_waiting_by_reason", "reason")
        why = ", ".join(f"{number(count)} {plain(reason)}" for reason, count in sorted(reasons.items()) if count)
        yield ""
        yield _row("rows", f"{bar(running, rows)} {number(running)} of {number(rows)} running")
        yield _row(
            "queue",
            f"{number(waiting)} waiting ({number(now.total('num_waiting_tokens'))} tokens)"
            f"{f': {why}' if why else ''}; {number(paused)} paused",
        )
        if len(self.looks) > 1:
            cached = last.count("prompt_tokens_cached_total")
            read = last.count("prompt_tokens_total")
            yield _row(
                "rates",
                f"{number(last.rate('engine_generation_tokens_total'))} tokens/s written, "
                f"{number(last.rate('engine_prompt_tokens_total'))} read, {number(last.rate('engine_steps_total'))} "
                f"steps/s, {last.rate('request_success_total'):.1f} requests/s done"
                f"{f', {cached / read:.0%} of prompts cached' if read else ''}",
            )
        yield _row("", f"{_DIM}{'p50':>14}{'p90':>12}{'p99':>12}{_PLAIN}")
        since = f"of {window.seconds:.0f} s" if len(self.looks) > 2 else "since the start"
        for index, (title, name) in enumerate(_LATENCIES):
            cells = "".join(f"{seconds(each):>12}" for each in window.percentiles(name, 0.5, 0.9, 0.99))
            yield _row(title, f"  {cells}  {_DIM}{since if not index else ''}{_PLAIN}")
        pages, used = now.total("num_pages"), now.total("num_used_pages")
        kept = now.total("num_cached_pages")
        yield _row(
            "pages",
            f"{bar(used, pages)} {number(used)} used, {number(kept)} cached, {number(now.total('num_free_pages'))} "
            f"free of {number(pages)}; {number(last.count('num_preemptions_total'))} preemptions",
        )
        host = now.by("host_pages", "state")
        if sum(host.values()):
            states = ", ".join(f"{number(count)} {plain(state)}" for state, count in host.items())
            copied = last.by_label("host_copied_bytes_total", "direction")
            moved = ", ".join(
                f"{size(count / last.seconds)}/s {plain(way)}"
                for way, count in copied.items()
                if count and len(self.looks) > 1
            )
            yield _row("host tier", f"{bar(sum(host.values()) - host.get('free', 0.0), sum(host.values()))} {states}"
                       f"{f'; {moved}' if moved else ''}")  # fmt: skip
        if places := now.total("disk_kv_places"):
            cached_on_disk = now.total("disk_kv_cached_pages")
            yield _row(
                "disk tier",
                f"{bar(cached_on_disk, places)} {number(cached_on_disk)} of {number(places)} pages, "
                f"{number(now.total('disk_kv_pages_to_write'))} to write",
            )
        used_bytes, of_bytes = now.total("device_memory_used_bytes"), now.total("device_memory_total_bytes")
        if of_bytes:
            yield _row("memory", f"{bar(used_bytes, of_bytes)} {size(used_bytes)} of {size(of_bytes)}")
        guessed = last.count("draft_guessed_tokens_total")
        if guessed:
            yield _row("drafts", f"{last.count('draft_accepted_tokens_total') / guessed:.0%} of guesses right")

    def _engines(self) -> Iterator[str]:
        if len(self.engines) > 1 or any(engine.get("state") != "ready" for engine in self.engines):
            yield ""
            yield f"{_DIM}{'engine':<8}{'state':<12}{'role':<9}{'running':>8}{'waiting':>8}{'paused':>8}{_PLAIN}"
            for engine in self.engines:
                counts = "".join(f"{engine.get(name, 0):>8}" for name in ("running", "waiting", "paused"))
                head = f"{plain(engine.get('id')):<8}{plain(engine.get('state')):<12}{plain(engine.get('role')):<9}"
                yield f"{head}{counts}  {plain(engine.get('reason') or '')}"

    def _requests(self) -> Iterator[str]:
        yield ""
        if self.hidden:
            yield f"{_DIM}requests and engines are not shown: {plain(self.hidden)}{_PLAIN}"
            return
        found = self.requests.get("data", [])
        numbers = f"{'age':>8}{'prompt':>8}{'output':>13}{'pages':>7}"
        yield f"{_DIM}{'request':<26}{'state':<9}{numbers}  why it waits{_PLAIN}"
        for request in found:
            output = f"{request.get('output_tokens', 0)}/{request.get('max_output_tokens', 0)}"
            age = seconds(request.get("age_seconds"))
            yield (
                f"{plain(request.get('id'))[:25]:<26}{plain(request.get('state')):<9}{age:>8}"
                f"{request.get('prompt_tokens', 0):>8}{output:>13}{request.get('pages', 0):>7}"
                f"  {plain(request.get('reason') or '')}"
            )
        if not found:
            yield f"{_DIM}none{_PLAIN}"
        elif self.requests.get("has_more"):
            yield f"{_DIM}and more{_PLAIN}"


def _row(title: str, text: str) -> str:
    return f"{_BOLD}{title:<15}{_PLAIN}{text}"


def bar(part: float, whole: float) -> str:
    """A filled bar."""
    filled = round(_BAR * min(max(part / whole, 0.0), 1.0)) if whole else 0
    return f"[{'#' * filled}{'.' * (_BAR - filled)}]"


def plain(text: object) -> str:
    """Return a server's or client's text without characters that control a terminal."""
    return "".join(char if char.isprintable() else "?" for char in str(text))


def cut(line: str, width: int) -> str:
    """Return the line's first characters; escape codes take no room."""
    kept, room, at = "", width, 0
    while at < len(line):
        if line[at] == "\033":
            end = line.index("m", at) + 1
            kept, at = kept + line[at:end], end
        else:
            kept, room, at = kept + line[at] * (room > 0), room - 1, at + 1
    return kept.rstrip() if "\033" not in kept else kept


def main(argv: Sequence[str] | None = None) -> int:
    """Show the page until `q`; return the exit code (1: the server does not answer)."""
    parser = Parser(
        "penstock top",
        "Show what a server is doing: rows, queue, rates, latencies, pages, tiers, engines, requests. q "
        "quits. Needs an API key with the scopes metrics and admin, if the server has keys.",
    )
    add_server_options(parser, "of the server, or of its administrators' listener")
    parser.add_argument("--interval", type=_interval, default=1.0, metavar="SECONDS", help="(default: 1)")
    parser.add_argument("--once", action="store_true", help="print it once, after one interval, and end")
    args = parser.parse_args(argv)
    server = Server(args.url, args.api_key)
    view = View(name=args.url)
    try:
        if args.once or not (sys.stdout.isatty() and sys.stdin.isatty()):
            return _once(view, server, args.interval)
        with _terminal() as resized:
            _watch(view, server, args.interval, resized)
    except KeyboardInterrupt:
        pass
    return 0


def _once(view: View, server: Server, interval: float) -> int:
    view.look(server, 1000)
    if not view.error:
        time.sleep(interval)
        view.look(server, 1000)
    if view.error:
        print(f"penstock top: {view.error}", file=sys.stderr)
        return 1
    for line in view.lines(1 << 16, 1 << 16)[1:]:
        for code in (_BOLD, _DIM, _RED, _PLAIN):
            line = line.replace(code, "")
        print(line.rstrip())
    return 0


def _watch(view: View, server: Server, interval: float, resized: int) -> None:
    """Sample and draw until `q`. A byte comes over `resized` when the terminal's size changes."""
    due = 0.0
    while True:
        columns, rows = os.get_terminal_size(sys.stdout.fileno())
        if time.monotonic() >= due:
            view.look(server, rows)
            due = time.monotonic() + interval
        page = view.lines(columns - 1, rows - 1)
        sys.stdout.write("\033[H" + "".join(f"{line}{_PLAIN}\033[K\n" for line in page) + "\033[J")
        sys.stdout.flush()
        ready, _, _ = select.select([sys.stdin, resized], [], [], max(0.0, due - time.monotonic()))
        if sys.stdin in ready and os.read(sys.stdin.fileno(), 64).lower() in (b"q", b"\x1b", b""):
            return
        if resized in ready:
            os.read(resized, 64)


@contextmanager
def _terminal() -> Iterator[int]:
    """Use the alternate screen and unbuffered keys, and restore all at the end; yields a descriptor for new sizes."""
    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    tty.setcbreak(descriptor)
    sys.stdout.write(_ENTER)
    old_handler = signal.signal(signal.SIGWINCH, lambda *_: None)
    old_wakeup = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    try:
        yield reading
    finally:
        signal.set_wakeup_fd(old_wakeup)
        signal.signal(signal.SIGWINCH, old_handler)
        sys.stdout.write(_LEAVE)
        sys.stdout.flush()
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)
        os.close(reading)
        os.close(writing)


def _interval(text: str) -> float:
    value = float(text)
    if not 0.1 <= value <= 3600:
        raise argparse.ArgumentTypeError("must be between 0.1 and 3600 seconds")
    return value


if __name__ == "__main__":
    sys.exit(main())
