# SPDX-License-Identifier: Apache-2.0
"""Small heads of every kind on one small target, with their drafts for each number of drafts.

    PYTHONPATH=. python tests/small_heads.py [--steps 60] [--kind NAME]

The program makes a new engine for each kind of head and each num_speculative_tokens, and prints the
number of drafts, of accepted drafts and of failures of the drafter. Half of the requests are
greedy, the others seeded. Heads that tools.train can train are trained on outputs of the target
first, `--steps` steps each; others stay random.
"""

import argparse
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import eagle_oracle
import test_dflash
import test_eagle
import test_residual_heads
import torch
from checkpoints import write_tokenizer
from specops.engine import Engine, EngineConfig, SamplingParams, SpeculativeConfig
from tokenizers import Tokenizer

from tools.train import export
from tools.train.heads import HEADS, new_head
from tools.train.model import Model, ModelConfig
from tools.train.train_heads import HeadRecipe, save_head, train_head

LAYERS, VOCAB, WIDTH = 4, 160, 64
TEXTS = [[3 + i, 4, 9 * i + 5, 7] * (4 + i) + [11 * i % 97 + 1] * i for i in range(6)]
UNLIMITED = 5  # maximum number of drafts to try with a head that has no limit


@dataclass(frozen=True)
class Kind:
    """A kind of head.

    Attributes:
        method: the method that drafts with it.
        write: writes a head with random weights to a directory.
        most: maximum number of drafts.
    """

    method: str
    write: Callable[[Path], None]
    most: int = UNLIMITED


def _residual(name: str) -> Kind:
    heads = test_residual_heads.KINDS[name]
    return Kind(heads.method, heads.write, heads.count)


def _dflash(name: str) -> Kind:
    head = test_dflash.KINDS[name]

    def write(folder: Path) -> None:
        head.write(folder, num_target_layers=LAYERS)

    return Kind("dflash", write, head.num_rows - (not head.samples_anchor))


def _eagle3(layout: str, **fields: Any) -> Kind:
    def write(folder: Path) -> None:
        eagle_oracle.write(folder, eagle_oracle.Head((1, 2, 3), **fields), layout)

    return Kind("eagle3", write)


# Kinds with weights in their own directory. Draft models and MTP modules are handled in `main`.
KINDS: dict[str, Kind] = {
    **{name: _residual(name) for name in ("medusa", "deep", "hydra", "ungrounded", "hydra++")},
    "eagle": Kind("eagle", test_eagle.KINDS["safetensors"][0].write),
    "eagle3": _eagle3("specforge"),
    "p-eagle": _eagle3("official", mask=7),
    **{name: _dflash(name) for name in ("dflash", "anchored", "dspark", "dflash2", "windows")},
}
# Kinds that tools.train can train, by its names.
TRAINED = {name: name for name in HEADS} | {"draft model": "draft_model"}


def write_target(directory: Path, vocab_size: int = VOCAB) -> Model:
    """Write a target with random weights and an MTP module."""
    write_tokenizer(directory, vocab_size)
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    config = ModelConfig(
        vocab_size=vocab_size, hidden_size=WIDTH, num_hidden_layers=LAYERS, intermediate_size=96
    )
    model = Model(config)
    model.reset(5)
    with torch.no_grad():
        for one in model.parameters():
            if one.dim() == 2:
                one.mul_(0.2 / config.initializer_range)
    export.save_model(directory, model, tokenizer, 0)
    return export.load_model(directory)[0]


def new_engine(target: Path, own: dict[str, Any], **limits: Any) -> Engine:
    """Return an engine with `own` as its speculative_config."""
    speculative = SpeculativeConfig.from_dict(own)
    settings = {"max_num_seqs": len(TEXTS), "device": "cpu", "num_threads": 1, **limits}
    return Engine(EngineConfig(model=str(target), speculative_config=speculative, **settings))


def params(count: int, max_tokens: int) -> list[SamplingParams]:
    """Return parameters of `count` requests, greedy and seeded in turn."""
    return [
        SamplingParams(max_tokens=max_tokens, temperature=float(i % 2), seed=i, ignore_eos=True)
        for i in range(count)
    ]


def write_head(name: str, model: Model, folder: Path, steps: int, outputs: torch.Tensor) -> Kind:
    """Write a head of a kind, trained if tools.train supports it."""
    if name not in TRAINED or not steps:
        KINDS[name].write(folder)
        return KINDS[name]
    torch.manual_seed(7)
    head = new_head(TRAINED[name], model)
    recipe = HeadRecipe(steps=steps, batch_texts=8, chains=24, warmup_steps=5)
    train_head(head, model, outputs, recipe, folder, compile_head=False)
    save_head(folder, head, steps)
    write_tokenizer(folder)  # required for a draft model
    method = "dflash" if name == "dspark" else TRAINED[name]
    has_limit = method not in ("eagle", "eagle3", "draft_model")
    return Kind(method, lambda folder: None, head.depth if has_limit else UNLIMITED)


def outputs_of(target: Path) -> torch.Tensor:
    """Return texts of the target for training, [texts, length]."""
    engine = new_engine(target, {"method": "naive"}, max_num_seqs=32)
    prompts = [[1 + (37 * i + 11 * j) % (VOCAB - 1) for j in range(8)] for i in range(112)]
    prompts += TEXTS * 2
    done = engine.generate(prompts, params(len(prompts), 48))
    pairs = zip(prompts, done, strict=True)
    return torch.tensor([[*text[-8:], *one.token_ids] for text, one in pairs])


def main(arguments: list[str] | None = None) -> int:
    """Print the table and return the exit status: 1 if a drafter failed or drafted nothing."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=60, help="of training; 0: random heads")
    parser.add_argument("--kind", choices=[*KINDS, "mtp", "draft model"])
    options = parser.parse_args(arguments)
    is_bad = False
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder, "target")
        target.mkdir()
        model = write_target(target)
        outputs = outputs_of(target) if options.steps else torch.empty(0)
        print("| head | drafts a step | drafts | accepted | failures |")
        print("| --- | --- | --- | --- | --- |")
        for name in [options.kind] if options.kind else [*KINDS, "draft model", "mtp"]:
            own, most = {"method": "mtp"}, UNLIMITED
            if name != "mtp":
                directory = Path(folder, name)
                directory.mkdir()
                if name == "draft model" and not options.steps:
                    continue
                kind = write_head(name, model, directory, options.steps, outputs)
                own, most = {"method": kind.method, "model": str(directory)}, kind.most
            for count in range(1, most + 1):
                engine = new_engine(target, {**own, "num_speculative_tokens": count})
                engine.generate(TEXTS * 2, params(2 * len(TEXTS), 60))
                spec, failures = engine.stats.speculative, engine._drafting.num_failures
                drafts, accepted = spec.num_draft_tokens, spec.num_accepted_tokens
                is_bad = is_bad or bool(failures) or not drafts
                print(f"| {name} | {count} | {drafts} | {accepted} | {failures} |", flush=True)
    return int(is_bad)


if __name__ == "__main__":
    sys.exit(main())
