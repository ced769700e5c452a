# SPDX-License-Identifier: Apache-2.0
"""Parser of answers of different servers: text, tokens, logprobs and finish reason."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from specops.cli.load.drafts import DraftCounts, counts_in


@dataclass(frozen=True)
class Token:
    """An emitted token.

    Attributes:
        text: the token's text as sent by the server; None if not reported, like id and logprob.
        id: index in the vocabulary.
        logprob: logprob of the token.
        alternatives: (text, logprob) of the most likely tokens, sorted by falling logprob.
    """

    text: str | None
    id: int | None = None
    logprob: float | None = None
    alternatives: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True)
class Answer:
    """A server's answer, or the reason why there is none.

    Attributes:
        text: all of the text; in a chat, reasoning and tool calls count as text.
        ending: the finish reason.
        tokens: tokens of the text; empty if not reported.
        drafts: counts of the drafts that were verified; None if not reported.
        error: message of a failed request; None on success.
    """

    text: str = ""
    ending: str | None = None
    tokens: tuple[Token, ...] = ()
    drafts: DraftCounts | None = None
    error: str | None = None


def read_answer(reply: Mapping[str, Any]) -> Answer:
    """Return the answer in a response of /v1/completions or /v1/chat/completions.

    Raises:
        KeyError, IndexError, TypeError, ValueError, AttributeError: the response is not in
            OpenAI's format.
    """
    choice = reply["choices"][0]
    return Answer(
        _text(choice), choice.get("finish_reason"), tuple(_tokens(choice)), counts_in(reply)
    )


def _text(choice: Mapping[str, Any]) -> str:
    if "message" not in choice:
        return str(choice["text"])
    message = choice["message"]
    names = ("reasoning_content", "reasoning", "content", "tool_calls")
    return "".join(str(message[name]) for name in names if message.get(name))


def _tokens(choice: Mapping[str, Any]) -> list[Token]:
    logprobs = choice.get("logprobs") or {}
    if logprobs.get("content"):  # the chat format, which llama.cpp uses for completions as well
        tokens = [_chat_token(entry) for entry in logprobs["content"]]
    else:
        texts = logprobs.get("tokens") or []
        logprob_list = logprobs.get("token_logprobs") or [None] * len(texts)
        tops = logprobs.get("top_logprobs") or [None] * len(texts)
        tokens = [
            Token(str(text), None, _number(logprob), _sorted((top or {}).items()))
            for text, logprob, top in zip(texts, logprob_list, tops, strict=True)
        ]
    ids = choice.get("token_ids") or []
    if not tokens:
        return [Token(None, int(token_id)) for token_id in ids]
    if len(ids) != len(tokens):
        return tokens
    return [replace(token, id=int(token_id)) for token, token_id in zip(tokens, ids, strict=True)]


def _chat_token(entry: Mapping[str, Any]) -> Token:
    tops = [(str(top["token"]), top["logprob"]) for top in entry.get("top_logprobs") or ()]
    return Token(str(entry["token"]), entry.get("id"), _number(entry["logprob"]), _sorted(tops))


def _number(value: Any) -> float | None:
    return None if value is None else float(value)


def _sorted(tops: Any) -> tuple[tuple[str, float], ...]:
    """Sort by falling logprob, then by text: a server's order of equal logprobs is arbitrary."""
    pairs = [(str(text), float(logprob)) for text, logprob in tops if logprob is not None]
    return tuple(sorted(pairs, key=lambda top: (-top[1], top[0])))
