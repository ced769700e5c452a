# SPDX-License-Identifier: Apache-2.0
"""The best tree against the best chain of each method, by CPU time per token and tokens per step.

    python -m bench.bench_tree_bar METHOD... [--model MODEL] [--heads DIR] [--rounds N]

Tokens per step come from a batch of eight prompts and depend on no clock. The CPU time of a step,
user and system of one thread, is the median of rounds in which all configurations alternate. The
quotient is the CPU time per token. All texts must be equal.
"""

import argparse
import time
from pathlib import Path
from statistics import median
from typing import Any

from specops.engine import Engine, EngineConfig, SamplingParams, SpeculativeConfig

from bench.bench_accuracy import GEMMA
from bench.bench_engine import prompt_token_ids

Config = dict[str, Any]
PLAIN: Config = {"method": "naive"}
# Drafts or nodes, and model steps.
HEAD_CHAINS = [(1, 1), (2, 2), (3, 3), (4, 4), (5, 5), (6, 6)]
HEAD_TREES = [(4, 2), (6, 3), (8, 3), (8, 4), (16, 4), (16, 6), (32, 4), (32, 6), (60, 6)]
HYBRID_CHAINS = [(4, 2), (4, 3), (8, 2), (8, 3), (8, 4), (16, 3)]
HYBRID_TREES = [(6, 2), (8, 2), (8, 3), (8, 4), (16, 3), (16, 4), (32, 4), (60, 4)]
COPY_CHAINS, COPY_TREES = (2, 4, 8, 16, 32), (4, 8, 16, 32, 60)
DEPTH = {"mtp": 6, "eagle3": 6, "medusa": 4, "hydra": 4, "dflash": 5, "dspark": 5}
WIDE = {"suffix_decoding_max_spec_factor": 4.0, "suffix_decoding_min_token_prob": 0.02}
TEXTS, TEMPERATURES, BATCHES = ("edits", "completions"), (0.0, 0.8), (1, 8)
NUM_PROMPTS, NUM_ALONE = 8, 2


def configurations(method: str) -> dict[str, Config]:
    """Return plain decoding, and the chains and trees of a method, by a short name."""
    first, *others = method.split("+")
    found: dict[str, Config] = {"plain": PLAIN}
    for tree, kind in ((False, "chain"), (True, "tree")):
        if first in DEPTH:
            pairs = (
                (HYBRID_TREES if tree else HYBRID_CHAINS)
                if others
                else (HEAD_TREES if tree else HEAD_CHAINS)
            )
            for k, steps in pairs:
                if steps <= DEPTH[first]:
                    own = {"num_speculative_tokens": k, "num_model_steps": steps}
                    found[f"{kind} {k}/{steps}"] = {"method": method, "tree": tree, **own}
        else:
            for k in COPY_TREES if tree else COPY_CHAINS:
                found[f"{kind} {k}"] = {"method": method, "tree": tree, "num_speculative_tokens": k}
    for name, one in list(found.items())[1:]:
        one["adaptive_verification"] = False
        if name in ("chain 16", "chain 32", "tree 16", "tree 32"):
            found[name + " selected"] = {**one, "adaptive_verification": True}
    if "suffix" in method:
        found |= {f"{name} wide": one for name, one in found.items() if name != "plain"}
    return found


