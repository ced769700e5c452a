# SPDX-License-Identifier: Apache-2.0
"""Models by name: those of the Hugging Face Hub, in the cache that its other programs share."""

import json
import re
from pathlib import Path

# Files that are read beside weights, and the card, which names the licence.
# Copies of a model in a format of its authors' are left out: they are as large as the model.
_FILES = ("*.json", "*.jinja", "README.md", "mask_embedding.pt")
_COPIES = ("original/*", "metal/*", "consolidated*")
_INDEX, _WEIGHTS = "model.safetensors.index.json", "model.safetensors"
# Weights of draft heads, where there is no file of safetensors.
_HEADS = (
    *("medusa_lm_head.safetensors", "hydra_lm_head.safetensors"),
    *("pytorch_model.bin", "medusa_lm_head.pt", "hydra_lm_head.pt"),
)
_NAME = re.compile(r"[\w.-]+/[\w.-]+", re.ASCII)


def is_name(model: str) -> bool:
    """Whether it is ORG/NAME, and nothing here; a GGUF file is one of this machine."""
    is_here = Path(model).exists() or model.endswith(".gguf")
    return _NAME.fullmatch(model) is not None and not is_here


def directory_of(name: str, field: str = "--model") -> str:
    """Return the directory of a model of the Hub, which is downloaded unless the cache has it.

    Only files that are read are downloaded: configuration, tokenizer, and the weights that the
    index names. HF_HUB_OFFLINE, HF_HOME, HF_ENDPOINT and the token of `hf auth login` mean what
    they mean to huggingface_hub.

    Args:
        name: ORG/NAME.
        field: what names the model: --model, or a drafter's field. Weights of drafters may be
            in other files than those of safetensors.

    Raises:
        ValueError: it is neither in the cache nor can it be had.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    def fetch(*patterns: str) -> Path:
        found = snapshot_download(
            name, allow_patterns=list(patterns), ignore_patterns=list(_COPIES)
        )
        return Path(found)

    wrong = f"{field} must be a directory, or a model of the Hugging Face Hub, got {name}: "
    try:
        directory = fetch(*_FILES)
        fetch(*(_indexed(directory / _INDEX) or (_WEIGHTS,)))
        has_weights = any((directory / file).exists() for file in (_INDEX, _WEIGHTS))
        if field != "--model" and not has_weights:
            fetch(*_HEADS)
        return str(directory)
    except GatedRepoError:
        reason = "its licence must be accepted on its page, and `hf auth login` must know you"
    except RepositoryNotFoundError:
        reason = "no such directory here, and no such model there"
    except LocalEntryNotFoundError as error:
        why = str(error.__cause__ or "").partition("\n")[0]
        reason = "no such directory here; it is not in the cache, and the Hub is not reached"
        reason += f" ({why})" if why else ""
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        reason = " ".join(str(error).split())
    raise ValueError(wrong + reason)


def _indexed(index: Path) -> list[str]:
    """Return the names of the files that an index of weights lists; none without an index.

    A damaged index is left to the loader, which names it.
    """
    try:
        files = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return []
    return sorted({one for one in files if isinstance(one, str)})


def resolved(speculative_config: str) -> str:
    """Return a speculative configuration in JSON, with names of the Hub as directories.

    Args:
        speculative_config: JSON; text that is no JSON object is returned as it is, and refused
            by the configuration.

    Raises:
        ValueError: a model can be had neither from the cache nor from the Hub.
    """
    try:
        config = json.loads(speculative_config)
    except (ValueError, RecursionError):
        return speculative_config
    options = config.get("options") if isinstance(config, dict) else None
    places = [config, *(options.values() if isinstance(options, dict) else ())]
    is_changed = False
    for place in places:
        model = place.get("model") if isinstance(place, dict) else None
        if isinstance(model, str) and is_name(model):
            place["model"] = directory_of(model, "model of --speculative-config")
            is_changed = True
    return json.dumps(config) if is_changed else speculative_config
