# SPDX-License-Identifier: Apache-2.0
"""How long an engine of a model of 3B takes to its first token, and the memory that it then holds.

A process of its own each time, from its command on. "First" fills a cache of packed weights, "next"
finds it, and "without" has none. The files are in the page cache, as after a download.
"""

import json
import shutil
import subprocess
import sys
import time
from statistics import median

from bench import checkpoints
from bench.common import Bench, Figure

QUANTIZATIONS = ("none", "wint4")
STARTS = ("without", "first", "next", "next", "next")
_CHILD = """
import json, sys
from specops.engine import Engine, EngineConfig, SamplingParams
engine = Engine(EngineConfig(**json.loads(sys.argv[1])))
engine.generate([[5, 6, 7]], SamplingParams(max_tokens=1))
lines = open("/proc/self/status").read().splitlines()
print(json.dumps({name: int(value.split()[0]) for name, value in
                  (line.split(":") for line in lines if line.startswith("Rss"))}), flush=True)
"""


def run_start(bench: Bench) -> None:
    """The first start and the next ones, in bfloat16 and quantized."""
    model = str(checkpoints.llama3().path)
    cache = checkpoints.WORK / "weight-cache"
    shutil.rmtree(cache, ignore_errors=True)
    for quantization in QUANTIZATIONS:
        settings = {"model": model, "device": "cpu", "num_threads": bench.num_threads}
        settings |= {"quantization": quantization, "quantize_head": quantization}
        for which in dict.fromkeys(STARTS):
            settings["weight_cache"] = "none" if which == "without" else str(cache)
            found = [_start(settings) for _ in range(STARTS.count(which))]
            _add(bench, quantization, which, found)
    shutil.rmtree(cache)


def _start(settings: dict[str, object]) -> dict[str, float]:
    """Seconds to the first token, and GB of memory: own pages, and pages of files."""
    begun = time.perf_counter()
    command = [sys.executable, "-c", _CHILD, json.dumps(settings)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        seconds = time.perf_counter() - begun
    if process.returncode:
        raise RuntimeError(f"the engine ended with {process.returncode}")
    sizes = json.loads(line)
    files = sizes["RssFile"] + sizes["RssShmem"]
    return {"seconds": seconds, "own": sizes["RssAnon"] / 1e6, "files": files / 1e6}


def _add(bench: Bench, quantization: str, which: str, starts: list[dict[str, float]]) -> None:
    told = "bfloat16" if quantization == "none" else quantization
    for name, what, unit in (
        ("seconds", "to the first token", "s"),
        ("own", "memory of its own", "GB"),
        ("files", "memory of files", "GB"),
    ):
        bench.add(
            Figure(
                f"start.{told}.{which}.{name}",
                f"3B in {told}, start {which}: {what}",
                median(one[name] for one in starts),
                unit,
                bar="value <= 3" if (which, name) == ("next", "seconds") else None,
                threads=bench.num_threads,
                read_gb_s=bench.read_gb_s(),
            )
        )
