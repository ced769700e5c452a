# SPDX-License-Identifier: Apache-2.0
"""GGUF files: tensor types, models, tokenizers and refused files."""

import dataclasses
import itertools
import json
import math
import os
import random
import struct
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from adapters import write_adapter
from checkpoints import EXPERTS_BESIDE_MLP, KEYS_AS_VALUES, write_tokenizer
from gguf_files import ARCHITECTURES, FACTOR_LISTS, FACTORS, make_file, write
from safetensors.torch import load_file
from specops import dense
from specops.api.errors import ModelError
from specops.api.tokenizer import Tokenizer
from specops.checkpoints.directory import open_checkpoint
from specops.checkpoints.fused import fused
from specops.checkpoints.gguf_directory import gguf_directory
from specops.checkpoints.gguf_file import TYPES, GgufFile, read_gguf
from specops.checkpoints.gguf_tokenizer import end_token_ids, tokenizer_files
from specops.engine import Completion, Engine, EngineConfig, SamplingParams, SpeculativeConfig
from specops.engine.models import WeightCache, load_model, load_mtp
from specops.engine.models.families import read_model_config
from specops.quantization import QuantizedWeight, dequantize_weight
from test_experts import FAMILIES
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
    "Q2_K": ("int4", 16),
    "Q3_K": ("int4", 16),
    "Q4_K": ("int4", 32),
    "Q5_K": ("int8", 32),
    "Q6_K": ("int8", 16),
    "IQ4_NL": ("int4", 32),
    "IQ4_XS": ("int4", 32),
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
    if kind in ("Q3_K", "Q6_K"):
        octets[..., -2:] = halves[..., :2]
    elif kind == "Q2_K":
        octets[..., -4:] = halves
    elif kind == "MXFP4":
        octets[..., 0] = 110 + octets[..., 0] % 30
    else:
        wide = 4 if kind in ("Q4_1", "Q5_1", "Q4_K", "Q5_K") else 2
        octets[..., :wide] = halves[..., :wide]
    return octets.flatten(1)


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
    """In Gemma's layers with four norms, the norm before the MLP has another name."""
    names = ["token_embd.weight", "blk.0.ffn_norm.weight", "blk.11.attn_q.bias"]
    write(tmp_path, {name: torch.ones(2) for name in names})
    layers = "model.layers."
    want = {
        "model.embed_tokens.weight",
        f"{layers}0.post_attention_layernorm.weight",
        f"{layers}11.self_attn.q_proj.bias",
    }
    assert set(open_checkpoint(tmp_path).names()) == want
    names.append("blk.0.post_attention_norm.weight")
    write(tmp_path, {name: torch.ones(2) for name in names}, "gemma3")
    assert set(open_checkpoint(tmp_path).names()) == want | {
        f"{layers}0.pre_feedforward_layernorm.weight"
    }


def error_of(directory: Path) -> str:
    with pytest.raises(ModelError) as error:
        open_checkpoint(directory).load(OURS)
    return str(error.value)


def test_unknown_types_and_tensors_are_refused(tmp_path: Path) -> None:
    file = write(tmp_path, {DOWN: (random_blocks("IQ2_S", 2, 1), "IQ2_S")})
    assert error_of(tmp_path).startswith(
        f"{file}: tensor {OURS} is [2, 256] of type IQ2_S; supported types of matrices: F32,"
    )
    write(tmp_path, {"blk.0.ssm_d": torch.ones(3)})
    assert error_of(tmp_path) == f"{file}: tensor blk.0.ssm_d is not used by any supported model"
    write(tmp_path, {"output_norm.weight": torch.ones(3)})
    assert error_of(tmp_path) == f"{file}: tensor {OURS} is missing from the file"
    (tmp_path / "other.gguf").write_bytes(b"")
    assert error_of(tmp_path) == (
        f"{tmp_path}: expected one GGUF file, or the files of one model, got model.gguf, other.gguf"
    )


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


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Redirect the user's cache to an empty directory."""
    path = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("XDG_CACHE_HOME", str(path))
    return path


def logits(directory: Path, **options: Any) -> Tensor:
    ids = [7 * i % 160 for i in range(40)]
    return Runner(load_model(directory, dtype="float32", **options)).run([ids], [[40]])[0]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_gguf_model_equals_its_source_checkpoint(tmp_path: Path, architecture: str) -> None:
    """Names, metadata, row order and norms agree. The weights are floats: nothing is rounded."""
    file = make_file(tmp_path, architecture)
    directory = gguf_directory(file)
    assert torch.equal(logits(directory), logits(tmp_path / "source"))
    made, expected = read_model_config(directory), read_model_config(tmp_path / "source")
    for field in ("norm_offset", "dtype"):
        made = dataclasses.replace(made, **{field: getattr(expected, field)})
    assert made == expected


