# SPDX-License-Identifier: Apache-2.0
"""`python -m bench [--only FAMILY[,FAMILY]]`: measure, print the table, write the JSON file.

Threads and cores are set before torch is imported. Families that need the most memory run last. If
a family fails, the others still run. `--device cuda` runs the GPU's families. `--device rehearsal`
runs the GPU's families with small sizes on the CPU to test their code; the figures mean nothing and
are saved only with --results.
"""

import argparse
import importlib
import os
import sys
import time
import traceback
from datetime import datetime, timezone
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from bench.common import Figure
    from bench.cuda import CudaBench

# Family -> its module: bench/bench_<module>.py, or a full name.
FAMILIES = {
    "machine": "machine",
    "binding": "binding",
    "linear": "dense",
    "moe": "moe",
    "quantized": "quantized",
    "attention": "attention",
    "kv_cache": "kv_cache",
    "latent": "latent",
    "linear_attention": "linear_attention",
    "cascade": "cascade",
    "trees": "trees",
    "answers": "answers",
    "structured": "structured",
    "sampling": "sampling",
    "suffix_tree": "suffix_tree",
    "ngram_propose": "ngram",
    "server": "engine",
    "start": "start",
    "accuracy": "accuracy",
    "gemma": "gemma",
    "gemma_greedy": "gemma",
    "gemma_seeded": "gemma",
    "prefill": "prefill",
    "serving": "serving",
    "lossless": "lossless",
    "mtp_mistakes": "tools.benches.bench_mtp_mistakes",
    "head_mistakes": "tools.benches.bench_head_mistakes",
    "ngram": "engine",
    "suffix": "engine",
    "replay": "replay",
    "replay_whole": "replay",
    "step_costs": "replay",
    "methods": "methods",
    "acceptance": "methods",
    "mixture": "methods",
    "bundled": "engine",
    "qwen06": "engine",
    "qwen06_quantized": "quantized",
    "vllm": "tools.benches.bench_vllm",
}
# The most informative families first (tools/gpu_check/steps.py runs each separately).
CUDA_FAMILIES = {
    "facts": "gpu_facts",
    "ablations": "ablations",
    "attention": "attention_cuda",
    "attention_8bit": "attention_cuda",
    "sampling": "sampling_cuda",
    "recorded": "sampling_cuda",
    "linear": "dense",
    "layers": "layers",
    "cascade": "attention_peers",
    "binding": "binding",
    "elementwise": "dense",
    "sweeps": "sweeps",
    "attention_peers": "attention_peers",
    "sampling_peers": "sampling_cuda",
    "exactness": "attention_cuda",
    "quantized": "regimes_cuda",
    "moe": "regimes_cuda",
    "latent": "regimes_cuda",
    "linear_attention": "regimes_cuda",
    "prefill": "regimes_cuda",
    "long": "regimes_cuda",
    "bundled": "engine",
    "qwen8": "engine",
}
GROUPS = {
    "engine": ("server", "lossless", "ngram", "suffix", "bundled", "qwen06"),
    "mtp": ("methods", "acceptance"),
}
# These families take minutes each and run only if named: `make bench ONLY=methods`.
ON_REQUEST = (
    "accuracy",
    "answers",
    "gemma",
    "gemma_greedy",
    "gemma_seeded",
    "methods",
    "prefill",
    "replay",
    "replay_whole",
    "start",
    "step_costs",
    "mtp_mistakes",
    "head_mistakes",
    "vllm",
)
BUDGET_MINUTES = 20


def module_of(name: str) -> ModuleType:
    """Import the module of a family."""
    return importlib.import_module(name if "." in name else f"bench.bench_{name}")


