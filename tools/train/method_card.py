# SPDX-License-Identifier: Apache-2.0
"""`python -m tools.train.method_card MODEL`: acceptance of the methods in the engine, for the card.

Every text is compared with that of plain decoding.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from specops.engine import Completion, Engine, EngineConfig, SamplingParams, SpeculativeConfig

from tools.train.card import write_papers

PROMPTS = Path(__file__).resolve().parents[2] / "bench" / "prompts"
TEXTS = ("completions", "edits")
METHODS = ("mtp", "ngram", "suffix")
DRAFTS, NEW_TOKENS = 5, 128


def engine_of(model: Path, method: str) -> Engine:
    """An engine of one method, without what the others would leave in a shared tree."""
    asked: dict[str, Any] = {"method": method, "num_speculative_tokens": DRAFTS}
    if method == "naive":
        asked = {"method": method}
    return Engine(
        EngineConfig(
            model=str(model),
            device="cpu",
            speculative_config=SpeculativeConfig.from_dict(asked),
            max_num_seqs=16,
        )
    )


def figures(done: Sequence[Completion]) -> dict[str, Any]:
    """How often drafts are accepted, by position, and the tokens of a step."""
    stats = [one.stats for one in done]
    steps = sum(one.num_drafts for one in stats)
    accepted = [0] * DRAFTS
    for one in stats:
        for position, count in enumerate(one.num_accepted_tokens_per_pos):
            accepted[position] += count
    tokens = sum(len(one.token_ids) for one in done)
    return {
        "accepted_by_position": [round(count / max(steps, 1), 4) for count in accepted],
        "tokens_per_step": round(tokens / sum(one.num_steps for one in stats), 3),
    }


def measure(model: Path, texts: dict[str, list[str]], new_tokens: int) -> dict[str, Any]:
    """Continues texts with every method and without, greedily.

    Raises:
        AssertionError: a method has changed a text.
    """
    params = SamplingParams(max_tokens=new_tokens, temperature=0.0, ignore_eos=True)
    runs = []
    for text, prompts in texts.items():
        plain = [one.token_ids for one in engine_of(model, "naive").generate(prompts, params)]
        for method in METHODS:
            done = engine_of(model, method).generate(prompts, params)
            assert [one.token_ids for one in done] == plain, f"{method} changes {text}"
            runs.append({"text": text, "method": method, **figures(done)})
    return {"new_tokens": new_tokens, "runs": runs}


def main(argv: Sequence[str] | None = None) -> None:
    """Measures a model directory of tools.train, and writes its card again."""
    parser = argparse.ArgumentParser(prog="python -m tools.train.method_card", description=__doc__)
    parser.add_argument("model", type=Path)
    model = parser.parse_args(argv).model
    texts = {
        text: [one["text"] for one in json.loads((PROMPTS / f"{text}.json").read_text())]
        for text in TEXTS
    }
    metrics = json.loads((model / "metrics.json").read_text(encoding="utf-8"))
    write_papers(model, {**metrics, "methods": measure(model, texts, NEW_TOKENS)})


if __name__ == "__main__":
    main()
