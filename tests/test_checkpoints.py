# SPDX-License-Identifier: Apache-2.0
"""Quantized checkpoints: every format decodes to the values of the program that defines it."""

import json
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from specops.api.errors import ModelError
from specops.checkpoints.checkpoint import Checkpoint
from specops.checkpoints.directory import open_checkpoint
from specops.checkpoints.fused import fused, rows_of
from specops.checkpoints.module import ACTIVATION_SCALES
from specops.quantization import QuantizedWeight, dequantize_weight
from torch import Tensor

GOLDEN = Path(__file__).parent / "golden" / "quantized_weights.safetensors"
# Kind and group size of the decoded weights of each case.
KINDS = {
    "pack4": ("int4", 32),
    "pack4_zeros": ("int4", 32),
    "pack4_channel": ("int4", 0),
    "pack8": ("int8", 0),
    "pack8_zeros": ("int8", 32),
    "int8": ("int8", 0),
    "int8_zeros": ("int8", 0),
    "fp8_tensor": ("fp8", 0),
    "fp8_channel": ("fp8", 0),
    "fp8_block": ("fp8", 128),
    "mxfp4": ("int4", 32),
    "gptq": ("int4", 32),
    "gptq_desc_act": ("int4", 32),
    "gptq_v2": ("int4", 32),
    "gptq_v2_desc_act": ("int4", 32),
    "gptq_8": ("int8", 32),
    "awq": ("int4", 32),
}


@lru_cache
def golden() -> dict[str, dict[str, Tensor]]:
    cases: dict[str, dict[str, Tensor]] = {}
    for name, tensor in load_file(GOLDEN).items():
        case, _, suffix = name.partition("/")
        cases.setdefault(case, {})[suffix] = tensor
    return cases


def stored(case: str) -> dict[str, Tensor]:
    """Return a copy of the tensors of a case."""
    return {name: one.clone() for name, one in golden()[case].items() if name != "numbers"}


def settings_of(case: str) -> dict[str, Any]:
    method = next((one for one in ("gptq", "awq") if case.startswith(one)), "compressed-tensors")
    version = "gptq_v2" if case in ("gptq_8",) or "v2" in case else "gptq"
    return {"quant_method": method, "checkpoint_format": version} if method == "gptq" else {}


def opened(
    directory: Path, tensors: dict[str, Tensor], settings: dict[str, Any] | None = None
) -> Checkpoint:
    """Write a checkpoint with these tensors and open it."""
    save_file(
        {name: one.contiguous() for name, one in tensors.items()}, directory / "model.safetensors"
    )
    (directory / "config.json").write_text(json.dumps({"quantization_config": settings or {}}))
    return open_checkpoint(directory)


def decoded(
    directory: Path, tensors: dict[str, Tensor], settings: dict[str, Any] | None = None
) -> Tensor | QuantizedWeight:
    """Decode a module `a.b` with these tensors."""
    named = {f"a.b.{name}": one for name, one in tensors.items()}
    return opened(directory, named, settings).load("a.b.weight")


def numbers(weight: Tensor | QuantizedWeight) -> Tensor:
    return weight if isinstance(weight, Tensor) else dequantize_weight(weight)


def test_every_golden_case_is_tested() -> None:
    assert golden().keys() == KINDS.keys()


@pytest.mark.parametrize("case", KINDS)
def test_weights_match_the_defining_programs(tmp_path: Path, case: str) -> None:
    want = golden()[case]["numbers"]
    weight = decoded(tmp_path, stored(case), settings_of(case))
    assert torch.equal(numbers(weight), want)
    assert isinstance(weight, QuantizedWeight)
    assert (weight.kind, weight.group) == KINDS[case]
    assert (weight.input_order is not None) == ("desc_act" in case)
    assert (weight.offsets is not None) == ("zeros" in case or case[:3] in ("gpt", "awq"))


def test_symmetric_zero_points_need_no_offsets(tmp_path: Path) -> None:
    """GPTQ stores the zero point 8 as 7."""
    tensors = stored("gptq")
    tensors["qzeros"].fill_(0x77777777)
    weight = decoded(tmp_path, tensors, settings_of("gptq"))
    assert isinstance(weight, QuantizedWeight) and weight.offsets is None


