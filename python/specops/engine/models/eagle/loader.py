# SPDX-License-Identifier: Apache-2.0
"""Loads EAGLE-3 heads, as speculators, SpecForge and the authors of the method publish them."""

from pathlib import Path

import torch
from torch import Tensor

from specops.dense import PackedWeight
from specops.engine.errors import ModelError
from specops.engine.models.blocks.block import BlockLoader, Norm
from specops.engine.models.eagle.layout import Eagle3Config, read_eagle3_config
from specops.engine.models.eagle.modules import Eagle3, Eagle3Weights
from specops.engine.models.head_files import open_head, refuse_unread
from specops.engine.models.mtp.draft_vocabulary import draft_head, token_map_of
from specops.engine.models.mtp.modules import MtpBatch
from specops.engine.models.transformer import Transformer
from specops.engine.models.weights import WeightSource

_PAGE_SIZE = 16  # of the dry run
_FILES = ("pytorch_model.bin",)
# The first says the same as d2t; the other is computed from the configuration.
_UNREAD = ("t2d", "rotary_emb.inv_freq")


def load_eagle3(
    target: Transformer,
    directory: str | Path,
    *,
    target_directory: str | Path,
    quantization: str | None = None,
) -> Eagle3:
    """Loads a head.

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
    source = open_head(directory, target.settings.of_drafter(quantization), _FILES)
    config = read_eagle3_config(directory, source.names(), target)
    weights = _load(target, source, config, directory, Path(target_directory))
    refuse_unread(source, directory, "an EAGLE-3 head", _UNREAD)
    head = Eagle3(config, weights, target.hidden_size)
    try:
        _dry_run(head)
    except ValueError as error:
        op, _, sentence = str(error).partition(": ")
        raise ModelError(f"{directory / 'config.json'}: {sentence} ({op})") from error
    return head


def _dry_run(head: Eagle3) -> None:
    """Runs a row: what an op refuses shows before anybody's request does."""

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
    states = torch.zeros(1, head.hidden_size, dtype=head.dtype, device=head.device)
    hidden, _ = head.forward(batch, states, head.new_kv_cache(1, _PAGE_SIZE))
    head.logits(hidden)


def _load(
    target: Transformer,
    source: WeightSource,
    config: Eagle3Config,
    directory: Path,
    target_directory: Path,
) -> Eagle3Weights:
    loader = BlockLoader(
        source=source,
        hidden_size=config.hidden_size,
        norm_eps=config.norm_eps,
        kv_dtype=target.kv_dtype,
        ropes=target.ropes,
    )
    prefix, num_taps, width = config.prefix, len(config.taps), target.hidden_size
    token_map = _token_map(source, config, target, directory)
    fc = f"{prefix}fc"
    has_bias = f"{fc}.bias" in source.names()
    fc_norms: tuple[Norm, ...] = ()
    if config.fc_norm:
        names = (f"{prefix}fc_norm.{index}" for index in range(num_taps))
        fc_norms = tuple(loader.norm(name, width) for name in names)
    joined = num_taps * width
    return Eagle3Weights(
        embedding=_embedding(target, source, config, directory),
        fc=source.linear("", (fc,), (config.hidden_size,), joined, quantization="none"),
        fc_bias=source.bias("", (fc,), (config.hidden_size,)) if has_bias else None,
        fc_norms=fc_norms,
        input_norm=loader.norm(f"{prefix}input_norm", joined) if config.norm_before_fc else None,
        hidden_norm=loader.norm(f"{config.layer_prefixes[0]}hidden_norm"),
        layers=tuple(
            layer.load(loader, of_layer)
            for layer, of_layer in zip(config.layers, config.layer_prefixes, strict=True)
        ),
        final_norm=loader.norm(f"{prefix}norm"),
        lm_head=_lm_head(target, source, config, target_directory, token_map),
        token_map=token_map,
    )


def _token_map(
    source: WeightSource, config: Eagle3Config, target: Transformer, directory: Path
) -> Tensor | None:
    """The tokens that the head may draft; None: all."""
    vocab_size = target.config.vocab_size
    if "d2t" not in source.names():
        if config.draft_vocab_size != vocab_size:
            raise ModelError(
                f"{directory}: tensor d2t is missing: draft_vocab_size is "
                f"{config.draft_vocab_size}, and the target has {vocab_size} tokens"
            )
        return None
    offsets = source.integers("d2t", config.draft_vocab_size)
    return token_map_of(offsets, f"{directory}: tensor d2t", vocab_size).to(target.device)


def _embedding(
    target: Transformer, source: WeightSource, config: Eagle3Config, directory: Path
) -> Tensor:
    """The head's own embedding, or the target's."""
    name = f"{config.prefix}embed_tokens.weight"
    if name in source.names():
        return source.tensor(name, target.config.vocab_size, config.hidden_size)
    if config.hidden_size != target.hidden_size or target.config.embedding_scale != 1.0:
        raise ModelError(
            f"{directory}: tensor {name} is missing, and the target's embedding does not fit"
        )
    return target.embedding


def _lm_head(
    target: Transformer,
    source: WeightSource,
    config: Eagle3Config,
    target_directory: Path,
    token_map: Tensor | None,
) -> PackedWeight:
    """The head's own LM head, or the rows of the target's that it may draft."""
    names = [
        name
        for name in ("lm_head", f"{config.prefix}lm_head")
        if f"{name}.weight" in source.names()
    ]
    if not names and config.hidden_size == target.hidden_size:
        return draft_head(target, source.settings, target_directory, token_map)
    quantization, outputs = source.settings.quantize_head, (config.draft_vocab_size,)
    name = names[0] if names else "lm_head"
    return source.linear("", (name,), outputs, config.hidden_size, quantization=quantization)
