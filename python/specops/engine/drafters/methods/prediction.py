# SPDX-License-Identifier: Apache-2.0
"""Predicted outputs, as the configuration knows them; drafters/prediction.py does it."""

from specops.engine.drafters.methods.method import Method

METHOD = Method(
    name="prediction",
    title="predicted output",
    short="prediction",
    drafter="specops.engine.drafters.prediction",
    parameter="prediction",
    default_tokens=8,
    may_follow=True,
    is_on_host=True,
)
