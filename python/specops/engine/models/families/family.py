# SPDX-License-Identifier: Apache-2.0
"""Description of a model family."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from specops.engine.models.config import ModelConfig
from specops.engine.models.families.gguf import GgufForm


@dataclass(frozen=True, kw_only=True)
class MtpConvention:
    """Tensor names of a family's MTP modules, and the inputs of the modules.

    In names, {index} is the module's number from 0 and {layer} the number of decoder layers below
    it. A name without either is shared by all modules.

    Attributes:
        name: name of the convention.
        families: the models that use it.
        count_fields: fields of config.json with the number of modules; the first present one
            counts.
        embed_norm: name of the embedding's norm.
        hidden_norm: name of the hidden state's norm.
        projection: of the matrix [hidden_size, 2 * hidden_size], without ".weight" or ".bias".
        head_norm: of the norm before the LM head; None: it is the target's own final norm.
        block: prefix of the names of the decoder layer.
        copies: tensors that checkpoints of the family repeat for each module; the target's own
            embedding and LM head are used in their place.
        hidden_first: whether the hidden state, not the embedding, is the projection's first half.
        norm_offset: added to every norm weight of the modules, as `ModelConfig.norm_offset`.
        recycle_normed: whether a later draft reads the state after the head norm, not before it.
        masks_position_0: whether zeros replace the embedding read at position 0. False for all
            families here: some engines do it, which hides the second token from every first draft.
        chained: whether module m reads the output of module m - 1; otherwise each reads the
            target's state.
    """

    name: str
    families: tuple[str, ...]
    count_fields: tuple[str, ...] = ("num_nextn_predict_layers",)
    embed_norm: str
    hidden_norm: str
    projection: str
    head_norm: str | None
    block: str
    copies: tuple[str, ...] = ()
    hidden_first: bool = False
    norm_offset: float = 0.0
    recycle_normed: bool = True
    masks_position_0: bool = False
    chained: bool = True


@dataclass(frozen=True, kw_only=True)
class Family:
    """A family of models: one file, and one line in the registry.

    Attributes:
        title: name of its models in documents.
        read: by architecture as named in config.json, a function from that file to a `ModelConfig`.
        mtp: the convention of its MTP modules; None: it has none of its own.
        gguf: layout of its GGUF files; None: they are not supported.
    """

    title: str
    read: Mapping[str, Callable[[Mapping[str, Any]], ModelConfig]]
    mtp: MtpConvention | None = None
    gguf: GgufForm | None = None
