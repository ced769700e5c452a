# SPDX-License-Identifier: Apache-2.0
"""Registry of the supported model families; each has one file and one line in the registry."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

from specops.api.errors import ModelError
from specops.engine.models.config import ModelConfig
from specops.engine.models.families.family import Family, MtpConvention
from specops.engine.models.families.fields import mapping, read_config

# One module per family.
_FILES = (
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "qwen3_moe",
    "deepseek_v3",
    "mimo",
    "glm4_moe",
    "ernie4_5",
    "gptoss",
    "qwen3_next",
    "granite_hybrid",
    "falcon_h1",
    "nemotron_h",
    "kimi_linear",
    "gemma3",
    "gemma4",
)

FAMILIES: tuple[Family, ...] = tuple(import_module(f"{__name__}.{name}").FAMILY for name in _FILES)
CONVENTIONS: dict[str, MtpConvention] = {
    family.mtp.name: family.mtp for family in FAMILIES if family.mtp is not None
}
# Convention for models whose family has no MTP convention.
DEFAULT_CONVENTION = CONVENTIONS["deepseek_v3"]


def read_model_config(directory: str | Path) -> ModelConfig:
    """Read a model's configuration from `directory/config.json`.

    Raises:
        ModelError: the file is missing or unreadable, a field is missing or has an invalid value,
            or it names an unsupported architecture, activation, quantization or adapter.
    """
    path = Path(directory) / "config.json"
    if (Path(directory) / "adapter_config.json").exists():
        raise ModelError(
            f"{directory}: a LoRA adapter is not a model; load its base model, and the adapter as "
            "one of lora_modules"
        )
    raw = read_config(directory)
    names = raw.get("architectures") or ["none"]
    if not isinstance(names, list) or not isinstance(names[0], str):
        raise ModelError(f"{path}: architectures must be a list of names, got {names!r:.60}")
    architecture = names[0]
    with _naming(path):
        if "gguf" in raw:
            return _read_gguf(raw)
        return _family_of(architecture).read[architecture](raw)


def read_assistant_config(directory: str | Path) -> ModelConfig | None:
    """Read the configuration of an assistant model; return None for another kind of model.

    Raises:
        ModelError: the file is missing or unreadable, or a field is missing, invalid or
            unsupported.
    """
    raw = read_config(directory)
    readers = {name: read for family in FAMILIES for name, read in family.assistants.items()}
    names = raw.get("architectures")
    name = names[0] if isinstance(names, list) and names else None
    read = readers.get(name) if isinstance(name, str) else None
    if read is None:
        return None
    with _naming(Path(directory) / "config.json"):
        return read(raw)


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Name the file in errors about its fields."""
    try:
        yield
    except KeyError as error:
        raise ModelError(f"{path}: {error} is missing") from error
    except ModelError as error:
        raise ModelError(f"{path}: {error}") from None


def _read_gguf(raw: Mapping[str, Any]) -> ModelConfig:
    """Read the metadata of a GGUF file, in which norm weights include the family's offset."""
    forms = {form.architecture: form for family in FAMILIES for form in family.gguf}
    architecture = mapping(raw, "gguf").get("general.architecture")
    form = forms.get(architecture) if isinstance(architecture, str) else None
    if form is None:
        raise ModelError(
            f"general.architecture must be one of {', '.join(forms)}, got {architecture}"
        )
    read = _family_of(form.read_as).read[form.read_as]
    return replace(read(form.config(raw)), norm_offset=0.0)


def convention_of(architecture: str) -> MtpConvention:
    """Return the default naming convention of an architecture's MTP modules."""
    return _family_of(architecture).mtp or DEFAULT_CONVENTION


def _family_of(architecture: str) -> Family:
    for family in FAMILIES:
        if architecture in family.read:
            return family
    known = ", ".join(name for family in FAMILIES for name in family.read)
    raise ModelError(f"architecture {architecture:.60} is not supported; supported: {known}")
