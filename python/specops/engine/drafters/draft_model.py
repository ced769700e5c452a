# SPDX-License-Identifier: Apache-2.0
"""Draft model: a smaller model with the target's vocabulary that decodes ahead of the target."""

from pathlib import Path

import torch
from torch import Tensor

from specops import batching
from specops.api.errors import ModelError
from specops.api.methods.draft_model import METHOD, DraftModelOptions
from specops.api.tokenizer import Tokenizer
from specops.engine.drafters.base import Drafter, DrafterContext
from specops.engine.drafters.head import DraftRows
from specops.engine.drafters.recurrent import RecurrentDrafter
from specops.engine.drafters.stack_head import StackHead, named_weights
from specops.engine.models import CacheCapacity, KvBytes, StepBatch, Transformer, load_model


def load(context: DrafterContext) -> Drafter:
    """Make the drafter for the draft model that the configuration names.

    Raises:
        MethodUnavailable: the configuration names no model.
        ModelError: the model cannot be used, or does not fit this target.
    """
    config = context.config
    own, named = named_weights(context, DraftModelOptions, "draft model is")
    directory = Path(named)
    _check_vocabulary(directory, context)
    try:
        model = load_model(
            directory,
            dtype=config.dtype,
            max_model_len=context.target.max_model_len,
            device=context.target.device,
            load_format=config.load_format,
            kv_cache_dtype=config.kv_cache_dtype,
            quantization=own.quantization or config.quantization,
            quantize_head=own.quantization or config.quantize_head,
            weight_cache=context.target.settings.cache,
        )
    except ModelError as error:
        raise ModelError(f"draft model {directory}: {error}") from error
    sizes = model.config.vocab_size, context.target.config.vocab_size
    if sizes[0] != sizes[1]:
        raise ModelError(
            f"{directory / 'config.json'}: vocab_size is {sizes[0]}, but the target has {sizes[1]}"
        )
    return DraftModelDrafter(context, model)


def _check_vocabulary(directory: Path, context: DrafterContext) -> None:
    """Reject a model whose tokens differ from the target's."""
    try:
        tokenizer = Tokenizer.from_dir(directory)
    except ValueError as error:
        raise ModelError(f"draft model {directory}: {error}") from error
    if tokenizer.fingerprint() != context.tokenizer.fingerprint():
        raise ModelError(
            f"draft model {directory}: tokenizer.json has another vocabulary than the target's in "
            f"{context.config.model_dir}; a draft model must have the same"
        )


class DraftModelDrafter(RecurrentDrafter):
    """Recurrent drafter that also supports draft models with linear attention.

    Their states lie in slots, which hold the states of the last positions as the target's slots do.
    Each step continues from the state after the last token known before it, so rejected drafts need
    no rollback.

    Args:
        context: the engine's config, target, tokenizer and device.
        model: the draft model, on the target's device.
    """

    head: "DraftModelHead"

    def __init__(self, context: DrafterContext, model: Transformer) -> None:
        config = context.config
        max_drafts = config.speculative_config.num_speculative_tokens
        head = DraftModelHead(model, config.max_num_seqs, max_drafts)
        super().__init__(METHOD.name, context, head, draws=True)
        # A slot keeps the states of the drafts after the last known token. With prefix caching, it
        # also keeps as many states within the step's own tokens.
        self._num_behind = max_drafts * (1 + config.enable_prefix_caching)
        self.kv_bytes = KvBytes(
            model.kv_bytes_per_token(),
            model.kv_bytes_per_slot(self._num_behind),
            model.kv_bytes_per_slot(0),
        )

    def allocate(self, capacity: CacheCapacity) -> None:
        """Allocate keys and values on the target's pages, and states if the model has any."""
        super().allocate(capacity._replace(num_drafts=self._num_behind))
        if self.head.model.keeps_states:
            self.states = self.head.cache


class DraftModelHead(StackHead):
    """Draft model as a `DraftHead`: a row reads the token at its own position, and no states.

    Args:
        model: the draft model, on the target's device.
        slots: number of request slots.
        max_drafts: number of drafts that slots have memory for, if the model keeps states.

    Attributes:
        model: the argument.
    """

    reads_states = False
    lookahead = 0

    def __init__(self, model: Transformer, slots: int, max_drafts: int) -> None:
        super().__init__(model)
        self.model = model
        self.max_drafts = max_drafts if model.keeps_states else None
        self._slots = torch.arange(slots, dtype=torch.int32, device=model.device)
        self._ints: Tensor

    def reserve(self, rows: int) -> None:
        """Allocate the buffers for passes with up to `rows` rows."""
        super().reserve(rows)
        self._ints = torch.empty((3, rows), dtype=torch.int32, device=self.model.device)

    def forward(self, index: int, rows: DraftRows, states: Tensor) -> tuple[Tensor, Tensor]:
        """Run the model over rows; see `DraftHead.forward`."""
        batch = StepBatch(
            token_ids=self._token_ids(rows),
            positions=rows.positions,
            cache_slots=rows.cache_slots,
            qo_indptr=rows.qo_indptr,
            kv_indptr=rows.kv_indptr,
            kv_indices=rows.kv_indices,
            kv_lens=rows.kv_lens,
            slots=rows.slots,
            prefixes=rows.prefixes,
            workspace=rows.workspace,
            sums=rows.sums,
        )
        hidden = self.model.forward(batch, self.cache)
        return hidden, hidden

    def _token_ids(self, rows: DraftRows) -> Tensor:
        """Return the token of each row, from the text or from the drafts after it."""
        request, slot, out = self._ints[:, : rows.positions.shape[0]]
        torch.clamp(rows.row_to_request, min=0, out=request)
        torch.index_select(rows.slots, 0, request, out=slot)
        slot.masked_fill_(rows.row_to_request < 0, -1)
        return batching.gather_input_ids(
            slot,
            rows.positions,
            self._slots,
            rows.token_ids,
            rows.lens,
            rows.draft_token_ids,
            out=out,
        )