def test_gptq_version_1_stores_zero_points_minus_one(tmp_path: Path) -> None:
    """The zero point 0 is stored as 15 and must not carry into the next field."""
    tensors = stored("gptq")
    tensors["qzeros"].fill_(-1)
    first = decoded(tmp_path, tensors, {"quant_method": "gptq"})  # version 1 is the default
    tensors["qzeros"].fill_(0)
    second = decoded(tmp_path, tensors, {"checkpoint_format": "gptq_v2"})
    assert torch.equal(numbers(first), numbers(second))
    tensors["qzeros"].fill_(-1)
    second = decoded(tmp_path, tensors, {"checkpoint_format": "gptq_v2"})
    assert not torch.equal(numbers(first), numbers(second))


def test_settings_are_read_from_quantize_config(tmp_path: Path) -> None:
    (tmp_path / "quantize_config.json").write_text(json.dumps({"checkpoint_format": "gptq_v2"}))
    weight = decoded(tmp_path, stored("gptq_v2"))
    assert torch.equal(numbers(weight), golden()["gptq_v2"]["numbers"])


def test_group_index_of_older_files_is_supported(tmp_path: Path) -> None:
    tensors = stored("pack4")
    index = torch.arange(96) // 32
    tensors["weight_g_idx"] = torch.full_like(index, -1)  # no group index
    want = numbers(decoded(tmp_path, tensors))
    assert torch.equal(want, golden()["pack4"]["numbers"])
    tensors["weight_g_idx"] = index.roll(5)
    weight = decoded(tmp_path, tensors)
    assert isinstance(weight, QuantizedWeight) and weight.input_order is not None
    scales = tensors["weight_scale"].float()[:, index.roll(5)]
    unscaled = numbers(decoded(tmp_path, {**tensors, "weight_scale": torch.ones(12, 3)}))
    assert torch.equal(numbers(weight), unscaled * scales)


def test_fp8_rows_move_only_in_whole_blocks() -> None:
    """Some checkpoints interleave queries and gates per head, so rows must be reordered."""
    values = torch.randn(512, 160).to(torch.float8_e4m3fn)
    weight = QuantizedWeight("fp8", values, torch.rand(4, 2), group=128)
    order = torch.arange(512).view(2, 2, 128).transpose(0, 1).flatten()
    moved = rows_of(weight, order.int())
    assert isinstance(moved, QuantizedWeight)
    assert torch.equal(dequantize_weight(moved), dequantize_weight(weight)[order])
    assert not torch.equal(moved.scales, weight.scales)
    for wrong in (order.flip(0), order[:-1], torch.arange(64, 192)):
        with pytest.raises(ModelError, match="must be selected in whole blocks of 128"):
            rows_of(weight, wrong.int())


def test_fp8_blocks_at_the_edges_are_partial(tmp_path: Path) -> None:
    """DeepSeek has 576 rows in blocks of 128: five rows of scales, the last for a partial block."""
    values = torch.randn(200, 300).to(torch.float8_e4m3fn)
    scales = torch.rand(2, 3)
    found = decoded(tmp_path, {"weight": values, "weight_scale_inv": scales})
    want = values.float() * scales.repeat_interleave(128, 0).repeat_interleave(128, 1)[:200, :300]
    assert torch.equal(numbers(found), want)


def test_e8m0_scales_are_supported(tmp_path: Path) -> None:
    values = torch.randn(200, 130).to(torch.float8_e4m3fn)
    scales = 2.0 ** torch.tensor([[-3.0, 4.0], [0.0, -10.0]])
    tensors = {"weight": values, "weight_scale_inv": scales}
    want = numbers(decoded(tmp_path, tensors))
    tensors["weight_scale_inv"] = scales.to(torch.float8_e8m0fnu)
    assert torch.equal(numbers(decoded(tmp_path, tensors)), want)


