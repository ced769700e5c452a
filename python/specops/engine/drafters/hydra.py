# SPDX-License-Identifier: Apache-2.0
"""Hydra heads: each drafts a token from the last state and the drafts before it."""

from specops.engine.drafters.base import Drafter, DrafterContext, MethodUnavailable
from specops.engine.drafters.methods.hydra import METHOD, HydraOptions
from specops.engine.drafters.recurrent import RecurrentDrafter
from specops.engine.drafters.residual import ResidualDraftHead
from specops.engine.models import load_hydra


def load(context: DrafterContext) -> Drafter:
    """Makes the drafter of the heads that the configuration names.

    Raises:
        MethodUnavailable: it names none.
        ModelError: the heads cannot be used, or not with this target.
    """
    own = context.config.speculative_config.options_of(HydraOptions)
    if own.model is None:
        reason = "no Hydra heads are named: their directory belongs into model"
        raise MethodUnavailable(reason, reason)
    heads = load_hydra(context.target, own.model, quantization=own.quantization)
    head = ResidualDraftHead(heads, context.config.max_num_seqs)
    return RecurrentDrafter(METHOD.name, context, head, draws=True)
