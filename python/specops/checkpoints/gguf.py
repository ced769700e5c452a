# SPDX-License-Identifier: Apache-2.0
"""GGUF checkpoints: names of tensors, and decoders of quantized types.

Source: github.com/ggml-org/ggml (src/ggml-common.h, src/ggml-quants.c).
"""

import re
from collections.abc import Callable, Iterator, Set
from pathlib import Path

import torch
from torch import Tensor

from specops.checkpoints.bits import low_then_high
from specops.checkpoints.checkpoint import Checkpoint
from specops.checkpoints.errors import ModelError
from specops.checkpoints.floats import E2M1_DOUBLED, MX_GROUP, halved_e8m0
from specops.checkpoints.fused import rows_of
from specops.checkpoints.gguf_directory import ROPE_FACTORS
from specops.checkpoints.gguf_file import TYPES, GgufTensor, read_gguf
from specops.quantization import QuantizedWeight

_AS_THEY_ARE = torch.arange(16, dtype=torch.int8)
_IQ4_NL = torch.tensor(
    [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], dtype=torch.int8
)
_PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}

# GGUF's names of tensors outside the layers -> Hugging Face's.
_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
# GGUF's names of a layer's tensors -> Hugging Face's.
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
# Name of the norm before the MLP in models that also normalize attention's output.
_MLP_NORM_OF_FOUR = "pre_feedforward_layernorm"
# Architectures with interleaved RoPE rows in GGUF: elements i and i + half of a query or key head
# are neighbors in the file. Hugging Face models expect all first elements of the pairs, then all
# second ones.
_PAIRED = ("llama",)
_LAYER = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")


def gguf_file(directory: Path) -> Path | None:
    """Return the GGUF file of a directory without safetensors files, if there is one.

    Raises:
        ModelError: there are several GGUF files.
    """
    if any(directory.glob("*.safetensors*")):
        return None
    files = sorted(directory.glob("*.gguf"))
    if len(files) > 1:
        names = ", ".join(file.name for file in files)
        raise ModelError(f"{directory}: expected one GGUF file, got {names}")
    return files[0] if files else None


