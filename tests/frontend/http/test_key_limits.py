"""What each API key may use: a minute's requests and tokens, requests at once, and a namespace of cached prompts."""

import http.client
import json
import re
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from penstock.cli.make_key import main as make_key
from penstock.config import ConfigError
from penstock.config.api_keys import ApiKey, digest, load_api_keys
from penstock.frontend.errors import InvalidParameter, RateLimitExceeded
from penstock.frontend.exchange.access import Access, KeyUse
from penstock.frontend.exchange.tenants import MAX_TENANT, user_of
from tests.frontend.fake_scheduler import Script
from tests.frontend.http_client import Response, error_of, get, post
from tests.frontend.live_server import LiveServer, live_server

KEYS = {
    "rare": "requests_per_minute = 2",
    "terse": "tokens_per_minute = 40",
    "single": "max_concurrent = 1",
    "red": 'namespace = "red"',
    "blue": 'namespace = "blue"',
    "free": "",
    "heavy": 'weight = 2.5\ntenant_by = "user"',
    "gateway": 'tenant_by = "user"',
}


@pytest.fixture
def live(checkpoint: Path, sockets: Path, tmp_path: Path) -> Iterator[LiveServer]:
    file = tmp_path / "keys.toml"
    entries = (f'[[keys]]\nid = "{id}"\nsha256 = "{digest(id).hex()}"\n{limit}\n' for id, limit in KEYS.items())
    file.write_text("".join(entries))
    with live_server(checkpoint, sockets, frontend={"api_keys_file": str(file)}) as server:
        yield server


def ask(live: LiveServer, key: str, **fields: Any) -> Response:
    body = {"prompt": "Hello", "max_tokens": 4} | fields
    return post(live, "/v1/completions", body, Authorization=f"Bearer {key}")


def refusal(response: Response) -> tuple[str, int]:
    """Message and Retry-After of a refusal."""
    error = error_of(response, 429)
    assert (error["type"], error["code"]) == ("rate_limit_error", "rate_limit_exceeded")
    return error["message"], int(response.headers["retry-after"])


