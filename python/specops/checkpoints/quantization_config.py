# SPDX-License-Identifier: Apache-2.0
"""Reader of a directory's quantization settings; rejects unknown weight layouts.

How a weight is read depends on its tensors, but some layouts have equal names, dtypes and shapes. A
field that distinguishes such layouts must therefore have a known value.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from specops.checkpoints.errors import ModelError

GPTQ, AWQ, AUTO_ROUND = "gptq", "awq", "auto-round"
_SPELLINGS = {"intel/auto-round": AUTO_ROUND, "auto_round": AUTO_ROUND}
# Layouts of AutoRound: versions 1 and 2 of GPTQ, and AWQ. Source: auto_round 0.16
# (export/export_to_autoround); its own packer stores zero points unchanged (version 2).
AUTO_ROUND_LAYOUTS = {
    "auto_round:auto_gptq": "gptq",
    "auto_gptq": "gptq",
    "auto_round": "gptq_v2",
    "auto_round:gptqmodel": "gptq_v2",
    "gptqmodel": "gptq_v2",
    "auto_round:auto_awq": "awq",
    "auto_awq": "awq",
}
_GPTQ_FORMATS = ("gptq", "gptq_v2")
_COMPRESSED = (
    "dense",
    "pack-quantized",
    "int-quantized",
    "float-quantized",
    "naive-quantized",
    "mxfp4-pack-quantized",
    "mixed-precision",
)
# quant_method -> fields that specify a layout or a transformation, with the supported values.
# Absent, null and empty fields are accepted. A dot separates names of nested objects.
_FIELDS: Mapping[str, Mapping[str, tuple[Any, ...]]] = {
    GPTQ: {
        "checkpoint_format": _GPTQ_FORMATS,
        "format": _GPTQ_FORMATS,
        "is_marlin_format": (False,),
        "pack_dtype": ("int32",),
        "adapter": (),
        "rotation": (),
    },
    AWQ: {
        "version": ("gemm", "exllama", "ipex"),  # the last two are kernels for the same layout
        "checkpoint_format": ("gemm",),
        "format": ("gemm",),
        "pack_dtype": ("int32",),
        "adapter": (),
    },
    AUTO_ROUND: {
        "packing_format": tuple(AUTO_ROUND_LAYOUTS),
        "data_type": ("int", "int_sym", "int_asym"),
        "super_bits": (),
    },
    "compressed-tensors": {
        "format": _COMPRESSED,
        "config_groups.*.format": _COMPRESSED,
        "sparsity_config.format": ("dense",),
        "transform_config": (),
    },
    "fp8": {"fmt": ("e4m3", "float8_e4m3fn")},
    "fbgemm_fp8": {},
    "modelopt": {
        "quant_algo": ("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO", "MIXED_PRECISION"),
    },
    "mxfp4": {},
    "quark": {"export.pack_method": ("reorder", "order")},
}


def quantization_settings(directory: Path) -> Mapping[str, Any]:
    """Return the quantization settings of a directory; empty if there are none.

    They are read from config.json (quantization_config, or compression_config in older files),
    else from quantize_config.json (GPTQ) or hf_quant_config.json (ModelOpt).

    Raises:
        ModelError: a file is not a JSON object, or the method or a layout is unknown.
    """
    for file, field, settings in _candidates(directory):
        if isinstance(settings, dict) and settings:
            _check(file, field, settings)
            return settings
        if settings:
            raise ModelError(f"{file}: {field.rstrip('.')} must be an object, got {settings!r:.60}")
    return {}


def method_of(settings: Mapping[str, Any]) -> str | None:
    """Return the quantization method in its usual spelling; None if the settings name none."""
    method = settings.get("quant_method")
    return _SPELLINGS.get(method, method) if isinstance(method, str) else None


def _candidates(directory: Path) -> Iterator[tuple[Path, str, Any]]:
    """Yield places that may hold settings: (file, prefix of the field names, value)."""
    file = directory / "config.json"
    config = _object_of(file)
    nested = config.get("text_config")
    text = nested if isinstance(nested, dict) else {}
    yield file, "quantization_config.", config.get("quantization_config")
    yield file, "compression_config.", config.get("compression_config")
    yield file, "text_config.quantization_config.", text.get("quantization_config")
    if config.get("quantization"):
        raise ModelError(f"{file}: quantization names MLX, whose checkpoints are not supported")
    yield directory / "quantize_config.json", "", _object_of(directory / "quantize_config.json")
    file = directory / "hf_quant_config.json"
    found = _object_of(file).get("quantization")
    if isinstance(found, dict) and found:
        found = {"quant_method": "modelopt", **found}
    yield file, "quantization.", found


def _object_of(file: Path) -> Mapping[str, Any]:
    if not file.is_file():
        return {}
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{file}: not a JSON object: {error}") from error
    if not isinstance(found, dict):
        raise ModelError(f"{file}: expected a JSON object, got {type(found).__name__}")
    return found


def _check(file: Path, prefix: str, settings: Mapping[str, Any]) -> None:
    method = settings.get("quant_method")
    if method is None and settings.get("mode") is not None:
        raise ModelError(f"{file}: {prefix}mode names MLX, whose checkpoints are not supported")
    known = GPTQ if method is None else method_of(settings)
    if known is None or known not in _FIELDS:
        raise ModelError(
            f"{file}: {prefix}quant_method must be one of {', '.join(_FIELDS)}, got {method!r:.60}"
        )
    for field, allowed in _FIELDS[known].items():
        for value in _values(settings, field.split(".")):
            normalized = value.lower() if isinstance(value, str) and known == AWQ else value
            if value is not None and value not in ({}, []) and normalized not in allowed:
                expected = " or ".join(map(str, allowed)) or "absent"
                raise ModelError(
                    f"{file}: {prefix}{field} must be {expected}, got {value!r:.60}: "
                    f"weights of {method or known} in this form are not supported"
                )


def _values(settings: Any, path: list[str]) -> Iterator[Any]:
    """Yield all values of a field, given its path; a star matches every key."""
    if not path:
        yield settings
    elif isinstance(settings, dict):
        for key in settings if path[0] == "*" else path[:1]:
            yield from _values(settings.get(key), path[1:])
