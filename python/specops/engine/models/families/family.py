# SPDX-License-Identifier: Apache-2.0
"""Description of a model family."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from specops.engine.models.config import ModelConfig
from specops.engine.models.families.gguf import GgufForm


@dataclass(frozen=True, kw_only=True)
class MtpConvention:
    """Tensor names and inputs of a family's MTP modules.

    In names, {index} is the module's number from 0, and {layer} is the number of decoder layers
    below it. All modules share the tensor of a name that contains neither.

    Attributes:
        name: name of the convention.
        families: names of the models that use the convention.
        count_fields: fields of config.json with the number of modules; the first one that is
            present is used.
        embed_norm: name of the embedding's norm.
        hidden_norm: name of the hidden state's norm.
        projection: name of the matrix [hidden_size, 2 * hidden_size], without ".weight" or ".bias".
        head_norm: name of the norm before the LM head; None: the target's final norm is used.
        block: name prefix of the decoder layer.
        copies: names of tensors that checkpoints repeat for each module. They are ignored: the
            target's embedding and LM head are used instead.
        hidden_first: whether the hidden state, not the embedding, is the projection's first half.
        norm_offset: number added to every norm weight of the modules, like
            `ModelConfig.norm_offset`.
        recycle_normed: whether the next draft reads the state after the head norm, not before it.
        masks_position_0: whether zeros replace the embedding that the row at position 0 reads.
            Some engines do this, but no family here needs it: it hides the second token.
        chained: whether module m reads the output of module m - 1; otherwise each module reads
            the target's state.
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
    """Model family, defined by one file and one line in the registry.

    Attributes:
        title: name of the models in documents.
        read: functions that read config.json to a `ModelConfig`, by the architecture named in it.
        mtp: convention of the family's MTP modules; None: it defines none.
        gguf: layouts of the family's GGUF files, one for each architecture named in them.
        assistants: functions that read the config.json of assistant models, which draft from the
            target's keys and values, by the architecture named in it.
    """

    title: str
    read: Mapping[str, Callable[[Mapping[str, Any]], ModelConfig]]
    mtp: MtpConvention | None = None
    gguf: tuple[GgufForm, ...] = ()
    assistants: Mapping[str, Callable[[Mapping[str, Any]], ModelConfig]] = field(
        default_factory=dict
    )
