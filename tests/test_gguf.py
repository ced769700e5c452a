# SPDX-License-Identifier: Apache-2.0
"""GGUF files: every type of numbers, and what is refused."""

import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from specops.engine.errors import ModelError
from specops.engine.gguf.file import TYPES, read_gguf
from specops.engine.models.checkpoints.checkpoint import Checkpoint
from specops.engine.models.checkpoints.directory import open_checkpoint
from specops.quantization import QuantizedWeight, dequantize_weight
from torch import Tensor

gguf = pytest.importorskip("gguf")

# What the types become.
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
    """Any bytes, but for scales that are finite: [rows, blocks * bytes]."""
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
    """A file of these tensors: floats, or blocks and the name of their type."""
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


def opened(directory: Path) -> Checkpoint:
    return open_checkpoint(directory)


@pytest.mark.parametrize("kind", KINDS)
def test_types_decode_as_ggml_decodes_them(tmp_path: Path, kind: str) -> None:
    octets = random_blocks(kind, 5, 3)
    write(tmp_path, {DOWN: (octets, kind)})
    weight = opened(tmp_path).load(OURS)
    assert isinstance(weight, QuantizedWeight) and (weight.kind, weight.group) == KINDS[kind]
    want = gguf.quants.dequantize(octets.numpy(), gguf.GGMLQuantizationType[kind])
    assert torch.equal(dequantize_weight(weight), torch.from_numpy(want))
    assert torch.equal(weight.scales.isfinite(), torch.ones_like(weight.scales, dtype=torch.bool))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_floats_are_read_as_they_are(tmp_path: Path, dtype: torch.dtype) -> None:
    numbers = torch.randn(3, 5).to(dtype)
    kind = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}[dtype]
    write(tmp_path, {"output_norm.weight": torch.ones(3), DOWN: (numbers, kind)})
    found = opened(tmp_path).load(OURS)
    assert isinstance(found, Tensor) and found.dtype == dtype and torch.equal(found, numbers)


def test_names_are_those_of_the_models(tmp_path: Path) -> None:
    """Of layers with four norms, the one before the MLP has another name."""
    names = ["token_embd.weight", "blk.0.ffn_norm.weight", "blk.11.attn_q.bias"]
    write(tmp_path, {name: torch.ones(2) for name in names})
    layers = "model.layers."
    want = {
        "model.embed_tokens.weight",
        f"{layers}0.post_attention_layernorm.weight",
        f"{layers}11.self_attn.q_proj.bias",
    }
    assert set(opened(tmp_path).names()) == want
    write(tmp_path, {name: torch.ones(2) for name in (*names, "blk.0.post_attention_norm.weight")})
    assert set(opened(tmp_path).names()) == want | {f"{layers}0.pre_feedforward_layernorm.weight"}


def refusal(directory: Path) -> str:
    with pytest.raises(ModelError) as error:
        opened(directory).load(OURS)
    return str(error.value)


def test_other_types_and_tensors_are_refused_by_name(tmp_path: Path) -> None:
    file = write(tmp_path, {DOWN: (random_blocks("Q2_K", 2, 1), "Q2_K")})
    assert refusal(tmp_path).startswith(
        f"{file}: tensor {OURS} is [2, 256] of type Q2_K; matrices of these types can be read: F32,"
    )
    write(tmp_path, {"blk.0.ssm_a": torch.ones(3)})
    assert refusal(tmp_path) == f"{file}: tensor blk.0.ssm_a has no place in a model here"
    write(tmp_path, {"output_norm.weight": torch.ones(3)})
    assert refusal(tmp_path) == f"{file}: tensor {OURS} is missing from the file"
    (tmp_path / "other.gguf").write_bytes(b"")
    assert refusal(tmp_path) == f"{tmp_path}: one GGUF file is read, got model.gguf, other.gguf"


def test_damaged_files_are_refused(tmp_path: Path) -> None:
    file = write(tmp_path, {DOWN: torch.ones(3, 4)}, note="text", numbers=[1, 2, 3])
    assert read_gguf(file).metadata["numbers"] == [1, 2, 3]
    whole = file.read_bytes()
    # Cut off anywhere: no other error than ours.
    for length in (0, 3, 10, 30, 60, 100, len(whole) - 40):
        file.write_bytes(whole[:length])
        with pytest.raises(ModelError, match=r"cut off|not a GGUF file|cannot be read"):
            read_gguf(file)
    for changed, sentence in (
        (b"GGML" + whole[4:], "not a GGUF file: it begins with b'GGML'"),
        (whole[:4] + struct.pack("<I", 1) + whole[8:], "GGUF version must be 2 or 3, got 1"),
        (whole[:4] + struct.pack(">I", 3) + whole[8:], "GGUF version must be 2 or 3, got 50331648"),
        (whole[:8] + struct.pack("<Q", 1 << 60) + whole[16:], "the file is cut off"),
        (whole[:16] + struct.pack("<Q", 1 << 60) + whole[24:], ""),
    ):
        file.write_bytes(changed)
        with pytest.raises(ModelError) as error:
            read_gguf(file)
        assert sentence in str(error.value)
