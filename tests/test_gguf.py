# SPDX-License-Identifier: Apache-2.0
"""GGUF files: tensor types, models, tokenizers and refused files."""

import dataclasses
import itertools
import json
import os
import random
import struct
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from adapters import write_adapter
from checkpoints import make_checkpoint, write_tokenizer
from safetensors.torch import load_file
from specops import attention, dense
from specops.api.errors import ModelError
from specops.api.tokenizer import Tokenizer
from specops.checkpoints.directory import open_checkpoint
from specops.checkpoints.fused import fused
from specops.checkpoints.gguf_directory import gguf_directory
from specops.checkpoints.gguf_file import TYPES, read_gguf
from specops.checkpoints.gguf_tokenizer import end_token_ids, tokenizer_files
from specops.engine import Completion, Engine, EngineConfig, SamplingParams, SpeculativeConfig
from specops.engine.models import WeightCache, load_model
from specops.engine.models.families import read_model_config
from specops.quantization import QuantizedWeight, dequantize_weight
from test_models import Runner
from test_tokenizer import byte_level
from tokenizers import Tokenizer as HfTokenizer
from tokenizers import decoders, pre_tokenizers
from torch import Tensor

from tools import gemma, smollm2
from tools.gemma import cache_of

gguf = pytest.importorskip("gguf")

# Real models in the user's cache, by the target of the Makefile that fetches and serves each.
REAL_FILES = {
    "chat": cache_of("smollm2") / smollm2.NAME,
    "gemma": cache_of("gemma") / gemma.NAME,
}

# GGML type -> kind and group size of the quantized weight.
KINDS = {
    "Q4_0": ("int4", 32),
    "Q4_1": ("int4", 32),
    "Q5_0": ("int8", 32),
    "Q5_1": ("int8", 32),
    "Q8_0": ("int8", 32),
    "Q4_K": ("int4", 32),
    "Q5_K": ("int8", 32),
    "Q6_K": ("int8", 16),
    "IQ4_NL": ("int4", 32),
    "MXFP4": ("int4", 32),
}
DOWN = "blk.0.ffn_down.weight"
OURS = "model.layers.0.mlp.down_proj.weight"


def random_blocks(kind: str, rows: int, blocks: int) -> Tensor:
    """Return blocks of random bytes with finite scales: uint8 [rows, blocks * bytes]."""
    _, _, size = next(one for one in TYPES.values() if one[0] == kind)
    generator = torch.Generator().manual_seed(len(kind) + size)
    octets = torch.randint(0, 256, (rows, blocks, size), dtype=torch.uint8, generator=generator)
    halves = (torch.randn(rows, blocks, 2, generator=generator) * 0.1).half().view(torch.uint8)
    if kind == "Q6_K":
        octets[..., -2:] = halves[..., :2]
    elif kind == "MXFP4":
        octets[..., 0] = 110 + octets[..., 0] % 30
    else:
        wide = 4 if kind in ("Q4_1", "Q5_1", "Q4_K", "Q5_K") else 2
        octets[..., :wide] = halves[..., :wide]
    return octets.flatten(1)


def write(path: Path, tensors: dict[str, Any], architecture: str = "any", **metadata: Any) -> Path:
    """Write a file of these tensors, each a float tensor or (blocks, name of their type)."""
    writer = gguf.GGUFWriter(path / "model.gguf", architecture)
    for key, value in metadata.items():
        writer.add_key_value(key, value, gguf.GGUFValueType.get_type(value))
    for name, one in tensors.items():
        data, kind = (one, "F32") if isinstance(one, Tensor) else one
        raw = data.view(torch.uint8) if kind == "BF16" else data
        writer.add_tensor(name, raw.numpy(), raw_dtype=gguf.GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path / "model.gguf"


@pytest.mark.parametrize("kind", KINDS)
def test_block_types_decode_as_in_ggml(tmp_path: Path, kind: str) -> None:
    octets = random_blocks(kind, 5, 3)
    write(tmp_path, {DOWN: (octets, kind)})
    weight = open_checkpoint(tmp_path).load(OURS)
    assert isinstance(weight, QuantizedWeight) and (weight.kind, weight.group) == KINDS[kind]
    want = gguf.quants.dequantize(octets.numpy(), gguf.GGMLQuantizationType[kind])
    assert torch.equal(dequantize_weight(weight), torch.from_numpy(want))
    assert torch.equal(weight.scales.isfinite(), torch.ones_like(weight.scales, dtype=torch.bool))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_float_tensors_are_read_unchanged(tmp_path: Path, dtype: torch.dtype) -> None:
    numbers = torch.randn(3, 5).to(dtype)
    kind = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}[dtype]
    write(tmp_path, {"output_norm.weight": torch.ones(3), DOWN: (numbers, kind)})
    found = open_checkpoint(tmp_path).load(OURS)
    assert isinstance(found, Tensor) and found.dtype == dtype and torch.equal(found, numbers)


