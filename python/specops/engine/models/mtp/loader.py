# SPDX-License-Identifier: Apache-2.0
"""Loader of a checkpoint's MTP modules: finds their number, tensor names and weights."""

import re
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from specops.api.errors import ModelError
from specops.engine.models.blocks.block import BlockLoader, Norm
from specops.engine.models.blocks.layer import LayerConfig
from specops.engine.models.config import ModelConfig
from specops.engine.models.families import CONVENTIONS, convention_of
from specops.engine.models.families.family import MtpConvention
from specops.engine.models.families.fields import read_config, text_config
from specops.engine.models.mtp.draft_vocabulary import draft_head, read_token_map
from specops.engine.models.mtp.modules import MtpModule, MtpModules
from specops.engine.models.transformer import Transformer
from specops.engine.models.weights import WeightSource

# Parts of tensor names that reveal a kind of block, which must be that of the target's layers.
_FOREIGN_BLOCKS = {
    "mlp.experts.": "a mixture of experts",
    "mlp.shared_expert": "a mixture of experts",
    "self_attn.kv_a_proj": "multi-head latent attention",
    "linear_attn.": "linear attention",
}


def load_mtp(
    target: Transformer,
    directory: str | Path,
    *,
    draft_directory: str | Path | None = None,
    draft_vocab: str | Path | None = None,
    quantization: str | None = None,
) -> MtpModules:
    """Load the MTP modules that belong to a target.

    The tensor names determine the naming convention, and config.json the number of modules. The
    modules share the target's embedding and LM head; copies in the checkpoint are not read. The
    modules have random weights if the target has.

    Args:
        target: the model that the modules draft for.
        directory: the directory that the target was loaded from.
        draft_directory: separate directory with the modules and a config.json of its own, or None.
        draft_vocab: a safetensors file with the tensor `d2t`, int64 [draft vocabulary], in
            ascending order: row i of the draft head is token i + d2t[i], as in EAGLE-3's
            checkpoints. A smaller draft head takes less time, but drafts no other tokens.
        quantization: format to which the modules' projections, and a copy of the target's LM head
            for drafting, are quantized while loading; None: the modules' layers are quantized like
            the target's, and the target's LM head itself is used.

    Raises:
        ModelError: a file, a field or a tensor is missing, damaged or does not fit the target.
    """
    directory = Path(directory)
    where = Path(draft_directory) if draft_directory is not None else directory
    if not where.is_dir():
        raise ModelError(f"{where}: no such directory")
    raw = text_config(read_config(where))
    config = target.config
    for field in ("hidden_size", "vocab_size"):
        expected = getattr(config, field)
        if raw.get(field, expected) != expected:
            raise ModelError(
                f"{where / 'config.json'}: {field} is {raw[field]}, but the target in {directory} "
                f"has {expected}"
            )
    settings = target.settings.of_drafter(quantization)
    source = settings.open(where)
    if settings.load_format == "dummy":
        convention, layers = _dummy_layers(config, raw, where)
    else:
        convention, layers = _found_layers(source.names(), config, raw, where)
    source.norm_offset = convention.norm_offset
    modules = [
        _load_module(target, convention, source, index, layer, quantization or "none")
        for index, layer in enumerate(layers)
    ]
    _refuse_unread(source, convention, layers, where)
    token_map = None
    if draft_vocab is not None:
        token_map = read_token_map(Path(draft_vocab), config.vocab_size).to(target.device)
    lm_head = draft_head(target, settings, directory, token_map)
    return MtpModules(target, convention, modules, lm_head=lm_head, token_map=token_map)


def _found_layers(
    names: Collection[str], config: ModelConfig, raw: Mapping[str, Any], where: Path
) -> tuple[MtpConvention, list[int]]:
    """Return a checkpoint's naming convention, and the number in each module's tensor names."""
    convention = _convention_of(names, raw, where)
    layers = _layers_of(names, convention, raw, where)
    _refuse_foreign(names, _block(config), convention, layers, where)
    return convention, layers


def _dummy_layers(
    config: ModelConfig, raw: Mapping[str, Any], where: Path
) -> tuple[MtpConvention, list[int]]:
    """Return the naming convention and the numbers of modules with random weights."""
    convention = convention_of(config.architecture)
    field, count = _declared(raw, convention, where)
    if not count:
        raise ModelError(f"{where / 'config.json'}: {field} must be at least 1")
    return convention, list(range(config.num_layers, config.num_layers + count))


def _pattern(convention: MtpConvention) -> re.Pattern[str]:
    """Return a pattern for the name of one tensor per module; group 1 is {index} or {layer}."""
    name = convention.projection + ".weight"
    if "{" not in name:
        name = convention.block + "input_layernorm.weight"
    return re.compile(re.sub(r"\\{(index|layer)\\}", r"(\\d+)", re.escape(name)))