def test_extreme_e8m0_scales_are_decoded(tmp_path: Path) -> None:
    """255 is NaN and affects only its block; 0 is 2^-127."""
    tensors = {
        "weight_packed": torch.full((1, 48), 0x21, dtype=torch.uint8),
        "weight_scale": torch.tensor([[255, 0, 254]], dtype=torch.uint8),
    }
    found = numbers(decoded(tmp_path, tensors))[0]
    assert found[:32].isnan().all() and not found[32:].isnan().any()
    assert found[32:34].tolist() == [2.0**-128, 2.0**-127]
    assert found[64:66].tolist() == [2.0**126, 2.0**127]


def test_groups_with_scale_zero_are_zero(tmp_path: Path) -> None:
    tensors = stored("pack4_zeros")
    tensors["weight_scale"].zero_()
    assert (numbers(decoded(tmp_path, tensors)) == 0).all()


def test_stacked_mxfp4_experts_are_split_by_name(tmp_path: Path) -> None:
    """gpt-oss interleaves gate and up rows, and the low half of a byte is the even input."""
    generator = torch.Generator().manual_seed(1)
    blocks = torch.randint(0, 256, (2, 8, 2, 16), dtype=torch.uint8, generator=generator)
    scales = torch.randint(120, 130, (2, 8, 2), dtype=torch.uint8, generator=generator)
    prefix = "model.layers.0.mlp.experts."
    bias = torch.randn(2, 8, generator=generator)
    file = opened(
        tmp_path,
        {
            f"{prefix}gate_up_proj_blocks": blocks,
            f"{prefix}gate_up_proj_scales": scales,
            f"{prefix}gate_up_proj_bias": bias,
        },
    )
    assert set(file.names()) == {
        f"{prefix}{expert}.{part}.{kind}"
        for expert in (0, 1)
        for part in ("gate_proj", "up_proj")
        for kind in ("weight", "bias")
    }
    table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])
    values = torch.stack((blocks & 15, blocks >> 4), -1).flatten(-2).int()
    want = (table[values] * 2.0 ** (scales[..., None].float() - 127)).flatten(2)
    for expert in (0, 1):
        for first, part in enumerate(("gate_proj", "up_proj")):
            found = numbers(file.load(f"{prefix}{expert}.{part}.weight"))
            assert torch.equal(found, want[expert, first::2])
            found = numbers(file.load(f"{prefix}{expert}.{part}.bias"))
            assert torch.equal(found, bias[expert, first::2])


def test_stacked_float_experts_are_split_by_name(tmp_path: Path) -> None:
    """gpt-oss has biases, inputs first, and interleaved rows; other models have all gates first."""
    stacked, interleaved = torch.randn(3, 8, 5), torch.randn(3, 5, 8)
    bias, down = torch.randn(3, 8), torch.randn(3, 6, 4)
    file = opened(
        tmp_path,
        {
            "a.experts.gate_up_proj": stacked.bfloat16(),
            "a.experts.down_proj": down,
            "b.experts.gate_up_proj": interleaved,
            "b.experts.gate_up_proj_bias": bias,
            "c.experts.gate_up_proj": torch.zeros(2, 2, 2, dtype=torch.float8_e4m3fn),
            "d.down_proj": torch.zeros(2, 2),
        },
    )
    assert len(file.names()) == 3 * (3 + 4) + 2 * 2 + 1
    for e in range(3):
        for half, part in enumerate(("gate_proj", "up_proj")):
            own = slice(4 * half, 4 * half + 4)
            plain = numbers(file.load(f"a.experts.{e}.{part}.weight"))
            assert torch.equal(plain, stacked.bfloat16().float()[e, own])
            assert torch.equal(file.load(f"b.experts.{e}.{part}.weight"), interleaved[e].T[half::2])
            assert torch.equal(file.load(f"b.experts.{e}.{part}.bias"), bias[e, half::2])
        assert torch.equal(numbers(file.load(f"a.experts.{e}.down_proj.weight")), down[e])
    with pytest.raises(ModelError, match=r"gate_up_proj of all experts must be of floats, .*F8_E4"):
        file.load("c.experts.0.gate_proj.weight")


def test_paddle_names_are_reported(tmp_path: Path) -> None:
    file = opened(tmp_path, {"ernie.embed_tokens.weight": torch.zeros(4, 2)})
    with pytest.raises(ModelError, match=r"is missing from the checkpoint, which has ernie\.embed"):
        file.load("model.embed_tokens.weight")


