# SPDX-License-Identifier: Apache-2.0
"""Configuration of a model of any family: its layers, embedding, norms and LM head."""

from dataclasses import dataclass, replace

from specops.engine.models.blocks.layer import LayerConfig


@dataclass(frozen=True)
class Place:
    """Name prefixes of a model's tensors in a checkpoint.

    Attributes:
        prefix: name prefix of the embedding, the layers and the final norm.
        head: name of the LM head, without ".weight".
        embedding: name of the embedding after the prefix, without ".weight".
        norm: name of the final norm after the prefix, without ".weight".
    """

    prefix: str
    head: str
    embedding: str = "embed_tokens"
    norm: str = "norm"

    @property
    def embedding_name(self) -> str:
        """Name of the embedding, without ".weight"."""
        return self.prefix + self.embedding


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Configuration of a decoder.

    Attributes:
        architecture: name in config.json.
        vocab_size: rows of the embedding and of the LM head.
        hidden_size: width of the states between layers.
        layers: configuration of each layer; all may differ.
        mtp_layer: configuration of an MTP module's layer; None: that of the last layer.
        rms_norm_eps: epsilon of every norm.
        max_model_len: number of positions that the model supports.
        tie_word_embeddings: whether the LM head and the embedding share their weight.
        dtype: "bfloat16", "float16" or "float32", from config.json; None if it names no dtype.
        norm_offset: number added to every norm weight w of the checkpoint: 1 for norms that
            multiply by 1 + w.
        embedding_scale: factor on embeddings, rounded to the model's dtype.
        logits_divisor: number by which the LM head's outputs are divided.
        per_layer_tokens: tokens with per-layer embeddings; 0: layers have no embeddings.
        logit_cap: soft cap on logits; None: no cap.
        wint4_is_mixed: whether quantization to "wint4" means "mix_quant", as for the models that
            FastDeploy was made for.
        places: possible name prefixes in the family's checkpoints; the first that fits is used.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    layers: tuple[LayerConfig, ...]
    rms_norm_eps: float
    max_model_len: int
    tie_word_embeddings: bool
    dtype: str | None
    norm_offset: float = 0.0
    embedding_scale: float = 1.0
    logits_divisor: float = 1.0
    per_layer_tokens: int = 0
    logit_cap: float | None = None
    mtp_layer: LayerConfig | None = None
    wint4_is_mixed: bool = False
    places: tuple[Place, ...] = (Place("model.", "lm_head"),)

    @property
    def num_layers(self) -> int:
        """Number of layers."""
        return len(self.layers)

    def narrowed(self, width: int) -> "ModelConfig":
        """Return a minimal config for a dry run, with one layer of each kind of attention."""
        kinds: list[LayerConfig] = []
        for layer in self.layers:
            narrow = layer.narrowed(width)
            if narrow not in kinds:
                kinds.append(narrow)
        return replace(
            self,
            vocab_size=width,
            hidden_size=width,
            layers=tuple(kinds),
            per_layer_tokens=min(width, self.per_layer_tokens),
        )