def _convention_of(names: Collection[str], raw: Mapping[str, Any], where: Path) -> MtpConvention:
    for convention in CONVENTIONS.values():
        if any(_pattern(convention).fullmatch(name) for name in names):
            return convention
    fields = {field for one in CONVENTIONS.values() for field in one.count_fields}
    claims = [f"{field} is {raw[field]}" for field in sorted(fields) if raw.get(field)]
    but = f", though {claims[0]} in config.json" if claims else ""
    known = ", ".join(one.projection + ".weight" for one in CONVENTIONS.values())
    raise ModelError(
        f"{where}: the checkpoint holds no MTP weights{but}; looked for tensors named {known}"
    )


def _declared(
    raw: Mapping[str, Any], convention: MtpConvention, where: Path
) -> tuple[str, int | None]:
    """Return the name of the config field for the number of modules, and its value or None."""
    for field in convention.count_fields:
        if raw.get(field) is not None:
            count = raw[field]
            if not isinstance(count, int) or isinstance(count, bool) or count < 0:
                raise ModelError(
                    f"{where / 'config.json'}: {field} must be a number of modules, got {count!r}"
                )
            return field, count
    return convention.count_fields[0], None


def _layers_of(
    names: Collection[str], convention: MtpConvention, raw: Mapping[str, Any], where: Path
) -> list[int]:
    """Return the number in each module's tensor names, in order; check it against config.json."""
    pattern = _pattern(convention)
    found = sorted(int(match.group(1)) for name in names if (match := pattern.fullmatch(name)))
    field, count = _declared(raw, convention, where)
    if count is not None and count != len(found):
        raise ModelError(
            f"{where / 'config.json'}: {field} is {count}, but the checkpoint holds the tensors of "
            f"{len(found)} MTP module{'s' if len(found) > 1 else ''} ({pattern.pattern})"
        )
    first = found[0]
    if "{layer}" not in convention.block:
        expected = range(len(found))
    elif first != raw.get("num_hidden_layers", first) and first != 0:
        raise ModelError(
            f"{where / 'config.json'}: num_hidden_layers is {raw['num_hidden_layers']}, but the "
            f"first MTP module's tensors are those of layer {first}"
        )
    else:  # a separate draft directory may number its modules from 0
        expected = range(first, first + len(found))
    if found != list(expected):
        raise ModelError(f"{where}: MTP modules must be numbered without gaps, got {found}")
    return found


def _load_module(
    target: Transformer,
    convention: MtpConvention,
    source: WeightSource,
    index: int,
    layer: int,
    projection_quantization: str,
) -> MtpModule:
    config = target.config
    loader = BlockLoader(
        source=source,
        hidden_size=config.hidden_size,
        norm_eps=config.rms_norm_eps,
        kv_dtype=target.kv_dtype,
        ropes=target.ropes,
    )

    def named(name: str) -> str:
        return name.format(index=index, layer=layer)

    def head_norm() -> Norm:
        if convention.head_norm is None:
            return target.final_norm
        return loader.norm(named(convention.head_norm))

    hidden = config.hidden_size
    projection = named(convention.projection)
    weight = source.linear(
        "", (projection,), (hidden,), 2 * hidden, quantization=projection_quantization
    )
    bias = None
    if f"{projection}.bias" in source.names():
        bias = source.bias("", (projection,), (hidden,))
    return MtpModule(
        embed_norm=loader.norm(named(convention.embed_norm)),
        hidden_norm=loader.norm(named(convention.hidden_norm)),
        projection=weight,
        projection_bias=bias,
        layer=_block(config).load(loader, named(convention.block)),
        head_norm=head_norm(),
    )


def _block(config: ModelConfig) -> LayerConfig:
    """Return the config of a module's layer: its own, or the last layer's; without a window."""
    last = config.mtp_layer or config.layers[-1]
    return replace(last, attention=last.attention.without_window())


def _refuse_foreign(
    names: Collection[str],
    block: LayerConfig,
    convention: MtpConvention,
    layers: list[int],
    where: Path,
) -> None:
    """Reject modules whose tensor names show another kind of decoder layer than the target's."""
    kinds = (block.mlp.kind, block.attention.kind)
    for index, layer in enumerate(layers):
        prefix = convention.block.format(index=index, layer=layer)
        for part, kind in _FOREIGN_BLOCKS.items():
            for name in names:
                if kind not in kinds and name.startswith(prefix + part):
                    raise ModelError(
                        f"{where}: the MTP module's block is {kind} (tensor {name}), but the "
                        f"target's modules are {' and '.join(kinds)}"
                    )


def _refuse_unread(
    source: WeightSource,
    convention: MtpConvention,
    layers: list[int],
    where: Path,
) -> None:
    """Reject unread tensors of the modules: they belong to an unsupported kind of block."""
    for index, layer in enumerate(layers):
        prefix = convention.block.format(index=index, layer=layer)
        copies = tuple(one.format(index=index, layer=layer) for one in convention.copies)
        for name in sorted(source.names()):
            is_left = name.startswith(prefix) and name not in source.read
            if is_left and not name.startswith(copies or ("\0",)):
                raise ModelError(f"{where}: tensor {name} is not used by the MTP module")
