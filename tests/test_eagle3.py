# SPDX-License-Identifier: Apache-2.0
"""EAGLE-3 heads of every layout match a slow reference, and outputs equal plain decoding."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import eagle_oracle
import pytest
import torch
from checkpoints import make_checkpoint, write_tokenizer
from eagle_oracle import LAYERS, VOCAB, Head
from fake_gpu import FakeGpu
from safetensors.torch import load_file, save_file
from specops.api.errors import ModelError
from specops.engine import Engine, EngineConfig, SamplingParams, SpeculativeConfig
from test_draft_model import reported
from test_lossless import bits, params

TEXTS = [[3 + i, 4, 9 * i + 5, 7] * (8 + i) + [11 * i % 97 + 1] * i for i in range(6)]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    directory = tmp_path_factory.mktemp("target")
    model = make_checkpoint(directory, "Qwen3", num_hidden_layers=LAYERS, vocab_size=VOCAB)
    write_tokenizer(directory)
    return directory, model.double()


def make(target: tuple[Path, Any], head: Path | None, **config: Any) -> Engine:
    limits = {
        name: config.pop(name) for name in list(config) if name in EngineConfig.__annotations__
    }
    own = {"method": "eagle3", "num_speculative_tokens": 3, "model": str(head), **config}
    speculative = SpeculativeConfig.from_dict(own) if head is not None else SpeculativeConfig()
    return Engine(
        EngineConfig(device="cpu", model=str(target[0]), speculative_config=speculative, **limits)
    )


HEADS: dict[str, tuple[Head, str]] = {
    "official": (Head(), "official"),
    "pickled": (Head(norm_before_residual=True), "pickled"),
    "specforge": (Head(entered=(2, 3, 5)), "specforge"),
    "specforge by boundaries": (Head(entered=(3, 4, 5)), "specforge"),
    "modelopt": (Head(entered=(1, 3, 4)), "modelopt"),
    "speculators": (Head(entered=(5, 2, 1), norm_before_residual=True), "speculators"),
    "3.1": (Head(entered=(2, 5), norm_output=True, fc_norm=True), "specforge"),
    "deep": (Head(entered=(1, 2, 5), num_layers=2, norm_before_fc=True), "speculators"),
    "narrow": (Head(entered=(1, 2, 4), width=48, draft_vocab=VOCAB), "modelopt"),
    # P-EAGLE in the layouts of speculators and of its first trainer.
    "parallel": (Head(entered=(1, 3, 4), mask=7, norm_before_residual=True), "speculators"),
    "deep parallel": (Head(mask=9, num_layers=2, fc_norm=True, norm_before_fc=True), "official"),
}


def reporting_params(count: int, temperature: float = 0.0) -> Sequence[SamplingParams]:
    return [
        replace(params(i, temperature), max_tokens=12, report_drafts=True, logprobs=None)
        for i in range(count)
    ]


@pytest.mark.parametrize("name", HEADS)
def test_drafts_match_the_reference(target: tuple[Path, Any], tmp_path: Path, name: str) -> None:
    """Requests run in a batch and in chunks; other target layers would give other drafts."""
    head, layout = HEADS[name]
    eagle_oracle.write(tmp_path, head, layout)
    engine = make(target, tmp_path, max_num_seqs=4, max_num_batched_tokens=24)
    shifted = compared = 0
    for of_request in reported(engine, TEXTS[:3], reporting_params(3)):
        for text, drafts in of_request[:4]:
            assert list(drafts) == eagle_oracle.drafts(target[1], head, text, len(drafts))
            if max(head.entered) < LAYERS - 1:
                other = eagle_oracle.drafts(target[1], head, text, len(drafts), shift=1)
                shifted += list(drafts) != other
            compared += 1
    assert compared == 12 and (shifted > 6 or max(head.entered) == LAYERS - 1)


@pytest.mark.parametrize("mistake", ["token", "state", "place"])
def test_mask_inputs_affect_only_later_drafts(
    target: tuple[Path, Any], tmp_path: Path, mistake: str
) -> None:
    """The first draft reads no mask, so a mistake in the masks must not change it."""
    head, layout = HEADS["parallel"]
    eagle_oracle.write(tmp_path, head, layout)
    engine = make(target, tmp_path, max_num_seqs=4)
    first = later = 0
    for text, found in [
        one for each in reported(engine, TEXTS[:3], reporting_params(3)) for one in each
    ]:
        other = eagle_oracle.drafts(target[1], head, text, len(found), mistake=mistake)
        first += found[:1] != tuple(other[:1])
        later += found[1:] != tuple(other[1:])
    assert first == 0 and later > 5


def test_request_with_more_drafts_than_masks_is_refused(
    target: tuple[Path, Any], tmp_path: Path
) -> None:
    """Another drafter may continue the chain."""
    head, layout = HEADS["parallel"]
    eagle_oracle.write(tmp_path, head, layout)
    engine = make(target, tmp_path)
    (one,) = reporting_params(1)
    with pytest.raises(ValueError, match=r'at most 3, .* of "eagle3" make in this engine, got 4;'):
        engine.add_request(TEXTS[0], one, speculative_config={"num_speculative_tokens": 4})
    for own in (
        {"num_speculative_tokens": 2},
        {"num_speculative_tokens": 4, "num_model_steps": 3, "method": "eagle3+suffix"},
    ):
        engine.add_request(TEXTS[0], one, speculative_config=own)


CASES: dict[str, dict[str, Any]] = {
    "wide": {},
    "preempted": {"max_num_batched_tokens": 20, "num_pages": 16, "max_model_len": 200},
    "int8": {"kv_cache_dtype": "int8", "num_speculative_tokens": 6, "page_size": 32},
    "hybrid": {"method": "eagle3+suffix", "num_model_steps": 2, "num_speculative_tokens": 6},
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", ["specforge", "parallel"])
@pytest.mark.fast("specforge-hybrid", "specforge-preempted", "parallel-preempted")
def test_outputs_equal_plain_decoding(
    target: tuple[Path, Any], tmp_path: Path, name: str, case: str
) -> None:
    head, layout = HEADS[name]
    eagle_oracle.write(tmp_path, head, layout)
    each = [replace(params(i, 0.8 * (i % 2)), max_tokens=60) for i in range(6)]
    kind = {name: one for name, one in CASES[case].items() if name == "kv_cache_dtype"}
    expected = make(target, None, max_num_seqs=1, **kind).generate(TEXTS, each)
    engine = make(target, tmp_path, **{"max_num_seqs": 6, **CASES[case]})
    done = engine.generate(TEXTS, each)
    assert list(map(bits, done)) == list(map(bits, expected))
    spec = engine.stats.speculative
    assert 0 < spec.num_accepted_tokens < spec.num_draft_tokens
    assert engine.num_free_pages == engine.num_pages and not engine._drafting.num_failures
    assert (engine.stats.num_preemptions > 0) == ("num_pages" in CASES[case])


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("name", ["deep", "deep parallel"])
def test_drafts_do_not_depend_on_the_batch(
    target: tuple[Path, Any], tmp_path: Path, name: str, temperature: float
) -> None:
    """Requests run in other orders, in chunks, and after cached pages."""
    head, layout = HEADS[name]
    eagle_oracle.write(tmp_path, head, layout)
    each = reporting_params(6, temperature)
    engine = make(target, tmp_path, max_num_seqs=6, verify_strategy="target_match")
    drafts = reported(engine, TEXTS, each)
    assert reported(engine, TEXTS[::-1], each[::-1])[::-1] == drafts
    assert engine.stats.prefix_cache_hits > 0
    other = make(target, tmp_path, max_num_seqs=2, max_num_batched_tokens=9)
    assert reported(other, TEXTS, each) == drafts


@pytest.mark.parametrize("name", ["specforge", "parallel"])
def test_sampled_drafts_do_not_depend_on_the_batch(
    target: tuple[Path, Any], tmp_path: Path, name: str
) -> None:
    head, layout = HEADS[name]
    eagle_oracle.write(tmp_path, head, layout)
    each = [replace(params(i, 0.9), max_tokens=30) for i in range(4)]
    for strategy in ("rejection", "block"):
        engine = make(target, tmp_path, max_num_seqs=4, verify_strategy=strategy)
        alone = [engine.generate([text], one)[0] for text, one in zip(TEXTS, each, strict=False)]
        assert list(map(bits, engine.generate(TEXTS[:4], each))) == list(map(bits, alone))
        spec = engine.stats.speculative
        assert 0 < spec.num_accepted_tokens < spec.num_draft_tokens


@pytest.mark.parametrize("name", ["official", "parallel"])
def test_drafts_are_the_same_with_graphs(
    target: tuple[Path, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    head, layout = HEADS[name]
    eagle_oracle.write(tmp_path, head, layout)
    each = reporting_params(2, 0.8)
    drafts = reported(make(target, tmp_path, max_num_seqs=2), TEXTS[:2], each)
    device = FakeGpu(captures=True)
    monkeypatch.setattr("specops.engine.engine.open_device", lambda *_, **__: device)
    assert reported(make(target, tmp_path, max_num_seqs=2), TEXTS[:2], each) == drafts


def change_tensors(directory: Path, **changes: Any) -> None:
    file = directory / "model.safetensors"
    tensors = load_file(file)
    for name, tensor in changes.items():
        name = name.replace("__", ".")
        tensors.pop(name, None)
        if tensor is not None:
            tensors[name] = tensor
    save_file(tensors, file)


@pytest.mark.parametrize(
    "fields,tensors,message",
    [
        ({"target_hidden_size": 96}, {}, r"config\.json: target_hidden_size is 96, but the target"),
        ({"vocab_size": 99}, {}, r"config\.json: vocab_size is 99, but the target has 160"),
        ({"hidden_act": "gelu"}, {}, r"config\.json: hidden_act must be silu, got gelu"),
        ({"num_key_value_heads": 3}, {}, r"k_proj\.weight must be \[192, 128\], got \[128, 128\]"),
        ({"norm_output": 1}, {}, r"config\.json: norm_output must be true or false, got 1"),
        ({"logit_scale": 0.5}, {}, r"config\.json: logit_scale must be 1, got 0\.5"),
        *(
            ({"eagle_config": {field: value}}, {}, rf"config\.json: {field} must be {right}, got")
            for field, value, right in (
                ("use_aux_hidden_state", False, True),
                ("use_last_layernorm", False, True),
                ("use_input_layernorm_in_first_layer", False, True),
                ("use_mtp_layernorm", True, False),
                ("parallel_draft_step", 4, 1),
            )
        ),
        (
            {
                "speculators_model_type": "eagle3",
                "transformer_layer_config": {
                    **Head().layer_config,
                    "layer_types": ["sliding_attention"],
                },
            },
            {},
            "layer_types must only hold full_attention, got",
        ),
        ({"speculators_model_type": "dflash"}, {}, "must be eagle3 or peagle, got dflash"),
        ({"speculators_model_type": "peagle"}, {}, "tensor mask_hidden is missing"),
        ({}, {"mask_hidden": torch.ones(1, 1, 192)}, r"config\.json: 'mask_token_id' is missing"),
        (
            {"mask_token_id": 160},
            {"mask_hidden": torch.ones(1, 1, 192)},
            "mask_token_id must be a token id below 160, got 160",
        ),
        (
            {"mask_token_id": 1},
            {"mask_hidden": torch.ones(192)},
            r"tensor mask_hidden must be \[1, 1, 192\], got \[192\]",
        ),
        (
            {"eagle_aux_hidden_state_layer_ids": [0, 2, 3]},
            {},
            r"layers must be in \[1, 6\] for a target of 6 layers, got \[0, 2, 3\]",
        ),
        ({"target_layer_ids": "all"}, {}, "target_layer_ids must be a list of layers, got 'all'"),
        ({"target_layer_ids": [1, 2]}, {}, r"fc\.weight must be \[64, 128\], got \[64, 192\]"),
        ({"draft_vocab_size": 41}, {}, r"tensor d2t must be \[41\], got \[40\]"),
        ({}, {"d2t": None}, "tensor d2t is missing: draft_vocab_size is 40, and the target has"),
        ({}, {"d2t": torch.full((40,), 200)}, "d2t must hold ascending token ids"),
        ({}, {"norm__weight": None}, r"tensor norm\.weight is missing"),
        ({}, {"extra__weight": torch.ones(1)}, r"tensor extra\.weight is not used by an EAGLE-3"),
        (
            {},
            {"midlayer__self_attn__kv_a_proj__weight": torch.ones(1)},
            "multi-head latent attention, which is not supported yet",
        ),
    ],
)
def test_invalid_heads_are_refused(
    target: tuple[Path, Any],
    tmp_path: Path,
    fields: dict[str, Any],
    tensors: dict[str, Any],
    message: str,
) -> None:
    eagle_oracle.write(tmp_path, Head(), "official", **fields)
    change_tensors(tmp_path, **tensors)
    with pytest.raises(ModelError, match=message):
        make(target, tmp_path)


@pytest.mark.parametrize("ids", [None, []])
def test_default_layers_apply_if_the_file_names_none(
    target: tuple[Path, Any], tmp_path: Path, ids: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """ModelOpt writes an empty list; some programs write null for unset fields."""
    nothing = dict.fromkeys(
        ("target_layer_ids", "layer_ids", "logit_scale", "speculators_model_type", "norm_output")
    )
    config = {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": ids}
    head = Head(entered=(2, 3, 3))
    eagle_oracle.write(tmp_path, head, "modelopt", eagle_config=config, **nothing)
    with caplog.at_level("INFO"):
        make(target, tmp_path)
    assert "outputs of layers (1, 2, 2) of its target (the default of the method)" in caplog.text


def test_unsupported_head_dim_is_refused(
    target: tuple[Path, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(eagle_oracle, "DIM", 16)
    eagle_oracle.write(tmp_path, Head(), "official")
    with pytest.raises(ModelError, match=r"config\.json: head_dim must be .*, got 16 \(append_att"):
        make(target, tmp_path)


def test_files_without_a_head_are_refused(target: tuple[Path, Any], tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no such directory"):
        make(target, tmp_path / "none")
    with pytest.raises(ModelError, match=r"no model\.safetensors"):
        make(target, tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'true'\ntR.")
    with pytest.raises(ModelError, match=r"pytorch_model\.bin: not a file of tensors"):
        make(target, tmp_path)
    torch.save([torch.ones(1)], tmp_path / "pytorch_model.bin")
    with pytest.raises(ModelError, match="expected tensors by name, got list"):
        make(target, tmp_path)
    save_file({"x": torch.ones(1)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))
    with pytest.raises(ModelError, match="holds no EAGLE-3 head; looked for tensors named"):
        make(target, tmp_path)
    with pytest.raises(ModelError, match="no EAGLE-3 head is named"):
        Engine(
            EngineConfig(
                model=str(target[0]), speculative_config=SpeculativeConfig(method="eagle3")
            )
        )
