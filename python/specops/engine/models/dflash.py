# SPDX-License-Identifier: Apache-2.0
"""DFlash, DFlash2 and DSpark: draft heads whose few layers draft a whole block in one pass.

The rows of a block attend to earlier positions through keys and values computed from the target's
auxiliary hidden states, which are concatenated, projected and normed once for all layers. A block
consists of the newest token and masks after it, which all attend to each other. In DFlash, each
mask drafts the token at its own position. In DSpark, each row, including the newest token's, drafts
the token at the next position, and a Markov head adds a term to its logits that depends on the
token before the draft. dflash2.py has the additions of DFlash2.

Source: arXiv 2602.06036 (DFlash); arXiv 2607.05147 (DSpark).
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specops import dense
from specops.api.errors import ModelError
from specops.dense import PackedWeight
from specops.engine.models.batch import LayerBatch
from specops.engine.models.blocks.activations import StepViews
from specops.engine.models.blocks.attention import AttentionConfig
from specops.engine.models.blocks.block import AttentionBlock, Norm
from specops.engine.models.blocks.layer import LayerConfig
from specops.engine.models.dflash2 import (
    Convolution,
    Dflash2Config,
    Dflash2Weights,
    candidate_logits,
    load_dflash2,
    read_dflash2,
)
from specops.engine.models.eagle.layout import (
    aux_layers_of,
    flag_of,
    mapping_of,
    token_of,
)
from specops.engine.models.families.dense_decoder import Windows, dense_decoder
from specops.engine.models.families.fields import FULL, SLIDING, count, layer_types, read_config
from specops.engine.models.head_files import open_head, read_tensors, refuse_unread
from specops.engine.models.kv import KvCache
from specops.engine.models.mtp.modules import MtpBatch
from specops.engine.models.state_head import (
    StateHead,
    StateHeadConfig,
    StateHeadLoader,
    StateHeadWeights,
    gather_states,
    naming,
    try_row,
    with_qk_norms,
)
from specops.engine.models.transformer import Transformer
from specops.engine.models.weights import WeightSource

# Ignored tensors: t2d duplicates d2t, and inv_freq is computed. The confidence head is unused,
# because a draft's probability predicts acceptance better (tools/notebook/drafters.md).
_UNREAD = ("t2d", "rotary_emb.inv_freq", "confidence_head.proj.weight", "confidence_head.proj.bias")
_KINDS = ("dflash", "dspark")


@dataclass(frozen=True, kw_only=True)
class BlockConfig(StateHeadConfig):
    """Configuration of a block drafter.

    Attributes:
        num_rows: rows of a block, including the newest token's row.
        samples_anchor: whether the newest token's row drafts as well; then each row drafts the next
            token.
        mask_token_id: token whose embedding is the input of masks.
        markov_rank: rank of the Markov head; 0: there is none.
        second: configuration of DFlash2's parts; None: the head is not a DFlash2.
    """

    num_rows: int
    samples_anchor: bool
    mask_token_id: int
    markov_rank: int
    second: Dflash2Config | None

    @property
    def num_drafts(self) -> int:
        """Number of tokens that a block drafts."""
        return self.num_rows if self.samples_anchor else self.num_rows - 1


@dataclass(frozen=True, kw_only=True)
class BlockWeights:
    """Weights of a block drafter, with packed projections.

    Attributes:
        parts: weights that all heads on target states have.
        hidden_norm: norm of the projected target states.
        markov: Markov head: [vocab_size, rank], and a projection from rank to the draft vocabulary;
            or None.
        second: weights of DFlash2's parts; None: the head is not a DFlash2.
        mask: [hidden_size], embedding of masks; None: the embedding of mask_token_id.
    """

    parts: StateHeadWeights
    hidden_norm: Norm
    markov: tuple[Tensor, PackedWeight] | None
    second: Dflash2Weights | None
    mask: Tensor | None


class BlockDrafter(StateHead):
    """Block drafter on top of its target.

    Args:
        config: the head's configuration.
        weights: the head's weights.
        target_size: width of the target's states.
    """

    def __init__(self, config: BlockConfig, weights: BlockWeights, target_size: int) -> None:
        more = [] if weights.markov is None else [weights.markov[1]]
        if weights.second is not None:
            more += weights.second.projections
        super().__init__(config, weights.parts, target_size, more)
        self.config, self.weights = config, weights
        self._source_rows = self._new(0, self.hidden_size)

    def reserve(self, rows: int) -> None:
        """Allocate buffers for steps of up to `rows` rows; they do not move afterwards."""
        super().reserve(rows)
        if len(self._source_rows) < rows:
            self._source_rows = self._new(rows, self.hidden_size)

    def states_of(self, aux_hidden_states: Mapping[int, Tensor], sums: Tensor | None) -> Tensor:
        """Return the projected and normed target states, the input of keys and values."""
        states = super().states_of(aux_hidden_states, sums)
        return dense.rms_norm(states, *self.weights.hidden_norm, out=states)

    def append(self, batch: MtpBatch, states: Tensor, cache: KvCache) -> Tensor:
        """Write the keys and values computed from the target's states.

        Args:
            batch: the rows.
            states: [source rows, hidden_size], result of `states_of`.
            cache: KV cache from `new_kv_cache`.

        Returns:
            The states of the rows, in the head's buffer.
        """
        num_rows = batch.positions.shape[0]
        self.reserve(num_rows)
        source_rows = self._source_rows[:num_rows]
        rows = self.activations.first(num_rows)
        gather_states(batch, states, source_rows)
        for index, layer in enumerate(self.layers):
            views = rows.layers[index].attention
            assert isinstance(layer.attention, AttentionBlock)
            layer.attention.append_kv(source_rows, batch, cache.layers[index], views)
        return source_rows

    def forward(
        self, token_ids: Tensor, places: Tensor, batch: LayerBatch, cache: KvCache
    ) -> Tensor:
        """Run the layers over block rows; write their keys and values after those of the text.

        Args:
            token_ids: int32 [rows], newest tokens and mask tokens.
            places: int32 [rows], index of each row in its block.
            batch: the rows, with `is_causal` False.
            cache: KV cache from `new_kv_cache`.

        Returns:
            [rows, hidden_size], the states after the final norm, in the head's buffer.
        """
        num_rows = token_ids.shape[0]
        self.reserve(num_rows)
        rows = self.activations.first(num_rows)
        dense.embedding(token_ids, self.weights.parts.embedding, out=rows.residual)
        if self.weights.mask is not None:
            is_mask = places.unsqueeze(1) > 0
            torch.where(is_mask, self.weights.mask, rows.residual, out=rows.residual)
        if self.config.second is not None:
            rows.residual.mul_(self.config.second.embedding_scale)
        dense.rms_norm(rows.residual, *self.layers[0].input_norm, out=rows.normed)
        if self.weights.second is None:
            return self._run_layers(batch, cache, rows)
        return self._run_convolved(self.weights.second, places, batch, cache, rows)

    def _run_convolved(
        self,
        second: Dflash2Weights,
        places: Tensor,
        batch: LayerBatch,
        cache: KvCache,
        rows: StepViews,
    ) -> Tensor:
        """Run the layers like `_run_layers`, with DFlash2's convolutions."""
        residual, normed, branch = rows.residual, rows.normed, rows.branch
        for index, layer in enumerate(self.layers):
            views, kv = rows.layers[index], cache.layers[index]
            attention, mlp = (
                Convolution(kernel, places, batch.sums) for kernel in second.kernels[index]
            )
            attention.before(normed)
            layer.attention.run(normed, batch, kv, views.attention, branch)
            attention.behind(branch)
            dense.rms_norm(branch, *layer.mlp_norm, residual=residual, out=normed)
            mlp.before(normed)
            layer.mlp.run(normed, batch, views.mlp, branch)
            mlp.behind(branch)
            norm = self._next_norms[index]
            assert norm is not None
            dense.rms_norm(branch, *norm, residual=residual, out=normed)
        return normed

    @property
    def reads_drafts(self) -> bool:
        """True if the logits of a draft depend on the token before it."""
        return self.weights.markov is not None or self.weights.second is not None

    def with_tokens_before(
        self, logits: Tensor, states: Tensor, token_ids: Tensor, sums: Tensor | None
    ) -> Tensor:
        """Apply the Markov head or DFlash2's selector to the logits of drafts, in place.

        Args:
            logits: fp32 [rows, draft vocabulary].
            states: [rows, hidden_size], the states that the logits were computed from.
            token_ids: int32 [rows], the token before each draft.
            sums: linear workspace.
        """
        if self.weights.markov is not None:
            table, projection = self.weights.markov
            embedded = dense.embedding(token_ids, table)
            logits.add_(dense.linear(embedded, projection, out_dtype=torch.float32, workspace=sums))
        config, second = self.config.second, self.weights.second
        if config is not None and second is not None:
            candidate_logits(config, second, logits, states, token_ids, sums)
        return logits


