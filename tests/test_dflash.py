# SPDX-License-Identifier: Apache-2.0
"""DFlash and DSpark heads match a slow reference, and outputs equal plain decoding."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import make_checkpoint, write_tokenizer
from safetensors.torch import load_file, save_file
from specops.api.errors import ModelError
from specops.engine import Engine, EngineConfig, SamplingParams, SpeculativeConfig
from test_draft_model import reported
from test_lossless import bits, params
from torch import Tensor

LAYERS, VOCAB, WIDTH, HEADS, KV_HEADS, DIM, MLP = 5, 160, 64, 4, 2, 64, 96
THETA, EPS, MASK = 10000.0, 1e-6, 159
TEXTS = [[3 + i, 4, 9 * i + 5, 7] * (8 + i) + [11 * i % 97 + 1] * i for i in range(6)]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    directory = tmp_path_factory.mktemp("target")
    model = make_checkpoint(directory, "Qwen3", num_hidden_layers=LAYERS, vocab_size=VOCAB)
    write_tokenizer(directory)
    return directory, model.double()


_OF = ("attention", "mlp")  # convolutions of DFlash2
_WINDOW = ("no window", "other rows")  # planted mistakes with windows


@dataclass
class Block:
    """A head in a published layout, and a reference of its drafts.

    Attributes:
        left: target layers whose output states the head reads.
        num_layers: layers of the head.
        num_rows: `block_size`.
        samples_anchor: whether the newest token's row drafts, too.
        draft_vocab: rows of the head's own LM head; None to use the target's.
        rank: rank of the Markov head; 0 for none.
        layout: "authors", "nested" (DSpark in dflash_config) or "speculators".
        second: fields of DFlash2.
        window: sliding window of all layers but the last.
        is_causal: whether a row of a sliding layer sees no later rows.
        mask: whether a file has the embedding of mask tokens.
    """

    left: tuple[int, ...] = (0, 1, 3)
    num_layers: int = 2
    num_rows: int = 5
    samples_anchor: bool = False
    draft_vocab: int | None = None
    rank: int = 0
    layout: str = "authors"
    second: dict[str, Any] | None = None
    window: int | None = None
    is_causal: bool = False
    mask: bool = False

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(9)

        def matrix(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator) * (2 / shape[-1]) ** 0.5

        def norm(width: int) -> Tensor:
            return 1 + 0.2 * torch.randn(width, generator=generator)

        made = {"fc.weight": matrix(WIDTH, len(self.left) * WIDTH)}
        made |= {"hidden_norm.weight": norm(WIDTH), "norm.weight": norm(WIDTH)}
        for index in range(self.num_layers):
            prefix = f"layers.{index}."
            for name, size in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS)):
                made[f"{prefix}self_attn.{name}_proj.weight"] = matrix(size * DIM, WIDTH)
            made |= {
                f"{prefix}self_attn.o_proj.weight": matrix(WIDTH, HEADS * DIM),
                f"{prefix}self_attn.q_norm.weight": norm(DIM),
                f"{prefix}self_attn.k_norm.weight": norm(DIM),
                f"{prefix}input_layernorm.weight": norm(WIDTH),
                f"{prefix}post_attention_layernorm.weight": norm(WIDTH),
                f"{prefix}mlp.gate_proj.weight": matrix(MLP, WIDTH),
                f"{prefix}mlp.up_proj.weight": matrix(MLP, WIDTH),
                f"{prefix}mlp.down_proj.weight": matrix(WIDTH, MLP),
            }
        if self.draft_vocab is not None:
            tokens = torch.randperm(VOCAB, generator=generator)[: self.draft_vocab].sort().values
            made["d2t"] = tokens - torch.arange(self.draft_vocab)
            made["lm_head.weight"] = matrix(self.draft_vocab, WIDTH)
        if self.rank:
            made["markov_head.markov_w1.weight"] = 3 * matrix(VOCAB, self.rank)
            made["markov_head.markov_w2.weight"] = 3 * matrix(self.draft_vocab or VOCAB, self.rank)
            made["confidence_head.proj.weight"] = matrix(1, WIDTH)
            made["confidence_head.proj.bias"] = matrix(1)
        if self.second is not None:
            taps, group = self.second["conv_kernel_size"], self.second["conv_group_size"]
            for name in [f"layers.{i}.{kind}_conv" for i in range(self.num_layers) for kind in _OF]:
                made[f"{name}.base_kernel"] = torch.randn(2, taps, WIDTH, generator=generator)
                made[f"{name}.kernel_projection.weight"] = matrix(2 * taps * WIDTH // group, WIDTH)
            rank, book = self.second["selector_rank"], "candidate_selector."
            made[f"{book}predecessor_codebook"] = 2 * matrix(VOCAB, rank)
            made[f"{book}successor_codebook"] = 2 * matrix(VOCAB, rank)
            made[f"{book}hidden_projection.weight"] = 2 * matrix(rank, WIDTH)
        self.tensors, self.embedded = made, matrix(1, WIDTH) * WIDTH**0.5

    def write(self, directory: Path, **changes: Any) -> None:
        layer = {
            "hidden_size": WIDTH,
            "intermediate_size": MLP,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": HEADS,
            "num_key_value_heads": KV_HEADS,
            "head_dim": DIM,
            "vocab_size": VOCAB,
            "max_position_embeddings": 256,
            "rms_norm_eps": EPS,
            "rope_theta": THETA,
            "hidden_act": "silu",
        }
        if self.window is not None:
            types = ["sliding_attention"] * (self.num_layers - 1) + ["full_attention"]
            layer |= {"layer_types": types, "sliding_window": self.window}
        own: dict[str, Any] = {"target_layer_ids": list(self.left), "mask_token_id": MASK}
        if self.rank:
            own |= {"markov_rank": self.rank, "markov_head_type": "vanilla"}
        if self.layout == "speculators":
            kind = "dspark" if self.rank else "dflash"
            config: dict[str, Any] = {
                "speculators_model_type": kind,
                "transformer_layer_config": layer,
                "aux_hidden_state_layer_ids": [one + 1 for one in self.left],
                "mask_token_id": MASK,
                "block_size": self.num_rows,
                "sample_from_anchor": self.samples_anchor,
                **({"markov_rank": self.rank} if self.rank else {}),
            }
        elif self.rank and self.layout == "authors":
            config = {**layer, **own, "architectures": ["Qwen3DSparkModel"]}
        else:
            if self.rank:
                own["projector_type"] = "dspark"
            kind = "DFlash2DraftModel" if self.second else "DFlashDraftModel"
            own |= self.second or {}
            config = {**layer, "architectures": [kind], "dflash_config": own}
            config["num_target_layers"] = LAYERS
        if self.draft_vocab is not None:
            config["draft_vocab_size"] = self.draft_vocab
        (own if self.second else config)["block_size"] = self.num_rows
        (directory / "config.json").write_text(json.dumps({**config, **changes}))
        save_file(self.tensors, directory / "model.safetensors")
        if self.mask:
            torch.save(self.embedded, directory / "mask_embedding.pt")

    @property
    def num_drafts(self) -> int:
        return self.num_rows - (not self.samples_anchor)

    def drafts(
        self, base: Any, text: Sequence[int], count: int, shift: int = 0, mistake: str = ""
    ) -> list[int]:
        """Return the most likely drafts after a text, computed in float64.

        Args:
            base: the target in transformers, in float64.
            text: token ids.
            count: number of drafts.
            shift: offset of the layers' indices, to show that the right layers are read.
            mistake: planted mistake, to show that every part matters.
        """
        with torch.no_grad():
            found = base(torch.tensor([list(text)]), output_hidden_states=True).hidden_states
            table, head = base.model.embed_tokens.weight.detach(), base.lm_head.weight.detach()
        tensors = {name: one.double() for name, one in self.tensors.items()}
        second = self.second or {}
        joined = torch.cat([found[one + 1 + shift][0, :-1] for one in self.left], -1)
        context = _norm(joined @ tensors["fc.weight"].T, tensors["hidden_norm.weight"])
        x = table[torch.tensor([text[-1]] + [MASK] * (self.num_rows - 1))]
        if self.mask and mistake != "no mask":
            x[1:] = self.embedded.double()
        x = x * second.get("input_embedding_scale", 1.0)
        for index in range(self.num_layers):
            prefix = f"layers.{index}."
            own = {
                name.removeprefix(prefix): one
                for name, one in tensors.items()
                if name.startswith(prefix)
            }
            normed = _norm(x, own["input_layernorm.weight"])
            mixed, deltas = self._mixed(own, "attention", normed, None, mistake)
            slides = self.window is not None and index < self.num_layers - 1
            out = _attention(own, mixed, context, self._mask(len(context), slides, mistake))
            x = x + self._mixed(own, "attention", out, deltas, mistake)[0]
            normed = _norm(x, own["post_attention_layernorm.weight"])
            mixed, deltas = self._mixed(own, "mlp", normed, None, mistake)
            gate, up = (mixed @ own[f"mlp.{name}_proj.weight"].T for name in ("gate", "up"))
            out = (torch.nn.functional.silu(gate) * up) @ own["mlp.down_proj.weight"].T
            x = x + self._mixed(own, "mlp", out, deltas, mistake)[0]
        x = _norm(x, tensors["norm.weight"])
        logits = x @ tensors.get("lm_head.weight", head).T
        drafted: list[int] = []
        for place in range(count):
            row = place if self.samples_anchor else place + 1
            before = [text[-1], *drafted][-1]
            scores = logits[row]
            if self.rank:
                before_state = tensors["markov_head.markov_w1.weight"][before]
                scores = scores + tensors["markov_head.markov_w2.weight"] @ before_state
            if self.second is not None and mistake != "no selector":
                scores = self._of_candidates(tensors, scores, x[row], before)
            best = int(scores.argmax())
            drafted.append(best + (int(self.tensors["d2t"][best]) if self.draft_vocab else 0))
        return drafted

    def _mask(self, num_before: int, slides: bool, mistake: str) -> Tensor:
        """Return the attention mask, [rows, positions]."""
        rows = torch.arange(num_before, num_before + self.num_rows)[:, None]
        columns = torch.arange(num_before + self.num_rows)
        seen = torch.ones(self.num_rows, len(columns), dtype=torch.bool)
        if slides and mistake != "no window":
            assert self.window is not None
            seen &= columns > rows - self.window
        if slides and self.is_causal != (mistake == "other rows"):
            seen &= columns <= rows
        return seen

    def _mixed(
        self, own: dict[str, Tensor], kind: str, x: Tensor, deltas: Tensor | None, mistake: str
    ) -> tuple[Tensor, Tensor]:
        """Return the output of a convolution, and its weights, which depend on its input."""
        if self.second is None:
            return x, x
        taps, group = self.second["conv_kernel_size"], self.second["conv_group_size"]
        side = 0 if deltas is None else 1
        if deltas is None:
            deltas = x @ own[f"{kind}_conv.kernel_projection.weight"].T
            deltas = deltas.view(len(x), 2, taps, -1).repeat_interleave(group, -1)
        if mistake == "no convolution":
            return x, deltas
        if mistake == "sides":
            side = 1 - side
        out = torch.zeros_like(x)
        for row in range(len(x)):
            for tap in range(min(row + 1, taps)):
                weights = own[f"{kind}_conv.base_kernel"][side, tap] + deltas[row, side, tap]
                out[row] += weights * x[row - tap]
        return out, deltas

    def _of_candidates(
        self, tensors: dict[str, Tensor], scores: Tensor, state: Tensor, before: int
    ) -> Tensor:
        assert self.second is not None
        book, cap = "candidate_selector.", self.second.get("final_logit_softcapping")
        candidates = scores.topk(self.second["selector_top_k"]).indices
        values = scores[candidates] * self.second.get("output_multiplier", 1.0)
        if cap:
            values = cap * (values / cap).tanh()
        pair = tensors[f"{book}hidden_projection.weight"] @ state
        pair = pair * tensors[f"{book}predecessor_codebook"][before]
        values = values + tensors[f"{book}successor_codebook"][candidates] @ pair
        return torch.full_like(scores, -torch.inf).scatter(0, candidates, values)


def _attention(own: dict[str, Tensor], x: Tensor, context: Tensor, seen: Tensor) -> Tensor:
    def heads(rows: Tensor, name: str) -> Tensor:
        made = (rows @ own[f"self_attn.{name}_proj.weight"].T).view(len(rows), -1, DIM)
        if name == "v":
            return made.transpose(0, 1)
        return _norm(made, own[f"self_attn.{name}_norm.weight"]).transpose(0, 1)

    q = _rotated(heads(x, "q"), len(context))
    k = _rotated(torch.cat([heads(context, "k"), heads(x, "k")], 1), 0)
    v = torch.cat([heads(context, "v"), heads(x, "v")], 1)
    k, v = (one.repeat_interleave(HEADS // KV_HEADS, 0) for one in (k, v))
    scores = (q @ k.transpose(1, 2) / DIM**0.5).masked_fill(~seen, -torch.inf)
    attended = (scores.softmax(-1) @ v).transpose(0, 1)
    return attended.reshape(len(x), -1) @ own["self_attn.o_proj.weight"].T


def _rotated(x: Tensor, begin: int) -> Tensor:
    positions = torch.arange(begin, begin + x.shape[1], dtype=torch.float64)
    angles = torch.outer(positions, THETA ** (-torch.arange(0, DIM, 2).double() / DIM))
    first, second = x[..., : DIM // 2], x[..., DIM // 2 :]
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


def _norm(x: Tensor, weight: Tensor) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + EPS).rsqrt() * weight


SECOND = {
    "conv_kernel_size": 2,
    "conv_group_size": 16,
    "selector_rank": 8,
    "selector_top_k": 6,
}
KINDS = {
    "dflash": Block(),
    "speculators": Block(left=(3, 0), draft_vocab=50, layout="speculators", num_rows=4),
    "anchored": Block(samples_anchor=True, layout="speculators", num_rows=3),
    "dspark": Block(rank=8, samples_anchor=True, num_rows=4),
    "nested dspark": Block(rank=8, samples_anchor=True, layout="nested", draft_vocab=50),
    "dflash2": Block(second=SECOND),
    "scaled dflash2": Block(
        num_layers=1,
        num_rows=4,
        second={
            "conv_kernel_size": 3,
            "conv_group_size": 8,
            "selector_rank": 4,
            "selector_top_k": 16,
            "input_embedding_scale": 2.0,
            "output_multiplier": 0.5,
            "final_logit_softcapping": 5.0,
        },
    ),
    "windows": Block(num_layers=3, window=9, is_causal=True),
    "windows of speculators": Block(window=4, layout="speculators", samples_anchor=True),
    "mask": Block(mask=True),
    "mask of scaled dflash2": Block(mask=True, second={**SECOND, "input_embedding_scale": 2.0}),
    "dspark of speculators": Block(rank=4, layout="speculators", num_layers=1),
}


def make(target: tuple[Path, Any], folder: Path | None, **config: Any) -> Engine:
    limits = {
        name: config.pop(name) for name in list(config) if name in EngineConfig.__annotations__
    }
    own = {"method": "dflash", "num_speculative_tokens": 3, "model": str(folder), **config}
    speculative = SpeculativeConfig.from_dict(own) if folder is not None else SpeculativeConfig()
    return Engine(
        EngineConfig(device="cpu", model=str(target[0]), speculative_config=speculative, **limits)
    )


def reporting_params(count: int, temperature: float = 0.0) -> list[SamplingParams]:
    return [
        replace(params(i, temperature), max_tokens=12, report_drafts=True, logprobs=None)
        for i in range(count)
    ]


def test_scaled_embedding_of_the_target_is_refused(tmp_path: Path) -> None:
    target, head = tmp_path / "target", tmp_path / "head"
    for one in (target, head):
        one.mkdir()
    model = make_checkpoint(target, "Gemma3", num_hidden_layers=LAYERS, vocab_size=VOCAB)
    write_tokenizer(target)
    Block().write(head)
    with pytest.raises(ModelError, match=r"embed_tokens\.weight is missing, .* it is scaled by 8,"):
        make((target, model), head)


@pytest.mark.parametrize("kind", KINDS)
def test_drafts_match_the_reference(target: tuple[Path, Any], tmp_path: Path, kind: str) -> None:
    """Other layers of the target would give other drafts."""
    head = KINDS[kind]
    head.write(tmp_path)
    limits = {"max_num_seqs": 4, "max_num_batched_tokens": 24, "max_model_len": 200}
    engine = make(target, tmp_path, num_speculative_tokens=head.num_drafts, **limits)
    each = [replace(one, max_tokens=20) for one in reporting_params(3)]
    found = reported(engine, TEXTS[:3], each)
    full = shifted = 0
    for text, drafts in [one for of_request in found for one in of_request[:5]]:
        assert list(drafts) == head.drafts(target[1], text, len(drafts))
        full += len(drafts) == head.num_drafts
        shifted += list(drafts) != head.drafts(
            target[1], text, len(drafts), -1 if 3 in head.left else 1
        )
    assert full > 10 and shifted > 3
    assert not engine._drafting.num_failures


@pytest.mark.parametrize(
    "kind,mistake",
    [
        *[("dflash2", mistake) for mistake in ("no convolution", "sides", "no selector")],
        *[(kind, mistake) for kind in ("windows", "windows of speculators") for mistake in _WINDOW],
        ("mask", "no mask"),
    ],
)
def test_mistakes_in_the_reference_change_drafts(
    target: tuple[Path, Any], tmp_path: Path, kind: str, mistake: str
) -> None:
    head = KINDS[kind]
    head.write(tmp_path)
    found = reported(make(target, tmp_path, max_num_seqs=4), TEXTS[:3], reporting_params(3))
    texts_and_drafts = [one for of_request in found for one in of_request if one[1]]
    others = [
        head.drafts(target[1], text, len(drafts), 0, mistake) for text, drafts in texts_and_drafts
    ]
    assert (
        sum(
            list(drafts) != other
            for (_, drafts), other in zip(texts_and_drafts, others, strict=True)
        )
        > 3
    )


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("field", ["causal", "sliding_window_non_causal"])
def test_causal_field_of_the_file_is_respected(
    target: tuple[Path, Any], tmp_path: Path, field: str, is_causal: bool
) -> None:
    head = Block(window=9, is_causal=is_causal)
    head.write(tmp_path, **{field: is_causal == (field == "causal")})
    found = reported(make(target, tmp_path, max_num_seqs=4), TEXTS[:3], reporting_params(3))
    texts_and_drafts = [one for of_request in found for one in of_request if one[1]]
    assert len(texts_and_drafts) > 10
    for text, drafts in texts_and_drafts:
        assert list(drafts) == head.drafts(target[1], text, len(drafts))


CASES: dict[str, dict[str, Any]] = {
    "wide": {},
    "preempted": {"max_num_batched_tokens": 20, "num_pages": 16, "max_model_len": 200},
    "int8": {"kv_cache_dtype": "int8", "page_size": 32},
    "hybrid": {"method": "dflash+suffix", "num_model_steps": 2, "num_speculative_tokens": 6},
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("kind", ["dflash", "dspark", "dflash2", "windows"])
@pytest.mark.fast(
    "dflash-wide", "windows-hybrid", "dspark-preempted", "dspark-int8", "dflash2-preempted"
)
def test_outputs_equal_plain_decoding(
    target: tuple[Path, Any], tmp_path: Path, kind: str, case: str
) -> None:
    head = KINDS[kind]
    head.write(tmp_path)
    each = [replace(params(i, 0.8 * (i % 2)), max_tokens=60) for i in range(6)]
    kv = {name: one for name, one in CASES[case].items() if name == "kv_cache_dtype"}
    expected = make(target, None, max_num_seqs=1, **kv).generate(TEXTS, each)
    engine = make(target, tmp_path, **{"max_num_seqs": 6, **CASES[case]})
    done = engine.generate(TEXTS, each)
    assert list(map(bits, done)) == list(map(bits, expected))
    spec = engine.stats.speculative
    assert spec.num_draft_tokens > 300
    # Random heads agree with a random target by chance.
    assert (spec.num_accepted_tokens > 0) or kind != "dspark"
    assert engine.num_free_pages == engine.num_pages and not engine._drafting.num_failures
    assert (engine.stats.num_preemptions > 0) == ("num_pages" in CASES[case])


def test_blocks_are_complete_at_the_end_of_a_page(target: tuple[Path, Any], tmp_path: Path) -> None:
    """The rows of a block see each other, so a shorter block would draft other tokens."""
    block = KINDS["dflash"]
    block.write(tmp_path)
    engine = make(target, tmp_path, num_speculative_tokens=4, page_size=16)
    (one,) = reporting_params(1)
    (found,) = reported(engine, [TEXTS[0][:10]], [replace(one, max_tokens=6)])
    assert len(found) > 3 and engine.num_free_pages == engine.num_pages
    for text, drafts in found:
        assert list(drafts) == block.drafts(target[1], text, len(drafts))


@pytest.mark.parametrize("kind", ["dflash", "dspark", "dflash2", "windows"])
def test_drafts_do_not_depend_on_the_batch(
    target: tuple[Path, Any], tmp_path: Path, kind: str
) -> None:
    """Seeded requests run in other orders, in chunks and after cached pages."""
    KINDS[kind].write(tmp_path)
    each = reporting_params(6, 0.9)
    engine = make(target, tmp_path, max_num_seqs=6)
    drafts = reported(engine, TEXTS, each)
    assert reported(engine, TEXTS[::-1], each[::-1])[::-1] == drafts
    assert engine.stats.prefix_cache_hits > 0
    other = make(target, tmp_path, max_num_seqs=2, max_num_batched_tokens=9)
    assert reported(other, TEXTS, each) == drafts


@pytest.mark.parametrize("kind", ["dflash", "dspark", "scaled dflash2"])
def test_sampled_drafts_do_not_depend_on_the_batch(
    target: tuple[Path, Any], tmp_path: Path, kind: str
) -> None:
    KINDS[kind].write(tmp_path)
    each = [replace(params(i, 0.9), max_tokens=30) for i in range(4)]
    engine = make(target, tmp_path, max_num_seqs=4, verify_strategy="rejection")
    alone = [engine.generate([text], one)[0] for text, one in zip(TEXTS, each, strict=False)]
    assert list(map(bits, engine.generate(TEXTS[:4], each))) == list(map(bits, alone))
    spec = engine.stats.speculative
    assert 0 < spec.num_accepted_tokens < spec.num_draft_tokens


@pytest.mark.parametrize(
    "fields,tensors,message",
    [
        ({"vocab_size": 99}, {}, r"config\.json: vocab_size is 99, but the target has 160"),
        ({"num_target_layers": 9}, {}, "num_target_layers is 9, but the target has 5"),
        ({"target_hidden_size": 9}, {}, "target_hidden_size is 9, but the target has 64"),
        ({"mask_token_id": 160}, {}, "mask_token_id must be a token id below 160, got 160"),
        ({"dflash_config": {"target_layer_ids": [1]}}, {}, "'mask_token_id' is missing"),
        ({"dflash_config": {"mask_token_id": 1}}, {}, "'target_layer_ids' is missing"),
        ({"target_layer_ids": [5]}, {}, r"layers must be in \[0, 4\] for a target of 5 layers"),
        ({"block_size": 1}, {}, "block_size must be at least 2, got 1"),
        ({"causal": True}, {}, "causal must be false without sliding_attention, got True"),
        ({"use_swa": True}, {}, "use_swa must be false, got True"),
        ({"markov_head_type": "rnn"}, {}, "markov_head_type must be vanilla, got rnn"),
        (
            {"layer_types": ["sliding_attention"] * 2},
            {},
            "'sliding_window' is missing",
        ),
        ({"speculators_model_type": "eagle3"}, {}, "must be dflash or dspark, got eagle3"),
        ({"draft_vocab_size": 9}, {}, "tensor d2t is missing: draft_vocab_size is 9"),
        ({}, {"hidden_norm.weight": None}, r"tensor hidden_norm\.weight is missing"),
        ({}, {"attention_conv.x": torch.ones(1)}, r"tensor attention_conv\.x is not used"),
        ({"selector_rank": 4}, {}, "'conv_kernel_size' is missing"),
        ({**SECOND, "conv_group_size": 7}, {}, "conv_group_size must divide 64, got 7"),
        ({**SECOND, "selector_top_k": 161}, {}, "selector_top_k must be at most 160"),
        (
            {**SECOND, "output_multiplier": -1},
            {},
            "output_multiplier must be a number of at",
        ),
        ({**SECOND, "draft_vocab_size": 9}, {}, "must be 160 with DFlash2's candidates, got 9"),
        (SECOND, {}, r"tensor candidate_selector\.successor_codebook is missing"),
    ],
)
def test_invalid_heads_are_refused(
    target: tuple[Path, Any],
    tmp_path: Path,
    fields: dict[str, Any],
    tensors: dict[str, Any],
    message: str,
) -> None:
    Block().write(tmp_path, **fields)
    file = tmp_path / "model.safetensors"
    whole = {**load_file(file), **tensors}
    save_file({name: one for name, one in whole.items() if one is not None}, file)
    with pytest.raises(ModelError, match=message):
        make(target, tmp_path)


@pytest.mark.parametrize("layout,rank", [("speculators", 0), ("speculators", 8), ("authors", 8)])
def test_null_fields_count_as_missing(
    target: tuple[Path, Any], tmp_path: Path, layout: str, rank: int
) -> None:
    """Some programs save all fields of a class, and write null for unset fields."""
    block = Block(layout=layout, rank=rank)
    block.write(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    fields = (
        "target_hidden_size",
        "num_target_layers",
        "markov_rank",
        "markov_head_type",
        "conv_kernel_size",
        "selector_rank",
        "sliding_window_non_causal",
        "causal",
        "use_swa",
        "speculators_model_type",
        "draft_vocab_size",
        "projector_type",
        "sample_from_anchor",
        "output_multiplier",
        "final_logit_softcapping",
        "layer_ids",
        "rope_scaling",
    )
    nulls = {name: None for name in fields if name not in config}
    nested = config.get("transformer_layer_config", {})
    nested |= {name: None for name in ("layer_types", "rope_parameters", "attention_bias")}
    (tmp_path / "config.json").write_text(json.dumps({**config, **nulls}))
    assert make(target, tmp_path) is not None


@pytest.mark.parametrize(
    "content,message",
    [
        (torch.ones(9), r"mask_embedding\.pt: expected a vector of 64, got \[9\]"),
        (torch.ones(64, dtype=torch.int64), "expected a tensor of floats, got torch.int64"),
        ({"mask_token_id": MASK}, "expected a tensor of floats, got NoneType"),
        ({"mask_token_id": 7}, "mask_token_id is 7, and 159 in config"),
        ({"mask_token_id": torch.tensor([7, 8])}, r"mask_token_id is \[7, 8\], and 159 in config"),
        (Path("x"), "not a file of tensors"),
    ],
)
def test_invalid_mask_embeddings_are_refused(
    target: tuple[Path, Any], tmp_path: Path, content: Any, message: str
) -> None:
    Block().write(tmp_path)
    torch.save(content, tmp_path / "mask_embedding.pt")
    with pytest.raises(ModelError, match=message):
        make(target, tmp_path)


def test_mask_embedding_may_name_its_token(target: tuple[Path, Any], tmp_path: Path) -> None:
    head = Block(mask=True)
    head.write(tmp_path)
    mask_file = {"mask_token_id": MASK, "embedding": head.embedded[0]}
    torch.save(mask_file, tmp_path / "mask_embedding.pt")
    for drafts_of_request in reported(
        make(target, tmp_path, max_num_seqs=4), TEXTS[:3], reporting_params(3)
    ):
        for text, drafts in drafts_of_request[:3]:
            assert list(drafts) == head.drafts(target[1], text, len(drafts))


def test_missing_head_is_reported(target: tuple[Path, Any]) -> None:
    assert SpeculativeConfig(method="dspark").method == "dflash"
    with pytest.raises(ModelError, match="no head of DFlash or DSpark is named"):
        Engine(
            EngineConfig(
                model=str(target[0]), speculative_config=SpeculativeConfig(method="dflash")
            )
        )
