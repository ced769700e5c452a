# SPDX-License-Identifier: Apache-2.0
"""Steps of the GPU check: commands with time limits, the most informative first."""

import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from tools.cuda_toolkit import ROOT, find_nvcc, gpu_archs, toolkit_root

PARTS = ("facts", "numerics", "ablations", "bench", "sweeps", "peers", "tests", "sanitize")
OP_TESTS = tuple(
    f"tests/{path.name}"
    for path in sorted(ROOT.glob("tests/test_*.py"))
    if "device: str" in path.read_text()
)
TOOLS = ("memcheck", "racecheck", "initcheck")
SANITIZER_ERROR = 9
NUMERICS_LIMIT = 250

# Seconds that each family of benchmarks may take; FlashInfer compiles itself at first use.
BENCH_LIMITS = {
    "facts": 60,
    "ablations": 280,  # two minutes of these compile a kernel without arithmetic
    "attention": 120,
    "attention_8bit": 90,
    "sampling": 90,
    "recorded": 60,
    "linear": 150,
    "layers": 120,
    "binding": 60,
    "elementwise": 60,
    "bundled": 150,
    "qwen8": 150,
    "exactness": 300,
    "quantized": 90,
    "moe": 90,
    "latent": 60,
    "linear_attention": 30,
    "prefill": 60,
    "long": 90,
    "sweeps": 150,
    "cascade": 300,
    "attention_peers": 300,
    "sampling_peers": 240,
}
# Families that are their own part or belong to one; all others belong to the part `bench`.
_PART_OF = {
    "facts": "facts",
    "ablations": "ablations",
    "sweeps": "sweeps",
    "cascade": "peers",
    "attention_peers": "peers",
    "sampling_peers": "peers",
}
# Families whose only subject is FlashInfer.
_FLASHINFER = ("attention_peers", "sampling_peers")


@dataclass(frozen=True)
class Step:
    """One command.

    Attributes:
        name: name in the table, the results and the logs.
        command: program and arguments; empty if `missing` is not there.
        limit_s: time limit.
        env: additional environment variables.
        tests: whether the last line of the output counts passed tests.
        missing: the reason why the step cannot run, in words.
    """

    name: str
    command: tuple[str, ...]
    limit_s: float
    env: dict[str, str] = field(default_factory=dict)
    tests: bool = False
    missing: str = ""


@dataclass(frozen=True)
class Plan:
    """Selection of what to run.

    Attributes:
        parts: some of PARTS; empty for all.
        only: families of benchmarks; empty for all. With the part `bench`, any family.
        results: the file for the figures.
        rehearsal: run on the CPU, with small sizes.
        prebuilt: a folder with built modules; None to build them here.
        build_to: a folder that gets the built modules, for a later `prebuilt`; variants of kernels
            (bench/variants.py) are then built in the same run. None: an ordinary build.
        tests: test files of the parts `tests` and `sanitize`; empty for all.
        tools: sanitizers.
        limits: time limits of steps that differ from the usual ones, by name.
        in_order: whether `parts` run in their given order instead of that of PARTS.
    """

    parts: tuple[str, ...]
    only: tuple[str, ...]
    results: Path
    rehearsal: bool
    prebuilt: Path | None = None
    build_to: Path | None = None
    tests: tuple[str, ...] = ()
    tools: tuple[str, ...] = TOOLS
    limits: Mapping[str, float] = field(default_factory=dict)
    in_order: bool = False

    def has(self, part: str) -> bool:
        """Return whether a part is selected."""
        return not self.parts or part in self.parts


@dataclass(frozen=True)
class Preset:
    """One of the calls of a short session on a GPU; the fields are those of Plan.

    Attributes:
        what: contents, in words.
        budget_s: time limit of the whole call.
    """

    what: str
    parts: tuple[str, ...]
    only: tuple[str, ...] = ()
    tests: tuple[str, ...] = ()
    tools: tuple[str, ...] = TOOLS
    limits: Mapping[str, float] = field(default_factory=dict)
    budget_s: float = 540

    def plan(
        self, results: Path, *, rehearsal: bool, prebuilt: Path | None, build_to: Path
    ) -> Plan:
        """Return the plan of this call."""
        return Plan(
            self.parts,
            self.only,
            results,
            rehearsal,
            prebuilt,
            build_to,
            self.tests,
            self.tools,
            self.limits,
            in_order=True,
        )


