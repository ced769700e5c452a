# SPDX-License-Identifier: Apache-2.0
"""Optional features of a step, and which parameters of a request need them."""

from specops.api.sampling_params import SamplingParams
from specops.api.speculative_config import SpeculativeConfig


class Feature:
    """Bits for optional features of a step; a step has the bits of all its requests.

    They are plain integers for speed: they are tested for every request of every step.
    """

    PROCESSORS = 1  # logits are changed before the filters
    TYPICAL_P = 2
    ENDINGS = 4  # stop sequences, minimum lengths, limits on thinking
    ACCEPT_RATES = 8
    DRAFT_PROBS = 16  # verification reads the distributions that drafts were drawn from


def features_of(params: SamplingParams, speculative: SpeculativeConfig) -> int:
    """Return the bits of the features that a request needs."""
    wanted = {
        Feature.PROCESSORS: params.has_penalties
        or bool(params.logit_bias or params.bad_words or params.bad_words_token_ids)
        or params.allowed_token_ids is not None
        or params.min_tokens > 0
        or params.structured_output is not None,
        Feature.TYPICAL_P: params.typical_p < 1,
        Feature.ENDINGS: params.thinks
        or params.min_tokens > 0
        or bool(params.stop_token_sequences),
        Feature.ACCEPT_RATES: speculative.accept_policy == "synthetic",
        Feature.DRAFT_PROBS: speculative.draws_drafts and params.temperature > 0,
    }
    features = 0
    for feature, is_wanted in wanted.items():
        if is_wanted:
            features |= feature
    return features
