# SPDX-License-Identifier: Apache-2.0
"""Distribution of whole texts whose drafts are drawn by a draft model or a trained head.

As in test_distribution_mtp.py, thousands of short texts with seeds of their own are compared with
the exact probabilities of their tokens.
"""

from pathlib import Path
from typing import Any, NamedTuple

import eagle_oracle
import pytest
import test_dflash
import test_eagle
import torch
from eagle_oracle import Head
from mtp_checkpoints import Tiny, save_checkpoint
from specops.engine import SpeculativeConfig
from test_distribution_mtp import (
    CHANGED,
    COOL,
    FEW_PAGES,
    FEW_ROWS,
    MIN_P_VALUE,
    VOCAB,
    WARM,
    Drafts,
    drafts,
    model_of,
    p_values,
    params,
    run,
    texts_of,
)
from test_lossless_mtp import make_engine, make_tiny

pytestmark = pytest.mark.ci

__all__ = ["drafts"]  # a fixture


class Heads(NamedTuple):
    """A target model, and the directories of its drafters."""

    target: Tiny
    directories: dict[str, Path]


@pytest.fixture(scope="module")
def heads(tmp_path_factory: pytest.TempPathFactory) -> Heads:
    sizes = {"vocab_size": VOCAB, "max_position_embeddings": 64}
    target = make_tiny(tmp_path_factory.mktemp("target"), 1, **sizes)
    smaller = make_tiny(tmp_path_factory.mktemp("smaller"), 1, **sizes, num_hidden_layers=1)
    for name in ("model.embed_tokens.weight", "lm_head.weight"):  # so that both models mostly agree
        smaller.tensors[name] = target.tensors[name]
    save_checkpoint(smaller.directory, smaller.config, smaller.tensors)
    eagle = tmp_path_factory.mktemp("eagle")
    first = tmp_path_factory.mktemp("first")  # EAGLE-1
    parallel, second = (tmp_path_factory.mktemp(name) for name in ("parallel", "second"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(eagle_oracle, "VOCAB", VOCAB)
        patch.setattr(test_eagle, "VOCAB", VOCAB)
        head = Head(entered=(1, 2), draft_vocab=VOCAB - 4)
        head.tensors["lm_head.weight"] *= 0.2  # nearly flat, so that any draft may be accepted
        eagle_oracle.write(eagle, head, "modelopt")
        head = Head(entered=(1, 2), draft_vocab=VOCAB - 4, mask=5)
        head.tensors["lm_head.weight"] *= 0.2
        eagle_oracle.write(parallel, head, "speculators")
        own = test_eagle.Head(fc_bias=False, own_embedding=False)
        # The next token depends mostly on the last one, through the target's LM head.
        width = torch.eye(eagle_oracle.WIDTH)
        own.tensors["fc.weight"] = torch.cat([width, 0.3 * width], dim=1)
        for name in ("self_attn.o_proj", "mlp.down_proj"):
            own.tensors[f"layers.0.{name}.weight"] *= 0.2
        own.write(first)
        for name, value in (("VOCAB", VOCAB), ("MASK", VOCAB - 1)):
            patch.setattr(test_dflash, name, value)
        block = test_dflash.Block(left=(0, 1), second=test_dflash.SECOND)
        block.tensors["norm.weight"] *= 0.2
        block.write(second, num_target_layers=target.config["num_hidden_layers"])
    directories = {"draft_model": smaller.directory, "eagle3": eagle, "eagle": first}
    return Heads(target, {**directories, "peagle": parallel, "dflash2": second})


class Trial(NamedTuple):
    method: str
    strategy: str
    filters: dict[str, Any]
    limits: dict[str, Any]


TRIALS = [
    Trial("draft_model", "rejection", {}, FEW_ROWS),
    Trial("draft_model+suffix", "rejection", {}, FEW_PAGES),
    Trial("draft_model", "block", COOL, FEW_PAGES),
    Trial("eagle3", "rejection", COOL, FEW_PAGES),
    Trial("eagle3", "block", WARM, {}),
    Trial("eagle", "rejection", {}, FEW_PAGES),
    Trial("eagle", "block", COOL, FEW_PAGES),
    Trial("peagle", "rejection", {}, FEW_PAGES),
    Trial("peagle", "block", WARM, FEW_ROWS),
    Trial("dflash2", "rejection", WARM, FEW_ROWS),
    Trial("dflash2", "block", {}, FEW_PAGES),
    Trial("draft_model", "rejection", CHANGED, FEW_ROWS),
    Trial("draft_model", "block", CHANGED, FEW_PAGES),
]


METHODS = {"peagle": "eagle3", "dflash2": "dflash"}  # heads whose method has another name


def p_values_of(heads: Heads, trial: Trial, count: int, k: int) -> dict[str, float]:
    speculative = SpeculativeConfig.from_dict(
        {
            "method": METHODS.get(trial.method, trial.method),
            "model": str(heads.directories[trial.method.split("+")[0]]),
            "num_speculative_tokens": k,
            "verify_strategy": trial.strategy,
        }
    )
    engine = make_engine(heads.target, speculative, **{"max_num_seqs": 64, **trial.limits})
    done = run(engine, range(count), lambda index: params(index, trial.filters))
    spec = engine.stats.speculative
    assert spec.num_accepted_tokens_per_pos[0] > spec.num_drafts / 20
    assert (engine.stats.num_preemptions > 0) == ("num_pages" in trial.limits)
    assert not engine._drafting.num_failures
    return p_values(model_of(heads.target), texts_of(done), trial.filters)


@pytest.mark.parametrize("trial", TRIALS, ids=str)
@pytest.mark.fast(
    "*'draft_model', *filters={}*",
    "*'draft_model+suffix', *",
    "*'eagle3', *'rejection'*",
    "*'eagle', *filters={}*",
    "*'block', *logit_bias*",
)
def test_texts_follow_the_target(heads: Heads, trial: Trial, drafts: Drafts) -> None:
    found = p_values_of(heads, trial, 400, 3)
    if "+" not in trial.method:  # drafts of several methods are the likeliest tokens
        found["drafts"] = drafts.p_value()
    assert min(found.values()) > MIN_P_VALUE, found


@pytest.mark.slow
@pytest.mark.parametrize("k", [1, 4])  # the DFlash head makes four drafts
@pytest.mark.parametrize("trial", TRIALS, ids=str)
def test_more_texts_follow_the_target(heads: Heads, trial: Trial, k: int, drafts: Drafts) -> None:
    found = p_values_of(heads, trial, 3000, k)
    if "+" not in trial.method:
        found["drafts"] = drafts.p_value()
    assert min(found.values()) > MIN_P_VALUE, found
