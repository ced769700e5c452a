# SPDX-License-Identifier: Apache-2.0
"""Configuration of predicted outputs; the drafter is in drafters/prediction.py."""

from specops.api.methods.method import Method

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