def test_tensor_names_are_translated(tmp_path: Path) -> None:
    """In layers with four norms, the norm before the MLP has another name."""
    names = ["token_embd.weight", "blk.0.ffn_norm.weight", "blk.11.attn_q.bias"]
    write(tmp_path, {name: torch.ones(2) for name in names})
    layers = "model.layers."
    want = {
        "model.embed_tokens.weight",
        f"{layers}0.post_attention_layernorm.weight",
        f"{layers}11.self_attn.q_proj.bias",
    }
    assert set(open_checkpoint(tmp_path).names()) == want
    write(tmp_path, {name: torch.ones(2) for name in (*names, "blk.0.post_attention_norm.weight")})
    assert set(open_checkpoint(tmp_path).names()) == want | {
        f"{layers}0.pre_feedforward_layernorm.weight"
    }


def error_of(directory: Path) -> str:
    with pytest.raises(ModelError) as error:
        open_checkpoint(directory).load(OURS)
    return str(error.value)


def test_unknown_types_and_tensors_are_refused(tmp_path: Path) -> None:
    file = write(tmp_path, {DOWN: (random_blocks("Q2_K", 2, 1), "Q2_K")})
    assert error_of(tmp_path).startswith(
        f"{file}: tensor {OURS} is [2, 256] of type Q2_K; supported types of matrices: F32,"
    )
    write(tmp_path, {"blk.0.ssm_a": torch.ones(3)})
    assert error_of(tmp_path) == f"{file}: tensor blk.0.ssm_a is not used by any supported model"
    write(tmp_path, {"output_norm.weight": torch.ones(3)})
    assert error_of(tmp_path) == f"{file}: tensor {OURS} is missing from the file"
    (tmp_path / "other.gguf").write_bytes(b"")
    assert error_of(tmp_path) == f"{tmp_path}: expected one GGUF file, got model.gguf, other.gguf"


def test_damaged_files_are_refused(tmp_path: Path) -> None:
    file = write(tmp_path, {DOWN: torch.ones(3, 4)}, note="text", numbers=[1, 2, 3])
    assert read_gguf(file).metadata["numbers"] == [1, 2, 3]
    whole = file.read_bytes()
    # A truncated file raises no other error.
    for length in (0, 3, 10, 30, 60, 100, len(whole) - 40):
        file.write_bytes(whole[:length])
        with pytest.raises(ModelError, match=r"truncated|not a GGUF file|cannot be read"):
            read_gguf(file)
    for changed, sentence in (
        (b"GGML" + whole[4:], "not a GGUF file: it begins with b'GGML'"),
        (whole[:4] + struct.pack("<I", 1) + whole[8:], "GGUF version must be 2 or 3, got 1"),
        (whole[:4] + struct.pack(">I", 3) + whole[8:], "GGUF version must be 2 or 3, got 50331648"),
        (whole[:8] + struct.pack("<Q", 1 << 60) + whole[16:], "the file is truncated"),
        (whole[:16] + struct.pack("<Q", 1 << 60) + whole[24:], ""),
    ):
        file.write_bytes(changed)
        with pytest.raises(ModelError) as error:
            read_gguf(file)
        assert sentence in str(error.value)


def test_lists_of_a_tokenizer_may_be_skipped(tmp_path: Path) -> None:
    texts = ["", "a", "\u2581caf\u00e9", "x" * 300]
    lists = {"tokenizer.ggml.tokens": texts, "tokenizer.ggml.scores": [0.0, -1.0, 2.5]}
    rest = {"numbers": [1, 2, 3], "texts": ["own"], "tokenizer.ggml.model": "llama"}
    file = write(tmp_path, {DOWN: torch.ones(3, 4)}, **lists, **rest)
    found, short = read_gguf(file), read_gguf(file, with_tokenizer=False)
    assert found.metadata.items() >= {**lists, **rest}.items()
    assert found.metadata == {**short.metadata, **lists}
    assert lists.keys().isdisjoint(short.metadata) and found.tensors == short.tensors
    whole = file.read_bytes()
    begin, end = whole.index(b"tokenizer.ggml.tokens"), whole.index(b"tokenizer.ggml.model")
    for length in range(begin, end, 3):
        file.write_bytes(whole[:length])
        for with_tokenizer in (True, False):
            with pytest.raises(ModelError, match="truncated"):
                read_gguf(file, with_tokenizer=with_tokenizer)
    at = whole.index(b"x" * 300) - 8
    for count in (301, 1 << 40, 1 << 63, (1 << 64) - 1):
        file.write_bytes(whole[:at] + struct.pack("<Q", count) + whole[at + 8 :])
        for with_tokenizer in (True, False):
            with pytest.raises(ModelError):
                read_gguf(file, with_tokenizer=with_tokenizer)


