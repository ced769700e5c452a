# SPDX-License-Identifier: Apache-2.0
"""N-gram and suffix decoding of real texts, with the step costs of a realistic model.

Each request is forced to emit a recorded text: before verification, the logit of the text's next
token is raised in every row. So the methods run unchanged, and drafts and acceptance are those of
real code, edits, dialogue and coding-agent sessions. A small model computes the steps. Each step's
duration is looked up in a table of measured steps of the Qwen3-0.6B shape (step_costs.py), and the
drafters' measured time is added. `run_replay_whole` runs a part on that shape itself, and
`run_step_costs` measures the table for a machine.

A run ends as soon as no request waits any more, so that its batch is always full. Prompts are in
the prefix cache.
"""

import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import specops
import torch
from specops import sampling
from specops.api.tokenizer import Tokenizer
from specops.engine import Engine, EngineConfig, SamplingParams, SpeculativeConfig
from specops.engine.plan import Plan

from bench import checkpoints
from bench.common import Bench, Figure, cpu_results
from bench.engine_runs import Stepper
from bench.prompts import make_prompts
from bench.step_costs import StepCosts, tables

TEXTS = Path(make_prompts.__file__).parent / "replay"
PROMPT_TOKENS, NEW_TOKENS = 512, 160
KINDS = ("code", "edits", "dialogue", "agent", "mixed")
LENGTHS = (2, 4, 8, 16)
BATCHES = {1: 8, 8: 32, 32: 64}  # batch size -> number of requests of a run
SMALL = {
    "vocab_size": 4096,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "head_dim": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 64,
}
METHODS: dict[str, dict[str, object]] = {
    "ngram": {"method": "ngram"},
    "suffix": {"method": "suffix"},
}
WHOLE = (8, 16)  # batch size and requests of a run with the large model
COST_LENGTHS = (0, 1, 2, 4, 8, 16)
COST_BATCHES = (1, 2, 4, 8, 16, 32)


@dataclass(frozen=True)
class Text:
    """The text that one request must emit."""

    prompt: list[int]
    reply: list[int]


@dataclass
class Run:
    """Result of a run.

    Attributes:
        steps: (requests, rows) of each step.
        tokens: emitted tokens.
        drafting: seconds spent in drafters and in the selection of drafts, on one thread.
        seconds: total seconds.
        wrong: number of tokens that differ from the texts.
    """

    steps: list[tuple[int, int]] = field(default_factory=list)
    tokens: int = 0
    drafting: float = 0.0
    seconds: float = 0.0
    wrong: int = 0

    @property
    def length(self) -> float:
        """Mean tokens per request and step."""
        return self.tokens / sum(requests for requests, _ in self.steps)

    def priced(self, costs: StepCosts) -> float:
        """Return the tokens per second with the step costs of a table."""
        return self.tokens / (costs.total(self.steps) + self.drafting)


@cache
def texts(prompt_tokens: int, new_tokens: int) -> dict[str, list[Text]]:
    """Return all texts by kind, encoded by the bundled tokenizer."""
    tokenizer = Tokenizer.from_dir(checkpoints.BUNDLED)
    found = {"code": list(_code(tokenizer, prompt_tokens, new_tokens))}
    for kind in ("edits", "dialogue", "agent"):
        documents = json.loads((TEXTS / f"{kind}.json").read_text())
        # First replies of all documents come first, then all second replies.
        most = max(len(document["starts"]) for document in documents)
        found[kind] = [
            Text(
                tokenizer.encode(document["text"][:start])[-prompt_tokens:],
                tokenizer.encode(document["text"][start:])[:new_tokens],
            )
            for number in range(most)
            for document in documents
            for start in document["starts"][number : number + 1]
        ]
    return {**found, "mixed": [found[kind][i] for i in range(16) for kind in found]}