def test_stored_tensors_override_the_ignore_list(tmp_path: Path) -> None:
    """Ignore lists of configurations are often wrong, above all for MTP modules."""
    tensors = {f"mtp.fc.{name}": one for name, one in stored("pack4").items()}
    tensors["lm_head.weight"] = torch.ones(3, 3)
    settings = {"ignore": ["re:mtp.*"], "config_groups": {"group_0": {"targets": ["Linear"]}}}
    file = opened(tmp_path, tensors, settings)
    assert set(file.names()) == {"mtp.fc.weight", "lm_head.weight"}
    assert torch.equal(numbers(file.load("mtp.fc.weight")), golden()["pack4"]["numbers"])
    assert torch.equal(numbers(file.load("lm_head.weight")), torch.ones(3, 3))


def test_biases_are_loaded_and_activation_scales_are_ignored(tmp_path: Path) -> None:
    tensors = {**stored("int8"), "bias": torch.ones(6)}
    tensors |= dict.fromkeys(ACTIVATION_SCALES, torch.ones(1))
    assert {"k_scale", "v_scale", "output_scale", "input_scale_ub"} < ACTIVATION_SCALES
    tensors = {name: one.clone() for name, one in tensors.items()}
    file = opened(tmp_path, {f"a.b.{name}": one for name, one in tensors.items()})
    assert set(file.names()) == {"a.b.weight", "a.b.bias"}
    assert torch.equal(numbers(file.load("a.b.weight")), golden()["int8"]["numbers"])
    assert torch.equal(numbers(file.load("a.b.bias")), torch.ones(6))


def without(name: str) -> Any:
    return lambda tensors: tensors.pop(name)


def put(name: str, value: Tensor) -> Any:
    return lambda tensors: tensors.update({name: value})


