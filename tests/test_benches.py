# SPDX-License-Identifier: Apache-2.0
"""Every family of `make bench` runs at tiny sizes, where its figures are meaningless.

The families that need a GPU are tested in test_gpu_check.py.
"""

import importlib
import math
import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import specops
import torch
from safetensors.torch import load_file
from specops.integrations.vllm.decoding import Decoded, Job

from bench import bench_engine, checkpoints, common, limits
from bench.__main__ import FAMILIES, ON_REQUEST, module_of
from bench.bench_cascade import Sharing
from bench.bench_moe import Shape
from tools.benches.bench_head_mistakes import MISTAKES
from tools.train import corpus

pytestmark = pytest.mark.ci

# Small values for the constants of each module.
SMALL: dict[str, dict[str, Any]] = {
    "binding": {},
    "dense": {
        "COLD_BYTES": 1 << 12,
        "LAYER": ((64, 32), (32, 64), (96, 32), (32, 48)),
        "HEAD": ((96, 32),),
        "SMALL": (32, 16),
    },
    "moe": {
        "SHAPES": (Shape("tiny", 4, 2, 32, 16, (3,)),),
        "STEP_ROWS": (1, 3),
        "STEPS_OF_CASE": 2,
        "KV_LEN": 32,
        "STEPS": (2, 4),
    },
    "quantized": {
        "COLD_BYTES": 1 << 12,
        "LAYER": ((64, 128), (32, 256)),
        "KV_LEN": 32,
        "STEPS": 2,
    },
    "attention": {"BATCH": 2, "KV_LEN": 64, "SIZES_8BIT": ((2, 64), (1, 128))},
    "latent": {"KV_LEN": 100, "SIZES": ((4, 2),)},
    "linear_attention": {"KEY_HEADS": 2, "VALUE_HEADS": 4, "KEY_DIM": 16, "ROWS": (2, 20)},
    "kv_cache": {"PROMPTS": 2, "TOKENS": 40, "NEW_TOKENS": 8, "RANDOM_TOKENS": 100},
    "cascade": {
        "SHARING": 3,
        "PREFIX_LEN": 128,
        "OWN_LEN": 16,
        "HARDLY": (Sharing("pairs", 4, 2, 64, 32),),
        "PROMPT_LEN": 80,
        "NEW_TOKENS": 2,
        "SHORT_PROMPT_LEN": 80,
        "SHORT_TOKENS": 4,
    },
    "trees": {
        "BATCH": 2,
        "KV_LEN": 100,
        "HOST_BATCH": 2,
    },
    "answers": {"NUM_PROMPTS": 2, "GROUP": 2, "NEW_TOKENS": 8, "SHORT_TOKENS": 4},
    "structured": {
        "LARGE_VOCAB": 2048,
        "BATCH": 2,
        "NEW_TOKENS": 8,
        "METHODS": (("ngram", 2),),
    },
    "sampling": {"COLD_BYTES": 1 << 12, "VOCAB": 512},
    "ngram": {"BATCH": 3, "CONTEXTS": (1024, 2048), "STEPS": 4, "ROUNDS": 1},
    "engine": {"MAX_TOKENS": 8},
    "lossless": {"MAX_TOKENS": 8},
    "serving": {"STREAMS": 2, "TOKENS": 8},
    "gemma": {
        "MODEL": checkpoints.BUNDLED,
        "MAX_TOKENS": 8,
        "TIMED": 1,
        "COUNTED_TOKENS": 8,
        "COUNTED": 1,
        "KV_LEN": 32,
    },
    "tools.benches.bench_head_mistakes": {
        "NEW_TOKENS": 24,
        "MISTAKES": (MISTAKES[0], MISTAKES[-1]),
    },
    "accuracy": {
        "TEXTS": 1,
        "TOKENS": 20,
        "GEMMA": Path("nowhere"),
        "SMOLLM2": Path("nowhere"),
    },
    "start": {
        "QUANTIZATIONS": {"wint8": "int8"},
        "STARTS": ("next",),
        "ROUNDS": 1,
        "GEMMA": Path("nowhere"),
    },
    "prefill": {"GEMMA": Path("nowhere"), "LENGTHS": (16, 48)},
    "replay": {
        "PROMPT_TOKENS": 32,
        "NEW_TOKENS": 16,
        "LENGTHS": (2, 3),
        "BATCHES": {2: 3},
        "WHOLE": (2, 3),
        "COST_LENGTHS": (0, 1),
        "COST_BATCHES": (1, 2),
    },
    "tools.benches.bench_vllm": {"MAX_TOKENS": 6},
}


