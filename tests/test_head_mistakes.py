# SPDX-License-Identifier: Apache-2.0
"""Mistakes with draft heads that other engines have made cost acceptance on a trained head."""

import pytest

from bench.bench_head_mistakes import MISTAKES, Kept, Mistake, kept, planted, trained_heads

SHIPPED = [one for one in MISTAKES if one.method == "eagle3"]


@pytest.fixture(scope="module")
def right() -> Kept:
    return kept("eagle3", trained_heads()["eagle3"], "completions", 12)


@pytest.mark.parametrize("mistake", SHIPPED, ids=lambda one: one.name)
def test_a_mistake_costs_acceptance(mistake: Mistake, right: Kept) -> None:
    """So a head that an engine reads rightly is told from one that it reads wrongly."""
    with planted(trained_heads()["eagle3"], mistake) as directory:
        wrong = kept("eagle3", directory, "completions", 12)
    assert wrong.length < right.length
