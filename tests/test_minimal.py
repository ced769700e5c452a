# SPDX-License-Identifier: Apache-2.0
"""The minimal engine gives the tokens and logprob bits of the serving engine."""

import random
from functools import lru_cache
from pathlib import Path

import pytest
import torch
from specops.engine import Engine, EngineConfig, SamplingParams, SpeculativeConfig
from specops.minimal import BUNDLED, MinimalEngine, Request, main


def requests(count: int, seed: int) -> list[Request]:
    """Return random requests, greedy and seeded; some repeat themselves, so that n-grams match."""
    draw = random.Random(seed)
    made = []
    for number in range(count):
        prompt = draw.choices(range(1, 4096), k=draw.randint(1, 90))
        if number % 2:
            prompt = (prompt[:7] * 14)[: draw.randint(2, 90)]
        made.append(Request(prompt, draw.randint(1, 30), draw.choice([0.0, 0.0, 0.7, 1.2]), number))
    return made


@lru_cache(maxsize=1)
def serving_engine() -> Engine:
    config = SpeculativeConfig(method="ngram", num_speculative_tokens=4)
    return Engine(EngineConfig(device="cpu", num_pages=512, speculative_config=config))


def expected(made: list[Request]) -> list[tuple[list[int], list[float]]]:
    """Return the tokens and logprobs of plain decoding in the serving engine."""
    parameters = [
        SamplingParams(
            max_tokens=one.max_tokens, temperature=one.temperature, seed=one.seed, logprobs=0
        )
        for one in made
    ]
    completions = serving_engine().generate(
        [one.prompt for one in made], parameters, speculative_config={"method": "naive"}
    )
    return [(one.token_ids, [each.logprob for each in one.logprobs]) for one in completions]


@pytest.mark.fast("24-*")
@pytest.mark.parametrize("method,drafts", [("ngram", 0), ("ngram", 4), ("mtp", 1), ("mtp", 3)])
@pytest.mark.parametrize("count", [24, 250])
def test_tokens_and_logprob_bits_are_those_of_the_serving_engine(
    count: int, method: str, drafts: int
) -> None:
    made = requests(count, seed=count)
    engine = MinimalEngine(method=method, num_drafts=drafts, num_slots=5, num_pages=40, chunk=24)
    list(engine.generate(made))
    assert [(one.token_ids, one.logprobs) for one in made] == expected(made)
    assert sorted(engine.free_pages) == list(range(40)), "every page is free again"
    num_tokens = sum(len(one.token_ids) for one in made)
    if drafts:
        plain = MinimalEngine(num_drafts=0, num_slots=5, num_pages=40, chunk=24)
        list(plain.generate(requests(count, seed=count)))
        assert engine.num_steps < plain.num_steps and num_tokens, "drafts are accepted"


def test_mtp_drafts_are_those_of_the_serving_engine() -> None:
    """Both engines accept the same number of drafts."""
    prompt = [300, 12, 77, 5, 300, 12]
    minimal = MinimalEngine(method="mtp", num_drafts=3)
    list(minimal.generate([Request(prompt, 60)]))
    serving = Engine(
        EngineConfig(
            device="cpu",
            num_pages=64,
            speculative_config=SpeculativeConfig(method="mtp", num_speculative_tokens=3),
        )
    )
    (completion,) = serving.generate([prompt], SamplingParams(max_tokens=60, temperature=0.0))
    assert completion.stats.num_steps == minimal.num_steps


@pytest.mark.parametrize(
    "options,message",
    [
        ({"method": "eagle"}, "method must be ngram or mtp, got 'eagle'"),
        ({"max_len": 8}, "at most 8 together, got 4 and 64"),
        ({"num_pages": 3}, "at most 48 together, got 4 and 64"),
    ],
)
def test_invalid_options_and_long_requests_are_refused(
    options: dict[str, object], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        MinimalEngine(**options).add(Request([1, 2, 3, 4]))  # type: ignore[arg-type]


def test_unsupported_models_are_refused(tmp_path: Path) -> None:
    config = (BUNDLED / "config.json").read_text().replace("Qwen3ForCausalLM", "GPT2LMHeadModel")
    (tmp_path / "config.json").write_text(config)
    with pytest.raises(ValueError, match="got GPT2LMHeadModel"):
        MinimalEngine(tmp_path)


def test_command_streams_a_text(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--max-tokens", "12", "def add(a, b):"])
    printed = capsys.readouterr().out
    assert "12 tokens in" in printed and len(printed) > 30
    main(["--max-tokens", "4", "--method", "mtp", "def add(a, b):", "class Stack:"])
    assert "8 tokens in" in capsys.readouterr().out
    assert torch.get_num_threads()