@pytest.mark.parametrize("shape", [(1, 1), (0, 64), (64, 0), (64,)])
def test_projection_rows_must_divide_into_heads(tmp_path: Path, shape: tuple[int, ...]) -> None:
    tensors = {"blk.0.attn_q.weight": torch.ones(shape)}
    write(tmp_path, tensors, "llama", **{"llama.attention.head_count": 3})
    with pytest.raises(ModelError, match=r"must have rows of (3 heads|a multiple of 1)"):
        open_checkpoint(tmp_path).load("model.layers.0.self_attn.q_proj.weight")


# ---- models ----

# Field of config.json -> GGUF key without the architecture's prefix.
KEYS = {
    "num_hidden_layers": "block_count",
    "max_position_embeddings": "context_length",
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
}
SIZES = {"rms_norm_eps": 2.0**-20, "vocab_size": 160}
GEMMA = {"sliding_window": 20, "sliding_window_pattern": 3, "query_pre_attn_scalar": 64}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "Qwen2": {},
    "Qwen3": {"tie_word_embeddings": False},
    "Llama": {"tie_word_embeddings": False, "rope_parameters": LLAMA3},
    "Gemma3": GEMMA,
}
LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "post_attention_layernorm": "ffn_norm",
}
GEMMA_NAMES = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}


def byte_tokenizer() -> dict[str, Any]:
    """Return the metadata of a tokenizer of 160 tokens: an end token, bytes and one merge."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())[:158]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": ["<|endoftext|>", *alphabet, "ab"],
        "tokenizer.ggml.token_type": [3] + [1] * 159,
        "tokenizer.ggml.merges": ["a b"],
        "tokenizer.ggml.eos_token_id": 0,
    }


def gguf_name(name: str, family: str) -> str:
    stem, _, suffix = name.removeprefix("model.").rpartition(".")
    if not stem.startswith("layers."):
        whole = {"embed_tokens": "token_embd", "norm": "output_norm", "lm_head": "output"}
        return f"{whole[stem]}.{suffix}"
    _, layer, own = stem.split(".", 2)
    names = {**LAYER_NAMES, **(GEMMA_NAMES if family == "Gemma3" else {})}
    return f"blk.{layer}.{names[own]}.{suffix}"


def tensors_of(source: Path, family: str, config: dict[str, Any]) -> dict[str, Any]:
    """Return a model's tensors as llama.cpp's converter writes them."""
    found = {}
    for name, one in load_file(source / "model.safetensors").items():
        if family == "Gemma3" and "norm" in name:
            one = one + 1
        if family == "Llama" and ("q_proj" in name or "k_proj" in name):
            kind = "attention" if "q_proj" in name else "key_value"
            heads = config[f"num_{kind}_heads"]
            one = one.view(heads, 2, -1, one.shape[-1]).transpose(1, 2).reshape(one.shape)
        found[gguf_name(name, family)] = one.contiguous()
    if family == "Llama":  # ratio of the angles of position 1, which are small enough for asin
        plain, scaled = (
            attention.rope_cos_sin(2, config["head_dim"], 5e5, one)[1, config["head_dim"] // 2 :]
            for one in (None, config["rope_parameters"])
        )
        found["rope_freqs.weight"] = plain.double().asin().div(scaled.double().asin()).float()
    return found


def metadata_of(family: str, config: dict[str, Any]) -> dict[str, Any]:
    prefix = family.lower()
    found = {f"{prefix}.{key}": config[name] for name, key in KEYS.items() if name in config}
    rope = config.get("rope_parameters") or {}
    if family == "Gemma3":
        found[f"{prefix}.attention.sliding_window"] = config["sliding_window"]
        found[f"{prefix}.attention.sliding_window_pattern"] = 3
        found[f"{prefix}.rope.freq_base_swa"] = rope["sliding_attention"]["rope_theta"]
        rope = rope["full_attention"]
    found[f"{prefix}.rope.freq_base"] = float(rope["rope_theta"])
    found[f"{prefix}.rope.dimension_count"] = config["head_dim"]
    return {**found, **byte_tokenizer()}


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Redirect the user's cache to an empty directory."""
    path = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("XDG_CACHE_HOME", str(path))
    return path


def make_file(directory: Path, family: str, **changes: Any) -> Path:
    """Write a random model of a family as a GGUF file, and as a checkpoint in `source`."""
    source = directory / "source"
    source.mkdir()
    make_checkpoint(source, family, **{**SIZES, **FAMILIES[family], **changes})
    config = json.loads((source / "config.json").read_text())
    tensors = tensors_of(source, family, config)
    return write(directory, tensors, family.lower(), **metadata_of(family, config))


