# SPDX-License-Identifier: Apache-2.0
"""vLLM on this CPU with its own kernels and with specops', our engine, and changed texts.

20 prompts, 64 greedy tokens, one at a time and eight at once: plain, n-gram and suffix drafts,
eager and compiled; and n-gram and suffix drafts for edits in vLLM's V2 model runner, which
without specops does not run here. Every vLLM runs in a separate process, in the environment of
`make -C tools test-vllm`. Texts are compared with plain decoding of each prompt alone by the same
kernels.
"""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

from specops.engine import Engine, EngineConfig, SamplingParams, SpeculativeConfig
from specops.integrations.vllm.decoding import Job, Run, decode, run_apart
from specops.integrations.vllm.settings import EXACT

from bench.bench_engine import prompt_token_ids
from bench.common import ROOT, Bench, Figure

VLLM_PYTHON = ROOT / ".venv-vllm" / "bin" / "python"
ROUNDS = 1  # ten minutes each: a compiled engine compiles for a minute at each start
PROMPTS = 20
MAX_TOKENS = 64
MODES = ("eager", "compiled")
KERNELS = {"vllm": "", "specops": EXACT}
BATCHES = (1, 8)
_SECOND_RUNNER = "VLLM_USE_V2_MODEL_RUNNER"
_DRAFTS = 4
METHODS: dict[str, dict[str, Any]] = {
    "plain": {},
    "ngram": {
        "method": "ngram",
        "prompt_lookup_min": 2,
        "prompt_lookup_max": 5,
        "num_speculative_tokens": _DRAFTS,
    },
}
_SUFFIX = {"num_speculative_tokens": _DRAFTS}
# vLLM's own suffix decoding needs a package that `make -C tools test-vllm` does not install.
_OWN_SUFFIX = _SUFFIX | {"method": "suffix"}
_OUR_SUFFIX = _SUFFIX | {
    "method": "custom_class",
    "model": "specops.integrations.vllm.SuffixProposer",
}


@dataclass
class Runs:
    """Results of one kind of engine by method and batch: tokens per second of each round, texts."""

    rates: dict[tuple[str, int], list[float]] = field(default_factory=dict)
    texts: dict[tuple[str, int], list[list[int]]] = field(default_factory=dict)

    def add(self, method: str, batch: int, texts: list[list[int]], seconds: float) -> None:
        """Record a run."""
        rate = sum(map(len, texts)) / seconds
        self.rates.setdefault((method, batch), []).append(rate)
        self.texts[method, batch] = texts

    def rate(self, method: str, batch: int) -> float:
        """Return the median tokens per second."""
        return median(self.rates[method, batch])

    def differ(self) -> tuple[int, int]:
        """Return how many texts differ from plain decoding alone, and the number of texts."""
        base = self.texts["plain", 1]
        others = [texts for run, texts in self.texts.items() if run != ("plain", 1)]
        wrong = sum(a != b for texts in others for a, b in zip(base, texts, strict=True))
        return wrong, len(base) * len(others)


