# SPDX-License-Identifier: Apache-2.0
"""Model directory made from a GGUF file: everything that an engine reads except the weights.

It contains the files of a Hugging Face directory, and `model.gguf`, a link to the GGUF file. If
there are several files, the links are `model-00001-of-00002.gguf` and so on.
config.json has the GGUF file's metadata, unchanged, under "gguf"; model families read them there.
"""

import hashlib
import json
import os
import tempfile
from pathlib import Path
from typing import Any

from specops.checkpoints.errors import ModelError
from specops.checkpoints.gguf_file import GgufFile, numbers_of, parts_of, read_gguf
from specops.checkpoints.gguf_tokenizer import end_token_ids, tokenizer_files

SUFFIX = ".gguf"
_VERSION = 5  # version of the directory format; part of the cache key
_EMBEDDING, _HEAD = "token_embd.weight", "output.weight"
# Fields of config.json that files omit: true if a tensor with this suffix exists.
_SHOWN_BY_TENSORS = {
    "attention_bias": ".attn_q.bias",
    "use_qk_norm": ".attn_q_norm.weight",
    "mamba_conv_bias": ".ssm_conv1d.bias",
    "mamba_rms_norm": ".ssm_norm.weight",
}
ROPE_FACTORS = "rope_freqs.weight"  # tensor of divisors of RoPE frequencies, for config.json


def gguf_directory(path: Path) -> Path:
    """Return the directory of a GGUF model in the user's cache, creating it if necessary.

    Args:
        path: path of the file, or of one of several; see `parts_of`. The directory is keyed by the
            files' paths, sizes and modification times.

    Raises:
        ModelError: the file is missing or damaged, its tokenizer is of an unknown kind, or the
            directory cannot be created.
    """
    key, parts = [str(_VERSION)], parts_of(path)
    for one in parts:
        if not one.is_file():
            raise ModelError(f"{one}: no such file")
        state = one.stat()
        key.append(f"{one.resolve()} {state.st_size} {state.st_mtime_ns}")
    digest = hashlib.sha256(" ".join(key).encode()).hexdigest()[:16]
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "specops", "gguf")
    directory = root / f"{parts[0].stem}-{digest}"
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
        for part in parts_of(path):
            (unfinished / f"model{numbers_of(part)}{SUFFIX}").symlink_to(part.resolve())
        try:
            unfinished.rename(directory)
        except OSError:
            if not directory.is_dir():  # else another process has created it
                raise


def _files(file: GgufFile) -> dict[str, dict[str, Any]]:
    """Return the contents of the directory's JSON files, by file name."""
    metadata = file.metadata
    try:
        if _EMBEDDING not in file.tensors:
            raise ModelError(f"tensor {_EMBEDDING} is missing")
        tokenizer = tokenizer_files(metadata)
    except ModelError as error:
        raise ModelError(f"{file.path}: {error}") from None
    config: dict[str, Any] = {
        "gguf": {key: one for key, one in metadata.items() if not key.startswith("tokenizer.")},
        "vocab_size": file.tensors[_EMBEDDING].shape[0],
        "tie_word_embeddings": _HEAD not in file.tensors,
        **{
            field: any(name.endswith(suffix) for name in file.tensors)
            for field, suffix in _SHOWN_BY_TENSORS.items()
        },
    }
    keys, values = (
        {name.split(".")[1] for name in file.tensors if name.endswith(suffix)}
        for suffix in (".attn_k.weight", ".attn_v.weight")
    )
    config["attention_k_eq_v"] = not keys <= values  # a layer without values uses its keys
    if ROPE_FACTORS in file.tensors:
        config["rope_factors"] = file.floats(ROPE_FACTORS)
    if "tokenizer.ggml.bos_token_id" in metadata:
        config["bos_token_id"] = metadata["tokenizer.ggml.bos_token_id"]
    config["eos_token_id"] = end_token_ids(metadata)
    return {"config.json": config, **tokenizer}
