"""Routes for who watches engines: one question to the engine for all clients, and it ends with the last of them."""

import http.client
import json
from functools import partial
from typing import Any

import pytest

from penstock.ipc.codec import pack_int32
from penstock.ipc.messages import Message
from penstock.parts.watching.frontend.told import id_of, key_of, ranges
from penstock.parts.watching.messages import (
    CACHED,
    FREE,
    OWNED,
    InRow,
    ListPages,
    ListPrefixes,
    PageMap,
    PageRuns,
    Picture,
    PrefixNode,
    PrefixTree,
    RequestLife,
    SequenceEvent,
    ShowLife,
    Waiting,
    WatchedStep,
    WatchedSteps,
    WatchSteps,
)
from tests.frontend.http_client import Response, error_of, get
from tests.frontend.live_server import LiveServer

WIRE = "penstock-frontend-0:7:abc"


def of_kind(live: LiveServer, kind: type) -> list[Any]:
    return [message for message in live.scheduler.received if isinstance(message, kind)]


def batch(number: int, *steps: WatchedStep, picture: Picture | None = None) -> WatchedSteps:
    event = SequenceEvent(1.0, "admitted", WIRE, 0, 3, 10, 4)
    queue = (Waiting("penstock-frontend-0:8:def", 0, 1.5, 20, "no free row: 1 of 1 in use"),)
    totals = {"steps": 5}
    return WatchedSteps(number, 2.0, 1e9, steps, 4, (event,), 1, queue, 1, {"no free row": 1}, totals, picture)


class Stream:
    """A client of /debug/steps."""

    def __init__(self, live: LiveServer, query: str = "") -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", live.port, timeout=60)
        self._connection.request("GET", f"/debug/steps{query}")
        self.answer = self._connection.getresponse()
        assert self.answer.status == 200
        assert self.answer.headers["content-type"] == "text/event-stream; charset=utf-8"

    def next(self) -> Any:
        """The next event."""
        while (line := self.answer.readline()) != b"event: steps\n":
            assert line, "it ended"
        data = self.answer.readline()
        assert data.startswith(b"data: ")
        return json.loads(data[6:])

    def close(self) -> None:
        self.answer.close()
        self._connection.close()


def test_steps_as_they_happen(live: LiveServer) -> None:
    one, other = Stream(live), Stream(live, "?engine=0")
    live.wait_until(lambda: len(of_kind(live, WatchSteps)) >= 2)
    rows = pack_int32([0, 1, 2, 5, 9])
    first = WatchedStep(
        4, 0, 1.0, 1.25, 100, 2000, 30, 4, rows, False, pack_int32([64]), pack_int32([1, 3, 1, 1]),
        pack_int32([0, 2, 2, 0]), 6, 90, 8, (5, 1), 2, 3,
    )  # fmt: skip
    then = WatchedStep(9, 4, 1.5, 1.75, 100, 2000, 30, 4, b"", True, pack_int32([32]))
    running = (InRow(5, WIRE, 0, 1.0, 20, 30, 11),)
    live.do(lambda: live.scheduler.tell(batch(1, first, then, picture=Picture(16, 100, 4, 6, 0, running, 1))))
    for stream in (one, other):
        told = stream.next()
        assert (told["engine"], told["number"], told["left_out"], told["totals"]) == ("0", 1, 4, {"steps": 5})
        step, same = told["steps"]
        assert step["decodes"] == same["decodes"] == [[0, 2], [5, 5]]
        assert (step["chunks"], same["chunks"]) == ([[9, 64]], [[9, 32]])
        assert (step["guesses"], same["guesses"]) == ([[1, 2, 3], [2, 2, 1]], [])
        assert (step["sent"], step["returned"], step["idle_us"], step["host_pages"]) == (1.0, 1.25, 30, [5, 1])
        assert same["left_out"] == 4
        [event] = told["events"]
        assert event == {"at": 1.0, "kind": "admitted", "key": "7:abc", "index": 0, "row": 3, "tokens": 10, "more": 4,
                         "text": "", "until": 0.0}  # fmt: skip
        [waiting] = told["queue"]
        assert (waiting["key"], waiting["reason"]) == ("8:def", "no free row: 1 of 1 in use")
        assert told["picture"]["running"] == [
            {"row": 5, "key": "7:abc", "index": 0, "arrived": 1.0, "prompt_tokens": 20, "computed_tokens": 30,
             "output_tokens": 11}
        ]  # fmt: skip
    one.close()
    live.do(lambda: live.scheduler.tell(batch(2)))
    assert other.next()["number"] == 2
    other.close()
    live.wait_until(lambda: of_kind(live, WatchSteps)[-1] == WatchSteps(0))


