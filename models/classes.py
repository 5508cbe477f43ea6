"""What a checkpoint says of the classes into which its model sorts texts."""

from typing import Literal

from penstock.models.files.source import Checkpoint
from penstock.models.parsing.json_fields import JsonFields

ClassActivation = Literal["identity", "sigmoid", "softmax"]
"""What turns the logits of classes into what is answered."""


def class_names(checkpoint: Checkpoint, num_classes: int) -> tuple[str, ...]:
    """Return the classes' names, as `id2label` in config.json has them; otherwise those that transformers makes up."""
    named = JsonFields("config.json", checkpoint.config).object("id2label")
    names = {} if named is None else {name: named.text(name) for name in named.names()}
    return tuple(names.get(str(number), f"LABEL_{number}") for number in range(num_classes))


def class_activation(checkpoint: Checkpoint, num_classes: int) -> ClassActivation:
    """Return what makes probabilities of the logits, as transformers' pipelines choose it."""
    problem = JsonFields("config.json", checkpoint.config).text("problem_type")
    if problem == "regression":
        return "identity"
    return "sigmoid" if num_classes == 1 or problem == "multi_label_classification" else "softmax"


def score_activation(checkpoint: Checkpoint) -> ClassActivation:
    """Return what makes a score of a cross-encoder's only logit: a sigmoid, unless its files say that nothing does."""
    fields = JsonFields("config.json", checkpoint.config)
    of_library = fields.object("sentence_transformers")
    said = "" if of_library is None else of_library.text("activation_fn")
    said = said or fields.text("sbert_ce_default_activation_function")
    return "identity" if said.rpartition(".")[2] == "Identity" else "sigmoid"
