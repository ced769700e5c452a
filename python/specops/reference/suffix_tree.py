# SPDX-License-Identifier: Apache-2.0
"""N-gram and suffix drafts by brute force."""

import ctypes
from collections.abc import Hashable, Iterable

import torch
from torch import Tensor


def ngram_propose(
    token_ids: Tensor,
    lens: Tensor,
    max_draft_tokens: Tensor,
    *,
    k: int,
    min_ngram_size: int | Tensor,
    max_ngram_size: int | Tensor,
    leftmost: bool | Tensor = False,
    match_lens: Tensor | None = None,
    given_token_ids: Tensor | None = None,
    num_given_drafts: Tensor | None = None,
    max_total_draft_tokens: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Draft the tokens after an earlier occurrence of the n-gram that ends each text.

    Sizes are tried from the longest on, and starts of a size from the latest (or leftmost) on.
    `given_token_ids` [batch, k] holds existing drafts, which stay in front. `match_lens` is written
    if passed. Return (drafts [batch, k] padded with -1, their counts [batch]), both int32.
    """

    def of(value: int | Tensor, b: int) -> int:
        return int(value[b] if isinstance(value, Tensor) else value)

    batch = len(token_ids)
    rows, given, found = [], [], []
    for b in range(batch):
        num_given = 0 if num_given_drafts is None else int(num_given_drafts[b])
        first = [] if given_token_ids is None else given_token_ids[b, :num_given].tolist()
        tokens = token_ids[b, : int(lens[b])].tolist() + first
        step = 1 if of(leftmost, b) else -1
        matches = (
            (start + size, size)
            for size in range(of(max_ngram_size, b), of(min_ngram_size, b) - 1, -1)
            for ngram in [tokens[len(tokens) - size :]]
            for start in range(max(len(tokens) - size, 0))[::step]
            if tokens[start] == ngram[0] and tokens[start : start + size] == ngram
        )
        end, size = next(matches, (len(tokens), 0))
        room = max(min(int(max_draft_tokens[b]), k) - num_given, 0)
        rows.append(first + tokens[end : end + room])
        given.append(num_given)
        found.append(size)
    counts = [len(row) for row in rows]
    if max_total_draft_tokens is not None:
        counts = _shares(counts, given, max_total_draft_tokens)
    draft_token_ids = torch.full((batch, k), -1, dtype=torch.int32)
    for b, count in enumerate(counts):
        draft_token_ids[b, :count] = torch.tensor(rows[b][:count], dtype=torch.int32)
    if match_lens is not None:
        added = [count > first for count, first in zip(counts, given, strict=True)]
        match_lens[:] = torch.tensor(found) * torch.tensor(added)
    return draft_token_ids, torch.tensor(counts, dtype=torch.int32)


def _shares(counts: list[int], given: list[int], total: int) -> list[int]:
    """Limit the counts to `total` drafts, assigned in rounds: one to each request that has more."""
    shares = list(given)
    left = total - sum(shares)
    for cap in range(1, max(counts, default=0) + 1):
        wanting = [b for b, count in enumerate(counts) if count >= cap > shares[b]]
        for b in wanting[: max(left, 0)]:
            shares[b] += 1
        left -= len(wanting)
    return shares


class _Sequence:
    """Tokens of one sequence; tokens before `first` were freed after the sequence's removal."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.first = 0


# An occurrence of a string: the sequence, and the position after the string.
_Occurrence = tuple[_Sequence, int]
# token_ids, parents, probs, score, match_len
_Draft = tuple[list[int], list[int], list[float], float, int]


def _occurrences(sequences: Iterable[_Sequence], string: list[int]) -> list[_Occurrence]:
    """Return where `string` occurs: in the order of `sequences`, then by position."""
    size = len(string)
    return [
        (sequence, start + size)
        for sequence in sequences
        for start in range(sequence.first, len(sequence.tokens) - size + 1)
        if sequence.tokens[start : start + size] == string
    ]


def _float32(x: float) -> float:
    """Round x to float32, so that +, * and / of two float32 values are float32 arithmetic."""
    return ctypes.c_float(x).value


class SuffixCache:
    """Brute-force version of `specops.SuffixCache`, which searches all token lists for each draft.

    Drafts come from two trees, which are sets of sequences here: the request's own (prompt and
    response in one sequence) and the shared one (responses, in the order in which their requests
    were started). A response removed from the shared tree leaves it at once unless it is the
    oldest. The oldest is freed gradually, from its first token on: two tokens for each token that a
    call adds. Tokens that are not freed yet still match.

    Differences from `specops.SuffixCache`: `step` takes a list, and there are no byte budgets and
    no saving.
    """

    def __init__(
        self,
        *,
        max_tree_depth: int = 64,
        max_cached_requests: int = -1,
        max_spec_factor: float = 1.0,
        min_token_prob: float = 0.1,
        max_cached_tokens: int = -1,
        read_on: bool = True,
    ) -> None:
        self.max_tree_depth = max_tree_depth
        self.max_cached_requests = max_cached_requests
        self.max_cached_tokens = max_cached_tokens
        self.max_spec_factor = _float32(max_spec_factor)
        self.min_token_prob = _float32(min_token_prob)
        self.read_on = read_on
        self.running: dict[Hashable, _Sequence] = {}  # prompt and response
        self.cached: dict[Hashable, _Sequence] = {}  # responses, oldest first
        self.removed: list[_Sequence] = []  # removed but not yet freed, in order of removal
        self.shared: list[_Sequence] = []  # cached and removed ones, in the order of their start

    def start(self, request_id: Hashable, prompt: list[int]) -> None:
        self.running[request_id] = _Sequence()
        self.running[request_id].tokens += prompt
        if request_id in self.cached:
            self._remove(request_id)
        if 0 not in (self.max_cached_requests, self.max_cached_tokens):
            self.cached[request_id] = _Sequence()
            self.shared.append(self.cached[request_id])
        self._keep_budgets()

    def extend(self, request_id: Hashable, token_ids: list[int]) -> None:
        self._give_back(2 * self._append(request_id, token_ids))

    def add(self, token_ids: list[int], request_id: Hashable) -> None:
        self.start(request_id, [])
        self.extend(request_id, token_ids)
        self.stop(request_id)

    def stop(self, request_id: Hashable) -> None:
        del self.running[request_id]

    def evict(self, request_id: Hashable) -> None:
        self._remove(request_id)

    def reclaim(self) -> int:
        return self._give_back(sum(len(s.tokens) - s.first for s in self.removed))

    def step(
        self,
        rows: list[tuple[Hashable, list[int], int, list[int]]],
        *,
        use_tree: bool = False,
    ) -> list[_Draft]:
        """Extend and draft for rows of (request, new tokens, maximum drafts, existing drafts).

        Returned parents index the existing drafts, which are a path, followed by the new drafts.
        """
        added = sum(self._append(request_id, new) for request_id, new, _, _ in rows)
        self._give_back(2 * added)
        drafts = []
        for request_id, _, limit, given in rows:
            context = self.running[request_id].tokens + given
            draft = self.speculate(request_id, limit, use_tree=use_tree, context=context)
            parents = [parent + len(given) for parent in draft[1]]
            drafts.append((draft[0], parents, *draft[2:]))
        return drafts

    def speculate(
        self,
        request_id: Hashable,
        max_draft_tokens: int,
        *,
        use_tree: bool = False,
        max_spec_factor: float | None = None,
        min_token_prob: float | None = None,
        context: list[int] | None = None,
    ) -> _Draft:
        """Return the better-scored draft of both trees; the request's own tree wins a tie."""
        own = self.running[request_id]
        factor = self.max_spec_factor if max_spec_factor is None else _float32(max_spec_factor)
        min_prob = self.min_token_prob if min_token_prob is None else _float32(min_token_prob)
        drafts = [
            self._best_draft(
                sequences,
                own.tokens if context is None else context,
                max_draft_tokens,
                factor,
                min_prob,
                use_tree,
            )
            for sequences in ([own], self.shared)
        ]
        return max(drafts, key=lambda draft: draft[3])

    def count(self, token_ids: list[int], request_id: Hashable | None = None) -> int:
        """Return how often `token_ids` occurs; 0 if it is longer than max_tree_depth."""
        if len(token_ids) > self.max_tree_depth:
            return 0
        sequences = self.shared if request_id is None else [self.running[request_id]]
        return len(_occurrences(sequences, token_ids))

    def _append(self, request_id: Hashable, token_ids: list[int]) -> int:
        """Append to a request's sequences; return the number of tokens added to the shared tree."""
        self.running[request_id].tokens += token_ids
        if request_id not in self.cached:
            return 0
        self.cached[request_id].tokens += token_ids
        return len(token_ids)

    def _keep_budgets(self) -> None:
        """Remove the earliest started responses, running or not, until the budgets hold."""
        while 0 < self.max_cached_requests < len(self.cached) or (
            0 <= self.max_cached_tokens < sum(len(s.tokens) for s in self.cached.values())
        ):
            self._remove(next(iter(self.cached)))

    def _remove(self, request_id: Hashable) -> None:
        is_oldest = request_id == next(iter(self.cached))
        sequence = self.cached.pop(request_id)
        if is_oldest:
            self.removed.append(sequence)
        else:
            self.shared.remove(sequence)

    def _give_back(self, max_positions: int) -> int:
        self._keep_budgets()
        given = 0
        while self.removed and given < max_positions:
            removed = self.removed[0]
            positions = min(len(removed.tokens) - removed.first, max_positions - given)
            removed.first += positions
            given += positions
            if removed.first == len(removed.tokens):
                self.shared.remove(self.removed.pop(0))
        return given

    def _best_draft(
        self,
        sequences: list[_Sequence],
        context: list[int],
        max_draft_tokens: int,
        factor: float,
        min_prob: float,
        use_tree: bool,
    ) -> _Draft:
        """Return the best draft over all suffixes of the context; the longest match wins a tie."""
        best: _Draft = ([], [], [], 0.0, 0)
        for match_len in range(min(len(context), self.max_tree_depth), 0, -1):
            matches = _occurrences(sequences, context[-match_len:])
            budget = int(min(_float32(match_len * factor) + 1e-6, max_draft_tokens))
            if matches and budget > 0:
                draft = self._draft(matches, match_len, budget, min_prob, use_tree)
                if draft[3] > best[3]:
                    best = draft
        return best

    def _draft(
        self,
        matches: list[_Occurrence],
        match_len: int,
        budget: int,
        min_prob: float,
        use_tree: bool,
    ) -> _Draft:
        """Return up to `budget` drafts: a greedy path, or the most probable nodes as a tree."""
        token_ids: list[int] = []
        parents: list[int] = []
        probs: list[float] = []
        score = 0.0
        # Candidates stay in the order in which they were found: max() picks the first of equals.
        candidates = self._continuations(matches, match_len, -1, 1.0, min_prob)
        while candidates and len(token_ids) < budget:
            if not use_tree:
                candidates = candidates[:1]
            best = max(candidates, key=lambda candidate: candidate[0])
            candidates.remove(best)
            prob, token_id, parent, occurrences, depth = best
            token_ids.append(token_id)
            parents.append(parent)
            probs.append(prob)
            score = _float32(score + prob)
            node = len(token_ids) - 1
            candidates += self._continuations(occurrences, depth, node, prob, min_prob)
        return token_ids, parents, probs, score, match_len

    def _continuations(
        self,
        occurrences: list[_Occurrence],
        depth: int,
        parent: int,
        prob: float,
        min_prob: float,
    ) -> list[tuple[float, int, int, list[_Occurrence], int]]:
        """Return candidates for the next token, most frequent first; the most recent wins a tie.

        A candidate is (probability, token id, parent, its occurrences, depth). The tree counts
        occurrences up to max_tree_depth. Past it, only the most recent occurrence continues, and
        only with `read_on`.
        """
        if depth >= self.max_tree_depth:
            occurrences = occurrences[-1:] if self.read_on else []
        next_of: dict[int, list[_Occurrence]] = {}  # by token, most recent first
        for sequence, end in reversed(occurrences):
            if end < len(sequence.tokens):
                next_of.setdefault(sequence.tokens[end], []).append((sequence, end + 1))
        found = []
        for token_id, of_token in sorted(next_of.items(), key=lambda item: -len(item[1])):
            share = _float32(len(of_token) / len(occurrences))
            found.append((_float32(prob * share), token_id, parent, of_token[::-1], depth + 1))
        return [candidate for candidate in found if candidate[0] >= min_prob]
