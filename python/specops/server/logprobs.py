# SPDX-License-Identifier: Apache-2.0
"""Log-probabilities in OpenAI's two formats, for chats and for completions, and in vLLM's."""

import codecs
from collections.abc import Sequence
from typing import Any

from specops.api.outputs import TokenLogprob
from specops.api.sampling_params import SamplingParams
from specops.api.tokenizer import Tokenizer
from specops.server.api_error import ApiError
from specops.server.streaming import dumped

# Maximum number of prompt log-probabilities in one answer, including alternatives: about 20 MB of
# JSON.
MAX_PROMPT_LOGPROBS = 1 << 18

_ENTRY = '"%d":{"logprob":%r,"rank":%d,"decoded_token":%s}'


def num_prompt_logprobs(prompts: Sequence[Sequence[int]], params: SamplingParams) -> int:
    """Return how many prompt log-probabilities an answer has, including alternatives."""
    if params.prompt_logprobs is None:
        return 0
    count = sum(len(prompt) - params.prompt_logprobs_start for prompt in prompts)
    return params.n * count * (1 + params.prompt_logprobs)


def check_prompt_logprobs(prompts: Sequence[Sequence[int]], params: SamplingParams) -> None:
    """Check that an answer has at most MAX_PROMPT_LOGPROBS log-probabilities of prompts.

    Raises:
        ApiError: it would have more.
    """
    count = num_prompt_logprobs(prompts, params)
    if count > MAX_PROMPT_LOGPROBS:
        raise ApiError(
            400,
            f"prompt_logprobs (or logprobs with echo) must lead to at most {MAX_PROMPT_LOGPROBS} "
            f"log-probabilities of prompts, alternatives included, got {count}; use fewer "
            "alternatives, prompts or choices",
            param="prompt_logprobs",
            code="invalid_value",
        )


def token_text(data: bytes) -> str:
    """Return a token's text, or "bytes:" and its escaped bytes if they are not valid UTF-8."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def finite(logprob: float) -> float:
    """Return a log-probability for JSON, which has no -inf."""
    return max(logprob, -9999.0)


def chat_logprobs(tokenizer: Tokenizer, logprobs: Sequence[TokenLogprob]) -> dict[str, Any]:
    """Return log-probabilities in the format of chat completions."""

    def entry(token_id: int, logprob: float) -> dict[str, Any]:
        data = tokenizer.token_bytes(token_id)
        return {"token": token_text(data), "logprob": finite(logprob), "bytes": list(data)}

    content = []
    for token in logprobs:
        top = [entry(token_id, logprob) for token_id, logprob in token.alternatives]
        content.append({**entry(token.token_id, token.logprob), "top_logprobs": top})
    return {"content": content, "refusal": None}


class LegacyLogprobs:
    """Builder of log-probabilities in the format of completions; text offsets span the stream."""

    def __init__(self, tokenizer: Tokenizer, offset: int = 0) -> None:
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = offset

    def build(self, logprobs: Sequence[TokenLogprob]) -> dict[str, Any]:
        """Return the log-probabilities of the next tokens."""
        return self._build([token.token_id for token in logprobs], logprobs, None)

    def build_prompt(
        self,
        token_ids: Sequence[int],
        logprobs: Sequence[TokenLogprob | None],
        num_alternatives: int,
        text: str,
    ) -> dict[str, Any]:
        """Return a prompt's log-probabilities, with null for the first token.

        Args:
            token_ids: token ids of the prompt.
            logprobs: log-probabilities, one entry per token.
            num_alternatives: maximum number of alternatives per token.
            text: the prompt if it was sent as text, including special tokens that the client wrote
                out. Empty for a prompt of token ids, whose echo has no special tokens.
        """
        reply = self._build(token_ids, logprobs, num_alternatives, text)
        self._offset = len(text) or self._offset
        return reply

    def _build(
        self,
        token_ids: Sequence[int],
        logprobs: Sequence[TokenLogprob | None],
        num_alternatives: int | None,
        text: str = "",
    ) -> dict[str, Any]:
        tokens = []
        offsets = []
        raw = []
        values: list[float | None] = []
        top: list[dict[str, float] | None] = []
        is_added = bool(text) and self._is_added(token_ids, text)
        for token_id, token in zip(token_ids, logprobs, strict=True):
            data = self._tokenizer.token_bytes(token_id)
            tokens.append(token_text(data))
            raw.append(list(data))
            offsets.append(self._offset)
            if not self._tokenizer.is_special(token_id):
                self._offset += len(self._utf8.decode(data))
            elif is_added and len(offsets) == 1:
                pass  # the tokenizer added it, so the text does not contain it
            elif text and text.startswith(name := token_text(data), self._offset):
                self._offset += len(name)
            values.append(None if token is None else finite(token.logprob))
            top.append(None if token is None else self._alternatives(token, num_alternatives))
        return {
            "tokens": tokens,
            "token_logprobs": values,
            "top_logprobs": top,
            "text_offset": offsets,
            "bytes": raw,
        }

    def _is_added(self, token_ids: Sequence[int], text: str) -> bool:
        """Return whether the first token is special and was added to the text by the tokenizer."""
        first = token_ids[0]
        if not self._tokenizer.is_special(first):
            return False
        name = token_text(self._tokenizer.token_bytes(first))
        return list(token_ids).count(first) > text.count(name)

    def _alternatives(self, token: TokenLogprob, num_alternatives: int | None) -> dict[str, float]:
        """Return the log-probabilities of the likeliest tokens and the token itself, by text."""
        alternatives: dict[str, float] = {}
        for token_id, logprob in (
            *token.alternatives[:num_alternatives],
            (token.token_id, token.logprob),
        ):
            text = token_text(self._tokenizer.token_bytes(token_id))
            alternatives.setdefault(text, finite(logprob))
        return alternatives


def joined(first: dict[str, Any] | None, second: dict[str, Any]) -> dict[str, Any]:
    """Concatenate the log-probabilities of two texts in the format of completions."""
    return second if first is None else {name: first[name] + second[name] for name in second}


class _TokenTexts(dict[int, str]):
    """Cache of tokens' texts in JSON, by token id."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__()
        self._tokenizer = tokenizer

    def __missing__(self, token_id: int) -> str:
        text = token_text(self._tokenizer.token_bytes(token_id))
        self[token_id] = encoded = dumped(text).decode()
        return encoded


def vllm_prompt_logprobs(
    tokenizer: Tokenizer, logprobs: Sequence[TokenLogprob | None], num_alternatives: int
) -> bytes:
    """Return a prompt's log-probabilities in vLLM's format: by token id, the prompt's token first.

    The result is JSON, since there may be a hundred thousand entries: writing one is less work than
    making a dict of it, and an encoder would hold the interpreter's lock until the last one.
    """
    texts = _TokenTexts(tokenizer)

    def row(token: TokenLogprob) -> str:
        entries = [(token.token_id, finite(token.logprob), token.rank, texts[token.token_id])]
        for rank, (token_id, logprob) in enumerate(token.alternatives[:num_alternatives], 1):
            if token_id != token.token_id:
                entries.append((token_id, finite(logprob), rank, texts[token_id]))
        return f"{{{','.join([_ENTRY % entry for entry in entries])}}}"

    rows = ["null" if logprob is None else row(logprob) for logprob in logprobs]
    return f"[{','.join(rows)}]".encode()
