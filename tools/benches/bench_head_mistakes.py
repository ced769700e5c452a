# SPDX-License-Identifier: Apache-2.0
"""Cost of each mistake with a draft head, in its files or in the engine's use of it.

The heads are those that tools.train.train_heads wrote to build/heads for the bundled model, or
those of the tests.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

import torch
from safetensors.torch import load_file, save_file
from specops.engine import Engine, EngineConfig, SamplingParams, SpeculativeConfig
from specops.engine.drafters.head import DraftRows
from specops.engine.drafters.newest import NewestTokens
from specops.engine.models import BlockDrafter, KvCache, LayerBatch
from specops.engine.models.state_head import StateHead
from torch import Tensor

from bench.bench_engine import prompt_token_ids
from bench.common import Bench, Figure

Config = dict[str, Any]
ROOT = Path(__file__).resolve().parents[2]
TRAINED = (ROOT / "build" / "heads", ROOT / "tests" / "golden")
DRAFTS, NEW_TOKENS = 5, 64


@dataclass(frozen=True)
class Mistake:
    """One possible mistake.

    Attributes:
        name: name in its figures.
        what: description.
        method: method of the heads that it concerns.
        config: changes config.json.
        tensor: changes a tensor, by its name.
        renamed: maps the name of a tensor to a wrong one.
        patch: a class, the name of its attribute, and the replacement.
    """

    name: str
    what: str
    method: str
    config: Callable[[Config], None] | None = None
    tensor: Callable[[str, Tensor], Tensor] | None = None
    renamed: Callable[[str], str] | None = None
    patch: tuple[type, str, Any] | None = None


def _layers_below(config: Config) -> None:
    """Shift the layer ids by one, as if read under another convention."""
    for own in (config, config.get("dflash_config", {})):
        for field in ("eagle_aux_hidden_state_layer_ids", "target_layer_ids"):
            if field in own:
                own[field] = [layer - 1 for layer in own[field]]


def _without_layers(config: Config) -> None:
    del config["eagle_aux_hidden_state_layer_ids"]


def _another_mask(config: Config) -> None:
    """Set the mask token to 0, the default of a missing field."""
    assert config["dflash_config"]["mask_token_id"] != 0
    config["dflash_config"]["mask_token_id"] = 0


def _setting(field: str, value: Any) -> Callable[[Config], None]:
    def change(config: Config) -> None:
        assert config.get(field) != value
        config[field] = value

    return change


def _interleaved(name: str, tensor: Tensor) -> Tensor:
    """Reorder q and k, as if pairs that are rotated together lay side by side."""
    parts = name.split(".")
    if not {"q_proj", "k_proj", "q_norm", "k_norm"} & set(parts):
        return tensor
    dim = 64
    halves = tensor.unflatten(0, (-1, dim // 2, 2))
    return halves.transpose(1, 2).flatten(0, 2).contiguous()


def _all_masks(
    self: BlockDrafter, token_ids: Tensor, places: Tensor, batch: LayerBatch, cache: KvCache
) -> Tensor:
    masks = torch.full_like(token_ids, self.config.mask_token_id)
    return _FORWARD(self, masks, places, batch, cache)


def _too_far(
    self: BlockDrafter, token_ids: Tensor, places: Tensor, batch: LayerBatch, cache: KvCache
) -> Tensor:
    moved = replace(batch, positions=batch.positions + 1)
    return _FORWARD(self, token_ids, places, moved, cache)


_FORWARD, _BEFORE = BlockDrafter.forward, NewestTokens.before


def _without_bias(
    self: BlockDrafter, logits: Tensor, states: Tensor, token_ids: Tensor, sums: Tensor | None
) -> Tensor:
    return logits


def _behind_newest(self: NewestTokens, index: int, rows: DraftRows) -> Tensor:
    return _BEFORE(self, 0, rows)


def _one_too_early(self: NewestTokens, index: int, rows: DraftRows) -> Tensor:
    return _BEFORE(self, max(index - 1, 0), rows)


def _swapped(name: str) -> str:
    """Swap the names of the two matrices of the Markov head, which have the same shape."""
    if "markov_w1" in name:
        return name.replace("markov_w1", "markov_w2")
    return name.replace("markov_w2", "markov_w1")


def _default_anchor(config: Config) -> None:
    """Remove the field that says that the masks of a DSpark head draft at their own positions."""
    del config["sample_from_anchor"]


MISTAKES = (
    Mistake("layers", "layer ids are read one too low", "eagle3", config=_layers_below),
    Mistake("default_layers", "layers 2, L/2, L - 3, not the head's", "eagle3", _without_layers),
    Mistake(
        "normed_state",
        "later drafts read the state after the last norm (`norm_output`)",
        "eagle3",
        _setting("norm_output", True),
    ),
    Mistake(
        "normed_residual",
        "the normed state is the residual (`norm_before_residual`)",
        "eagle3",
        _setting("norm_before_residual", True),
    ),
    Mistake("rope", "rotary embeddings of the other layout", "eagle3", tensor=_interleaved),
    Mistake("theta", "`rope_theta` 1e6, not 1e4", "eagle3", _setting("rope_theta", 1e6)),
    Mistake("layers", "layer ids are read one too low", "dflash", config=_layers_below),
    Mistake(
        "anchor",
        "the first row of a block is a mask, not the newest token",
        "dflash",
        patch=(BlockDrafter, "forward", _all_masks),
    ),
    Mistake("mask", "masks embed another token", "dflash", config=_another_mask),
    Mistake(
        "position",
        "blocks are one position too far",
        "dflash",
        patch=(BlockDrafter, "forward", _too_far),
    ),
    Mistake(
        "sample_from_anchor",
        "each row drafts the token behind it (`sample_from_anchor`)",
        "dflash",
        _setting("sample_from_anchor", True),
    ),
    Mistake(
        "unnormed_context",
        "the target's states are not normed",
        "dflash",
        patch=(BlockDrafter, "states_of", StateHead.states_of),
    ),
    Mistake("rope", "rotary embeddings of the other layout", "dflash", tensor=_interleaved),
    Mistake(
        "no_markov",
        "the Markov head is not used",
        "dspark",
        patch=(BlockDrafter, "with_tokens_before", _without_bias),
    ),
    Mistake(
        "newest_token",
        "the Markov head reads the newest token for every draft",
        "dspark",
        patch=(NewestTokens, "before", _behind_newest),
    ),
    Mistake(
        "early_token",
        "the Markov head reads one token too early from the second draft on",
        "dspark",
        patch=(NewestTokens, "before", _one_too_early),
    ),
    Mistake("swapped", "the Markov head's matrices are swapped", "dspark", renamed=_swapped),
    Mistake(
        "default_anchor",
        "each row drafts the token behind it, as where `sample_from_anchor` is missing",
        "dspark",
        _default_anchor,
    ),
)


def tensors_of(directory: Path) -> dict[str, Tensor]:
    """Load the tensors of a head, from one file or by its index."""
    index = directory / "model.safetensors.index.json"
    files = {"model.safetensors"}
    if index.exists():
        files = set(json.loads(index.read_text())["weight_map"].values())
    return {name: one for file in files for name, one in load_file(directory / file).items()}


@contextmanager
def planted(directory: Path, mistake: Mistake) -> Iterator[Path]:
    """Plant a mistake: yield a copy of the head with it, or patch the engine."""
    with TemporaryDirectory() as folder:
        config = json.loads((directory / "config.json").read_text())
        tensors = tensors_of(directory)
        if mistake.config is not None:
            mistake.config(config)
        if mistake.tensor is not None:
            tensors = {name: mistake.tensor(name, one) for name, one in tensors.items()}
        if mistake.renamed is not None:
            tensors = {mistake.renamed(name): one for name, one in tensors.items()}
        (Path(folder) / "config.json").write_text(json.dumps(config))
        save_file(tensors, Path(folder) / "model.safetensors")
        if mistake.patch is None:
            yield Path(folder)
        else:
            with mock.patch.object(*mistake.patch):
                yield Path(folder)


@dataclass(frozen=True)
class Kept:
    """Acceptance of drafts.

    Attributes:
        first: fraction of first drafts that are kept.
        length: tokens per step.
    """

    first: float
    length: float


def kept(method: str, directory: Path, kind: str, num_prompts: int | None = None) -> Kept:
    """Draft with a head after prompts of a kind, which are continued greedily."""
    drafting = {
        "method": method,
        "model": str(directory),
        "num_speculative_tokens": DRAFTS,
        "adaptive_verification": False,
    }
    config = SpeculativeConfig.from_dict(drafting)
    engine = Engine(EngineConfig(device="cpu", speculative_config=config, max_num_seqs=16))
    params = SamplingParams(max_tokens=NEW_TOKENS, temperature=0.0, ignore_eos=True)
    prompts: Sequence[Sequence[int]] = prompt_token_ids(engine, kind)[:num_prompts]
    engine.generate(prompts, params)
    said = engine.stats.speculative
    first = said.num_accepted_tokens_per_pos[0] / said.num_draft_tokens_per_pos()[0]
    return Kept(first, 1 + said.num_accepted_tokens / said.num_drafts)


def trained_head(method: str) -> Path | None:
    """Return the folder of a method's trained head; if None, print how to train one."""
    for folder in TRAINED:
        if (folder / method / "config.json").is_file():
            return folder / method
    print(f"  no head: python -m tools.train.train_heads --head {method}", flush=True)
    return None


def run_head_mistakes(bench: Bench) -> None:
    """Measure every mistake with every available head."""
    for method in ("eagle3", "dflash", "dspark"):
        directory = trained_head(method)
        if directory is None:
            continue
        right = {kind: kept(method, directory, kind) for kind in ("completions", "edits")}
        for mistake in MISTAKES:
            if mistake.method != method:
                continue
            for kind, before in right.items():
                with planted(directory, mistake) as wrong:
                    now = kept(method, wrong, kind)
                for name, value, other in (
                    ("first", now.first, before.first),
                    ("length", now.length, before.length),
                ):
                    unit = "of first drafts" if name == "first" else "tokens a step"
                    bench.add(
                        Figure(
                            f"head_mistakes.{method}.{mistake.name}.{kind}.{name}",
                            f"{method}, {kind}, k = {DRAFTS}: {mistake.what}",
                            value,
                            unit,
                            "right",
                            other,
                            value / other,
                            threads=bench.num_threads,
                        )
                    )