def logits(directory: Path, **options: Any) -> Tensor:
    ids = [7 * i % 160 for i in range(40)]
    return Runner(load_model(directory, dtype="float32", **options)).run([ids], [[40]])[0]


@pytest.mark.parametrize("family", FAMILIES)
def test_gguf_model_equals_its_source_checkpoint(tmp_path: Path, family: str) -> None:
    """Names, metadata, row order and norms agree. The weights are floats: nothing is rounded."""
    file = make_file(tmp_path, family)
    directory = gguf_directory(file)
    assert torch.equal(logits(directory), logits(tmp_path / "source"))
    made, expected = read_model_config(directory), read_model_config(tmp_path / "source")
    for field in ("norm_offset", "dtype"):
        made = dataclasses.replace(made, **{field: getattr(expected, field)})
    assert made == expected


def test_adapter_of_a_gguf_model_equals_that_of_its_source(tmp_path: Path) -> None:
    """The rows of llama's queries have another order in the file than in the adapter."""
    file = make_file(tmp_path, "Llama")
    source = tmp_path / "source"
    write_tokenizer(source)
    adapter = write_adapter(tmp_path / "lora", source, 1)
    answers = []
    for model in (file, source):
        config = EngineConfig(
            model=str(model), dtype="float32", device="cpu", lora_modules=(("one", str(adapter)),)
        )
        params = SamplingParams(max_tokens=8, temperature=0.0, logprobs=2, ignore_eos=True)
        (done,) = Engine(config).generate([[5, 6, 7] * 5], params, adapter="one")
        answers.append((done.token_ids, done.logprobs))
    assert answers[0] == answers[1]


def quantized(file: Path, directory: Path, kinds: dict[str, str]) -> Path:
    """Copy a file, with random blocks of the given types for the named parts of all layers."""
    found = read_gguf(file)
    data = torch.from_file(str(file), size=file.stat().st_size, dtype=torch.uint8)
    tensors: dict[str, Any] = {}
    for name, one in found.tensors.items():
        part = name.split(".")[2] if name.startswith("blk.") else name
        if part in kinds:
            width = next(two for label, two, _ in TYPES.values() if label == kinds[part])
            blocks = random_blocks(kinds[part], one.shape[0], one.shape[1] // width)
            tensors[name] = (blocks, kinds[part])
        else:
            raw = data[one.offset : one.offset + one.num_bytes].clone()
            tensors[name] = raw.view(torch.float32).view(one.shape)
    architecture = found.metadata.pop("general.architecture")
    return write(directory, tensors, architecture, **found.metadata)


MIXED = {
    **{"token_embd.weight": "Q8_0", "output.weight": "Q6_K"},
    **{"attn_q": "Q5_0", "attn_k": "Q4_0", "attn_v": "Q6_K"},
    **{"attn_output": "Q4_K", "ffn_gate": "Q4_0", "ffn_up": "Q4_0", "ffn_down": "Q5_K"},
}
WIDE = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 2}


def test_projections_keep_the_quantized_values_of_the_file(tmp_path: Path) -> None:
    """Parts of several types are fused in the narrowest kind that holds them all."""
    (tmp_path / "mixed").mkdir()
    file = quantized(make_file(tmp_path, "Qwen3", **WIDE), tmp_path / "mixed", MIXED)
    directory = gguf_directory(file)
    model, checkpoint = load_model(directory, dtype="float32"), open_checkpoint(directory)

    def part(name: str) -> Any:
        return checkpoint.load(f"model.layers.1.{name}.weight")

    expected = [
        fused([part(f"self_attn.{one}_proj") for one in "qkv"], "qkv"),
        part("self_attn.o_proj"),
        fused([part("mlp.gate_proj"), part("mlp.up_proj")], ("gate", "up")),
        part("mlp.down_proj"),
    ]
    assert [(one.kind, one.group) for one in expected] == [
        ("int8", 16),
        ("int4", 32),
        ("int4", 32),
        ("int8", 32),
    ]
    activations = (None, None, "silu", None)
    for one, weight, activation in zip(model.layers[1].weights, expected, activations, strict=True):
        packed = dense.pack_weight(weight, activation=activation)
        for field, value in packed._asdict().items():
            found = getattr(one, field)
            same = torch.equal(found, value) if isinstance(value, Tensor) else found == value
            assert same, field
    embedding = checkpoint.load("model.embed_tokens.weight")
    assert isinstance(embedding, QuantizedWeight)
    assert torch.equal(model.embedding, dequantize_weight(embedding))
    assert model.lm_head.kind == "int8"