def main() -> int:
    """Run the chosen families; return how many failed. A missed bar is not a failure."""
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("--only", default="", help=f"comma-separated: {', '.join(FAMILIES)}")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda", "rehearsal"))
    parser.add_argument("--results", type=Path, help="the JSON file (by kind of machine)")
    parser.add_argument("--threads", type=int, default=2, help="threads of every case (2)")
    parser.add_argument("--isa", help="instruction set (the default one); with --results")
    arguments = parser.parse_args()
    if arguments.isa and not arguments.results:
        parser.error("--isa needs --results: the machine's file is of its default set")
    if arguments.device != "cpu":
        return main_cuda(parser, arguments)
    names = [name for name in arguments.only.split(",") if name] or [
        family for family in FAMILIES if family not in ON_REQUEST
    ]
    chosen = [family for name in names for family in GROUPS.get(name, (name,))]
    if unknown := set(chosen) - set(FAMILIES):
        parser.error(f"unknown family {', '.join(sorted(unknown))}; one of {', '.join(FAMILIES)}")

    cpus = sorted(os.sched_getaffinity(0))[: arguments.threads]
    os.sched_setaffinity(0, cpus)
    os.environ["OMP_NUM_THREADS"] = str(arguments.threads)
    import specops
    import torch

    from bench import common

    torch.set_num_threads(arguments.threads)
    specops.set_num_threads(arguments.threads)
    if arguments.isa:
        specops.set_isa(arguments.isa)
    machine = common.machine()
    path = arguments.results or common.cpu_results(machine["cpu"])
    isa, threads = specops.get_isa(), arguments.threads
    print(f"{machine['cpu']}, {isa}, {threads} threads of {machine['cores']} cores")
    print(common.HEADER, flush=True)
    failed, everything, started = [], [], time.monotonic()
    for family in chosen:
        run = module_of(FAMILIES[family])
        bench, begun = common.Bench(arguments.threads), time.monotonic()
        try:
            getattr(run, f"run_{family}")(bench)
        except Exception:
            traceback.print_exc()
            failed.append(family)
        finally:
            bench.close()
        if bench.figures:
            common.save(
                bench.figures,
                family=family,
                minutes=(time.monotonic() - begun) / 60,
                versions={**common.versions("torch", "specops"), **bench.peer_versions()},
                disturbed=f"{bench.disturbed_windows} of {bench.windows}",
                on={**machine, "isa": isa},
                path=path,
            )
        everything += bench.figures
    minutes = (time.monotonic() - started) / 60
    summary(everything, failed, minutes)
    if minutes > BUDGET_MINUTES:
        print(f"  over the budget of {BUDGET_MINUTES} min")
    return len(failed)


def main_cuda(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> int:
    """Run the GPU's families, or rehearse them."""
    from bench import common, cuda

    chosen = [name for name in arguments.only.split(",") if name] or list(CUDA_FAMILIES)
    if unknown := set(chosen) - set(CUDA_FAMILIES):
        parser.error(f"unknown family {', '.join(sorted(unknown))}; one of {list(CUDA_FAMILIES)}")
    date = datetime.now(timezone.utc).strftime("%Y-%m-%d")
    path = arguments.results or common.gpu_results(date)
    print(common.HEADER, flush=True)
    failed, everything, started = [], [], time.monotonic()
    for family in chosen:
        run = module_of(CUDA_FAMILIES[family])
        keep = _keeper(family, path) if arguments.device == "cuda" or arguments.results else None
        bench = cuda.CudaBench("cuda" if arguments.device == "cuda" else "cpu", keep)
        try:
            getattr(run, f"run_{family}_cuda")(bench)
        except Exception:
            traceback.print_exc()
            failed.append(family)
        everything += bench.figures
        del bench
        cuda.free_memory()
    summary(everything, failed, (time.monotonic() - started) / 60)
    return len(failed)


def _keeper(family: str, path: Path) -> "Callable[[CudaBench], None]":
    """Return a callback that saves a family's figures after each new one."""
    from bench import common, cuda

    begun = time.monotonic()
    versions, machine = cuda.gpu_versions(), cuda.gpu_machine()

    def keep(bench: "CudaBench") -> None:
        common.save(
            bench.figures,
            family=family,
            minutes=(time.monotonic() - begun) / 60,
            versions=versions,
            command=f"make gpu-check PART=bench ONLY={family}",
            on=machine,
            path=path,
            notes=bench.notes,
        )

    return keep


def summary(figures: "list[Figure]", failed: list[str], minutes: float) -> None:
    """Print a summary of the run in a few lines."""
    missed = [figure for figure in figures if figure.met is False]
    print(f"{len(figures)} figures in {minutes:.1f} min, {len(missed)} below their bars")
    for figure in missed:
        print(f"  missed: {figure.what}: bar {figure.bar}")
    if failed:
        print(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    sys.exit(main())
