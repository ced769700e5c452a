# SPDX-License-Identifier: Apache-2.0
"""Suffix drafts from earlier answers to the same prompt: tokens per step (no timing).

The bench measures groups of samples of one prompt, as in reinforcement learning, and retries, whose
answer repeats. The samples of a group run all at once, or one per prompt at a time.
"""

from collections.abc import Sequence

from specops.engine import Completion, Engine, EngineConfig, SamplingParams, SpeculativeConfig

from bench.bench_engine import prompt_token_ids
from bench.common import Bench, Figure

NUM_PROMPTS, GROUP, NEW_TOKENS, SHORT_TOKENS, DRAFTS = 16, 8, 128, 32, 8


def run_answers(bench: Bench) -> None:
    """Measure every order of samples, at two temperatures, and retries of two lengths."""
    for text in ("completions", "edits"):
        for temperature in (0.4, 0.8):
            samples = [
                [_params(temperature, 100 * prompt + sample) for prompt in range(NUM_PROMPTS)]
                for sample in range(GROUP)
            ]
            what = f"{GROUP} samples of {NUM_PROMPTS} prompts at temperature {temperature:g}"
            together = [[one for of_all in samples for one in of_all]]
            _add(bench, text, f"t{temperature:g}.together", f"{what}, together", together)
            _add(bench, text, f"t{temperature:g}.rounds", f"{what}, in rounds", samples)
        for tokens in (SHORT_TOKENS, NEW_TOKENS):
            same = [_params(0.8, prompt, tokens) for prompt in range(NUM_PROMPTS)]
            what = f"{tokens} tokens to {NUM_PROMPTS} prompts a second time"
            _add(bench, text, f"retry{tokens}", what, [same, same], last_alone=True)


def _params(temperature: float, seed: int, tokens: int | None = None) -> SamplingParams:
    return SamplingParams(max_tokens=tokens or NEW_TOKENS, temperature=temperature, seed=seed)


def _add(
    bench: Bench,
    text: str,
    name: str,
    what: str,
    rounds: Sequence[Sequence[SamplingParams]],
    *,
    last_alone: bool = False,
) -> None:
    """Add tokens per step with and without earlier answers, over all rounds or the last one."""
    lengths, texts = {}, {}
    for answers in (0, GROUP):
        engine = Engine(
            EngineConfig(
                device="cpu",
                max_num_seqs=64,
                num_threads=bench.num_threads,
                speculative_config=SpeculativeConfig.from_dict(
                    {
                        "method": "suffix",
                        "num_speculative_tokens": DRAFTS,
                        "suffix_decoding_earlier_answers": answers,
                    }
                ),
            )
        )
        prompts = prompt_token_ids(engine, text)[:NUM_PROMPTS]
        done: list[Completion] = []
        for params in rounds:
            found = engine.generate((prompts * GROUP)[: len(params)], list(params))
            done = found if last_alone else done + found
        num_tokens = sum(len(one.token_ids) for one in done)
        lengths[answers] = num_tokens / sum(one.stats.num_steps for one in done)
        texts[answers] = [one.token_ids for one in done]
    assert texts[0] == texts[GROUP], "drafts changed a text"
    bench.add(
        Figure(
            f"answers.{text}.{name}",
            f"tokens per step, suffix with {DRAFTS} drafts, {text}, {what}: up to {GROUP} earlier "
            "answers over none",
            lengths[GROUP],
            "tokens",
            "none",
            lengths[0],
            lengths[GROUP] / lengths[0],
            threads=bench.num_threads,
        )
    )
