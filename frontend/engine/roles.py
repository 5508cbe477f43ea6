"""Which engines a request may go to, and which may compute its prompt, by what they say they do.

A request belongs to an engine that decodes. While there is one of the role "decode", its prompts go to engines of the
role "prefill", if there are any. Nobody waits for a role: prefill engines serve alone when no other engine is there.
"""

from collections.abc import Sequence

from penstock.frontend.engine.link import EngineLink

MAX_PREFILL_ENGINES = 4
"""Those named in a request: the second is for the case that the first is lost."""


def serving(links: list[EngineLink]) -> list[EngineLink]:
    """Of the links that take requests those that get them: without prefill engines, if there are others."""
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
