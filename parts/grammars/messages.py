"""What scheduler and worker tell each other of grammars."""

from penstock.ipc.messages import Message


class PrepareGrammar(Message, frozen=True):
    """Prepare a grammar while steps go on; `GrammarPrepared` answers. No row uses it before that.

    The worker keeps it until it is dropped, or until the worker says hello again.
    """

    grammar_id: int  # never reused
    grammar: str  # as in `SamplingParams`
    num_bytes: int = 0  # memory that it takes, approximately


class DropGrammar(Message, frozen=True):
    """No row will use this grammar any more; the worker may keep it for another grammar with the same text."""

    grammar_id: int


class GrammarPrepared(Message, frozen=True):
    """A grammar is ready for rows, or could not be prepared."""

    grammar_id: int
    error: str = ""  # why not, for the client


TO_WORKER = (PrepareGrammar, DropGrammar)
FROM_WORKER = (GrammarPrepared,)
