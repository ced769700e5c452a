# SPDX-License-Identifier: Apache-2.0
"""Mistakes of other engines with draft heads reduce the acceptance of trained heads.

tests/golden contains heads that tools.train.train_heads made for the bundled model: the EAGLE-3
head of the model card, a DFlash head after 295 of 400 steps, and a Markov head that turns the
DFlash head into a DSpark head.
"""

from functools import lru_cache
from pathlib import Path

import pytest

from tools.benches.bench_head_mistakes import MISTAKES, Kept, Mistake, kept, planted

pytestmark = pytest.mark.slow

GOLDEN = Path(__file__).resolve().parents[2] / "tests" / "golden"


@lru_cache
def right(method: str) -> Kept:
    return kept(method, GOLDEN / method, "completions", 12)


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda one: f"{one.method}-{one.name}")
def test_a_mistake_costs_acceptance(mistake: Mistake) -> None:
    """Fewer drafts are kept with the mistake, so these heads show whether an engine is right."""
    with planted(GOLDEN / mistake.method, mistake) as directory:
        wrong = kept(mistake.method, directory, "completions", 12)
    assert wrong.length < right(mistake.method).length
