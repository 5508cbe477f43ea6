"""Which engines a request may go to, and which may compute its prompt, by the roles that the engines report.

A request belongs to an engine that decodes. An engine with the role "decode" gives its prompts to engines with the
role "prefill", if there are any. No request waits for a role: if only prefill engines are left, they serve alone.
"""

from collections.abc import Sequence

from penstock.frontend.engine.link import EngineLink

MAX_PREFILL_ENGINES = 4
"""How many are named in a request: the second is used if the first is lost, and so on."""


def serving(links: list[EngineLink]) -> list[EngineLink]:
    """Of the links that take requests, those that should get them: no prefill engines if there are others."""
    return [link for link in links if link.facts is not None and link.facts.role != "prefill"] or links


def prefill_addresses(links: Sequence[EngineLink], link: EngineLink) -> tuple[str, ...]:
    """The engines that may compute a prompt for the engine of `link`, the one with the shortest queue first."""
    if link.facts is None or link.facts.role != "decode":
        return ()
    ready = [each for each in links if each.takes_requests and each.facts is not None and each.facts.role == "prefill"]
    ready.sort(key=_num_tokens_ahead)
    return tuple(each.to.address for each in ready[:MAX_PREFILL_ENGINES])


def _num_tokens_ahead(link: EngineLink) -> int:
    return 0 if link.stats is None else link.stats.num_waiting_tokens + link.stats.num_prefill_tokens