def load_dflash(
    target: Transformer,
    directory: str | Path,
    *,
    target_directory: str | Path,
    quantization: str | None = None,
) -> BlockDrafter:
    """Load a DFlash, DFlash2 or DSpark head.

    Args:
        target: the model that it drafts for.
        directory: the head's directory, with a config.json of its own.
        target_directory: the directory that the target was loaded from.
        quantization: format of the layers' projections and of the head's LM head; None: quantize
            the layers like the target's.

    Raises:
        ModelError: a file, a field or a tensor is missing, damaged or does not fit the target.
    """
    directory, where = Path(directory), Path(target_directory)
    source = open_head(directory, target.settings.of_drafter(quantization), ())
    raw = read_config(directory)
    with naming(directory):
        config = _read(raw, directory, source.names(), target)
    loader = StateHeadLoader(source, config, directory, target, where)
    mask = _mask_embedding(directory / "mask_embedding.pt", config)
    weights = _load(source, config, loader, len(config.aux_layers) * target.hidden_size, mask)
    refuse_unread(source, directory, "a head of DFlash or DSpark", _UNREAD)
    head = BlockDrafter(config, weights, target.hidden_size)

    def run(batch: MtpBatch, cache: KvCache) -> Tensor:
        tokens = batch.token_ids[0, :1]
        return head.forward(tokens, tokens, replace(batch, is_causal=False), cache)

    try_row(directory, head, run)
    return head


