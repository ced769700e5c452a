# SPDX-License-Identifier: Apache-2.0
"""Draft model: a smaller model that decodes ahead of the target."""

import logging
from pathlib import Path

import torch
from torch import Tensor

from specops import batching
from specops.api.errors import ModelError
from specops.api.methods.draft_model import METHOD, DraftModelOptions
from specops.api.tokenizer import Tokenizer
from specops.checkpoints.gguf_directory import SUFFIX, gguf_directory
from specops.engine.drafters.base import Drafter, DrafterContext
from specops.engine.drafters.head import DraftRows
from specops.engine.drafters.recurrent import RecurrentDrafter
from specops.engine.drafters.stack_head import StackHead, named_weights
from specops.engine.drafters.token_maps import TokenMap, of_sizes, of_tokenizers
from specops.engine.models import CacheCapacity, KvBytes, StepBatch, Transformer, load_model
from specops.engine.models.families import read_model_config
from specops.engine.models.loader import head_name

logger = logging.getLogger(__name__)


def load(context: DrafterContext) -> Drafter:
    """Make the drafter for the draft model that the configuration names.

    Raises:
        MethodUnavailable: the configuration names no model.
        ModelError: the model cannot be used, or does not fit this target.
    """
    config = context.config
    own, named = named_weights(context, DraftModelOptions, "draft model is")
    directory = Path(named)
    try:
        directory = gguf_directory(directory) if directory.suffix == SUFFIX else directory
        length = read_model_config(directory).max_model_len
        model = load_model(
            directory,
            dtype=config.dtype,
            max_model_len=min(length, context.target.max_model_len),
            device=context.target.device,
            load_format=config.load_format,
            kv_cache_dtype=config.kv_cache_dtype,
            quantization=own.quantization or config.quantization,
            quantize_head=own.quantization or config.quantize_head,
            weight_cache=context.target.settings.cache,
        )
        tokens = _token_map(directory, model, context)
    except ValueError as error:
        raise ModelError(f"draft model {directory}: {error}") from error
    if length < context.target.max_model_len:
        logger.warning(
            "draft model %s reads %d tokens: longer requests are decoded without its drafts",
            directory,
            length,
        )
    return DraftModelDrafter(context, model, tokens)


def _token_map(directory: Path, model: Transformer, context: DrafterContext) -> TokenMap:
    """Return the map between the vocabularies, and cut the model's LM head to the mapped rows.

    Raises:
        ModelError: the vocabularies have no token in common.
    """
    tokenizer, target = Tokenizer.from_dir(directory), context.target
    sizes = target.config.vocab_size, model.config.vocab_size
    if tokenizer.fingerprint() == context.tokenizer.fingerprint():
        tokens = of_sizes(*sizes)
    else:
        tokens = of_tokenizers(context.tokenizer, sizes[0], tokenizer, sizes[1])
        assert tokens.outputs is not None
        if not len(tokens.outputs):
            raise ModelError("tokenizer.json has no token in common with the target's")
        logger.info(
            "draft model %s has another vocabulary: it drafts %d of the target's %d tokens",
            directory,
            len(tokens.outputs),
            context.tokenizer.vocab_size,
        )
    moved = TokenMap(*(None if one is None else one.to(model.device) for one in tokens))
    if moved.rows is not None:
        source = model.settings.open(directory)
        model.lm_head = source.linear(
            "",
            (head_name(model.config, source),),
            (sizes[1],),
            model.config.hidden_size,
            quantization=model.settings.quantize_head,
            rows=moved.rows,
        )
    return moved


class DraftModelDrafter(RecurrentDrafter):
    """Recurrent drafter that also supports draft models with linear attention.

    Their states lie in slots, which hold the states of the last positions as the target's slots do.
    Each step continues from the state after the last token known before it, so rejected drafts need
    no rollback.

    Args:
        context: the engine's config, target, tokenizer and device.
        model: the draft model, on the target's device.
        tokens: map between its tokens and the target's.
    """

    head: "DraftModelHead"

    def __init__(self, context: DrafterContext, model: Transformer, tokens: TokenMap) -> None:
        config = context.config
        max_drafts = config.speculative_config.num_speculative_tokens
        head = DraftModelHead(model, config.max_num_seqs, max_drafts, tokens)
        super().__init__(METHOD.name, context, head, draws=True, max_len=model.max_model_len)
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
        tokens: map between its tokens and the target's.

    Attributes:
        model: the argument.
    """

    reads_states = False
    lookahead = 0

    def __init__(self, model: Transformer, slots: int, max_drafts: int, tokens: TokenMap) -> None:
        super().__init__(model)
        self.model, self.token_map, self._inputs = model, tokens.outputs, tokens.inputs
        self.max_drafts = max_drafts if model.keeps_states else None
        self._slots = torch.arange(slots, dtype=torch.int32, device=model.device)
        self._ints: Tensor

    def reserve(self, rows: int) -> None:
        """Allocate the buffers for passes with up to `rows` rows."""
        super().reserve(rows)
        self._ints = torch.empty((4, rows), dtype=torch.int32, device=self.model.device)

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
        request, slot, out, mapped = self._ints[:, : rows.positions.shape[0]]
        torch.clamp(rows.row_to_request, min=0, out=request)
        torch.index_select(rows.slots, 0, request, out=slot)
        slot.masked_fill_(rows.row_to_request < 0, -1)
        token_ids: Tensor = batching.gather_input_ids(
            slot,
            rows.positions,
            self._slots,
            rows.token_ids,
            rows.lens,
            rows.draft_token_ids,
            out=out,
        )
        if self._inputs is None:
            return token_ids
        return torch.index_select(self._inputs, 0, token_ids.clamp_(min=0), out=mapped)
