# SPDX-License-Identifier: Apache-2.0
"""`python -m tools.train.head_card`: measure trained heads for the model card."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tools.train import corpus
from tools.train.card import write_papers
from tools.train.evaluate import ChainFigures
from tools.train.export import load_model
from tools.train.heads import HEADS, Head, new_head, run_target
from tools.train.model import Model, rope_cos_sin
from tools.train.outputs import continuations
from tools.train.train import encode

ASSETS = Path("python/specops/assets")
PROMPT_TOKENS, NEW_TOKENS = 192, 64


@torch.no_grad()
def chain_figures(head: Head, model: Model, texts: Tensor) -> dict[str, Any]:
    """Return how many drafts are kept after each token of the target's greedy continuations."""
    cos, sin = rope_cos_sin(texts.shape[1], model.config, texts.device)
    starts = torch.arange(PROMPT_TOKENS - 1, texts.shape[1] - head.depth - 1)
    figures = ChainFigures(head.depth)
    for part in texts.split(8):
        kept: list[Tensor] = []
        target = run_target(model, part, cos, sin)
        for draft, logits in enumerate(head.chains(target, starts), start=1):
            right = logits.argmax(-1) == part[:, starts + draft + 1]
            kept.append(right & kept[-1] if kept else right)
        figures.add(torch.stack(kept))
    return figures.summary()


def main(argv: Sequence[str] | None = None) -> None:
    """Measure every head found in the directory, and write the results to the model card.

    The card keeps its entries of heads that are not in the directory.
    """
    parser = argparse.ArgumentParser(prog="python -m tools.train.head_card", description=__doc__)
    parser.add_argument("--heads", type=Path, default=Path("build/heads"))
    parser.add_argument("--corpus", type=Path, help="as for tools.train")
    args = parser.parse_args(argv)
    model, tokenizer, _ = load_model(ASSETS)
    library = [one for one in corpus.load(args.corpus) if one.held_out and not one.is_test]
    encoded = [ids for ids in encode(tokenizer, library) if len(ids) >= PROMPT_TOKENS]
    prompts = [ids[:PROMPT_TOKENS].astype(int).tolist() for ids in encoded]
    texts = continuations(ASSETS, prompts, NEW_TOKENS, temperature=0.0)
    metrics = json.loads((ASSETS / "metrics.json").read_text(encoding="utf-8"))
    before, metrics["heads"] = metrics.get("heads", {}), {}
    for name in HEADS:
        state = args.heads / name / "state.pt"
        if not state.exists():
            metrics["heads"] |= {name: before[name]} if name in before else {}
            continue
        found = torch.load(state, weights_only=True)
        head = new_head(name, model)
        head.load_state_dict({key: one.bfloat16() for key, one in found["head"].items()})
        log = (args.heads / name / "train.jsonl").read_text(encoding="utf-8")
        rows = [json.loads(row) for row in log.splitlines()]
        first = next(row for row in rows if "start" in row)
        metrics["heads"][name] = {
            "steps": found["step"],
            "texts": first["texts"],
            "texts_per_step": first["batch_texts"],
            "megabytes": sum(one.numel() * 2 for one in head.tensors().values()) / 1e6,
            **chain_figures(head, model, texts),
        }
    write_papers(ASSETS, metrics)


if __name__ == "__main__":
    main()