ZEROS = torch.zeros
REFUSALS: dict[str, tuple[str, Any, dict[str, Any], str]] = {
    "a scale without a weight": ("int8", without("weight"), {}, "tensor a.b.weight is missing"),
    "a weight without a scale": (
        "int8",
        without("weight_scale"),
        {},
        "tensor a.b.weight is int8 and needs scales",
    ),
    "fp8 without a scale": (
        "fp8_block",
        without("weight_scale"),
        {},
        "tensor a.b.weight is float8_e4m3fn and needs scales",
    ),
    "NaN": (
        "fp8_channel",
        put("weight", torch.full((9, 40), torch.nan).to(torch.float8_e4m3fn)),
        {},
        "tensor a.b.weight must not hold NaN",
    ),
    "another convention of NVFP4": (
        "mxfp4",
        put("weight_scale_2", ZEROS(1)),
        {},
        "a.b is NVFP4 (tensor weight_scale_2), which is not supported",
    ),
    "an unknown tensor": (
        "pack4",
        put("weight_bitmask", ZEROS(1)),
        {},
        "tensor a.b.weight_bitmask is not used by this quantization format",
    ),
    "another dtype": (
        "pack4",
        put("weight_packed", ZEROS(12, 12)),
        {},
        "tensor a.b.weight_packed must be int32, got float32",
    ),
    "other bits": (
        "pack4",
        put("weight_packed", ZEROS(12, 9, dtype=torch.int32)),
        {},
        "tensor a.b.weight_packed must hold 96 numbers of 4 or 8 bits a row, got 9 words",
    ),
    "rows": (
        "pack4",
        put("weight_packed", ZEROS(11, 12, dtype=torch.int32)),
        {},
        "tensor a.b.weight_packed must be [12, 12], got [11, 12]",
    ),
    "groups": (
        "pack4",
        put("weight_scale", ZEROS(12, 12)),
        {},
        "a.b must have groups of 16 or a multiple of 32 inputs, got 8",
    ),
    "uneven groups": (
        "pack4",
        put("weight_scale", ZEROS(12, 5)),
        {},
        "a.b must have groups of one size, got 96 inputs in 5 groups",
    ),
    "zero points along the inputs": (
        "pack4_zeros",
        put("weight_zero_point", ZEROS(13, 1, dtype=torch.int32)),
        {},
        "tensor a.b.weight_zero_point must be [2, 3], got [13, 1]",
    ),
    "NVFP4": (
        "mxfp4",
        put("weight_global_scale", ZEROS(1)),
        {},
        "a.b is NVFP4 (tensor weight_global_scale), which is not supported",
    ),
    "blocks": (
        "fp8_block",
        put("weight_scale", ZEROS(3, 3)),
        {},
        "tensor a.b.weight_scale must be [2, 2], got [3, 3]",
    ),
    "another size of blocks": (
        "fp8_block",
        lambda tensors: None,
        {"weight_block_size": [64, 128]},
        "weight_block_size must be [128, 128], got [64, 128]",
    ),
    "no version": ("gptq", lambda tensors: None, {}, "a.b is GPTQ, but neither config.json"),
    "another version": (
        "gptq",
        lambda tensors: None,
        {"checkpoint_format": "marlin"},
        "quantization_config.checkpoint_format must be gptq or gptq_v2, got 'marlin'",
    ),
    "AutoRound without a packing": (
        "gptq_v2",
        lambda tensors: None,
        {"quant_method": "auto-round", "sym": False},
        "a.b is AutoRound with zero points, but quantization_config has no packing_format",
    ),
    "AutoRound in another layout": (
        "gptq",
        lambda tensors: None,
        {"quant_method": "auto-round", "packing_format": "auto_round:auto_awq"},
        "quant_method is auto-round, but a.b.qweight [12, 32] has the layout of GPTQ",
    ),
    "another method": (
        "gptq",
        lambda tensors: None,
        {"quant_method": "awq"},
        "quant_method is awq, but a.b.qweight [12, 32] has the layout of GPTQ",
    ),
    "three bits": (
        "gptq",
        put("qzeros", ZEROS(3, 3, dtype=torch.int32)),
        settings_of("gptq"),
        "a.b must have 4 or 8 bits per weight, got 3",
    ),
    "groups of several sizes": (
        "gptq",
        put("g_idx", torch.tensor([0] * 50 + [1] * 14 + [2] * 32)),
        settings_of("gptq"),
        "a.b must have groups of one size, got 96 inputs in 3 groups",
    ),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_unsupported_tensors_are_refused_by_name(tmp_path: Path, case: str) -> None:
    which, change, settings, sentence = REFUSALS[case]
    tensors = stored(which)
    change(tensors)
    with pytest.raises(ModelError) as refusal:
        decoded(tmp_path, tensors, settings)
    message = str(refusal.value)
    assert message.startswith((f"{tmp_path}: {sentence}", f"{tmp_path}/config.json: {sentence}"))


@pytest.mark.parametrize(
    "settings,sentence",
    [
        *(
            ({"quant_method": method}, "quant_method must be one of gptq, awq,")
            for method in ("bitsandbytes", "torchao", "hqq", "quip", "", 7, ["gptq"])
        ),
        ({"quant_method": "gptq", "is_marlin_format": True}, "is_marlin_format must be False"),
        ({"quant_method": "gptq", "format": "bitblas"}, "format must be gptq or gptq_v2, got"),
        ({"quant_method": "gptq", "pack_dtype": "int8"}, "pack_dtype must be int32, got 'int8'"),
        ({"quant_method": "gptq", "adapter": {"name": "lora"}}, "adapter must be absent, got"),
        ({"quant_method": "awq", "version": "GEMV_FAST"}, "version must be gemm or exllama or"),
        (
            {"quant_method": "intel/auto-round", "packing_format": "auto_round:gptq3"},
            "packing_format must be auto_round:auto_gptq or",
        ),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "quant_algo must be FP8 or"),
        (
            {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"},
            "format must be dense or pack-quantized or",
        ),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {"group_0": {"format": "marlin-24"}},
            },
            "config_groups.*.format must be dense or",
        ),
        (
            {
                "quant_method": "compressed-tensors",
                "sparsity_config": {"format": "sparse-24-bitmask"},
            },
            "sparsity_config.format must be dense, got 'sparse-24-bitmask'",
        ),
        (
            {
                "quant_method": "compressed-tensors",
                "transform_config": {"config_groups": {"R1": 1}},
            },
            "transform_config must be absent, got",
        ),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "fmt must be e4m3 or float8_e4m3fn, got 'e5m2'"),
        ({"bits": 4, "group_size": 64, "mode": "affine"}, "mode names MLX"),
        ("gptq", "quantization_config must be an object, got 'gptq'"),
    ],
)
def test_unsupported_layouts_are_refused_by_name(
    tmp_path: Path, settings: Any, sentence: str
) -> None:
    """The fields are checked first, since other layouts may have the same names and shapes."""
    with pytest.raises(ModelError) as refusal:
        opened(tmp_path, {"a.weight": torch.ones(2, 2)}, settings)
    assert str(refusal.value).startswith(f"{tmp_path}/config.json: quantization_config")
    assert sentence in str(refusal.value)


