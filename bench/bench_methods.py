# SPDX-License-Identifier: Apache-2.0
"""All methods on the bundled model: speed-up over plain decoding; MTP acceptance.

A mixture of experts made from the bundled model is measured in the same way, at fewer sizes.

Each case has its own engine, like a server with that configuration. Engines get the same requests
in turn. Each engine also decodes plainly, since equal engines may differ by some percent because of
memory placement.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from statistics import mean, median

from specops.engine import Engine, EngineConfig, SamplingParams, SpeculativeConfig
from tokenizers import Tokenizer

from bench.bench_engine import prompt_token_ids
from bench.checkpoints import BUNDLED, bundled, mixture
from bench.common import Bench, Figure
from bench.engine_runs import Decoding, decode_together
from tools.benches.bench_head_mistakes import trained_head
from tools.train import corpus
from tools.train.train import Ids, encode

METHODS: dict[str, dict[str, object]] = {
    "ngram": {"method": "ngram", "num_speculative_tokens": 4},
    "suffix": {"method": "suffix", "num_speculative_tokens": 8},
    "mtp1": {"method": "mtp", "num_speculative_tokens": 1},
    "mtp3": {"method": "mtp", "num_speculative_tokens": 3},
    "mtp5": {"method": "mtp", "num_speculative_tokens": 5},
    "mtp_ngram": {
        "method": "mtp+ngram",
        "num_speculative_tokens": 5,
        "num_model_steps": 3,
    },
    "mtp_suffix": {
        "method": "mtp+suffix",
        "num_speculative_tokens": 8,
        "num_model_steps": 3,
    },
}
CASES: dict[str, dict[str, object]] = {
    "plain": {"method": "naive"},  # shows by how much two equal runs differ
    **METHODS,
}
# Methods whose heads were trained for the bundled model; they run if available (trained_head).
HEADS = ("eagle", "eagle3", "dflash", "dspark", "hydra", "medusa", "draft_model")
HEAD_DRAFTS = 3


@dataclass(frozen=True)
class Size:
    """Number of concurrent requests, tokens of each, and rounds of all cases."""

    batch: int
    max_tokens: int
    rounds: int


MIXTURE_SIZES = (Size(1, 128, 6), Size(8, 96, 4))
SIZES = (Size(1, 128, 8), Size(8, 96, 6), Size(32, 48, 6), Size(64, 32, 6))

DRAFTS = 5  # drafts per chain
STRIDE = 16  # tokens between chains in held-out text
PROMPT_TOKENS, NEW_TOKENS = 192, 64  # tokens of a continuation by the model
CHAINS_AT_ONCE = 32


def run_methods(bench: Bench) -> None:
    """Measure tokens per second of every method, by batch size, text and sampling."""
    _compare(bench, "methods", "bundled model", BUNDLED, {**CASES, **_trained_heads()}, SIZES)


def run_mixture(bench: Bench) -> None:
    """Measure tokens per second of every method for a mixture of experts."""
    _compare(bench, "mixture", "mixture of experts", mixture().path, CASES, MIXTURE_SIZES)


def _compare(
    bench: Bench,
    family: str,
    name: str,
    model: Path,
    cases: dict[str, dict[str, object]],
    sizes: Sequence[Size],
) -> None:
    slots = max(size.batch for size in sizes)
    engines = {case: _engine(bench, config, slots, model) for case, config in cases.items()}
    any_engine = next(iter(engines.values()))
    prompts = {kind: prompt_token_ids(any_engine, kind) for kind in ("completions", "edits")}
    for engine in engines.values():
        _warm_up(engine, prompts, sizes)
    for kind, texts in prompts.items():
        for temperature in (0.0, 0.8):
            for size in sizes:
                mode = "greedy" if temperature == 0 else f"t{temperature}"
                prefix = f"{family}.{kind}.{mode}.b{size.batch}"
                what = f"{name}, {kind}, {mode}, batch {size.batch}"
                _methods(bench, engines, prefix, what, texts, size, temperature)


def _trained_heads() -> dict[str, dict[str, object]]:
    """Return a case for each available trained head."""
    found = {method: trained_head(method) for method in HEADS}
    return {
        method: {
            "method": method,
            "model": str(directory),
            "num_speculative_tokens": HEAD_DRAFTS,
        }
        for method, directory in found.items()
        if directory is not None
    }


def _warm_up(engine: Engine, prompts: dict[str, list[list[int]]], sizes: Sequence[Size]) -> None:
    """Warm up an engine like a long-running server: cached prefixes, known step costs."""
    texts = [text for kind in prompts.values() for text in kind]
    # With their prompts in the prefix cache, all requests of a run start at the same step.
    engine.generate(texts, SamplingParams(max_tokens=1))
    for size in sizes:
        params = SamplingParams(max_tokens=size.max_tokens, temperature=0.8, ignore_eos=True)
        engine.generate((texts * 2)[: size.batch], params)


def _engine(
    bench: Bench, config: dict[str, object], max_num_seqs: int, model: Path = BUNDLED
) -> Engine:
    return Engine(
        EngineConfig(
            model=str(model),
            device="cpu",
            speculative_config=SpeculativeConfig.from_dict(config),
            max_num_seqs=max_num_seqs,
            num_threads=bench.num_threads,
        )
    )


def _methods(
    bench: Bench,
    engines: dict[str, Engine],
    prefix: str,
    what: str,
    prompts: list[list[int]],
    size: Size,
    temperature: float,
) -> None:
    """Run all cases in turn on the same requests; each round has different requests."""
    runs: dict[str, list[tuple[Decoding, Decoding]]] = {case: [] for case in engines}
    reads, differ = [], 0
    for turn in range(size.rounds):
        indices = [turn * 5 + index for index in range(size.batch)]
        params = [
            SamplingParams(
                max_tokens=size.max_tokens, temperature=temperature, seed=index, ignore_eos=True
            )
            for index in indices
        ]
        texts = [prompts[index % len(prompts)] for index in indices]
        reads.append(bench.read_gb_s())
        for case, engine in engines.items():
            speculating = partial(_decode_afresh, engine, texts, params, {})
            plain = partial(_decode_afresh, engine, texts, params, {"method": "naive"})
            if turn % 2:
                expected, done = bench.undisturbed(plain), bench.undisturbed(speculating)
            else:
                done, expected = bench.undisturbed(speculating), bench.undisturbed(plain)
            runs[case].append((done, expected))
            pairs = zip(done.token_ids, expected.token_ids, strict=True)
            differ += sum(one != other for one, other in pairs)
    common = {"threads": bench.num_threads, "read_gb_s": median(reads)}
    for case, rounds in runs.items():
        num_steps = sum(done.num_steps for done, _ in rounds)
        length = sum(done.num_tokens for done, _ in rounds) / size.batch / num_steps
        rates = [
            (done.num_tokens / done.seconds, plain.num_tokens / plain.seconds)
            for done, plain in rounds
        ]
        # Mean without extremes: the median would hide a drafter's occasional losses, and the
        # extremes may be disturbed runs.
        gains = sorted(rate / plain_rate for rate, plain_rate in rates)[1:-1]
        bench.add(
            Figure(
                f"{prefix}.{case}",
                f"{what}, {case}: {length:.2f} tokens a request and step, times faster than plain "
                f"decoding, mean of {size.rounds} rounds but the best and the worst",
                median(rate for rate, _ in rates),
                "tok/s",
                "specops, plain",
                median(plain_rate for _, plain_rate in rates),
                mean(gains),
                **common,
            )
        )
    num_tokens = size.rounds * size.batch * size.max_tokens * len(engines)
    bench.add(
        Figure(
            f"{prefix}.differ",
            f"{what}: tokens of {num_tokens} that differ from plain decoding's",
            differ,
            "tokens",
            bar="value == 0",
            **common,
        )
    )


def _decode_afresh(
    engine: Engine,
    prompts: list[list[int]],
    params: list[SamplingParams],
    speculative_config: dict[str, object],
) -> Decoding:
    """Generate all prompts at once, with an empty shared suffix tree."""
    cache = engine.drafters["suffix"].cache
    for name in cache.cached_requests:
        cache.evict(name)
    cache.reclaim()  # free evicted answers now, since drafts may use them until then
    return decode_together(engine, prompts, params, speculative_config)


@dataclass
class Chains:
    """Statistics of chains of drafts: how often the first n drafts of a chain are all accepted."""

    count: int = 0
    kept: list[int] = field(default_factory=lambda: [0] * DRAFTS)

    def add(self, num_accepted: int) -> None:
        """Add a chain with `num_accepted` accepted drafts."""
        self.count += 1
        for position in range(num_accepted):
            self.kept[position] += 1

    def length(self, drafts: int) -> float:
        """Return the mean tokens per step with `drafts` drafts, including the target's token."""
        return 1 + sum(self.kept[:drafts]) / self.count


