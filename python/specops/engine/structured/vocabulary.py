# SPDX-License-Identifier: Apache-2.0
"""Vocabulary of a model for grammars: the bytes of its text tokens, without special tokens."""

from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specops.api.tokenizer import Tokenizer

_MARK = "\x02"  # character that tokenizers never merge with others
_MARKER = 0xFF  # first byte of special tokens in llguidance; no text contains it


class Vocabulary:
    """Tokens of a model, and llguidance's tokenizer for them.

    For llguidance, the end of a text is an additional token after the model's tokens. So grammars
    do not depend on special tokens, and all tokens that end a request are allowed where its text
    may end.

    Args:
        tokenizer: the model's tokenizer.
        vocab_size: the model's vocabulary size; ids unknown to the tokenizer are not text.

    Attributes:
        size: number of tokens of the model.
        num_words: 32-bit words of a mask over these tokens.
        end: llguidance's id of the end of a text.
        text_mask: int32 [num_words], mask of the tokens that are text.
        matcher_tokenizer: tokenizer from which llguidance builds matchers.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        from llguidance import LLTokenizer

        self.size, self.end = vocab_size, vocab_size
        self.num_words = -(-vocab_size // 32)
        tokens = [_text_of(tokenizer, token) for token in range(vocab_size)]
        self._is_text = list(map(bool, tokens))
        self.text_mask = self.mask(token for token in range(vocab_size) if tokens[token])
        wrapper: Any = _Wrapper(tokenizer, tokens)
        self.matcher_tokenizer = LLTokenizer(wrapper)

    def mask(self, token_ids: Iterable[int]) -> NDArray[np.int32]:
        """Return an int32 [num_words] mask with the bits of these tokens set."""
        bits = np.zeros(self.num_words * 32, dtype=np.uint8)
        bits[list(token_ids)] = 1
        return np.packbits(bits, bitorder="little").view(np.int32)

    def is_text(self, token_id: int) -> bool:
        """Return whether a token is text, not a special token."""
        return 0 <= token_id < self.size and self._is_text[token_id]


def _text_of(tokenizer: Tokenizer, token_id: int) -> bytes:
    """Return the bytes of a token; empty if the token cannot be part of a text."""
    spelt = b"" if tokenizer.is_special(token_id) else tokenizer.token_bytes(token_id)
    return b"" if spelt[:1] == bytes([_MARKER]) else spelt


class _Wrapper:
    """Tokenizer with llguidance's interface, with which llguidance encodes forced texts."""

    is_tokenizer_wrapper = True
    eos_token_id = None  # llguidance adds one after all tokens
    bos_token_id = None
    special_token_ids: tuple[int, ...] = ()

    def __init__(self, tokenizer: Tokenizer, tokens: list[bytes]) -> None:
        self.tokens = tokens
        self._tokenizer = tokenizer
        # Of tokens with equal bytes, use the last one: byte tokens precede character tokens.
        self._ids = {spelt: token_id for token_id, spelt in enumerate(tokens) if spelt}
        self._longest = max(map(len, self._ids), default=0)

    def __call__(self, text: str) -> list[int]:
        for mark in ("", _MARK):  # after a mark, tokenizers insert no space
            ids = self._tokenizer.encode_as_text(mark + text)
            ids = ids[self._num_before(ids, mark.encode()) :]
            if b"".join(self._bytes(token) for token in ids) == text.encode():
                return ids
        return self._longest_tokens(text.encode())

    def _num_before(self, ids: list[int], mark: bytes) -> int:
        """Return how many leading tokens spell the mark, with a possible space before it."""
        spelt, count = b"", 0
        while mark and count < len(ids) and not spelt.endswith(mark):
            spelt += self._bytes(ids[count])
            count += 1
        return count

    def _longest_tokens(self, spelt: bytes) -> list[int]:
        """Encode a text greedily with the longest tokens, for tokenizers that normalize texts."""
        ids, at = [], 0
        while at < len(spelt):
            lengths = range(min(self._longest, len(spelt) - at), 0, -1)
            found = next((n for n in lengths if spelt[at : at + n] in self._ids), 0)
            if not found:
                break  # no token has this byte, so the text cannot be continued
            ids.append(self._ids[spelt[at : at + found]])
            at += found
        return ids

    def _bytes(self, token_id: int) -> bytes:
        return self.tokens[token_id] if token_id < len(self.tokens) else b""
