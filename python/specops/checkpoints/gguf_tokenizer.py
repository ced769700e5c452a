# SPDX-License-Identifier: Apache-2.0
"""A GGUF file's tokenizer as the tokenizer.json and tokenizer_config.json of Hugging Face.

Two kinds are known, by the names that ggml has for them: "llama", SentencePiece's BPE, whose tokens
have scores; and "gpt2", byte-level BPE with merges. Sources: docs/gguf.md of
github.com/ggml-org/ggml; the tokenizers library for the JSON.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from specops.checkpoints.errors import ModelError

# Types of tokens.
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 1, 2, 3, 4, 6
_SPACE = "\u2581"  # SentencePiece's
_SPECIALS = ("bos", "eos", "unknown", "padding")
_NAMES = {"unknown": "unk", "padding": "pad"}

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
# How texts are split before byte-level BPE, by tokenizer.ggml.pre; None: as GPT-2 does.
_SPLITS: dict[str, str | None] = {
    "default": None,
    "gpt-2": None,
    "qwen2": rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}|{_REST}",
    "llama-bpe": rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}{{1,3}}|{_REST}",
}
_NORMALIZED = ("qwen2",)  # texts are brought into NFC before


def tokenizer_files(metadata: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Returns what tokenizer.json and tokenizer_config.json hold, by their names.

    Args:
        metadata: of a GGUF file.

    Raises:
        ModelError: the tokenizer is missing, or of a kind that is not known.
    """

    kind, tokens = metadata.get("tokenizer.ggml.model"), _list(metadata, "tokens", "texts")
    if not tokens:
        raise ModelError("tokenizer.ggml.tokens is missing: the file has no tokenizer")
    if len(set(tokens)) != len(tokens):
        raise ModelError("tokenizer.ggml.tokens has a token twice")
    types = _list(metadata, "token_type", "numbers") or [_NORMAL] * len(tokens)
    if len(types) != len(tokens):
        raise ModelError(f"tokenizer.ggml.token_type has {len(types)} of {len(tokens)} tokens")
    specials = _special_tokens(metadata, tokens)
    if kind == "llama":
        whole = _sentencepiece(metadata, tokens, types, specials.get("unk_token"))
    elif kind == "gpt2":
        whole = _byte_level(metadata, tokens)
    else:
        raise ModelError(f"tokenizer.ggml.model must be llama or gpt2, got {kind}")
    whole["added_tokens"] = [
        _added_token(i, tokens[i], types[i] != _USER_DEFINED)
        for i in range(len(tokens))
        if types[i] in (_UNKNOWN, _CONTROL, _USER_DEFINED)
    ]
    whole["post_processor"] = _around(metadata, specials, tokens, kind == "gpt2")
    config: dict[str, Any] = dict(specials)
    if metadata.get("tokenizer.chat_template"):
        config["chat_template"] = metadata["tokenizer.chat_template"]
    empty = {"version": "1.0", "truncation": None, "padding": None}
    return {"tokenizer.json": {**empty, **whole}, "tokenizer_config.json": config}


def _list(metadata: Mapping[str, Any], key: str, of: str) -> list[Any] | None:
    """A list of the tokenizer's, of "texts" or "numbers"; None: the file has none."""
    found = metadata.get(f"tokenizer.ggml.{key}")
    kinds = (str,) if of == "texts" else (int, float)
    is_list = isinstance(found, list) and all(isinstance(one, kinds) for one in found)
    if found is not None and not is_list:
        raise ModelError(f"tokenizer.ggml.{key} must be a list of {of}, got {found!r:.60}")
    return found


def _special_tokens(metadata: Mapping[str, Any], tokens: Sequence[str]) -> dict[str, str]:
    """The texts of special tokens, by what they are for."""
    found = {}
    for name in _SPECIALS:
        key = f"tokenizer.ggml.{name}_token_id"
        token = metadata.get(key)
        if token is None:
            continue
        if not isinstance(token, int) or not 0 <= token < len(tokens):
            raise ModelError(f"{key} must be one of {len(tokens)} tokens, got {token}")
        found[f"{_NAMES.get(name, name)}_token"] = tokens[token]
    return found


def _added_token(i: int, text: str, is_special: bool) -> dict[str, Any]:
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return {"id": i, "content": text, "special": is_special, **flags}