def _windows(raw: Mapping[str, Any], num_layers: int) -> Windows:
    """Return the window of each layer: that of config.json for sliding layers, else None."""
    types = layer_types(raw, num_layers) or [FULL] * num_layers
    return [count(raw, "sliding_window") if one == SLIDING else None for one in types]


def _is_causal(own: Mapping[str, Any], kind: str | None) -> bool:
    """Return whether attention within a block is causal in layers with a sliding window.

    vLLM merges the two fields in the same way and has the same defaults.
    """
    if own.get("sliding_window_non_causal") is not None:
        return not flag_of(own, "sliding_window_non_causal")
    return flag_of(own, "causal", default=kind is None)


def _masked(layer: LayerConfig, is_causal: bool) -> LayerConfig:
    attention = layer.attention
    assert isinstance(attention, AttentionConfig)
    has_window = attention.sliding_window is not None
    return replace(layer, attention=replace(attention, is_causal=is_causal and has_window))


def _read(
    raw: Mapping[str, Any], directory: Path, names: Collection[str], target: Transformer
) -> BlockConfig:
    kind = raw.get("speculators_model_type")
    if kind not in (None, *_KINDS):
        raise ModelError(f"speculators_model_type must be {' or '.join(_KINDS)}, got {kind!s:.60}")
    own = {**mapping_of(raw, "dflash_config"), **raw}
    is_dspark = kind == "dspark" or "markov_rank" in own or own.get("projector_type") == "dspark"
    layer = mapping_of(raw, "transformer_layer_config") or raw
    for field in ("use_swa", "attention_sink_bias"):
        if own.get(field):
            raise ModelError(f"{field} must be false, got {own[field]!r:.60}")
    if own.get("markov_head_type", "vanilla") != "vanilla":
        raise ModelError(f"markov_head_type must be vanilla, got {own['markov_head_type']!s:.60}")
    if own.get("causal") and SLIDING not in (layer.get("layer_types") or ()):
        raise ModelError(
            f"causal must be false without sliding_attention, got {own['causal']!r:.60}"
        )
    decoder = dense_decoder({**layer, "architectures": ["DFlash"]}, windows=_windows)
    vocab_size, num_layers = target.config.vocab_size, target.config.num_layers
    if decoder.vocab_size != vocab_size:
        raise ModelError(f"vocab_size is {decoder.vocab_size}, but the target has {vocab_size}")
    if own.get("num_target_layers", num_layers) != num_layers:
        raise ModelError(
            f"num_target_layers is {own['num_target_layers']!s:.60}, but the target has "
            f"{num_layers}"
        )
    if own.get("target_hidden_size", target.hidden_size) != target.hidden_size:
        raise ModelError(
            f"target_hidden_size is {own['target_hidden_size']!s:.60}, but the target has "
            f"{target.hidden_size}"
        )
    mask = token_of(own, "mask_token_id", vocab_size)
    num_rows = count(own, "block_size")
    samples_anchor = flag_of(own, "sample_from_anchor", default=is_dspark)
    if num_rows < 2 - samples_anchor:
        raise ModelError(f"block_size must be at least {2 - samples_anchor}, got {num_rows}")
    is_causal = _is_causal(own, kind)
    layers = (
        _masked(with_qk_norms(one, f"layers.{index}.self_attn.q_norm.weight" in names), is_causal)
        for index, one in enumerate(decoder.layers)
    )
    second = read_dflash2(own, decoder.hidden_size, vocab_size)
    draft_vocab_size = count(own, "draft_vocab_size", vocab_size)
    if second is not None and draft_vocab_size != vocab_size:
        raise ModelError(
            f"draft_vocab_size must be {vocab_size} with DFlash2's candidates, "
            f"got {draft_vocab_size}"
        )
    has_markov = "markov_head.markov_w1.weight" in names
    return BlockConfig(
        hidden_size=decoder.hidden_size,
        layers=tuple(layers),
        norm_eps=decoder.rms_norm_eps,
        aux_layers=aux_layers_of(own, directory, num_layers, None),
        num_rows=num_rows,
        samples_anchor=samples_anchor,
        mask_token_id=mask,
        draft_vocab_size=draft_vocab_size,
        markov_rank=count(own, "markov_rank") if has_markov else 0,
        second=second,
    )


