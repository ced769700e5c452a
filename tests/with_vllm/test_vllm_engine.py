# SPDX-License-Identifier: Apache-2.0
"""Whole engines in vLLM: outputs that specops keeps equal, vLLM's own kernels, and refusals."""

import json
import os
import random
import re
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from campaign import METHODS, RUNNER, joined, prompts_of, runs_of, small
from forked import decode
from models import QUANTIZED, write_config, write_quantized, write_random
from specops.integrations.vllm.decoding import Decoded, DecodingError, Job, Run
from specops.integrations.vllm.exactness import compare
from specops.integrations.vllm.settings import EXACT, PARTS

ENGINE = {"enforce_eager": True, "max_model_len": 512, "max_num_seqs": 32}


def engine(model: str, **more: Any) -> dict[str, Any]:
    return ENGINE | {"model": model, "enable_prefix_caching": False} | more


@pytest.fixture(scope="module")
def alone(llama: str) -> Decoded:
    """Decode every prompt alone and without drafts."""
    return decode(Job(engine(llama), [Run(*small(), 1)], EXACT))[0]


def graphs_in(cache: Path) -> list[Path]:
    """Return vLLM's compiled graphs."""
    return list(cache.glob("**/rank_0_0/model"))


@pytest.mark.parametrize("runner", ["0", "1"])
@pytest.mark.parametrize("method", METHODS)
def test_no_method_and_no_batch_changes_a_bit(
    llama: str, alone: Decoded, method: str, runner: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both model runners of vLLM have the same bits."""
    monkeypatch.setenv(RUNNER, runner)
    config = METHODS[method]
    more: dict[str, Any] = {"enable_prefix_caching": True, "max_num_batched_tokens": 64}
    if config:
        more["speculative_config"] = config | {"num_speculative_tokens": 5}
    whole = joined(decode(Job(engine(llama, **more), runs_of(*small(), 5), EXACT)))
    assert sum(map(len, whole.token_ids)) > 300
    assert whole.token_ids == alone.token_ids
    assert whole.logprobs == alone.logprobs


@pytest.mark.parametrize("method, runner", [("plain", "0"), ("junk", "0"), ("junk", "1")])
def test_compiled_model_has_the_bits_of_eager(
    llama: str,
    alone: Decoded,
    method: str,
    runner: str,
    compiled: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(RUNNER, runner)
    more: dict[str, Any] = {"enforce_eager": False, "max_num_batched_tokens": 64}
    if METHODS[method]:
        more["speculative_config"] = METHODS[method] | {"num_speculative_tokens": 5}
    whole = joined(decode(Job(engine(llama, **more), runs_of(*small(), 5), EXACT)))
    assert graphs_in(compiled)
    assert whole.token_ids == alone.token_ids
    assert whole.logprobs == alone.logprobs


def test_stored_compilations_of_vllm_are_not_mixed_up(tmp_path: Path, compiled: Path) -> None:
    """No run uses the graph of other parts, or the weights of an earlier model."""
    model = write_random(tmp_path / "model", "qwen2")
    how = {"enforce_eager": False, "compilation_config": {"custom_ops": ["all"]}}
    runs = [Run(*small(4, 8), 4)]
    for parts, count in (("", 1), (EXACT, 2)):
        decode(Job(engine(model, **how), runs, parts))
        assert len(graphs_in(compiled)) == count
    write_random(tmp_path / "model", "qwen2", seed=1)
    again = decode(Job(engine(model, **how), runs, EXACT))[0]
    assert len(graphs_in(compiled)) == 2
    eager = decode(Job(engine(model), runs, EXACT))[0]
    assert again.token_ids == eager.token_ids
    assert again.logprobs == eager.logprobs


@pytest.mark.parametrize(
    "family, ops", [("granite", "aten::mul"), ("glm4_moe", "aten::mul, aten::add")]
)
def test_compiled_model_that_computes_itself_is_refused(
    family: str, ops: str, tmp_path: Path, compiled: Path
) -> None:
    model = write_random(tmp_path / family, family)
    runs = [Run(*small(2, 4), 2)]
    assert all(decode(Job(engine(model), runs, EXACT))[0].token_ids)
    with pytest.raises(DecodingError, match=f"a model that computes {ops}"):
        decode(Job(engine(model, enforce_eager=False), runs, EXACT))
    assert not graphs_in(compiled)


def test_steps_may_limit_their_drafts(
    llama: str, alone: Decoded, monkeypatch: pytest.MonkeyPatch
) -> None:
    """V2 passes fewer drafts to the scheduler if many requests run."""
    monkeypatch.setenv(RUNNER, "1")
    config = METHODS["junk"] | {
        "num_speculative_tokens": 5,
        "num_speculative_tokens_per_batch_size": [[1, 2, 5], [3, 32, 1]],
    }
    drafted = engine(llama, speculative_config=config, disable_log_stats=False)
    parts = decode(Job(drafted, runs_of(*small(), 5), EXACT))
    assert parts[-1].num_drafts > 0
    whole = joined(parts)
    assert whole.token_ids == alone.token_ids
    assert whole.logprobs == alone.logprobs


def test_prompt_logprobs_do_not_depend_on_other_requests(
    llama: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In V2, which of several equal logits are listed must not depend on the other requests."""
    monkeypatch.setenv(RUNNER, "1")
    prompts, params = small()
    every = [one | {"prompt_logprobs": index % 7} for index, one in enumerate(params)]
    runs = [Run(prompts, every, 1), Run(prompts, every, 8, 2)]
    alone, whole = decode(Job(engine(llama), runs, EXACT))
    assert all(
        len(one) == len(prompt) - 1 + len(tokens)
        for one, prompt, tokens in zip(alone.logprobs, prompts, alone.token_ids, strict=True)
    )
    assert whole.logprobs == alone.logprobs


@pytest.mark.parametrize("strategy", ["rejection", "block"])
def test_no_strategy_changes_a_greedy_bit(llama: str, strategy: str) -> None:
    prompts, params = small()
    greedy = [one | {"temperature": 0.0} for one in params]
    plain = decode(Job(engine(llama), [Run(prompts, greedy, 24)], EXACT))[0]
    config = METHODS["junk"] | {"num_speculative_tokens": 5}
    runs = [Run(prompts, greedy, 8, 2), Run(prompts, params, 8, 2)]
    drafted, sampled = decode(Job(engine(llama, speculative_config=config), runs, EXACT, strategy))
    assert drafted.token_ids == plain.token_ids
    assert drafted.logprobs == plain.logprobs
    for index, one in enumerate(params):
        if one["temperature"] == 0:
            assert sampled.logprobs[index] == plain.logprobs[index]


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="there is one CPU")
@pytest.mark.parametrize("method", ["plain", "junk"])
def test_two_ranks_are_as_exact_as_one(
    llama: str, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two ranks have bits of their own, which are the same alone, in a batch and with drafts."""
    one, other, *_ = sorted(os.sched_getaffinity(0))
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", f"{one}|{other}")
    parallel = engine(llama, tensor_parallel_size=2)
    prompts, params = small(12)
    plain = decode(Job(parallel, [Run(prompts, params, 1), Run(prompts, params, 8, 3)], EXACT))
    if METHODS[method]:
        config = METHODS[method] | {"num_speculative_tokens": 5}
        drafted = parallel | {"speculative_config": config}
        plain[1:] = decode(Job(drafted, [Run(prompts, params, 8, 3)], EXACT))
    assert plain[1].token_ids == plain[0].token_ids
    assert plain[1].logprobs == plain[0].logprobs


def test_comparison_notices_differences_of_vllms_own_kernels(llama: str) -> None:
    """This is the control experiment."""
    prompts, params = small()
    greedy = [one | {"temperature": 0.0} for one in params]
    runs = [Run(prompts, greedy, 1), Run(prompts, greedy, 24)]
    base, whole = decode(Job(engine(llama), runs, ""))
    assert compare(base, whole, "vllm", "plain", 24, 0.0).logprobs > 0


@pytest.mark.parametrize("runner", ["0", "1"])
def test_preemption_changes_no_bit(
    llama: str, alone: Decoded, runner: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cache has memory for a few requests only."""
    monkeypatch.setenv(RUNNER, runner)
    config = METHODS["junk"] | {"num_speculative_tokens": 5}
    tight = engine(
        llama, num_gpu_blocks_override=7, speculative_config=config, disable_log_stats=False
    )
    whole = decode(Job(tight, [Run(*small(), 24, 1)], EXACT))[0]
    assert whole.num_preemptions > 0
    assert whole.token_ids == alone.token_ids
    assert whole.logprobs == alone.logprobs


def test_every_parameter_works_with_speculation(bundled: str) -> None:
    """Cover bad words, allowed tokens, minimum lengths and processed logprobs."""
    rng = random.Random(9)
    prompts = prompts_of(8, rng)
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


@pytest.mark.parametrize("runner", ["0", "1"])
def test_predictions_are_accepted(
    bundled: str, runner: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A predicted output takes far fewer steps and has the same tokens."""
    monkeypatch.setenv(RUNNER, runner)
    prompts, _ = small(4)
    params: list[dict[str, Any]] = [{"temperature": 0.0, "max_tokens": 48}] * 4
    plain = decode(Job(engine(bundled), [Run(prompts, params, 4)], EXACT))[0]
    predicted = [
        one | {"extra_args": {"prediction_token_ids": [*said, 1 << 40]}}
        for one, said in zip(params, plain.token_ids, strict=True)
    ]
    config = {
        "method": "custom_class",
        "model": "specops.integrations.vllm.PredictedOutputs",
        "num_speculative_tokens": 8,
    }
    drafted = engine(bundled, speculative_config=config)
    whole = decode(Job(drafted, [Run(prompts, predicted, 4)], EXACT))[0]
    assert whole.token_ids == plain.token_ids
    assert whole.steps < plain.steps / 3


def test_missing_seed_is_derived_from_the_ids_of_request_and_engine(bundled: str) -> None:
    """Engines with equal seeds derive equal seeds, although vLLM adds random characters to ids."""
    prompts, _ = small(6)
    params: list[dict[str, Any]] = [{"temperature": 1.0, "max_tokens": 16}] * 6
    runs = [Run([prompts[0]] * 6, params, 6)]
    first, again, other = (
        decode(Job(engine(bundled, seed=seed), runs, EXACT))[0].token_ids for seed in (3, 3, 4)
    )
    assert len({tuple(text) for text in first}) > 1  # each request has its own seed
    assert again == first != other


def said_by(script: str, *arguments: Any) -> Any:
    """Run a script with arguments in JSON; return what it prints in JSON after "SAID "."""
    command = [sys.executable, "-c", script, *map(json.dumps, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    lines = [line for line in done.stdout.splitlines() if line.startswith("SAID ")]
    assert lines, done.stdout[-2000:] + done.stderr[-2000:]
    return json.loads(lines[0].removeprefix("SAID "))


RELOADED = """
import json, sys
from vllm import LLM, SamplingParams

engine, path, prompts = map(json.loads, sys.argv[1:])
llm = LLM(**engine)
params = SamplingParams(temperature=0.0, max_tokens=16, logprobs=3)
given = [{"prompt_token_ids": prompt} for prompt in prompts]

def said():
    outputs = [one.outputs[0] for one in llm.generate(given, params)]
    steps = [step for one in outputs for step in one.logprobs]
    return [sorted((token, one.logprob) for token, one in step.items()) for step in steps]

said_by_both = [said()]
llm.collective_rpc("reload_weights", kwargs={"weights_path": path})
said_by_both.append(said())
try:
    llm.collective_rpc("reload_weights", kwargs={"is_checkpoint_format": False})
except ValueError as error:
    print("SAID", json.dumps([*said_by_both, str(error)]))
"""


def reloaded(how: dict[str, Any], path: str) -> tuple[Any, Any, str]:
    """Return outputs before and after an engine loads another model's weights, and an error."""
    prompts, _ = small(4)
    before, after, refusal = said_by(RELOADED, how, path, prompts)
    return before, after, refusal


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize(
    "family, is_eager", [("qwen2", True), ("llama", False), ("qwen3_moe", True)]
)
def test_reloaded_weights_are_used(
    family: str, is_eager: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cover a tied head, which the checkpoint lacks, a compiled graph, and experts."""
    monkeypatch.setenv("SPECOPS_VLLM", EXACT)
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    one, other = (write_random(tmp_path / str(seed), family, seed) for seed in (0, 1))
    before, after, refusal = reloaded(engine(one, enforce_eager=is_eager), other)
    fresh, again, _ = reloaded(engine(other), other)
    assert after == fresh == again != before
    assert "can only reload them in the checkpoint's format" in refusal


GRAMMAR = """
import json, sys
from vllm import LLM, SamplingParams
from vllm.sampling_params import StructuredOutputsParams

grammar = StructuredOutputsParams(regex="(ab|cd)+[0-9]{3,9}x")
every = [
    SamplingParams(
        temperature=seed % 2, seed=seed, max_tokens=24, logprobs=1, structured_outputs=grammar
    )
    for seed in range(4)
]
llm = LLM(**json.loads(sys.argv[1]))
outputs = [one.outputs[0] for one in llm.generate(["def f(", "abab", "cdcd 12", "x"], every)]
steps = [step for one in outputs for step in one.logprobs]
bits = [sorted((token, one.logprob) for token, one in step.items()) for step in steps]
print("SAID", json.dumps([[one.text for one in outputs], bits]))
"""


def test_structured_output_has_the_same_bits_with_drafts_and_in_the_second_runner(
    bundled: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A grammar forbids some of the drafts."""
    monkeypatch.setenv("SPECOPS_VLLM", EXACT)
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    found = []
    for method, runner in (("plain", "0"), ("specops-suffix", "1")):
        monkeypatch.setenv(RUNNER, runner)
        more = {}
        if METHODS[method]:
            more["speculative_config"] = METHODS[method] | {"num_speculative_tokens": 5}
        found.append(said_by(GRAMMAR, engine(bundled, **more)))
    texts, _ = found[0]
    assert all(re.fullmatch("(ab|cd)+[0-9]{3,9}x", text) for text in texts)
    assert found[1] == found[0]


@pytest.mark.parametrize(
    "parts, more, sentence",
    [
        ("norm", {}, "requires Triton or the part sampling, got neither"),
        (EXACT, {"method": "draft_model"}, "draft_model drafts in vLLM's V2 model runner"),
    ],
)
def test_second_runner_refuses_what_needs_triton(
    bundled: str, parts: str, more: dict[str, Any], sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(RUNNER, "1")
    given = engine(bundled)
    if more:
        given["speculative_config"] = more | {"model": bundled, "num_speculative_tokens": 2}
    with pytest.raises(DecodingError, match=sentence):
        decode(Job(given, [Run([[1, 2]], [{"max_tokens": 2}], 1)], parts))


@pytest.mark.parametrize("kind", QUANTIZED)
def test_quantized_layers_change_no_bit(llama: str, kind: str, tmp_path: Path) -> None:
    model = write_quantized(tmp_path / kind, llama, kind)
    prompts, params = small(8, 16)
    plain = decode(Job(engine(model), [Run(prompts, params, 1)], EXACT))[0]
    config = METHODS["junk"] | {"num_speculative_tokens": 5}
    drafted = engine(model, speculative_config=config, max_num_batched_tokens=64)
    whole = decode(Job(drafted, [Run(prompts, params, 8, 2)], EXACT))[0]
    assert whole.token_ids == plain.token_ids
    assert whole.logprobs == plain.logprobs


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize(
    "family, runner, is_eager",
    [("qwen3_moe", "1", True), ("qwen3_moe", "0", False), ("glm4_moe", "0", True)],
)
def test_experts_change_no_bit(
    family: str, runner: str, is_eager: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = write_random(tmp_path / family, family)
    alone = decode(Job(engine(model), [Run(*small(), 1)], EXACT))[0]
    monkeypatch.setenv(RUNNER, runner)
    config = METHODS["junk"] | {"num_speculative_tokens": 5}
    more = {"speculative_config": config, "max_num_batched_tokens": 64, "enforce_eager": is_eager}
    whole = joined(decode(Job(engine(model, **more), runs_of(*small(), 5), EXACT)))
    assert whole.token_ids == alone.token_ids
    assert whole.logprobs == alone.logprobs


@pytest.mark.parametrize("family", ["qwen3_moe", "glm4_moe"])
def test_experts_are_close_to_vllm(family: str, tmp_path: Path) -> None:
    """Compare the five most likely first tokens, after vLLM's own routing and products."""
    model = write_random(tmp_path / family, family)
    prompts, _ = small()
    params = [{"temperature": 0.0, "max_tokens": 1, "logprobs": 5}] * len(prompts)
    ours, theirs = (
        decode(Job(engine(model), [Run(prompts, params, 8)], parts))[0] for parts in (EXACT, "")
    )
    for one, other in zip(ours.logprobs, theirs.logprobs, strict=True):
        mine, its = numbers(one[0]), numbers(other[0])
        shared = mine.keys() & its.keys()
        assert len(shared) >= 3  # the likeliest of 4,096 tokens are nearly tied in a random model
        assert [mine[token] for token in shared] == pytest.approx(
            [its[token] for token in shared], abs=0.1
        )


def numbers(bits: str) -> dict[str, float]:
    """Return the logprobs of tokens, from the text of one position."""
    parts = (entry.split(":") for entry in bits.split())
    return {token: struct.unpack("<f", bytes.fromhex(one))[0] for token, one in parts}


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="there is one CPU")
@pytest.mark.parametrize("is_apart", [False, True])
def test_experts_of_two_ranks_change_no_bit(
    is_apart: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each rank has a part of every expert, or half of the experts as a whole."""
    one, other, *_ = sorted(os.sched_getaffinity(0))
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", f"{one}|{other}")
    model = write_random(tmp_path / "model", "qwen3_moe")
    more = {"tensor_parallel_size": 2, "enable_expert_parallel": is_apart}
    prompts, params = small(12)
    runs = [Run(prompts, params, 1), Run(prompts, params, 8, 3)]
    plain, whole = decode(Job(engine(model, **more), runs, EXACT))
    assert whole.token_ids == plain.token_ids
    assert whole.logprobs == plain.logprobs


@pytest.mark.parametrize(
    "family, more, faults",
    [
        (
            "laguna",
            {"dtype": "float32"},
            [
                "LagunaAttention, which computes aten::softplus itself (first: model.layers.0",
                "LagunaMLP, which computes aten::silu itself (first: model.layers.0.mlp)",
            ],
        ),
        (
            "laguna",
            {"enforce_eager": False},
            ["LagunaAttention, which computes aten::softplus itself"],
        ),
        (
            "llama",
            {"model_impl": "transformers"},
            ["RMSNorm, which computes aten::pow", "RotaryEmbedding, which computes aten::cos"],
        ),
        ("mamba", {}, ["MambaMixer, a state-space layer", "with a weight of 3 dimensions"]),
    ],
)
def test_layers_that_compute_themselves_are_refused_by_name(
    family: str, more: dict[str, Any], faults: list[str], tmp_path: Path
) -> None:
    model = write_config(tmp_path / family, family)
    runs = [Run([[1, 2]], [{"max_tokens": 2}], 1)]
    with pytest.raises(DecodingError) as error:
        decode(Job(engine(model, load_format="dummy", **more), runs, EXACT))
    refusals = [
        line for line in str(error.value).splitlines() if "specops: cannot be exact" in line
    ]
    for fault in faults:
        assert any(fault in line for line in refusals), str(error.value)
    assert "enforce-eager" not in str(refusals)


@pytest.mark.parametrize(
    "more, sentence",
    [
        (
            {"enforce_eager": False, "compilation_config": {"mode": 1}},
            "cannot be exact with compilation by mode 1, backend inductor",
        ),
        (
            {"enforce_eager": False, "compilation_config": {"custom_ops": ["-rotary_embedding"]}},
            "cannot be exact with compilation with custom op -rotary_embedding",
        ),
        ({"logprobs_mode": "raw_logits"}, "cannot be exact with logprobs_mode raw_logits"),
        (
            {"dtype": "float16"},
            "linear requires 2 dimensions of bfloat16 or float32 on cpu); RowParallelLinear",
        ),
        ({"kv_cache_dtype": "fp8"}, "attention with the cache dtype fp8"),
        ({"enable_lora": True}, "LoRA"),
    ],
)
def test_inexact_configurations_are_refused(
    bundled: str, more: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(DecodingError) as error:
        decode(Job(engine(bundled, **more), [Run([[1, 2]], [{"max_tokens": 2}], 1)], EXACT))
    assert sentence in str(error.value)


REFUSED = """
import json, sys
from vllm import LLM, SamplingParams
from vllm.exceptions import VLLMValidationError

vllm, said = LLM(**json.loads(sys.argv[1])).llm_engine, []
prompt = {"prompt_token_ids": [1, 2]}
vllm.add_request("other", prompt, SamplingParams(temperature=0.0, max_tokens=4))
for params in json.loads(sys.argv[2]):
    try:
        vllm.add_request("refused", prompt, SamplingParams(**params))
    except VLLMValidationError as error:
        said.append(str(error))
while vllm.has_unfinished_requests():
    (output,) = vllm.step()
print("SAID", json.dumps([said, len(output.outputs[0].token_ids)]))
"""


def test_unsupported_parameters_end_no_other_request(
    bundled: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPECOPS_VLLM", EXACT)
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    refused = [
        {"logprob_token_ids": [5]},
        {"repetition_penalty": 1e39},
        {"extra_args": {"prediction_token_ids": "text"}},
    ]
    said, num_tokens = said_by(REFUSED, engine(bundled), refused)
    assert "sampling does not support logprob_token_ids" in said[0]
    assert "repetition_penalty must be finite and above 0 in float32" in said[1]
    assert "prediction_token_ids must be a list of token ids" in said[2]
    assert num_tokens == 4


def test_each_part_runs_alone(bundled: str) -> None:
    prompts, params = small(4, 8)
    for part in PARTS:
        whole = decode(Job(engine(bundled), [Run(prompts, params, 4)], part))[0]
        assert all(whole.token_ids)
