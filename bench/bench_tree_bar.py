# SPDX-License-Identifier: Apache-2.0
"""The best tree against the best chain of each method, by CPU time per token and tokens per step.

    python -m bench.bench_tree_bar [--model MODEL] [--heads DIR] METHOD...

Every configuration of a cell runs once. Then the fastest chains and trees of the cell alternate
with plain decoding, and the medians of the rounds' ratios are printed. All texts must be equal.
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
NODES = (4, 8, 16, 32, 60)
MOST_STEPS = {"mtp": 6, "eagle3": 6, "eagle": 6, "medusa": 4, "hydra": 4, "dflash": 5, "dspark": 5}
WIDE = {"suffix_decoding_max_spec_factor": 4.0, "suffix_decoding_min_token_prob": 0.02}
NARROW: Config = {}
PLAIN: Config = {"method": "naive"}


def configurations(method: str) -> tuple[list[Config], list[Config]]:
    """Return the chains and the trees of a method, without their files."""
    first, *others = method.split("+")
    chains: list[Config] = []
    trees: list[Config] = []
    if first in MOST_STEPS:
        for steps in range(2, 5) if others else range(1, MOST_STEPS[first] + 1):
            if others:
                chains += [
                    {"num_speculative_tokens": k, "num_model_steps": steps}
                    for k in (4, 8, 16)
                    if k > steps
                ]
            else:
                chains.append({"num_speculative_tokens": steps, "num_model_steps": steps})
            if steps > 1:
                trees += [
                    {"num_speculative_tokens": n, "num_model_steps": steps}
                    for n in (6, *NODES)
                    if n >= steps
                ]
    else:
        chains = [{"num_speculative_tokens": k} for k in (2, 4, 6, 8, 12, 16, 32, 60)]
        trees = [{"num_speculative_tokens": n} for n in (*NODES, 12)]
    both = ({"method": method, "tree": tree, **one} for tree, part in ((False, chains), (True, trees)) for one in part)
    found = list(both)
    return [one for one in found if not one["tree"]], [one for one in found if one["tree"]]


class Runs:
    """Engines of one method, and runs of its configurations on them."""

    def __init__(self, model: str | None, method: str, heads: Path, prompts: int, tokens: int) -> None:
        first = method.split("+")[0]
        self.engines = {}
        self.num_prompts, self.tokens = prompts, tokens
        for name, own in (("", NARROW), ("wide", WIDE)) if "suffix" in method else (("", NARROW),):
            base: Config = {"method": method, "num_speculative_tokens": 60, "num_model_steps": 2, **own}
            if first not in MOST_STEPS:
                del base["num_model_steps"]
            else:
                base["tree"] = True
                if first != "mtp":
                    base["model"] = str(heads / first)
            base["adaptive_verification"] = True
            extra = {} if model is None else {"model": model}
            self.engines[name] = Engine(
                EngineConfig(
                    device="cpu",
                    max_num_seqs=8,
                    num_threads=1,
                    speculative_config=SpeculativeConfig.from_dict(base),
                    **extra,
                )
            )
        some = next(iter(self.engines.values()))
        self.prompts = {kind: prompt_token_ids(some, kind)[:prompts] for kind in ("edits", "completions")}
        for engine in self.engines.values():
            for texts in self.prompts.values():
                engine.generate(texts, SamplingParams(max_tokens=2), speculative_config=PLAIN)

    def run(self, which: str, config: Config, kind: str, temperature: float, batch: int) -> tuple[float, float]:
        """Return CPU milliseconds per token and tokens per request and step."""
        engine = self.engines[which]
        if suffix := engine.drafters.get("suffix"):
            for name in suffix.cache.cached_requests:
                suffix.cache.evict(name)
            suffix.cache.reclaim()
        prompts = self.prompts[kind]
        seconds, steps, tokens, texts = 0.0, 0, 0, []
        for begin in range(0, len(prompts), batch):
            names = [
                engine.add_request(
                    prompt,
                    SamplingParams(max_tokens=self.tokens, temperature=temperature, seed=begin + i, ignore_eos=True),
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
            done = [engine.completion(name) for name in names]
            tokens += sum(len(one.token_ids) for one in done) - first
            steps += sum(one.stats.num_steps for one in done) - len(names)
            texts += [one.token_ids for one in done]
        key = kind, temperature
        assert self.expected.setdefault(key, texts) == texts, (config, key)
        return seconds / tokens * 1e3, tokens / steps

    expected: dict[tuple[str, float], list[list[int]]] = {}


def short(which: str, config: Config) -> str:
    """Return a short name of a configuration."""
    n, steps = config.get("num_speculative_tokens", 0), config.get("num_model_steps")
    name = f"{n}" if steps is None else f"{n}/{steps}"
    return name + ("w" if which else "") + ("a" if config.get("adaptive_verification") else "")


def main() -> None:
    """Measure and print a line per cell."""
    parser = argparse.ArgumentParser()
    parser.add_argument("methods", nargs="+")
    parser.add_argument("--model")
    parser.add_argument("--heads", type=Path, default=Path("tests/golden"))
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8])
    args = parser.parse_args()
    model = str(GEMMA) if args.model == "gemma" else args.model
    for method in args.methods:
        Runs.expected = {}
        runs = Runs(model, method, args.heads, args.prompts, args.tokens)
        chains, trees = configurations(method)
        for kind in runs.prompts:
            for temperature in (0.0, 0.8):
                for batch in args.batches:
                    cell = (kind, temperature, batch)
                    plain = runs.run("", PLAIN, *cell)
                    found: dict[bool, list[Any]] = {False: [], True: []}
                    for one in (*chains, *trees):
                        for which in runs.engines:
                            config = {**one, "adaptive_verification": False}
                            found[one["tree"]].append((*runs.run(which, config, *cell), which, config))
                    for tree in found:  # the fastest ones again, with selection
                        for _, _, which, one in sorted(found[tree], key=lambda x: x[0])[:2]:
                            for n in {16, one["num_speculative_tokens"]}:
                                steps = {} if "num_model_steps" not in one else {"num_model_steps": min(one["num_model_steps"], n)}
                                if not tree and method in MOST_STEPS:
                                    n = one["num_model_steps"]
                                config = {**one, "num_speculative_tokens": n, **steps, "adaptive_verification": True}
                                found[tree].append((*runs.run(which, config, *cell), which, config))
                    longest = {tree: max(found[tree], key=lambda x: x[1]) for tree in found}
                    best = {tree: sorted(found[tree], key=lambda x: x[0])[:2] for tree in found}
                    timed: dict[str, list[float]] = {}
                    lengths = {}
                    for turn in range(args.rounds):
                        cases = [("plain", "", PLAIN)] + [
                            (f"{'tree' if tree else 'chain'} {i}", *best[tree][i][2:])
                            for i in range(2)
                            for tree in best
                        ]
                        for name, which, config in cases if turn % 2 else reversed(cases):
                            ms, length = runs.run(which, config, *cell)
                            timed.setdefault(name, []).append(ms)
                            lengths[name] = length
                    chain = min(("chain 0", "chain 1"), key=lambda name: median(timed[name]))
                    tree_ = min(("tree 0", "tree 1"), key=lambda name: median(timed[name]))
                    ratio = median(a / b for a, b in zip(timed[chain], timed[tree_], strict=True))
                    gains = {
                        name: median(a / b for a, b in zip(timed["plain"], timed[name], strict=True))
                        for name in (chain, tree_)
                    }
                    c, t = best[False][int(chain[-1])], best[True][int(tree_[-1])]
                    print(
                        f"{method:12} {kind:11} t{temperature:g} b{batch} | plain {median(timed['plain']):.3f} ms | "
                        f"chain {short(*c[2:]):8} {lengths[chain]:.2f} tok {gains[chain]:.2f}x | "
                        f"tree {short(*t[2:]):8} {lengths[tree_]:.2f} tok {gains[tree_]:.2f}x | "
                        f"tree/chain speed {ratio:.3f} | most tokens: chain {short(*longest[False][2:])} {longest[False][1]:.2f} "
                        f"tree {short(*longest[True][2:])} {longest[True][1]:.2f} = {longest[True][1] / longest[False][1]:.3f}",
                        flush=True,
                    )


if __name__ == "__main__":
    main()