class Clock:
    """Seconds that pass when the test says so."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def use_of(clock: Clock, **limits: Any) -> KeyUse:
    return KeyUse(ApiKey("a", b"", frozenset(), **limits), clock)


def attempt(use: KeyUse) -> RateLimitExceeded | None:
    """Begin a request; why it may not."""
    try:
        use.enter()
    except RateLimitExceeded as refused:
        return refused
    return None


@pytest.mark.parametrize("limit", [1, 7, 60, 90, 1000])
def test_whoever_waits_as_told_is_served(limit: int) -> None:
    clock = Clock()
    use = use_of(clock, requests_per_minute=limit)
    num_refused = 0
    for num_served in range(3 * limit):
        if (refused := attempt(use)) is not None:
            num_refused += 1
            assert f"{limit} of {limit} requests per minute" in refused.message
            assert refused.retry_after is not None
            assert 1 <= refused.retry_after <= 60
            clock.now += refused.retry_after
            assert attempt(use) is None
        assert num_served < limit + (clock.now - 1000.0) * limit / 60 + 1e-3
    assert num_refused > 1


def test_sequences_of_a_request_count_as_requests() -> None:
    clock = Clock()
    use = use_of(clock, requests_per_minute=10, max_concurrent=8)
    use.enter()
    use.add_sequences(5)
    use.enter()
    with pytest.raises(RateLimitExceeded, match="max_concurrent = 8, and 6 sequences run beside the 4 of this request"):
        use.add_sequences(3)
    use.leave(1)
    use.leave(6)
    use.enter()
    with pytest.raises(InvalidParameter, match="max_concurrent = 8, and the request has 9 sequences"):
        use.add_sequences(8)
    with pytest.raises(RateLimitExceeded, match="8 of 10 requests per minute"):
        use.add_sequences(3)
    clock.now += 60
    use.add_sequences(3)
    use.leave(4)
    wide = use_of(clock, requests_per_minute=10)
    wide.enter()
    with pytest.raises(InvalidParameter, match="requests_per_minute = 10, and the request has 11 sequences"):
        wide.add_sequences(10)


def test_tokens_beyond_the_limit_are_waited_for() -> None:
    clock = Clock()
    use = use_of(clock, tokens_per_minute=60)
    use.enter()
    use.use_prompt(50)
    use.use_outputs(100)
    with pytest.raises(RateLimitExceeded, match="150 of 60 tokens per minute") as refused:
        use.enter()
    assert refused.value.retry_after == 91
    clock.now += 90
    with pytest.raises(RateLimitExceeded):
        use.enter()
    clock.now += 1
    use.enter()
    clock.now += 10_000
    use.use_prompt(59)
    use.use_prompt(1)  # a long rest is worth a minute's tokens, not more
    with pytest.raises(RateLimitExceeded):
        use.use_prompt(1)


def test_limits_may_change_meanwhile() -> None:
    clock = Clock()
    use = use_of(clock)
    for _ in range(100):
        use.enter()
    use.change(ApiKey("a", b"", frozenset(), requests_per_minute=2, max_concurrent=101))
    use.enter()
    with pytest.raises(RateLimitExceeded, match="max_concurrent = 101, and 101 sequences run"):
        use.enter()
    use.leave(1)
    use.enter()
    use.leave(1)
    with pytest.raises(RateLimitExceeded, match="of 2 requests per minute"):
        use.enter()


def test_requests_per_minute(live: LiveServer) -> None:
    assert [ask(live, "rare").status for _ in range(2)] == [200, 200]
    message, seconds = refusal(ask(live, "rare"))
    assert "2 of 2 requests per minute" in message
    assert 15 <= seconds <= 30
    assert get(live, "/v1/models", Authorization="Bearer rare").status == 200, "questions of no weight do not count"
    refusal(post(live, "/tokenize", {"prompt": "Hello"}, Authorization="Bearer rare"))
    assert ask(live, "free").status == 200
    assert len(live.scheduler.added) == 3


def test_many_sequences_of_one_request(live: LiveServer) -> None:
    error = error_of(ask(live, "single", prompt=["a"] * 2), 400)
    assert "max_concurrent = 1, and the request has 2 sequences" in error["message"]
    error = error_of(ask(live, "single", beam_width=2), 400)
    assert "max_concurrent = 1, and the request has 2 sequences" in error["message"], "beams run at once"
    error = error_of(ask(live, "rare", n=3), 400)
    assert "requests_per_minute = 2, and the request has 3 sequences" in error["message"]
    error = error_of(ask(live, "free", prompt=["a"] * 64, n=60), 400)
    assert "at most 1024 sequences, this one has 3840: 64 prompts, 60 sequences each" in error["message"]
    assert not live.scheduler.added
    assert ask(live, "free", prompt=["a", "b"], n=3).status == 200
    assert {(request.tenant, request.n) for request in live.scheduler.added} == {("free", 3)}
    assert len({request.group for request in live.scheduler.added}) == 1
    for _ in range(2):
        assert ask(live, "single").status == 200
    assert len({request.group for request in live.scheduler.added}) == 3


def test_tokens_per_minute_count_as_they_come(live: LiveServer) -> None:
    live.plays(lambda request, i: Script([5] * 400, delay=0.02))
    running = http.client.HTTPConnection("127.0.0.1", live.port, timeout=60)
    with closing(running):
        body = json.dumps({"prompt": "Hello", "max_tokens": 400, "stream": True})
        headers = {"Authorization": "Bearer terse", "Content-Type": "application/json"}
        running.request("POST", "/v1/completions", body, headers)
        answer = running.getresponse()
        seen = b""
        while seen.count(b"data: ") < 60:  # more than a minute's
            seen += answer.read1()
        message, seconds = refusal(ask(live, "terse"))
        found = re.search(r"(\d+) of 40 tokens per minute", message)
        assert found is not None
        assert int(found[1]) > 40
        assert seconds >= (int(found[1]) - 40) * 60 // 40
        assert b"error" not in seen + answer.read1(), "the one that runs goes on"


def test_a_prompt_counts(live: LiveServer) -> None:
    live.plays(lambda request, i: Script([5]))
    assert ask(live, "terse", prompt=[5] * 100, max_tokens=1).status == 200
    message, seconds = refusal(ask(live, "terse"))
    assert re.search("(100|101) of 40 tokens", message)
    assert 80 <= seconds <= 93


def test_max_concurrent(live: LiveServer) -> None:
    live.plays(lambda request, i: Script([5] * 400, delay=0.02))
    body = json.dumps({"prompt": "Hello", "max_tokens": 400, "stream": True})
    headers = {"Authorization": "Bearer single", "Content-Type": "application/json"}
    with closing(http.client.HTTPConnection("127.0.0.1", live.port, timeout=60)) as running:
        running.request("POST", "/v1/completions", body, headers)
        running.getresponse().read1()
        message, seconds = refusal(ask(live, "single"))
        assert "max_concurrent = 1, and 1 sequences run" in message
        assert seconds == 1
    live.plays(lambda request, i: Script([5]))
    live.wait_until(lambda: not any(use._num_running for use in live.server.service.access._uses.values()))
    for _ in range(3):  # whatever became of the one before: its client left, it was served, or it was refused
        assert ask(live, "single").status == 200
        assert ask(live, "single", max_tokens="many").status == 400


def test_namespaces_share_nothing(live: LiveServer) -> None:
    salted: tuple[dict[str, str], ...] = ({}, {"cache_salt": "s"})
    for key in ("red", "blue", "free"):
        for fields in salted:
            assert ask(live, key, **fields).status == 200
    salts = [request.cache_salt for request in live.scheduler.added]
    assert len(set(salts)) == 6
    assert ask(live, "free", cache_salt=salts[1]).status == 400, "nobody can ask for another's namespace"
    assert ask(live, "red", cache_salt="s" * 128).status == 200
    assert ask(live, "free", cache_salt="s" * 128).status == 200
    assert all(ask(live, key).status == 200 for key in ("single", "rare"))
    assert len({request.cache_salt for request in live.scheduler.added[-2:]} - set(salts)) == 2, "by default, too"


def key(name: str, **fields: Any) -> ApiKey:
    return ApiKey(name, digest(name), frozenset({"infer"}), **fields)


def salt_of(access: Access, name: str) -> str:
    return access.check("infer", [f"Bearer {name}"]).salted("")


def test_keys_of_one_namespace_share_cached_prompts() -> None:
    metrics = ApiKey("m", digest("m"), frozenset({"metrics"}))
    alone = Access((key("a"), metrics))
    assert salt_of(alone, "a") == "", "nobody else asks the model"
    alone.change((key("a"), key("b"), metrics))
    assert len({"", salt_of(alone, "a"), salt_of(alone, "b")}) == 3
    apart = Access((key("a"), key("b", namespace="x"), key("c", namespace="x")))
    assert salt_of(apart, "b") == salt_of(apart, "c") != salt_of(apart, "a")


def test_weights_and_users_are_told_to_the_scheduler(live: LiveServer) -> None:
    long = {"safety_identifier": "u" * 300}
    for key, fields in (("heavy", {}), ("heavy", {"user": "u"}), ("gateway", long), ("free", {"user": "u"})):
        assert ask(live, key, **fields).status == 200
    told = [(request.tenant, request.weight) for request in live.scheduler.added]
    assert told[:2] == [("heavy", 2.5), ("heavy\nu", 2.5)]
    assert told[2][0].startswith("gateway\n")
    assert told[2][1] == 1.0
    assert told[3] == ("free", 1.0)


def test_each_user_has_a_name_of_its_own() -> None:
    names = [user_of(tenant, user) for tenant in ("a", "b" * 200) for user in ("u", "v", "u" * 500, "u" * 501)]
    assert len(set(names)) == len(names)
    assert max(map(len, names)) <= MAX_TENANT


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("requests_per_minute = 0", "requests_per_minute must be a whole number of at least 1, got 0"),
        ("tokens_per_minute = 1.5", "tokens_per_minute must be a whole number"),
        ("max_concurrent = true", "max_concurrent must be a whole number"),
        ('namespace = ""', "namespace must be"),
        ('namespace = "a b"', "namespace must be"),
        ("namespace = 3", "namespace must be"),
        ("weight = 0", "weight must be a number from 0.001 to 1000, got 0"),
        ("weight = nan", "weight must be"),
        ("weight = true", "weight must be"),
        ('tenant_by = "address"', "tenant_by must be key or user, got 'address'"),
        ("tenant_by = [1]", "tenant_by must be"),
        ("tokens_per_hour = 3", "only id, sha256"),
    ],
)
def test_a_wrong_limit_is_refused(tmp_path: Path, line: str, reason: str) -> None:
    file = tmp_path / "keys.toml"
    file.write_text(f'[[keys]]\nid = "a"\nsha256 = "{digest("k").hex()}"\n{line}\n')
    with pytest.raises(ConfigError, match=re.escape(reason)):
        load_api_keys(str(file), {})


def test_limits_are_made_with_the_key(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        make_key(["a", "--requests-per-minute", "60", "--max-concurrent", "4", "--namespace", "red", "--weight", "3"])
        == 0
    )
    file = tmp_path / "keys.toml"
    file.write_text(capsys.readouterr().out)
    [key] = load_api_keys(str(file), {})
    assert (key.requests_per_minute, key.tokens_per_minute, key.max_concurrent) == (60, 0, 4)
    assert (key.namespace, key.weight) == ("red", 3.0)
