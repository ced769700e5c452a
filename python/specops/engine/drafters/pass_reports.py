# SPDX-License-Identifier: Apache-2.0
"""What passes of a recurrent drafter tell the host: how likely drafts are, and trees of them."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from specops import sampling
from specops.engine.drafters.base import Proposals, RequestsFailed, Scheduled
from specops.engine.drafters.draft_arrays import Choices
from specops.engine.drafters.trees import TreeMaker, branch_chain
from specops.engine.memory.step_memory import Layout
from specops.engine.request import Request


class Second(NamedTuple):
    """What makes trees of drafts.

    Attributes:
        num_likeliest: tokens of each pass that do.
        new_tree: of drafts that do not depend on each other; None: trees branch off the chain.
        token_map: from the drafts' vocabulary to the target's; None: they are the same.
    """

    num_likeliest: int
    new_tree: TreeMaker | None
    token_map: NDArray[np.int32] | None


class PassReports:
    """Memory of a step that passes report in, and what the host makes of it.

    Args:
        results: receives the memory.
        batch: requests of the step.
        slots: rows of the table of proposals.
        passes: that report how likely each draft is.
        trees: what makes trees; None: no request wants any, and only the drafts are reported.

    Attributes:
        logprobs: of the drafts, by pass.
    """

    def __init__(
        self, results: Layout, batch: int, slots: int, passes: int, trees: Second | None
    ) -> None:
        self._counts = results.int32(slots if passes else 0)
        self.logprobs = [results.float32(batch) for _ in range(passes)]
        self._trees = trees
        passes, count = (0, 0) if trees is None else (passes, trees.num_likeliest)
        self._likeliest = [results.int32(batch, count) for _ in range(passes)]
        self._their_logprobs = [results.float32(batch, count) for _ in range(passes)]

    def note_counts(self, num_draft_tokens: Tensor) -> None:
        """Note how many drafts there are once the passes have run, int32 [slots].

        Drafters behind this one continue the proposals before the host reads them.
        """
        if self.logprobs:
            self._counts.device.copy_(num_draft_tokens)

    def note_likeliest(
        self, choices: Choices, step: int, workspace: Tensor, options: Mapping[str, Any]
    ) -> None:
        """Note the likeliest tokens of a pass, where there are trees.

        Args:
            choices: with the logits of the pass.
            step: the draft.
            workspace: of the op.
            options: further arguments of the op: of changes of the logits.
        """
        if self._trees is None or not self._likeliest:
            return
        sampling.top_logprobs(
            choices.logits,
            self._trees.num_likeliest,
            **options,
            token_ids=self._likeliest[step].device,
            logprobs=self._their_logprobs[step].device,
            lse=choices.lse,
            workspace=workspace,
        )

    def read(self, parts: Sequence[Scheduled], ran: Sequence[bool], proposals: Proposals) -> None:
        """Take over how likely drafts are held, and make trees of chains.

        Args:
            parts: of the step.
            ran: of each, whether passes ran for it.
            proposals: with the drafts.

        Raises:
            RequestsFailed: a probability of a request is NaN. Its drafts are dropped.
        """
        if not self.logprobs:
            return
        logprobs = np.array([array.host[: len(parts)] for array in self.logprobs])
        # The drafts of these passes alone: nothing has written what is reported of others.
        counts = self._counts.host[[part.request.slot for part in parts]]
        counts = np.where(ran, np.minimum(counts, len(logprobs)), 0)
        written = np.arange(len(logprobs))[:, None] < counts
        probs = np.exp(np.minimum(np.where(written, logprobs, 0), 0)).clip(1e-6, 1)
        failed: list[Request] = []
        for index, (part, count) in enumerate(zip(parts, counts.tolist(), strict=True)):
            own = part.request.speculative
            if not (count and (own.selects_drafts or own.tree)):
                continue
            is_tree = own.tree and bool(self._likeliest)
            theirs = self._their_logprobs[:count] if is_tree else ()
            if np.isnan(probs[:count, index]).any() or any(
                np.isnan(array.host[index]).any() for array in theirs
            ):
                failed.append(part.request)
                proposals.counts[part.request.slot] = 0
                continue
            proposals.confidences[part.request.slot, :count] = probs[:count, index]
            if is_tree:
                self._branch(part, index, count, proposals)
        if failed:
            names = ", ".join(one.request_id for one in failed)
            raise RequestsFailed(f"NaN among the probabilities of drafts of {names}", failed)

    def _branch(self, part: Scheduled, index: int, count: int, proposals: Proposals) -> None:
        """Make a tree of a request's chain of drafts, with a second token for each of them.

        Or of the likeliest tokens of each pass, where each of them may follow each.
        """
        assert self._trees is not None
        slot = part.request.slot
        places = [self._likeliest_of(depth, index) for depth in range(count)]
        if self._trees.new_tree is not None:
            proposals.put_tree(slot, self._trees.new_tree(places, part.draft_limit))
            return
        if self._trees.num_likeliest < 2:
            return  # the vocabulary has no second token: the drafts stay a chain
        tokens = proposals.token_ids[slot, :count].tolist()
        # As likely as in its place: what is reported of drafts ignores changes of the logits.
        chances = [
            dict(place).get(token, chance)
            for place, token, chance in zip(
                places, tokens, proposals.confidences[slot, :count].tolist(), strict=True
            )
        ]
        others: list[tuple[int, float]] = []
        for token, (first, second, *_) in zip(tokens, places, strict=True):
            others.append(second if first[0] == token else first)
        chain = list(zip(tokens, chances, strict=True))
        proposals.put_tree(slot, branch_chain(chain, others, part.draft_limit))

    def _likeliest_of(self, depth: int, index: int) -> list[tuple[int, float]]:
        """The likeliest tokens of a request's pass, with their chances."""
        assert self._trees is not None
        token_map = self._trees.token_map
        tokens = self._likeliest[depth].host[index]
        tokens = tokens if token_map is None else token_map[tokens]
        chances = np.exp(self._their_logprobs[depth].host[index]).clip(max=1.0)
        return list(zip(tokens.tolist(), chances.tolist(), strict=True))
