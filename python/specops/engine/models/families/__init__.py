# SPDX-License-Identifier: Apache-2.0
"""The families of models that are known: a file and a line each."""

from importlib import import_module
from pathlib import Path

from specops.engine.errors import ModelError
from specops.engine.models.config import ModelConfig
from specops.engine.models.families.family import Family, MtpConvention
from specops.engine.models.families.fields import read_config

# The file of each.
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
    "qwen3_next",
    "gemma3",
)

FAMILIES: tuple[Family, ...] = tuple(import_module(f"{__name__}.{name}").FAMILY for name in _FILES)
CONVENTIONS: dict[str, MtpConvention] = {
    family.mtp.name: family.mtp for family in FAMILIES if family.mtp is not None
}
# Of models whose family has no convention of its own.
DEFAULT_CONVENTION = CONVENTIONS["deepseek_v3"]


def read_model_config(directory: str | Path) -> ModelConfig:
    """Reads `directory/config.json`.

    Raises:
        ModelError: the file is missing or unreadable, a field is missing or holds what it cannot
            hold, or the architecture, activation, quantization or adapter it names is not
            supported.
    """
    path = Path(directory) / "config.json"
    if (Path(directory) / "adapter_config.json").exists():
        raise ModelError(f"{directory}: LoRA adapters are not supported; merge it into its base")
    raw = read_config(directory)
    architecture = (raw.get("architectures") or ["none"])[0]
    try:
        family = _family_of(architecture)
        if raw.get("quantization_config"):
            raise ModelError("quantized checkpoints (quantization_config) are not supported")
        return family.read[architecture](raw)
    except KeyError as error:
        raise ModelError(f"{path}: {error} is missing") from error
    except ModelError as error:
        raise ModelError(f"{path}: {error}") from None


def convention_of(architecture: str) -> MtpConvention:
    """Returns how MTP modules of an architecture that runs are named, where no file tells."""
    return _family_of(architecture).mtp or DEFAULT_CONVENTION


def _family_of(architecture: str) -> Family:
    for family in FAMILIES:
        if architecture in family.read:
            return family
        if architecture in family.lacks:
            lacks = family.lacks[architecture]
            raise ModelError(f"architecture {architecture} is not supported yet: {lacks}")
    known = ", ".join(name for family in FAMILIES for name in family.read)
    raise ModelError(f"architecture {architecture} is not supported; supported: {known}")
