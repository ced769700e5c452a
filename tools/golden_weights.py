# SPDX-License-Identifier: Apache-2.0
"""Write tests/golden/quantized_weights.safetensors: quantized modules and their values.

Each case is a module as its format stores it, and under `<case>/numbers` the values that the
program that defines the format decodes from it. The script needs compressed-tensors 0.20 and
gptqmodel 7.7, which no other part of this repository needs:

    python -m tools.golden_weights
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

OUT = Path(__file__).resolve().parent.parent / "tests" / "golden" / "quantized_weights.safetensors"
WORDS = torch.iinfo(torch.int32)


def compressed_tensors_case(
    scheme: Any, shape: tuple[int, int], seed: int, scale_dtype: torch.dtype = torch.bfloat16
) -> dict[str, Tensor]:
    """Return a weight compressed by compressed-tensors, and the values it decompresses to."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization.utils import calculate_qparams

    args = scheme.weights
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 0.1
    weight[0, :3] = torch.tensor([1.0, -1.0, 0.5])  # the maximum and minimum must be in the data
    if args.strategy in ("group", "tensor_group"):
        parts = weight.view(shape[0], -1, args.group_size)
    elif args.strategy == "block":
        high, wide = args.block_structure
        padded = torch.zeros(-(-shape[0] // high) * high, -(-shape[1] // wide) * wide)
        padded[: shape[0], : shape[1]] = weight
        parts = padded.view(len(padded) // high, high, -1, wide).transpose(1, 2).flatten(2)
    else:
        parts = weight[:, None] if args.strategy == "channel" else weight.view(1, 1, -1)
    scale, zero = calculate_qparams(parts.amin(-1), parts.amax(-1), args)
    if args.strategy == "tensor":
        scale, zero = scale.flatten(), zero.flatten()
    scale = scale.to(scale_dtype).float()
    compressor = BaseCompressor.get_value_from_registry(scheme.format)
    state = {"weight": weight, "weight_scale": scale}
    if not args.symmetric:
        state["weight_zero_point"] = zero
    stored = compressor.compress(state, scheme)
    numbers = compressor.decompress(stored, scheme)["weight"]
    if stored["weight_scale"].dtype == torch.float32:
        stored["weight_scale"] = stored["weight_scale"].to(scale_dtype)
    return {**stored, "numbers": numbers.float()}


def compressed_tensors_cases() -> dict[str, dict[str, Tensor]]:
    """Return a case for each supported compressed-tensors format."""
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    def scheme(kind: str, **args: Any) -> Any:
        weights = QuantizationArgs(**args)
        return QuantizationScheme(targets=["Linear"], weights=weights, format=kind)

    packed, plain, floats = "pack-quantized", "int-quantized", "float-quantized"
    group = {"num_bits": 4, "strategy": "group", "group_size": 32}
    channel = {"num_bits": 8, "strategy": "channel"}
    fp8 = {"num_bits": 8, "type": "float"}
    block = {"strategy": "block", "block_structure": [128, 128]}
    mx = {**group, "type": "float", "scale_dtype": torch.uint8}
    return {
        "pack4": compressed_tensors_case(scheme(packed, **group), (12, 96), 1),
        "pack4_zeros": compressed_tensors_case(
            scheme(packed, **group, symmetric=False), (13, 96), 2
        ),
        "pack4_channel": compressed_tensors_case(
            scheme(packed, num_bits=4, strategy="channel"), (8, 44), 3
        ),
        "pack8": compressed_tensors_case(scheme(packed, **channel), (6, 50), 4),
        "pack8_zeros": compressed_tensors_case(
            scheme(packed, **{**group, "num_bits": 8}, symmetric=False), (7, 64), 5, torch.float16
        ),
        "int8": compressed_tensors_case(scheme(plain, **channel), (6, 50), 6),
        "int8_zeros": compressed_tensors_case(
            scheme(plain, **channel, symmetric=False), (6, 50), 7
        ),
        "fp8_tensor": compressed_tensors_case(
            scheme(floats, **fp8, strategy="tensor"), (9, 40), 8, torch.float32
        ),
        "fp8_channel": compressed_tensors_case(
            scheme(floats, **fp8, strategy="channel"), (9, 40), 9
        ),
        "fp8_block": compressed_tensors_case(
            scheme(floats, **fp8, **block), (130, 140), 10, torch.float32
        ),
        "mxfp4": compressed_tensors_case(scheme("mxfp4-pack-quantized", **mx), (6, 64), 11),
    }


def random_words(*shape: int, seed: int) -> Tensor:
    """Return random int32 numbers over the full range."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(
        WORDS.min, WORDS.max + 1, shape, dtype=torch.int64, generator=generator
    ).to(torch.int32)


def gptq_case(version: str, is_ordered: bool, bits: int, seed: int) -> dict[str, Tensor]:
    """Return a module of random values, and the values that gptqmodel decodes from it."""
    from gptqmodel.nn_modules.qlinear.torch import TorchLinear
    from gptqmodel.quantization import FORMAT
    from gptqmodel.utils.model import convert_gptq_v1_to_v2_format_module

    inputs, outputs, group = 96, 32, 32
    fields = 32 // bits
    generator = torch.Generator().manual_seed(seed)
    zeros = random_words(inputs // group, outputs // fields, seed=seed + 100)
    if version == "gptq":  # avoid a stored 15 (0 - 1), which gptqmodel carries into the next field
        ones = sum(1 << (bits * i) for i in range(fields))
        zeros = zeros & ~torch.tensor(ones - (1 << 32 if ones > WORDS.max else 0)).to(torch.int32)
    index = torch.arange(inputs) // group
    if not is_ordered:
        index = index[torch.randperm(inputs, generator=generator)]
    stored = {
        "qweight": random_words(inputs // fields, outputs, seed=seed),
        "qzeros": zeros,
        "scales": (torch.rand(inputs // group, outputs, generator=generator) * 0.02).half(),
        "g_idx": index.to(torch.int32),
    }
    layer = TorchLinear(
        bits=bits,
        group_size=group,
        sym=False,
        desc_act=not is_ordered,
        in_features=inputs,
        out_features=outputs,
        bias=False,
        pack_dtype=torch.int32,
        register_buffers=True,
        format=FORMAT(version),
    )
    for name, tensor in stored.items():
        getattr(layer, name).copy_(tensor)
    if version == "gptq":
        convert_gptq_v1_to_v2_format_module(layer, bits=bits, pack_dtype=torch.int32)
    layer.scales = layer.scales.float()  # makes the layer's products exact
    layer.post_init()
    return {**stored, "numbers": layer.dequantize_weight().T.float().contiguous()}


def awq_case(seed: int) -> dict[str, Tensor]:
    """Return a module of random values, and gptqmodel's AWQ layer applied to the identity."""
    from gptqmodel.nn_modules.qlinear.torch_awq import AwqTorchLinear
    from gptqmodel.quantization import FORMAT

    inputs, outputs, group = 96, 32, 32
    generator = torch.Generator().manual_seed(seed)
    stored = {
        "qweight": random_words(inputs, outputs // 8, seed=seed),
        "qzeros": random_words(inputs // group, outputs // 8, seed=seed + 100),
        # Products with such scales are exact in float16.
        "scales": 2.0
        ** -torch.randint(4, 9, (inputs // group, outputs), generator=generator).half(),
    }
    layer = AwqTorchLinear(
        bits=4,
        group_size=group,
        sym=False,
        desc_act=False,
        in_features=inputs,
        out_features=outputs,
        bias=False,
        pack_dtype=torch.int32,
        register_buffers=True,
        format=FORMAT.GEMM,
    )
    for name, tensor in stored.items():
        getattr(layer, name).copy_(tensor)
    layer.post_init()
    numbers = layer(torch.eye(inputs, dtype=torch.float16)).T
    return {**stored, "numbers": numbers.float().contiguous()}


def main() -> None:
    from safetensors.torch import save_file

    cases = {
        **compressed_tensors_cases(),
        "gptq": gptq_case("gptq", True, 4, 20),
        "gptq_desc_act": gptq_case("gptq", False, 4, 21),
        "gptq_v2": gptq_case("gptq_v2", True, 4, 22),
        "gptq_v2_desc_act": gptq_case("gptq_v2", False, 4, 23),
        "gptq_8": gptq_case("gptq_v2", True, 8, 24),
        "awq": awq_case(30),
    }
    flat = {f"{case}/{name}": one for case in cases for name, one in cases[case].items()}
    save_file({name: one.contiguous() for name, one in flat.items()}, OUT)
    print(f"{OUT}: {len(cases)} cases, {OUT.stat().st_size} bytes")


if __name__ == "__main__":
    main()