def test_packed_weights_are_cached_on_disk(tmp_path: Path) -> None:
    (tmp_path / "mixed").mkdir()
    file = quantized(make_file(tmp_path, "Qwen3", **WIDE), tmp_path / "mixed", MIXED)
    directory, cache = gguf_directory(file), WeightCache(tmp_path / "cache", 1 << 40)
    first = logits(directory)
    for _ in range(2):  # written, then mapped
        assert torch.equal(logits(directory, weight_cache=cache), first)
    # four projections of each of two layers, the LM head and the dequantized embedding
    assert len(list((tmp_path / "cache").rglob("*.safetensors"))) == 4 * 2 + 2


def test_speculation_changes_no_bit(tmp_path: Path) -> None:
    (tmp_path / "mixed").mkdir()
    file = quantized(make_file(tmp_path, "Qwen3", **WIDE), tmp_path / "mixed", MIXED)
    prompts = [[5, 9, 23, 77, 101, 5, 9, 44] * 4, [3, 3, 7] * 8]
    params = [
        SamplingParams(max_tokens=40, temperature=0, ignore_eos=True, logprobs=2),
        SamplingParams(max_tokens=40, temperature=0.8, seed=7, ignore_eos=True, logprobs=2),
    ]

    def completions(method: str) -> list[Completion]:
        drafts = None if method == "naive" else 4
        own = SpeculativeConfig(method=method, num_speculative_tokens=drafts)
        engine = Engine(EngineConfig(model=str(file), speculative_config=own, device="cpu"))
        assert engine.model_name == "model"
        found = engine.generate(prompts, params)
        assert method == "naive" or engine.stats.speculative.num_draft_tokens > 10
        return found

    for one, other in zip(completions("naive"), completions("ngram"), strict=True):
        assert one.token_ids == other.token_ids and one.logprobs == other.logprobs


@pytest.mark.parametrize(
    "changes,sentence",
    [
        ({"general.architecture": "mamba"}, "general.architecture must be one of"),
        ({"qwen3.attention.softcap": 3.0}, "qwen3.attention.softcap is not supported, got 3.0"),
        ({"qwen3.expert_count": 8}, "qwen3.expert_count is not supported, got 8"),
        (
            {"qwen3.tensor_data_layout": "rows"},
            "qwen3.tensor_data_layout is not supported",
        ),
        ({"qwen3.rope.dimension_count": 32}, "qwen3.rope.dimension_count must be the head size 64"),
        (
            {"qwen3.rope.scaling.type": "longrope"},
            "qwen3.rope.scaling.type longrope is not",
        ),
        ({"qwen3.block_count": -1}, "num_hidden_layers must be an integer of at least 1, got -1"),
        ({"qwen3.attention.head_count": None}, "'num_attention_heads' is missing"),
        ({"qwen3.block_count": 2}, "tensor model.layers.2"),
        ({"split.count": 2}, "split.count must be 1, got 2; merge its parts"),
        ({"split.count": "two"}, "split.count must be 1, got two"),
        ({"tokenizer.ggml.tokens": 7}, "tokenizer.ggml.tokens must be a list of texts, got 7"),
        ({"tokenizer.ggml.merges": [7]}, "tokenizer.ggml.merges must be a list of texts, got [7]"),
        ({"tokenizer.ggml.token_type": "a"}, "token_type must be a list of numbers, got 'a'"),
        ({"tokenizer.ggml.model": "rwkv"}, "tokenizer.ggml.model must be llama or gpt2, got rwkv"),
        ({"tokenizer.ggml.pre": "viking"}, "tokenizer.ggml.pre must be one of default, gpt-2,"),
        ({"tokenizer.ggml.pre": ["a"]}, "smollm, deepseek-llm, deepseek-coder, got ['a']"),
        (
            {"tokenizer.ggml.eot_token_id": -1},
            "ggml.eot_token_id must be a token id below 160",
        ),
        (
            {"tokenizer.ggml.eos_token_ids": [0, 160]},
            "ggml.eos_token_ids must be a token id",
        ),
        ({"tokenizer.ggml.tokens": ["a", "a"]}, "tokenizer.ggml.tokens must not repeat a token"),
        (
            {"tokenizer.ggml.eos_token_id": 160},
            "ggml.eos_token_id must be a token id below 160",
        ),
        ({"tokenizer.ggml.add_bos_token": True}, "tokenizer.ggml.bos_token_id is missing"),
    ],
)
def test_unsupported_metadata_is_refused(
    tmp_path: Path, changes: dict[str, Any], sentence: str
) -> None:
    file = make_file(tmp_path, "Qwen3")
    found = read_gguf(file)
    data = {name: torch.ones(one.shape) for name, one in found.tensors.items()}
    architecture = changes.get("general.architecture", found.metadata.pop("general.architecture"))
    metadata = {key: one for key, one in {**found.metadata, **changes}.items() if one is not None}
    metadata.pop("general.architecture", None)
    file = write(tmp_path, data, architecture, **metadata)
    with pytest.raises(ModelError) as error:
        load_model(gguf_directory(file))
    assert sentence in str(error.value)


