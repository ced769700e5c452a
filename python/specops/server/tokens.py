# SPDX-License-Identifier: Apache-2.0
"""Conversion between text and token ids: /tokenize and /detokenize, with vLLM's field names."""

from typing import Any

from specops.api.tokenizer import Tokenizer
from specops.server.protocol import AnyMessage, Body, ChatPrompt


class TokenizeRequest(ChatPrompt):
    """Body of POST /tokenize: a prompt, or the messages of a chat."""

    model: str | None = None
    prompt: str | None = None
    messages: list[AnyMessage] | None = None
    add_special_tokens: bool = True  # only for a prompt; a chat template writes special tokens
    return_token_strs: bool = False


class DetokenizeRequest(Body):
    """Body of POST /detokenize."""

    model: str | None = None
    tokens: list[int]


def tokenized(
    tokenizer: Tokenizer, text: str, *, add_special_tokens: bool, max_model_len: int, strings: bool
) -> dict[str, Any]:
    """Return the answer of /tokenize.

    Raises:
        ValueError: the text cannot be encoded.
    """
    tokens = tokenizer.encode(text, add_special_tokens=add_special_tokens)
    answer: dict[str, Any] = {"count": len(tokens), "max_model_len": max_model_len}
    answer["tokens"] = tokens
    if strings:
        answer["token_strs"] = [tokenizer.decode([t], skip_special_tokens=False) for t in tokens]
    return answer


def detokenized(tokenizer: Tokenizer, tokens: list[int], vocab_size: int) -> dict[str, Any]:
    """Return the answer of /detokenize.

    Raises:
        ValueError: a token is not in the vocabulary.
    """
    for token in tokens:
        if not 0 <= token < vocab_size:
            raise ValueError(f"tokens must be in [0, {vocab_size}), got {token}")
    return {"prompt": tokenizer.decode(tokens, skip_special_tokens=False)}