def two_layers() -> dict[str, Any]:
    """Return the configuration of two small layers."""
    small = {"vocab_size": 4096, "hidden_size": 64, "num_hidden_layers": 2, "head_dim": 64}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 64}
    return {**small, **heads, "num_experts_per_tok": 2, "moe_intermediate_size": 16}


@pytest.fixture
def tiny_sizes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Set small sizes in all benches, and keep files out of the real work folder."""
    from bench import suffix_streams

    for module in (common, checkpoints, suffix_streams):
        monkeypatch.setattr(module, "WORK", tmp_path)
    for name in ("QWEN06", "QWEN30", "LLAMA3"):
        monkeypatch.setattr(checkpoints, name, {**getattr(checkpoints, name), **two_layers()})
    whole = bench_engine.prompt_token_ids

    def prompts(*arguments: Any) -> list[list[int]]:
        return [prompt[-24:] for prompt in whole(*arguments)[:2]]

    document = "def f(x):\n    return x + 1\n\n" * 12
    held_out = [corpus.Document(f"{name}.py", document, True) for name in "ab"]
    monkeypatch.setattr(corpus, "load", lambda root: held_out)
    for name, constants in SMALL.items():
        module = module_of(name)
        for constant, value in constants.items():
            monkeypatch.setattr(module, constant, value)
    asking = ("answers", "engine", "lossless", "methods")
    for name in (*asking, *(FAMILIES[one] for one in ("head_mistakes", "vllm"))):
        module = module_of(name)
        monkeypatch.setattr(module, "prompt_token_ids", prompts)
    methods = importlib.import_module("bench.bench_methods")
    for name in ("SIZES", "MIXTURE_SIZES"):
        monkeypatch.setattr(methods, name, (methods.Size(2, 6, 3),))
    monkeypatch.setattr(methods, "PROMPT_TOKENS", 32)
    monkeypatch.setattr(methods, "NEW_TOKENS", 4)
    monkeypatch.setattr(methods, "CHAINS_AT_ONCE", 4)
    monkeypatch.setattr(methods, "STRIDE", 40)
    mistakes = importlib.import_module("tools.benches.bench_mtp_mistakes")
    sizes = mistakes.Sizes(window=48, stride=17, prompt_tokens=32, new_tokens=4)
    monkeypatch.setattr(mistakes, "Sizes", lambda: sizes)


# Needs a large corpus; test_bench_suffix_tree.py runs it on small streams.
OWN_TESTS = ("suffix_tree",)


@pytest.mark.parametrize("family", [name for name in FAMILIES if name not in OWN_TESTS])
@pytest.mark.fast(
    "machine", "mixture", "head_mistakes", "structured", "serving", "cascade", "kv_cache"
)
def test_family_runs_at_tiny_sizes(tiny_sizes: None, family: str) -> None:
    if family == "structured":
        pytest.importorskip("llguidance")
    module = module_of(FAMILIES[family])
    bench = common.Bench(1, rehearsal=True)
    getattr(module, f"run_{family}")(bench)
    bench.close()
    ids = [figure.id for figure in bench.figures]
    assert ids and len(set(ids)) == len(ids)
    for figure in bench.figures:
        assert figure.id.startswith(f"{family}.") and math.isfinite(figure.value)
        if figure.id.endswith(".differ") or "lossless" in family:
            assert figure.value == 0, figure.id


def test_sharded_llama_converts_to_one_gguf_file(tiny_sizes: None, tmp_path: Path) -> None:
    """Query and key rows are interleaved, since llama.cpp's RoPE rotates adjacent elements."""
    gguf = pytest.importorskip("gguf")
    write_gguf = importlib.import_module("bench.peers.write_gguf")
    source, file = checkpoints.llama3().path, tmp_path / "it.gguf"
    write_gguf.main(source, str(file))
    weights = {
        name: one for path in source.glob("*.safetensors") for name, one in load_file(path).items()
    }
    found = {
        one.name: torch.tensor(one.data).view(torch.bfloat16)
        for one in gguf.GGUFReader(file).tensors
        if one.tensor_type == gguf.GGMLQuantizationType.BF16
    }
    assert len(weights) == 2 + 2 * 9 and len(found) == 1 + 2 * 7
    for name, heads in (("q", 2), ("k", 1)):
        rows = [64 * h + 32 * half + i for h in range(heads) for i in range(32) for half in (0, 1)]
        want = weights[f"model.layers.1.self_attn.{name}_proj.weight"][rows]
        assert torch.equal(found[f"blk.1.attn_{name}.weight"], want)
    for ours, theirs in (("self_attn.v_proj", "attn_v"), ("mlp.down_proj", "ffn_down")):
        want = weights[f"model.layers.0.{ours}.weight"]
        assert torch.equal(found[f"blk.0.{theirs}.weight"], want)


