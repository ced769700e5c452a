# SPDX-License-Identifier: Apache-2.0
"""Models sharded over ranks: the bits of one rank, with and without speculation."""

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
from checkpoints import make_checkpoint, write_tokenizer
from mtp_checkpoints import make_mtp_model
from ranks import on_ranks
from specops.api.errors import ModelError
from specops.engine import (
    Completion,
    Engine,
    EngineConfig,
    SamplingParams,
    SpeculativeConfig,
    StructuredOutput,
    step_costs,
)
from specops.engine.parallel.ranks import Ranks
from test_experts import make_experts

# Dense ones by name: the family, and what is changed of its tiny checkpoint.
DENSE: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"mlp_bias": True, "attention_bias": True}),
    "one_kv_head": ("Qwen2", {"num_key_value_heads": 1}),
    "odd_vocabulary": ("Qwen3", {"vocab_size": 159}),
}
# Of `test_experts.py`.
WITH_EXPERTS = ("qwen3", "glm4", "deepseek_v3", "gpt_oss", "qwen3_next")
MODELS = (*DENSE, *WITH_EXPERTS, "qwen3_5")
WIDE = {"intermediate_size": 256, "moe_intermediate_size": 64}  # for groups of codes
DRAFTS = {"num_speculative_tokens": 4, "adaptive_verification": False}


@pytest.fixture(scope="module")
def directory_of(tmp_path_factory: pytest.TempPathFactory) -> Any:
    @lru_cache
    def make(name: str) -> Path:
        directory = tmp_path_factory.mktemp(name)
        if name == "mtp":
            return make_mtp_model(directory)
        if name == "wide_experts":
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
        "speculative_config": SpeculativeConfig(method=method, **drafts),
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


def bits(done: list[Completion]) -> list[Any]:
    def pack(value: float) -> bytes:
        return struct.pack("<f", value)

    return [
        [
            (o.token_id, pack(o.logprob), [(i, pack(p)) for i, p in o.alternatives])
            for o in one.logprobs
        ]
        for one in done
    ]


def generate(engine: Engine, count: int) -> list[Any]:
    done = engine.generate(*requests(count))
    assert engine.num_free_pages == engine.num_pages
    return bits(done)


def sharded(size: int, count: int, model: Path, method: str, **changes: Any) -> list[Any]:
    """What all of so many ranks say."""
    settings = config(model, method, tensor_parallel_size=size, **changes)
    kind = settings.num_virtual_ranks, settings.enable_expert_parallel
    said = on_ranks(size, lambda ranks: generate(Engine(settings, ranks), count), *kind)
    assert said == [said[0]] * size
    return said[0]


WAYS: dict[str, dict[str, Any]] = {
    "alone": {"max_num_seqs": 1, "enable_prefix_caching": False},
    "batch": {},
    "chunks": {"max_num_seqs": 8, "max_num_batched_tokens": 24},
}


def check(model: Path, count: int, size: int = 2, **changes: Any) -> None:
    """Speculation and batches change no bit, and neither does the number of ranks."""
    one = generate(Engine(config(model, exact_across_tp=size, **changes)), count)
    assert one == sharded(size, count, model, "naive", **changes)
    for method in ("ngram", "suffix"):
        for way in WAYS.values():
            assert one == sharded(size, count, model, method, **{**changes, **way})


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.fast("one_kv_head", "deepseek_v3", "qwen3_5", ci=("*",))
def test_ranks_speak_as_one_does(name: str, directory_of: Any) -> None:
    check(directory_of(name), 7)


@pytest.mark.parametrize("name", WITH_EXPERTS)
@pytest.mark.fast("qwen3", ci=("*",))
def test_whole_experts_on_ranks(name: str, directory_of: Any) -> None:
    """Other sums than those of parts of each expert, of the same bits on any number of ranks."""
    model, apart = directory_of(name), {"enable_expert_parallel": True}
    check(model, 5, **apart)
    if name != "qwen3_next":  # which has two heads of linear attention
        four = sharded(4, 3, model, "ngram", **apart)
        assert four == sharded(2, 3, model, "naive", exact_across_tp=4, **apart)
    parts = generate(Engine(config(model, exact_across_tp=2)), 5)
    assert parts != generate(Engine(config(model, exact_across_tp=2, **apart)), 5)


def test_quantized_experts_that_cannot_be_sharded(directory_of: Any) -> None:
    """Whole experts need no border of a group at the end of a shard."""
    model = directory_of("qwen3")
    kinds: dict[str, Any] = {"quantization": "mix_quant", "exact_across_tp": 2}
    with pytest.raises(
        ModelError, match="cannot be sharded over ranks: groups of 64 of its 48 inputs"
    ):
        Engine(config(model, **kinds))
    kinds["enable_expert_parallel"] = True
    one = generate(Engine(config(model, **kinds)), 3)
    assert one == sharded(2, 3, model, "ngram", **kinds)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_five_hundred_requests(name: str, directory_of: Any) -> None:
    check(directory_of(name), 500, max_waiting=500)


@pytest.mark.slow
@pytest.mark.parametrize("name", WITH_EXPERTS)
def test_five_hundred_requests_of_whole_experts(name: str, directory_of: Any) -> None:
    check(directory_of(name), 500, max_waiting=500, enable_expert_parallel=True)