def test_neutral_metadata_is_accepted(tmp_path: Path) -> None:
    file = make_file(tmp_path, "Qwen2")
    plain = read_model_config(gguf_directory(file))
    found = read_gguf(file)
    data = {name: torch.ones(one.shape) for name, one in found.tensors.items()}
    architecture = found.metadata.pop("general.architecture")
    neutral = {
        "qwen2.expert_count": 0,
        "qwen2.expert_used_count": 0,
        "qwen2.tensor_data_layout": "Meta AI original pth",
        "qwen2.rope.scaling.attn_factor": 1.0,
        "qwen2.rope.scaling.finetuned": True,
    }
    file = write(tmp_path, data, architecture, **found.metadata, **neutral)
    assert read_model_config(gguf_directory(file)) == plain


def test_unknown_rope_factors_are_refused(tmp_path: Path) -> None:
    file = make_file(tmp_path, "Llama")
    found = read_gguf(file)
    data = {name: torch.ones(one.shape) for name, one in found.tensors.items()}
    data["rope_freqs.weight"][-1] = 3.0
    architecture = found.metadata.pop("general.architecture")
    file = write(tmp_path, data, architecture, **found.metadata)
    with pytest.raises(ModelError, match=r"rope_freqs\.weight must hold the factors of Llama 3"):
        load_model(gguf_directory(file))


def test_converted_directory_is_reused_until_the_file_changes(tmp_path: Path, cache: Path) -> None:
    file = make_file(tmp_path, "Qwen3")
    first = gguf_directory(file)
    assert first.is_relative_to(cache) and gguf_directory(file) == first
    config = first / "config.json"
    config.write_text("{}")
    # The directory is not written again.
    assert gguf_directory(file) == first and config.read_text() == "{}"
    os.utime(file, (1, 1))
    assert gguf_directory(file) != first
    assert not [path for path in first.parent.iterdir() if path.name.startswith(".")]
    with pytest.raises(ModelError, match="no such file"):
        gguf_directory(tmp_path / "nowhere.gguf")
    with pytest.raises(ModelError, match="no such file"):
        EngineConfig(model=str(tmp_path / "nowhere.gguf")).model_dir  # noqa: B018


def test_concurrent_conversions_make_one_directory(tmp_path: Path) -> None:
    file = make_file(tmp_path, "Qwen3")
    with ThreadPoolExecutor(8) as pool:
        found = set(pool.map(lambda _: gguf_directory(file), range(8)))
    (directory,) = found
    assert sorted(path.name for path in directory.iterdir()) == [
        "config.json",
        "model.gguf",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    assert [path.name for path in directory.parent.iterdir()] == [directory.name]


# ---- tokenizers ----


def tokenizer_of(directory: Path, metadata: dict[str, Any]) -> Tokenizer:
    for name, value in tokenizer_files(metadata).items():
        (directory / name).write_text(json.dumps(value))
    return Tokenizer.from_dir(directory)


TEXTS = [
    "ab abab  a\tb\n\n",
    " leading",
    "naïve café 🙂 日本",
    "a" * 30 + "<|end|>b",
    "",
    "plain é x",
]


def test_byte_level_tokenizer_survives_conversion(tmp_path: Path) -> None:
    theirs = byte_level()
    stored = json.loads(theirs.to_str())
    vocabulary = sorted(theirs.get_vocab().items(), key=lambda one: one[1])
    added = {one["content"]: 3 if one["special"] else 4 for one in stored["added_tokens"]}
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": [token for token, _ in vocabulary],
        "tokenizer.ggml.token_type": [added.get(token, 1) for token, _ in vocabulary],
        "tokenizer.ggml.merges": [" ".join(merge) for merge in stored["model"]["merges"]],
        "tokenizer.ggml.eos_token_id": 0,
        "tokenizer.chat_template": "{{ messages }}",
    }
    ours = tokenizer_of(tmp_path, metadata)
    for text in TEXTS:
        assert ours.encode(text) == theirs.encode(text).ids
        assert ours.decode(ours.encode(text), skip_special_tokens=False) == text
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert config == {"eos_token": "<|end|>", "chat_template": "{{ messages }}"}


