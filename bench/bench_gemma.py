# SPDX-License-Identifier: Apache-2.0
"""Gemma 3 270M against llama.cpp on the same GGUF file: speed, and texts that speculation changes.

`make gemma` fetches the file. Texts are of four kinds: edits and completions of Python, openings of
prose, and questions; 25 each. specops selects how many drafts it verifies, as it does by default on
such a model; llama.cpp verifies up to four drafts of prompt lookup per step.
"""

import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from specops.checkpoints.gguf_directory import gguf_directory
from specops.engine import Engine, EngineConfig, SamplingParams, SpeculativeConfig

from bench.bench_accuracy import GEMMA
from bench.checkpoints import Checkpoint
from bench.common import BENCH, Bench, Figure, Peer, PeerError
from bench.engine_runs import Decoding, Stepper, decode

MODEL: Path = GEMMA
# Required speed-up of default speculation over plain decoding, at temperature 0.
KINDS = {"edits": 1.3, "completions": 1.3, "prose": 0.97, "chat": 0.97}
METHODS = ("ngram", "suffix")
DRAFTS = 4
MAX_TOKENS = 128
TIMED, COUNTED = 6, 25  # number of timed and of counted texts per kind
COUNTED_TOKENS = 32  # tokens per text
BATCH = 8  # batch size for counted texts
KV_LEN = 384
TEMPERATURES = (0.0, 0.8)


def run_gemma(bench: Bench) -> None:
    """Measure tokens per second of steps and texts, plain and with drafts, against llama.cpp."""
    peer = llama_cpp(bench)
    for batch in (1, 8):
        _steps(bench, peer, batch)
    engines = {method: _engine(bench, method, 1) for method in METHODS}
    plain: dict[str, list[float]] = {"ours": [], "llama_cpp": []}
    for kind in KINDS:
        for temperature in TEMPERATURES:
            _speeds(bench, engines, peer, kind, temperature, plain)
    if peer is None:
        return
    ours, theirs = (sum(seconds) for seconds in plain.values())
    tokens = (MAX_TOKENS - 1) * len(plain["ours"])
    bench.add(
        Figure(
            "gemma.plain.vs_llama_cpp",
            "Gemma 3 270M, plain greedy decoding of all texts: times faster than llama.cpp",
            tokens / ours,
            "tok/s",
            "llama.cpp, plain",
            tokens / theirs,
            theirs / ours,
            "ratio >= 1.3",
            threads=bench.num_threads,
            read_gb_s=bench.read_gb_s(),
        )
    )


def run_gemma_greedy(bench: Bench) -> None:
    """Count the texts that speculation changes: ours in batches, llama.cpp's alone."""
    _count(bench, 0.0)


def run_gemma_seeded(bench: Bench) -> None:
    """Count the texts that speculation changes with seeded sampling."""
    _count(bench, 0.8)


def _count(bench: Bench, temperature: float) -> None:
    engines = {method: _engine(bench, method, BATCH) for method in METHODS}
    prompts = [ids for kind in KINDS for ids in _prompts(engines["ngram"], kind)[:COUNTED]]
    peer = llama_cpp(bench)
    params = [_params(temperature, seed, COUNTED_TOKENS) for seed in range(len(prompts))]
    plain = _texts(engines["ngram"], prompts, params, {"method": "naive"})
    for method, engine in engines.items():
        drafted = _texts(engine, prompts, params, {})
        _differ(bench, "specops", method, temperature, plain, drafted)
    if peer is not None:
        ask = partial(_ask, peer, prompts, temperature)
        _differ(bench, "llama.cpp", "lookup", temperature, ask(0), ask(DRAFTS))