# Ops of which numerics has few cases: quantized weights, experts, latents and states.
_LESS_CHECKED = tuple(
    f"tests/test_{name}.py" for name in ("quantized", "moe", "linear_attention", "attention_latent")
)
# Three calls of ten minutes within half an hour, the most informative first.
PRESETS = {
    "1": Preset(
        "build everything; facts, numerics, then tests of ops with few cases in numerics",
        ("facts", "numerics", "tests"),
        tests=_LESS_CHECKED,
        limits={"build": 250, "bench facts": 40, "numerics": 240, "op tests": 180},
    ),
    "2": Preset(
        "the figures that decide the goals, and what limits them",
        ("bench",),
        (
            "attention",
            "sampling",
            "recorded",
            "linear",
            "exactness",
            "ablations",
            "attention_8bit",
            "layers",
        ),
    ),
    "3": Preset(
        "quantized weights, experts, latents, states, prompts and long contexts; memory errors and "
        "races; FlashInfer if it is installed",
        ("bench", "sanitize", "peers"),
        (
            "quantized",
            "moe",
            "long",
            "prefill",
            "latent",
            "linear_attention",
            "attention_peers",
        ),
        tests=_LESS_CHECKED,
        tools=("memcheck", "racecheck"),
        limits={"memcheck": 90, "racecheck": 90},
    ),
}


def all_steps(plan: Plan) -> list[Step]:
    """Return the steps of a plan, in order."""
    steps = _build_steps(plan)
    for part in plan.parts if plan.in_order else PARTS:
        if plan.has(part):
            steps += _part_steps(plan, part)
    return [replace(step, limit_s=plan.limits.get(step.name, step.limit_s)) for step in steps]


def _part_steps(plan: Plan, part: str) -> list[Step]:
    if part == "numerics":
        return _numerics_steps(plan)
    if part == "tests":
        return _test_steps(plan)
    if part == "sanitize":
        return [_sanitizer_step(plan, tool) for tool in plan.tools]
    return _bench_steps(plan, part)


def _device(plan: Plan) -> str:
    return "cpu" if plan.rehearsal else "cuda"


def _build_steps(plan: Plan) -> list[Step]:
    if plan.prebuilt is not None:
        command = (sys.executable, "-m", "tools.gpu_check.prebuilt", "use", str(plan.prebuilt))
        return [Step("build", (*command, *_rehearsed(plan)), 60)]
    if plan.rehearsal:
        return []
    if plan.build_to is not None:
        command = (sys.executable, "-m", "tools.gpu_check.prebuilt", "make", str(plan.build_to))
        archs = ("--archs", " ".join(gpu_archs() or ["90a"]))
        return [Step("build", (*command, *archs, "--variants", "--use"), 420)]
    # The host compiler varies and may warn where ours does not. CPU kernels are only needed for the
    # instruction sets of this machine.
    env = {
        "SPECOPS_CUDA": "ON",
        "SPECOPS_ISAS": "native",
        "SPECOPS_CMAKE_ARGS": "-DSPECOPS_WERROR=OFF",
    }
    return [Step("build", (sys.executable, "setup.py", "build_ext", "--inplace"), 420, env)]


def _rehearsed(plan: Plan) -> tuple[str, ...]:
    return ("--rehearsal",) if plan.rehearsal else ()


def _numerics_steps(plan: Plan) -> list[Step]:
    steps = []
    if not plan.rehearsal and not list((ROOT / "build" / "simt").glob("_simt.*so")):
        # The interpreter is the reference for the device's bits; a prebuilt folder includes it.
        work = ROOT / "build" / f"cmake-{sys.implementation.cache_tag}"
        if plan.prebuilt is None and plan.build_to is None:
            command = ("cmake", "--build", str(work), "--target", "_simt")
            steps.append(Step("interpreter", command, 240))
    command = (
        sys.executable,
        "-m",
        "tools.gpu_check.numerics",
        "--results",
        str(plan.results),
        "--seconds",
        str(plan.limits.get("numerics", NUMERICS_LIMIT) - 20),
        *_rehearsed(plan),
    )
    return [*steps, Step("numerics", command, NUMERICS_LIMIT)]


