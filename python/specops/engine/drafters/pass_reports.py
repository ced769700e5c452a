# SPDX-License-Identifier: Apache-2.0
"""Results of a recurrent drafter's passes that the host reads: draft probabilities, and trees."""

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
    """Settings for making trees of drafts.

    Attributes:
        num_likeliest: number of likeliest tokens per pass that form trees.
        new_tree: makes trees of drafts that do not depend on each other; None: trees branch off the
            chain.
        token_map: from the draft vocabulary to the target's; None: they are the same.
    """

    num_likeliest: int
    new_tree: TreeMaker | None
    token_map: NDArray[np.int32] | None


class PassReports:
    """Memory of a step for the reports of its passes, and their processing on the host.

    Args:
        results: allocates the memory.
        batch: requests of the step.
        slots: rows of the table of proposals.
        passes: number of passes that report the probability of each draft.
        trees: settings for making trees; None: no request needs trees, and only the probabilities
            of the drafts are reported.

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
        """Record the number of drafts after the passes have run, int32 [slots].

        Later drafters continue the proposals before the host reads them.
        """
        if self.logprobs:
            self._counts.device.copy_(num_draft_tokens)

    def note_likeliest(
        self, choices: Choices, step: int, workspace: Tensor, options: Mapping[str, Any]
    ) -> None:
        """Record the likeliest tokens of a pass, if there are trees.

        Args:
            choices: with the logits of the pass.
            step: index of the draft.
            workspace: of the op.
            options: further arguments of the op, for changes to the logits.
        """
        if self._trees is None or not self._likeliest:
            return
        sampling.top_logprobs(
            choices.logits,
            self._trees.num_likeliest,
            **options,
            outputs=sampling.TopLogprobsOutputs(
                self._likeliest[step].device, self._their_logprobs[step].device, lse=choices.lse
            ),
            workspace=workspace,
        )

    def read(self, parts: Sequence[Scheduled], ran: Sequence[bool], proposals: Proposals) -> None:
        """Write the probabilities of drafts as confidences, and make trees of chains.

        Args:
            parts: of the step.
            ran: for each part, whether passes ran for it.
            proposals: with the drafts.

        Raises:
            RequestsFailed: a probability of a request is NaN. Its drafts are dropped.
        """
        if not self.logprobs:
            return
        logprobs = np.array([array.host[: len(parts)] for array in self.logprobs])
        # Only drafts of these passes: the report memory of other drafts is not written.
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
        """Replace a request's chain of drafts with a tree.

        The tree is made by `new_tree` from the likeliest tokens of each pass, or else it is the
        chain with a second token at each of its positions.
        """
        assert self._trees is not None
        slot = part.request.slot
        places = [self._likeliest_of(depth, index) for depth in range(count)]
        if self._trees.new_tree is not None:
            proposals.put_tree(slot, self._trees.new_tree(places, part.draft_limit))
            return
        if self._trees.num_likeliest < 2:
            return  # no second token in the vocabulary: the drafts stay a chain
        tokens = proposals.token_ids[slot, :count].tolist()
        # Prefer the probability reported for the token here: it includes changes to the logits.
        acceptance_probs = [
            dict(place).get(token, chance)
            for place, token, chance in zip(
                places, tokens, proposals.confidences[slot, :count].tolist(), strict=True
            )
        ]
        others: list[tuple[int, float]] = []
        for token, (first, second, *_) in zip(tokens, places, strict=True):
            others.append(second if first[0] == token else first)
        chain = list(zip(tokens, acceptance_probs, strict=True))
        proposals.put_tree(slot, branch_chain(chain, others, part.draft_limit))

    def _likeliest_of(self, depth: int, index: int) -> list[tuple[int, float]]:
        """Return the likeliest tokens of a request's pass with their probabilities."""
        assert self._trees is not None
        token_map = self._trees.token_map
        tokens = self._likeliest[depth].host[index]
        tokens = tokens if token_map is None else token_map[tokens]
        acceptance_probs = np.exp(self._their_logprobs[depth].host[index]).clip(max=1.0)
        return list(zip(tokens.tolist(), acceptance_probs.tolist(), strict=True))
