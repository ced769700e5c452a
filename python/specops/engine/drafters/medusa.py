# SPDX-License-Identifier: Apache-2.0
"""Medusa heads: each drafts a token from the last state alone."""

from specops.engine.drafters.base import Drafter, DrafterContext, MethodUnavailable
from specops.engine.drafters.methods.medusa import METHOD, MedusaOptions
from specops.engine.drafters.recurrent import RecurrentDrafter
from specops.engine.drafters.residual import ResidualDraftHead
from specops.engine.models import load_medusa


def load(context: DrafterContext) -> Drafter:
    """Makes the drafter of the heads that the configuration names.

    Raises:
        MethodUnavailable: it names none.
        ModelError: the heads cannot be used, or not with this target.
    """
    own = context.config.speculative_config.options_of(MedusaOptions)
    if own.model is None:
        reason = "no Medusa heads are named: their directory belongs into model"
        raise MethodUnavailable(reason, reason)
    heads = load_medusa(context.target, own.model, quantization=own.quantization)
    head = ResidualDraftHead(heads, context.config.max_num_seqs)
    return RecurrentDrafter(METHOD.name, context, head, draws=True)