def _bench_steps(plan: Plan, part: str) -> list[Step]:
    steps = []
    for family in BENCH_LIMITS if not plan.only else plan.only:
        own = _PART_OF.get(family, "bench")
        # A family named with the part `bench` runs there, even if it usually belongs to another.
        named = plan.only and "bench" in plan.parts and own not in plan.parts
        if part != ("bench" if named else own) or not plan.has(part):
            continue
        if family in _FLASHINFER and not plan.rehearsal and not _has("flashinfer"):
            missing = "FlashInfer is not installed"
            steps.append(Step(f"bench {family}", (), 0, missing=missing))
            continue
        where = "rehearsal" if plan.rehearsal else "cuda"
        command = (sys.executable, "-m", "bench", "--device", where, "--only", family)
        limit = BENCH_LIMITS.get(family, 120)
        command = (*command, "--results", str(plan.results))
        steps.append(Step(f"bench {family}", command, limit, {"SPECOPS_CUDA": "ON"}))
    return steps


def _test_steps(plan: Plan) -> list[Step]:
    device = _device(plan)
    smoke = ("--smoke", device) if plan.rehearsal else ("-m", "not slow", "-k", device)
    pytest = (sys.executable, "-m", "pytest", *_pytest_plugins(), *smoke)
    steps = [Step("op tests", (*pytest, *(plan.tests or OP_TESTS)), 420, tests=True)]
    rest = [f"--ignore={path}" for path in OP_TESTS]
    if not plan.rehearsal and not plan.tests:
        steps.append(
            Step("engine tests", (*pytest, *rest, "tests", "tools/tests"), 240, tests=True)
        )
    return steps


def _pytest_plugins() -> tuple[str, ...]:
    """Return pytest options for parallel workers and per-test limits, if plugins are installed."""
    code = "import importlib.util as u; print(*(bool(u.find_spec(n)) for n in {names}))"
    names = ("xdist", "pytest_timeout")
    command = [sys.executable, "-c", code.format(names=names)]
    told = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    cores = len(os.sched_getaffinity(0))
    workers = ("-n", str(min(12, cores))) if told[0] == "True" else ()
    limit = ("--timeout", "120", "--timeout-method", "thread") if told[1] == "True" else ()
    return workers + limit


def _sanitizer_step(plan: Plan, tool: str) -> Step:
    """Return the smoke step: the first and last device case of every op test, under a sanitizer."""
    sanitizer = find_sanitizer()
    if sanitizer is None:
        return Step(tool, (), 0, missing="compute-sanitizer is not installed")
    command = (
        str(sanitizer),
        "--tool",
        tool,
        "--kernel-name",
        "kns=specops",
        "--print-limit",
        "20",
        "--error-exitcode",
        str(SANITIZER_ERROR),
        "--require-cuda-init",
        "no",
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "no:cacheprovider",
        "--smoke",
        _device(plan),
        *(plan.tests or OP_TESTS),
    )
    # PyTorch's memory pool would hide out-of-bounds accesses and reuse of old contents.
    return Step(tool, command, 170, {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}, tests=True)


def find_sanitizer() -> Path | None:
    """Find compute-sanitizer on the PATH, beside nvcc, or among installed wheels."""
    nvcc = find_nvcc()
    folders = [Path(found).parent] if (found := shutil.which("compute-sanitizer")) else []
    if nvcc is not None:
        root = toolkit_root(nvcc)
        folders += [nvcc.parent, root / "bin", root / "compute-sanitizer"]
    folders += [Path(site) / "nvidia" / "cu13" / "bin" for site in sys.path]
    return next((f / "compute-sanitizer" for f in folders if _runs(f / "compute-sanitizer")), None)


def _has(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def _runs(path: Path) -> bool:
    return path.is_file() and os.access(path, os.X_OK)
