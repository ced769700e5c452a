# SPDX-License-Identifier: Apache-2.0

"""Log-probabilities of prompts: the bits of plain decoding in any steps."""

import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import make_checkpoint, write_tokenizer
from fake_gpu import FakeGpu
from mtp_checkpoints import make_mtp_model
from specops.engine import (
    Completion,
    ContextOverflow,
    Engine,
    EngineConfig,
    SamplingParams,
    SpeculativeConfig,
    TokenLogprob,
)

NAIVE = SpeculativeConfig(method="naive")
NGRAM = SpeculativeConfig.from_dict(
    {"method": "ngram", "num_speculative_tokens": 4, "min_ngram_size": 1}
)
MTP = SpeculativeConfig(method="mtp", num_speculative_tokens=3)
PROMPTS = [[7, 8, 9] * 6, [5, 6, 7, 5, 6, 7, 5], list(range(1, 50)), [3, 4], [11, 12] * 20]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_mtp_model(tmp_path_factory.mktemp("model"))


def make(model_dir: Path, speculative: SpeculativeConfig = NAIVE, **options: Any) -> Engine:
    options.setdefault("device", "cpu")
    return Engine(EngineConfig(model=str(model_dir), speculative_config=speculative, **options))


def bits(logprobs: Sequence[TokenLogprob | None]) -> list[Any]:
    def pack(value: float) -> bytes:
        return struct.pack("<f", value)

    return [
        one
        and (
            one.token_id,
            pack(one.logprob),
            one.rank,
            [(token_id, pack(value)) for token_id, value in one.alternatives],
        )
        for one in logprobs
    ]


def texts(engine: Engine, **params: Any) -> list[Completion]:
    """Return the completions of the prompts, with the logprob of every token."""
    each = [
        SamplingParams(max_tokens=30, seed=i, logprobs=i, ignore_eos=True, **params)
        for i in range(len(PROMPTS))
    ]
    return engine.generate(PROMPTS, each)


def scores(engine: Engine, done: list[Completion], **params: Any) -> list[Completion]:
    """Score the same texts as prompts."""
    each = [
        SamplingParams(prompt_logprobs=i, **{"max_tokens": 0, **params}) for i in range(len(done))
    ]
    return engine.generate([one.prompt_token_ids + one.token_ids for one in done], each)


def found(completion: Completion) -> Sequence[TokenLogprob | None]:
    assert completion.prompt_logprobs is not None
    return completion.prompt_logprobs


def test_prompt_logprobs_equal_those_of_generated_tokens(model_dir: Path) -> None:
    engine = make(model_dir)
    done = texts(engine, temperature=0)
    for one, scored in zip(done, scores(engine, done), strict=True):
        assert (scored.token_ids, scored.text, scored.finish_reason) == ([], "", "length")
        logprobs = found(scored)
        assert len(logprobs) == len(scored.prompt_token_ids) and logprobs[0] is None
        assert bits(logprobs)[len(one.prompt_token_ids) :] == bits(one.logprobs)
    assert engine.num_free_pages == engine.num_pages


@pytest.mark.parametrize(
    "filters", [{}, {"top_k": 20, "top_p": 0.8, "min_p": 0.01}, {"typical_p": 0.7}]
)
def test_processed_prompt_logprobs_equal_those_of_generated_tokens(
    model_dir: Path, filters: dict[str, Any]
) -> None:
    engine = make(model_dir, logprobs_mode="processed_logprobs")
    params = {"temperature": 0.8, **filters}
    done = texts(engine, **params)
    for one, scored in zip(done, scores(engine, done, **params), strict=True):
        assert bits(found(scored))[len(one.prompt_token_ids) :] == bits(one.logprobs)


def test_output_constraints_do_not_affect_prompt_logprobs(model_dir: Path) -> None:
    engine = make(model_dir, logprobs_mode="processed_logprobs")
    (plain,) = engine.generate([PROMPTS[2]], SamplingParams(max_tokens=0, prompt_logprobs=2))
    own = {"allowed_token_ids": (5,), "logit_bias": {7: 5.0}, "repetition_penalty": 1.5}
    (other,) = engine.generate([PROMPTS[2]], SamplingParams(max_tokens=2, prompt_logprobs=2, **own))
    assert bits(found(other)) == bits(found(plain))


@pytest.mark.parametrize(
    ("speculative", "options"),
    [
        (NAIVE, {"max_num_seqs": 1}),
        (NAIVE, {"max_num_seqs": 3, "max_num_batched_tokens": 7, "page_size": 32}),
        (NGRAM, {"max_num_seqs": 5, "max_num_batched_tokens": 16}),
        (MTP, {"max_num_seqs": 5, "max_num_batched_tokens": 33, "num_threads": 2}),
        (NGRAM, {"max_num_seqs": 5, "max_num_batched_tokens": 16, "num_pages": 17}),
        (MTP, {"max_num_seqs": 5, "enable_prefix_caching": False}),
    ],
)
def test_prompt_logprobs_have_the_same_bits_in_any_steps(
    model_dir: Path, speculative: SpeculativeConfig, options: dict[str, Any]
) -> None:
    """Cover chunks, batches, drafts of other requests, preemption and cached pages."""
    plain = make(model_dir)
    done = texts(plain, temperature=0)
    expected = [bits(found(one)) for one in scores(plain, done)]
    options = {"max_model_len": 256, **options}
    engine = make(model_dir, speculative, **options)
    texts(engine, temperature=0)  # fills the prefix cache
    hits = engine.stats.prefix_cache_hits
    for generated in (0, 25):
        others = [
            engine.add_request(prompt, SamplingParams(max_tokens=60, seed=9, ignore_eos=True))
            for prompt in PROMPTS[:2]
        ]
        hits = engine.stats.prefix_cache_hits
        again = scores(engine, done, max_tokens=generated, ignore_eos=True)
        assert [bits(found(one)) for one in again] == expected
        assert all(one.num_cached_tokens == 0 for one in again)
        assert engine.stats.prefix_cache_hits - hits <= 32  # only of the other requests
        for name in others:
            engine.abort(name)
    assert engine.num_free_pages == engine.num_pages
    if "num_pages" in options:
        assert engine.stats.num_preemptions > 0


