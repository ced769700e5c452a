# SPDX-License-Identifier: Apache-2.0
"""Sessions: conversations that are saved to files and resumed, also by another process.

    sessions = Sessions(engine)
    sessions.restore(path, params)  # before a turn, if the file exists
    (completion,) = engine.generate([prompt], params)
    sessions.save(path, completion, params)

Resuming puts the pages of a conversation back into the prefix cache, with the states of linear
attention and the keys and values of a drafter. The next request with this text finds them there, as
it would in an engine that had not ended. Drafters that learn from answers learn from those of the
conversation. So tokens, logprobs and drafts are those of an uninterrupted engine.
"""

from array import array
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from specops.api.outputs import Completion
from specops.api.sampling_params import SamplingParams
from specops.api.speculative_config import SpeculativeConfig
from specops.disaggregated import session_file
from specops.disaggregated.page_transfer import PageTransfer
from specops.disaggregated.pages import Header, KvTransferError, Pages
from specops.disaggregated.session_file import Answer, Session, SessionError, UnsavedSession
from specops.engine.engine import Engine

_MAX_KNOWN = 1024  # sessions whose text and answers are remembered

_TOKEN_BYTES = 4

Speculative = Mapping[str, object] | SpeculativeConfig | None


@dataclass(frozen=True)
class _Known:
    """Session that this engine has saved or resumed.

    Attributes:
        token_ids: text of its pages.
        num_pages: number of its pages.
        answers: answers that drafters have learned from.
    """

    token_ids: "array[int]"
    num_pages: int
    answers: list[Answer]


