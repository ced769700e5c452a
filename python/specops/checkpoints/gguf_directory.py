# SPDX-License-Identifier: Apache-2.0
"""Model directory made from a GGUF file: everything that an engine reads except the weights.

It contains the files of a Hugging Face directory, and `model.gguf`, a link to the GGUF file.
config.json has the GGUF file's metadata, unchanged, under "gguf"; model families read them there.
"""

import hashlib
import json
import os
import tempfile
from pathlib import Path
from typing import Any

from specops.checkpoints.errors import ModelError
from specops.checkpoints.gguf_file import GgufFile, read_gguf
from specops.checkpoints.gguf_tokenizer import end_token_ids, tokenizer_files

SUFFIX = ".gguf"
_VERSION = 2  # version of the directory format; part of the cache key
_EMBEDDING, _HEAD = "token_embd.weight", "output.weight"
ROPE_FACTORS = "rope_freqs.weight"  # tensor of divisors of RoPE frequencies, for config.json


def gguf_directory(path: Path) -> Path:
    """Return the directory of a GGUF file in the user's cache, creating it if necessary.

    Args:
        path: path of the file. The directory is keyed by its path, size and modification time.

    Raises:
        ModelError: the file is missing or damaged, its tokenizer is of an unknown kind, or the
            directory cannot be created.
    """
    if not path.is_file():
        raise ModelError(f"{path}: no such file")
    path = path.resolve()
    state = path.stat()
    key = f"{_VERSION} {path} {state.st_size} {state.st_mtime_ns}"
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "specops", "gguf")
    directory = root / f"{path.stem}-{hashlib.sha256(key.encode()).hexdigest()[:16]}"
    if not directory.is_dir():
        try:
            _make(path, directory)
        except OSError as error:
            raise ModelError(f"{path}: cannot create {directory}: {error}") from error
    return directory


def _make(path: Path, directory: Path) -> None:
    """Create the directory under a temporary name and rename it: other processes may do so, too."""
    files = _files(read_gguf(path))
    directory.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory.parent, prefix=".") as parent:
        unfinished = Path(parent, directory.name)
        unfinished.mkdir()
        for name, value in files.items():
            (unfinished / name).write_text(json.dumps(value, ensure_ascii=False), encoding="utf-8")
        (unfinished / f"model{SUFFIX}").symlink_to(path)
        try:
            unfinished.rename(directory)
        except OSError:
            if not directory.is_dir():  # else another process has created it
                raise


def _files(file: GgufFile) -> dict[str, dict[str, Any]]:
    """Return the contents of the directory's JSON files, by file name."""
    metadata = file.metadata
    try:
        if metadata.get("split.count", 1) not in (0, 1):
            raise ModelError(
                f"split.count must be 1, got {metadata['split.count']}; merge its parts into "
                "one file"
            )
        if _EMBEDDING not in file.tensors:
            raise ModelError(f"tensor {_EMBEDDING} is missing")
        tokenizer = tokenizer_files(metadata)
    except ModelError as error:
        raise ModelError(f"{file.path}: {error}") from None
    config: dict[str, Any] = {
        "gguf": {key: one for key, one in metadata.items() if not key.startswith("tokenizer.")},
        "vocab_size": file.tensors[_EMBEDDING].shape[0],
        "tie_word_embeddings": _HEAD not in file.tensors,
    }
    if ROPE_FACTORS in file.tensors:
        config["rope_factors"] = file.floats(ROPE_FACTORS)
    if "tokenizer.ggml.bos_token_id" in metadata:
        config["bos_token_id"] = metadata["tokenizer.ggml.bos_token_id"]
    config["eos_token_id"] = end_token_ids(metadata)
    return {"config.json": config, **tokenizer}
