# SPDX-License-Identifier: Apache-2.0
"""Mistakes with draft heads that other engines have made cost acceptance on trained heads.

tests/golden has EAGLE-3's of the bundled model's card, DFlash's after 295 steps of 400, and a
Markov head that makes it DSpark's, all as tools.train.train_heads has left them.
"""

from functools import lru_cache
from pathlib import Path

import pytest

from tools.benches.bench_head_mistakes import MISTAKES, Kept, Mistake, kept, planted

pytestmark = pytest.mark.ci

GOLDEN = Path(__file__).resolve().parents[2] / "tests" / "golden"


@lru_cache
def right(method: str) -> Kept:
    return kept(method, GOLDEN / method, "completions", 12)


@pytest.mark.fast("eagle3-layers", "eagle3-rope", "dflash-anchor")
@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda one: f"{one.method}-{one.name}")
def test_a_mistake_costs_acceptance(mistake: Mistake) -> None:
    """So a head that an engine reads rightly is told from one that it reads wrongly."""
    with planted(GOLDEN / mistake.method, mistake) as directory:
        wrong = kept(mistake.method, directory, "completions", 12)
    assert wrong.length < right(mistake.method).length
