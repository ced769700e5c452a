# SPDX-License-Identifier: Apache-2.0
"""Tensor-parallel models: the bits of one rank, with and without speculation."""

import json
import struct
import subprocess
import sys
import threading
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from adapters import EVERY, write_adapter
from checkpoints import KEYS_AS_VALUES, SHARED_KV, make_checkpoint, write_tokenizer
from mtp_checkpoints import make_mtp_model
from ranks import on_ranks
from specops.api.errors import ModelError
from specops.engine import (
    Engine,
    EngineConfig,
    SamplingParams,
    SpeculativeConfig,
    StructuredOutput,
    step_costs,
)
from specops.engine.parallel.ranks import Ranks
from test_experts import make_experts, make_nemotron_mtp
from test_lossless import bits

# Dense models: the family, and changes of its tiny checkpoint.
DENSE: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"mlp_bias": True, "attention_bias": True}),
    "one_kv_head": ("Qwen2", {"num_key_value_heads": 1}),
    "odd_vocabulary": ("Qwen3", {"vocab_size": 159}),
    "shared_kv": ("Gemma4", SHARED_KV),
    "keys_as_values": ("Gemma4", KEYS_AS_VALUES),
}
# Models of test_experts.py.
WITH_EXPERTS = (
    "qwen3",
    "glm4",
    "deepseek_v3",
    "gpt_oss",
    "qwen3_next",
    "granite",
    "nemotron_h",
    "nemotron_h_latent",
    "kimi_linear",
    "gemma4_experts",
)
MODELS = (*DENSE, *WITH_EXPERTS, "qwen3_5", "falcon_h1")
WIDE = {"intermediate_size": 256, "moe_intermediate_size": 64}  # multiples of a quantization group
DRAFTS = {"num_speculative_tokens": 4, "adaptive_verification": False}


@pytest.fixture(scope="module")
def directory_of(tmp_path_factory: pytest.TempPathFactory) -> Any:
    @lru_cache
    def make(name: str) -> Path:
        directory = tmp_path_factory.mktemp(name)
        if name == "mtp":
            return make_mtp_model(directory)
        if name == "nemotron_h_mtp":
            make_nemotron_mtp(directory, "nemotron_h")
        elif name == "wide_experts":
            make_experts(directory, "qwen3", **WIDE)
        elif name in DENSE:
            family, changes = DENSE[name]
            make_checkpoint(directory, family, **changes)
        else:
            make_experts(directory, name)
        write_tokenizer(directory, 159)
        return directory

    return make


def config(model: Path, method: str = "naive", **changes: Any) -> EngineConfig:
    drafts = {} if method == "naive" else DRAFTS
    settings = {
        "speculative_config": SpeculativeConfig.from_dict({"method": method, **drafts}),
        "device": "cpu",
        "num_threads": 1,
        "seed": 3,
    }
    return EngineConfig(model=str(model), **{**settings, **changes})


def requests(count: int) -> tuple[list[list[int]], list[SamplingParams]]:
    prompts = [
        [1 + (7 * i + j) % (20 + i % 30) for j in range(3 + 5 * i % 71)] for i in range(count)
    ]
    return prompts, [
        SamplingParams(
            max_tokens=12 + i % 9,
            temperature=0.9 * (i % 2),
            top_k=20 * (i % 3),
            seed=i,
            ignore_eos=True,
            logprobs=1,
            prompt_logprobs=1 if i % 5 == 4 else None,
        )
        for i in range(count)
    ]


def generate(engine: Engine, count: int) -> list[Any]:
    done = engine.generate(*requests(count))
    assert engine.num_free_pages == engine.num_pages
    return list(map(bits, done))


def on_all_ranks(size: int, count: int, model: Path, method: str, **changes: Any) -> list[Any]:
    """Return the result of `size` ranks, which must be the same on each."""
    settings = config(model, method, tensor_parallel_size=size, **changes)
    kind = settings.num_virtual_ranks, settings.enable_expert_parallel
    results = on_ranks(size, lambda ranks: generate(Engine(settings, ranks), count), *kind)
    assert results == [results[0]] * size
    return results[0]


WAYS: dict[str, dict[str, Any]] = {
    "alone": {"max_num_seqs": 1, "enable_prefix_caching": False},
    "batch": {},
    "chunks": {"max_num_seqs": 8, "max_num_batched_tokens": 24},
}