def test_a_stream_of_some_seconds_ends(live: LiveServer) -> None:
    answer = get(live, "/debug/steps?seconds=1")
    assert answer.status == 200
    live.wait_until(lambda: of_kind(live, WatchSteps)[-1] == WatchSteps(0))
    assert len([order for order in of_kind(live, WatchSteps) if order.lease]) >= 1


def test_a_lease_is_renewed(live: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.parts.watching.frontend.feeds.RENEWAL", 0.05)
    stream = Stream(live)
    live.wait_until(lambda: len(of_kind(live, WatchSteps)) > 4)
    stream.close()


def at(now: float, number: int, *, has_picture: bool = False) -> WatchedSteps:
    """A message of this moment."""
    picture = Picture(16, 100, 4, 6, 0, (), 0) if has_picture else None
    return WatchedSteps(number, now, 1e9, (), 0, (), 0, (), 0, {}, {}, picture)


def test_who_comes_later_gets_the_last_seconds(live: LiveServer) -> None:
    """From the last picture before them on: without one they do not say who has which row."""
    stream = Stream(live)
    live.wait_until(lambda: bool(of_kind(live, WatchSteps)))
    moments = enumerate([0.0, 50.0, 55.0, 60.0, 75.0, 80.0], start=1)
    told = [at(now, number, has_picture=number in (1, 2, 3, 5)) for number, now in moments]
    for each in told:
        live.do(partial(live.scheduler.tell, each))
    assert [stream.next()["number"] for _ in told] == [1, 2, 3, 4, 5, 6]
    for query, numbers in (("?last=30", [2, 3, 4, 5, 6]), ("?last=22", [3, 4, 5, 6]), ("?last=2", [5, 6])):
        late = Stream(live, query)
        assert [late.next()["number"] for _ in numbers] == numbers
        live.do(lambda: live.scheduler.tell(at(80.0, 6)))  # what is new follows
        assert late.next()["number"] == 6
        late.close()
        stream.next()
    live.do(lambda: live.scheduler.tell(at(3.0, 1, has_picture=True)))  # another scheduler
    stream.next()
    late = Stream(live, "?last=30")
    assert late.next()["now"] == 3.0
    late.close()
    stream.close()


def test_the_past_is_bounded(live: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.parts.watching.frontend.feeds.MAX_PAST_BYTES", 1000)
    stream = Stream(live)
    live.wait_until(lambda: bool(of_kind(live, WatchSteps)))
    for number in range(1, 9):
        live.do(partial(live.scheduler.tell, at(1.0, number, has_picture=True)))
    assert [stream.next()["number"] for _ in range(8)] == [*range(1, 9)]
    late = Stream(live, "?last=30")
    assert late.next()["number"] > 4
    late.close()
    monkeypatch.setattr("penstock.parts.watching.frontend.feeds.MAX_PAST_BYTES", 10)  # no event fits
    live.do(partial(live.scheduler.tell, at(1.0, 9, has_picture=True)))
    assert stream.next()["number"] == 9
    stream.close()


def test_a_held_feed_goes_on_without_clients_for_a_while(live: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.parts.watching.frontend.feeds.RENEWAL", 0.05)
    assert get(live, "/debug/steps?seconds=0&hold=1").status == 200
    live.wait_until(lambda: len(of_kind(live, WatchSteps)) > 4)
    assert WatchSteps(0) not in of_kind(live, WatchSteps)
    live.do(lambda: live.scheduler.tell(at(7.0, 1, has_picture=True)))
    live.wait_until(lambda: of_kind(live, WatchSteps)[-1] == WatchSteps(0))
    stream = Stream(live, "?last=30")
    live.wait_until(lambda: bool(of_kind(live, WatchSteps)[-1].lease))
    live.do(lambda: live.scheduler.tell(at(8.0, 2, has_picture=True)))
    assert stream.next()["number"] == 2, "when nobody watches any more, nothing is kept"
    stream.close()


def test_too_many_watch(live: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.parts.watching.frontend.feeds.MAX_WATCHES", 1)
    stream = Stream(live)
    live.wait_until(lambda: bool(of_kind(live, WatchSteps)))
    assert "1 clients watch" in error_of(get(live, "/debug/steps"), 503)["message"]
    stream.close()


@pytest.mark.parametrize(
    ("path", "status", "said"),
    [
        ("/debug/steps?engine=7", 404, "there is no engine '7'; there is: 0"),
        ("/debug/steps?seconds=-1", 400, "seconds must be a whole number"),
        ("/debug/steps?last=31", 400, "last must be a number from 1 to 30"),
        ("/debug/steps?hold=0", 400, "hold must be a number from 1 to 120"),
        ("/debug/kv?engine=x", 404, "there is no engine 'x'; there is: 0"),
        ("/debug/prefix_tree?depth=0", 400, "depth must be a number from 1 to 64"),
        ("/debug/prefix_tree?limit=9999", 400, "limit must be a number from 1 to 2000"),
    ],
)
def test_what_is_refused(live: LiveServer, path: str, status: int, said: str) -> None:
    assert error_of(get(live, path), status)["message"] == said


def asked(live: LiveServer, path: str, answer: Any) -> Response:
    """GET, while the engine answers a question with this message, whatever its number."""
    before = live.scheduler._on_message

    def on_message(peer: bytes, message: Message) -> None:
        if isinstance(message, ListPages | ListPrefixes | ShowLife):
            live.scheduler.router.send(peer, answer(message.number))
        before(peer, message)  # type: ignore[arg-type]

    live.do(lambda: setattr(live.scheduler.router, "_on_message", on_message))
    try:
        return get(live, path)
    finally:
        live.do(lambda: setattr(live.scheduler.router, "_on_message", before))


def test_who_owns_the_pages(live: LiveServer) -> None:
    runs = PageRuns("device", 12, 1, pack_int32([OWNED, CACHED, FREE]), pack_int32([0, 0, -1]), pack_int32([2, 3, 7]),
                    {"free": 7, "cached": 3, "owned": 2})  # fmt: skip
    told = asked(live, "/debug/kv", lambda number: PageMap(number, 16, ((WIRE, 1, 2),), (runs,), {"places": 9})).json()
    assert told["owners"] == [{"key": "7:abc", "index": 1, "pages": 2}]
    assert told["tiers"][0]["runs"] == [["owned", 0, 0, 2], ["cached", -1, 0, 3], ["free", -1, -1, 7]]
    assert (told["engine"], told["page_size"], told["disk"]) == ("0", 16, {"places": 9})


def test_prefixes_with_their_text(live: LiveServer) -> None:
    token_ids = pack_int32(live.tokenizer.encode("Hello world", add_special_tokens=False))
    nodes = (
        PrefixNode(-1, 0, 32, 1, 3, 0.0, b"", 1, "salt"),
        PrefixNode(0, 32, 0, 1, 3, 4.0, token_ids, 0),
    )
    told = asked(
        live, "/debug/prefix_tree?depth=3&limit=50", lambda number: PrefixTree(number, 9.0, 16, 2, 1, nodes, True)
    ).json()
    assert [node["text"] for node in told["nodes"]] == ["", "Hello world"]
    assert [node["last_used_seconds"] for node in told["nodes"]] == [None, 5.0]
    assert told["nodes"][0]["namespace"] == "salt"
    assert of_kind(live, ListPrefixes)[-1].depth == 3


def test_the_life_of_a_request(live: LiveServer) -> None:
    events = (
        SequenceEvent(1.0, "arrived", WIRE, 0, -1, 12, 1),
        SequenceEvent(1.0, "waited", WIRE, text="no free row", until=3.0),
    )
    told = asked(live, "/debug/requests/abc", lambda n: RequestLife(n, 9.0, 1e9, WIRE, events, 0, True, True)).json()
    assert (told["id"], told["key"], told["is_live"]) == ("abc", "7:abc", True)
    assert [event["kind"] for event in told["events"]] == ["arrived", "waited"]
    assert told["events"][1]["until"] == 3.0
    nobody = asked(live, "/debug/requests/xyz", lambda n: RequestLife(n, 9.0, 1e9, "", (), 0, False, False))
    assert error_of(nobody, 404)["code"] == "request_not_found"


def test_names() -> None:
    assert key_of("penstock-frontend-0:7:abc:def#3") == "7:abc:def"
    assert id_of("penstock-frontend-0:7:abc:def#3") == "abc:def"
    assert (key_of("bare"), id_of("bare")) == ("bare", "bare")
    assert list(ranges([5, 1, 2, 0, 9])) == [(0, 2), (5, 5), (9, 9)]
    assert list(ranges([])) == []
