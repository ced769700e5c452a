# SPDX-License-Identifier: Apache-2.0
"""Correspondence of a draft model's tokens with the target's, token by token.

A token of one vocabulary corresponds to the token of the other with the same bytes. The drafter is
restricted to the tokens that both have, as in TLI (arXiv 2502.05202). No emitted token depends on
the map: a wrong correspondence only makes drafts wrong.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from specops.api.tokenizer import Tokenizer


class TokenMap(NamedTuple):
    """Map between a draft model and its target.

    Attributes:
        inputs: int32 [target vocabulary]: token of the draft model for each token of the target;
            None: the same ids.
        outputs: int32 [drafts], ascending: token of the target for each logit; None: all of its
            tokens, with the same ids.
        rows: int32 [drafts]: row of the draft model's LM head for each logit; None: all rows.
    """

    inputs: Tensor | None = None
    outputs: Tensor | None = None
    rows: Tensor | None = None


def of_sizes(target_size: int, draft_size: int) -> TokenMap:
    """Return the map of models with one tokenizer whose embeddings may have more rows than it."""
    if draft_size >= target_size:
        is_same = draft_size == target_size
        return TokenMap() if is_same else TokenMap(rows=_range(target_size))
    inputs = _range(target_size).clamp_(max=draft_size - 1)
    return TokenMap(inputs, _range(draft_size))


def of_tokenizers(
    target: Tokenizer, target_size: int, draft: Tokenizer, draft_size: int
) -> TokenMap:
    """Return the map of models with different tokenizers.

    A token of the target that the draft model does not have is read as the last of the tokens into
    which the draft model's tokenizer divides its text.

    Args:
        target, draft: the tokenizers.
        target_size, draft_size: rows of the embeddings.
    """
    theirs = _by_bytes(draft, draft_size)
    pairs = {
        token: theirs[key] for key, token in _by_bytes(target, target_size).items() if key in theirs
    }
    ends = [token for token in sorted(draft.eos_token_ids) if token < draft_size and pairs]
    for token in target.eos_token_ids:
        if ends and token < target_size:
            pairs.setdefault(token, ends[0])
    inputs = torch.zeros(target_size, dtype=torch.int32)
    for token in range(target_size):
        if token not in pairs and token < target.vocab_size:
            text = target.token_bytes(token).decode("utf-8", "ignore")
            inputs[token] = next(
                (one for one in reversed(draft.encode_as_text(text)) if one < draft_size), 0
            )
    outputs = torch.tensor(sorted(pairs), dtype=torch.int32)
    rows = torch.tensor([pairs[token] for token in sorted(pairs)], dtype=torch.int32)
    inputs[outputs.long()] = rows
    return TokenMap(inputs, outputs, rows)


def _by_bytes(tokenizer: Tokenizer, size: int) -> dict[tuple[bytes, bool], int]:
    """Return the token of each byte string; special tokens are kept apart.

    Of several tokens with the same bytes, the last one counts: the first ones of SentencePiece
    stand for single bytes, and texts do not have them.
    """
    return {
        (spelt, tokenizer.is_special(token)): token
        for token in range(min(size, tokenizer.vocab_size))
        if (spelt := tokenizer.token_bytes(token))
    }


def _range(count: int) -> Tensor:
    return torch.arange(count, dtype=torch.int32)
