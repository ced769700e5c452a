# SPDX-License-Identifier: Apache-2.0
"""docs/predictions.md: every goal is there, and the document is what its model says."""

import json
import re
from pathlib import Path

import pytest

from tools import predict, predictions
from tools.gates.budgets import LIMITS, METERED
from tools.gpu_check.goals import GOALS
from tools.predict import Model, caps_of, predictions_of, renewed
from tools.predictions import Card

pytestmark = pytest.mark.ci

ASSUMED = {
    "launch_us": 2.0,
    "blocks_per_sm": 2,
    "blocks_per_sm low": 3,
    "code_us": 0.5,
    "item_us": 1.0,
    "arrival_us": 0.5,
    "factors_us": 1.0,
    "load_us": 0.25,
    "row_us": 3.0,
}
CARD = Card("H200", read_tb_s=4.0, sms=132, ghz=1.755)


def model(card: Card = CARD, **tb_s: float) -> Model:
    """Its caps are given in TB/s of a card of 132 SMs at 1.755 GHz."""
    caps = {name.replace("_", " "): cap * 1000 / (132 * 1.755) for name, cap in tb_s.items()}
    return Model(card, ASSUMED, caps)


def test_the_document_says_something_of_every_goal() -> None:
    said = predictions.read_predictions()
    assert {one.goal for one in said} == {goal.id for goal in GOALS}
    assert all(one.values and one.unit in ("us", "ratio") for one in said)
    assert all(value > 0 for one in said for value in one.values.values())
    assert len({(one.goal, one.figure) for one in said}) == len(said)


def test_goals_are_predicted_of_the_cards_that_they_are_for() -> None:
    cards = {card.name for card in predictions.read_cards(predictions.DOCUMENT.read_text())}
    goals = {goal.id: goal for goal in GOALS}
    assert {"H100", "H200"} < cards
    for one in predictions.read_predictions():
        assert set(one.values) <= cards
        assert any(goals[one.goal].is_for(card) for card in one.values)
    on = {one.figure: one for one in predictions.read_predictions() if one.goal == "G6"}
    (greedy,) = on.values()
    assert greedy.value_on("NVIDIA H200") < 100 < greedy.value_on("NVIDIA H100 80GB HBM3")
    assert greedy.value_on("NVIDIA L40S") is None


def test_the_document_follows_from_its_own_tables() -> None:
    """Who changes what is assumed also runs the program."""
    text = predictions.DOCUMENT.read_text()
    assert renewed(text, []) == text


def test_what_is_predicted_of_a_goal_can_be_measured() -> None:
    import test_cuda_benches

    ids = {"sampling.verify.bf16.b256.greedy"}
    for family in ("attention", "attention_peers", "exactness", "recorded", "linear"):
        ids |= {figure.id for figure in test_cuda_benches.rehearsed(family).figures}
    said = {one.figure for one in predictions.read_predictions() if one.goal != "G5"}
    assert said <= ids


def test_units_are_cut_into_the_fewest_waves() -> None:
    one = model(attention_32=4.0)
    assert one.cut(128, 64) == (2, 1, 256 / 264)
    assert one.cut(16, 64) == (8, 1, 128 / 264)
    assert one.cut(512, 64) == (1, 2, 512 / 528)
    assert one.cut(264, 64) == (1, 1, 1.0)
    # Of three blocks an SM two thirds are enough for the memory.
    assert one.cut(128, 32) == (2, 1, 256 / 396)
    assert one.cut(512, 32) == (2, 3, 1024 / 1188)


def test_the_arithmetic_of_a_call() -> None:
    one = model(attention_32=2.0, attention_64=1.0)
    # 32 requests of 2 chunks for 8 heads: 512 units, as halves in 3 waves; 537 MB at the cap of the
    # loop. Two folds: five states of each chunk, then two chunks; 4 rows have 128 quads, 32 have
    # four times 256.
    streaming = 32 * 4096 * 4096 * 1e-6 / (2.0 * 1024 / 1188)
    fold = 0.5 + 1.0 + 0.25
    # While one of three blocks begins a unit the others go on: a third of it is lost, but at first.
    begin = 2.5 + 1.0 + 2 * 1.0 / 3
    assert one.attention("b32.4k", 4, 1) == pytest.approx(begin + streaming + 2 * fold)
    more = 2 * 3 * 0.25
    assert one.attention("b32.4k", 4, 8) == pytest.approx(begin + streaming + 2 * fold + more)
    # 64 rows take the other form of the kernel, of two blocks an SM: 2 waves of whole chunks.
    streaming = 32 * 4096 * 4096 * 1e-6 / (1.0 * 512 / 528)
    assert one.attention("b32.4k", 8, 8) == pytest.approx(2.5 + 1.5 + streaming + fold + 7 * 0.25)
    # 16 chunks, halves of which are units: five states of each chunk, then two steps of eight.
    assert one.fold(5, 4) == pytest.approx(fold)
    assert one.fold(16, 4) == pytest.approx(0.5 + 2 * 1.25)
    assert one.fold(0, 4) == 0.0
    streaming = 32768 * 4096 * 1e-6 / (2.0 * 256 / 396)
    assert one.attention("b1.32k", 4, 1) == pytest.approx(
        2.5 + 1.0 + streaming + fold + one.fold(16, 4)
    )
    # 2 chunks for 8 heads, 16 units in eighths: they meet once.
    streaming = 4096 * 4096 * 1e-6 / (2.0 * 128 / 396)
    assert one.attention("b1.4k", 4, 1) == pytest.approx(3.5 + streaming + 2 * fold - 0.5)
    # A loop faster than the memory waits for the memory; two blocks of it are enough.
    fast = model(attention_32=9.0)
    assert fast.attention("b32.4k", 4, 1) == pytest.approx(3.5 + 2 * fold + 32 * 4096**2 * 1e-6 / 4)
    # More rows than any form has: as many turns.
    assert one.cap_of_rows(128) == pytest.approx(one.caps["attention 64"] / 2)
    sums = model(verify_2_sums=1.0)
    assert sums.verify(2) == pytest.approx(2 + 3 + 4 * 1.5 + 2 * 1280 * 128256 * 1e-6)
    # A card with half the SMs has half the cap, and twice the waves.
    half = model(Card("half", read_tb_s=4.0, sms=66, ghz=1.755), verify_2_sums=1.0)
    assert half.verify(2) == pytest.approx(2 + 3 + 9 * 1.5 + 2 * 2 * 1280 * 128256 * 1e-6)
    slow = model(Card("slow", read_tb_s=0.5, sms=132, ghz=1.755), verify_2_sums=1.0)
    assert slow.verify(2) == pytest.approx(2 + 3 + 2 * 2 * 1280 * 128256 * 1e-6)


