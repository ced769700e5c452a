# SPDX-License-Identifier: Apache-2.0
"""Published layouts of EAGLE-3 heads: three of config.json, two conventions of layer numbers."""

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from specops.api.errors import ModelError
from specops.engine.models.blocks.attention import AttentionConfig
from specops.engine.models.blocks.layer import LayerConfig
from specops.engine.models.families.dense_decoder import dense_decoder
from specops.engine.models.families.fields import (
    FULL,
    SLIDING,
    count,
    read_config,
    refuse_values,
)
from specops.engine.models.state_head import StateHeadConfig, naming, with_qk_norms
from specops.engine.models.transformer import Transformer

logger = logging.getLogger(__name__)

# Fields that list the target layers whose states are read. Some number a state by the layer that it
# enters: that state is the output of the layer before.
_ENTERED = ("eagle_aux_hidden_state_layer_ids", "aux_hidden_state_layer_ids")
_LEFT = ("target_layer_ids", "layer_ids")
# Fields that only ModelOpt writes into eagle_config. ModelOpt numbers states by the layer that they
# enter (sglang's pull request 32334), but SpecForge by the layer that they leave: its default
# begins with 1, which others call 2 (sglang's pull request 25454 uses this to distinguish them).
_OF_MODELOPT = (
    "use_input_layernorm_in_first_layer",
    "use_last_layernorm",
    "use_mtp_layernorm",
    "next_layer_regular",
    "parallel_draft_step",
)
# Fields that unsupported variants set, with the supported values; None: absent.
_VARIANTS: Mapping[str, tuple[Any, ...]] = {
    "use_aux_hidden_state": (True, None),
    "use_input_layernorm_in_first_layer": (True, None),
    "use_last_layernorm": (True, None),
    "use_mtp_layernorm": (False, None),
    "parallel_draft_step": (1, None),
    "logit_scale": (1, None),
}
_KINDS = ("eagle3", "peagle")
# Field names of P-EAGLE's mask in speculators, vLLM's converter and its first trainer.
_MASKS = ("mask_token_id", "pard_token", "ptd_token_id")

MASK_HIDDEN = "mask_hidden"  # tensor that P-EAGLE's masks read instead of target states

# Parts of tensor names that only unsupported heads have.
_FOREIGN = {
    "mlp.experts.": "a mixture of experts",
    "self_attn.kv_a_proj": "multi-head latent attention",
}


@dataclass(frozen=True, kw_only=True)
class Eagle3Config(StateHeadConfig):
    """Configuration of an EAGLE-3 head. Its first layer's attention reads embeddings and states.

    Attributes:
        norm_before_residual: whether the first layer's residual is the state after its norm.
        norm_before_fc: whether the states of all target layers are normed together before `fc`.
        fc_norm: whether the states of each target layer are normed separately before `fc`.
        norm_output: whether the next draft reads the state after the final norm, not before it.
        mask_token_id: token whose embedding is the input of P-EAGLE's masks; None: the head drafts
            token by token.
        prefix: name prefix of the head's tensors.
        layer_prefixes: name prefix of each layer's tensors.
    """

    norm_before_residual: bool
    norm_before_fc: bool
    fc_norm: bool
    norm_output: bool
    mask_token_id: int | None
    prefix: str
    layer_prefixes: tuple[str, ...]


def read_eagle3_config(
    directory: Path, names: Collection[str], target: Transformer
) -> Eagle3Config:
    """Read a head's config.json and tensor names.

    Args:
        directory: the head's directory.
        names: names of the head's tensors.
        target: the model that it drafts for.

    Raises:
        ModelError: a field is missing, has an invalid value, or does not fit the target.
    """
    raw = read_config(directory)
    with naming(directory):
        return _read(raw, directory, names, target)


