# SPDX-License-Identifier: Apache-2.0
"""Fast reader of tokenizer.json.

The tokenizers library parses a large vocabulary into a tree of JSON values, which it then converts.
Python's parser and the library's constructor of BPE models take half the time.
"""

import contextlib
import json
from collections.abc import Iterable
from typing import Any

import tokenizers
from tokenizers.models import BPE

from specops._garbage import garbage_collection_paused

# Fields of a BPE model in tokenizer.json that are arguments of the constructor.
_OPTIONS = frozenset(
    (
        "dropout",
        "unk_token",
        "continuing_subword_prefix",
        "end_of_word_suffix",
        "fuse_unk",
        "byte_fallback",
        "ignore_merges",
    )
)
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


def vocab_size_of(vocabulary: Iterable[int]) -> int:
    """Return one more than the largest token id; 0 without tokens."""
    return 1 + max(vocabulary, default=-1)


def tokenizer_of_json(text: str) -> tuple[tokenizers.Tokenizer, int]:
    """Return the tokenizer of a tokenizer.json, and one more than its largest token id.

    Args:
        text: contents of the file.

    Raises:
        Exception: the text is not a tokenizer; from the library, which raises bare Exception.
    """
    # The library reads files of other kinds, and reports errors.
    with contextlib.suppress(Exception), garbage_collection_paused():
        return _with_bpe(json.loads(text))
    tokenizer = tokenizers.Tokenizer.from_str(text)
    return tokenizer, vocab_size_of(tokenizer.get_vocab(with_added_tokens=True).values())


def _with_bpe(parts: dict[str, Any]) -> tuple[tokenizers.Tokenizer, int]:
    """Return a tokenizer with a BPE model whose fields are all known; see `tokenizer_of_json`.

    Raises:
        Exception: the file is not such a tokenizer.
    """
    model, added = parts.pop("model"), parts.pop("added_tokens", [])
    kind, vocabulary, merges = model.pop("type"), model.pop("vocab"), model.pop("merges")
    if kind != "BPE" or not model.keys() <= _OPTIONS:
        raise ValueError("not a known BPE model")
    if merges and isinstance(merges[0], str):
        pairs = [tuple(one.split(" ")) for one in merges]
    else:
        pairs = list(map(tuple, merges))
    tokens = [
        tokenizers.AddedToken(one["content"], **{flag: one[flag] for flag in _FLAGS})
        for one in added
    ]
    empty = {"type": "BPE", "vocab": {}, "merges": []}
    tokenizer = tokenizers.Tokenizer.from_str(
        json.dumps({**parts, "added_tokens": [], "model": empty})
    )
    tokenizer.model = BPE(vocabulary, pairs, **model)
    tokenizer.add_tokens(tokens)  # in order: a token without an id in the vocabulary gets the next
    own, others = vocabulary.values(), tokenizer.get_added_tokens_decoder()
    return tokenizer, max(vocab_size_of(own), vocab_size_of(others))
