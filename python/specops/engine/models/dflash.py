# SPDX-License-Identifier: Apache-2.0
"""DFlash and DSpark: a few layers that draft a whole block in one pass.

What rows of the block attend to before themselves are keys and values that are made of the target's
states: those that leave some of its layers, side by side, projected and normed once for all layers.
The block is the newest token and masks behind it, which all see each other. A mask drafts the token
in its own place; DSpark's rows, the newest token's first, the one behind. DSpark adds to the logits
of a draft what the token before says of it (its Markov head).

Source: arXiv 2602.06036 (DFlash); arXiv 2607.05147 (DSpark).
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specops import dense
from specops.dense import PackedWeight
from specops.engine.errors import ModelError
from specops.engine.models.batch import LayerBatch
from specops.engine.models.blocks.block import BlockLoader, Norm
from specops.engine.models.blocks.layer import Layer, LayerConfig
from specops.engine.models.blocks.stack import LayerStack
from specops.engine.models.eagle.layout import flag_of, mapping_of, taps_of, with_qk_norms
from specops.engine.models.eagle.modules import gather_states
from specops.engine.models.families.dense_decoder import dense_decoder
from specops.engine.models.families.fields import count, read_config
from specops.engine.models.head_files import open_head, refuse_unread
from specops.engine.models.kv import KvCache
from specops.engine.models.mtp.draft_vocabulary import draft_head, token_map_of
from specops.engine.models.mtp.modules import MtpBatch
from specops.engine.models.transformer import Transformer
from specops.engine.models.weights import WeightSource

# The first says the same as d2t, the next is computed, and the last ones are not used: verification
# says how likely drafts are.
_UNREAD = ("t2d", "rotary_emb.inv_freq", "confidence_head.proj.weight", "confidence_head.proj.bias")
_KINDS = ("dflash", "dspark")


@dataclass(frozen=True, kw_only=True)
class BlockConfig:
    """What a head is made from.

    Attributes:
        hidden_size: width of its states.
        layers: in order.
        norm_eps: of every norm.
        taps: the target's layers whose states it reads: those that leave them.
        num_rows: of a block, the newest token's included.
        samples_anchor: the newest token's row drafts as well, each row the token behind it.
        mask_token_id: what masks embed.
        draft_vocab_size: rows of its LM head.
        markov_rank: of the Markov head; 0: there is none.
    """

    hidden_size: int
    layers: tuple[LayerConfig, ...]
    norm_eps: float
    taps: tuple[int, ...]
    num_rows: int
    samples_anchor: bool
    mask_token_id: int
    draft_vocab_size: int
    markov_rank: int

    @property
    def num_drafts(self) -> int:
        """How many tokens a block drafts."""
        return self.num_rows if self.samples_anchor else self.num_rows - 1


@dataclass(frozen=True, kw_only=True)
class BlockWeights:
    """The weights of a head; projections packed.

    Attributes:
        embedding: [vocab_size, hidden_size].
        fc: from the states of all layers that it reads to its width.
        hidden_norm: of that.
        layers: in order.
        final_norm: behind them.
        lm_head: of drafts.
        token_map: int32 [draft vocabulary], the token of each of its rows; None: all tokens.
        markov: [vocab_size, rank] and the projection from there to the draft vocabulary; None:
            there is no such head.
    """

    embedding: Tensor
    fc: PackedWeight
    hidden_norm: Norm
    layers: tuple[Layer, ...]
    final_norm: Norm
    lm_head: PackedWeight
    token_map: Tensor | None
    markov: tuple[Tensor, PackedWeight] | None


class BlockDrafter(LayerStack):
    """A head on top of its target.

    Args:
        config: what it was made from.
        weights: of it.
        target_size: width of the target's states.
    """

    def __init__(self, config: BlockConfig, weights: BlockWeights, target_size: int) -> None:
        projections = [weights.fc, *(() if weights.markov is None else weights.markov[1:])]
        super().__init__(
            weights.layers,
            weights.lm_head,
            hidden_size=config.hidden_size,
            dtype=weights.embedding.dtype,
            device=weights.embedding.device,
            projections=projections,
        )
        self.config, self.weights = config, weights
        self._next_norms = [one.input_norm for one in weights.layers[1:]] + [weights.final_norm]
        self._taps = self._new(0, len(config.taps) * target_size)
        self._states, self._given = self._new(0, self.hidden_size), self._new(0, self.hidden_size)

    def _new(self, rows: int, width: int) -> Tensor:
        return torch.empty(rows, width, dtype=self.dtype, device=self.device)

    def reserve(self, rows: int) -> None:
        """Allocates the buffers of steps with up to `rows` rows, which then stay where they are."""
        super().reserve(rows)
        if len(self._states) < rows:
            self._taps = self._new(rows, self._taps.shape[1])
            self._states = self._new(rows, self.hidden_size)
            self._given = self._new(rows, self.hidden_size)

    def states_of(self, taps: Mapping[int, Tensor], sums: Tensor | None) -> Tensor:
        """Returns what keys and values of the target's rows are made of.

        Args:
            taps: by layer, [rows, target's hidden_size]: the states that leave it.
            sums: workspace of projections; None: allocated.

        Returns:
            [rows, hidden_size], in a buffer of its own, which the next call overwrites.
        """
        given = [taps[tap] for tap in self.config.taps]
        states = self._states[: given[0].shape[0]]
        joined = torch.cat(given, dim=1, out=self._taps[: given[0].shape[0]])
        dense.linear(joined, self.weights.fc, out=states, workspace=sums)
        return dense.rms_norm(states, *self.weights.hidden_norm, out=states)

    def append(self, batch: MtpBatch, states: Tensor, cache: KvCache) -> Tensor:
        """Writes the keys and values that are made of the target's states.

        Args:
            batch: the rows.
            states: [source rows, hidden_size], of `states_of`.
            cache: from `new_kv_cache`.

        Returns:
            The states of the rows, in a buffer of its own.
        """
        num_rows = batch.positions.shape[0]
        self.reserve(num_rows)
        given, rows = self._given[:num_rows], self.activations.first(num_rows)
        gather_states(batch, states, given)
        for index, layer in enumerate(self.weights.layers):
            views = rows.layers[index].attention
            layer.attention.append_kv(given, batch, cache.layers[index], views)
        return given

    def forward(self, token_ids: Tensor, batch: LayerBatch, cache: KvCache) -> Tensor:
        """Runs the layers over rows of blocks, and writes their keys and values behind the others.

        Args:
            token_ids: int32 [rows], the newest token's and the masks'.
            batch: the rows; not causal.
            cache: from `new_kv_cache`.

        Returns:
            [rows, hidden_size], the states after the final norm, in a buffer of its own.
        """
        num_rows = token_ids.shape[0]
        self.reserve(num_rows)
        rows = self.activations.first(num_rows)
        dense.embedding(token_ids, self.weights.embedding, out=rows.residual)
        dense.rms_norm(rows.residual, *self.weights.layers[0].input_norm, out=rows.normed)
        for index, layer in enumerate(self.weights.layers):
            layer.run(batch, cache.layers[index], rows, rows.layers[index])
            weight, eps = self._next_norms[index]
            dense.rms_norm(rows.branch, weight, eps, residual=rows.residual, out=rows.normed)
        return rows.normed

    def markov_logits(self, token_ids: Tensor, sums: Tensor | None) -> Tensor | None:
        """Returns what the tokens before say of drafts, fp32 [rows, draft vocabulary], or None."""
        if self.weights.markov is None:
            return None
        table, projection = self.weights.markov
        embedded = dense.embedding(token_ids, table)
        return dense.linear(embedded, projection, out_dtype=torch.float32, workspace=sums)


def load_dflash(
    target: Transformer,
    directory: str | Path,
    *,
    target_directory: str | Path,
    quantization: str | None = None,
) -> BlockDrafter:
    """Loads a head of DFlash or DSpark.

    Args:
        target: the model that it drafts for.
        directory: of the head, with a config.json of its own.
        target_directory: the directory that the target was loaded from.
        quantization: of its layers' projections and its LM head; None: the layers' like the
            target's.

    Raises:
        ModelError: a file, a field or a tensor is missing, damaged or does not fit the target.
    """
    directory = Path(directory)
    source = open_head(directory, target.settings.of_drafter(quantization), ())
    if (directory / "mask_embedding.pt").exists():
        raise ModelError(f"{directory / 'mask_embedding.pt'}: masks of their own do not run yet")
    file = directory / "config.json"
    raw = read_config(directory)
    try:
        config = _read(raw, directory, source.names(), target)
    except KeyError as error:
        raise ModelError(f"{file}: {error} is missing") from error
    except ModelError as error:
        raise ModelError(f"{file}: {error}") from None
    weights = _load(target, source, config, directory, Path(target_directory))
    refuse_unread(source, directory, "a head of DFlash or DSpark", _UNREAD)
    head = BlockDrafter(config, weights, target.hidden_size)
    try:
        _dry_run(head)
    except ValueError as error:
        op, _, sentence = str(error).partition(": ")
        raise ModelError(f"{file}: {sentence} ({op})") from error
    return head


def _read(
    raw: Mapping[str, Any], directory: Path, names: Collection[str], target: Transformer
) -> BlockConfig:
    kind = raw.get("speculators_model_type")
    if kind not in (None, *_KINDS):
        raise ModelError(f"speculators_model_type must be {' or '.join(_KINDS)}, got {kind}")
    own = {**mapping_of(raw, "dflash_config"), **raw}
    is_dspark = kind == "dspark" or "markov_rank" in own or own.get("projector_type") == "dspark"
    layer = mapping_of(raw, "transformer_layer_config") or raw
    for field in ("causal", "use_swa", "attention_sink_bias", "sliding_window_non_causal"):
        if own.get(field):
            raise ModelError(f"{field} must be false, got {own[field]!r}")
    if own.get("markov_head_type", "vanilla") != "vanilla":
        raise ModelError(f"markov_head_type must be vanilla, got {own['markov_head_type']}")
    if "sliding_attention" in (layer.get("layer_types") or ()):
        raise ModelError("layer_types must be full_attention alone, got sliding_attention")
    decoder = dense_decoder({**layer, "architectures": ["DFlash"]})
    vocab_size, num_layers = target.config.vocab_size, target.config.num_layers
    if decoder.vocab_size != vocab_size:
        raise ModelError(f"vocab_size is {decoder.vocab_size}, but the target has {vocab_size}")
    if own.get("num_target_layers", num_layers) != num_layers:
        raise ModelError(
            f"num_target_layers is {own['num_target_layers']}, but the target has {num_layers}"
        )
    if own.get("target_hidden_size", target.hidden_size) != target.hidden_size:
        raise ModelError(
            f"target_hidden_size is {own['target_hidden_size']}, but the target has "
            f"{target.hidden_size}"
        )
    mask = own["mask_token_id"]
    if isinstance(mask, bool) or not isinstance(mask, int) or not 0 <= mask < vocab_size:
        raise ModelError(f"mask_token_id must be a token of the {vocab_size}, got {mask!r}")
    num_rows = count(own, "block_size")
    samples_anchor = flag_of(own, "sample_from_anchor", default=is_dspark)
    if num_rows < 2 - samples_anchor:
        raise ModelError(f"block_size must leave a row that drafts, got {num_rows}")
    layers = (
        with_qk_norms(one, f"layers.{index}.self_attn.q_norm.weight" in names)
        for index, one in enumerate(decoder.layers)
    )
    has_markov = "markov_head.markov_w1.weight" in names
    return BlockConfig(
        hidden_size=decoder.hidden_size,
        layers=tuple(layers),
        norm_eps=decoder.rms_norm_eps,
        taps=taps_of(own, directory, num_layers, None),
        num_rows=num_rows,
        samples_anchor=samples_anchor,
        mask_token_id=mask,
        draft_vocab_size=count(own, "draft_vocab_size", vocab_size),
        markov_rank=count(own, "markov_rank") if has_markov else 0,
    )


def _load(
    target: Transformer,
    source: WeightSource,
    config: BlockConfig,
    directory: Path,
    target_directory: Path,
) -> BlockWeights:
    loader = BlockLoader(
        source=source,
        hidden_size=config.hidden_size,
        norm_eps=config.norm_eps,
        kv_dtype=target.kv_dtype,
        ropes=target.ropes,
    )
    vocab_size, joined = target.config.vocab_size, len(config.taps) * target.hidden_size
    is_own_width = config.hidden_size != target.hidden_size
    names, token_map, markov = source.names(), None, None
    if "d2t" in names:
        offsets = source.integers("d2t", config.draft_vocab_size)
        where = f"{directory}: tensor d2t"
        token_map = token_map_of(offsets, where, vocab_size).to(target.device)
    elif config.draft_vocab_size != vocab_size:
        raise ModelError(
            f"{directory}: tensor d2t is missing: draft_vocab_size is {config.draft_vocab_size}, "
            f"and the target has {vocab_size} tokens"
        )
    embedding = target.embedding
    if "embed_tokens.weight" in names or is_own_width or target.config.embedding_scale != 1.0:
        embedding = source.tensor("embed_tokens.weight", vocab_size, config.hidden_size)
    if "lm_head.weight" in names or is_own_width:
        head_kind, outputs = source.settings.quantize_head, (config.draft_vocab_size,)
        lm_head = source.linear(
            "", ("lm_head",), outputs, config.hidden_size, quantization=head_kind
        )
    else:
        lm_head = draft_head(target, source.settings, target_directory, token_map)
    if config.markov_rank:
        rank, name = config.markov_rank, "markov_head.markov_w2"
        outputs = (config.draft_vocab_size,)
        markov = (
            source.tensor("markov_head.markov_w1.weight", vocab_size, rank),
            source.linear("", (name,), outputs, rank, quantization="none"),
        )
    return BlockWeights(
        embedding=embedding,
        fc=source.linear("", ("fc",), (config.hidden_size,), joined, quantization="none"),
        hidden_norm=loader.norm("hidden_norm"),
        layers=tuple(
            layer.load(loader, f"layers.{index}.") for index, layer in enumerate(config.layers)
        ),
        final_norm=loader.norm("norm"),
        lm_head=lm_head,
        token_map=token_map,
        markov=markov,
    )


def _dry_run(head: BlockDrafter) -> None:
    """Runs a row: what an op refuses shows before anybody's request does."""

    def ints(*values: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=head.device)

    batch = LayerBatch(
        positions=ints(0),
        cache_slots=ints(0, dtype=torch.int64),
        qo_indptr=ints(0, 1),
        kv_indptr=ints(0, 1),
        kv_indices=ints(0),
        kv_lens=ints(1),
        is_causal=False,
    )
    head.logits(head.forward(ints(0), batch, head.new_kv_cache(1, 16)))
