# SPDX-License-Identifier: Apache-2.0
"""Base of EAGLE and DFlash heads, which run decoder layers on the target's states.

Such a head reads hidden states of the target, projected to the head's width, runs its layers, and
computes logits over the vocabulary or a part of it. Its embedding and its LM head may be the
target's.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from specops import batching, dense
from specops.api.errors import ModelError
from specops.dense import PackedWeight
from specops.engine.models.batch import LayerBatch
from specops.engine.models.blocks.activations import StepViews
from specops.engine.models.blocks.attention import AttentionConfig
from specops.engine.models.blocks.block import BlockLoader, Norm
from specops.engine.models.blocks.layer import Layer, LayerConfig
from specops.engine.models.blocks.stack import LayerStack
from specops.engine.models.kv import KvCache
from specops.engine.models.mtp.draft_vocabulary import draft_head, token_map_of
from specops.engine.models.mtp.modules import MtpBatch
from specops.engine.models.transformer import Transformer
from specops.engine.models.weights import WeightSource


@dataclass(frozen=True, kw_only=True)
class StateHeadConfig:
    """Configuration of a head on target states.

    Attributes:
        hidden_size: width of the head's states.
        layers: the layers in order.
        norm_eps: epsilon of every norm.
        aux_layers: target layers whose output the head reads.
        draft_vocab_size: size of the draft vocabulary.
    """

    hidden_size: int
    layers: tuple[LayerConfig, ...]
    norm_eps: float
    aux_layers: tuple[int, ...]
    draft_vocab_size: int


@dataclass(frozen=True, kw_only=True)
class StateHeadWeights:
    """Weights of a head on target states, with packed projections.

    Attributes:
        embedding: [vocab_size, hidden_size].
        fc: projection of the head's input, such as the auxiliary hidden states, to its width.
        fc_bias: bias of `fc`, or None.
        layers: the layers in order.
        final_norm: norm after the layers, or None.
        lm_head: LM head over the draft vocabulary.
        token_map: int32 [draft vocabulary], token id of each LM head row; None: all tokens.
    """

    embedding: Tensor
    fc: PackedWeight
    fc_bias: Tensor | None
    layers: tuple[Layer, ...]
    final_norm: Norm | None
    lm_head: PackedWeight
    token_map: Tensor | None


class StateHead(LayerStack):
    """Base class of heads on target states.

    Args:
        config: the head's configuration.
        weights: the head's weights.
        target_size: width of the target's states.
        projections: further packed projections that the head runs with the same workspace.
    """

    def __init__(
        self,
        config: StateHeadConfig,
        weights: StateHeadWeights,
        target_size: int,
        projections: Sequence[PackedWeight] = (),
    ) -> None:
        super().__init__(
            weights.layers,
            weights.lm_head,
            hidden_size=config.hidden_size,
            dtype=weights.embedding.dtype,
            device=weights.embedding.device,
            projections=[weights.fc, *projections],
        )
        self.aux_layers, self.token_map = config.aux_layers, weights.token_map
        self._weights_of_head = weights
        self._next_norms = [*(one.input_norm for one in weights.layers[1:]), weights.final_norm]
        self._joined = self._new(0, len(config.aux_layers) * target_size)
        self._states = self._new(0, self.hidden_size)

    def _new(self, rows: int, width: int) -> Tensor:
        return torch.empty(rows, width, dtype=self.dtype, device=self.device)

    def reserve(self, rows: int) -> None:
        """Allocate buffers for steps of up to `rows` rows; they do not move afterwards."""
        super().reserve(rows)
        if len(self._states) < rows:
            self._joined = self._new(rows, self._joined.shape[1])
            self._states = self._new(rows, self.hidden_size)

    def states_of(self, aux_hidden_states: Mapping[int, Tensor], sums: Tensor | None) -> Tensor:
        """Return the target's auxiliary hidden states, projected to the head's width.

        Args:
            aux_hidden_states: outputs [rows, target's hidden_size] of target layers, by layer.
            sums: linear workspace; None: allocated.

        Returns:
            [rows, hidden_size], in the head's buffer, which the next call overwrites.
        """
        states = [aux_hidden_states[layer] for layer in self.aux_layers]
        num_rows, weights = states[0].shape[0], self._weights_of_head
        joined = torch.cat(states, dim=1, out=self._joined[:num_rows])
        self._norm_joined(joined)
        return dense.linear(
            joined, weights.fc, weights.fc_bias, out=self._states[:num_rows], workspace=sums
        )

    def _norm_joined(self, joined: Tensor) -> None:
        """Norm the concatenated states in place before the projection; by default, do nothing."""

    def _run_layers(
        self, batch: LayerBatch, cache: KvCache, rows: StepViews, own_input: Tensor | None = None
    ) -> Tensor:
        """Run the layers over `rows`; the first layer's attention reads `own_input` if present.

        Returns:
            The states after the final norm, or the residual if there is no final norm.
        """
        for index, layer in enumerate(self.layers):
            first = own_input if index == 0 else None
            layer.run(batch, cache.layers[index], rows, rows.layers[index], first)
            norm = self._next_norms[index]
            if norm is None:
                return rows.residual.add_(rows.branch)
            dense.rms_norm(rows.branch, *norm, residual=rows.residual, out=rows.normed)
        return rows.normed


def gather_states(batch: MtpBatch, states: Tensor, out: Tensor) -> None:
    """Copy the state that each row reads to `out`, from `states` or from stored states."""
    source = batch.source_rows
    torch.index_select(states, 0, source.clamp(min=0), out=out)
    if batch.kept is not None:
        earlier = batch.kept.flatten(0, 1).index_select(0, (-2 - source).clamp(min=0))
        torch.where(source[:, None] < -1, earlier, out, out=out)


class NextTokens:
    """Gatherer of the token after each row.

    Args:
        num_slots: number of request slots.
        device: device of the rows.
    """

    def __init__(self, num_slots: int, device: torch.device) -> None:
        self._places = torch.empty(3, 0, dtype=torch.int32, device=device)
        self._same = torch.arange(num_slots, dtype=torch.int32, device=device)

    def reserve(self, rows: int) -> None:
        """Allocate buffers for up to `rows` rows."""
        if self._places.shape[1] < rows:
            self._places = self._places.new_empty(3, rows)

    def of(self, batch: MtpBatch) -> Tensor:
        """Return the token after each row, int32 [rows]; 0 for padding rows."""
        slot, position, out = self._places[:, : batch.positions.shape[0]]
        is_nobody = batch.row_to_request < 0
        torch.index_select(batch.slots, 0, batch.row_to_request.clamp(min=0), out=slot)
        slot.masked_fill_(is_nobody, -1)
        torch.add(batch.positions, 1, out=position)
        # Indexed by slot, not by request, because `draft_token_ids` is.
        return batching.gather_input_ids(
            slot,
            position,
            self._same[: batch.lens.shape[0]],
            batch.token_ids,
            batch.lens,
            batch.draft_token_ids,
            out=out,
        )


class StateHeadLoader:
    """Loader of the weights of a head on target states.

    Args:
        source: source of the weights.
        config: the head's configuration.
        directory: the head's directory.
        target: the model that it drafts for.
        target_directory: the directory that the target was loaded from.
        prefix: name prefix of the head's tensors.

    Attributes:
        blocks: loader of norms and layers.
        vocab_size: the target's vocabulary size.
    """

    def __init__(
        self,
        source: WeightSource,
        config: StateHeadConfig,
        directory: Path,
        target: Transformer,
        target_directory: Path,
        prefix: str = "",
    ) -> None:
        self.blocks = BlockLoader(
            source=source,
            hidden_size=config.hidden_size,
            norm_eps=config.norm_eps,
            kv_dtype=target.kv_dtype,
            ropes=target.ropes,
        )
        self._source, self._config = source, config
        self._directory, self._prefix = directory, prefix
        self._target, self._target_directory = target, target_directory
        self.vocab_size = target.config.vocab_size

    def parts(
        self, layer_prefixes: Sequence[str], fc_inputs: int, *, has_final_norm: bool = True
    ) -> StateHeadWeights:
        """Load the weights that all heads on target states have.

        Args:
            layer_prefixes: name prefix of each layer's tensors.
            fc_inputs: input width of `fc`.
            has_final_norm: whether a norm follows the layers.
        """
        config = self._config
        source = self._source
        fc = f"{self._prefix}fc"
        outputs = (config.hidden_size,)
        has_bias = f"{fc}.bias" in source.names()
        token_map = self._token_map()
        return StateHeadWeights(
            embedding=self._embedding(),
            fc=source.linear("", (fc,), outputs, fc_inputs, quantization="none"),
            fc_bias=source.bias("", (fc,), outputs) if has_bias else None,
            layers=tuple(
                layer.load(self.blocks, of_layer)
                for layer, of_layer in zip(config.layers, layer_prefixes, strict=True)
            ),
            final_norm=self.blocks.norm(f"{self._prefix}norm") if has_final_norm else None,
            lm_head=self._lm_head(token_map),
            token_map=token_map,
        )

    def _token_map(self) -> Tensor | None:
        """Return the token ids of the draft vocabulary; None: all tokens."""
        size, vocab_size = self._config.draft_vocab_size, self.vocab_size
        where = f"{self._directory}: tensor d2t"
        if "d2t" in self._source.names():
            offsets = self._source.integers("d2t", size)
            return token_map_of(offsets, where, vocab_size).to(self._target.device)
        if size != vocab_size:
            raise ModelError(
                f"{where} is missing: draft_vocab_size is {size}, and the target has "
                f"{vocab_size} tokens"
            )
        return None

    def _embedding(self) -> Tensor:
        """Return the head's own embedding, or the target's."""
        name = f"{self._prefix}embed_tokens.weight"
        width = self._config.hidden_size
        target = self._target
        if name in self._source.names():
            return self._source.tensor(name, self.vocab_size, width)
        if width != target.hidden_size:
            raise ModelError(
                f"{self._directory}: tensor {name} is missing, and the target's embedding has "
                f"hidden_size {target.hidden_size}, not the head's {width}"
            )
        if (scale := target.config.embedding_scale) != 1.0:
            raise ModelError(
                f"{self._directory}: tensor {name} is missing, and the target's embedding cannot "
                f"take its place: it is scaled by {scale:g}, and heads read it without the scale"
            )
        return target.embedding

    def _lm_head(self, token_map: Tensor | None) -> PackedWeight:
        """Return the head's LM head, or the target's rows of the draft vocabulary."""
        source, width, target = self._source, self._config.hidden_size, self._target
        names = [
            name
            for name in ("lm_head", f"{self._prefix}lm_head")
            if f"{name}.weight" in source.names()
        ]
        if not names and width == target.hidden_size:
            return draft_head(target, source.settings, self._target_directory, token_map)
        quantization = source.settings.quantize_head
        outputs = (self._config.draft_vocab_size,)
        name = names[0] if names else "lm_head"
        return source.linear("", (name,), outputs, width, quantization=quantization)


def with_qk_norms(layer: LayerConfig, has_norms: bool) -> LayerConfig:
    """Return a layer config with norms of q and k if the checkpoint has them."""
    assert isinstance(layer.attention, AttentionConfig)
    return replace(layer, attention=replace(layer.attention, qk_norm=has_norms))


@contextmanager
def naming(directory: Path) -> Iterator[None]:
    """Convert errors about fields to a ModelError that names the head's config.json."""
    file = directory / "config.json"
    try:
        yield
    except KeyError as error:
        raise ModelError(f"{file}: {error} is missing") from error
    except ModelError as error:
        message = str(error)
        has_path = message.startswith(str(directory))
        raise ModelError(message if has_path else f"{file}: {message}") from None


def try_row(directory: Path, head: LayerStack, run: Callable[[MtpBatch, KvCache], Tensor]) -> None:
    """Run one row, so that ops raise at load time instead of in a request.

    Args:
        directory: the head's directory.
        head: the head to run.
        run: runs a batch of one row and returns the LM head's input.

    Raises:
        ModelError: an op rejects its arguments.
    """

    def ints(*values: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=head.device)

    batch = MtpBatch(
        positions=ints(0),
        cache_slots=ints(0, dtype=torch.int64),
        qo_indptr=ints(0, 1),
        kv_indptr=ints(0, 1),
        kv_indices=ints(0),
        kv_lens=ints(1),
        row_to_request=ints(0),
        source_rows=ints(0),
        slots=ints(0),
        token_ids=ints(0, 0)[None],
        lens=ints(2),
        draft_token_ids=ints(0)[None],
    )
    try:
        head.logits(run(batch, head.new_kv_cache(1, 16)))
    except ValueError as error:
        op, _, sentence = str(error).partition(": ")
        raise ModelError(f"{directory / 'config.json'}: {sentence} ({op})") from error
