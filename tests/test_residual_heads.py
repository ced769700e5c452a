# SPDX-License-Identifier: Apache-2.0
"""Medusa and Hydra heads: drafts equal a slow reference, and outputs equal plain decoding."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import BASE, make_checkpoint, write_tokenizer
from safetensors.torch import save_file
from specops.api.errors import ModelError
from specops.engine import Engine, EngineConfig, SamplingParams, SpeculativeConfig
from test_draft_model import reported
from test_lossless import bits, params
from torch import Tensor

WIDTH, VOCAB = 64, 160
TEXTS = [[3 + i, 4, 9 * i + 5, 7] * (8 + i) + [11 * i % 97 + 1] * i for i in range(6)]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    directory = tmp_path_factory.mktemp("target")
    model = make_checkpoint(directory, "Llama", vocab_size=VOCAB)
    write_tokenizer(directory)
    return directory, model.double()


@dataclass
class Heads:
    """Published heads, and a reference of what they compute.

    Attributes:
        method: "medusa" or "hydra".
        count: number of heads.
        blocks: number of residual blocks per head.
        reads_tokens: whether heads also read the drafted tokens (grounded Hydra heads).
        layout: "authors" or "vllm".
        file: name of the file with the weights.
        has_prefix: whether heads read the output of a decoder layer instead of the target's states
            (Hydra++).
    """

    method: str
    count: int = 3
    blocks: int = 1
    reads_tokens: bool = False
    layout: str = "authors"
    file: str = "medusa_lm_head.pt"
    has_prefix: bool = False

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(5)

        def matrix(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator) * shape[-1] ** -0.5

        self.tensors: dict[tuple[int, int, str], Tensor] = {}
        for head in range(self.count):
            for block in range(self.blocks):
                width = WIDTH * (1 + (1 + head) * self.reads_tokens * (block == 0))
                kinds = ["linear", "res_connection"] if width > WIDTH else ["linear"]
                for kind in kinds:
                    self.tensors[head, block, f"{kind}.weight"] = matrix(WIDTH, width)
                    self.tensors[head, block, f"{kind}.bias"] = matrix(WIDTH)
            self.tensors[head, self.blocks, "weight"] = 3 * matrix(VOCAB, WIDTH)
            if self.method == "hydra":
                self.tensors[head, self.blocks, "bias"] = matrix(VOCAB)

    @cached_property
    def prefix(self) -> Any:
        """Decoder layer of Hydra++ in transformers."""
        transformers = pytest.importorskip("transformers")
        config = transformers.LlamaConfig(**{**BASE, "vocab_size": VOCAB, "num_hidden_layers": 1})
        layer = transformers.LlamaModel(config).requires_grad_(False)
        generator = torch.Generator().manual_seed(6)
        for one in layer.parameters():
            one.copy_((one.dim() == 1) + 0.3 * torch.randn(one.shape, generator=generator))
        return layer

    def name(self, head: int, block: int, part: str) -> str:
        if self.layout == "vllm":
            of_block = f"blocks.{head}.layers.{block}.{part.removeprefix('linear.')}"
            return f"lm_heads.{head}.{part}" if block == self.blocks else of_block
        if self.method == "medusa":
            return f"{head}.{block}.{part}"
        if block == self.blocks:
            return f"hydra_lm_head.{head}.{'1.' if self.has_prefix else ''}{part}"
        place = 2 * block + 1 if self.has_prefix else block  # after its dropout
        return f"hydra_mlp.{head}.{place}.{part}"

    def write(self, directory: Path, **config: Any) -> None:
        tensors = {self.name(*key): tensor for key, tensor in self.tensors.items()}
        if self.has_prefix:
            own = self.prefix.state_dict().items()
            tensors |= {f"prefix_embeding_layer.{name}": tensor for name, tensor in own}
        said = {f"{self.method}_num_heads": 2, f"{self.method}_num_layers": self.blocks}
        if self.method == "hydra":
            kind = "prefix-mlp" if self.has_prefix else "mlp"
            said |= {"grounded_heads": self.reads_tokens, "hydra_head_arch": kind}
        (directory / "config.json").write_text(json.dumps({**said, **config}))
        if self.file.endswith(".safetensors"):
            save_file(tensors, directory / self.file)
        else:
            torch.save(tensors, directory / self.file)

    def drafts(self, base: Any, text: Sequence[int], count: int, mistake: str = "") -> list[int]:
        """Return the likeliest drafts after a text in float64, with an optional planted bug."""
        return [tokens[0] for tokens in self.ranked(base, text, count, mistake)]

    def ranked(
        self, base: Any, text: Sequence[int], count: int, mistake: str = ""
    ) -> list[list[int]]:
        """Return all tokens for each draft position, the likeliest first."""
        with torch.no_grad():
            found = base.model(torch.tensor([list(text)]), output_hidden_states=True)
            un_normed, found = found.hidden_states[-2], found.last_hidden_state
            if self.has_prefix and mistake != "no layer":
                given = un_normed if mistake == "another state" else found
                places = torch.arange(given.shape[1])[None]
                if mistake == "another place":
                    places[0, -2] += 1  # the row that drafts
                found = self.prefix.double()(inputs_embeds=given, position_ids=places)[0]
            embedding = base.model.embed_tokens.weight
        state, drafted, ranked = found[0, -2], [], []
        for head in range(count):
            x = state
            if self.reads_tokens:
                tokens = [text[-1], *drafted]
                x = torch.cat([state, *(embedding[token] for token in tokens)]).detach()
            for block in range(self.blocks):
                inner = self._apply(head, block, "linear.", x)
                if len(x) > WIDTH:
                    x = self._apply(head, block, "res_connection.", x)
                x = x + torch.nn.functional.silu(inner)
            logits = self._apply(head, self.blocks, "", x)
            ranked.append(logits.argsort(descending=True, stable=True).tolist())
            drafted.append(ranked[-1][0])
        return ranked

    def _apply(self, head: int, block: int, kind: str, x: Tensor) -> Tensor:
        bias = self.tensors.get((head, block, f"{kind}bias"), torch.zeros(1))
        return self.tensors[head, block, f"{kind}weight"].double() @ x + bias.double()


KINDS = {
    "medusa": Heads("medusa"),
    "deep": Heads("medusa", blocks=2, count=4, file="medusa_lm_head.safetensors"),
    "vllm": Heads("medusa", layout="vllm", file="model.safetensors"),
    "hydra": Heads("hydra", reads_tokens=True, file="hydra_lm_head.pt"),
    "deep hydra": Heads("hydra", blocks=3, reads_tokens=True, file="hydra_lm_head.safetensors"),
    "ungrounded": Heads("hydra", file="hydra_lm_head.pt"),
    "hydra++": Heads(
        "hydra", blocks=2, reads_tokens=True, file="hydra_lm_head.pt", has_prefix=True
    ),
}


def make(target: tuple[Path, Any], heads: Heads | None, folder: Path, **config: Any) -> Engine:
    limits = {
        name: config.pop(name) for name in list(config) if name in EngineConfig.__annotations__
    }
    speculative = SpeculativeConfig()
    if heads is not None:
        own = {"method": heads.method, "num_speculative_tokens": 3, "model": str(folder)}
        speculative = SpeculativeConfig.from_dict({**own, **config})
    return Engine(
        EngineConfig(device="cpu", model=str(target[0]), speculative_config=speculative, **limits)
    )


def reporting(count: int, temperature: float = 0.0) -> list[SamplingParams]:
    return [
        replace(params(i, temperature), max_tokens=12, report_drafts=True, logprobs=None)
        for i in range(count)
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_drafts_equal_the_reference(target: tuple[Path, Any], tmp_path: Path, kind: str) -> None:
    """Use every head, in a batch, in chunks and behind cached pages."""
    heads = KINDS[kind]
    heads.write(tmp_path)
    limits = {"max_num_seqs": 4, "max_num_batched_tokens": 24}
    engine = make(target, heads, tmp_path, num_speculative_tokens=heads.count, **limits)
    found = reported(engine, TEXTS[:3], reporting(3))
    compared = 0
    for text, drafts in [one for of_request in found for one in of_request[:5]]:
        assert list(drafts) == heads.drafts(target[1], text, len(drafts))
        compared += len(drafts) == heads.count
    assert compared > 8
    assert reported(engine, TEXTS[:3], reporting(3)) == found and engine.stats.prefix_cache_hits > 0


def test_more_drafts_than_heads_are_refused(target: tuple[Path, Any], tmp_path: Path) -> None:
    heads = KINDS["medusa"]
    heads.write(tmp_path)
    num_drafts = heads.count + 1
    message = f'at most {heads.count}, the drafts of a step that the weights of "medusa" make'
    with pytest.raises(ValueError, match=f"num_model_steps must be {message}.*, got {num_drafts};"):
        make(target, heads, tmp_path, num_speculative_tokens=num_drafts)


@pytest.mark.parametrize("mistake", ["no layer", "another state", "another place"])
def test_mistakes_in_the_prefix_layer_change_the_drafts(
    target: tuple[Path, Any], tmp_path: Path, mistake: str
) -> None:
    heads = KINDS["hydra++"]
    heads.write(tmp_path)
    found = reported(make(target, heads, tmp_path, max_num_seqs=4), TEXTS[:3], reporting(3))
    pairs = [one for of_request in found for one in of_request if one[1]]
    others = [heads.drafts(target[1], text, len(drafts), mistake) for text, drafts in pairs]
    assert sum(list(drafts) != other for (_, drafts), other in zip(pairs, others, strict=True)) > 3


CASES: dict[str, dict[str, Any]] = {
    "wide": {},
    "preempted": {"max_num_batched_tokens": 20, "num_pages": 16, "max_model_len": 200},
    "int8": {"kv_cache_dtype": "int8", "page_size": 32},
    "hybrid": {"num_model_steps": 2, "num_speculative_tokens": 6},
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("kind", ["medusa", "hydra", "hydra++"])
@pytest.mark.fast("medusa-wide", "hydra-preempted", "hydra-hybrid", "hydra++-int8")
def test_outputs_have_the_bits_of_plain_decoding(
    target: tuple[Path, Any], tmp_path: Path, kind: str, case: str
) -> None:
    heads, own = KINDS[kind], dict(CASES[case])
    heads.write(tmp_path)
    if case == "hybrid":
        own["method"] = f"{heads.method}+suffix"
    each = [replace(params(i, 0.8 * (i % 2)), max_tokens=60) for i in range(6)]
    kv = {name: one for name, one in own.items() if name == "kv_cache_dtype"}
    expected = make(target, None, tmp_path, max_num_seqs=1, **kv).generate(TEXTS, each)
    engine = make(target, heads, tmp_path, **{"max_num_seqs": 6, **own})
    done = engine.generate(TEXTS, each)
    assert list(map(bits, done)) == list(map(bits, expected))
    spec = engine.stats.speculative
    assert 0 < spec.num_accepted_tokens < spec.num_draft_tokens
    assert engine.num_free_pages == engine.num_pages and not engine._drafting.num_failures
    assert (engine.stats.num_preemptions > 0) == ("num_pages" in own)


@pytest.mark.parametrize("kind", ["medusa", "hydra", "hydra++"])
def test_sampled_drafts_are_the_same_in_any_batch(
    target: tuple[Path, Any], tmp_path: Path, kind: str
) -> None:
    heads = KINDS[kind]
    heads.write(tmp_path)
    each = [replace(params(i, 0.9), max_tokens=30) for i in range(4)]
    for strategy in ("rejection", "block"):
        engine = make(target, heads, tmp_path, max_num_seqs=4, verify_strategy=strategy)
        alone = [engine.generate([text], one)[0] for text, one in zip(TEXTS, each, strict=False)]
        assert list(map(bits, engine.generate(TEXTS[:4], each))) == list(map(bits, alone))
        spec = engine.stats.speculative
        assert 0 < spec.num_accepted_tokens < spec.num_draft_tokens


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_drafts_of_a_prefix_layer_are_the_same_in_any_batch(
    target: tuple[Path, Any], tmp_path: Path, temperature: float
) -> None:
    """Compare batches, chunks and runs behind cached pages."""
    heads = KINDS["hydra++"]
    heads.write(tmp_path)
    each = reporting(6, temperature)
    engine = make(target, heads, tmp_path, max_num_seqs=6)
    drafts = reported(engine, TEXTS, each)
    assert reported(engine, TEXTS[::-1], each[::-1])[::-1] == drafts
    assert engine.stats.prefix_cache_hits > 0
    other = make(target, heads, tmp_path, max_num_seqs=2, max_num_batched_tokens=9)
    assert reported(other, TEXTS, each) == drafts


@pytest.mark.parametrize(
    "kind,changes,config,message",
    [
        ("medusa", {"0.0.linear.weight": None}, {}, "holds no Medusa heads; looked for tensors"),
        (
            "medusa",
            {"1.0.linear.weight": torch.ones(2, 2)},
            {},
            r"must be \[64, 64\], got \[2, 2\]",
        ),
        ("medusa", {"2.1.weight": None}, {}, r"medusa_lm_head\.pt: tensor 2\.1\.weight is missing"),
        (
            "medusa",
            {"9.weight": torch.ones(1)},
            {},
            r"tensor 9\.weight is not used by Medusa heads",
        ),
        ("vllm", {}, {"truncated_vocab_size": 99}, r"config\.json: truncated_vocab_size is 99"),
        ("hydra", {}, {"hydra_head_arch": "eagle-attn"}, "must be mlp or prefix-mlp, got eagle-at"),
        (
            "hydra++",
            {"prefix_embeding_layer.norm.weight": None},
            {},
            r"tensor prefix_embeding_layer\.norm\.weight is missing",
        ),
        ("hydra++", {}, {"hydra_head_arch": "mlp"}, "is not used by Hydra heads"),
        (
            "hydra",
            {},
            {"hydra_head_arch": "prefix-mlp"},
            r"tensor prefix_embeding_layer\.layers\.0\..* is missing",
        ),
        ("hydra", {}, {"hidden_state_offset": 1}, "hidden_state_offset must be 0, got 1"),
        ("hydra", {}, {"grounded_heads": 1}, "grounded_heads must be true or false, got 1"),
        (
            "hydra",
            {},
            {"grounded_heads": False},
            r"linear\.weight must be \[64, 64\], got \[64, 128",
        ),
    ],
)
def test_mismatched_checkpoints_are_refused(
    target: tuple[Path, Any],
    tmp_path: Path,
    kind: str,
    changes: dict[str, Any],
    config: dict[str, Any],
    message: str,
) -> None:
    heads = KINDS[kind]
    heads.write(tmp_path, **config)
    if changes:
        tensors = torch.load(tmp_path / heads.file, weights_only=True)
        for name, tensor in changes.items():
            tensors.pop(name, None)
            if tensor is not None:
                tensors[name] = tensor
        torch.save(tensors, tmp_path / heads.file)
    with pytest.raises(ModelError, match=message):
        make(target, heads, tmp_path)


@pytest.mark.parametrize("kind", ["medusa", "hydra"])
def test_null_config_fields_are_ignored(
    target: tuple[Path, Any], tmp_path: Path, kind: str
) -> None:
    fields = ("truncated_vocab_size", "hydra_head_arch", "grounded_heads", "hidden_state_offset")
    KINDS[kind].write(tmp_path, **dict.fromkeys(fields))
    assert make(target, KINDS[kind], tmp_path) is not None


@pytest.mark.parametrize("method", ["medusa", "hydra"])
def test_missing_heads_are_refused(target: tuple[Path, Any], tmp_path: Path, method: str) -> None:
    hint = rf'heads are named: set speculative_config to {{"method": "{method}", "model": "DIR"}}'
    with pytest.raises(ModelError, match=hint):
        Engine(
            EngineConfig(model=str(target[0]), speculative_config=SpeculativeConfig(method=method))
        )
    names = rf"no model\.safetensors, .*, {method}_lm_head\.safetensors or {method}_lm_head\.pt"
    with pytest.raises(ModelError, match=names):
        make(target, Heads(method), tmp_path)