def check(model: Path, count: int, size: int = 2, **changes: Any) -> None:
    """Check that speculation, batches and the number of ranks change no bit."""
    one = generate(Engine(config(model, exact_across_tp=size, **changes)), count)
    assert one == on_all_ranks(size, count, model, "naive", **changes)
    for method in ("ngram", "suffix"):
        for way in WAYS.values():
            assert one == on_all_ranks(size, count, model, method, **{**changes, **way})


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.fast("one_kv_head", "deepseek_v3", "qwen3_5", "falcon_h1", "kimi_linear")
def test_several_ranks_have_the_bits_of_one_rank(name: str, directory_of: Any) -> None:
    check(directory_of(name), 7)


@pytest.mark.parametrize("name", WITH_EXPERTS)
@pytest.mark.fast("qwen3")
def test_expert_parallelism_has_the_same_bits_on_any_ranks(name: str, directory_of: Any) -> None:
    """Sums of whole experts have other bits than sums of sharded experts."""
    model, apart = directory_of(name), {"enable_expert_parallel": True}
    check(model, 5, **apart)
    if name != "qwen3_next":  # it has two heads of linear attention
        four = on_all_ranks(4, 3, model, "ngram", **apart)
        assert four == on_all_ranks(2, 3, model, "naive", exact_across_tp=4, **apart)
    parts = generate(Engine(config(model, exact_across_tp=2)), 5)
    assert parts != generate(Engine(config(model, exact_across_tp=2, **apart)), 5)


def test_quantized_experts_run_whole_if_they_cannot_be_sharded(directory_of: Any) -> None:
    """Shards must end at the border of a quantization group; whole experts need not."""
    model = directory_of("qwen3")
    kinds: dict[str, Any] = {"quantization": "mix_quant", "exact_across_tp": 2}
    with pytest.raises(
        ModelError, match="cannot be sharded over ranks: groups of 64 of its 48 inputs"
    ):
        Engine(config(model, **kinds))
    kinds["enable_expert_parallel"] = True
    one = generate(Engine(config(model, **kinds)), 3)
    assert one == on_all_ranks(2, 3, model, "ngram", **kinds)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_a_hundred_requests_keep_their_bits(name: str, directory_of: Any) -> None:
    check(directory_of(name), 100, max_waiting=100)


@pytest.mark.slow
@pytest.mark.parametrize("name", WITH_EXPERTS)
def test_a_hundred_requests_keep_their_bits_in_expert_parallelism(
    name: str, directory_of: Any
) -> None:
    check(directory_of(name), 100, max_waiting=100, enable_expert_parallel=True)


@pytest.mark.parametrize("quantization", ["wint8", "wint4", "mix_quant"])
def test_quantized_weights_are_sharded(quantization: str, directory_of: Any) -> None:
    """A shard has the quantized values of the whole weight."""
    model = directory_of("wide_experts")
    kinds = {"quantization": quantization, "quantize_head": "wint8"}
    one = generate(Engine(config(model, exact_across_tp=2, **kinds)), 4)
    assert one == on_all_ranks(2, 4, model, "ngram", **kinds)


def test_two_ranks_can_have_the_bits_of_four(directory_of: Any) -> None:
    """There are too few KV heads for four ranks: neighbors have the same one."""
    model = directory_of("llama")
    four = on_all_ranks(4, 5, model, "ngram")
    assert four == on_all_ranks(2, 5, model, "ngram", exact_across_tp=4)
    assert four == generate(Engine(config(model, exact_across_tp=4)), 5)


@pytest.mark.parametrize("name", ["llama", "deepseek_v3", "qwen3_next", "qwen3_5"])
def test_virtual_tp_ranks_change_only_the_rounding(name: str, directory_of: Any) -> None:
    """Sums over inputs are rounded elsewhere."""
    model = directory_of(name)
    prompts, params = requests(6)
    ours = Engine(config(model, exact_across_tp=2)).generate(prompts, params)
    other = Engine(config(model)).generate(prompts, params)
    pairs = [
        (a.logprob, b.logprob)
        for one, two in zip(ours, other, strict=True)
        for a, b in zip(one.logprobs[:1], two.logprobs[:1], strict=True)
    ]
    assert list(map(bits, ours)) != list(map(bits, other))
    for a, b in pairs:
        assert a == pytest.approx(b, abs=2e-4)


@pytest.mark.parametrize("name", ["mtp", "nemotron_h_mtp"])
def test_every_rank_has_the_whole_mtp_drafter(name: str, directory_of: Any) -> None:
    model = directory_of(name)
    one = generate(Engine(config(model, exact_across_tp=2)), 6)
    assert one == on_all_ranks(2, 6, model, "mtp")
    assert one == on_all_ranks(2, 6, model, "mtp", quantization="none", max_num_seqs=2)