def test_adapter_of_a_gguf_model_equals_that_of_its_source(tmp_path: Path) -> None:
    """The rows of llama's queries have another order in the file than in the adapter."""
    file = make_file(tmp_path, "llama")
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


def test_factors_of_falcon_h1_are_in_its_weights(tmp_path: Path) -> None:
    """Factors that are powers of two round nothing."""
    directory = gguf_directory(make_file(tmp_path, "falcon-h1", **FACTORS, **FACTOR_LISTS))
    whole = logits(tmp_path / "source")
    assert torch.equal(logits(directory), whole)
    config = tmp_path / "source" / "config.json"
    raw = json.loads(config.read_text())
    for name, factor in {**FACTORS, **FACTOR_LISTS}.items():
        double = [2 * one for one in factor] if isinstance(factor, list) else 2 * factor
        config.write_text(json.dumps({**raw, name: double}))
        assert not torch.equal(logits(tmp_path / "source"), whole), name


def test_experts_of_gemma_4_are_read(tmp_path: Path) -> None:
    changes = {**EXPERTS_BESIDE_MLP, "num_kv_shared_layers": 0, "use_double_wide_mlp": False}
    directory = gguf_directory(make_file(tmp_path, "gemma4", **changes))
    assert torch.equal(logits(directory), logits(tmp_path / "source"))
    assert read_model_config(directory).layers == read_model_config(tmp_path / "source").layers


def test_latent_experts_of_nemotron_h_are_read(tmp_path: Path) -> None:
    directory = gguf_directory(make_file(tmp_path, "nemotron_h_moe", moe_latent_size=32))
    assert torch.equal(logits(directory), logits(tmp_path / "source"))


@pytest.mark.parametrize("part", ["mamba_rms_norm", "mamba_conv_bias"])
def test_tensors_show_whether_mamba_2_has_a_norm_and_a_bias(tmp_path: Path, part: str) -> None:
    directory = gguf_directory(make_file(tmp_path, "falcon-h1", **{part: False}))
    assert torch.equal(logits(directory), logits(tmp_path / "source"))


@pytest.mark.parametrize("num_key_heads", [1, 2])
def test_keys_of_gemma_4_are_values_if_the_file_has_no_values(
    tmp_path: Path, num_key_heads: int
) -> None:
    """This Gemma 4 has no per-layer embeddings, and no layers that share keys and values."""
    changes = {
        **KEYS_AS_VALUES,
        "num_key_value_heads": num_key_heads,
        "attention_bias": False,
        "num_kv_shared_layers": 0,
        "use_double_wide_mlp": False,
        "final_logit_softcapping": None,
    }
    directory = gguf_directory(make_file(tmp_path, "gemma4", **changes))
    assert torch.equal(logits(directory), logits(tmp_path / "source"))
    assert read_model_config(directory).layers[2].attention.values_are_keys


def test_settings_of_yarn_and_of_experts_are_read(tmp_path: Path) -> None:
    """This DeepSeek also has a single query projection, and one group of experts."""
    directory = gguf_directory(make_file(tmp_path, "deepseek2", **FAMILIES["deepseek_v3_yarn"][1]))
    assert torch.equal(logits(directory), logits(tmp_path / "source"))


def test_ministral_3_is_read_up_to_the_context_of_its_training(tmp_path: Path) -> None:
    """Its other settings are those of Mistral, and YaRN's factor on cosines and sines is 1."""
    rope = {
        "rope_type": "yarn",
        "rope_theta": 1e6,
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    }
    directory = gguf_directory(make_file(tmp_path, "mistral3", rope_parameters=rope))
    assert read_model_config(directory).max_model_len == 64
    assert torch.equal(logits(directory), logits(tmp_path / "source"))


def floats_of(file: GgufFile) -> dict[str, Tensor]:
    """Return the tensors of a file, dequantized by the gguf package."""
    data = torch.from_file(str(file.path), size=file.path.stat().st_size, dtype=torch.uint8)
    found = {}
    for name, one in file.tensors.items():
        raw = data[one.offset : one.offset + one.num_bytes].view(*one.shape[:-1], -1).numpy()
        floats = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[one.type])
        found[name] = torch.from_numpy(floats.copy())
    return found