@pytest.mark.parametrize(
    "settings",
    [
        {"quant_method": "awq", "version": "GEMM", "backend": "auto", "zero_point": True},
        {"quant_method": "gptq", "checkpoint_format": "gptq", "is_marlin_format": False},
        {"quant_method": "gptq", "format": None, "adapter": None, "meta": {"quantizer": ["a"]}},
        {
            "quant_method": "compressed-tensors",
            "format": "float-quantized",
            "sparsity_config": {},
            "transform_config": {},
            "config_groups": {"group_0": {"format": None}},
        },
        {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0},
        {"quant_method": "quark", "export": {"pack_method": "reorder"}},
        {},
        None,
    ],
)
def test_supported_layouts_are_accepted(tmp_path: Path, settings: Any) -> None:
    assert opened(tmp_path, {"a.weight": torch.ones(2, 2)}, settings).names() == {"a.weight"}


@pytest.mark.parametrize(
    "file,sentence",
    [
        ("pytorch_model.bin", "but pytorch_model.bin, which is not read: take a revision with mod"),
        ("pytorch_model-1-of-2.bin", "or save it with transformers' save_pretrained"),
        ("consolidated.00.pth", "but consolidated.00.pth, which is not read"),
        ("consolidated.safetensors", "but consolidated.safetensors, which is not read"),
    ],
)
def test_unsupported_weight_files_are_named(tmp_path: Path, file: str, sentence: str) -> None:
    (tmp_path / file).touch()
    with pytest.raises(ModelError) as refusal:
        open_checkpoint(tmp_path)
    assert "no model.safetensors and no model.safetensors.index.json, but" in str(refusal.value)
    assert sentence in str(refusal.value)


def test_git_lfs_pointers_are_reported(tmp_path: Path) -> None:
    text = "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n"
    (tmp_path / "model.safetensors").write_text(text)
    with pytest.raises(ModelError, match=r"model\.safetensors is a git-lfs pointer, .*lfs pull"):
        open_checkpoint(tmp_path)


def test_settings_of_other_programs_are_recognized(tmp_path: Path) -> None:
    """ModelOpt has a separate file, MLX its own field, and wrappers a nested text config."""
    save_file({"a.weight": torch.ones(2, 2)}, tmp_path / "model.safetensors")
    config, own = tmp_path / "config.json", tmp_path / "hf_quant_config.json"
    own.write_text(json.dumps({"quantization": {"quant_algo": "NVFP4"}}))
    with pytest.raises(
        ModelError, match=r"hf_quant_config\.json: quantization\.quant_algo must be"
    ):
        open_checkpoint(tmp_path)
    config.write_text(json.dumps({"quantization": {"bits": 4}}))
    with pytest.raises(ModelError, match="quantization names MLX"):
        open_checkpoint(tmp_path)
    settings = {"quant_method": "gptq", "checkpoint_format": "gptq_v2"}
    config.write_text(json.dumps({"text_config": {"quantization_config": settings}}))
    assert open_checkpoint(tmp_path).settings == settings


