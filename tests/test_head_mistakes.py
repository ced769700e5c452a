# SPDX-License-Identifier: Apache-2.0
"""Mistakes with draft heads that other engines have made cost acceptance on a trained head.

golden/eagle3 is the one of the bundled model's card, as tools.train.train_heads has left it.
"""

from pathlib import Path

import pytest

from bench.bench_head_mistakes import MISTAKES, Kept, Mistake, kept, planted

HEAD = Path(__file__).parent / "golden" / "eagle3"
OF_EAGLE3 = [one for one in MISTAKES if one.method == "eagle3"]


@pytest.fixture(scope="module")
def right() -> Kept:
    return kept("eagle3", HEAD, "completions", 12)


@pytest.mark.parametrize("mistake", OF_EAGLE3, ids=lambda one: one.name)
def test_a_mistake_costs_acceptance(mistake: Mistake, right: Kept) -> None:
    """So a head that an engine reads rightly is told from one that it reads wrongly."""
    with planted(HEAD, mistake) as directory:
        wrong = kept("eagle3", directory, "completions", 12)
    assert wrong.length < right.length