def split_keys(tensors: dict[str, Any], stored: dict[str, Tensor]) -> None:
    """Replace the expansions of keys and values by the matrix of both, as in older files."""
    for name in [name for name in tensors if "attn_k_b" in name]:
        layer = name.split(".")[1]
        del tensors[name], tensors[name.replace("k_b", "v_b")]
        source = stored[f"model.layers.{layer}.self_attn.kv_b_proj.weight"]
        tensors[f"blk.{layer}.attn_kv_b.weight"] = source


def fused_inputs(tensors: dict[str, Any], stored: dict[str, Tensor]) -> None:
    """Replace the projections of linear attention by the checkpoint's, as in older files."""
    for name in [name for name in tensors if "attn_gate" in name]:
        layer = name.split(".")[1]
        del tensors[name], tensors[name.replace("gate", "qkv")]
        source = stored[f"model.layers.{layer}.linear_attn.in_proj_qkvz.weight"]
        tensors[f"blk.{layer}.ssm_in.weight"] = source


def fused_experts(tensors: dict[str, Any], _: dict[str, Tensor]) -> None:
    """Join gates and ups, and drop the first dimension of vectors."""
    for name in [name for name in tensors if "ffn_gate_exps" in name]:
        halves = (tensors.pop(name), tensors.pop(name.replace("gate", "up")))
        tensors[name.replace("gate", "gate_up")] = torch.cat(halves, 1)
    for name in [name for name in tensors if "gate_inp_shexp" in name]:
        tensors[name] = tensors[name].flatten()


@pytest.mark.parametrize(
    "architecture,change,metadata",
    [
        (
            "deepseek2",
            split_keys,
            {
                **dict.fromkeys(("attention.key_length_mla", "attention.value_length_mla")),
                "attention.key_length": 96,
                "attention.value_length": 48,
                "attention.head_count_kv": 4,
            },
        ),
        ("qwen3next", fused_inputs, {"attention.recurrent_layers": None}),
        ("qwen35moe", fused_experts, {}),
    ],
)
def test_other_layouts_of_llama_cpp_are_read(
    tmp_path: Path, architecture: str, change: Any, metadata: dict[str, Any]
) -> None:
    options = {}
    if "attention.recurrent_layers" in metadata:
        options["layer_types"] = ["linear_attention"] * 3 + ["full_attention"]
        options["num_hidden_layers"] = 4
    found = read_gguf(make_file(tmp_path, architecture, **options))
    tensors: dict[str, Any] = dict(floats_of(found))
    change(tensors, load_file(tmp_path / "source" / "model.safetensors"))
    own = {f"{architecture}.{key}": value for key, value in metadata.items()}
    whole = {key: one for key, one in {**found.metadata, **own}.items() if one is not None}
    del whole["general.architecture"]
    directory = gguf_directory(write(tmp_path, tensors, architecture, **whole))
    assert torch.equal(logits(directory), logits(tmp_path / "source"))


WITH_MODULES = ("glm4moe", "qwen3next", "qwen35", "qwen35moe")


@pytest.mark.parametrize("architecture", WITH_MODULES)
def test_mtp_modules_of_a_gguf_file_equal_those_of_its_source(
    tmp_path: Path, architecture: str
) -> None:
    directory = gguf_directory(make_file(tmp_path, architecture, modules=1))
    found, expected = (
        load_mtp(load_model(one, dtype="float32"), one).modules[0]
        for one in (directory, tmp_path / "source")
    )
    for name in ("embed_norm", "hidden_norm", "head_norm"):
        assert torch.equal(getattr(found, name).weight, getattr(expected, name).weight)
    pairs = zip(found.layer.weights, expected.layer.weights, strict=True)
    for one, other in [(found.projection, expected.projection), *pairs]:
        assert torch.equal(one.data, other.data)


def test_files_of_one_model_are_read_together(tmp_path: Path) -> None:
    first = make_file(tmp_path, "qwen3", parts=10)
    files = sorted(tmp_path.glob("*.gguf"))
    assert len(files) == 4 and first == files[0]
    directory = gguf_directory(files[2])
    assert directory == gguf_directory(first)
    assert torch.equal(logits(directory), logits(tmp_path / "source"))
    whole = files[1].read_bytes()
    files[1].write_bytes(files[2].read_bytes())
    with pytest.raises(ModelError, match=r"00002-of-00004.gguf: split.no must be 1, got 2"):
        gguf_directory(first)
    files[1].write_bytes(whole)
    os.utime(files[3], (1, 1))
    assert gguf_directory(first) != directory
    files[3].unlink()
    with pytest.raises(ModelError, match=r"model-00004-of-00004.gguf: no such file"):
        gguf_directory(first)
    files[0].rename(tmp_path / "model.gguf")
    with pytest.raises(ModelError, match=r"split.count must be the number of files, 1, got 4"):
        gguf_directory(tmp_path / "model.gguf")


