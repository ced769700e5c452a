# SPDX-License-Identifier: Apache-2.0
"""Training of draft heads: an engine runs trained heads, and a break in training changes no bit."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import write_tokenizer
from specops.engine import Engine, EngineConfig, SamplingParams, SpeculativeConfig
from test_draft_model import reported
from tokenizers import Tokenizer
from torch import Tensor

from tools.train import export
from tools.train.heads import HEADS, new_head, run_target
from tools.train.model import Model, ModelConfig, rope_cos_sin
from tools.train.train_heads import HeadRecipe, save_head, train_head

pytestmark = pytest.mark.slow

TEXTS = [[3 + i, 4, 9 * i + 5, 7] * (4 + i) + [11 * i % 97 + 1] * i for i in range(4)]


def greedy(count: int) -> SamplingParams:
    return SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True, logprobs=2)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Model]:
    directory = tmp_path_factory.mktemp("target")
    write_tokenizer(directory)
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    config = ModelConfig(vocab_size=160, hidden_size=64, num_hidden_layers=4, intermediate_size=96)
    model = Model(replace(config, initializer_range=0.2))
    model.reset(5)
    export.save_model(directory, model, tokenizer, 0)
    return directory, export.load_model(directory)[0]


@pytest.mark.parametrize("name", HEADS)
def test_engine_drafts_what_was_trained(
    target: tuple[Path, Model], tmp_path: Path, name: str
) -> None:
    directory, model = target
    torch.manual_seed(7)
    head = new_head(name, model)
    with torch.no_grad():  # so that no part has its initial value
        for one in head.parameters():
            one.copy_((one + 0.1 * torch.randn(one.shape)).bfloat16().float())
    save_head(tmp_path, head, 0)
    write_tokenizer(tmp_path)  # a draft model needs a tokenizer
    drafting = {"method": name, "model": str(tmp_path), "num_speculative_tokens": head.depth}
    engine = Engine(
        EngineConfig(
            model=str(directory),
            dtype="float32",
            max_num_seqs=4,
            max_num_batched_tokens=24,
            speculative_config=SpeculativeConfig.from_dict(drafting),
        )
    )
    params = replace(greedy(8), report_drafts=True)
    compared = 0
    for of_request in reported(engine, TEXTS, [params] * len(TEXTS)):
        for text, drafts in of_request:
            assert drafts == _chain(model, head, [*text, *drafts], len(drafts))
            compared += len(drafts)
    assert compared > 20 and not engine._drafting.num_failures


@torch.no_grad()
def _chain(model: Model, head: Any, text: Sequence[int], count: int) -> tuple[int, ...]:
    """Return the likeliest drafts at the end of a text, each conditional on the earlier ones."""
    tokens = torch.tensor([[*text, 0, 0, 0, 0, 0, 0]])
    target = run_target(model, tokens, *rope_cos_sin(tokens.shape[1], model.config, tokens.device))
    logits = head.chains(target, torch.tensor([len(text) - count - 2]))
    return tuple(int(one.argmax()) for one, _ in zip(logits, range(count), strict=False))


@pytest.mark.parametrize("name", ["eagle3", "dflash"])
def test_interrupted_training_changes_no_bit(
    target: tuple[Path, Model], tmp_path: Path, name: str
) -> None:
    """The target stays unchanged, and every part of the head changes."""
    model = target[1]
    before = [one.clone() for one in model.parameters()]
    texts = torch.randint(0, 160, (56, 24), generator=torch.Generator().manual_seed(2))
    recipe = HeadRecipe(steps=6, batch_texts=4, chains=8, warmup_steps=1)
    heads: list[list[Tensor]] = []
    for stops in ((6,), (3, 6)):
        out = tmp_path / str(len(stops))
        out.mkdir()
        for stop in stops:
            torch.manual_seed(1)
            head = new_head(name, model)
            train_head(head, model, texts, recipe, out, compile_head=False, last_step=stop)
        heads.append(list(head.parameters()))
    assert all(map(torch.equal, *heads))
    assert all(map(torch.equal, before, model.parameters()))
    torch.manual_seed(1)
    assert not any(map(torch.equal, heads[0], new_head(name, model).parameters()))
