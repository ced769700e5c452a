# SPDX-License-Identifier: Apache-2.0
"""Time to first token of a new engine with a 3B model, and its memory after that; and of Gemma.

Every start is a new process, and time counts from its command. "First" fills the cache of packed
weights, "next" reads it, and "without" uses no cache. llama.cpp starts from a GGUF file of the same
weights, in bf16 or Q4_0 (embedding Q8_0), which it maps or reads. The files are in the page cache,
as after a download.

Gemma 3 270M in Q4_K_M, which `make gemma` fetches, is started by `specops complete`; its time ends
with the process, and its memory is the peak.
"""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from bench import checkpoints
from bench.bench_accuracy import GEMMA
from bench.common import Bench, Figure, PeerError, resident_gb

# Our quantization -> type of llama.cpp's file.
QUANTIZATIONS = {"none": "bf16", "wint4": "int4"}
STARTS = ("without", "first", "next")
WORDS = {
    "without": "start without a cache",
    "first": "first start",
    "next": "next start",
    "llama_cpp_mapped": "llama.cpp, which maps its file",
    "llama_cpp_read": "llama.cpp, which reads its file",
}
ROUNDS = 3
PROMPT = [5, 6, 7]
# Bytes of Gemma's KV cache: 18 layers, 32,768 positions of a key and a value of 256 bf16 numbers.
GEMMA_KV_BYTES = 18 * 32768 * 2 * 256 * 2
_CHILD = f"""
import json, sys
from specops.engine import Engine, EngineConfig, SamplingParams
engine = Engine(EngineConfig(**json.loads(sys.argv[1])))
engine.generate([{PROMPT}], SamplingParams(max_tokens=1))
print("ready", flush=True)
sys.stdin.read()
"""


class Start(NamedTuple):
    """Seconds to the first token, and GB of anonymous memory and of mapped files."""

    seconds: float
    own: float
    files: float


def run_start(bench: Bench) -> None:
    """Measure the first start and the next ones, in bfloat16 and quantized, and of Gemma."""
    checkpoint, cache = checkpoints.llama3(), checkpoints.WORK / "weight-cache"
    shutil.rmtree(cache, ignore_errors=True)
    for quantization, kind in QUANTIZATIONS.items():
        settings = {
            "model": str(checkpoint.path),
            "device": "cpu",
            "num_threads": bench.num_threads,
            "quantization": quantization,
            "quantize_head": quantization,
        }
        label = "bfloat16" if quantization == "none" else quantization
        for which in STARTS:
            where = "none" if which == "without" else str(cache)
            ours = partial(_start, {**settings, "weight_cache": where})
            if which != "next":
                _add(bench, label, which, [ours()])
                continue
            cases = {which: ours, **_llama_cpp(bench, checkpoint, kind)}
            found = [{name: start() for name, start in cases.items()} for _ in range(ROUNDS)]
            for name in cases:
                _add(bench, label, name, [one[name] for one in found])
    if GEMMA.exists():
        _complete_gemma(bench, cache)
    shutil.rmtree(cache)


def _complete_gemma(bench: Bench, cache: Path) -> None:
    """Measure `specops complete`: the first start with an empty cache, and the next ones."""
    arguments = ["complete", "--model", str(GEMMA), "--num-threads", str(bench.num_threads)]
    command = [sys.executable, "-m", "specops", *arguments, "--max-tokens", "1", "Hello"]
    environment = {**os.environ, "XDG_CACHE_HOME": str(cache)}
    expected = (GEMMA.stat().st_size + GEMMA_KV_BYTES) * 1e-9

    def complete() -> tuple[float, float]:
        begun = time.perf_counter()
        with subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL) as process:
            _, status, usage = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            raise RuntimeError(f"specops complete ended with {process.returncode}")
        return time.perf_counter() - begun, usage.ru_maxrss * 1024e-9

    shutil.rmtree(cache, ignore_errors=True)
    cache.mkdir(parents=True)
    starts = {"first": [complete()], "next": [complete() for _ in range(ROUNDS)]}
    for which, limit in (("first", 3), ("next", 1.5)):
        seconds, peak = (median(column) for column in zip(*starts[which], strict=True))
        common: dict[str, Any] = {"threads": bench.num_threads, "read_gb_s": bench.read_gb_s()}
        bench.add(
            Figure(
                f"start.gemma.{which}.seconds",
                f"Gemma 3 270M, specops complete of one token, {WORDS[which]}",
                seconds,
                "s",
                bar=f"value <= {limit}",
                **common,
            )
        )
        bench.add(
            Figure(
                f"start.gemma.{which}.peak",
                f"Gemma 3 270M, specops complete of one token, {WORDS[which]}: peak memory",
                peak,
                "GB",
                "file and KV cache",
                expected,
                peak / expected,
                "ratio <= 1.3",
                **common,
            )
        )


def _start(settings: dict[str, object]) -> Start:
    """Start an engine in a process, measure it, and end the process."""
    begun = time.perf_counter()
    command = [sys.executable, "-c", _CHILD, json.dumps(settings)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdin and process.stdout
        is_ready = process.stdout.readline() == "ready\n"
        seconds = time.perf_counter() - begun
        memory = resident_gb(process.pid) if is_ready else (0.0, 0.0)
    if not is_ready:
        raise RuntimeError(f"the engine ended with {process.returncode}")
    return Start(seconds, *memory)


def _llama_cpp(
    bench: Bench, checkpoint: checkpoints.Checkpoint, kind: str
) -> dict[str, Callable[[], Start]]:
    """Return functions that start llama.cpp, if it is installed; make its file if missing."""
    peer = bench.peer("llama_cpp_peer")
    if peer is None:
        return {}
    peer.close()
    file = str(checkpoint.for_peer("llama_cpp_peer", kind))

    def start(mapped: bool) -> Start:
        begun = time.perf_counter()
        peer = bench.peer("llama_cpp_peer")
        if peer is None:
            raise PeerError("llama.cpp does not start again")
        peer.ask("load", model=file, mapped=mapped)
        peer.ask("generate", prompts=[PROMPT], max_tokens=1, lookup=0)
        seconds = time.perf_counter() - begun
        memory = peer.resident_gb()
        peer.close()
        return Start(seconds, *memory)

    return {"llama_cpp_mapped": partial(start, True), "llama_cpp_read": partial(start, False)}


def _add(bench: Bench, label: str, which: str, starts: list[Start]) -> None:
    for name, what, unit in (
        ("seconds", "to the first token", "s"),
        ("own", "memory of its own", "GB"),
        ("files", "memory of files", "GB"),
    ):
        bench.add(
            Figure(
                f"start.{label}.{which}.{name}",
                f"3B in {label}, {WORDS[which]}: {what}",
                median(getattr(one, name) for one in starts),
                unit,
                bar="value <= 3" if (which, name) == ("next", "seconds") else None,
                threads=bench.num_threads,
                read_gb_s=bench.read_gb_s(),
            )
        )