def quantized(file: Path, directory: Path, kinds: dict[str, str]) -> Path:
    """Copy a file, with random blocks of the given types for the named parts of all layers."""
    found = read_gguf(file)
    tensors: dict[str, Any] = dict(floats_of(found))
    for name, one in found.tensors.items():
        part = name.split(".")[2] if name.startswith("blk.") else name
        if part in kinds and name.endswith("weight") and len(one.shape) > 1:
            width = next(two for label, two, _ in TYPES.values() if label == kinds[part])
            *rows, inputs = one.shape
            blocks = random_blocks(kinds[part], math.prod(rows), inputs // width)
            tensors[name] = (blocks.view(*rows, -1), kinds[part])
    architecture = found.metadata.pop("general.architecture")
    return write(directory, tensors, architecture, **found.metadata)


MIXED = {
    **{"token_embd.weight": "Q8_0", "output.weight": "Q6_K"},
    **{"attn_q": "Q5_0", "attn_k": "Q4_0", "attn_v": "Q6_K"},
    **{"attn_output": "Q4_K", "ffn_gate": "Q4_0", "ffn_up": "Q4_0", "ffn_down": "Q5_K"},
}
WIDE = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 2}
K_EXPERTS = {"ffn_gate_exps": "Q4_K", "ffn_up_exps": "Q3_K", "ffn_down_exps": "Q6_K"}
LINEAR = {
    **{"attn_qkv": "Q2_K", "attn_gate": "IQ4_XS", "ssm_out": "Q8_0", "ssm_ba": "Q8_0"},
    **{"ssm_alpha": "Q5_0", "ssm_beta": "Q5_0", **K_EXPERTS},
}
# Architecture -> types by part, and changes to the model.
QUANTIZED: dict[str, tuple[dict[str, str], dict[str, Any]]] = {
    "llama": (MIXED, WIDE),
    "qwen3": (MIXED, WIDE),
    "gemma4": (
        {**MIXED, "inp_gate": "Q4_K", "proj": "Q8_0", "per_layer_token_embd.weight": "Q8_0"},
        {"hidden_size": 256, "intermediate_size": 256},
    ),
    "mistral3": (MIXED, WIDE),
    "qwen3moe": ({**MIXED, **K_EXPERTS}, {**WIDE, "moe_intermediate_size": 256}),
    "gpt-oss": (dict.fromkeys(K_EXPERTS, "MXFP4"), WIDE),
    "deepseek2": (
        {"attn_k_b": "Q8_0", "attn_v_b": "Q4_K", **K_EXPERTS},
        {**WIDE, "moe_intermediate_size": 256},
    ),
    "kimi-linear": (
        {
            **{**MIXED, **K_EXPERTS, "attn_output": "Q8_0"},
            **{"attn_k_b": "Q8_0", "attn_v_b": "Q4_K"},
            **{"ssm_f_a": "Q4_0", "ssm_f_b": "Q5_0", "ssm_g_a": "Q4_K", "ssm_g_b": "Q8_0"},
            **{"ffn_gate_shexp": "Q4_K", "ffn_up_shexp": "Q4_0", "ffn_down_shexp": "Q6_K"},
        },
        {**WIDE, "moe_intermediate_size": 256, "num_hidden_layers": 4},
    ),
    "glm4moe": (dict.fromkeys(K_EXPERTS, "IQ4_NL"), WIDE | {"moe_intermediate_size": 64}),
    **dict.fromkeys(
        ("falcon-h1", "nemotron_h"),
        ({**MIXED, "ssm_in": "Q5_K", "ssm_out": "Q8_0"}, {**WIDE, "mamba_d_ssm": 96}),
    ),
    "nemotron_h_moe": (
        {
            **{**MIXED, **K_EXPERTS, "ssm_in": "Q4_K", "ssm_out": "Q4_0"},
            **{"ffn_up_shexp": "Q4_0", "ffn_down_shexp": "Q6_K"},
        },
        {**WIDE, "moe_intermediate_size": 256, "moe_shared_expert_intermediate_size": 256},
    ),
    "granitehybrid": (
        {
            **{**MIXED, **K_EXPERTS, "ssm_in": "Q5_K", "ssm_out": "Q8_0"},
            **{"ffn_gate_shexp": "Q4_K", "ffn_up_shexp": "Q4_0", "ffn_down_shexp": "Q6_K"},
        },
        {
            **WIDE,
            "shared_intermediate_size": 256,
            "layer_types": ["full_attention", "linear_attention"],
            "mamba_n_heads": 32,
        },
    ),
    **dict.fromkeys(
        ("qwen3next", "qwen35", "qwen35moe"),
        (
            LINEAR,
            {
                **WIDE,
                "moe_intermediate_size": 256,
                "layer_types": ["full_attention", "linear_attention"],
            },
        ),
    ),
}


