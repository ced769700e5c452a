# SPDX-License-Identifier: Apache-2.0
"""Whole engines: what specops keeps equal, what vLLM's own kernels do not, and what is refused."""

import random
from typing import Any

import pytest
from campaign import METHODS, joined, params_of, prompts_of, runs_of
from specops.vllm.decoding import Decoded, DecodingError, Job, Run, decode
from specops.vllm.exactness import compare
from specops.vllm.settings import EXACT, PARTS

ENGINE = {"enforce_eager": True, "max_model_len": 512, "max_num_seqs": 32}


def engine(model: str, **more: Any) -> dict[str, Any]:
    return ENGINE | {"model": model, "enable_prefix_caching": False} | more


def small(count: int = 24, max_tokens: int = 24) -> tuple[list[list[int]], list[dict[str, Any]]]:
    """Prompts and parameters, every kind of them."""
    chance = random.Random(3)
    prompts = prompts_of(count, chance)
    return prompts, [params_of(index, max_tokens, chance) for index in range(count)]


@pytest.fixture(scope="module")
def alone(llama: str) -> Decoded:
    """Every prompt, plainly and alone."""
    return decode(Job(engine(llama), [Run(*small(), 1)], EXACT))[0]


@pytest.mark.parametrize("method", METHODS)
def test_no_method_and_no_batch_changes_a_bit(llama: str, alone: Decoded, method: str) -> None:
    config = METHODS[method]
    more: dict[str, Any] = {"enable_prefix_caching": True, "max_num_batched_tokens": 64}
    if config:
        more["speculative_config"] = config | {"num_speculative_tokens": 5}
    whole = joined(decode(Job(engine(llama, **more), runs_of(*small(), 5), EXACT)))
    assert sum(map(len, whole.token_ids)) > 300
    assert whole.token_ids == alone.token_ids
    assert whole.logprobs == alone.logprobs


def test_vllm_s_own_kernels_do(llama: str) -> None:
    """The control: the same comparison notices a difference where there is one."""
    prompts, params = small()
    greedy = [one | {"temperature": 0.0} for one in params]
    runs = [Run(prompts, greedy, 1), Run(prompts, greedy, 24)]
    base, whole = decode(Job(engine(llama), runs, ""))
    assert compare(base, whole, "vllm", "plain", 24, 0.0).logprobs > 0


def test_preemption_changes_no_bit(llama: str, alone: Decoded) -> None:
    """A cache with room for a few requests only."""
    config = METHODS["junk"] | {"num_speculative_tokens": 5}
    tight = engine(
        llama, num_gpu_blocks_override=7, speculative_config=config, disable_log_stats=False
    )
    whole = decode(Job(tight, [Run(*small(), 24, 1)], EXACT))[0]
    assert whole.num_preemptions > 0
    assert whole.token_ids == alone.token_ids
    assert whole.logprobs == alone.logprobs


def test_every_parameter_rides_on_speculation(bundled: str) -> None:
    """Bad words, allowed tokens, minimum lengths and processed logprobs, plain and with drafts."""
    chance = random.Random(9)
    prompts = prompts_of(8, chance)
    more: list[dict[str, Any]] = [
        {"allowed_token_ids": list(range(5, 400))},
        {"min_tokens": 20, "stop_token_ids": list(range(100, 300))},
        {"bad_words": ["def", "the return"]},
        {"repetition_penalty": 1.3, "frequency_penalty": -0.5},
        {"presence_penalty": 1.0, "top_k": 7},
        {"top_p": 0.6, "temperature": 1.5},
        {"stop_token_ids": list(range(300, 400))},
        {"temperature": 0.0, "repetition_penalty": 0.8},
    ]
    params = [
        {"temperature": 0.9, "seed": index, "max_tokens": 32, "logprobs": 2} | own
        for index, own in enumerate(more)
    ]
    mode = {"logprobs_mode": "processed_logprobs"}
    plain = decode(Job(engine(bundled, **mode), [Run(prompts, params, 1)], EXACT))[0]
    config = METHODS["junk"] | {"num_speculative_tokens": 4}
    drafted = engine(bundled, speculative_config=config, **mode)
    whole = decode(Job(drafted, [Run(prompts, params, 8, 2)], EXACT))[0]
    assert whole.token_ids == plain.token_ids
    assert whole.logprobs == plain.logprobs
    assert all(5 <= token < 400 for token in plain.token_ids[0])
    assert len(plain.token_ids[1]) >= 20


def test_predictions_are_accepted(bundled: str) -> None:
    """An output that was said before is said again in far fewer steps, and in the same tokens."""
    prompts, _ = small(4)
    params: list[dict[str, Any]] = [{"temperature": 0.0, "max_tokens": 48}] * 4
    plain = decode(Job(engine(bundled), [Run(prompts, params, 4)], EXACT))[0]
    predicted = [
        one | {"extra_args": {"prediction_token_ids": said}}
        for one, said in zip(params, plain.token_ids, strict=True)
    ]
    config = {
        "method": "custom_class",
        "model": "specops.vllm.PredictedOutputs",
        "num_speculative_tokens": 8,
    }
    drafted = engine(bundled, speculative_config=config)
    whole = decode(Job(drafted, [Run(prompts, predicted, 4)], EXACT))[0]
    assert whole.token_ids == plain.token_ids
    assert whole.steps < plain.steps / 3


def test_a_request_without_a_seed_gets_one(bundled: str) -> None:
    prompts, _ = small(6)
    params: list[dict[str, Any]] = [{"temperature": 1.0, "max_tokens": 16}] * 6
    runs = [Run([prompts[0]] * 6, params, 6)]
    first = decode(Job(engine(bundled), runs, EXACT))[0]
    assert len({tuple(text) for text in first.token_ids}) > 1  # one of their own each


@pytest.mark.parametrize(
    "more, sentence",
    [
        ({"enforce_eager": False}, "cannot be exact with compilation (start with --enforce-eager)"),
        ({"logprobs_mode": "raw_logits"}, "cannot be exact with logprobs_mode raw_logits"),
        ({"dtype": "float16"}, "linear takes a matrix of bfloat16 or float32"),
        ({"kv_cache_dtype": "fp8"}, "attention does not have a cache dtype fp8"),
        ({"enable_lora": True}, "LoRA"),
    ],
)
def test_what_cannot_be_exact_is_refused(bundled: str, more: dict[str, Any], sentence: str) -> None:
    with pytest.raises(DecodingError) as error:
        decode(Job(engine(bundled, **more), [Run([[1, 2]], [{"max_tokens": 2}], 1)], EXACT))
    assert sentence in str(error.value)


def test_parameters_that_cannot_be_carried_out_are_refused(bundled: str) -> None:
    params = {"max_tokens": 2, "thinking_token_budget": 5}
    with pytest.raises(DecodingError, match="sampling cannot carry out thinking_token_budget"):
        decode(Job(engine(bundled), [Run([[1, 2]], [params], 1)], EXACT))


def test_parts_alone_are_not_refused(bundled: str) -> None:
    """Each part of SPECOPS_VLLM runs by itself."""
    prompts, params = small(4, 8)
    for part in PARTS:
        whole = decode(Job(engine(bundled), [Run(prompts, params, 4)], part))[0]
        assert all(whole.token_ids)