def test_every_loop_of_the_predictions_is_metered() -> None:
    """Else its cap would be that of long ago."""
    for kernel, unit in predict.LOOPS.values():
        rows = [row for row in METERED if re.fullmatch(kernel, row.kernel)]
        assert any(re.fullmatch(unit, row.unit) for row in rows), kernel


def test_tokens_of_a_cache() -> None:
    """An 8-bit head of a token has a scale of four bytes; memory is the limit below the cap."""
    card = Card("H200", read_tb_s=4.0, sms=100, ghz=2.0)
    caps = {"attention 16": 30.0, "fp8 16 rows": 10.0}
    assert predict.tokens_per_ns(card, caps, "bf16", 16) == pytest.approx(4000 / 512)
    assert predict.tokens_per_ns(card, caps, "fp8", 16) == pytest.approx(2000 / 264)


LOOP = {
    "kernel": "append_attention_kernel<bfloat16, 128, 1, true>",
    "arch": "90a",
    "unit": "tile of 64 tokens, 32 rows",
    "amount": 32768,
}


def metered(folder: Path, *loops: dict) -> list[Path]:
    """A file of the meter."""
    path = folder / "meter.json"
    path.write_text(json.dumps({"measured": [{**LOOP, **loop} for loop in loops]}))
    return [path]


def test_caps_are_the_meters(tmp_path: Path) -> None:
    """The slowest of a loop's copies; other loops do not count."""
    meters = metered(
        tmp_path,
        {"replayed": 2000.0},
        {"replayed": 3000.0},
        {"replayed": 9000.0, "arch": "80"},
        {"replayed": 9000.0, "kernel": "append_attention_kernel<bfloat16, 64, 1, true>"},
        {"replayed": 1000.0, "unit": "tile of 64 tokens, 16 rows"},
    )
    # What the kernel no longer has is gone; another kernel's stays.
    caps = caps_of(meters, {"attention 64": 1.0, "verify 0 sums": 8.0})
    assert caps == {
        "attention 16": pytest.approx(32768 / 1000),
        "attention 32": pytest.approx(32768 / 3000),
        "verify 0 sums": 8.0,
    }
    with pytest.raises(ValueError, match="predict: no loop of append_attention"):
        caps_of(metered(tmp_path, {"replayed": 1.0, "unit": "tile of 64 tokens"}), {})


def test_a_slower_loop_renews_what_follows_from_it(tmp_path: Path) -> None:
    text = predictions.DOCUMENT.read_text()
    other = renewed(text, metered(tmp_path, {"replayed": 3000.0}))
    numbers = predictions.read_numbers(other, predictions.CAPS)
    assert numbers["attention 32"] == pytest.approx(10.9)
    tables = [[predictions.rows_of(t, title) for t in (text, other)] for title in TABLES]
    assert tables[0][0] == tables[0][1]
    changed = {a[1] for a, b in zip(*tables[2], strict=True) if a != b}
    assert "`attention.b32.4k.g4.q8`" in changed
    assert "`sampling.verify.bf16.b256.greedy`" not in changed


TABLES = (predictions.ASSUMED, predictions.CAPS, predictions.PREDICTIONS)


def test_a_missing_table_is_said() -> None:
    with pytest.raises(ValueError, match=r"docs/predictions.md has no table below Caps"):
        predictions.rows_of("# Predictions\n\n## Assumed\n", predictions.CAPS)


def test_every_goal_is_predicted_by_the_model() -> None:
    text = predictions.DOCUMENT.read_text()
    tables = (predictions.ASSUMED, predictions.CAPS)
    assumed, caps = (predictions.read_numbers(text, title) for title in tables)
    said = predictions_of(predictions.read_cards(text), assumed, caps)
    assert {one.goal for one in said} == {goal.id for goal in GOALS}
    assert predict.ARCH in LIMITS
