# SPDX-License-Identifier: Apache-2.0
"""A drafter for vLLM with partly right drafts, so that steps accept some and reject others."""

import random
from collections.abc import Sequence
from typing import Any

from specops.integrations.vllm.proposers import NgramProposer


class JunkProposer(NgramProposer):
    """Proposer of a random number of drafts.

    They are n-gram drafts, often with one random token, or random tokens only.
    """

    def __init__(self, vllm_config: Any) -> None:
        super().__init__(vllm_config)
        self._rng = random.Random(7)
        self._vocab_size = vllm_config.model_config.get_vocab_size()

    def propose(
        self,
        sampled_token_ids: Sequence[Sequence[int]],
        num_tokens_no_spec: Any,
        token_ids_cpu: Any,
        slot_mappings: Any = None,
    ) -> list[list[int]]:
        """Return the drafts of each row, which also depend on earlier calls."""
        found = super().propose(sampled_token_ids, num_tokens_no_spec, token_ids_cpu)
        for row, drafts in enumerate(found):
            most = self.max_drafts(sampled_token_ids[row], int(num_tokens_no_spec[row]))
            if not drafts:
                drafts.extend(self._token() for _ in range(self._rng.randint(0, most)))
            elif self._rng.random() < 0.5:
                drafts[self._rng.randrange(len(drafts))] = self._token()
            del drafts[self._rng.randint(0, most) :]
        return found

    def _token(self) -> int:
        return self._rng.randrange(self._vocab_size)