def run_acceptance(bench: Bench) -> None:
    """Compare the engine's acceptance lengths with the model card's."""
    try:
        documents = corpus.load(None)
    except corpus.CorpusError as error:
        print(f"  no held-out text: {error}", flush=True)
        return
    documents = [one for one in documents if one.held_out and not one.is_test]
    checkpoint = bundled()
    tokenizer = Tokenizer.from_file(str(checkpoint.path / "tokenizer.json"))
    encoded = encode(tokenizer, documents)
    drafting: dict[str, object] = {"method": "mtp", "num_speculative_tokens": DRAFTS}
    engine = _engine(bench, drafting, CHAINS_AT_ONCE)
    card = json.loads((checkpoint.path / "metrics.json").read_text())["held_out"]["chains"]
    _acceptance(
        bench, "library", _follow(engine, _windows(engine, encoded), STRIDE, 0), card["library"]
    )
    prompts = [ids[:PROMPT_TOKENS].tolist() for ids in encoded if len(ids) >= PROMPT_TOKENS]
    params = SamplingParams(max_tokens=NEW_TOKENS, temperature=0.0, ignore_eos=True)
    done = engine.generate(prompts, params)
    texts = [[*one.prompt_token_ids, *one.token_ids] for one in done]
    chains = _follow(engine, texts, 1, PROMPT_TOKENS - 1)
    _acceptance(bench, "continuations", chains, card["own_continuations"])


