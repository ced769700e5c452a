# SPDX-License-Identifier: Apache-2.0
"""FlashInfer's pipelines of sampling and of verification, on fp32 logits."""

import torch
from torch import Tensor

from bench.peers.flashinfer_peer import Call, given, made, named, working

# Torch's generator cannot be used while a graph is captured.
RANDOM = {"seed": 1, "offset": 0}


def sampling(what: str, logits: list[Tensor], top_k: int, top_p: float) -> list[Call]:
    """Return calls of top-k and top-p sampling of every row.

    Raises:
        Refused: it does not run here.
    """
    softmax = named("sampling.softmax")
    from_logits = named("sampling.top_k_top_p_sampling_from_logits")
    from_probs = named("sampling.top_p_sampling_from_probs")

    def call(rows: Tensor) -> Call:
        if what == "top-k top-p":
            return lambda: from_logits(rows, top_k, top_p, **RANDOM)
        return lambda: from_probs(softmax(rows), top_p, **RANDOM)

    calls = made(lambda: [call(rows) for rows in logits])
    working(calls)
    return calls


def chain_verification(
    logits: list[Tensor], drafts: Tensor, top_p: float, draft_probs: Tensor
) -> list[Call]:
    """Return its pipeline of one step: softmax, top-p renormalization and chain verification.

    Raises:
        Refused: it does not run here.
    """
    batch, num_drafts = drafts.shape
    softmax, renorm = named("sampling.softmax"), named("sampling.top_p_renorm_probs")
    verify = named("sampling.chain_speculative_sampling")
    # The kernel adds to these counters; if the call allocated them, it would also have to clear
    # them.
    counts = torch.zeros(2, batch, dtype=torch.int32, device=drafts.device)
    counters = given(
        verify,
        maybe_output_accepted_token_num=counts[0],
        maybe_output_emitted_draft_token_num=counts[1],
    )

    def call(rows: Tensor) -> Call:
        def run() -> object:
            probs = renorm(softmax(rows), top_p)
            target = probs.view(batch, num_drafts + 1, -1)
            return verify(draft_probs, drafts, target, **counters, **RANDOM)

        return run

    calls = made(lambda: [call(rows) for rows in logits])
    working(calls)
    return calls