def test_vllm_is_measured_with_and_without_specops(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fake engine is twice as fast with specops; vLLM's kernels change a drafted text."""
    bench_vllm = importlib.import_module("tools.benches.bench_vllm")
    jobs: list[Job] = []

    def decode(job: Job, run: partial[tuple[int, str]]) -> list[Decoded]:
        jobs.append(job)
        assert run.keywords == {"python": str(tmp_path / "python")} and os.environ["LD_PRELOAD"]
        drafted = "speculative_config" in job.engine and not job.parts
        texts = [[1, 2], [3, 5 if drafted else 4]]
        return [Decoded(texts, [], 2.0 if job.parts else 4.0, 2) for _ in job.runs]

    (tmp_path / "python").touch()
    monkeypatch.setattr(bench_vllm, "VLLM_PYTHON", tmp_path / "python")
    monkeypatch.setattr(bench_vllm, "decode", decode)
    monkeypatch.setattr(bench_vllm, "_write_model", str)
    monkeypatch.setattr(bench_vllm, "ROUNDS", 1)
    monkeypatch.setattr(bench_vllm, "PROMPTS", 2)
    monkeypatch.setattr(bench_vllm, "MAX_TOKENS", 2)
    methods = {"plain": {}, "ngram": {"method": "ngram"}, "suffix": {"method": "suffix"}}
    monkeypatch.setattr(bench_vllm, "_methods", lambda: methods)
    bench = common.Bench(1, rehearsal=True)
    bench.rehearsal = False
    bench_vllm.run_vllm(bench)
    figures = {figure.id: figure for figure in bench.figures}
    assert figures["vllm.compiled.ngram.b8"].ratio == 2 and figures["vllm.eager.plain.b1"].met
    assert figures["vllm.engine.plain.b8"].peer_value == 1
    assert [figures[f"vllm.{of}"].value for of in ("eager.differ", "eager.flipped")] == [0, 4]
    assert figures["vllm.engine.differ"].value == 0
    assert sorted((job.parts, job.engine["enforce_eager"]) for job in jobs[:4]) == [
        ("", False),
        ("", True),
        ("exact", False),
        ("exact", True),
    ]


def test_a_limit_is_the_slowest_of_reading_and_instructions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In a rehearsal, each instruction is issued 10^9 times a second."""
    bench = common.Bench(1, rehearsal=True)
    kinds = ["fp32", "bf16", "fp8", "max of fp32", "max of bf16"]
    kinds += [f"{weight} {row}" for weight in ("int8", "int4") for row in ("int16", "int8")]
    for isa in ("avx2", "avx512", "avx512_bf16"):
        monkeypatch.setattr(specops, "get_isa", lambda isa=isa: isa)
        for kind in kinds:
            one, eight = (limits.instructions(bench, kind, 1e6, rows) for rows in (1, 8))
            assert one.keys() == eight.keys() <= set(limits.RATES)
            first = next(iter(one))
            assert eight == {**one, first: 8 * one[first]}
    work = limits.instructions(bench, "bf16", 3.2e10)
    assert limits.lowest_limit(bench, 6.4e10, 100, work) == ("dpbf16_512", 1)
    assert limits.lowest_limit(bench, 6.4e10, 32, work) == ("reading", pytest.approx(2))


def test_families_on_request_can_be_requested() -> None:
    assert set(ON_REQUEST) < set(FAMILIES)


def test_results_are_stored_per_cpu_model(tmp_path: Path) -> None:
    def name(cpu: str) -> str:
        return common.cpu_results(cpu).name

    assert name("AMD EPYC family 26") == "amd-epyc-family-26.json"
    assert name("Intel(R) Xeon(R) CPU @ 2.20GHz") == "intel-xeon.json"
    assert name("INTEL(R) XEON(R) PLATINUM 8592+") == "intel-xeon-platinum-8592.json"
    path = tmp_path / "it.json"
    figure = common.Figure("binding.a", "what", 1.0, "us")
    on = {"cpu": "AMD EPYC", "isa": "avx2"}
    common.save([figure], family="binding", minutes=0.1, versions={}, on=on, path=path)
    import json

    saved = json.loads(path.read_text())
    assert saved["machine"] == on and saved["runs"]["binding"]["on"] == "AMD EPYC"
    assert [row["id"] for row in saved["figures"]] == ["binding.a"]
    for results in common.RESULTS.glob("*.json"):
        machine = json.loads(results.read_text())["machine"]
        if "cpu" in machine:
            assert common.cpu_results(machine["cpu"]) == results