def _code(tokenizer: Tokenizer, prompt_tokens: int, new_tokens: int) -> Iterator[Text]:
    """Yield texts from the beginning of library modules, and from the middle of long ones."""
    for text in make_prompts.sources().values():
        ids = tokenizer.encode(text)
        room = len(ids) - prompt_tokens - new_tokens
        for start in (0, room // 2) if room > 2 * new_tokens else (0,):
            if room >= 0:
                end = start + prompt_tokens
                yield Text(ids[start:end], ids[end : end + new_tokens])


def chosen_of(kind: str, count: int) -> list[Text]:
    """Return `count` evenly spaced texts of a kind, or the first ones of "mixed"."""
    candidates = texts(PROMPT_TOKENS, NEW_TOKENS)[kind]
    stride = 1 if kind == "mixed" else len(candidates) // count
    return candidates[::stride][:count]


@contextmanager
def forced(scripts: Sequence[Sequence[int]]) -> Iterator[None]:
    """Force each request to emit a script (prompt and reply), which the request's seed selects."""
    verify = sampling.verify

    def forcing(logits: torch.Tensor, **others: Any) -> Any:
        rows, tokens = [], []
        positions, seeds = others["positions"].tolist(), others["sampling"].seeds.tolist()
        output_indptr = others["drafts"].output_indptr
        for request, (first, end) in enumerate(pairwise(output_indptr.tolist())):
            if first == end:
                continue
            script = scripts[seeds[request]]
            for row in range(first, end):
                rows.append(row)
                place = positions[request] + row - first
                tokens.append(script[min(place, len(script) - 1)])
        logits[rows, tokens] = 1e30
        return verify(logits, **others)

    with mock.patch.object(sampling, "verify", forcing):
        yield


class Replayer:
    """Engine that is forced to emit given texts, `batch` requests at a time.

    Args:
        checkpoint: the model.
        batch: concurrent requests.
        costs: step costs for the selection of drafts; None: the engine's own measurements.
        num_threads: threads of the engine.
    """

    def __init__(
        self,
        checkpoint: checkpoints.Checkpoint,
        batch: int,
        costs: StepCosts | None,
        *,
        num_threads: int,
    ) -> None:
        self._batch = batch
        drafting = SpeculativeConfig(
            method="ngram", num_speculative_tokens=max(LENGTHS), adaptive_verification=True
        )
        rows = batch * (1 + max(LENGTHS))
        self.engine = Engine(
            EngineConfig(
                model=str(checkpoint.path),
                device="cpu",
                load_format="auto" if (checkpoint.path / "model.safetensors").exists() else "dummy",
                speculative_config=drafting,
                max_num_seqs=batch,
                max_num_batched_tokens=rows,
                max_model_len=PROMPT_TOKENS + NEW_TOKENS + max(LENGTHS),
                num_threads=num_threads,
            )
        )
        if costs is not None:
            self.engine._drafting.select_by([costs.of_rows(count) for count in range(rows + 1)])
        self._run = Run()
        runner, drafters = self.engine._runner, self.engine._drafting
        launch, new_steps = runner.launch, drafters.new_steps

        def launching(plan: Plan, **options: Any) -> Any:
            parts = [part for part in plan.parts if part.emits]
            self._run.steps.append((len(parts), sum(1 + part.num_drafts for part in parts)))
            return launch(plan, **options)

        def making(*arguments: Any) -> Any:
            steps = new_steps(*arguments)
            for step in steps:
                step.launch = self._timed(step.launch)  # type: ignore[method-assign]
            return steps

        runner.launch = launching  # type: ignore[method-assign]
        drafters.new_steps = making  # type: ignore[method-assign]
        for name in ("select", "observe", "finish"):
            setattr(drafters, name, self._timed(getattr(drafters, name)))

    def _timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            begun = time.thread_time()
            result = function(*arguments, **named)
            self._run.drafting += time.thread_time() - begun
            return result

        return call

    def cache(self, chosen: Sequence[Text]) -> None:
        """Compute prompts, so that later requests find their pages in the prefix cache."""
        params = SamplingParams(max_tokens=1, temperature=0.0)
        self.engine.generate([text.prompt for text in chosen], params, speculative_config=NAIVE)

    def run(self, chosen: Sequence[Text], speculative_config: Mapping[str, object]) -> Run:
        """Emit texts until no request waits, so that the batch is always full."""
        engine = self.engine
        cache = engine.drafters["suffix"].cache  # type: ignore[attr-defined]
        for name in cache.cached_requests:
            cache.evict(name)
        cache.reclaim()  # free evicted texts now, since drafts may use them until then
        engine._drafting.select_by(engine._drafting._selector.seconds)  # resets its statistics
        self._run = run = Run()
        begun = time.perf_counter()
        replies: dict[str, list[int]] = {}
        with forced([[*text.prompt, *text.reply] for text in chosen]):
            names = {}
            for seed, text in enumerate(chosen):
                params = SamplingParams(
                    max_tokens=len(text.reply), temperature=0.0, seed=seed, ignore_eos=True
                )
                name = engine.add_request(
                    text.prompt, params, speculative_config=speculative_config
                )
                names[name] = text
            while engine.has_unfinished():
                for output in engine.step():
                    replies.setdefault(output.request_id, []).extend(output.token_ids)
                if self._batch > 1 and not engine.num_waiting:
                    break
        run.seconds = time.perf_counter() - begun
        for name, text in names.items():
            reply = replies.get(name, [])
            run.tokens += len(reply)
            run.wrong += sum(a != b for a, b in zip(reply, text.reply, strict=False))
            engine.abort(name)
        return run


NAIVE: dict[str, object] = {"method": "naive"}


def fixed(method: str, length: int) -> dict[str, object]:
    """Return the configuration of a method with `length` drafts, all of which are verified."""
    return {
        **METHODS[method],
        "num_speculative_tokens": length,
        "adaptive_verification": False,
    }


def selected(method: str) -> dict[str, object]:
    """Return the configuration of a method with adaptive verification."""
    return {**METHODS[method], "num_speculative_tokens": max(LENGTHS)}


def run_replay(bench: Bench) -> None:
    """Run every kind of text, method and batch size with every table of step costs."""
    checkpoint = checkpoints.without_weights("replay", {**checkpoints.QWEN06, **SMALL})
    gains: dict[str, dict[str, list[float]]] = {}
    wrong = tokens = 0
    for batch, count in BATCHES.items():
        all_costs = [costs for costs in tables() if costs.max_requests >= batch]
        replayers = {
            costs.name: Replayer(checkpoint, batch, costs, num_threads=1) for costs in all_costs
        }
        any_replayer = next(iter(replayers.values()))
        for kind in KINDS:
            chosen = chosen_of(kind, count)
            for replayer in replayers.values():
                replayer.cache(chosen)
            plain = any_replayer.run(chosen, NAIVE)
            for method in METHODS:
                lengths = {n: any_replayer.run(chosen, fixed(method, n)) for n in LENGTHS}
                for costs in all_costs:
                    ours = replayers[costs.name].run(chosen, selected(method))
                    done = [plain, *lengths.values(), ours]
                    wrong += sum(run.wrong for run in done)
                    tokens += sum(run.tokens for run in done)
                    speed = {
                        name: run.priced(costs) / plain.priced(costs)
                        for name, run in [("plain", plain), *lengths.items(), ("selected", ours)]
                    }
                    of_table = gains.setdefault(costs.name, {})
                    for name, gain in speed.items():
                        of_table.setdefault(str(name), []).append(gain)
                    best = max(value for name, value in speed.items() if name != "selected")
                    bench.add(
                        Figure(
                            f"replay.{costs.name}.{kind}.b{batch}.{method}",
                            f"{kind}, {batch} at once, up to {max(LENGTHS)} {method} drafts "
                            f"selected: times faster than plain decoding, {ours.length:.2f} "
                            "tokens a request and step; beside the best of plain and "
                            + ", ".join(
                                f"{n}: {speed[n]:.2f} ({run.length:.2f} tokens)"
                                for n, run in lengths.items()
                            ),
                            speed["selected"],
                            "x plain",
                            "best fixed",
                            best,
                            speed["selected"] / best,
                            "ratio >= 0.97",
                        )
                    )
    _llama_cpp(bench)
    _means(bench, gains)
    what = f"tokens of {tokens} that are not the texts'"
    bench.add(Figure("replay.differ", what, wrong, "tokens", bar="value == 0"))


def _means(bench: Bench, gains: Mapping[str, Mapping[str, Sequence[float]]]) -> None:
    """Add each draft length's mean gain, and that of adaptive verification, per table of costs."""
    for table, by_name in gains.items():
        means = {n: math.exp(sum(map(math.log, v)) / len(v)) for n, v in by_name.items()}
        best = max(value for name, value in means.items() if name != "selected")
        for name, value in means.items():
            is_ours = name == "selected"
            bench.add(
                Figure(
                    f"replay.{table}.all.{name}",
                    f"geometric mean over {len(by_name[name])} cells, drafts {name}",
                    value,
                    "x plain",
                    "best length" if is_ours else None,
                    best if is_ours else None,
                    value / best if is_ours else None,
                    "ratio >= 1" if is_ours else None,
                )
            )


def _llama_cpp(bench: Bench) -> None:
    """Run llama.cpp's prompt lookup on the same texts, one at a time, with our step costs."""
    peer = bench.peer("llama_cpp_peer")
    if peer is None:
        return
    for kind, chosen in texts(PROMPT_TOKENS, NEW_TOKENS).items():
        prompts, replies = [text.prompt for text in chosen], [text.reply for text in chosen]
        for lookup in LENGTHS:
            steps = peer.ask("replay", prompts=prompts, replies=replies, lookup=lookup)["steps"]
            tokens = sum(1 + accepted for accepted, _ in steps)
            for costs in tables():
                seconds = costs.total((1, rows) for _, rows in steps)
                bench.add(
                    Figure(
                        f"replay.{costs.name}.{kind}.b1.llama_cpp.{lookup}",
                        f"{kind}, one at a time, {lookup} drafts of llama.cpp's prompt lookup: "
                        f"times as fast as plain decoding, {tokens / len(steps):.2f} tokens a step",
                        tokens * costs.total([(1, 1)]) / seconds,
                        "x plain",
                    )
                )


def run_replay_whole(bench: Bench) -> None:
    """Run some texts on the Qwen3-0.6B shape itself, and compare with predictions by step costs."""
    batch, count = WHOLE
    replayer = Replayer(checkpoints.qwen06(), batch, None, num_threads=bench.num_threads)
    isa, cpu = specops.get_isa(), specops.runtime.get_cpu_name()
    priced = [one for one in tables() if (one.cpu, one.isa) == (cpu, isa)]
    for kind in KINDS:
        # Use prompts of whole pages plus one token, so that cached prompts need no prefill rows.
        page = replayer.engine.config.page_size
        chosen = [
            Text(text.prompt[(len(text.prompt) - 1) % page :], text.reply)
            for text in chosen_of(kind, count)
        ]
        replayer.cache(chosen)
        cases = {"plain": NAIVE, **{f"{m}.selected": selected(m) for m in ("ngram", "suffix")}}
        cases |= {f"{m}.{n}": fixed(m, n) for m in ("ngram", "suffix") for n in LENGTHS[1::2]}
        runs = {case: replayer.run(chosen, config) for case, config in cases.items()}
        plain = runs["plain"]
        for case, run in runs.items():
            gain = run.tokens / run.seconds * plain.seconds / plain.tokens
            expected = [run.priced(costs) / plain.priced(costs) for costs in priced[:1]]
            bench.add(
                Figure(
                    f"replay_whole.{kind}.b{batch}.{case}",
                    f"Qwen3-0.6B shape, {kind}, {batch} at once, {case}: times faster than plain "
                    f"decoding, {run.length:.2f} tokens a request and step; beside the priced one",
                    gain,
                    "x plain",
                    "priced" if expected else None,
                    expected[0] if expected else None,
                    gain / expected[0] if expected else None,
                    threads=bench.num_threads,
                )
            )


def run_step_costs(bench: Bench) -> None:
    """Measure and save the table of step costs of this machine and instruction set."""
    isa, cpu = specops.get_isa(), specops.runtime.get_cpu_name()
    points: dict[tuple[int, int], float] = {}
    for batch in COST_BATCHES:
        stepper = Stepper(
            checkpoints.qwen06(),
            batch=batch,
            kv_len=64,
            drafts=max(COST_LENGTHS),
            num_threads=bench.num_threads,
        )
        cases = {
            str(drafts): partial(stepper.step, bench.pick(4, 1), drafts) for drafts in COST_LENGTHS
        }
        timing = bench.rounds(cases, rounds=7)
        for drafts in COST_LENGTHS:
            rows = batch * (1 + drafts)
            points[batch, rows] = seconds = timing.median(str(drafts))
            what = f"Qwen3-0.6B shape, {isa}, a step of {batch} requests and {rows} rows"
            bench.add(Figure(f"step_costs.b{batch}.rows{rows}", what, 1e3 * seconds, "ms"))
    if not bench.rehearsal:
        name = f"{cpu_results(cpu).stem}-{isa.replace('_', '-')}"
        StepCosts(name, cpu, isa, points).save("python -m bench --only step_costs")
