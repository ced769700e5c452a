# SPDX-License-Identifier: Apache-2.0
"""A model's tokens as a grammar sees them: the bytes of those that are text, and nothing else."""

from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specops.tokenizer import Tokenizer

_MARK = "\x02"  # a character that tokenizers merge with no other
_MARKER = 0xFF  # begins what llguidance takes for a special token; no text has such a byte


class Vocabulary:
    """The tokens of a model, and llguidance's view of them.

    The end of a text is a token of its own there, one past the model's: so a grammar knows no
    special token, and whichever tokens end a request may stand where its text may end.

    Args:
        tokenizer: of the model.
        vocab_size: of the model; ids that the tokenizer does not know are no text.

    Attributes:
        size: tokens of the model.
        num_words: 32-bit words of a mask over them.
        end: llguidance's number for the end of a text.
        text_mask: int32 [num_words], the tokens that are text.
        matcher_tokenizer: what llguidance makes matchers with.
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
        """One bit for each of these tokens."""
        bits = np.zeros(self.num_words * 32, dtype=np.uint8)
        bits[list(token_ids)] = 1
        return np.packbits(bits, bitorder="little").view(np.int32)

    def is_text(self, token_id: int) -> bool:
        """Whether a token stands for bytes of a text."""
        return 0 <= token_id < self.size and self._is_text[token_id]


def _text_of(tokenizer: Tokenizer, token_id: int) -> bytes:
    """The bytes of a token; none where it is no part of any text."""
    spelt = b"" if tokenizer.is_special(token_id) else tokenizer.token_bytes(token_id)
    return b"" if spelt[:1] == bytes([_MARKER]) else spelt


class _Wrapper:
    """A tokenizer as llguidance takes it: it encodes texts of which a grammar leaves no choice."""

    is_tokenizer_wrapper = True
    eos_token_id = None  # llguidance makes one, behind the others
    bos_token_id = None
    special_token_ids: tuple[int, ...] = ()

    def __init__(self, tokenizer: Tokenizer, tokens: list[bytes]) -> None:
        self.tokens = tokens
        self._tokenizer = tokenizer
        # Of several with the same bytes the last: a byte's own token stands before a character's.
        self._ids = {spelt: token_id for token_id, spelt in enumerate(tokens) if spelt}
        self._longest = max(map(len, self._ids), default=0)

    def __call__(self, text: str) -> list[int]:
        for mark in ("", _MARK):  # behind a mark there is no space that a tokenizer puts first
            ids = self._tokenizer.encode_as_text(mark + text)
            ids = ids[self._num_before(ids, mark.encode()) :]
            if b"".join(self._bytes(token) for token in ids) == text.encode():
                return ids
        return self._longest_tokens(text.encode())

    def _num_before(self, ids: list[int], mark: bytes) -> int:
        """How many tokens spell what stands before a text: a mark, and a space before that."""
        spelt, count = b"", 0
        while mark and count < len(ids) and not spelt.endswith(mark):
            spelt += self._bytes(ids[count])
            count += 1
        return count

    def _longest_tokens(self, spelt: bytes) -> list[int]:
        """A text in tokens as long as possible, for tokenizers that change texts."""
        ids, at = [], 0
        while at < len(spelt):
            lengths = range(min(self._longest, len(spelt) - at), 0, -1)
            found = next((n for n in lengths if spelt[at : at + n] in self._ids), 0)
            if not found:
                break  # no token has the byte, so nothing of the grammar goes on here
            ids.append(self._ids[spelt[at : at + found]])
            at += found
        return ids

    def _bytes(self, token_id: int) -> bytes:
        return self.tokens[token_id] if token_id < len(self.tokens) else b""
