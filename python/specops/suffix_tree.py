# SPDX-License-Identifier: Apache-2.0
"""Drafts from earlier text: suffix trees of a request's own text and of many responses.

No model is needed: drafts are continuations of earlier occurrences of a text's last tokens.
Everything runs on the CPU. Nothing is random, and drafts do not depend on the number of threads.
"""

from __future__ import annotations

from collections.abc import Hashable
from os import PathLike
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeAlias

from . import _C  # relative: this file is also the package specops_suffix, which has its own _C

if TYPE_CHECKING:
    from torch import Tensor


class Array(Protocol):
    """One-dimensional contiguous int32 array or tensor on cpu, such as numpy's or torch's."""

    @property
    def nbytes(self) -> int:
        """Size in bytes, as in memoryview."""


TokenIds: TypeAlias = list[int] | tuple[int, ...] | Array


class SuffixDraft(NamedTuple):
    """The drafts that `SuffixCache.speculate` found.

    Attributes:
        token_ids: the drafts; each comes after its parent.
        parents: index of each draft's parent; -1: it follows the last token. A path has -1, 0, 1...
        probs: estimated probability of each draft's whole path, from the counts.
        score: sum of `probs`: the expected number of accepted drafts.
        match_len: number of tokens at the end of the text that were matched elsewhere.
    """

    token_ids: list[int]
    parents: list[int]
    probs: list[float]
    score: float
    match_len: int


