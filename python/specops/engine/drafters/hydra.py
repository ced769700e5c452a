# SPDX-License-Identifier: Apache-2.0
"""Hydra heads: each drafts one token from the last hidden state and the earlier drafts."""

from specops.api.methods.hydra import METHOD, HydraOptions
from specops.engine.drafters.base import Drafter, DrafterContext
from specops.engine.drafters.residual import load_residual
from specops.engine.models import load_hydra


def load(context: DrafterContext) -> Drafter:
    """Make the drafter for the heads that the configuration names; see `load_residual`."""
    return load_residual(context, METHOD, HydraOptions, load_hydra)
