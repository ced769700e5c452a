# SPDX-License-Identifier: Apache-2.0
"""Earlier answers to the same prompt, from which further samples and retries are drafted."""

from collections import OrderedDict, deque
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from specops.api.methods.suffix import SuffixOptions
from specops.engine.drafters.base import prompt_digest

_TOKEN_BYTES = 4

Tokens = NDArray[np.int32]


class EarlierAnswers:
    """Latest answers to each prompt; the least recently answered prompt is evicted first.

    Args:
        options: number of answers per prompt; and the shared tree's budgets, which apply here too.
    """

    def __init__(self, options: SuffixOptions) -> None:
        self._each = options.suffix_decoding_earlier_answers
        self._context = options.suffix_decoding_max_tree_depth
        self._most = {
            "answers": options.suffix_decoding_max_cached_requests,
            "tokens": options.suffix_decoding_max_cached_tokens,
            "bytes": options.suffix_decoding_max_cached_bytes,
        }
        # By digest of the prompt, and scope.
        self._by_prompt: OrderedDict[tuple[bytes, str], deque[Tokens]] = OrderedDict()
        self._num_answers = self._num_tokens = 0

    def text_of(
        self, prompt: Sequence[int], token_ids: list[int], scope: str = ""
    ) -> list[int] | Tokens:
        """Return the initial text of a request's tree.

        It has the end of the prompt followed by an answer, for each earlier answer, and then
        `token_ids`.

        Args:
            prompt: the request's prompt.
            token_ids: the request's text so far, including the prompt.
            scope: the request's scope, as in `SuffixCache.start`.
        """
        answers = None
        if self._by_prompt:
            answers = self._by_prompt.get((prompt_digest(prompt), scope))
        if answers is None:
            return token_ids
        end = np.array(prompt[-self._context :], dtype=np.int32)
        parts = [part for answer in answers for part in (end, answer)]
        return np.concatenate((*parts, np.array(token_ids, dtype=np.int32)))

    def add(self, prompt: Sequence[int], answer: Sequence[int], scope: str = "") -> None:
        """Store an answer, and drop the oldest answers that exceed a limit."""
        if self._each and answer:
            self.add_by_digest(prompt_digest(prompt), np.array(answer, dtype=np.int32), scope)

    def add_by_digest(self, prompt: bytes, answer: Tokens, scope: str) -> None:
        """Store an answer as `add` does, to a prompt of which only the digest is known."""
        if not (self._each and len(answer)):
            return
        key = prompt, scope
        answers = self._by_prompt.setdefault(key, deque())
        self._by_prompt.move_to_end(key)
        answers.append(answer)
        self._num_answers += 1
        self._num_tokens += len(answer)
        if len(answers) > self._each:
            self._drop(answers)
        while self._is_over():
            key = next(iter(self._by_prompt))
            self._drop(self._by_prompt[key])
            if not self._by_prompt[key]:
                del self._by_prompt[key]

    def forget(self) -> None:
        """Drop all answers."""
        self._by_prompt.clear()
        self._num_answers = self._num_tokens = 0

    def _drop(self, answers: deque[Tokens]) -> None:
        """Drop the oldest answer to a prompt."""
        self._num_tokens -= len(answers.popleft())
        self._num_answers -= 1

    def _is_over(self) -> bool:
        """Return whether a budget is exceeded; a budget of -1 is no limit."""
        used = {
            "answers": self._num_answers,
            "tokens": self._num_tokens,
            "bytes": self._num_tokens * _TOKEN_BYTES,
        }
        return any(0 <= most < used[name] for name, most in self._most.items())
