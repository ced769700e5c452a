# SPDX-License-Identifier: Apache-2.0
"""What a model is made from, whatever its family: its layers, and what stands around them."""

from dataclasses import dataclass, replace

from specops.engine.models.blocks.layer import LayerConfig


@dataclass(frozen=True)
class Place:
    """Where a checkpoint has a model.

    Attributes:
        prefix: of the names of the embedding, the layers and the final norm.
        head: the name of the LM head, without ".weight".
    """

    prefix: str
    head: str


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """What a decoder is made from.

    Attributes:
        architecture: as config.json calls it.
        vocab_size: rows of the embedding and of the LM head.
        hidden_size: width of the states between layers.
        layers: what each layer is made from; no two need be alike.
        mtp_layer: what a drafting module's layer is made from; None: as the last layer is.
        rms_norm_eps: of every norm.
        max_model_len: positions that the model was made for.
        tie_word_embeddings: whether the LM head is the embedding.
        dtype: of the checkpoint: "bfloat16", "float16" or "float32"; None: config.json names none.
        norm_offset: added to every norm weight of the checkpoint, as of norms that multiply with
            1 + w.
        embedding_scale: what embeddings are multiplied with, rounded to the model's dtype.
        wint4_is_mixed: whether quantization to "wint4" means "mix_quant", as for the models that
            FastDeploy was made for.
        places: where checkpoints of the family have the model; the first that fits is read.
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
    mtp_layer: LayerConfig | None = None
    wint4_is_mixed: bool = False
    places: tuple[Place, ...] = (Place("model.", "lm_head"),)

    @property
    def num_layers(self) -> int:
        """How many layers there are."""
        return len(self.layers)

    def narrowed(self, width: int) -> "ModelConfig":
        """One layer of each kind of attention, all else as narrow as can be."""
        kinds: list[LayerConfig] = []
        for layer in self.layers:
            narrow = layer.narrowed(width)
            if narrow not in kinds:
                kinds.append(narrow)
        return replace(self, vocab_size=width, hidden_size=width, layers=tuple(kinds))
