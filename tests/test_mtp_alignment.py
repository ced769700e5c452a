# SPDX-License-Identifier: Apache-2.0
"""Drafts of every step equal those of the oracle, and every known mistake is noticed."""

from pathlib import Path
from typing import Any

import pytest
import torch
from mtp_checkpoints import BASES, GLM, SlowModules, Tiny, make_mtp_checkpoint
from mtp_oracle import oracle_drafts
from specops.engine.models import MtpModules, Transformer, load_model, load_mtp
from test_models import random_ids

from bench import common
from tools.benches import bench_mtp_mistakes
from tools.benches.mtp_decoding import Drafting, Mistake, Text, decode, drafts_along

PROMPT, DRAFTS = 41, 4


def models(tmp_path: Path, count: int, **changes: Any) -> tuple[Tiny, Transformer, MtpModules]:
    tiny = make_mtp_checkpoint(tmp_path, "deepseek_v3", count, **changes)
    model = load_model(tmp_path)
    return tiny, model, load_mtp(model, tmp_path)


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("naming,base", [*BASES.items(), ("deepseek_v3", GLM)])
def test_oracle_equals_the_slow_reference(
    tmp_path: Path, naming: str, base: tuple[str, dict[str, Any]], count: int
) -> None:
    tiny = make_mtp_checkpoint(tmp_path, naming, count, base=base)
    model = load_model(tmp_path)
    modules = load_mtp(model, tmp_path)
    for length in (2, 30):
        prefix = random_ids(length)
        ours = oracle_drafts(model, modules, prefix, 5)
        exact_ids, exact = SlowModules(tiny).drafts(prefix, 5, count)
        assert ours.token_ids == exact_ids
        assert (ours.logits.double() - torch.stack(exact)).abs().max().item() < 1e-2
        few = oracle_drafts(model, modules, prefix, 1)  # fewer drafts than modules
        assert few.token_ids == exact_ids[:1] and torch.equal(few.logits, ours.logits[:1])


def text_with_accepted_drafts(model: Transformer, modules: MtpModules) -> Text:
    """Return a text of which all drafts, some, or none are right.

    Modules of tiny models are always wrong, so the text follows the oracle's drafts.
    """
    token_ids, step = random_ids(PROMPT + 1), 0
    while len(token_ids) < PROMPT + 45:
        accepted = step % (DRAFTS + 1)
        drafts = oracle_drafts(model, modules, token_ids, DRAFTS).token_ids
        wrong = 1 if accepted == DRAFTS else (drafts[accepted] + 1) % 160
        token_ids += [*drafts[:accepted], wrong]
        step += 1
    return Text.read(model, token_ids)


def wrong_steps(
    model: Transformer, modules: MtpModules, text: Text, mistake: Mistake | None, **how: int
) -> list[bool]:
    """Return for every step along a text whether its drafts differ from the oracle's."""
    steps = list(decode(Drafting(modules, text, mistake), text, PROMPT, DRAFTS, **how))
    return [
        one.drafts != oracle_drafts(model, modules, text.token_ids[: one.known], DRAFTS).token_ids
        for one in steps
    ]


@pytest.mark.parametrize("count", [1, 2, 3])
def test_steps_draft_like_the_oracle(tmp_path: Path, count: int) -> None:
    _, model, modules = models(tmp_path, count)
    text = text_with_accepted_drafts(model, modules)
    for how in ({"chunk": 64}, {"chunk": 7}, {"chunk": 1}, {"chunk": 5, "shared": 32}):
        steps = list(decode(Drafting(modules, text), text, PROMPT, DRAFTS, **how))
        assert {one.kept for one in steps} == set(range(DRAFTS + 1))
        assert not any(wrong_steps(model, modules, text, None, **how))
    rows = list(range(0, 60, 3))
    drafts = drafts_along(Drafting(modules, text), rows, DRAFTS, edges=[16, 32], shared=True)
    for row, found in zip(rows, drafts, strict=True):
        expected = oracle_drafts(model, modules, text.token_ids[: row + 2], DRAFTS)
        assert found == expected.token_ids


# Rotary embeddings depend on distances only, so a shift of all positions changes nothing.
HARMLESS = {Mistake.POSITIONS_SHIFTED}


@pytest.mark.parametrize("mistake", list(Mistake), ids=lambda one: one.name.lower())
def test_every_mistake_is_noticed(tmp_path: Path, mistake: Mistake) -> None:
    _, model, modules = models(tmp_path, 3 if mistake is Mistake.UNCHAINED else 1)
    text = text_with_accepted_drafts(model, modules)
    wrong = wrong_steps(model, modules, text, mistake, chunk=5, shared=16)
    assert any(wrong) == (mistake not in HARMLESS)


@pytest.mark.ci
def test_bench_distinguishes_right_and_wrong_drafting() -> None:
    figures: list[common.Figure] = []

    class Recorder:
        num_threads = 1
        add = staticmethod(figures.append)

    texts = [torch.randint(1, 4096, (100,)).tolist() for _ in range(2)]
    sizes = bench_mtp_mistakes.Sizes(window=100, stride=9, prompt_tokens=80, new_tokens=8)
    bench_mtp_mistakes.measure(Recorder(), texts, sizes)  # type: ignore[arg-type]
    found = {one.id.removeprefix("mtp_mistakes."): one for one in figures}
    assert len(found) == len(figures)
    for case in bench_mtp_mistakes.cases():
        assert case.chunk == 512 or any(name.startswith(case.name + ".") for name in found)
    for name, one in found.items():
        if name.startswith(("right.", "positions_shifted.")):
            assert one.value == one.peer_value
    for name in ("ids_not_shifted.changed", "prefix_empty_64.changed_near"):
        assert found[name].value > 0.5
    assert found["chunk_tail_sampled_64.changed_near"].value > 0
