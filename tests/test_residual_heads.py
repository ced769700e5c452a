# SPDX-License-Identifier: Apache-2.0
"""Medusa and Hydra heads: their layouts against a slow reference, and plain decoding's bits."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import make_checkpoint, write_tokenizer
from safetensors.torch import save_file
from specops.engine import Engine, EngineConfig, SamplingParams, SpeculativeConfig
from specops.engine.drafters.trees import joint_tree
from specops.engine.errors import ModelError
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
    """Heads as they are published, and what they compute.

    Attributes:
        method: "medusa" or "hydra".
        count: of heads.
        blocks: of each.
        reads_tokens: Hydra's, but for those that are not grounded.
        layout: "authors" or "vllm".
        file: that they are in.
    """

    method: str
    count: int = 3
    blocks: int = 1
    reads_tokens: bool = False
    layout: str = "authors"
    file: str = "medusa_lm_head.pt"

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

    def name(self, head: int, block: int, part: str) -> str:
        if self.layout == "vllm":
            of_block = f"blocks.{head}.layers.{block}.{part.removeprefix('linear.')}"
            return f"lm_heads.{head}.{part}" if block == self.blocks else of_block
        if self.method == "medusa":
            return f"{head}.{block}.{part}"
        is_head = block == self.blocks
        return f"hydra_lm_head.{head}.{part}" if is_head else f"hydra_mlp.{head}.{block}.{part}"

    def write(self, directory: Path, **config: Any) -> None:
        tensors = {self.name(*key): tensor for key, tensor in self.tensors.items()}
        said = {f"{self.method}_num_heads": 2, f"{self.method}_num_layers": self.blocks}
        if self.method == "hydra":
            said |= {"grounded_heads": self.reads_tokens, "hydra_head_arch": "mlp"}
        (directory / "config.json").write_text(json.dumps({**said, **config}))
        if self.file.endswith(".safetensors"):
            save_file(tensors, directory / self.file)
        else:
            torch.save(tensors, directory / self.file)

    def drafts(self, base: Any, text: Sequence[int], count: int) -> list[int]:
        """The likeliest drafts behind a text, in float64."""
        with torch.no_grad():
            found = base.model(torch.tensor([list(text)])).last_hidden_state
            embedding = base.model.embed_tokens.weight
        state, drafted = found[0, -2], []
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
            drafted.append(int(self._apply(head, self.blocks, "", x).argmax()))
        return drafted

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
}


def make(target: tuple[Path, Any], heads: Heads | None, folder: Path, **config: Any) -> Engine:
    limits = {
        name: config.pop(name) for name in list(config) if name in EngineConfig.__annotations__
    }
    speculative = SpeculativeConfig()
    if heads is not None:
        own = {"method": heads.method, "num_speculative_tokens": 3, "model": str(folder)}
        speculative = SpeculativeConfig(**{**own, **config})
    return Engine(
        EngineConfig(device="cpu", model=str(target[0]), speculative_config=speculative, **limits)
    )


def told(count: int, temperature: float = 0.0) -> list[SamplingParams]:
    return [
        replace(params(i, temperature), max_tokens=12, report_drafts=True, logprobs=None)
        for i in range(count)
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_drafts_are_the_reference_s(target: tuple[Path, Any], tmp_path: Path, kind: str) -> None:
    """As many as there are heads, in a batch and in chunks, and behind cached pages."""
    heads = KINDS[kind]
    heads.write(tmp_path)
    limits = {"max_num_seqs": 4, "max_num_batched_tokens": 24}
    engine = make(target, heads, tmp_path, num_speculative_tokens=6, **limits)
    found = reported(engine, TEXTS[:3], told(3))
    compared = 0
    for text, drafts in [one for of_request in found for one in of_request[:5]]:
        assert list(drafts) == heads.drafts(target[1], text, len(drafts))
        compared += len(drafts) == heads.count
    assert compared > 8
    assert reported(engine, TEXTS[:3], told(3)) == found and engine.stats.prefix_cache_hits > 0


CASES: dict[str, dict[str, Any]] = {
    "wide": {},
    "tree": {"tree": True, "num_speculative_tokens": 12, "num_model_steps": 3},
    "preempted": {"max_num_batched_tokens": 20, "num_pages": 16, "max_model_len": 200},
    "int8": {"kv_cache_dtype": "int8", "page_size": 32},
    "hybrid": {"num_model_steps": 2, "num_speculative_tokens": 6},
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("kind", ["medusa", "hydra"])
@pytest.mark.corners("medusa-tree", "hydra-preempted", "hydra-hybrid")
def test_every_bit_is_plain_decoding_s(
    target: tuple[Path, Any], tmp_path: Path, kind: str, case: str
) -> None:
    heads, own = KINDS[kind], dict(CASES[case])
    heads.write(tmp_path)
    if case == "hybrid":
        own["method"] = f"{kind}+suffix"
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


@pytest.mark.parametrize("kind", ["medusa", "hydra"])
def test_drawn_drafts_are_the_same_in_any_batch(
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


def test_trees_are_the_best_paths() -> None:
    places = [[(1, 0.6), (2, 0.3), (3, 0.1)], [(4, 0.9), (5, 0.1)], [(6, 0.55), (7, 0.45)]]
    tree = joint_tree(places, 7)
    assert tree.token_ids == [1, 4, 2, 6, 4, 7, 6]
    assert tree.parents == [-1, 0, -1, 1, 2, 1, 4]
    assert tree.chances == [0.6, 0.9, 0.3, 0.55, 0.9, 0.45, 0.55]
    # Every path, by its product of chances.
    whole = joint_tree(places, 100)
    products: list[float] = []
    for parent, chance in zip(whole.parents, whole.chances, strict=True):
        products.append(chance * (products[parent] if parent >= 0 else 1.0))
    assert len(products) == 3 + 6 + 12
    assert all(a >= b - 1e-12 for a, b in pairwise(products))
    assert joint_tree([], 3) == ([], [], [])


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
            r"tensor 9\.weight has no place in Medusa heads",
        ),
        ("vllm", {}, {"truncated_vocab_size": 99}, r"config\.json: truncated_vocab_size is 99"),
        ("hydra", {}, {"hydra_head_arch": "prefix-mlp"}, "hydra_head_arch must be mlp, got prefix"),
        ("hydra", {}, {"grounded_heads": 1}, "grounded_heads must be true or false, got 1"),
        (
            "hydra",
            {},
            {"grounded_heads": False},
            r"linear\.weight must be \[64, 64\], got \[64, 128",
        ),
    ],
)
def test_what_does_not_fit(
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


@pytest.mark.parametrize("method", ["medusa", "hydra"])
def test_what_is_named_by_nobody(target: tuple[Path, Any], tmp_path: Path, method: str) -> None:
    with pytest.raises(ModelError, match="heads are named: the directory belongs into model"):
        Engine(
            EngineConfig(model=str(target[0]), speculative_config=SpeculativeConfig(method=method))
        )
    with pytest.raises(ModelError, match=r"no model\.safetensors"):
        make(target, Heads(method), tmp_path)