class GgufCheckpoint(Checkpoint):
    """The tensors of a GGUF file, mapped into memory.

    Args:
        path: path of the file.

    Raises:
        ModelError: the file is damaged, or has a tensor that no supported model uses.
    """

    is_one_model = True

    def __init__(self, path: Path) -> None:
        file = read_gguf(path, with_tokenizer=False)
        self._path = path
        self._data = torch.from_file(
            str(path), shared=False, size=path.stat().st_size, dtype=torch.uint8
        )
        self._tensors = dict(self._named(file.tensors))
        self._paired: dict[str, int] = {}  # projection with interleaved rows -> number of heads
        architecture = file.metadata.get("general.architecture")
        if architecture in _PAIRED:
            heads = file.metadata[f"{architecture}.attention.head_count"]
            of_keys = file.metadata.get(f"{architecture}.attention.head_count_kv", heads)
            self._paired = {".self_attn.q_proj.": heads, ".self_attn.k_proj.": of_keys}

    def names(self) -> Set[str]:
        """Return all names."""
        return self._tensors.keys()

    def load(self, name: str) -> Tensor | QuantizedWeight:
        """Read a weight or another tensor."""
        if name not in self._tensors:
            raise ModelError(f"{self._path}: tensor {name} is missing from the file")
        weight = self._decoded(name, self._tensors[name])
        for part, heads in self._paired.items():
            if part in name:
                rows = len(weight) if isinstance(weight, Tensor) else len(weight.values)
                if rows % (2 * heads):
                    raise ModelError(
                        f"{self._path}: tensor {name} must have rows of {heads} heads, got {rows}"
                    )
                return rows_of(weight, _unpaired(rows, heads))
        return weight

    def _decoded(self, name: str, tensor: GgufTensor) -> Tensor | QuantizedWeight:
        data = self._data[tensor.offset : tensor.offset + tensor.num_bytes]
        if tensor.type in _PLAIN:
            # Copy: the data may be unaligned in the file, and the mapping may be released.
            return data.clone().view(_PLAIN[tensor.type]).view(tensor.shape)
        decode = _DECODERS.get(tensor.type)
        if decode is None or len(tensor.shape) != 2:
            known = ", ".join((*_PLAIN, *_DECODERS))
            raise ModelError(
                f"{self._path}: tensor {name} is {list(tensor.shape)} of type {tensor.type}; "
                f"supported types of matrices: {known}"
            )
        _, numbers, size = next(one for one in TYPES.values() if one[0] == tensor.type)
        return decode(data.view(tensor.shape[0], tensor.shape[1] // numbers, size))

    def _named(self, tensors: dict[str, GgufTensor]) -> Iterator[tuple[str, GgufTensor]]:
        has_four_norms = "blk.0.post_attention_norm.weight" in tensors
        for name, tensor in tensors.items():
            stem, _, suffix = name.rpartition(".")
            layer = _LAYER.fullmatch(name)
            if layer is not None and layer[2] in _LAYER_NAMES:
                own = _LAYER_NAMES[layer[2]]
                if has_four_norms and layer[2] == "ffn_norm":
                    own = _MLP_NORM_OF_FOUR
                yield f"model.layers.{layer[1]}.{own}.{layer[3]}", tensor
            elif name == ROPE_FACTORS:
                continue
            elif stem in _NAMES and suffix == "weight":
                yield f"{_NAMES[stem]}.weight", tensor
            else:
                raise ModelError(f"{self._path}: tensor {name} is not used by any supported model")


def _unpaired(rows: int, heads: int) -> Tensor:
    """Return the order of rows that converts interleaved RoPE rows to two halves per head."""
    return torch.arange(rows).view(heads, -1, 2).transpose(1, 2).flatten()


def _split(octets: Tensor, width: int) -> Tensor:
    """Split the last dimension into pieces of `width`."""
    return octets.reshape(*octets.shape[:-1], -1, width)


def _halves(octets: Tensor) -> Tensor:
    """Read pairs of bytes as float16, and convert them to float32."""
    return octets.contiguous().view(torch.float16).squeeze(-1).float()


def _q4_0(blocks: Tensor) -> QuantizedWeight:
    """Decode Q4_0: float16 scale; 16 bytes with elements 0-15 in low and 16-31 in high halves."""
    values = low_then_high(blocks[..., 2:])
    return QuantizedWeight("int4", values.flatten(1), _halves(blocks[..., :2]), None, 32)


def _q4_1(blocks: Tensor) -> QuantizedWeight:
    """Decode Q4_1: float16 scale and minimum; bytes as in Q4_0."""
    values = low_then_high(blocks[..., 4:])
    least = _halves(blocks[..., 2:4])
    scales = _halves(blocks[..., :2])
    return QuantizedWeight("int4", values.flatten(1), scales, least, 32, _AS_THEY_ARE)


def _iq4_nl(blocks: Tensor) -> QuantizedWeight:
    """Decode IQ4_NL: like Q4_0, but the 4-bit numbers are indices into a table of values."""
    return _q4_0(blocks)._replace(code_values=_IQ4_NL)


def _mxfp4(blocks: Tensor) -> QuantizedWeight:
    """Decode MXFP4: E8M0 scale; 16 bytes of e2m1, in halves as in Q4_0."""
    values = low_then_high(blocks[..., 1:])
    scales = halved_e8m0(blocks[..., 0])
    return QuantizedWeight("int4", values.flatten(1), scales, None, MX_GROUP, E2M1_DOUBLED)


def _five_bits(blocks: Tensor) -> Tensor:
    """Read 5-bit values: 4 bytes of highest bits, element j at bit j; 16 bytes as in Q4_0."""
    high = (blocks[..., :4, None] >> torch.arange(8, dtype=torch.uint8)) & 1
    return (low_then_high(blocks[..., 4:]) | high.flatten(-2) << 4).to(torch.int8)


def _q5_0(blocks: Tensor) -> QuantizedWeight:
    """Decode Q5_0: float16 scale; five-bit values, minus 16."""
    values = _five_bits(blocks[..., 2:]) - 16
    return QuantizedWeight("int8", values.flatten(1), _halves(blocks[..., :2]), None, 32)


def _q5_1(blocks: Tensor) -> QuantizedWeight:
    """Decode Q5_1: float16 scale and minimum; five-bit values."""
    values = _five_bits(blocks[..., 4:])
    least = _halves(blocks[..., 2:4])
    return QuantizedWeight("int8", values.flatten(1), _halves(blocks[..., :2]), least, 32)


def _q8_0(blocks: Tensor) -> QuantizedWeight:
    """Decode Q8_0: float16 scale; 32 one-byte values."""
    values = blocks[..., 2:].view(torch.int8)
    return QuantizedWeight("int8", values.flatten(1), _halves(blocks[..., :2]), None, 32)


def _scales_and_minimums(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return the scales and offsets [N, 8 for each block] of blocks of 256 elements.

    A block starts with two float16 factors, of the scales and of the minimums. Then 12 bytes hold
    eight scales and eight minimums of 6 bits. The first four scales are in the low six bits of
    bytes 0 to 3, the first four minimums in those of bytes 4 to 7. The other scales and minimums
    have their low four bits in the halves of bytes 8 to 11, and their high two bits in the high two
    bits of bytes 0 to 7.
    """
    units = blocks[..., :4].contiguous().view(torch.float16).float()
    first, second, rest = blocks[..., 4:8], blocks[..., 8:12], blocks[..., 12:16]
    scales = torch.cat((first & 63, (rest & 15) | (first >> 6) << 4), -1)
    least = torch.cat((second & 63, (rest >> 4) | (second >> 6) << 4), -1)
    return (units[..., :1] * scales).flatten(1), -(units[..., 1:] * least).flatten(1)


def _q4_k(blocks: Tensor) -> QuantizedWeight:
    """Decode Q4_K: scales, minimums; 32 bytes hold 32 elements in low, 32 in high halves."""
    scales, least = _scales_and_minimums(blocks)
    values = low_then_high(_split(blocks[..., 16:], 32))
    return QuantizedWeight("int4", values.flatten(1), scales, least, 32, _AS_THEY_ARE)


def _q5_k(blocks: Tensor) -> QuantizedWeight:
    """Decode Q5_K: like Q4_K, with 32 bytes of highest bits first: bit i is for group i."""
    scales, least = _scales_and_minimums(blocks)
    low = low_then_high(_split(blocks[..., 48:], 32))
    high = (blocks[..., None, 16:48] >> torch.arange(8, dtype=torch.uint8)[:, None]) & 1
    values = (_split(low.flatten(-2), 32) | high << 4).to(torch.int8)
    return QuantizedWeight("int8", values.flatten(1), scales, least, 32)


def _q6_k(blocks: Tensor) -> QuantizedWeight:
    """Decode Q6_K.

    A block has 128 bytes of low four bits, 64 bytes of high two bits, 16 signed one-byte scales and
    a float16 factor of the scales. For each half of 128 elements there are 64 bytes with elements 0
    to 63 in the low halves and 64 to 127 in the high halves; and 32 bytes with the high bits of
    elements j, j + 32, j + 64 and j + 96.
    """
    low = low_then_high(_split(blocks[..., :128], 64))
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8)[:, None]
    high = (_split(blocks[..., 128:192], 32)[..., None, :] >> shifts) & 3
    values = (low | high.flatten(-2) << 4).to(torch.int8) - 32
    units = _halves(blocks[..., 208:])
    scales = units[..., None] * blocks[..., 192:208].contiguous().view(torch.int8)
    return QuantizedWeight("int8", values.flatten(1), scales.flatten(1), None, 16)


_DECODERS: dict[str, Callable[[Tensor], QuantizedWeight]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "IQ4_NL": _iq4_nl,
    "MXFP4": _mxfp4,
}
