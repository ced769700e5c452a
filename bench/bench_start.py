# SPDX-License-Identifier: Apache-2.0
"""Time to first token of a new engine with a 3B model, and its memory after that.

Every start is a new process, and time counts from its command. "First" fills the cache of packed
weights, "next" reads it, and "without" uses no cache. llama.cpp starts from a GGUF file of the same
weights, in bf16 or Q4_0 (embedding Q8_0), which it maps or reads. The files are in the page cache,
as after a download.
"""

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import NamedTuple

from bench import checkpoints
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
    """Measure the first start and the next ones, in bfloat16 and quantized."""
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
    shutil.rmtree(cache)


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