def run_vllm(bench: Bench) -> None:
    """Run all engines in turn, round by round; without vLLM only ours."""
    engine = _engine(bench, 1)
    kinds = [prompt_token_ids(engine, kind) for kind in ("edits", "completions")]
    prompts = [prompt for kind in kinds for prompt in kind[: PROMPTS // 2]]
    ours = Runs()
    theirs = {(kernels, mode): Runs() for kernels in KERNELS for mode in MODES}
    second = Runs()
    has_vllm = VLLM_PYTHON.exists() and not bench.rehearsal
    if not has_vllm:
        print("  no vllm: .venv-vllm is missing; `make -C tools test-vllm` makes it", flush=True)
    read = bench.read_gb_s()
    with tempfile.TemporaryDirectory() as folder:
        model = _write_model(Path(folder, "bundled")) if has_vllm else ""
        methods = _methods() if has_vllm else {}
        for _ in range(bench.pick(ROUNDS, 1)):
            _run_ours(bench, ours, prompts)
            for method, config in methods.items():
                for (kernels, mode), runs in theirs.items():
                    _run_theirs(runs, model, method, config, KERNELS[kernels], mode, prompts)
            if has_vllm:
                _run_second_runner(second, model, kinds[0][:PROMPTS])
    common = {"threads": bench.num_threads, "read_gb_s": read}
    _figures_of_ours(bench, ours, theirs["vllm", "compiled"] if has_vllm else None, common)
    if has_vllm:
        for mode in MODES:
            _figures_of_theirs(bench, mode, theirs["vllm", mode], theirs["specops", mode], common)
        _figures_of_second_runner(bench, second, common)


def _write_model(folder: Path) -> str:
    """Write the bundled model in vLLM's layout."""
    sys.path.insert(0, str(ROOT / "tests" / "with_vllm"))
    from models import write_bundled

    return write_bundled(folder)


def _methods() -> dict[str, dict[str, Any]]:
    """Return vLLM's speculative configurations; its own suffix decoding if it is installed."""
    find = "import importlib.util; print(importlib.util.find_spec('arctic_inference') is not None)"
    found = subprocess.run([VLLM_PYTHON, "-c", find], capture_output=True, text=True, check=True)
    own = found.stdout.strip() == "True"
    return METHODS | {"suffix": _OWN_SUFFIX if own else _OUR_SUFFIX}


def _engine(bench: Bench, batch: int) -> Engine:
    return Engine(
        EngineConfig(
            device="cpu",
            speculative_config=SpeculativeConfig(method="naive"),
            enable_prefix_caching=False,
            max_num_seqs=batch,
            num_threads=bench.num_threads,
        )
    )


def _run_ours(bench: Bench, runs: Runs, prompts: list[list[int]]) -> None:
    params = SamplingParams(max_tokens=MAX_TOKENS, temperature=0.0, ignore_eos=True)
    drafting = {"num_speculative_tokens": _DRAFTS, "adaptive_verification": False}
    configs: dict[str, dict[str, object]] = {
        "plain": {"method": "naive"},
        "ngram": {"method": "ngram", **drafting},
        "suffix": {"method": "suffix", **drafting},
    }
    for batch in BATCHES:
        for method, config in configs.items():
            engine = _engine(bench, batch)  # with an empty suffix tree, like vLLM's
            engine.generate(prompts[:1], params)
            begun = time.perf_counter()
            done = engine.generate(prompts, params, speculative_config=config)
            seconds = time.perf_counter() - begun
            runs.add(method, batch, [one.token_ids for one in done], seconds)


def _run_theirs(
    runs: Runs,
    model: str,
    method: str,
    config: Mapping[str, Any],
    parts: str,
    mode: str,
    prompts: list[list[int]],
) -> None:
    """Run an engine of vLLM's; each batch first warms up on prompts that teach drafters nothing."""
    params = [{"temperature": 0.0, "max_tokens": MAX_TOKENS, "ignore_eos": True}] * len(prompts)
    warm = [prompt[::-1] for prompt in prompts]
    wanted = [Run(each, params, batch) for batch in BATCHES for each in (warm, prompts)]
    engine: dict[str, Any] = {
        "model": model,
        "max_model_len": 1024,
        "enforce_eager": mode == "eager",
        "enable_prefix_caching": False,
    }
    if config:
        engine["speculative_config"] = dict(config)
    libraries = VLLM_PYTHON.parent.parent / "lib" / "libiomp5.so"
    environment = {
        "LD_PRELOAD": str(libraries),
        "VLLM_CPU_KVCACHE_SPACE": os.environ.get("VLLM_CPU_KVCACHE_SPACE", "1"),
        "PYTHONPATH": "",
    }
    with mock.patch.dict(os.environ, environment):
        found = decode(Job(engine, wanted, parts), partial(run_apart, python=str(VLLM_PYTHON)))
    for batch, done in zip(BATCHES, found[1::2], strict=True):
        runs.add(method, batch, done.token_ids, done.seconds)


def _run_second_runner(runs: Runs, model: str, prompts: list[list[int]]) -> None:
    with mock.patch.dict(os.environ, {_SECOND_RUNNER: "1"}):
        for method, config in {"ngram": METHODS["ngram"], "suffix": _OUR_SUFFIX}.items():
            _run_theirs(runs, model, method, config, EXACT, "eager", prompts)


def _figures_of_second_runner(bench: Bench, runs: Runs, common: Mapping[str, Any]) -> None:
    for batch in BATCHES:
        ngram, suffix = runs.rate("ngram", batch), runs.rate("suffix", batch)
        bench.add(
            Figure(
                f"vllm.v2.suffix.b{batch}",
                f"vLLM's V2 runner with specops, eager, edits, batch {batch}: suffix drafts "
                "times as fast as n-gram drafts",
                suffix,
                "tok/s",
                "n-gram drafts",
                ngram,
                suffix / ngram,
                **common,
            )
        )


def _figures_of_theirs(
    bench: Bench, mode: str, own: Runs, with_specops: Runs, common: Mapping[str, Any]
) -> None:
    for method, batch in own.rates:
        ours, theirs = with_specops.rate(method, batch), own.rate(method, batch)
        bench.add(
            Figure(
                f"vllm.{mode}.{method}.b{batch}",
                f"vLLM with specops, {mode}, {method}, batch {batch}: times as fast as vLLM with "
                "its own kernels",
                ours,
                "tok/s",
                f"vLLM, {mode}",
                theirs,
                ours / theirs,
                "ratio >= 1",
                **common,
            )
        )
    _figure_of_texts(bench, f"vllm.{mode}.differ", f"vLLM with specops, {mode}", with_specops)
    _figure_of_texts(bench, f"vllm.{mode}.flipped", f"vLLM, {mode}", own)


def _figures_of_ours(
    bench: Bench, ours: Runs, compiled: Runs | None, common: Mapping[str, Any]
) -> None:
    for method, batch in ours.rates:
        rate = ours.rate(method, batch)
        theirs = compiled.rate(method, batch) if compiled else None
        bench.add(
            Figure(
                f"vllm.engine.{method}.b{batch}",
                f"specops' engine, {method}, batch {batch}: times as fast as compiled vLLM",
                rate,
                "tok/s",
                "vLLM, compiled" if compiled else None,
                theirs,
                rate / theirs if theirs else None,
                **common,
            )
        )
    _figure_of_texts(bench, "vllm.engine.differ", "specops' engine", ours)


def _figure_of_texts(bench: Bench, id: str, what: str, runs: Runs) -> None:
    """Add the figure of changed texts; ours (.differ) must be zero."""
    wrong, count = runs.differ()
    bench.add(
        Figure(
            id,
            f"{what}: greedy texts that drafts or batches change, of {count}",
            wrong,
            "texts",
            bar="value == 0" if id.endswith(".differ") else None,
            threads=bench.num_threads,
        )
    )
