# SPDX-License-Identifier: Apache-2.0
"""Log-probabilities in the two shapes of OpenAI's protocol: of chats, and of completions."""

import codecs
from collections.abc import Sequence
from typing import Any

from specops.engine.outputs import TokenLogprob
from specops.engine.tokenizer import Tokenizer


def token_text(data: bytes) -> str:
    """A token on its own: its text, or its bytes where they are no whole characters."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def _finite(logprob: float) -> float:
    return max(logprob, -9999.0)  # JSON has no -inf


def chat_logprobs(tokenizer: Tokenizer, logprobs: Sequence[TokenLogprob]) -> dict[str, Any]:
    """Log-probabilities in the shape of chat completions."""

    def entry(token_id: int, logprob: float) -> dict[str, Any]:
        data = tokenizer.token_bytes(token_id)
        return {"token": token_text(data), "logprob": _finite(logprob), "bytes": list(data)}

    content = []
    for one in logprobs:
        top = [entry(token_id, logprob) for token_id, logprob in one.alternatives]
        content.append({**entry(one.token_id, one.logprob), "top_logprobs": top})
    return {"content": content, "refusal": None}


class LegacyLogprobs:
    """Log-probabilities in the shape of completions, whose offsets count through the stream."""

    def __init__(self, tokenizer: Tokenizer, offset: int = 0) -> None:
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = offset

    def build(self, logprobs: Sequence[TokenLogprob]) -> dict[str, Any]:
        """The next tokens' log-probabilities."""
        tokens, offsets, top, raw = [], [], [], []
        for one in logprobs:
            data = self._tokenizer.token_bytes(one.token_id)
            tokens.append(token_text(data))
            raw.append(list(data))
            offsets.append(self._offset)
            if not self._tokenizer.is_special(one.token_id):
                self._offset += len(self._utf8.decode(data))
            alternatives: dict[str, float] = {}
            for token_id, logprob in (*one.alternatives, (one.token_id, one.logprob)):
                text = token_text(self._tokenizer.token_bytes(token_id))
                alternatives.setdefault(text, _finite(logprob))
            top.append(alternatives)
        return {
            "tokens": tokens,
            "token_logprobs": [_finite(one.logprob) for one in logprobs],
            "top_logprobs": top,
            "text_offset": offsets,
            "bytes": raw,
        }
