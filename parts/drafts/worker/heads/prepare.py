"""Heads that take hidden states: from their checkpoints to drafters."""

from penstock.gpu_worker.state.kv_pool import one_group
from penstock.gpu_worker.state.row_state import RowState
from penstock.gpu_worker.steps.ahead import Target
from penstock.models.check import ModelTensors
from penstock.models.description.decoder import Decoder
from penstock.parts.drafts.checkpoints.check import find_head
from penstock.parts.drafts.checkpoints.head import DraftHead
from penstock.parts.drafts.checkpoints.medusa import Medusa
from penstock.parts.drafts.speculative import SpeculativeConfig
from penstock.parts.drafts.token_trees import token_tree
from penstock.parts.drafts.worker.heads.eagle import NUM_KEPT, HeadDrafter
from penstock.parts.drafts.worker.heads.hidden_states import HiddenStates
from penstock.parts.drafts.worker.heads.medusa import MedusaDrafter, load_medusa
from penstock.parts.drafts.worker.heads.weights import load_head
from penstock.parts.drafts.worker.pages import DraftPages, draft_page_bytes
from penstock.parts.drafts.worker.prepared import Prepared


def prepare(config: SpeculativeConfig, target: Target) -> Prepared:
    """As `registry.Prepare`."""
    head, tensors = find_head(target.config, config, target.model_config)
    if isinstance(head, Medusa):
        return _medusa(head, tensors, config, target)
    return _layers(head, tensors, config.num_speculative_tokens, target)


def _layers(head: DraftHead, tensors: ModelTensors, most: int, target: Target) -> Prepared:
    weights, device = load_head(head, tensors, target), target.device
    group = one_group(head.decoder, target.config.scheduler.page_size)
    num_kept, hidden_size = max(NUM_KEPT, most + 2), head.decoder.hidden_size

    def make(num_pages: int, state: RowState) -> HeadDrafter:
        pages = DraftPages(group, num_pages, target.dtype, device)
        kept = HiddenStates(state.token_ids.shape[0], num_kept, hidden_size, target.dtype, device)
        return HeadDrafter(weights, pages, state, target.model, device, kept)

    row_bytes = num_kept * hidden_size * target.dtype.itemsize
    return Prepared(make, draft_page_bytes(group, target.dtype), row_bytes=row_bytes)


def _medusa(medusa: Medusa, tensors: ModelTensors, config: SpeculativeConfig, target: Target) -> Prepared:
    weights, model, most = load_medusa(medusa, tensors, target), target.model_config, config.num_speculative_tokens
    text = config.speculative_token_tree
    tree = token_tree(text, most, len(medusa.heads)) if text else ()
    assert isinstance(model, Decoder)

    def make(num_pages: int, state: RowState) -> MedusaDrafter:
        kept = HiddenStates(state.token_ids.shape[0], most + 2, model.hidden_size, target.dtype, target.device)
        return MedusaDrafter(weights, state, target.model, target.device, kept, tree)

    return Prepared(make, row_bytes=(most + 2) * model.hidden_size * target.dtype.itemsize)
