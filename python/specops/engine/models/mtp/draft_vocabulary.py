# SPDX-License-Identifier: Apache-2.0
"""Reduced draft vocabularies, and the LM heads over them."""

from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from specops.api.errors import ModelError
from specops.dense import PackedWeight
from specops.engine.models.loader import head_name
from specops.engine.models.transformer import Transformer
from specops.engine.models.weights import WeightSettings


def read_token_map(path: Path, vocab_size: int) -> Tensor:
    """Read a reduced draft vocabulary; return its token ids, int32, ascending.

    Args:
        path: a safetensors file with the tensor `d2t`; see `load_mtp`.
        vocab_size: the target's vocabulary size.

    Raises:
        ModelError: the file is missing or damaged, or its content is invalid.
    """
    if not path.is_file():
        raise ModelError(f"{path}: no such file; expected a safetensors file with the tensor d2t")
    try:
        with safe_open(path, framework="pt") as file:
            if "d2t" not in file.keys():  # noqa: SIM118
                raise ModelError(f"{path}: tensor d2t is missing")
            offsets: Tensor = file.get_tensor("d2t")
    except SafetensorError as error:
        raise ModelError(f"{path}: not a safetensors file: {error}") from error
    return token_map_of(offsets, f"{path}: d2t", vocab_size)


def token_map_of(offsets: Tensor, where: str, vocab_size: int) -> Tensor:
    """Return the token ids that a tensor `d2t` encodes, int32, ascending.

    Args:
        offsets: int64 [draft vocabulary]: row i of the draft head is token i + offsets[i].
        where: name of the file and the tensor, for error messages.
        vocab_size: the target's vocabulary size.

    Raises:
        ModelError: the tensor is not a valid `d2t`.
    """
    if offsets.dtype != torch.int64 or offsets.dim() != 1 or offsets.numel() == 0:
        raise ModelError(
            f"{where} must be int64 [draft vocabulary], got {offsets.dtype} {list(offsets.shape)}"
        )
    tokens = offsets + torch.arange(offsets.numel())
    if int(tokens[0]) < 0 or int(tokens[-1]) >= vocab_size or bool((tokens.diff() <= 0).any()):
        raise ModelError(
            f"{where} must hold ascending token ids in [0, {vocab_size}) as i + d2t[i]"
        )
    return tokens.to(torch.int32)


def draft_head(
    target: Transformer, settings: WeightSettings, directory: Path, token_map: Tensor | None
) -> PackedWeight:
    """Return the LM head for drafting: the target's rows of the draft vocabulary.

    Every rank drafts by itself, so each rank holds the whole head.

    Args:
        target: the target model.
        settings: settings of the drafter's weights.
        directory: the directory that the target was loaded from.
        token_map: result of `read_token_map`, on the target's device; None: all tokens.
    """
    quantization = settings.quantize_head
    is_alike = quantization == target.settings.quantize_head and target.ranks.size == 1
    if token_map is None and is_alike:
        return target.lm_head
    config, source = target.config, settings.open(directory)
    sizes = (config.vocab_size,), config.hidden_size
    name = head_name(config, source)
    return source.linear("", (name,), *sizes, quantization=quantization, rows=token_map)