class Sessions:
    """Sessions of one engine. Only the thread that owns the engine may call its methods.

    Args:
        engine: an engine with prefix caching and one rank.

    Attributes:
        contract: execution contract of the engine.

    Raises:
        ValueError: prefix caching is disabled, or the engine has several ranks.
    """

    def __init__(self, engine: Engine) -> None:
        if not engine.config.enable_prefix_caching:
            raise ValueError("enable_prefix_caching must be on for sessions, got off")
        if engine.ranks.size > 1:
            raise ValueError(
                f"tensor_parallel_size must be 1 for sessions, got {engine.ranks.size}"
            )
        self._engine = engine
        self._pages = PageTransfer(engine)
        self.contract = self._pages.contract
        self._known: OrderedDict[Path, _Known] = OrderedDict()  # least recently used first

    # ---- resume ----

    def restore(
        self, path: str | Path, params: SamplingParams, speculative_config: Speculative = None
    ) -> int:
        """Resume a session: read its file, and put its pages into the prefix cache.

        Args:
            path: the file.
            params: sampling parameters of the next request; of these, `cache_salt` matters, and
                fields that select a drafting method.
            speculative_config: configuration of the next request.

        Returns:
            The number of leading tokens of the conversation that are in the prefix cache now.

        Raises:
            FileNotFoundError: the file does not exist.
            OSError: the file cannot be read.
            SessionError: the file is damaged, or this engine cannot use it. The next request then
                computes its whole prompt.
        """
        path = Path(path)
        return self.take_in(
            path, session_file.read(path, self.contract), params, speculative_config
        )

    def is_cached(
        self, path: Path, params: SamplingParams, speculative_config: Speculative = None
    ) -> bool:
        """Return whether this engine has saved or resumed a session and still has its pages.

        Raises:
            ValueError: no request could have these arguments.
        """
        known = self._known.get(path)
        if known is None:
            return False
        draft_kv = self._engine.draft_kv_of(
            known.token_ids, _for_headers(params), speculative_config
        )
        found = self._engine.pages.num_cached(known.token_ids, draft_kv, params.cache_salt)
        return found >= known.num_pages

    def take_in(
        self,
        path: Path,
        session: Session,
        params: SamplingParams,
        speculative_config: Speculative = None,
    ) -> int:
        """Resume a session whose file has been read; as `restore` otherwise."""
        parts = session.contents.parts
        if not parts:
            raise SessionError("it must have pages or a text, got none")
        answers, size = session.contents.answers, self._engine.vocab_size
        num_pages = 0
        try:
            token_ids = [np.frombuffer(one.token_ids, "<i4").astype(np.int32) for one in answers]
            if not all(((one >= 0) & (one < size)).all() for one in token_ids):
                raise SessionError(f"its answers must hold token ids in [0, {size - 1}]")
            for part, data in zip(parts, session.data, strict=True):
                expected = self._pages.expected(
                    part.header.token_ids, _for_headers(params), speculative_config
                )
                num_pages = self._pages.give(Pages(part.header, data), expected, params.cache_salt)
        except KvTransferError as error:
            raise SessionError(str(error).removeprefix("KV transfer: ")) from None
        except ValueError as error:
            raise SessionError(str(error)) from None
        known = self._known.get(path)
        for answer, tokens in zip(answers, token_ids, strict=True):
            if known is None or answer not in known.answers:
                for drafter in self._engine.drafters.values():
                    drafter.learn(answer.prompt, tokens, params.cache_salt)
        header = parts[-1].header
        self._remember(path, header, answers)
        return num_pages * header.page_size

    # ---- save ----

    def save(
        self,
        path: str | Path,
        completion: Completion,
        params: SamplingParams,
        speculative_config: Speculative = None,
    ) -> None:
        """Save a conversation with its latest answer to a file, which is replaced atomically.

        Args:
            path: the file.
            completion: the answer, from this engine.
            params: sampling parameters of the request.
            speculative_config: configuration of the request.

        Raises:
            OSError: the file cannot be written. An older file is left unchanged.
            ValueError: no request could have these arguments.
        """
        path = Path(path)
        copy = self.copy(
            path, completion.prompt_token_ids, completion.token_ids, params, speculative_config
        )
        for _ in copy:
            pass
        session_file.write(path, copy.session.encoded())

    def copy(
        self,
        path: Path,
        prompt: Sequence[int],
        answer: Sequence[int],
        params: SamplingParams,
        speculative_config: Speculative = None,
        *,
        most: int = 1 << 30,
    ) -> "SessionCopy":
        """Begin to copy a conversation, whose pages the caller then copies in pieces.

        Args:
            path: file of the session.
            prompt, answer: token ids of the conversation.
            params, speculative_config: as in `save`.
            most: bytes after which a piece ends, as in `PromptPages.copy`.

        Raises:
            ValueError: no request could have these arguments.
        """
        plain = _for_headers(params)

        def copied(text: Sequence[int]) -> tuple[Header, Iterator[list[bytes]]]:
            return self._pages.copy(text, plain, speculative_config, most=most)

        # A text that fills the context cannot be a prompt, so its last token is left out.
        header, pieces = copied([*prompt, *answer][: self._engine.max_model_len - 1])
        parts = [(header, pieces)]
        if header.states:
            # States are only at the ends of the prompt and of the text. Some chat templates leave
            # reasoning out of the next prompt, which then shares only this prompt, not the answer.
            shorter, pieces = copied(prompt)
            if 0 < shorter.num_pages < header.num_pages:
                parts.insert(0, (shorter, pieces))
        known = self._known.get(path)
        answers = [*(() if known is None else known.answers), Answer.of(prompt, answer)]
        excess = sum(one.num_bytes for one in answers) - _TOKEN_BYTES * self._engine.max_model_len
        while excess > 0 and len(answers) > 1:
            excess -= answers.pop(0).num_bytes
        self._remember(path, header, answers)
        return SessionCopy(self.contract, parts, answers)

    def _remember(self, path: Path, header: Header, answers: list[Answer]) -> None:
        token_ids = array("i", header.token_ids)
        self._known[path] = _Known(token_ids, header.num_pages, answers)
        self._known.move_to_end(path)
        if len(self._known) > _MAX_KNOWN:
            self._known.popitem(last=False)


class SessionCopy:
    """Copy of a conversation that is made in pieces, as an iterator of their sizes in bytes.

    The iterator raises PagesEvicted if pages were evicted that had not been copied.

    Args:
        contract: execution contract of the engine.
        parts: the header of each part, and the pieces of its pages.
        answers: the latest answers of the conversation.

    Attributes:
        session: what has been copied so far; complete when the iterator has ended.
    """

    def __init__(
        self,
        contract: dict[str, object],
        parts: Sequence[tuple[Header, Iterator[list[bytes]]]],
        answers: list[Answer],
    ) -> None:
        self._parts = parts
        self.session = UnsavedSession(contract, [(header, []) for header, _ in parts], answers)
        self._sizes = self._copied()

    def __iter__(self) -> Iterator[int]:
        return self._sizes

    def __next__(self) -> int:
        return next(self._sizes)

    def _copied(self) -> Iterator[int]:
        for (_, copied), (_, pieces) in zip(self.session.parts, self._parts, strict=True):
            for piece in pieces:
                copied += piece
                yield sum(map(len, piece))


def _for_headers(params: SamplingParams) -> SamplingParams:
    """Return parameters with which a text of any length may be a prompt."""
    return replace(params, max_tokens=None)
