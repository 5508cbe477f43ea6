"""Options of drafts."""

from typing import Annotated, ClassVar

from msgspec import Meta

from penstock.config.groups.base import Shown
from penstock.config.options import Config
from penstock.config.part_options import PartOptions
from penstock.parts.drafts.speculative import SpeculativeConfig, speculative_config


class DraftOptions(PartOptions, frozen=True):
    """Tokens drafted ahead of the model ([speculation](speculation.md))."""

    part: ClassVar[str] = "drafts"
    title: ClassVar[str] = "Speculation"
    beside: ClassVar[str] = "worker"

    speculative_config: Annotated[
        str,
        Meta(
            description="Draft tokens ahead of the model, which verifies several in one step: JSON with vLLM's keys, "
            'such as \'{"method": "ngram", "num_speculative_tokens": 4}\'. Empty: no drafts. The text is the same.'
        ),
        Shown("JSON", 'draft tokens ahead, such as \'{"method": "ngram"}\''),
    ] = ""

    @property
    def speculative(self) -> SpeculativeConfig | None:
        """What drafts; None without drafts.

        Raises:
            ValueError: what is wrong with the option.
        """
        return speculative_config(self.speculative_config)

    def problem(self, config: Config) -> str:
        """The JSON says something that can be, and stages of a pipeline can draft so."""
        try:
            speculative = self.speculative
        except ValueError as error:
            return f"--speculative-config {self.speculative_config}: {error}"
        method = "ngram" if speculative is None else speculative.method
        if method != "ngram" and config.parallel.pipeline_parallel_size > 1:
            return f"--speculative-config: the stages of a pipeline draft with ngram only, not with {method}"
        return ""

    def problem_with_states(self) -> tuple[str, str] | None:
        """Wrong guesses have changed the states."""
        why = "which cannot go back behind wrong guesses"
        return ("--speculative-config", why) if self.speculative_config else None


PARTS = (DraftOptions,)
