# SPDX-License-Identifier: Apache-2.0
"""Hydra++'s prefix layer: a decoder layer whose output its heads read instead of target states.

Row i of the layer reads the target's state of position i after the final norm, and no token.
Through its attention, the heads also use the states of earlier positions.

Source: Ankner et al. 2024, "Hydra: Sequentially-Dependent Draft Heads for Medusa Decoding",
section 4. As in the authors' code, the layer is a decoder layer of the target's family.
"""

from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

from torch import Tensor

from specops import dense
from specops.api.errors import ModelError
from specops.dense import PackedWeight
from specops.engine.models.blocks.attention import AttentionConfig
from specops.engine.models.blocks.block import BlockLoader, Norm
from specops.engine.models.blocks.layer import Layer, LayerConfig
from specops.engine.models.blocks.stack import LayerStack
from specops.engine.models.kv import KvCache
from specops.engine.models.mtp.modules import MtpBatch
from specops.engine.models.state_head import gather_states, with_qk_norms
from specops.engine.models.transformer import Transformer
from specops.engine.models.weights import WeightSource

_PREFIX = "prefix_embeding_layer."  # the authors' spelling
# Ignored tensors: an unused embedding, and frequencies that are computed here.
UNREAD = (f"{_PREFIX}embed_tokens.weight", "rotary_emb.inv_freq")


class PrefixLayer(LayerStack):
    """Decoder layer on the target's final states.

    Args:
        layer: the decoder layer.
        final_norm: norm after the layer.
        lm_head: LM head of the first draft head.
        target: the model that the heads draft for.
    """

    def __init__(
        self, layer: Layer, final_norm: Norm, lm_head: PackedWeight, target: Transformer
    ) -> None:
        super().__init__(
            [layer],
            lm_head,
            hidden_size=target.hidden_size,
            dtype=target.dtype,
            device=target.device,
        )
        self._final_norm = final_norm

    def forward(self, batch: MtpBatch, states: Tensor, cache: KvCache) -> Tensor:
        """Run the layer over the rows, and write their keys and values.

        Args:
            batch: the rows.
            states: [source rows, hidden_size], the target's states after its final norm.
            cache: KV cache from `new_kv_cache`.

        Returns:
            The input of the heads for all rows. It lies in the layer's buffers: the next call
            overwrites it.
        """
        rows = self.activations.first(batch.positions.shape[0])
        (layer,) = self.layers
        gather_states(batch, states, rows.residual)
        dense.rms_norm(rows.residual, *layer.input_norm, out=rows.normed)
        layer.run(batch, cache.layers[0], rows, rows.layers[0])
        dense.rms_norm(rows.branch, *self._final_norm, residual=rows.residual, out=rows.normed)
        return rows.normed


def load_prefix(
    source: WeightSource, directory: Path, lm_head: PackedWeight, target: Transformer
) -> PrefixLayer:
    """Load the prefix layer of a Hydra++ checkpoint.

    Args:
        source: source of the weights.
        directory: the checkpoint's directory.
        lm_head: LM head of the first draft head.
        target: the model that the heads draft for.

    Raises:
        ModelError: a tensor is missing or does not fit the target.
    """
    config = target.config
    loader = BlockLoader(
        source=source,
        hidden_size=config.hidden_size,
        norm_eps=config.rms_norm_eps,
        kv_dtype=target.kv_dtype,
        ropes=target.ropes,
    )
    like = _like(config.layers[0], directory, source.names())
    layer = like.load(loader, f"{_PREFIX}layers.0.")
    return PrefixLayer(layer, loader.norm(f"{_PREFIX}norm"), lm_head, target)


def _like(layer: LayerConfig, directory: Path, names: Collection[str]) -> LayerConfig:
    """Return the target's layer config, adapted to the checkpoint and without a window."""
    if not isinstance(layer.attention, AttentionConfig):
        raise ModelError(
            f"{directory}: a prefix layer needs a target with plain attention, "
            f"got {layer.attention.kind}"
        )
    layer = replace(layer, attention=layer.attention.without_window(), per_layer_width=0)
    return with_qk_norms(layer, f"{_PREFIX}layers.0.self_attn.q_norm.weight" in names)