def test_every_rank_has_the_whole_draft_model(directory_of: Any) -> None:
    """This includes the states of its linear attention."""
    model = directory_of("qwen3_next")
    own = SpeculativeConfig.from_dict({"method": "draft_model", "model": str(model), **DRAFTS})
    one = generate(Engine(config(model, exact_across_tp=2)), 6)
    assert one == on_all_ranks(2, 6, model, "draft_model", speculative_config=own)


def test_clocks_of_ranks_may_differ(directory_of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """All ranks use the measurements of the first rank, and grammars are not timed."""
    times = threading.local()

    def now() -> float:
        times.now = getattr(times, "now", 0.0) + 1e-3 * (threading.get_ident() % 97)
        return float(times.now)

    monkeypatch.setattr(step_costs, "time", SimpleNamespace(perf_counter=now))
    model = directory_of("llama")
    schema = json.dumps({"type": "array", "items": {"type": "integer"}, "maxItems": 4})
    params = SamplingParams(max_tokens=20, structured_output=StructuredOutput(json_schema=schema))
    drafts = SpeculativeConfig(method="ngram", num_speculative_tokens=4, adaptive_verification=True)

    def answers(engine: Engine) -> list[list[int]]:
        return [done.token_ids for done in engine.generate([[4, 5, 6], [5, 6]], [params, params])]

    settings = config(model, tensor_parallel_size=2, speculative_config=drafts)
    one = answers(Engine(config(model, exact_across_tp=2)))
    assert on_ranks(2, lambda ranks: answers(Engine(settings, ranks))) == [one, one]


# ---- adapters ----

ADAPTED = ("llama", "qwen3", "glm4", "deepseek_v3", "qwen3_next", "nemotron_h_latent", "falcon_h1")


def adapted(engine: Engine) -> list[Any]:
    """Return the bits of requests of three adapters and of the model alone, run together."""
    ids = [
        engine.add_request(prompt, params, adapter=adapter)
        for prompt, params in zip(*requests(4), strict=True)
        for adapter in ("one", None, "two", "three")
    ]
    while engine.has_unfinished():
        engine.step()
    return [bits(engine.completion(one)) for one in ids]


@pytest.mark.parametrize("name", ADAPTED)
@pytest.mark.fast("llama", "deepseek_v3")
def test_adapters_have_the_bits_of_one_rank(name: str, directory_of: Any, tmp_path: Path) -> None:
    model = directory_of(name)
    parts = {"one": EVERY, "two": EVERY, "three": ("q_proj", "o_proj")}
    modules = tuple(
        (one, str(write_adapter(tmp_path / one, model, index, modules=own)))
        for index, (one, own) in enumerate(parts.items())
    )
    apart = name == "glm4"  # its shared MLP is sharded although its experts are whole
    ranked = {"lora_modules": modules, "enable_expert_parallel": apart}
    one = adapted(Engine(config(model, exact_across_tp=2, **ranked)))
    assert len({str(own) for own in one}) == len(one)
    for way, method in (("alone", "naive"), ("batch", "ngram"), ("chunks", "suffix")):
        settings = config(model, method, tensor_parallel_size=2, **ranked, **WAYS[way])
        results = on_ranks(2, lambda ranks: adapted(Engine(settings, ranks)), 2, apart)  # noqa: B023
        assert results == [one, one]
    # The virtual ranks change only the rounding.
    whole = adapted(Engine(config(model, lora_modules=modules)))
    assert whole != one
    firsts = [[struct.unpack("<f", own[0][1])[0] for own in some] for some in (whole, one)]
    assert firsts[0] == pytest.approx(firsts[1], abs=2e-4)


def test_ranks_refuse_an_adapter_of_which_they_read_different_files(
    directory_of: Any, tmp_path: Path
) -> None:
    model = directory_of("llama")
    settings = config(model, tensor_parallel_size=2, enable_lora=True)
    paths = [write_adapter(tmp_path / str(seed), model, seed) for seed in range(2)]

    def load(ranks: Ranks) -> None:
        Engine(settings, ranks).load_adapter("one", paths[ranks.rank])

    with pytest.raises(AssertionError, match="the inputs of a step differ"):
        on_ranks(2, load)


# ---- refused configurations ----


def test_single_engine_refuses_tensor_parallelism(directory_of: Any) -> None:
    with pytest.raises(ValueError, match="tensor_parallel_size=2 needs as many processes"):
        Engine(config(directory_of("llama"), tensor_parallel_size=2))


@pytest.mark.parametrize("slices", [3, 6, 2])
def test_exact_across_tp_must_fit_the_ranks(slices: int) -> None:
    with pytest.raises(ValueError, match=f"a multiple of tensor_parallel_size=4, got {slices}"):
        EngineConfig(tensor_parallel_size=4, exact_across_tp=slices)


@pytest.mark.parametrize(
    ("name", "size", "changes", "message"),
    [
        ("llama", 3, {}, "tensor_parallel_size must divide the 4 heads of queries, got 3"),
        ("llama", 8, {}, "tensor_parallel_size must divide the 4 heads of queries, got 8"),
        (
            "llama",
            1,
            {"exact_across_tp": 8},
            "exact_across_tp must divide the 4 heads of queries, got 8",
        ),
        (
            "llama",
            2,
            {"enable_expert_parallel": True},
            "enable_expert_parallel must be off for a model without experts, got on",
        ),
        (
            "qwen3_steps",
            4,
            {"enable_expert_parallel": True},
            "tensor_parallel_size must divide the 6 experts, got 4",
        ),
        (
            "llama",
            4,
            {"quantization": "wint4"},
            "model.layers.0.mlp.down_proj.weight cannot be sharded over ranks: groups of 64 of its "
            "96 inputs share a scale, and a rank would hold 0 to 24",
        ),
    ],
)
def test_models_that_cannot_be_sharded_are_refused(
    name: str, size: int, changes: dict[str, Any], message: str, directory_of: Any
) -> None:
    settings = config(directory_of(name), tensor_parallel_size=size, **changes)
    kind = settings.num_virtual_ranks, settings.enable_expert_parallel
    with pytest.raises(ModelError, match=message):
        on_ranks(size, lambda ranks: Engine(settings, ranks), *kind)


def test_expert_parallelism_requires_several_ranks() -> None:
    with pytest.raises(ValueError, match="enable_expert_parallel needs tensor_parallel_size or"):
        EngineConfig(enable_expert_parallel=True)


# ---- sums and columns ----


@pytest.mark.parametrize("size", [1, 2, 4])
def test_sums_are_one_tree_on_any_number_of_ranks(size: int) -> None:
    partial_sums = torch.randn(4, 5, 33, generator=torch.Generator().manual_seed(1)) * 1e3
    bias = torch.arange(33, dtype=torch.bfloat16)
    expected = (partial_sums[0] + partial_sums[1]) + (partial_sums[2] + partial_sums[3]) + bias

    def add(ranks: Ranks) -> torch.Tensor:
        own = ranks.partial_sums((5, 33), torch.device("cpu"))
        begin = ranks.rank * ranks.num_local_virtual_ranks
        own.copy_(partial_sums[begin : begin + ranks.num_local_virtual_ranks])
        out = torch.full((5, 33), torch.nan, dtype=torch.bfloat16)
        ranks.add(own, bias, out)
        return out

    for out in on_ranks(size, add, 4):
        assert torch.equal(out, expected.bfloat16())


@pytest.mark.parametrize("columns", [1, 2, 7, 9, 10])
def test_last_ranks_may_have_fewer_columns(columns: int) -> None:
    whole = torch.arange(2.0 * columns).view(2, columns)
    most = -(-columns // 3)

    def join(ranks: Ranks) -> torch.Tensor:
        out = torch.full_like(whole, torch.nan)
        ranks.join_columns(whole[:, ranks.rank * most : (ranks.rank + 1) * most], out)
        return out

    assert all(torch.equal(out, whole) for out in on_ranks(3, join))


MEETING = """
import sys
from pathlib import Path
import torch
from specops.engine.parallel.group import Group, RanksDiverged
rank = int(sys.argv[1])
ranks = Group(Path(sys.argv[2]), rank, 2, 4, "cpu")
own = ranks.partial_sums((2, 3), torch.device("cpu"))
own[0], own[1] = 1e8 * (1 - 2 * rank), 1.0 + rank
out = torch.empty(2, 3)
ranks.add(own, torch.ones(3), out)
columns = torch.empty(2, 3)
ranks.join_columns(torch.full((2, 2 - rank), float(rank)), columns)
print(ranks.least(7 + rank), ranks.of_first(0.25 + rank), out.tolist(), columns.tolist())
ranks.check(torch.tensor([1, 2], dtype=torch.uint8), 2)
try:
    ranks.check(torch.tensor([1, rank], dtype=torch.uint8), 2)
except RanksDiverged as error:
    print("diverged" in str(error))
"""


def test_ranks_may_be_processes(tmp_path: Path) -> None:
    """With gloo, 1e8 + 1 is rounded to 1e8 before the other rank's -1e8 + 2 is added."""
    both = [
        subprocess.Popen(
            [sys.executable, "-c", MEETING, str(rank), str(tmp_path / "meeting")],
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    outputs = [one.communicate(timeout=300)[0] for one in both]
    row, columns = [1.0, 1.0, 1.0], [0.0, 0.0, 1.0]
    assert outputs == [f"7 0.25 {[row, row]} {[columns, columns]}\nTrue\n"] * 2
