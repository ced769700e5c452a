# SPDX-License-Identifier: Apache-2.0
"""Medusa heads: each drafts one token from the last hidden state alone."""

from specops.api.methods.medusa import METHOD, MedusaOptions
from specops.engine.drafters.base import Drafter, DrafterContext
from specops.engine.drafters.residual import load_residual
from specops.engine.models import load_medusa


def load(context: DrafterContext) -> Drafter:
    """Make the drafter for the heads that the configuration names; see `load_residual`."""
    return load_residual(context, METHOD, MedusaOptions, load_medusa)