@pytest.mark.parametrize("architecture", QUANTIZED)
def test_rearranged_tensors_keep_their_values(tmp_path: Path, architecture: str) -> None:
    """Heads and experts are selected from quantized tensors as from floats."""
    mixed, plain = tmp_path / "mixed", tmp_path / "plain"
    mixed.mkdir(), plain.mkdir()
    kinds, changes = QUANTIZED[architecture]
    found = read_gguf(quantized(make_file(tmp_path, architecture, **changes), mixed, kinds))
    found.metadata.pop("general.architecture")
    write(plain, floats_of(found), architecture, **found.metadata)
    ours, theirs = open_checkpoint(mixed), open_checkpoint(plain)
    assert ours.names() == theirs.names()
    assert len({one.type for one in found.tensors.values()}) > 1
    for name in ours.names():
        one, other = ours.load(name), theirs.load(name)
        values = one if isinstance(one, Tensor) else dequantize_weight(one)
        assert torch.equal(values, other), name


def test_projections_keep_the_quantized_values_of_the_file(tmp_path: Path) -> None:
    """Parts of several types are fused in the narrowest kind that holds them all."""
    (tmp_path / "mixed").mkdir()
    file = quantized(make_file(tmp_path, "qwen3", **WIDE), tmp_path / "mixed", MIXED)
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


@pytest.mark.usefixtures("empty_disk")
def test_packed_weights_are_cached_on_disk(tmp_path: Path) -> None:
    (tmp_path / "mixed").mkdir()
    file = quantized(make_file(tmp_path, "qwen3", **WIDE), tmp_path / "mixed", MIXED)
    directory, cache = gguf_directory(file), WeightCache(tmp_path / "cache", 1 << 40)
    first = logits(directory)
    for _ in range(2):  # written, then mapped
        assert torch.equal(logits(directory, weight_cache=cache), first)
    # Four projections of each of two layers, the LM head, the dequantized embedding and a table of
    # the rotary embedding.
    assert len(list((tmp_path / "cache").rglob("*.safetensors"))) == 4 * 2 + 3


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.fast("qwen3", "deepseek2", "qwen35moe")
def test_speculation_changes_no_bit(tmp_path: Path, architecture: str) -> None:
    kinds, changes = QUANTIZED.get(architecture, ({}, {}))
    (tmp_path / "mixed").mkdir()
    has_module = architecture in WITH_MODULES
    whole = make_file(tmp_path, architecture, modules=int(has_module), **changes)
    file = quantized(whole, tmp_path / "mixed", kinds)
    prompts = [[5, 9, 23, 77, 101, 5, 9, 44] * 4, [3, 3, 7] * 8]
    params = [
        SamplingParams(max_tokens=40, temperature=0, ignore_eos=True, logprobs=2),
        SamplingParams(max_tokens=40, temperature=0.8, seed=7, ignore_eos=True, logprobs=2),
    ]

    def completions(method: str) -> list[Completion]:
        drafts = None if method == "naive" else 4
        own = SpeculativeConfig.from_dict(
            {"method": method, "num_speculative_tokens": drafts, "min_ngram_size": 1}
        )
        engine = Engine(EngineConfig(model=str(file), speculative_config=own, device="cpu"))
        assert engine.model_name == "model"
        found = engine.generate(prompts, params)
        assert method == "naive" or engine.stats.speculative.num_draft_tokens > 10
        return found

    plain = completions("naive")
    for method in ("ngram", "mtp") if has_module else ("ngram",):
        for one, other in zip(plain, completions(method), strict=True):
            assert one.token_ids == other.token_ids and one.logprobs == other.logprobs