def _mask_embedding(path: Path, config: BlockConfig) -> Tensor | None:
    """Read the embedding of masks, if the file exists: a vector, or a dict with the vector."""
    if not path.exists():
        return None
    found, token_id = read_tensors(path), config.mask_token_id
    if isinstance(found, dict):
        stored_id = found.get("mask_token_id", token_id)
        stored_id = stored_id.tolist() if isinstance(stored_id, Tensor) else stored_id
        if stored_id != token_id:
            raise ModelError(f"{path}: mask_token_id is {stored_id}, and {token_id} in config.json")
        found = found.get("embedding")
    if not isinstance(found, Tensor) or not found.is_floating_point():
        got = found.dtype if isinstance(found, Tensor) else type(found).__name__
        raise ModelError(f"{path}: expected a tensor of floats, got {got}")
    if found.numel() != config.hidden_size:
        size = config.hidden_size
        raise ModelError(f"{path}: expected a vector of {size}, got {list(found.shape)}")
    return found.flatten()


def _load(
    source: WeightSource,
    config: BlockConfig,
    loader: StateHeadLoader,
    joined: int,
    mask: Tensor | None,
) -> BlockWeights:
    parts = loader.parts([f"layers.{i}." for i in range(len(config.layers))], joined)
    markov, rank = None, config.markov_rank
    if rank:
        name = "markov_head.markov_w2"
        outputs = (config.draft_vocab_size,)
        markov = (
            source.tensor("markov_head.markov_w1.weight", loader.vocab_size, rank),
            source.linear("", (name,), outputs, rank, quantization="none"),
        )
    second = None
    if config.second is not None:
        sizes = (len(config.layers), config.hidden_size, loader.vocab_size)
        second = load_dflash2(source, config.second, *sizes)
    return BlockWeights(
        parts=parts,
        hidden_norm=loader.blocks.norm("hidden_norm"),
        markov=markov,
        second=second,
        mask=None if mask is None else mask.to(parts.embedding),  # dtype and device
    )
