# SPDX-License-Identifier: Apache-2.0
"""`python -m bench [--only FAMILY[,FAMILY]]`: measures, prints the table, writes the JSON file.

The read line, the threads and the cores are fixed before torch is imported. Families run in an
order that leaves the machine's memory to the big ones last; a family that fails is reported and
the rest still runs.
"""

import argparse
import importlib
import os
import sys
import time
import traceback

# Each family and the module it lives in.
FAMILIES = {
    "binding": "binding",
    "linear": "dense",
    "attention": "attention",
    "sampling": "sampling",
    "server": "engine",
    "lossless": "lossless",
    "ngram": "engine",
    "bundled": "engine",
    "qwen06": "engine",
}
GROUPS = {"engine": ("server", "lossless", "ngram", "bundled", "qwen06")}
BUDGET_MINUTES = 20


def main() -> int:
    """Runs the chosen families; the exit status counts families that failed, not missed bars."""
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("--only", default="", help=f"comma-separated: {', '.join(FAMILIES)}")
    parser.add_argument("--threads", type=int, default=2, help="threads of every case (2)")
    arguments = parser.parse_args()
    asked = [name for name in arguments.only.split(",") if name] or list(FAMILIES)
    chosen = [family for name in asked for family in GROUPS.get(name, (name,))]
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
    print(common.HEADER, flush=True)
    failed, everything, started = [], [], time.monotonic()
    for family in chosen:
        run = importlib.import_module(f"bench.bench_{FAMILIES[family]}")
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
            )
        everything += bench.figures
    minutes = (time.monotonic() - started) / 60
    missed = [figure for figure in everything if figure.met is False]
    print(f"{len(everything)} figures in {minutes:.1f} min, {len(missed)} below their bars")
    for figure in missed:
        print(f"  missed: {figure.what}: bar {figure.bar}")
    if minutes > BUDGET_MINUTES:
        print(f"  over the budget of {BUDGET_MINUTES} min")
    if failed:
        print(f"failed: {', '.join(failed)}")
    return len(failed)


if __name__ == "__main__":
    sys.exit(main())