@pytest.mark.parametrize(
    "case,packing",
    [
        ("gptq", "auto_round:auto_gptq"),
        ("gptq", "auto_gptq"),
        ("gptq_v2", "auto_round"),
        ("gptq_v2", "auto_round:gptqmodel"),
        ("awq", "auto_round:auto_awq"),
    ],
)
def test_auto_round_packing_selects_the_layout(tmp_path: Path, case: str, packing: str) -> None:
    settings = {"quant_method": "auto-round", "packing_format": packing, "sym": False}
    weight = decoded(tmp_path, stored(case), settings)
    assert torch.equal(numbers(weight), golden()[case]["numbers"])


def test_symmetric_auto_round_weights_need_no_packing_format(tmp_path: Path) -> None:
    weights = []
    for stored_zero in (0x77777777, -0x77777778):  # 7 and 8 in each field
        tensors = stored("gptq")
        tensors["qzeros"].fill_(stored_zero)
        weights.append(decoded(tmp_path, tensors, {"quant_method": "intel/auto-round"}))
        assert isinstance(weights[-1], QuantizedWeight) and weights[-1].offsets is None
    assert torch.equal(numbers(weights[0]), numbers(weights[1]))


# ---- fused weights ----

PARTS = ("q_proj", "k_proj")


def random_weight(kind: str, group: int, seed: int, **fields: Any) -> QuantizedWeight:
    """Return a random weight with 160 inputs."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randint(0, 16, (8, 160), generator=generator)
    values = values.to(torch.uint8) if kind == "int4" else (values - 5).to(torch.int8)
    scales = torch.rand(8, -(-160 // group) if group else 1, generator=generator)
    return QuantizedWeight(kind, values, scales, None, group)._replace(**fields)


@pytest.mark.parametrize(
    "one,other,kind",
    [
        (("int4", 32), ("int4", 32), ("int4", 32)),
        (("int4", 64), ("int8", 16), ("int8", 16)),  # fused Q4_K and Q6_K
        (("int4", 0), ("int4", 128), ("int4", 128)),
        (("int8", 0), ("int8", 0), ("int8", 0)),
    ],
)
def test_integer_weights_are_fused_without_rounding(
    one: tuple[str, int], other: tuple[str, int], kind: tuple[str, int]
) -> None:
    offsets = {"offsets": torch.rand(8, -(-160 // other[1]) if other[1] else 1)}
    table = torch.arange(-3, 13, dtype=torch.int8)
    changes: dict[str, Any] = {} if one == other else {"code_values": table}
    if one[0] == other[0] != "int8":
        changes = {}
    parts = [random_weight(*one, 1, **changes), random_weight(*other, 2, **offsets)]
    whole = fused(parts, PARTS)
    assert isinstance(whole, QuantizedWeight) and (whole.kind, whole.group) == kind
    assert torch.equal(numbers(whole), torch.cat([numbers(part) for part in parts]))


def test_incompatible_weights_are_not_fused() -> None:
    order = torch.arange(160, dtype=torch.int32).flip(0)
    ordered = random_weight("int4", 32, 1, input_order=order)
    ones = torch.ones(128, 160).to(torch.float8_e4m3fn)
    fp8 = QuantizedWeight("fp8", ones[:8], torch.ones(1, 2), group=128)
    by_output = fp8._replace(scales=torch.ones(8, 1), group=0)
    plain = torch.ones(8, 160)
    for parts, reason in (
        ([ordered, random_weight("int4", 32, 2)], "their inputs are grouped in different orders"),
        ([fp8, fp8], "their outputs must be multiples of the FP8 block size 128"),
        ([fp8, by_output], "some of them have a scale for each block and some for each output"),
        ([fp8, ordered], "some of them are FP8 and some are integers"),
        ([plain, ordered], "some of them are quantized and some are not"),
    ):
        with pytest.raises(ModelError, match=f"cannot be fused into one projection: {reason}"):
            fused(parts, PARTS)
    assert numbers(fused([ordered, ordered], PARTS)).shape == (16, 160)
    large = fp8._replace(values=ones)
    assert numbers(fused([by_output, by_output], PARTS)).shape == (16, 160)
    assert numbers(fused([large, fp8], PARTS)).shape == (136, 160)
    assert torch.equal(numbers(fused([plain, plain], PARTS)), torch.ones(16, 160))
