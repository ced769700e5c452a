# SPDX-License-Identifier: Apache-2.0
"""The reason to exist: with speculation on, every token and every logprob bit is plain decoding's.

Fifty prompts on the bundled bf16 model, in several arrival orders, batch and chunk sizes, with and
without preemption. Each comparison also asserts that drafts were accepted and rejected.
"""

import json
import random
import struct
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
from specops.engine import Completion, Engine, EngineConfig, SamplingParams, SpeculativeConfig

PROMPTS = Path(__file__).resolve().parent.parent / "bench" / "prompts"
NUM_PROMPTS, NUM_TOKENS = 50, 128


@lru_cache
def prompts() -> list[str]:
    edits = json.loads((PROMPTS / "edits.json").read_text())
    completions = json.loads((PROMPTS / "completions.json").read_text())
    texts = [entry["text"] for entry in [*edits, *completions]]
    return texts[:NUM_PROMPTS]


def params(index: int, temperature: float) -> SamplingParams:
    return SamplingParams(
        max_tokens=NUM_TOKENS,
        temperature=temperature,
        top_p=1.0 if index % 2 else 0.95,
        top_k=0 if index % 3 else 50,
        min_p=0.02 if index % 5 == 0 else 0.0,
        seed=index * 0x9E3779B97F4A7C15 % 2**64,
        ignore_eos=True,
        logprobs=2,
    )


def run(
    method: str, temperature: float, order: list[int], **config: Any
) -> tuple[dict[int, Completion], Engine]:
    # Greedy text repeats itself: there, more and bolder drafts, so that plenty of them are wrong.
    drafting = {"num_speculative_tokens": 4} if method != "naive" else {}
    if drafting and temperature == 0:
        drafting = {"num_speculative_tokens": 6, "min_ngram_size": 1}
    engine = Engine(
        EngineConfig(
            device="cpu",
            speculative_config=SpeculativeConfig(method=method, **drafting),
            **config,
        )
    )
    texts = prompts()
    done = engine.generate([texts[i] for i in order], [params(i, temperature) for i in order])
    assert engine.num_running == engine.num_waiting == 0
    assert engine.num_free_pages == engine.num_pages
    return dict(zip(order, done, strict=True)), engine


def bits(completion: Completion) -> list[Any]:
    def pack(value: float) -> bytes:
        return struct.pack("<f", value)

    return [
        (one.token_id, pack(one.logprob), [(i, pack(p)) for i, p in one.alternatives])
        for one in completion.logprobs
    ]


@lru_cache
def plain(temperature: float) -> dict[int, Completion]:
    """One prompt at a time, no speculation, the whole prompt in one chunk."""
    done, _ = run(
        "naive",
        temperature,
        list(range(NUM_PROMPTS)),
        max_num_seqs=1,
        max_num_batched_tokens=1024,
        enable_prefix_caching=False,
    )
    return done


def shuffled(seed: int) -> list[int]:
    order = list(range(NUM_PROMPTS))
    random.Random(seed).shuffle(order)
    return order


CONFIGS: list[dict[str, Any]] = [
    {"max_num_seqs": 1, "max_num_batched_tokens": 512},
    {"max_num_seqs": 7, "max_num_batched_tokens": 16, "page_size": 32},
    {"max_num_seqs": 32, "max_num_batched_tokens": 512, "num_threads": 2},
    {"max_num_seqs": 16, "max_num_batched_tokens": 512, "num_pages": 96, "page_size": 16},
]


@pytest.mark.parametrize(
    "config", CONFIGS, ids=["alone", "chunks of 16", "32 at once", "preempted"]
)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_ngram_gives_what_naive_gives(temperature: float, config: dict[str, Any]) -> None:
    expected = plain(temperature)
    got, engine = run("ngram", temperature, shuffled(len(CONFIGS)), **config)
    different = [i for i in expected if got[i].token_ids != expected[i].token_ids]
    assert different == []
    different = [i for i in expected if bits(got[i]) != bits(expected[i])]
    assert different == []
    assert all(got[i].text == expected[i].text for i in expected)
    # An equality that nothing exercised proves nothing.
    spec = engine.stats.speculative
    accepted = spec.num_accepted_tokens / spec.num_draft_tokens
    assert 0.2 <= accepted <= 0.8, f"acceptance {accepted:.2f}"
    if "num_pages" in config:
        assert engine.stats.num_preemptions >= 1


def test_rejecting_everything_changes_nothing() -> None:
    speculative = SpeculativeConfig(
        method="ngram", num_speculative_tokens=7, accept_policy="reject_all", min_ngram_size=1
    )
    engine = Engine(EngineConfig(device="cpu", speculative_config=speculative))
    order = shuffled(3)[:10]
    done = engine.generate([prompts()[i] for i in order], [params(i, 0.8) for i in order])
    assert engine.stats.speculative.num_draft_tokens > 100
    assert engine.stats.speculative.num_accepted_tokens == 0
    assert [bits(c) for c in done] == [bits(plain(0.8)[i]) for i in order]


def test_a_request_may_choose_its_own_method_and_greedy_strategy() -> None:
    speculative = SpeculativeConfig(method="naive")
    engine = Engine(EngineConfig(device="cpu", speculative_config=speculative))
    order = list(range(8))
    own = {"method": "ngram", "num_speculative_tokens": 9, "verify_strategy": "greedy"}
    done = engine.generate(
        [prompts()[i] for i in order], [params(i, 0.8) for i in order], speculative_config=own
    )
    # `greedy` treats the request as temperature 0.
    assert [bits(c) for c in done] == [bits(plain(0.0)[i]) for i in order]
    assert engine.stats.speculative.num_accepted_tokens > 0


@pytest.mark.prove
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_every_instruction_set_and_thread_count(isa: str, temperature: float, dtype: str) -> None:
    """The promise holds on each instruction set, not only on the best one of this machine."""
    order = list(range(0, NUM_PROMPTS, 5))
    texts, each = [prompts()[i] for i in order], [params(i, temperature) for i in order]
    outputs = []
    for method, config in (
        ("naive", {"max_num_seqs": 1, "num_threads": 1, "max_num_batched_tokens": 1024}),
        ("ngram", {"max_num_seqs": 10, "num_threads": 2, "max_num_batched_tokens": 48}),
        ("ngram", {"max_num_seqs": 4, "num_threads": 3, "page_size": 64}),
    ):
        drafting = {"num_speculative_tokens": 5} if method == "ngram" else {}
        speculative = SpeculativeConfig(method=method, **drafting)
        engine = Engine(
            EngineConfig(device="cpu", speculative_config=speculative, dtype=dtype, **config)
        )
        outputs.append([bits(done) for done in engine.generate(texts, each)])
    assert outputs[1] == outputs[0]
    assert outputs[2] == outputs[0]
