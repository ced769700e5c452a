# SPDX-License-Identifier: Apache-2.0
"""`python -m tools.train.mixture_card`: measure the mixture of experts for the model card.

The bundled model, from which the mixture is made, is measured as well. The texts of every
method are compared with those of plain decoding.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from specops.engine import Completion, Engine, EngineConfig, SamplingParams, SpeculativeConfig

from tools.train import corpus
from tools.train.card import write_papers
from tools.train.evaluate import evaluate_routing, evaluate_text
from tools.train.export import load_model
from tools.train.mixture import ASSETS, write_mixture

PROMPTS = Path(__file__).resolve().parents[2] / "bench" / "prompts"
METHODS = ("mtp", "ngram", "suffix")
DRAFTS, NEW_TOKENS, NUM_PROMPTS = 5, 128, 16
CHARS = 1500  # read from each held-out module


def engine_of(model: Path, method: str) -> Engine:
    """Return an engine that drafts with one method, or without drafts ("naive")."""
    asked: dict[str, Any] = {"method": method}
    if method != "naive":
        asked["num_speculative_tokens"] = DRAFTS
    return Engine(
        EngineConfig(
            model=str(model),
            device="cpu",
            speculative_config=SpeculativeConfig.from_dict(asked),
            max_num_seqs=16,
            num_threads=torch.get_num_threads(),
        )
    )


def figures(done: Sequence[Completion]) -> dict[str, Any]:
    """Return how often drafts are accepted, by position, and the tokens per step."""
    stats = [one.stats for one in done]
    accepted = [0] * DRAFTS
    for one in stats:
        for position, count in enumerate(one.num_accepted_tokens_per_pos):
            accepted[position] += count
    drafted = sum(one.num_drafts for one in stats)
    tokens = sum(len(one.token_ids) for one in done)
    return {
        "accepted_by_position": [round(count / max(drafted, 1), 4) for count in accepted],
        "tokens_per_step": round(tokens / sum(one.num_steps for one in stats), 3),
    }


def measure(model: Path, texts: Mapping[str, list[str]], new_tokens: int) -> list[dict[str, Any]]:
    """Continue texts greedily with every method and without drafts.

    Args:
        model: its directory.
        texts: prompts by kind.
        new_tokens: tokens to generate for each prompt.

    Returns:
        the figures of each kind and method.

    Raises:
        AssertionError: a method changed a text.
    """
    params = SamplingParams(max_tokens=new_tokens, temperature=0.0, ignore_eos=True)
    runs = []
    for kind, prompts in texts.items():
        plain = [one.token_ids for one in engine_of(model, "naive").generate(prompts, params)]
        for method in METHODS:
            done = engine_of(model, method).generate(prompts, params)
            assert [one.token_ids for one in done] == plain, f"{method} changes {kind}"
            runs.append({"text": kind, "method": method, **figures(done)})
    return runs


def main(argv: Sequence[str] | None = None) -> None:
    """Measure both models and update the card."""
    parser = argparse.ArgumentParser(prog="python -m tools.train.mixture_card", description=__doc__)
    parser.add_argument("--corpus", type=Path, help="as for tools.train")
    args = parser.parse_args(argv)
    library = [
        replace(one, text=one.text[:CHARS])
        for one in corpus.load(args.corpus)
        if one.held_out and not one.is_test
    ]
    texts = {
        kind: [one["text"] for one in json.loads((PROMPTS / f"{kind}.json").read_text())]
        for kind in ("completions", "edits")
    }
    texts = {kind: prompts[:NUM_PROMPTS] for kind, prompts in texts.items()}
    found: dict[str, Any] = {"new_tokens": NEW_TOKENS}
    with tempfile.TemporaryDirectory() as folder:
        write_mixture(Path(folder))
        for name, directory in (("dense", ASSETS), ("mixture", Path(folder))):
            model, tokenizer, _ = load_model(directory)
            found[name] = {
                "library": evaluate_text(model, tokenizer, library, torch.device("cpu")).summary(),
                "runs": measure(directory, texts, NEW_TOKENS),
            }
            found["routing"] = evaluate_routing(model, tokenizer, library)
    metrics = json.loads((ASSETS / "metrics.json").read_text(encoding="utf-8"))
    write_papers(ASSETS, {**metrics, "mixture": found})


if __name__ == "__main__":
    main()