def test_merges_are_derived_from_token_scores(tmp_path: Path) -> None:
    """Neighbors whose joined token has the best score merge first; on ties, the leftmost."""
    pieces = ["▁", "a", "b", "c", "ab", "abc", "▁a", "bc", "▁ab", "ca", "cab", "aa", "aaaa"]
    specials = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    scores = {piece: float(-i) for i, piece in enumerate(random.Random(3).sample(pieces, 13))}
    tokens = [*specials, *pieces, "cc"]
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * len(pieces) + [4],
        "tokenizer.ggml.scores": [0.0] * 259 + [scores[piece] for piece in pieces] + [9.0],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.add_space_prefix": False,
    }

    def merged(text: str) -> list[str]:
        parts = list(text.replace(" ", "▁"))
        while True:
            pairs = [scores.get(a + b, -99.0) for a, b in itertools.pairwise(parts)]
            best = max(pairs, default=-99.0)
            if best == -99.0:
                return parts
            at = pairs.index(best)
            parts[at : at + 2] = ["".join(parts[at : at + 2])]

    ours = tokenizer_of(tmp_path, metadata)
    generator = random.Random(4)
    for _ in range(200):
        text = "".join(generator.choices("abc ", k=12)).replace("cc", "ca")
        want = [1, *(tokens.index(piece) for piece in merged(text))]
        assert ours.encode(text) == want
        assert ours.decode(want) == text
    assert ours.encode("ccé") == [1, len(tokens) - 1, 3 + 0xC3, 3 + 0xA9]
    assert ours.special_tokens == {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    metadata["tokenizer.ggml.add_space_prefix"] = True
    assert tokenizer_of(tmp_path, metadata).encode("b", add_special_tokens=False) == [
        tokens.index("▁"),
        tokens.index("b"),
    ]


@pytest.mark.parametrize(
    "texts,keys,ends",
    [
        # Gemma 3: a key names the end of a document, the token text the end of a turn. </s> is
        # HTML.
        (["<pad>", "<eos>", "<bos>", "</s>", "<end_of_turn>"], {"eos": 1}, [1, 4]),
        # Llama 3.1: ends of a turn, a message and a document.
        (["<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "a"], {"eos": 0}, [0, 1, 2]),
        # Qwen2.5 also has tokens that separate files.
        (
            ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|repo_name|>", "<|file_sep|>", "a"],
            {"eos": 2},
            [2, 0, 3, 4],
        ),
        # SmolLM2, followed by keys that name tokens with unknown texts.
        (["<|endoftext|>", "<|im_end|>", "a"], {"eos": 1}, [1, 0]),
        (["a", "b", "c", "d", "e"], {"eos": 4, "eot": 1, "eom": 0, "fim_sep": 2}, [4, 1, 0, 2]),
        # In harmony, <|end|> ends a message but not the output.
        (["<|end|>", "<|return|>", "<|call|>"], {"eos": 1}, [1, 2]),
        (["<|end|>", "a"], {}, [0]),
        (["a", "b"], {}, []),
    ],
)
def test_end_tokens_are_those_of_llama_cpp(
    tmp_path: Path, texts: list[str], keys: dict[str, int], ends: list[int]
) -> None:
    metadata: dict[str, Any] = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": [*texts, "x", "y", "xy"],
        "tokenizer.ggml.merges": ["x y"],
    }
    metadata |= {f"tokenizer.ggml.{name}_token_id": one for name, one in keys.items()}
    assert end_token_ids(metadata) == ends
    tensors = {"token_embd.weight": torch.zeros(len(texts) + 3, 32)}
    found = Tokenizer.from_dir(gguf_directory(write(tmp_path, tensors, "llama", **metadata)))
    assert found.eos_token_ids == set(ends)
    # The file marks them as normal tokens, but outputs must not contain their text.
    assert all(found.is_special(one) for one in ends)


def test_end_tokens_are_read_from_eos_token_ids(tmp_path: Path) -> None:
    metadata = {"tokenizer.ggml.tokens": ["a", "b"], "tokenizer.ggml.eos_token_ids": [1, 0]}
    assert end_token_ids(metadata) == [1, 0]


# The first parts of WORDS by pre-tokenizer.
WORDS = "It's 12345 coöperate HTTPServer, don't\n\n  x=\u4e2d\u6587\u3002 caf\u00e9!\r\n"
PARTS = {
    "qwen2": ["It", "'s", " ", "1", "2", "3", "4", "5", " coöperate", " HTTPServer", ","],
    "llama-bpe": ["It", "'s", " ", "123", "45", " coöperate", " HTTPServer", ","],
    "tekken": ["It", "'s", " ", "1", "2", "3", "4", "5", " coöperate", " HTTPServer", ","],
    "smollm": ["It", "'s", " ", "1", "2", "3", "4", "5", " coöperate", " HTTPServer", ","],
    "deepseek-coder": ["It", "'", "s", " ", "1", "2", "3", "4", "5", " coöperate"],
    "deepseek-llm": ["It", "'", "s", " ", "12345", " co", "ö", "perate", " HTTPServer", ","],
}


def splitter(pre: str) -> Any:
    """Return the pre-tokenizer of a file with this `tokenizer.ggml.pre`."""
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": ["a"],
        "tokenizer.ggml.merges": [],
        "tokenizer.ggml.pre": pre,
    }
    whole = tokenizer_files(metadata)["tokenizer.json"]
    return HfTokenizer.from_str(json.dumps(whole)).pre_tokenizer


def pieces_of(pre_tokenizer: Any, text: str) -> list[str]:
    decoder = decoders.ByteLevel()
    return [decoder.decode([piece]) for piece, _ in pre_tokenizer.pre_tokenize_str(text)]


def test_texts_are_split_as_by_the_models_own_pre_tokenizers() -> None:
    for pre, parts in PARTS.items():
        found = pieces_of(splitter(pre), WORDS)
        assert found[: len(parts)] == parts, pre
        assert "".join(found) == WORDS
    for pre, same in {
        "deepseek-r1-qwen": "qwen2",
        "llama3": "llama-bpe",
        "llama-v3": "llama-bpe",
        "smaug-bpe": "llama-bpe",
        "gpt-2": "default",
    }.items():
        assert pieces_of(splitter(pre), WORDS) == pieces_of(splitter(same), WORDS)


def test_split_expressions_agree_with_python_regex() -> None:
    """Compare the tokenizers library's regex engine with Python's on many kinds of characters."""
    regex = pytest.importorskip("regex")
    contractions = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
    rest = r"[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    words = r"[^\r\n\p{L}\p{N}]?\p{L}+"
    upper, lower = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
    known = {
        "qwen2": rf"{contractions}|{words}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+{rest}",
        "llama-bpe": rf"{contractions}|{words}|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+{rest}",
        "tekken": rf"[^\r\n\p{{L}}\p{{N}}]?{upper}*{lower}+|[^\r\n\p{{L}}\p{{N}}]?{upper}+{lower}*|"
        rf"\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    }
    generator = random.Random(7)
    letters = "aZéÉ́ǅ中ก🙂²Ⅻ'sTR veLL0123 \n\r\t/._-!。"
    for _ in range(300):
        text = "".join(generator.choices(letters, k=30))
        for pre, expression in known.items():
            assert pieces_of(splitter(pre), text) == regex.findall(expression, text), (
                pre,
                text,
            )
    # SmolLM's own pre-tokenizer has two steps: single digits, then GPT-2's expression.
    own = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)]
    )
    for _ in range(300):
        text = "".join(generator.choices(letters.replace("²", "").replace("Ⅻ", ""), k=30))
        assert pieces_of(splitter("smollm"), text) == pieces_of(own, text)


