# SPDX-License-Identifier: Apache-2.0
"""Models of the Hugging Face Hub by name, in the cache that other Hub programs share."""

import json
import re
from collections.abc import Sequence
from pathlib import Path

from specops.checkpoints.gguf_file import parts_of

# Files besides weights that are read, and the model card, which names the license. Copies of the
# weights in the authors' own formats are not downloaded.
_FILES = ("*.json", "*.jinja", "README.md", "mask_embedding.pt")
_COPIES = ("original/*", "metal/*", "consolidated*")
_INDEX, _WEIGHTS = "model.safetensors.index.json", "model.safetensors"
# Weight files of draft heads in repositories without a safetensors file.
_HEADS = (
    "medusa_lm_head.safetensors",
    "hydra_lm_head.safetensors",
    "pytorch_model.bin",
    "medusa_lm_head.pt",
    "hydra_lm_head.pt",
)
_NAME = re.compile(r"[\w.-]+/[\w.-]+(:[\w.-]+)?", re.ASCII)


def is_name(model: str) -> bool:
    """Return whether `model` has the form ORG/NAME or ORG/NAME:QUANTIZATION, and no file."""
    is_here = Path(model).exists() or model.endswith(".gguf")
    return _NAME.fullmatch(model) is not None and not is_here


def path_of(name: str, revision: str | None = None, field: str = "--model") -> str:
    """Return the local directory of ORG/NAME, or the (first) file of ORG/NAME:QUANTIZATION.

    Args:
        name: name of the model.
        revision: branch, tag or commit; None: the main branch.
        field: option or field that names the model; see `directory_of`.

    Raises:
        ValueError: the model is neither in the cache nor downloadable, or it has no such file.
    """
    repository, colon, quantization = name.partition(":")
    if not colon:
        return directory_of(name, field, revision=revision)
    spellings = {quantization, quantization.lower(), quantization.upper()}
    endings = (".gguf", "-?????-of-?????.gguf")
    patterns = [f"*[-.]{one}{ending}" for one in sorted(spellings) for ending in endings]
    directory = Path(directory_of(repository, field, revision=revision, patterns=patterns))
    found = {parts_of(file)[0] for pattern in patterns for file in directory.rglob(pattern)}
    if len(found) != 1:
        names = ", ".join(sorted(str(file.relative_to(directory)) for file in found))
        raise ValueError(
            f"{field} {name} must name one file *-{quantization}.gguf of {repository}, found "
            f"{names or 'none'}"
        )
    return str(found.pop())


def directory_of(
    name: str,
    field: str = "--model",
    *,
    revision: str | None = None,
    patterns: Sequence[str] = (),
) -> str:
    """Return the local directory of a Hub model, and download the model if it is not cached.

    Only required files are downloaded: configuration, tokenizer, and the weights listed by the
    index. HF_HUB_OFFLINE, HF_HOME, HF_ENDPOINT and the token of `hf auth login` work as in
    huggingface_hub.

    Args:
        name: ORG/NAME.
        field: option or field that names the model: --model, or a drafter's field. Drafter
            weights may be in files other than safetensors.
        revision: branch, tag or commit; None: the main branch.
        patterns: files to download; by default the required ones.

    Raises:
        ValueError: the model is neither in the cache nor downloadable.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    def fetch(*patterns: str) -> Path:
        downloaded = snapshot_download(
            name,
            revision=revision,
            allow_patterns=list(patterns),
            ignore_patterns=list(_COPIES),
        )
        return Path(downloaded)

    wrong = f"{field} must be a directory, or a model of the Hugging Face Hub, got {name}: "
    try:
        if patterns:
            return str(fetch(*patterns))
        directory = fetch(*_FILES)
        fetch(*(_indexed(directory / _INDEX) or (_WEIGHTS,)))
        has_weights = any((directory / file).exists() for file in (_INDEX, _WEIGHTS))
        if field != "--model" and not has_weights:
            fetch(*_HEADS)
        return str(directory)
    except GatedRepoError:
        reason = "its license must be accepted on its page, and `hf auth login` must know you"
    except RepositoryNotFoundError:
        reason = "no such directory here, and no such model there"
    except RevisionNotFoundError:
        reason = f"it has no branch, tag or commit {revision}"
    except LocalEntryNotFoundError as error:
        why = str(error.__cause__ or "").partition("\n")[0]
        reason = "no such directory here; it is not in the cache, and the Hub is not reached"
        reason += f" ({why})" if why else ""
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        reason = " ".join(str(error).split())
    raise ValueError(wrong + reason)


def _indexed(index: Path) -> list[str]:
    """Return the file names that a weight index lists; an empty list without an index.

    A damaged index yields an empty list; the loader reports it.
    """
    try:
        files = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return []
    return sorted({file for file in files if isinstance(file, str)})


def resolved(speculative_config: str) -> str:
    """Return a speculative configuration in JSON, with Hub names replaced by directories.

    Args:
        speculative_config: JSON. Text that is not a JSON object is returned unchanged; the
            configuration's parser refuses it.

    Raises:
        ValueError: a model is neither in the cache nor downloadable.
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
            place["model"] = path_of(model, field="model of --speculative-config")
            is_changed = True
    return json.dumps(config) if is_changed else speculative_config
