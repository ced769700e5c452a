# SPDX-License-Identifier: Apache-2.0
"""The tokenizer: byte-level BPE over source code, 4096 entries, one special token."""

from __future__ import annotations

from collections.abc import Iterable

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

VOCAB_SIZE = 4096
EOS = "<|endoftext|>"
EOS_ID = 0

# Line breaks with the indentation that follows are one piece, since that is how Python spells
# blocks; a word includes one leading space or mark (" self", ".join", "_name"); digits come in
# groups of at most two, so that numbers have few spellings.
PATTERN = (
    r"(?:\r?\n)+[ \t]*"
    r"|[^\r\n\p{L}\p{N}]?\p{L}+"
    r"|\p{N}{1,2}"
    r"| ?[^\s\p{L}\p{N}]+"
    r"|[^\S\r\n]+(?=\S)"
    r"|\s+"
)


def train_tokenizer(texts: Iterable[str]) -> Tokenizer:
    """Train the tokenizer. The result depends only on the texts and their order."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PATTERN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[AddedToken(EOS, special=True, normalized=False)],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        max_token_length=24,
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    if tokenizer.get_vocab_size() != VOCAB_SIZE or tokenizer.token_to_id(EOS) != EOS_ID:
        raise ValueError(
            f"the corpus is too small for a vocabulary of {VOCAB_SIZE}: "
            f"got {tokenizer.get_vocab_size()}"
        )
    return tokenizer