@pytest.mark.parametrize("quantization", ["wint8", "wint4", "mix_quant"])
def test_quantized(quantization: str, directory_of: Any) -> None:
    """A rank holds a shard of the quantized values of the whole weight."""
    model = directory_of("wide_experts")
    kinds = {"quantization": quantization, "quantize_head": "wint8"}
    one = generate(Engine(config(model, exact_across_tp=2, **kinds)), 4)
    assert one == sharded(2, 4, model, "ngram", **kinds)


def test_four_ranks_and_two_that_add_as_four_do(directory_of: Any) -> None:
    """Heads of keys are too few for four: neighbours have the same one."""
    model = directory_of("llama")
    four = sharded(4, 5, model, "ngram")
    assert four == sharded(2, 5, model, "ngram", exact_across_tp=4)
    assert four == generate(Engine(config(model, exact_across_tp=4)), 5)


@pytest.mark.parametrize("name", ["llama", "deepseek_v3", "qwen3_next", "qwen3_5"])
def test_one_rank_is_close(name: str, directory_of: Any) -> None:
    """Sums over inputs are rounded elsewhere; all else has the same bits."""
    model = directory_of(name)
    prompts, params = requests(6)
    ours = Engine(config(model, exact_across_tp=2)).generate(prompts, params)
    other = Engine(config(model)).generate(prompts, params)
    pairs = [
        (a.logprob, b.logprob)
        for one, two in zip(ours, other, strict=True)
        for a, b in zip(one.logprobs[:1], two.logprobs[:1], strict=True)
    ]
    assert bits(ours) != bits(other)
    for a, b in pairs:
        assert a == pytest.approx(b, abs=2e-4)


def test_mtp(directory_of: Any) -> None:
    """Every rank has the whole of a drafter, head and all."""
    model = directory_of("mtp")
    one = generate(Engine(config(model, exact_across_tp=2)), 6)
    assert one == sharded(2, 6, model, "mtp")
    assert one == sharded(2, 6, model, "mtp", quantization="none", max_num_seqs=2)


def test_a_draft_model_with_states(directory_of: Any) -> None:
    """Likewise; every rank has all of its states."""
    model = directory_of("qwen3_next")
    own = SpeculativeConfig(method="draft_model", model=str(model), **DRAFTS)
    one = generate(Engine(config(model, exact_across_tp=2)), 6)
    assert one == sharded(2, 6, model, "draft_model", speculative_config=own)


def test_clocks_of_ranks_may_differ(directory_of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was measured on the first rank is what all go by, and grammars are not timed at all."""
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


# ---- what is refused ----


def test_an_engine_by_itself_is_no_rank(directory_of: Any) -> None:
    with pytest.raises(ValueError, match="tensor_parallel_size=2 needs as many processes"):
        Engine(config(directory_of("llama"), tensor_parallel_size=2))


@pytest.mark.parametrize("size", [3, 6, 2])
def test_virtual_ranks_that_form_no_tree_are_refused(size: int) -> None:
    with pytest.raises(ValueError, match=f"a multiple of tensor_parallel_size=4, got {size}"):
        EngineConfig(tensor_parallel_size=4, exact_across_tp=size)


@pytest.mark.parametrize(
    ("size", "changes", "said"),
    [
        (3, {}, "tensor_parallel_size must divide the 4 heads of queries, got 3"),
        (8, {}, "tensor_parallel_size must divide the 4 heads of queries, got 8"),
        (1, {"exact_across_tp": 8}, "exact_across_tp must divide the 4 heads of queries, got 8"),
        (
            4,
            {"quantization": "wint4"},
            "model.layers.0.mlp.down_proj.weight cannot be sharded over ranks: groups of 64 of its "
            "96 inputs share a scale, and a rank would hold 0 to 24",
        ),
    ],
)
def test_model_that_cannot_be_sharded_is_refused(
    size: int, changes: dict[str, Any], said: str, directory_of: Any
) -> None:
    settings = config(directory_of("llama"), tensor_parallel_size=size, **changes)
    with pytest.raises(ModelError, match=said):
        on_ranks(size, lambda ranks: Engine(settings, ranks), settings.num_virtual_ranks)


@pytest.mark.parametrize(
    ("name", "size", "said"),
    [
        ("llama", 2, "enable_expert_parallel must be off for a model without experts, got on"),
        ("qwen3_steps", 4, "tensor_parallel_size must divide the 6 experts, got 4"),
    ],
)
def test_experts_that_cannot_be_sharded_are_refused(
    name: str, size: int, said: str, directory_of: Any
) -> None:
    settings = config(directory_of(name), tensor_parallel_size=size, enable_expert_parallel=True)
    with pytest.raises(ModelError, match=said):
        on_ranks(size, lambda ranks: Engine(settings, ranks), size, has_whole_experts=True)


def test_whole_experts_of_one_virtual_rank() -> None:
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
def test_columns_of_the_last_ranks_may_be_fewer(columns: int) -> None:
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


def test_ranks_that_are_processes(tmp_path: Path) -> None:
    """By gloo: 1e8 + 1 is rounded to 1e8 before the other rank's -1e8 + 2 comes to it."""
    both = [
        subprocess.Popen(
            [sys.executable, "-c", MEETING, str(rank), str(tmp_path / "meeting")],
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    told = [one.communicate(timeout=300)[0] for one in both]
    row, columns = [1.0, 1.0, 1.0], [0.0, 0.0, 1.0]
    assert told == [f"7 0.25 {[row, row]} {[columns, columns]}\nTrue\n"] * 2