class SuffixCache:
    """Suffix trees that draft for requests: one tree per running request, one of all responses.

    A tree counts every string of up to D = max_tree_depth tokens in its texts. To draft:

        for m = min(len(text), D) down to 1, if the last m tokens occur in the tree:
            budget = min(max_draft_tokens, int(m * max_spec_factor + 1e-6))
            follow the most frequent continuation (among equals the youngest) for at most budget
            tokens, while the product of count(continuation) / count(so far) >= min_token_prob
        choose the draft with the highest sum of products; among equals the longest m

    The draft of the request's own tree or of the shared tree is used, whichever has the higher sum;
    among equals that of the request's own tree. A prompt enters only the request's own tree. A
    response enters both trees token by token, and stays in the shared tree when its request stops.
    If a budget is exceeded, the response of the request that started first is evicted, even if it
    is still being written: it then continues in the request's own tree only.

    Each scope has a separate shared tree, so that no request drafts from another scope's
    responses. Responses that were added for all scopes are in one additional tree, from which every
    request drafts as well. The budgets apply to all shared trees together. A scope's tree is freed
    with its last response and request.

    Args:
        max_tree_depth: 1 to 32,767. Longest string that is counted, and so the longest match.
        max_cached_requests: responses in the shared tree; -1: any number. 0 here, or in one of the
            two budgets below: no shared tree.
        max_spec_factor: at least 0. Drafts per matched token.
        min_token_prob: 0 to 1. Minimum estimated probability of a drafted path.
        max_cached_tokens: tokens in the shared tree; -1: any number.
        max_cached_bytes: bytes of the shared tree's responses; -1: any number. This counts their
            tokens and nodes only: `num_bytes`, the memory that the tree has allocated from the
            system, may be larger, because it keeps freed memory for later use.
        read_on: whether a draft that reaches max_tree_depth continues with the text after the
            youngest occurrence, as if that were certain.
        background_tokens: prompts of at least this many tokens are added to the request's tree by a
            background thread, so that `start` returns at once. Until they are added, the request
            drafts from the shared tree only, and its drafts depend on timing. -1: never.

    Raises:
        ValueError: an argument is out of its range.

    Note:
        Thread-safe; calls of more than about 50 us let other Python threads run. Evicted texts
        leave `num_cached_tokens` at once. To keep calls short, their memory is freed gradually, two
        tokens per appended token, and drafts may come from it until then. `evict` frees any other
        response than the oldest at once. A process that forks must do so before the first prompt
        is built in the background.

    Source: Oliaro et al. 2024, "SuffixDecoding: Extreme Speculative Decoding for Emerging AI
        Applications"; names and defaults are FastDeploy's.
    """

    __slots__ = ("_cache", "_extend", "_speculate", "max_cached_requests", "max_tree_depth")
    _speaks_of_decoding_cache = False  # whether errors use the names of SuffixDecodingCache

    def __init__(
        self,
        *,
        max_tree_depth: int = 64,
        max_cached_requests: int = -1,
        max_spec_factor: float = 1.0,
        min_token_prob: float = 0.1,
        max_cached_tokens: int = -1,
        max_cached_bytes: int = -1,
        read_on: bool = True,
        background_tokens: int = 1024,
    ) -> None:
        self._cache = _C.SuffixCache(
            SuffixDraft,
            max_tree_depth,
            max_cached_requests,
            max_spec_factor,
            min_token_prob,
            max_cached_tokens,
            max_cached_bytes,
            read_on,
            background_tokens,
            self._speaks_of_decoding_cache,
        )
        self._extend = self._cache.extend
        self._speculate = self._cache.speculate
        self.max_tree_depth = max_tree_depth
        self.max_cached_requests = max_cached_requests

    def start(self, request_id: Hashable, prompt: TokenIds, *, scope: str = "") -> int:
        """Begin a request with the text `prompt`.

        Args:
            request_id: any hashable value but None; not the id of a running request. The cached
                response of an earlier request with this id is evicted first.
            prompt: [n], int32. Prompt tokens, as a list, an array or a tensor on cpu.
            scope: requests of the same scope draft from each other's responses.

        Returns:
            The request's number, for `step`. Numbers are never reused.

        Raises:
            ValueError: a token is negative, the array is not contiguous int32, or a running request
                has this id. Nothing has changed then.
        """
        return self._cache.start(request_id, prompt, scope)

    def extend(self, request_id: Hashable, token_ids: TokenIds) -> None:
        """Append to a running request's response; visible to every later draft.

        Args:
            request_id: id of a running request.
            token_ids: [n], int32. As in `start`; may be empty.

        Raises:
            ValueError: a token is negative, the array is not contiguous int32, or no running
                request has this id. Nothing has changed then.
        """
        self._extend(request_id, token_ids)

    def speculate(
        self,
        request_id: Hashable,
        max_draft_tokens: int,
        *,
        use_tree: bool = False,
        max_spec_factor: float | None = None,
        min_token_prob: float | None = None,
        context: TokenIds | None = None,
    ) -> SuffixDraft:
        """Draft continuations of a running request's text.

        Args:
            request_id: id of a running request.
            max_draft_tokens: 0 to 65,536. Maximum number of drafts.
            use_tree: return a tree instead of the likeliest path: all continuations with a path
                probability of at least min_token_prob, the likeliest first.
            max_spec_factor: overrides the cache's.
            min_token_prob: overrides the cache's.
            context: [n], int32. Text to draft after, instead of the request's own; only its last
                max_tree_depth tokens are used.

        Returns:
            The draft; if nothing is found, a draft without tokens, with score 0 and match_len 0.

        Raises:
            ValueError: an argument is out of its range, or no running request has this id.
        """
        return self._speculate(
            request_id, max_draft_tokens, use_tree, max_spec_factor, None, min_token_prob, context
        )

    def step(
        self,
        requests: Tensor,
        new_token_ids: Tensor,
        num_new_tokens: Tensor,
        max_draft_tokens: Tensor,
        *,
        draft_token_ids: Tensor,
        num_draft_tokens: Tensor | None = None,
        num_given_drafts: Tensor | None = None,
        parents: Tensor | None = None,
        probs: Tensor | None = None,
        scores: Tensor | None = None,
        match_lens: Tensor | None = None,
        use_tree: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """Extend every request of a batch, then draft for every request INTO the passed tensors.

        Same as `extend` for every row and `speculate` for every row after that. All tensors are on
        cpu; rows of two-dimensional tensors may be strided.

        Args:
            requests: [batch], int64. Numbers of running requests, each once; -1: an idle row.
            new_token_ids: [batch, w], int32. The tokens to append; not read past num_new_tokens.
            num_new_tokens: [batch], int32. 0 to w.
            max_draft_tokens: [batch], int32. Maximum number of drafts of each row, which is also
                limited by the space in the row; 0 turns drafting off.
            draft_token_ids: [batch, k], int32. Written: the drafts, then -1.
            num_draft_tokens: [batch], int32. Written: number of drafts. Allocated when absent.
            num_given_drafts: [batch], int32. Number of drafts already in the row, one path from
                another drafter. They stay, the match ends with them, and new drafts are written
                after them. Not counted in num_draft_tokens.
            parents: [batch, k], int32. Written after the existing drafts: the index in the row of
                each draft's parent (-1: it follows the last token), then -2.
            probs: [batch, k], float32. Written after the existing drafts: as in SuffixDraft, then
                0.
            scores: [batch], float32. Written: as in SuffixDraft.
            match_lens: [batch], int32. Written: as in SuffixDraft.
            use_tree: as in `speculate`.

        Returns:
            `draft_token_ids` and `num_draft_tokens`.

        Raises:
            ValueError: a shape, dtype, layout or device differs from the above; a number belongs to
                no running request, or occurs twice; a token or a limit is negative. Nothing has
                been written or appended then.

        Note:
            Idle rows get no drafts. The call uses the threads of the CPU ops; their number changes
            no draft.
        """
        num_draft_tokens = self._cache.step(
            requests,
            new_token_ids,
            num_new_tokens,
            max_draft_tokens,
            draft_token_ids,
            num_draft_tokens,
            num_given_drafts,
            parents,
            probs,
            scores,
            match_lens,
            use_tree,
        )
        return draft_token_ids, num_draft_tokens

    def stop(self, request_id: Hashable) -> None:
        """End a running request. Its response stays in the shared tree until it is evicted.

        Raises:
            ValueError: no running request has this id.
        """
        self._cache.stop(request_id)

    def evict(self, request_id: Hashable) -> None:
        """Remove a response from the shared tree, whether its request is running or not.

        Raises:
            ValueError: the shared tree has no response with this id.
        """
        self._cache.evict(request_id)

    def discard(self, request_id: Hashable) -> bool:
        """Remove a response from the shared tree unless a budget has already evicted it.

        Returns:
            Whether the response was in the tree.
        """
        return self._cache.discard(request_id)

    def add(
        self,
        token_ids: TokenIds,
        request_id: Hashable | None = None,
        *,
        scope: str | None = "",
    ) -> None:
        """Add a response that no request generated to a shared tree, such as a file of a corpus.

        Args:
            token_ids: [n], int32. As in `start`.
            request_id: id for `evict`, as in `start`; None: only the budgets evict the response.
            scope: scope of the requests that may draft from it; None: all scopes.

        Raises:
            ValueError: as in `start`, or there is no shared tree.
        """
        self._cache.add(token_ids, request_id, scope)

    def reclaim(self) -> int:
        """Free all evicted memory, which may take a while, and return the number of tokens."""
        return self._cache.reclaim()

    def wait(self) -> None:
        """Wait until the background thread has added all prompts to their trees."""
        self._cache.wait()

    def save(self, path: str | PathLike[str], *, label: str = "") -> None:
        """Write the shared trees to one file, replacing an older file only when complete.

        Only the user of this process may read the file. Unfinished responses are saved as they are.
        Ids are not saved. Evicted memory is freed first.

        Args:
            path: path of the file.
            label: stored in the file for `read_label`, such as the vocabulary of the tokens.

        Raises:
            ValueError: there is no shared tree.
            OSError: the file cannot be written. An older file is left unchanged.
        """
        self._cache.save(path, label)

    @staticmethod
    def read_label(path: str | PathLike[str]) -> str:
        """Return the label that a file was saved with.

        Raises:
            ValueError: the file was not written by `save`, or the part up to the label is damaged.
            OSError: the file cannot be read.
        """
        return _C.SuffixCache.read_label(path)

    def load(self, path: str | PathLike[str]) -> None:
        """Read a file written by `save` into a cache with an empty shared tree.

        Responses keep their order but have no ids (None in `cached_requests`), and count as older
        than those of requests started later. If a budget is exceeded, the oldest are evicted.

        Raises:
            ValueError: the file is damaged, was written by another program or in another version's
                format, or holds a tree of another max_tree_depth; the shared tree is not empty, or
                there is none. The cache is unchanged then.
            OSError: the file cannot be read.
        """
        self._cache.load(path)

    @property
    def running_requests(self) -> list[Hashable]:
        """Ids of the running requests, in the order in which they were started."""
        return self._cache.running_requests()

    @property
    def cached_requests(self) -> list[Hashable | None]:
        """Ids of the responses in the shared trees, oldest first; None for one without an id."""
        return self._cache.cached_requests()

    @property
    def num_cached_requests(self) -> int:
        """Number of responses in the shared trees."""
        return self._cache.num_cached_requests()

    @property
    def num_cached_tokens(self) -> int:
        """Number of tokens of the responses in the shared trees."""
        return self._cache.num_cached_tokens()

    @property
    def num_common_requests(self) -> int:
        """Number of responses from which requests of all scopes draft."""
        return self._cache.num_common_requests()

    @property
    def num_scopes(self) -> int:
        """Number of scopes with a shared tree; the scope "" always has one."""
        return self._cache.num_scopes()

    @property
    def num_bytes(self) -> int:
        """Bytes that the shared trees have allocated from the system, free memory included."""
        return self._cache.num_bytes()

    def count(self, token_ids: TokenIds, request_id: Hashable | None = None) -> int:
        """Return how often a string occurs in the shared trees, or in a running request's own.

        Args:
            token_ids: [n], int32. As in `start`, at least one; 0 is returned if there are more than
                max_tree_depth.
            request_id: id of a running request; None: the shared trees of all scopes.

        Raises:
            ValueError: as in `start`, or no running request has this id.
        """
        return self._cache.count(token_ids, request_id)

    def check_integrity(self) -> str:
        """Check the invariants of all trees; return the first violation, or "". Changes nothing."""
        return self._cache.check_integrity()


class _NamedAsDecodingCache(SuffixCache):
    """SuffixCache whose errors use the names of SuffixDecodingCache, which contains it."""

    __slots__ = ()
    _speaks_of_decoding_cache = True


class SuffixDecodingCache:
    """`SuffixCache` with the interface of arctic-inference's class, which vLLM's proposer calls.

    Arguments, return values and errors are those of that class. There are three differences: a
    match may be the whole context, among equally frequent continuations the youngest is chosen, and
    drafts continue past max_tree_depth (`read_on`).

    Args:
        max_tree_depth: longest match.
        max_cached_requests: responses in the global tree; -1: any number; 0: no global tree.
        read_on: as in SuffixCache.

    Raises:
        ValueError: as SuffixCache.
    """

    __slots__ = ("_cache",)

    def __init__(
        self, max_tree_depth: int = 64, max_cached_requests: int = -1, *, read_on: bool = True
    ) -> None:
        self._cache = _NamedAsDecodingCache(
            max_tree_depth=max_tree_depth,
            max_cached_requests=max_cached_requests,
            read_on=read_on,
        )

    @property
    def max_tree_depth(self) -> int:
        """Maximum length of a match, in tokens."""
        return self._cache.max_tree_depth

    @property
    def max_cached_requests(self) -> int:
        """Maximum number of responses in the global tree; -1: any number."""
        return self._cache.max_cached_requests

    @property
    def active_requests(self) -> list[Hashable]:
        """Ids of the requests that were started and not stopped."""
        return self._cache.running_requests

    @property
    def cached_requests(self) -> list[Hashable | None]:
        """Ids of the requests, running or not, that have a response in the global tree."""
        return self._cache.cached_requests

    def start_request(self, req_id: Hashable, prompt_token_ids: TokenIds) -> None:
        """Begin a request. Raises ValueError: as `SuffixCache.start`."""
        self._cache.start(req_id, prompt_token_ids)

    def stop_request(self, req_id: Hashable) -> None:
        """End a request; keep its response. Raises ValueError: as `SuffixCache.stop`."""
        self._cache.stop(req_id)

    def add_active_response(self, req_id: Hashable, token_ids: TokenIds) -> None:
        """Append to a response. Raises ValueError: as `SuffixCache.extend`."""
        self._cache.extend(req_id, token_ids)

    def evict_cached_response(self, req_id: Hashable) -> None:
        """Remove a response from the global tree. Raises ValueError: as `SuffixCache.evict`."""
        self._cache.evict(req_id)
        self._cache.reclaim()

    def speculate(
        self,
        req_id: Hashable,
        context: TokenIds,
        max_spec_tokens: int | None = None,
        max_spec_factor: float = 1.0,
        max_spec_offset: float = 0.0,
        min_token_prob: float = 0.1,
        use_tree_spec: bool = False,
    ) -> SuffixDraft:
        """Draft continuations of `context`, from its last max_tree_depth tokens.

        A match of m tokens drafts at most m * max_spec_factor + max_spec_offset tokens, and at most
        max_spec_tokens (None: max_tree_depth).

        Returns:
            An object with the attributes token_ids, parents, probs, score and match_len.

        Raises:
            ValueError: as `SuffixCache.speculate`.
        """
        most = self._cache.max_tree_depth if max_spec_tokens is None else max_spec_tokens
        return self._cache._speculate(
            req_id, most, use_tree_spec, max_spec_factor, max_spec_offset, min_token_prob, context
        )