@pytest.mark.parametrize("pre,begins", [("llama-bpe", True), ("tekken", True), ("qwen2", False)])
def test_default_bos_token_depends_on_the_pre_tokenizer(
    tmp_path: Path, pre: str, begins: bool
) -> None:
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": ["<s>", "a"],
        "tokenizer.ggml.token_type": [3, 1],
        "tokenizer.ggml.merges": [],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.pre": pre,
    }
    assert tokenizer_of(tmp_path, metadata).encode("a") == ([0, 1] if begins else [1])
    metadata["tokenizer.ggml.add_bos_token"] = not begins
    assert tokenizer_of(tmp_path, metadata).encode("a") == ([1] if begins else [0, 1])


@pytest.mark.ci
@pytest.mark.parametrize("name", REAL_FILES)
def test_drafts_change_no_bit_of_a_real_model(name: str) -> None:
    """Greedy and seeded requests share a batch."""
    file = REAL_FILES[name]
    if not file.is_file():
        pytest.skip(f"{file.name} is absent: `make {name}` fetches it")
    speculative = SpeculativeConfig(method="ngram", num_speculative_tokens=4)
    engine = Engine(EngineConfig(model=str(file), device="cpu", speculative_config=speculative))
    texts = ["The capital of France is", "def add(a, b):\n    return", "1, 2, 3, 1, 2, 3, 1,"]
    prompts = [engine.tokenizer.encode(text) for text in texts]
    params = [
        SamplingParams(max_tokens=24, temperature=temperature, seed=7, logprobs=2, ignore_eos=True)
        for temperature in (0.0, 0.8, 0.0)
    ]
    plain = engine.generate(prompts, params, speculative_config={"method": "naive"})
    drafted = engine.generate(prompts, params)
    for one, other in zip(drafted, plain, strict=True):
        assert one.token_ids == other.token_ids and one.logprobs == other.logprobs
    assert sum(one.stats.num_accepted_tokens for one in drafted) > 0
    assert ("Paris" if name == "chat" else "France") in plain[0].text