class Runs:
    """Engines of one method, and runs of its configurations on them."""

    def __init__(self, model: str | None, method: str, heads: Path, tokens: int) -> None:
        first, self.tokens = method.split("+")[0], tokens
        self.expected: dict[tuple[str, float], list[list[int]]] = {}
        self.engines = {}
        for wide in (False, True)[: 1 + ("suffix" in method)]:
            base: Config = {
                "method": method,
                "num_speculative_tokens": 60,
                "adaptive_verification": True,
            }
            if first in DEPTH:
                base |= {"tree": True, "num_model_steps": 2}
                base |= {} if first == "mtp" else {"model": str(heads / first)}
            self.engines[wide] = Engine(
                EngineConfig(
                    device="cpu",
                    max_num_seqs=8,
                    num_threads=1,
                    speculative_config=SpeculativeConfig.from_dict(
                        {**base, **(WIDE if wide else {})}
                    ),
                    **({} if model is None else {"model": model}),
                )
            )
        self.prompts = {
            kind: prompt_token_ids(self.engines[False], kind)[:NUM_PROMPTS] for kind in TEXTS
        }
        for engine in self.engines.values():
            for texts in self.prompts.values():
                engine.generate(texts, SamplingParams(max_tokens=2), speculative_config=PLAIN)

    def run(
        self, name: str, config: Config, kind: str, temperature: float, batch: int
    ) -> tuple[float, float]:
        """Return CPU milliseconds per step of a request, and tokens per step."""
        engine = self.engines[name.endswith("wide")]
        if suffix := engine.drafters.get("suffix"):
            for one in suffix.cache.cached_requests:
                suffix.cache.evict(one)
            suffix.cache.reclaim()
        prompts = self.prompts[kind][: NUM_PROMPTS if batch > 1 else NUM_ALONE]
        seconds, steps, tokens = 0.0, 0, 0
        texts: list[list[int]] = []
        for begin in range(0, len(prompts), batch):
            names = [
                engine.add_request(
                    prompt,
                    SamplingParams(
                        max_tokens=self.tokens,
                        temperature=temperature,
                        seed=begin + i,
                        ignore_eos=True,
                    ),
                    speculative_config=config,
                )
                for i, prompt in enumerate(prompts[begin : begin + batch])
            ]
            waiting, first = set(names), 0
            while waiting:
                for output in engine.step():
                    waiting.discard(output.request_id)
                    first += len(output.token_ids)
            begun = time.process_time()
            while engine.has_unfinished():
                engine.step()
            seconds += time.process_time() - begun
            done = [engine.completion(one) for one in names]
            tokens += sum(len(one.token_ids) for one in done) - first
            steps += sum(one.stats.num_steps for one in done) - len(names)
            texts += [one.token_ids for one in done]
        expected = self.expected.setdefault((kind, temperature), texts)
        assert all(map(list.__eq__, texts, expected)), (config, kind, temperature)
        return seconds / steps * 1e3, tokens / steps


def main() -> None:
    """Measure, and print a line per cell and a table of its configurations."""
    parser = argparse.ArgumentParser()
    parser.add_argument("methods", nargs="+")
    parser.add_argument("--model")
    parser.add_argument("--heads", type=Path, default=Path("tests/golden"))
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--drafts", type=int, nargs="*", help="only these numbers of drafts")
    args = parser.parse_args()
    for method in args.methods:
        runs = Runs(
            str(GEMMA) if args.model == "gemma" else args.model, method, args.heads, args.tokens
        )
        configs = {
            name: one
            for name, one in configurations(method).items()
            if not args.drafts or one.get("num_speculative_tokens", args.drafts[0]) in args.drafts
        }
        for kind in TEXTS:
            for temperature in TEMPERATURES:
                lengths = {
                    one: runs.run(one, config, kind, temperature, 8)[1]
                    for one, config in configs.items()
                }
                for batch in BATCHES:
                    cell = kind, temperature, batch
                    steps: dict[str, list[float]] = {name: [] for name in configs}
                    own = dict(lengths)
                    for turn in range(args.rounds):
                        for name in configs if turn % 2 else reversed(configs):
                            ms, length = runs.run(name, configs[name], *cell)
                            steps[name].append(ms)
                            if "selected" in name:
                                own[name] = length
                    _report(method, cell, {name: median(all_) for name, all_ in steps.items()}, own)


def _report(
    method: str, cell: tuple[str, float, int], ms: dict[str, float], lengths: dict[str, float]
) -> None:
    kind, temperature, batch = cell
    cost = {name: ms[name] / lengths[name] for name in ms}
    chain = min((name for name in cost if "chain" in name), key=cost.__getitem__)
    tree = min((name for name in cost if "tree" in name), key=cost.__getitem__)
    long_chain = max((name for name in cost if "chain" in name), key=lengths.__getitem__)
    long_tree = max((name for name in cost if "tree" in name), key=lengths.__getitem__)
    print(
        f"{method:10} {kind:11} t{temperature:g} b{batch} | plain {cost['plain']:.3f} ms | "
        f"{chain}: {lengths[chain]:.2f} tokens, {cost['plain'] / cost[chain]:.2f}x | "
        f"{tree}: {lengths[tree]:.2f} tokens, {cost['plain'] / cost[tree]:.2f}x | "
        f"tree over chain {cost[chain] / cost[tree]:.3f} | most tokens {long_chain} {lengths[long_chain]:.2f}, "
        f"{long_tree} {lengths[long_tree]:.2f}: {lengths[long_tree] / lengths[long_chain]:.3f}",
        flush=True,
    )
    print(
        "   " + ", ".join(f"{name} {ms[name]:.3f}/{lengths[name]:.2f}" for name in ms), flush=True
    )


if __name__ == "__main__":
    main()
