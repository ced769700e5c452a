# SPDX-License-Identifier: Apache-2.0
"""Models by name: those of the Hugging Face Hub, in the cache that its other programs share."""

import re
from pathlib import Path

# What the engine and its tokenizer read, and the card, which names the licence.
_FILES = ("*.json", "*.jinja", "*.safetensors", "README.md")
_NAME = re.compile(r"[\w.-]+/[\w.-]+", re.ASCII)


def is_name(model: str) -> bool:
    """Whether it is ORG/NAME, and nothing here; a GGUF file is one of this machine."""
    is_here = Path(model).exists() or model.endswith(".gguf")
    return _NAME.fullmatch(model) is not None and not is_here


def directory_of(name: str) -> str:
    """The directory of a model of the Hub, which is downloaded unless the cache has it.

    HF_HUB_OFFLINE, HF_HOME, HF_ENDPOINT and the token of `hf auth login` mean what they mean to
    huggingface_hub.

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

    wrong = f"--model must be a directory, or a model of the Hugging Face Hub, got {name}: "
    try:
        return str(snapshot_download(name, allow_patterns=list(_FILES)))
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