def _sentencepiece(
    metadata: Mapping[str, Any],
    tokens: Sequence[str],
    types: Sequence[int],
    unknown: str | None,
) -> dict[str, Any]:
    """BPE whose merges follow from the tokens' scores: of two pieces, the best token they make."""
    scores = _list(metadata, "scores", "numbers")
    if scores is None or len(scores) != len(tokens):
        raise ModelError("tokenizer.ggml.scores must have a score for each token")
    replaced = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
    spelt = {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "}
    decoders: list[dict[str, Any]] = [spelt, {"type": "ByteFallback"}, {"type": "Fuse"}]
    normalizers: list[dict[str, Any]] = [replaced]
    if metadata.get("tokenizer.ggml.add_space_prefix", True):
        normalizers.insert(0, {"type": "Prepend", "prepend": _SPACE})
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    normal = {tokens[i]: scores[i] for i in range(len(tokens)) if types[i] == _NORMAL}
    model = {
        "type": "BPE",
        "vocab": {text: i for i, text in enumerate(tokens)},
        "merges": _merges(normal),
        "unk_token": unknown,
        "fuse_unk": True,
        "byte_fallback": _BYTE in types,
    }
    return {
        "normalizer": {"type": "Sequence", "normalizers": normalizers},
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": model,
    }


def _merges(scores: Mapping[str, float]) -> list[tuple[str, str]]:
    """Every pair of pieces that makes a token, the best token first."""
    merges = []
    for text in sorted(scores, key=lambda text: -scores[text]):
        pairs = ((text[:cut], text[cut:]) for cut in range(1, len(text)))
        merges += [pair for pair in pairs if pair[0] in scores and pair[1] in scores]
    return merges


def _byte_level(metadata: Mapping[str, Any], tokens: Sequence[str]) -> dict[str, Any]:
    pre = metadata.get("tokenizer.ggml.pre", "default")
    if pre not in _SPLITS:
        known = ", ".join(_SPLITS)
        raise ModelError(f"tokenizer.ggml.pre must be one of {known}, got {pre}")
    merges = _list(metadata, "merges", "texts")
    if merges is None:
        raise ModelError("tokenizer.ggml.merges is missing")
    split = _SPLITS[pre]
    bytes_of = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False}
    pre_tokenizer: dict[str, Any] = {**bytes_of, "use_regex": split is None}
    if split is not None:
        first = {"type": "Split", "pattern": {"Regex": split}, "behavior": "Isolated"}
        pre_tokenizer = {
            "type": "Sequence",
            "pretokenizers": [{**first, "invert": False}, pre_tokenizer],
        }
    model = {
        "type": "BPE",
        "vocab": {text: i for i, text in enumerate(tokens)},
        "merges": [tuple(merge.split(" ")) for merge in merges],
        "ignore_merges": pre == "llama-bpe",
    }
    return {
        "normalizer": {"type": "NFC"} if pre in _NORMALIZED else None,
        "pre_tokenizer": pre_tokenizer,
        "decoder": {**bytes_of, "use_regex": True},
        "model": model,
    }


def _around(
    metadata: Mapping[str, Any],
    specials: Mapping[str, str],
    tokens: Sequence[str],
    is_byte_level: bool,
) -> dict[str, Any] | None:
    """What is put around a text."""
    parts: list[dict[str, Any]] = [{"Sequence": {"id": "A", "type_id": 0}}]
    named = {}
    # Files of SentencePiece's that say nothing begin texts with a token.
    for name, default in (("bos", not is_byte_level), ("eos", False)):
        if metadata.get(f"tokenizer.ggml.add_{name}_token", default):
            if f"{name}_token" not in specials:
                raise ModelError(f"tokenizer.ggml.{name}_token_id is missing, but is to be added")
            text = specials[f"{name}_token"]
            token = {"SpecialToken": {"id": text, "type_id": 0}}
            parts.insert(0 if name == "bos" else len(parts), token)
            named[text] = {"id": text, "ids": [tokens.index(text)], "tokens": [text]}
    if not named:
        return None
    pair = [*parts, {"Sequence": {"id": "B", "type_id": 1}}]
    return {
        "type": "TemplateProcessing",
        "single": parts,
        "pair": pair,
        "special_tokens": named,
    }