@pytest.mark.parametrize(
    "changes,sentence",
    [
        ({"general.architecture": "mamba"}, "general.architecture must be one of"),
        ({"qwen3.attention.softcap": 3.0}, "qwen3.attention.softcap is not supported, got 3.0"),
        ({"qwen3.expert_count": 8}, "qwen3.expert_count is not supported, got 8"),
        ({"qwen3.nextn_predict_layers": 3}, "num_hidden_layers must be an integer of at least 1"),
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
        ({"split.count": 2}, "split.count must be the number of files, 1, got 2; names of a model"),
        ({"split.count": "two"}, "split.count must be the number of files, 1, got two"),
        ({"tokenizer.ggml.tokens": 7}, "tokenizer.ggml.tokens must be a list of texts, got 7"),
        ({"tokenizer.ggml.merges": [7]}, "tokenizer.ggml.merges must be a list of texts, got [7]"),
        ({"tokenizer.ggml.token_type": "a"}, "token_type must be a list of numbers, got 'a'"),
        ({"tokenizer.ggml.model": "rwkv"}, "ggml.model must be llama, gemma4 or gpt2, got rwkv"),
        ({"tokenizer.ggml.pre": "viking"}, "tokenizer.ggml.pre must be one of default, gpt-2,"),
        ({"tokenizer.ggml.pre": ["a"]}, "glm4, kimi-k2, deepseek-coder, got ['a']"),
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
    file = make_file(tmp_path, "qwen3")
    found = read_gguf(file)
    data = {name: torch.ones(one.shape) for name, one in found.tensors.items()}
    architecture = changes.get("general.architecture", found.metadata.pop("general.architecture"))
    metadata = {key: one for key, one in {**found.metadata, **changes}.items() if one is not None}
    metadata.pop("general.architecture", None)
    file = write(tmp_path, data, architecture, **metadata)
    with pytest.raises(ModelError) as error:
        load_model(gguf_directory(file))
    assert sentence in str(error.value)


@pytest.mark.parametrize(
    "architecture,changes,sentence",
    [
        ("deepseek2", {"expert_gating_func": 1}, "deepseek2.expert_gating_func must be 2, got 1"),
        ("deepseek2", {"expert_gating_func": None}, "expert_gating_func must be 2, got None"),
        ("deepseek2", {"attention.head_count": 0}, "num_attention_heads must be an integer"),
        ("glm4moe", {"expert_gating_func": 1}, "glm4moe.expert_gating_func must be 2, got 1"),
        ("glm4moe", {"nextn_predict_layers": "a"}, "num_nextn_predict_layers must be an integer"),
        ("glm4moe", {"block_count": "a", "nextn_predict_layers": 1}, "num_hidden_layers must be"),
        ("qwen35", {"attention.recurrent_layers": 1}, "recurrent_layers must be a list of flags"),
        ("qwen35", {"attention.recurrent_layers": [True]}, "layer_types must hold num_hidden"),
        ("qwen35", {"ssm.time_step_rank": 3}, "linear_num_value_heads must be a multiple of"),
        ("qwen35", {"ssm.group_count": None}, "linear_num_value_heads must be a multiple"),
        ("mistral3", {"attention.temperature_scale": 0.1}, "'original_max_position_embeddings' is"),
        ("mistral3", {"attention.temperature_scale": "a"}, "temperature_scale must be a number"),
        ("gpt-oss", {"rope.scaling.yarn_ext_factor": 2.0}, "rope.scaling.type yarn is not"),
        ("gpt-oss", {"rope.scaling.type": [1]}, "rope.scaling.type [1] is not supported"),
        ("nemotron_h", {"attention.head_count_kv": 2}, "num_key_value_heads must list block_count"),
        ("nemotron_h", {"feed_forward_length": [0, 0]}, "intermediate_size must list block_count="),
        ("nemotron_h", {"feed_forward_length": [3, 0, 9]}, "must be 0 or the same in all layers"),
        ("nemotron_h_moe", {"ssm.inner_size": 9}, "ssm.inner_size must be a multiple of 8 heads"),
        ("gemma4", {"attention.value_length": 64}, "global_value_length must be the head size 128"),
        ("gemma4", {"rope.dimension_count_swa": 32}, "rotary_dim must be the head size 64, got 32"),
        ("gemma4", {"attention.head_count_kv": [1]}, "num_key_value_heads must list block_count=8"),
        ("gemma4", {"attention.sliding_window_pattern": 6}, "sliding_window_pattern must list blo"),
        ("gemma4", {"feed_forward_length": [96] * 8}, "and twice as large in others, got [96, 96"),
        ("nemotron_h_moe", {"nextn_predict_layers": 1}, "nextn_predict_layers must be 0, got 1"),
        ("kimi-linear", {"attention.head_count_kv": 1}, "must list block_count=4 values, got 1"),
        ("kimi-linear", {"expert_gating_func": 1}, "kimi-linear.expert_gating_func must be 2"),
    ],
)
def test_unsupported_settings_of_a_family_are_refused(
    tmp_path: Path, architecture: str, changes: dict[str, Any], sentence: str
) -> None:
    found = read_gguf(make_file(tmp_path, architecture))
    own = {f"{architecture}.{key}": one for key, one in changes.items()}
    whole = {key: one for key, one in {**found.metadata, **own}.items() if one is not None}
    del whole["general.architecture"]
    file = write(tmp_path, floats_of(found), architecture, **whole)
    with pytest.raises(ModelError) as error:
        load_model(gguf_directory(file))
    assert sentence in str(error.value)


@pytest.mark.parametrize(
    "architecture,part,shape,sentence",
    [
        ("deepseek2", "attn_k_b.weight", (7, 512), "does not fit the sizes in the metadata: it is"),
        ("qwen35", "ssm_conv1d.weight", (3, 4), "must have 256 rows, got 3"),
        ("qwen35", "ssm_beta.weight", (9, 64), "must have 4 rows, got 9"),
        ("qwen35", "ssm_out.weight", (64, 7), "must have 128 columns, got 7"),
        ("qwen3next", "attn_gate.weight", (3, 64), "must have 384 rows, got 259"),
    ],
)
def test_parts_of_other_sizes_are_refused(
    tmp_path: Path, architecture: str, part: str, shape: tuple[int, ...], sentence: str
) -> None:
    found = read_gguf(make_file(tmp_path, architecture))
    tensors = {
        name: torch.ones(shape) if name.endswith(part) else one
        for name, one in floats_of(found).items()
    }
    del found.metadata["general.architecture"]
    file = write(tmp_path, tensors, architecture, **found.metadata)
    with pytest.raises(ModelError, match=sentence):
        load_model(gguf_directory(file))


@pytest.mark.parametrize(
    "architecture,part,sentence",
    [
        ("deepseek2", "attn_v_b.weight", "is incomplete: blk.0.attn_v_b.weight is missing"),
        ("qwen3next", "attn_gate.weight", "is incomplete: blk.1.attn_gate.weight is missing"),
        ("qwen3moe", "ffn_up_exps.weight", "experts.0.up_proj.weight is missing"),
        ("gemma4", "rope_freqs.weight", "tensor rope_freqs.weight must be in the file"),
        ("falcon-h1", "output.weight", "output.weight must be in the file: the embedding has anot"),
    ],
)
def test_missing_parts_are_named(
    tmp_path: Path, architecture: str, part: str, sentence: str
) -> None:
    found = read_gguf(make_file(tmp_path, architecture))
    tensors = {name: one for name, one in floats_of(found).items() if not name.endswith(part)}
    del found.metadata["general.architecture"]
    file = write(tmp_path, tensors, architecture, **found.metadata)
    with pytest.raises(ModelError) as error:
        load_model(gguf_directory(file))
    assert sentence in str(error.value)


def test_neutral_metadata_is_accepted(tmp_path: Path) -> None:
    file = make_file(tmp_path, "qwen2")
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


@pytest.mark.parametrize(
    "architecture,sentence",
    [
        ("llama", r"rope_freqs\.weight must hold the factors of Llama 3"),
        ("gemma4", r"rope_freqs\.weight must only hold ones, and then only 1e30"),
    ],
)
def test_unknown_rope_factors_are_refused(tmp_path: Path, architecture: str, sentence: str) -> None:
    file = make_file(tmp_path, architecture)
    found = read_gguf(file)
    data = {name: torch.ones(one.shape) for name, one in found.tensors.items()}
    data["rope_freqs.weight"][-1] = 3.0
    del found.metadata["general.architecture"]
    file = write(tmp_path, data, architecture, **found.metadata)
    with pytest.raises(ModelError, match=sentence):
        load_model(gguf_directory(file))


def test_converted_directory_is_reused_until_the_file_changes(tmp_path: Path, cache: Path) -> None:
    file = make_file(tmp_path, "qwen3")
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
    file = make_file(tmp_path, "qwen3")
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


@pytest.mark.parametrize("unclear", [[], [" ", " b"], ["#version", "#versionb"]])
def test_merges_are_derived_from_token_scores(tmp_path: Path, unclear: list[str]) -> None:
    """Neighbors whose joined token has the best score merge first; on ties, the leftmost.

    Merges of `unclear` tokens cannot be stored as texts.
    """
    pieces = ["▁", "a", "b", "c", "ab", "abc", "▁a", "bc", "▁ab", "ca", "cab", "aa", "aaaa"]
    specials = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    scores = {piece: float(-i) for i, piece in enumerate(random.Random(3).sample(pieces, 13))}
    scores |= dict.fromkeys(unclear, -20.0)
    pieces += unclear
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
    stored = json.loads((tmp_path / "tokenizer.json").read_text())["model"]["merges"]
    assert {type(one) for one in stored} == ({list} if unclear else {str})
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


@pytest.mark.parametrize("adds_bos", [None, False])
def test_gemma_4_splits_texts_at_newlines_and_merges_characters(
    tmp_path: Path, adds_bos: bool | None
) -> None:
    """The first merge of the file that fits is made first; on ties, the leftmost one."""
    bytes_of = [f"<0x{byte:02X}>" for byte in range(256)]
    listed = ["\n \n", "\u2581 a", "a b", "ab c", "\n\n \n", "b c", "\u2581a b", "c a", "\n\n \n\n"]
    merges = random.Random(5).sample(listed, len(listed))
    pieces = ["\u2581", "a", "b", "c", "\n", *dict.fromkeys(one.replace(" ", "") for one in listed)]
    tokens = ["<pad>", "<eos>", "<bos>", "<unk>", *bytes_of, *pieces, "<turn|>"]
    metadata = {
        "tokenizer.ggml.model": "gemma4",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3, 3, 3, 2] + [6] * 256 + [1] * len(pieces) + [3],
        "tokenizer.ggml.scores": [0.0] * len(tokens),
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": 2,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.ggml.unknown_token_id": 3,
        "tokenizer.ggml.add_space_prefix": False,
    }
    if adds_bos is not None:
        metadata["tokenizer.ggml.add_bos_token"] = adds_bos
    ranks = {tuple(one.split(" ")): rank for rank, one in enumerate(merges)}

    def merged(text: str) -> list[str]:
        parts = list(text.replace(" ", "\u2581"))
        while True:
            found = [ranks.get(pair, len(ranks)) for pair in itertools.pairwise(parts)]
            best = min(found, default=len(ranks))
            if best == len(ranks):
                return parts
            at = found.index(best)
            parts[at : at + 2] = ["".join(parts[at : at + 2])]

    ours = tokenizer_of(tmp_path, metadata)
    generator = random.Random(4)
    for _ in range(200):
        text = "".join(generator.choices("abc \n", k=14))
        want = [2, *(tokens.index(piece) for piece in merged(text))]
        assert ours.encode(text) == want
        assert ours.decode(want) == text
    assert ours.encode("\u00e9<turn|>") == [2, 4 + 0xC3, 4 + 0xA9, len(tokens) - 1]


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
        # Gemma 4: ends of a document, a turn, and a request for a tool's response.
        (["<eos>", "<|turn>", "<turn|>", "</s>", "<|tool_response>"], {"eos": 0}, [0, 2, 4]),
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
    "default": ["It", "'", "s", " ", "123", "45", " coöperate", " HTTPServer", ","],
    "gpt-2": ["It", "'s", " 12345", " coöperate", " HTTPServer", ","],
    "qwen2": ["It", "'s", " ", "1", "2", "3", "4", "5", " coöperate", " HTTPServer", ","],
    "llama-bpe": ["It", "'s", " ", "123", "45", " coöperate", " HTTPServer", ","],
    "tekken": ["It", "'s", " ", "1", "2", "3", "4", "5", " coöperate", " HTTPServer", ","],
    "smollm": ["It", "'s", " ", "1", "2", "3", "4", "5", " coöperate", " HTTPServer", ","],
    "qwen35": ["It", "'s", " ", "1", "2", "3", "4", "5", " coöperate", " HTTPServer", ","],
    "gpt-4o": ["It's", " ", "123", "45", " coöperate", " HTTPServer", ","],
    "kimi-k2": ["It's", " ", "123", "45", " coöperate", " HTTPServer", ","],
    "glm4": ["It", "'s", " ", "123", "45", " coöperate", " HTTPServer", ","],
    "deepseek-v3": ["It", "'s", " ", "123", "45", " coöperate", " HTTPServer", ","],
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
        "falcon-h1": "llama-bpe",
        "smaug-bpe": "llama-bpe",
        "dbrx": "llama-bpe",
        "pixtral": "llama-bpe",
        "chatglm-bpe": "glm4",
        "kanana2": "gpt-4o",
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
        "qwen35": rf"{contractions}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}|"
        rf" ?[^\s\p{{L}}\p{{M}}\p{{N}}]+{rest}",
    }
    words = rf"{{0}}{upper}*{lower}+{contractions}?|{{0}}{upper}+{lower}*{contractions}?"
    words = words.replace("{0}", r"[^\r\n\p{L}\p{N}]?")
    tail = r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+"
    known["gpt-4o"] = words + tail + r"[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    for letters_of in (upper, lower):
        words = words.replace(letters_of, f"[{letters_of}--\\p{{Han}}]")
    known["kimi-k2"] = rf"(?V1)\p{{Han}}+|{words}{tail}{rest}"
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
