# SPDX-License-Identifier: Apache-2.0
"""Heads of EAGLE-1 and 2 match a slow reference, and outputs equal plain decoding."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from eagle_oracle import DIM, EPS, HEADS, KV_HEADS, MLP, THETA, VOCAB, WIDTH
from eagle_oracle import attention as attended
from eagle_oracle import norm as normed
from fake_gpu import FakeGpu
from row_costs import set_row_cost
from safetensors.torch import save_file
from specops.api.errors import ModelError
from specops.engine import Engine
from specops.engine.drafters.recurrent import RecurrentStep
from specops.engine.plan import Part
from test_draft_model import reported
from test_eagle3 import TEXTS, change_tensors, reporting_params
from test_eagle3 import make as make_eagle3
from test_eagle3 import target as target
from test_lossless import bits, params
from torch import Tensor


@dataclass
class Head:
    """A head in its published layout, and a reference of its drafts.

    Attributes:
        num_layers: layers of the head; the first has no norm before its attention.
        fc_bias, qkv_bias: whether these projections have biases.
        own_embedding: whether the file has an embedding.
        prefix: prefix of the tensors' names.
    """

    num_layers: int = 1
    fc_bias: bool = True
    qkv_bias: bool = False
    own_embedding: bool = True
    prefix: str = ""
    tensors: dict[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(11)

        def matrix(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator) * (2 / shape[-1]) ** 0.5

        made = {"fc.weight": matrix(WIDTH, 2 * WIDTH)}
        if self.fc_bias:
            made["fc.bias"] = matrix(WIDTH)
        if self.own_embedding:
            made["embed_tokens.weight"] = matrix(VOCAB, WIDTH) * 4
        for index in range(self.num_layers):
            own = f"layers.{index}."
            for name, size in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS)):
                made[f"{own}self_attn.{name}_proj.weight"] = matrix(size * DIM, WIDTH)
                if self.qkv_bias:
                    made[f"{own}self_attn.{name}_proj.bias"] = matrix(size * DIM)
            made |= {
                f"{own}self_attn.o_proj.weight": matrix(WIDTH, HEADS * DIM),
                f"{own}post_attention_layernorm.weight": 1 + 0.2 * matrix(WIDTH),
                f"{own}mlp.gate_proj.weight": matrix(MLP, WIDTH),
                f"{own}mlp.up_proj.weight": matrix(MLP, WIDTH),
                f"{own}mlp.down_proj.weight": matrix(WIDTH, MLP),
            }
            if index:
                made[f"{own}input_layernorm.weight"] = 1 + 0.2 * matrix(WIDTH)
        self.tensors = made

    def write(self, directory: Path, *, pickled: bool = False, **changes: Any) -> None:
        """Write the head; config.json has the class and the number of layers of the target."""
        config = {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": WIDTH,
            "intermediate_size": MLP,
            "num_hidden_layers": 40,
            "num_attention_heads": HEADS,
            "num_key_value_heads": KV_HEADS,
            "head_dim": DIM,
            "vocab_size": VOCAB,
            "max_position_embeddings": 256,
            "rms_norm_eps": EPS,
            "rope_theta": THETA,
            "hidden_act": "silu",
            "bias": self.fc_bias,
        }
        (directory / "config.json").write_text(json.dumps({**config, **changes}))
        tensors = {f"{self.prefix}{name}": one for name, one in self.tensors.items()}
        if pickled:
            torch.save(tensors, directory / "pytorch_model.bin")
        else:
            save_file(tensors, directory / "model.safetensors")

    def drafts(
        self, base: Any, text: Sequence[int], count: int, *, un_normed: bool = False
    ) -> list[int]:
        """Return the most likely drafts after a text, computed in float64 row by row.

        `un_normed` plants a mistake: the head reads states before the norm.
        """
        with torch.no_grad():
            found = base.model(torch.tensor([list(text)])).last_hidden_state[0]
            if un_normed:
                found = found / base.model.norm.weight
            table, lm_head = base.model.embed_tokens.weight.detach(), base.lm_head.weight.detach()
        tensors = {name: one.double() for name, one in self.tensors.items()}
        table = tensors.get("embed_tokens.weight", table)
        hidden, tokens = list(found.double()[:-1]), list(text[1:])
        for _ in range(count):
            inputs = torch.cat([table[torch.tensor(tokens)], torch.stack(hidden)], -1)
            x = inputs @ tensors["fc.weight"].T + tensors.get("fc.bias", 0)
            for index in range(self.num_layers):
                x = _layer(tensors, f"layers.{index}.", x)
            tokens.append(int((lm_head @ x[-1]).argmax()))
            hidden.append(x[-1])
        return tokens[len(text) - 1 :]


def _layer(tensors: dict[str, Tensor], prefix: str, x: Tensor) -> Tensor:
    own = {
        name.removeprefix(prefix): one for name, one in tensors.items() if name.startswith(prefix)
    }
    is_normed = "input_layernorm.weight" in own
    x = x + attended(own, normed(x, own["input_layernorm.weight"]) if is_normed else x)
    mlp_input = normed(x, own["post_attention_layernorm.weight"])
    gate, up = (mlp_input @ own[f"mlp.{name}_proj.weight"].T for name in ("gate", "up"))
    return x + (torch.nn.functional.silu(gate) * up) @ own["mlp.down_proj.weight"].T


def make(target: tuple[Path, Any], head: Path | None, **config: Any) -> Engine:
    return make_eagle3(target, head, **{"method": "eagle", **config})


KINDS = {
    "safetensors": (Head(), False),
    "pickled": (Head(fc_bias=False), True),
    "qwen": (Head(qkv_bias=True, own_embedding=False, prefix="model."), False),
    "deep": (Head(num_layers=2), False),
}


@pytest.mark.parametrize("kind", KINDS)
def test_drafts_match_the_reference(target: tuple[Path, Any], tmp_path: Path, kind: str) -> None:
    head, pickled = KINDS[kind]
    head.write(tmp_path, pickled=pickled)
    engine = make(target, tmp_path, max_num_seqs=4, max_num_batched_tokens=24)
    compared = other = 0
    for of_request in reported(engine, TEXTS[:3], reporting_params(3)):
        for text, drafts in of_request[:4]:
            assert list(drafts) == head.drafts(target[1], text, len(drafts))
            other += list(drafts) != head.drafts(target[1], text, len(drafts), un_normed=True)
            compared += 1
    assert compared == 12 and other > 3


CASES: dict[str, dict[str, Any]] = {
    "wide": {},
    "preempted": {"max_num_batched_tokens": 20, "num_pages": 16, "max_model_len": 200},
    "int8": {"kv_cache_dtype": "int8", "num_speculative_tokens": 6, "page_size": 32},
    "hybrid": {"method": "eagle+suffix", "num_model_steps": 2, "num_speculative_tokens": 6},
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.fast("hybrid", "preempted")
def test_outputs_equal_plain_decoding(target: tuple[Path, Any], tmp_path: Path, case: str) -> None:
    KINDS["safetensors"][0].write(tmp_path)
    each = [replace(params(i, 0.8 * (i % 2)), max_tokens=60) for i in range(6)]
    kv = {name: one for name, one in CASES[case].items() if name == "kv_cache_dtype"}
    expected = make(target, None, max_num_seqs=1, **kv).generate(TEXTS, each)
    engine = make(target, tmp_path, **{"max_num_seqs": 6, **CASES[case]})
    done = engine.generate(TEXTS, each)
    assert list(map(bits, done)) == list(map(bits, expected))
    spec = engine.stats.speculative
    assert 0 < spec.num_accepted_tokens < spec.num_draft_tokens
    assert engine.num_free_pages == engine.num_pages and not engine._drafting.num_failures
    assert (engine.stats.num_preemptions > 0) == ("num_pages" in CASES[case])


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_drafts_do_not_depend_on_the_batch(
    target: tuple[Path, Any], tmp_path: Path, temperature: float
) -> None:
    """Requests run in other orders, in chunks, and after cached pages."""
    KINDS["deep"][0].write(tmp_path)
    each = reporting_params(6, temperature)
    engine = make(target, tmp_path, max_num_seqs=6)
    drafts = reported(engine, TEXTS, each)
    assert reported(engine, TEXTS[::-1], each[::-1])[::-1] == drafts
    assert engine.stats.prefix_cache_hits > 0
    other = make(target, tmp_path, max_num_seqs=2, max_num_batched_tokens=9)
    assert reported(other, TEXTS, each) == drafts


@pytest.mark.parametrize("strategy", ["rejection", "block"])
def test_sampled_drafts_do_not_depend_on_the_batch(
    target: tuple[Path, Any], tmp_path: Path, strategy: str
) -> None:
    KINDS["safetensors"][0].write(tmp_path)
    each = [replace(params(i, 0.9), max_tokens=30) for i in range(4)]
    engine = make(target, tmp_path, max_num_seqs=4, verify_strategy=strategy)
    alone = [engine.generate([text], one)[0] for text, one in zip(TEXTS, each, strict=False)]
    assert list(map(bits, engine.generate(TEXTS[:4], each))) == list(map(bits, alone))
    spec = engine.stats.speculative
    assert 0 < spec.num_accepted_tokens < spec.num_draft_tokens


def test_drafts_are_the_same_with_graphs(
    target: tuple[Path, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    KINDS["safetensors"][0].write(tmp_path)
    each = reporting_params(2, 0.8)
    drafts = reported(make(target, tmp_path, max_num_seqs=2), TEXTS[:2], each)
    device = FakeGpu(captures=True)
    monkeypatch.setattr("specops.engine.engine.open_device", lambda *_, **__: device)
    assert reported(make(target, tmp_path, max_num_seqs=2), TEXTS[:2], each) == drafts


@pytest.mark.parametrize(
    "fields,tensors,message",
    [
        ({"hidden_size": 96}, {}, r"config\.json: hidden_size is 96, but the target has 64"),
        ({"vocab_size": 99}, {}, r"config\.json: vocab_size is 99, but the target has 160"),
        ({"add_para_norm": True}, {}, r"config\.json: add_para_norm must be False, got True"),
        ({"logit_scale": 0.5}, {}, r"config\.json: logit_scale must be 1, got 0\.5"),
        ({"speculators_model_type": "eagle"}, {}, "must be absent, got eagle"),
        ({"num_key_value_heads": 3}, {}, r"k_proj\.weight must be \[192, 64\], got \[128, 64\]"),
        ({}, {"fc__weight": None}, "holds no EAGLE head; looked for tensors named"),
        ({}, {"fc__weight": torch.ones(64, 192)}, r"fc\.weight must be \[64, 128\], got \[64, 192"),
        (
            {},
            {"norm__weight": torch.ones(64)},
            r"tensor norm\.weight is not used by an EAGLE head",
        ),
        ({}, {"layers__0__hidden_norm__weight": torch.ones(64)}, "use method eagle3"),
    ],
)
def test_invalid_heads_are_refused(
    target: tuple[Path, Any],
    tmp_path: Path,
    fields: dict[str, Any],
    tensors: dict[str, Any],
    message: str,
) -> None:
    Head().write(tmp_path, **fields)
    change_tensors(tmp_path, **tensors)
    with pytest.raises(ModelError, match=message):
        make(target, tmp_path)


def test_eagle3_names_the_method_of_an_eagle_head(target: tuple[Path, Any], tmp_path: Path) -> None:
    Head().write(tmp_path)
    with pytest.raises(ModelError, match=r"hidden_norm\.weight is missing; use method eagle"):
        make_eagle3(target, tmp_path)


def test_reports_of_skipped_passes_are_not_read(
    target: tuple[Path, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Near the end of a text, passes are skipped and leave old data in the step's memory."""
    KINDS["safetensors"][0].write(tmp_path)
    fill, poison = RecurrentStep.fill, np.array([0x7FA00000], np.uint32).view(np.float32)

    def poisoned(self: RecurrentStep, parts: Sequence[Part]) -> None:
        for array in self.reports.logprobs:
            array.host[:] = poison
        fill(self, parts)

    monkeypatch.setattr(RecurrentStep, "fill", poisoned)
    engine = make(target, tmp_path, max_num_seqs=2, adaptive_verification=True)
    set_row_cost(engine)
    with np.errstate(all="raise"):
        engine.generate(TEXTS[:2], reporting_params(2))
    assert engine.stats.speculative.num_draft_tokens and not engine._drafting.num_failures