def _steps(bench: Bench, peer: Peer | None, batch: int) -> None:
    """Time steps with one row per request, and with five."""
    directory = MODEL if MODEL.is_dir() else gguf_directory(MODEL)
    stepper = Stepper(
        Checkpoint("gemma", directory),
        batch=batch,
        kv_len=KV_LEN,
        drafts=DRAFTS,
        num_threads=bench.num_threads,
    )
    steps = bench.pick(24 // batch + 5, 2)
    for rows in (1, 1 + DRAFTS):
        cases: dict[str, Callable[[], float]] = {"ours": partial(stepper.step, steps, rows - 1)}
        if peer is not None:
            peer.ask("prepare", batch=batch, kv_len=KV_LEN, rows=rows)
            cases["llama_cpp"] = lambda: peer.ask("step", steps=steps)["seconds"]
        timing = bench.rounds(cases, rounds=5)
        theirs = timing.median("llama_cpp") * 1e3 if peer else None
        bench.add(
            Figure(
                f"gemma.step.b{batch}.rows{rows}",
                f"Gemma 3 270M, batch {batch}, kv {KV_LEN}, {rows} row{'s' * (rows > 1)} a "
                "request: a step; times faster than llama.cpp",
                timing.median("ours") * 1e3,
                "ms",
                "llama.cpp" if peer else None,
                theirs,
                timing.ratio("llama_cpp", "ours") if peer else None,
                {(1, 1): "ratio >= 1.3", (8, 1): "ratio >= 3"}.get((batch, rows)),
                threads=bench.num_threads,
                read_gb_s=timing.read_gb_s("ours"),
            )
        )


def _speeds(
    bench: Bench,
    engines: Mapping[str, Engine],
    peer: Peer | None,
    kind: str,
    temperature: float,
    plain: dict[str, list[float]],
) -> None:
    """Time texts of one kind, one at a time, from the first token on; prefixes stay cached."""
    runs: dict[str, list[Decoding]] = {name: [] for name in ("plain", *METHODS)}
    theirs: dict[int, list[float]] = {0: [], DRAFTS: []}
    reads = []
    for seed, prompt in enumerate(_prompts(engines["ngram"], kind)[:TIMED]):
        params = _params(temperature, seed, MAX_TOKENS)
        reads.append(bench.read_gb_s())
        for name in runs:
            engine = engines.get(name, engines["ngram"])
            _forget(engine)
            config = {"method": "naive"} if name == "plain" else {}
            runs[name].append(bench.undisturbed(partial(decode, engine, prompt, params, config)))
        if peer is not None and temperature == 0:
            for lookup, seconds in theirs.items():
                ask = partial(peer.ask, "generate", prompts=[prompt], max_tokens=MAX_TOKENS)
                answer = bench.undisturbed(partial(ask, lookup=lookup))
                seconds.append(answer["decode_seconds"])
    seconds = {name: sum(one.seconds for one in done) for name, done in runs.items()}
    tokens = (MAX_TOKENS - 1) * len(reads)
    prefix = f"gemma.{kind}.{_mode(temperature)}"
    common: dict[str, Any] = {"threads": bench.num_threads, "read_gb_s": median(reads)}
    for method in METHODS:
        per_step = tokens / sum(one.num_steps for one in runs[method])
        bench.add(
            Figure(
                f"{prefix}.{method}",
                f"Gemma 3 270M, {kind}, {_mode(temperature)}, {method}: {per_step:.2f} tokens per "
                "step, times faster than own plain decoding",
                tokens / seconds[method],
                "tok/s",
                "specops, plain",
                tokens / seconds["plain"],
                seconds["plain"] / seconds[method],
                f"ratio >= {0.97 if temperature else KINDS[kind]}",
                **common,
            )
        )
    if not theirs[0]:
        return
    plain["ours"] += [one.seconds for one in runs["plain"]]
    plain["llama_cpp"] += theirs[0]
    bench.add(
        Figure(
            f"{prefix}.llama_cpp_lookup",
            f"Gemma 3 270M, {kind}, greedy: llama.cpp with prompt lookup over its plain decoding",
            tokens / sum(theirs[DRAFTS]),
            "tok/s",
            "llama.cpp, plain",
            tokens / sum(theirs[0]),
            sum(theirs[0]) / sum(theirs[DRAFTS]),
            **common,
        )
    )


def _differ(
    bench: Bench,
    system: str,
    method: str,
    temperature: float,
    plain: list[list[int]],
    drafted: list[list[int]],
) -> None:
    family = "gemma_seeded" if temperature else "gemma_greedy"
    bench.add(
        Figure(
            f"{family}.{system.replace('.', '_')}.{method}.differ",
            f"Gemma 3 270M, {system}, {_mode(temperature)}: texts of {len(plain)} that {method} "
            "changes",
            sum(a != b for a, b in zip(plain, drafted, strict=True)),
            "texts",
            bar="value == 0" if system == "specops" else None,
            threads=bench.num_threads,
        )
    )


def _engine(bench: Bench, method: str, batch: int) -> Engine:
    return Engine(
        EngineConfig(
            model=str(MODEL),
            device="cpu",
            speculative_config=SpeculativeConfig(method=method, num_speculative_tokens=DRAFTS),
            max_num_seqs=batch,
            num_threads=bench.num_threads,
        )
    )


def _forget(engine: Engine) -> None:
    """Clear the cache of suffix decoding, which would otherwise draft the same text again."""
    if suffix := engine.drafters.get("suffix"):
        for name in suffix.cache.cached_requests:
            suffix.cache.evict(name)
        suffix.cache.reclaim()  # free evicted texts now, since drafts may use them until then


def _prompts(engine: Engine, kind: str) -> list[list[int]]:
    texts = json.loads((BENCH / "prompts" / f"{kind}.json").read_text())
    return [engine.tokenizer.encode(one["text"]) for one in texts]


def _params(temperature: float, seed: int, max_tokens: int) -> SamplingParams:
    return SamplingParams(
        max_tokens=max_tokens, temperature=temperature, seed=seed, ignore_eos=True
    )


def _texts(
    engine: Engine,
    prompts: list[list[int]],
    params: list[SamplingParams],
    config: Mapping[str, object],
) -> list[list[int]]:
    _forget(engine)
    done = engine.generate(prompts, params, speculative_config=config)
    return [one.token_ids for one in done]


def _mode(temperature: float) -> str:
    return f"t{temperature}" if temperature else "greedy"


def llama_cpp(bench: Bench) -> Peer | None:
    """Start llama.cpp with the same file."""
    peer = bench.peer("llama_cpp_peer")
    if peer is not None:
        try:
            peer.ask("load", model=str(MODEL))
        except PeerError as error:
            print(f"  no llama.cpp: {error}", flush=True)
            return None
    return peer


def _ask(peer: Peer, prompts: list[list[int]], temperature: float, lookup: int) -> list[list[int]]:
    answer = peer.ask(
        "generate",
        prompts=prompts,
        max_tokens=COUNTED_TOKENS,
        lookup=lookup,
        temperature=temperature,
    )
    token_ids: list[list[int]] = answer["token_ids"]
    return token_ids