def _read(
    raw: Mapping[str, Any], directory: Path, names: Collection[str], target: Transformer
) -> Eagle3Config:
    kind = raw.get("speculators_model_type")
    if kind not in (None, *_KINDS):
        raise ModelError(f"speculators_model_type must be {' or '.join(_KINDS)}, got {kind!s:.60}")
    nested = raw.get("transformer_layer_config")
    layer = nested if isinstance(nested, dict) else raw
    own = {**mapping_of(raw, "eagle_config"), **raw}
    refuse_values(own, _VARIANTS)
    if SLIDING in (layer.get("layer_types") or ()) and layer is nested:
        raise ModelError(f"layer_types must only hold {FULL}, got {layer['layer_types']!r:.60}")
    prefix = "model." if any(name.startswith("model.") for name in names) else ""
    layer_prefixes = _layer_prefixes(directory, names, prefix)
    # The number and the kinds of layers are wrong in some files.
    left = {name: value for name, value in layer.items() if name != "layer_types"}
    left |= {"architectures": ["EAGLE-3"], "num_hidden_layers": len(layer_prefixes)}
    decoder = dense_decoder(left)
    vocab_size = raw.get("target_vocab_size", decoder.vocab_size)
    if vocab_size != target.config.vocab_size:
        raise ModelError(
            f"vocab_size is {vocab_size!s:.60}, but the target has {target.config.vocab_size}"
        )
    width = own.get("target_hidden_size") or decoder.hidden_size
    if width != target.hidden_size:
        field = "target_hidden_size" if own.get("target_hidden_size") else "hidden_size"
        raise ModelError(f"{field} is {width!s:.60}, but the target has {target.hidden_size}")
    first, *others = (
        with_qk_norms(one, f"{of_layer}self_attn.q_norm.weight" in names)
        for one, of_layer in zip(decoder.layers, layer_prefixes, strict=True)
    )
    first = replace(first, attention=_of_pairs(first, 2 * decoder.hidden_size))
    num_layers = target.config.num_layers
    return Eagle3Config(
        hidden_size=decoder.hidden_size,
        layers=(first, *others),
        norm_eps=decoder.rms_norm_eps,
        aux_layers=aux_layers_of(
            own,
            directory,
            num_layers,
            (2, num_layers // 2, num_layers - 3),
            counts_left=_counts_left(raw),
        ),
        draft_vocab_size=count(own, "draft_vocab_size", target.config.vocab_size),
        norm_before_residual=flag_of(own, "norm_before_residual"),
        norm_before_fc=flag_of(own, "norm_before_fc"),
        fc_norm=flag_of(own, "fc_norm"),
        norm_output=flag_of(own, "norm_output"),
        mask_token_id=_mask_of(own, directory, names, kind, target.config.vocab_size),
        prefix=prefix,
        layer_prefixes=layer_prefixes,
    )


def _layer_prefixes(directory: Path, names: Collection[str], prefix: str) -> tuple[str, ...]:
    """Return the name prefix of each layer's tensors; the first layer has two possible names."""
    found: list[str] = []
    for index in range(len(names)):
        candidates = [f"{prefix}layers.{index}."]
        if index == 0:
            candidates.insert(0, f"{prefix}midlayer.")
        here = [one for one in candidates if any(name.startswith(one) for name in names)]
        if not here:
            break
        found.append(here[0])
    if not found:
        raise ModelError(
            f"{directory}: the checkpoint holds no EAGLE-3 head; looked for tensors named "
            "midlayer. or layers.0., with or without model."
        )
    if f"{found[0]}hidden_norm.weight" not in names:
        raise ModelError(
            f"{directory}: tensor {found[0]}hidden_norm.weight is missing; use method eagle for "
            "heads of EAGLE-1 and EAGLE-2, which lack it"
        )
    for one in found:
        for part, kind in _FOREIGN.items():
            if any(name.startswith(one + part) for name in names):
                raise ModelError(f"{directory}: the head has {kind}, which is not supported yet")
    return tuple(found)


def _mask_of(
    own: Mapping[str, Any],
    directory: Path,
    names: Collection[str],
    kind: str | None,
    vocab_size: int,
) -> int | None:
    """Return the mask token of a P-EAGLE head, recognized by its tensors; None for other heads."""
    if MASK_HIDDEN not in names:
        if kind == "peagle":
            raise ModelError(f"{directory}: tensor {MASK_HIDDEN} is missing")
        return None
    field = next((name for name in _MASKS if own.get(name) is not None), _MASKS[0])
    return token_of(own, field, vocab_size)


def token_of(own: Mapping[str, Any], field: str, vocab_size: int) -> int:
    """Return the value of a field that is a token id.

    Raises:
        KeyError: the field is missing.
        ModelError: the value is not a token id below `vocab_size`.
    """
    token = own[field]
    if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocab_size:
        raise ModelError(f"{field} must be a token id below {vocab_size}, got {token!r:.60}")
    return token


def _counts_left(raw: Mapping[str, Any]) -> bool:
    """Return whether `eagle_config` numbers states by the layer that they leave (SpecForge)."""
    own = mapping_of(raw, "eagle_config")
    ids = own.get(_ENTERED[0])
    is_modelopt = any(field in own for field in _OF_MODELOPT)
    return isinstance(ids, list) and ids[:1] == [1] and not is_modelopt


def aux_layers_of(
    own: Mapping[str, Any],
    directory: Path,
    num_layers: int,
    default: Sequence[int] | None,
    *,
    counts_left: bool = False,
) -> tuple[int, ...]:
    """Return the target layers whose outputs the head reads.

    Args:
        own: fields of config.json.
        directory: the head's directory.
        num_layers: number of layers of the target.
        default: layers, numbered by the states that enter them, used if no field lists any or the
            list is empty; None: a field must list them.
        counts_left: whether all fields number states by the layer that they leave.

    Raises:
        KeyError: no field lists layers, and there is no default.
        ModelError: a field lists an invalid layer.
    """
    for fields, shift in ((_ENTERED, 1), (_LEFT, 0)):
        for field in fields:
            ids = own.get(field)
            if ids is not None and ids != []:
                return _checked(field, ids, shift * (not counts_left), directory, num_layers)
    if default is None:
        raise KeyError(_LEFT[0])
    return _checked("the default of the method", default, 1, directory, num_layers)


def _checked(field: str, ids: Any, shift: int, directory: Path, num_layers: int) -> tuple[int, ...]:
    is_list = isinstance(ids, Sequence) and not isinstance(ids, str) and len(ids) > 0
    if not is_list or any(isinstance(one, bool) or not isinstance(one, int) for one in ids):
        raise ModelError(f"{field} must be a list of layers, got {ids!r:.60}")
    aux_layers = tuple(one - shift for one in ids)
    if min(aux_layers) < 0 or max(aux_layers) >= num_layers:
        raise ModelError(
            f"{field}: layers must be in [{shift}, {num_layers - 1 + shift}] for a target of "
            f"{num_layers} layers, got {list(ids)}"
        )
    logger.info(
        "%s reads the outputs of layers %s of its target (%s)", directory, aux_layers, field
    )
    return aux_layers


def _of_pairs(layer: LayerConfig, width: int) -> AttentionConfig:
    assert isinstance(layer.attention, AttentionConfig)
    return replace(layer.attention, input_size=width)


def flag_of(own: Mapping[str, Any], field: str, *, default: bool = False) -> bool:
    """Return the value of a field that must be true or false.

    Raises:
        ModelError: the value is neither true nor false.
    """
    value = own.get(field)
    if value is not None and not isinstance(value, bool):
        raise ModelError(f"{field} must be true or false, got {value!r:.60}")
    return default if value is None else value


def mapping_of(raw: Mapping[str, Any], field: str) -> Mapping[str, Any]:
    """Return the value of a field if it is an object, else an empty mapping."""
    value = raw.get(field)
    return value if isinstance(value, dict) else {}