def test_few_rows_at_a_time_change_no_bit(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = make(model_dir)
    done = texts(plain, temperature=0)
    expected = [bits(found(one)) for one in scores(plain, done)]
    logits = []
    for rows in (2, 3, 10):
        monkeypatch.setattr("specops.engine.prompt_logprobs._MAX_LOGITS_BYTES", rows * 4 * 257)
        engine = make(model_dir)
        call = engine._runner._prompt_scorer._model.logits
        monkeypatch.setattr(
            engine._runner._prompt_scorer._model,
            "logits",
            lambda hidden, call=call, **options: (
                logits.append(len(hidden)) or call(hidden, **options)
            ),
        )
        assert [bits(found(one)) for one in scores(engine, done)] == expected
        assert max(logits) == rows
        logits.clear()


@pytest.mark.parametrize("captures", [False, True])
def test_prompt_logprobs_are_the_same_on_a_fake_gpu(
    model_dir: Path, use_fake_gpu: Callable[..., FakeGpu], captures: bool
) -> None:
    plain = make(model_dir)
    done = texts(plain, temperature=0)
    expected = [bits(found(one)) for one in scores(plain, done)]
    use_fake_gpu(captures=captures)
    engine = make(model_dir, NGRAM, max_num_seqs=3, max_num_batched_tokens=32)
    texts(engine, temperature=0)
    again = scores(engine, done, max_tokens=9, ignore_eos=True)
    assert [bits(found(one)) for one in again] == expected
    assert (engine.num_captures > 0) == captures


def test_prompt_logprobs_equal_those_of_transformers(tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path, "Llama", num_hidden_layers=2)
    write_tokenizer(tmp_path)
    engine = make(tmp_path, dtype="float32")
    params = SamplingParams(max_tokens=0, prompt_logprobs=4)
    for scored in engine.generate(PROMPTS, params):
        prompt = torch.tensor(scored.prompt_token_ids)
        with torch.no_grad():
            want = torch.log_softmax(model(prompt[None]).logits[0].double(), -1)
        for row, one in enumerate(found(scored)[1:]):
            assert one is not None and one.token_id == prompt[row + 1]
            assert one.logprob == pytest.approx(float(want[row, one.token_id]), abs=2e-4)
            top = want[row].topk(4)
            assert [value for _, value in one.alternatives] == pytest.approx(
                top.values.tolist(), abs=2e-4
            )
            better = int((want[row] > want[row, one.token_id] + 4e-4).sum())
            most = int((want[row] > want[row, one.token_id] - 4e-4).sum())
            assert 1 + better <= one.rank <= most


def test_prompt_may_have_no_output(model_dir: Path) -> None:
    """Such a prompt may fill the context; it has no drafts, and its pages are cached."""
    engine = make(model_dir, MTP, max_model_len=64)
    prompt = [*range(1, 65)]
    (full,) = engine.generate([prompt], SamplingParams(max_tokens=0, prompt_logprobs=0))
    assert len(found(full)) == 64 and full.token_ids == []
    with pytest.raises(ContextOverflow):
        engine.generate([prompt], SamplingParams(max_tokens=1))
    with pytest.raises(ContextOverflow):
        engine.generate([[*prompt, 1]], SamplingParams(max_tokens=0))
    (one,) = engine.generate([[5]], SamplingParams(max_tokens=0, prompt_logprobs=3))
    assert list(found(one)) == [None]
    (warm,) = engine.generate([prompt[:40]], SamplingParams(max_tokens=0))
    assert warm.prompt_logprobs is None and warm.num_cached_tokens == 32
    assert engine.stats.generation_tokens == 0 and engine.num_free_pages == engine.num_pages


def test_first_output_has_the_prompt_logprobs(model_dir: Path) -> None:
    engine = make(model_dir, NGRAM)
    name = engine.add_request(
        PROMPTS[0], SamplingParams(max_tokens=20, prompt_logprobs=1, ignore_eos=True)
    )
    outputs = []
    while engine.has_unfinished():
        outputs += engine.step()
    has_logprobs = [one.prompt_logprobs is not None for one in outputs]
    assert has_logprobs == [True] + [False] * (len(outputs) - 1) and len(outputs) > 1
    assert outputs[0].prompt_logprobs == engine.completion(name).prompt_logprobs


def test_invalid_prompt_logprobs_are_refused(model_dir: Path) -> None:
    for count in (-1, 101, 1.5, True):
        with pytest.raises(ValueError, match=r"^prompt_logprobs must be "):
            SamplingParams(prompt_logprobs=count)  # type: ignore[arg-type]


def test_prompt_logprobs_are_at_most_the_vocabulary(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "Llama", num_hidden_layers=1, vocab_size=40)
    write_tokenizer(tmp_path, 40)
    engine = make(tmp_path, dtype="float32")
    with pytest.raises(ValueError, match="prompt_logprobs must be at most the vocabulary's 40"):
        engine.add_request([1], SamplingParams(prompt_logprobs=41))
