"""Beam search in a frontend."""

from penstock.frontend.engine.generation import TokenSource
from penstock.frontend.part import FrontendPart
from penstock.frontend.validation.beams import Beams
from penstock.parts.beam_search.frontend.beams import Searches


class BeamSearch(FrontendPart):
    """Searches for the requests that ask for it."""

    def searcher(self, beams: Beams, engine: TokenSource) -> TokenSource:
        return Searches(beams, engine)


PARTS = (BeamSearch,)