def _windows(engine: Engine, encoded: Sequence[Ids]) -> list[list[int]]:
    """Return texts cut to the context; each part begins with the last token of its predecessor."""
    size = engine.max_model_len
    return [
        ids[start : start + size].tolist()
        for ids in encoded
        for start in range(0, len(ids) - 1, size - 1)
    ]


def _follow(engine: Engine, texts: Sequence[Sequence[int]], stride: int, first: int) -> Chains:
    """Draft a chain after every `stride`-th token of texts, from token `first` + 1 on.

    For each chain, a request whose prompt is the text up to there is forced to emit the text's next
    token, then drafts and verifies once.
    """
    chains = Chains()
    for text in texts:
        room = engine.max_model_len - DRAFTS
        # Run the whole text first, so that its pages are in the prefix cache.
        engine.generate([text[:room]], SamplingParams(max_tokens=1))
        ends = iter(range(first, min(len(text) - 1, room), stride))
        while part := list(islice(ends, CHAINS_AT_ONCE)):
            for num_accepted in _verify_once(engine, text, part):
                chains.add(num_accepted)
    return chains


def _verify_once(engine: Engine, text: Sequence[int], ends: list[int]) -> Iterator[int]:
    """Yield, for each end, how many drafts after text[: end + 2] are accepted."""
    waiting = {}
    for end in ends:
        forced = text[end + 1]
        params = SamplingParams(
            max_tokens=DRAFTS + 2,
            temperature=0.0,
            ignore_eos=True,
            # A thinking budget of 0 injects these tokens at once, which forces the request to emit
            # `forced`.
            reasoning_max_tokens=0,
            think_end_token_id=forced,
            think_inject_token_ids=(forced,),
        )
        waiting[engine.add_request(text[: end + 1], params)] = forced
    emitted: dict[str, int] = {}
    while waiting:
        for output in engine.step():
            name = output.request_id
            if name not in emitted:
                assert output.token_ids == [waiting[name]]
                emitted[name] = 1
                continue
            yield len(output.token_ids) - 1
            del waiting[name]
            engine.abort(name)


def _acceptance(bench: Bench, kind: str, chains: Chains, card: dict[str, list[float]]) -> None:
    common = {"threads": bench.num_threads, "peer": "model card, in fp32"}
    what = f"bundled model, {kind}, {chains.count} chains of {DRAFTS} MTP drafts through the engine"
    first, card_first = chains.kept[0] / chains.count, card["kept_by_position"][0]
    bench.add(
        Figure(
            f"acceptance.{kind}.first",
            f"{what}: how often the first is kept",
            first,
            "of 1",
            peer_value=card_first,
            ratio=first / card_first,
            bar="ratio >= 0.99",
            **common,
        )
    )
    for drafts in range(1, DRAFTS + 1):
        length, card_length = chains.length(drafts), card["mean_acceptance_length"][drafts - 1]
        bench.add(
            Figure(
                f"acceptance.{kind}.k{drafts}",
                f"{what}: mean acceptance length with k = {drafts}",
                length,
                "tokens",
                peer_value=card_length,
                ratio=length / card_length,
                bar="ratio >= 0.99",
                **common,
            )
        )
