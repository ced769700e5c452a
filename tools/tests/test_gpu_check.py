# SPDX-License-Identifier: Apache-2.0
"""`make gpu-check` without a GPU: steps, arithmetic, files, and rehearsals of its benches."""

import json
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from serving import wait_for
from shared_fixtures import keep_smoke

from bench import common
from bench.__main__ import CUDA_FAMILIES
from bench.cuda import CudaBench
from tools.gates.kernels import cmake_list
from tools.gpu_check import __main__ as gpu_check
from tools.gpu_check import held_back, prebuilt, report, results, runner, steps
from tools.gpu_check.goals import GOALS, verdict
from tools.gpu_check.prebuilt import Refused
from tools.gpu_check.predictions import Prediction, read_predictions
from tools.gpu_check.runner import Outcome
from tools.gpu_check.steps import Plan, Step

pytestmark = pytest.mark.ci

ROOT = Path(__file__).resolve().parents[2]


def test_every_family_is_a_step() -> None:
    assert set(CUDA_FAMILIES) == set(steps.BENCH_LIMITS)


def test_the_check_starts_before_anything_is_built_or_installed() -> None:
    code = """
import runpy, sys
sys.modules.update(dict.fromkeys(["specops", "torch", "numpy"]))
sys.argv = ["gpu_check", "--help"]
runpy.run_module("tools.gpu_check", run_name="__main__")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0 and "--rehearsal" in done.stdout, done.stderr


def optional_packages() -> list[str]:
    """Return the packages of pyproject.toml's extras that the GPU check does not require.

    The names are those to import.
    """
    text = (ROOT / "pyproject.toml").read_text()
    extras = text.partition("[project.optional-dependencies]")[2].partition("\n\n")[0]
    named = re.findall(r'"([\w-]+)[^"]*"', extras)
    imported = {name.replace("-", "_") for name in named} - {"pyyaml", "pyzmq", "specops"}
    imported |= {"yaml", "zmq"}
    return sorted(imported - set(gpu_check.REQUIRED.split()))


@pytest.mark.slow
def test_the_tests_can_be_read_without_what_the_check_does_not_ask_for() -> None:
    """Every test file can be imported without the packages that the GPU check does not require.

    An import error in one file would end the run of pytest before its first test.
    """
    missing = optional_packages()
    assert {"fastapi", "uvicorn", "httpx", "prometheus_client", "yaml"} <= set(missing)
    code = f"""
import importlib, pathlib, sys
sys.modules.update(dict.fromkeys({missing!r}))
root = pathlib.Path({str(ROOT)!r})
folders = [root / "tests", root / "tools" / "tests"]
sys.path[:0] = [*map(str, folders), str(root)]
import pytest
for path in sorted(path for folder in folders for path in folder.glob("test_*.py")):
    try:
        importlib.import_module(path.stem)
        print(path.name, "imported")
    except pytest.skip.Exception as skipped:
        print(path.name, skipped)
    except ImportError as error:
        print(path.name, "FAILED", error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    told = dict(line.split(" ", 1) for line in done.stdout.splitlines())
    assert {f"test_{name}.py" for name in ("contract", "attention", "engine_suffix")} <= {
        name for name, what in told.items() if what == "imported"
    }
    assert "could not import 'fastapi'" in told["test_server.py"]
    assert not [f"{name}: {what}" for name, what in told.items() if what.startswith("FAILED")]


def command(code: str) -> tuple[str, ...]:
    return (sys.executable, "-c", code)


def test_steps_end_as_they_should(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "LOGS", tmp_path)
    good = runner.run(Step("good", command("print('fine')"), 60), 60)
    assert (good.status, good.summary) == ("ok", "fine")
    bad = runner.run(Step("bad", command("raise SystemExit('no')"), 60), 60)
    assert (bad.status, bad.summary) == ("failed", "no")
    gone = runner.run(Step("tool", (), 60, missing="it is not installed"), 60)
    assert (gone.status, gone.summary) == ("not run", "it is not installed")
    assert runner.run(Step("late", command(""), 60), 3).summary == "no time left"


def test_a_step_and_all_it_started_end_at_the_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The time limit expires when the step has started its child process; both must end."""
    code = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"])
print(child.pid, flush=True)
child.wait()
"""

    class Started(subprocess.Popen[bytes]):
        def wait(self, timeout: float | None = None) -> int:
            if timeout is not None:
                wait_for(lambda: "\n" in (tmp_path / "slow.log").read_text())
                timeout = 0.0
            return super().wait(timeout)

    monkeypatch.setattr(runner, "LOGS", tmp_path)
    monkeypatch.setattr(subprocess, "Popen", Started)
    slow = runner.run(Step("slow", command(code), 60), 60)
    assert slow.status == "timed out"
    state = Path(f"/proc/{slow.summary}/stat")

    def has_ended() -> bool:
        try:
            return state.read_text().rsplit(")", 1)[1].split()[0] in "ZX"
        except (FileNotFoundError, ProcessLookupError):  # between two looks at it
            return True

    wait_for(has_ended)


@pytest.mark.parametrize(
    ("code", "text", "status", "summary"),
    [
        (0, "....\n12 passed, 3 skipped in 4.0s\n", "ok", "12 passed, 3 skipped"),
        (1, "1 failed, 12 passed in 4.0s\n", "failed", "1 failed, 12 passed"),
        (0, "12 skipped, 5 deselected in 1.0s\n", "failed", "nothing passed: 12 skipped"),
        (5, "no tests ran in 1.0s\n", "failed", "no tests ran in 1.0s"),
        (None, "....", "timed out", "...."),
        (
            None,
            "..\n========= Invalid __global__ read of size 4 bytes\n..",
            "failed",
            "its time was up; 1 reports, first: Invalid __global__ read of size 4 bytes",
        ),
        (
            9,
            "12 passed in 4.0s\n========= ERROR SUMMARY: 2 errors\n",
            "failed",
            "12 passed; ERROR SUMMARY: 2 errors",
        ),
        (1, "Device not supported\n", "not run", "compute-sanitizer does not support this machine"),
    ],
)
def test_what_a_test_run_amounts_to(code: int | None, text: str, status: str, summary: str) -> None:
    assert runner.judge(Step("tests", ("x",), 1, tests=True), code, text) == (status, summary)


def test_the_whole_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """After a failed step the others run; the files, the table and the exit code report it."""
    path = tmp_path / "results" / "gpu.json"
    figures = [
        common.judged(common.Figure("x.a", "a", 1.0, "us", ratio=2.0, bar="ratio >= 1")),
        common.judged(common.Figure("x.b", "b", 9.0, "us", bar="value <= 8")),
    ]
    planned = [
        Step("first", command("raise SystemExit(3)"), 60),
        Step("second", command("print('done')"), 60),
    ]
    monkeypatch.setattr(runner, "LOGS", tmp_path / "logs")
    monkeypatch.setattr(steps, "all_steps", lambda _: planned)
    monkeypatch.setattr(results, "results_path", lambda _: path)
    monkeypatch.setattr(results, "commit", lambda: "abc")
    monkeypatch.setattr(common, "commit", lambda: "abc")
    arguments = ["--rehearsal", "--out", str(tmp_path / "out")]
    assert gpu_check.main(arguments) == 1
    common.save(figures, family="x", minutes=0.1, versions={}, on={"gpu": "none"}, path=path)
    planned[0] = Step("first", command("print('better')"), 60)
    assert gpu_check.main(arguments) == 0
    printed = capsys.readouterr().out
    assert "1 of 2 bars met" in printed and "second" in printed.splitlines()[-1]
    saved = json.loads((tmp_path / "out" / "gpu.json").read_text())
    assert saved["machine"] == {"gpu": "none"} and len(saved["figures"]) == 2
    assert saved["checks"]["first"]["status"] == "ok" and saved["runs"]["x"]["commit"] == "abc"
    assert "better" in (tmp_path / "out" / "gpu-check.log").read_text()
    assert "| first | ok |" in (tmp_path / "out" / "gpu.md").read_text()


@pytest.mark.slow
def test_a_rehearsal_of_everything(tmp_path: Path) -> None:
    """Every step of `make gpu-check` succeeds on the CPU, except those that need GPU tools."""
    command = [sys.executable, "-m", "tools.gpu_check", "--rehearsal", "--out", str(tmp_path)]
    parts = ",".join(part for part in steps.PARTS if part != "sanitize")
    done = subprocess.run([*command, "--part", parts], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:]
    saved = json.loads((tmp_path / "rehearsal.json").read_text())
    assert {f"bench {family}" for family in CUDA_FAMILIES} < set(saved["checks"])
    assert all(check["status"] == "ok" for check in saved["checks"].values())
    text = (tmp_path / "rehearsal.md").read_text()
    assert all(f"| {goal.id} |" in text for goal in GOALS) and "NOT reached" not in text


def test_a_failed_build_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """If a prebuilt folder is refused, the table shows the reason."""
    monkeypatch.setattr(runner, "LOGS", tmp_path / "logs")
    monkeypatch.setattr(results, "results_path", lambda _: tmp_path / "gpu.json")
    assert gpu_check.main(["--rehearsal", "--prebuilt", str(tmp_path / "none")]) == 1
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("build") and "has no built.json" in last


def names(*parts: str, only: Sequence[str] = (), **more: object) -> list[str]:
    plan = Plan(parts, tuple(only), Path("r.json"), False, **more)  # type: ignore[arg-type]
    return [step.name for step in steps.all_steps(plan)]


def test_what_tells_most_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "find_sanitizer", lambda: Path("/x/compute-sanitizer"))
    everything = names()
    order = ["build", "bench facts", "numerics", "bench ablations", "bench attention"]
    places = [everything.index(name) for name in order]
    assert places == sorted(places) and places[0] == 0
    assert everything[-3:] == list(steps.TOOLS)
    assert {f"bench {family}" for family in CUDA_FAMILIES} <= set(everything)
    assert len(set(everything)) == len(everything)
    # Without the build, the steps before the first figures take at most ten minutes.
    plan = Plan((), (), Path("r.json"), False)
    limits = {step.name: step.limit_s for step in steps.all_steps(plan)}
    assert sum(limits[name] for name in ("bench facts", "numerics", "bench ablations")) <= 600


def test_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "find_sanitizer", lambda: Path("/x/compute-sanitizer"))
    everything = names()
    for part in steps.PARTS:
        assert names(part)[0] == "build" and set(names(part)) < set(everything)
    assert sorted({name for part in steps.PARTS for name in names(part)}) == sorted(everything)
    assert names("bench", only=["linear", "binding"]) == ["build", "bench linear", "bench binding"]
    # `only` may name a family of another part.
    assert names("bench", only=["facts"]) == ["build", "bench facts"]
    assert names("peers", "facts") == [
        "build",
        "bench facts",
        "bench cascade",
        "bench attention_peers",
        "bench sampling_peers",
    ]
    assert "memcheck" in names("sanitize") and "engine tests" in names("tests")
    use = steps.all_steps(Plan(("facts",), (), Path("r.json"), False, Path("/brought")))[0]
    assert use.name == "build" and use.command[-2:] == ("use", "/brought")
    with pytest.raises(SystemExit):
        gpu_check.main(["--part", "nonsense"])


def preset_steps(number: str, *more: str) -> list[Step]:
    asked = gpu_check._parsed(["--preset", number, *more])
    return steps.all_steps(gpu_check.planned(asked, Path("r.json")))


def test_presets_fit_half_an_hour_of_ten_minutes_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """No step needs more time than its preset has, and the first steps have all of theirs."""
    monkeypatch.setattr(steps, "find_sanitizer", lambda: Path("/x/compute-sanitizer"))
    monkeypatch.setattr(steps, "_has", lambda _: False)
    budgets = [preset.budget_s for preset in steps.PRESETS.values()]
    starts_s = 60  # of a machine, before each call
    assert max(budgets) <= 600 - 30 and sum(budgets) + starts_s * len(budgets) <= 30 * 60
    certain = {
        "1": ["build", "bench facts", "numerics"],
        "2": ["build", "bench attention", "bench sampling", "bench recorded", "bench linear"],
        "3": [f"bench {name}" for name in ("quantized", "moe", "long", "prefill", "latent")],
    }
    for number, preset in steps.PRESETS.items():
        planned = preset_steps(number, *(["--prebuilt", "pre"] if number != "1" else []))
        limits = {step.name: step.limit_s for step in planned}
        assert len(limits) == len(planned) and set(preset.limits) <= set(limits)
        assert all(limit <= preset.budget_s for limit in limits.values())
        assert sum(limits[name] for name in certain[number]) <= preset.budget_s
        assert all((ROOT / file).exists() for file in preset.tests)


def test_presets_run_what_matters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "find_sanitizer", lambda: Path("/x/compute-sanitizer"))
    monkeypatch.setattr(steps, "_has", lambda _: False)
    everything = {number: [step.name for step in preset_steps(number)] for number in steps.PRESETS}
    assert everything["1"] == ["build", "bench facts", "numerics", "op tests"]
    assert everything["3"][-3:] == ["memcheck", "racecheck", "bench attention_peers"]
    named = {name.removeprefix("bench ") for names in everything.values() for name in names}
    deciding = {goal.figures.partition("\\.")[0] for goal in GOALS}
    assert deciding - {"cascade"} <= named  # FlashInfer's cascades need minutes to compile
    regimes = {"quantized", "moe", "latent", "linear_attention", "prefill", "long"}
    assert regimes <= named and regimes <= set(CUDA_FAMILIES)
    # All modules and variants come from one build, which later calls find again.
    build = preset_steps("1", "--out", "/kept")[0]
    assert build.command[2:5] == ("tools.gpu_check.prebuilt", "make", "/kept/pre")
    assert build.command[-2:] == ("--variants", "--use")
    use = preset_steps("2", "--prebuilt", "/brought")[0]
    assert use.command[-2:] == ("use", "/brought")
    asked = gpu_check._parsed(["--preset", "2", "--budget", "100"])
    assert asked.budget == 100 and gpu_check._parsed(["--preset", "2"]).budget == 540
    (left_out,) = [step for step in preset_steps("3") if step.name == "bench attention_peers"]
    assert not left_out.command and left_out.missing == "FlashInfer is not installed"
    monkeypatch.setattr(steps, "_has", lambda _: True)
    assert preset_steps("3")[-1].command


def test_presets_of_the_document(capsys: pytest.CaptureFixture[str]) -> None:
    """docs/cuda.md names every preset, with arguments that are accepted."""
    text = (ROOT / "docs" / "cuda.md").read_text().partition("### A GPU for minutes only")[2]
    commands = re.findall(r"`python3 -m tools.gpu_check (--preset [^`]*)`", text)
    presets = [gpu_check._parsed(command.split()).preset for command in commands]
    assert presets == list(steps.PRESETS)
    with pytest.raises(SystemExit):
        gpu_check.main(["--preset", "1", "--part", "facts"])
    assert "--preset sets --part and --only itself: leave them out" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("number", steps.PRESETS)
def test_a_rehearsal_of_a_preset(number: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tools.gpu_check", "--rehearsal", "--preset", number]
    done = subprocess.run(
        [*command, "--budget", "3600", "--out", str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-3000:]
    checks = json.loads((tmp_path / "rehearsal.json").read_text())["checks"]
    assert {step.name for step in preset_steps(number, "--rehearsal")} <= set(checks)
    ended = {name: check["status"] for name, check in checks.items()}
    assert {name for name, status in ended.items() if status != "ok"} <= set(steps.TOOLS)


def test_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    report.print_table([Outcome("build", "ok", 1.0, "x")])
    assert capsys.readouterr().out.split() == [
        "step",
        "status",
        "s",
        "summary",
        "build",
        "ok",
        "1.0",
        "x",
    ]


def test_where_results_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(common, "gpu_names", lambda: ["NVIDIA H100 80GB HBM3"])
    path = common.gpu_results("2026-11-21")
    assert path == ROOT / "bench" / "results" / "nvidia-h100-80gb-hbm3-2026-11-21.json"
    monkeypatch.setenv("COMMIT", "abc")
    monkeypatch.setattr(common, "ROOT", Path("/"))
    assert common.commit() == "abc"


def test_smoke_takes_two_cases_of_a_test() -> None:
    def case(test: str, index: int, device: str, *marks: str) -> Any:
        return SimpleNamespace(
            nodeid=f"tests/test_x.py::{test}[{index}]",
            callspec=SimpleNamespace(params={"device": device}),
            get_closest_marker=lambda name: name in marks or None,
        )

    cases = [case("many", i, device) for i in range(4) for device in ("cpu", "simt", "cuda")]
    cases += [case("one", 0, "cpu"), case("one", 1, "cpu", "slow"), case("other", 0, "simt")]
    cases.append(
        SimpleNamespace(nodeid="tests/test_x.py::plain", get_closest_marker=lambda _: None)
    )
    dropped: list[Any] = []

    def kept(wanted: str) -> list[str]:
        items = list(cases)
        hook = SimpleNamespace(pytest_deselected=lambda items: dropped.extend(items))
        config: Any = SimpleNamespace(getoption=lambda _: wanted, hook=hook)
        keep_smoke(config, items)
        return [item.nodeid.split("::")[1] for item in items]

    assert kept("cpu") == ["many[0]", "many[3]", "one[0]"]
    assert len(dropped) == len(cases) - 3
    assert kept("cpu:first") == ["many[0]", "one[0]"]
    assert kept("simt:last") == ["many[3]", "other[0]"]
    assert kept("") == [item.nodeid.split("::")[1] for item in cases]


# Prebuilt modules


@pytest.fixture
def brought(tmp_path: Path) -> tuple[Path, Path]:
    """Return a source tree and a folder of modules built from it."""
    root, folder = tmp_path / "tree", tmp_path / "brought"
    for name in ("csrc/a/b.cu", "CMakeLists.txt", "bench/read_bandwidth.cu", "bench/gpu_facts.cu"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(name)
    folder.mkdir()
    for name in (f"_C{prebuilt.SUFFIX}", f"_simt{prebuilt.SUFFIX}", "gpu_facts_cuda.so"):
        (folder / name).write_bytes(name.encode())
    prebuilt.pack(folder)
    prebuilt.stamp(folder, ["80", "90a"], root)
    return folder, root


def test_built_modules_are_used_by_what_they_were_built_from(brought: tuple[Path, Path]) -> None:
    folder, root = brought
    assert len(prebuilt.check(folder, ["90a"], root).files) == 3
    # Only the content counts, not the time stamps.
    (root / "csrc/a/b.cu").touch()
    (folder / "gpu_facts_cuda.so.gz").touch()
    prebuilt.check(folder, ["90a"], root)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("source", "was built from other sources than stand here: build it again"),
        ("new file", "was built from other sources than stand here: build it again"),
        ("arch", "is built for sm_80 90a, this GPU is sm_120"),
        ("python", "is for Python .cpython-27.so, this one is"),
        ("damaged", "gpu_facts_cuda.so.gz is not the file that was built"),
        ("gone", "is not the file that was built"),
        ("no module", "holds no _C"),
        ("no stamp", "has no built.json"),
    ],
)
def test_built_modules_that_do_not_fit_are_refused(
    brought: tuple[Path, Path], change: str, said: str
) -> None:
    folder, root = brought
    stamp = folder / prebuilt.STAMP
    archs = ["120"] if change == "arch" else ["90a"]
    if change == "source":
        (root / "csrc/a/b.cu").write_text("another")
    elif change == "new file":
        (root / "csrc/a/c.cuh").write_text("")
    elif change == "python":
        stamp.write_text(json.dumps(json.loads(stamp.read_text()) | {"suffix": ".cpython-27.so"}))
    elif change == "damaged":
        (folder / "gpu_facts_cuda.so.gz").write_bytes(b"half")
    elif change == "gone":
        (folder / f"_simt{prebuilt.SUFFIX}.gz").unlink()
    elif change == "no module":
        (folder / f"_C{prebuilt.SUFFIX}.gz").unlink()
        prebuilt.stamp(folder, ["90a"], root)
    elif change == "no stamp":
        stamp.unlink()
    with pytest.raises(Refused, match=said):
        prebuilt.check(folder, archs, root)


def test_built_modules_are_copied_to_where_they_are_looked_for(
    brought: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, root = brought
    sources = prebuilt.sources_hash(root)
    monkeypatch.setattr(prebuilt, "sources_hash", lambda *_: sources)
    places = {name: tmp_path / "used" / name for name in prebuilt.PLACES}
    copied = prebuilt.use(folder, ["90a"], places)
    assert sorted(path.parent.name for path in copied) == ["_C", "_simt", "gpu_facts_cuda"]
    assert all(path.read_bytes() == path.name.encode() for path in copied)


def test_what_is_too_large_to_be_kept_is_refused(
    brought: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, _ = brought
    prebuilt.print_sizes(folder)
    told = capsys.readouterr().out
    assert len(told.splitlines()) == 4 and "0.00 MiB  built.json" in told
    with (folder / "gpu_facts_cuda.so.gz").open("ab") as file:
        file.truncate((16 << 20) + 1)
    limits = {"max_mib": 16.0, "max_files": 5}
    with pytest.raises(Refused, match="larger than 16 MiB"):
        prebuilt.print_sizes(folder, **limits)
    prebuilt.print_sizes(folder)  # nothing is asked for
    capsys.readouterr()
    # The program prints all sizes first, and the reason last.
    monkeypatch.setattr(prebuilt, "make", lambda *_, **__: None)
    assert prebuilt.main(["make", str(folder), "--max-mib", "16"]) == 1
    *sizes, last = capsys.readouterr().out.splitlines()
    assert last.endswith(
        "gpu_facts_cuda.so.gz is larger than 16 MiB"
    ) and "16.00 MiB  gpu_facts" in "".join(sizes)
    (folder / "gpu_facts_cuda.so.gz").write_text("")
    for name in "ab":
        (folder / name).touch()
    with pytest.raises(Refused, match="has 6 files, the most is 5"):
        prebuilt.print_sizes(folder, **limits)


def test_the_build_there_is_of_what_runs_there() -> None:
    build = steps.all_steps(Plan(("facts",), (), Path("r.json"), False))[0]
    assert build.env["SPECOPS_ISAS"] == "native"
    # Without compressed machine code, a build would be too large to copy.
    assert "-Xfatbin -compress-all" in " ".join(cmake_list("SPECOPS_NVCC_FLAGS"))


# Goals, reasons, the report


def figure(id: str, us: float = 10.0, ratio: float | None = None, peer: str = "") -> dict:
    row = common.Figure(id, id, us, "us", ratio=ratio, us=us, peer=peer or None)
    return {**vars(row)}


def by_id(*rows: dict) -> dict[str, dict]:
    return {row["id"]: row for row in rows}


def test_every_goal_is_decided_by_figures_that_exist() -> None:
    """A rehearsal has the figure ids of a real run, except for loads of sampling and cascade."""
    import test_cuda_benches

    ids: set[str] = set()
    for family in ("attention", "exactness", "cascade", "attention_peers", "recorded", "linear"):
        ids |= {figure.id for figure in test_cuda_benches.rehearse(family).figures}
    ids |= {"sampling.verify.bf16.b256.greedy"}
    decided = {goal.id: sum(bool(re.fullmatch(goal.figures, id)) for id in ids) for goal in GOALS}
    assert list(decided) == [f"G{number}" for number in range(1, 11)]
    assert decided == {
        **{"G1": 5 * 2 * 4, "G2": 5 * 2, "G3": 4, "G4": 22, "G5": 2, "G6": 1, "G7": 1},
        **{"G8": 3 * 2 + 2, "G9": 6, "G10": 5 * 2 * 4},
    }


def test_verdicts() -> None:
    goal = {goal.id: goal for goal in GOALS}
    rows = by_id(
        figure("attention.b32.4k.g4.q1", ratio=0.9),
        figure("attention.b8.4k.g8.q8", ratio=0.7),
        figure("attention.b32.skewed.g4.q1", ratio=0.1),
        figure("attention.b1.4k.g4.q5", us=9.0),
        figure("attention_peers.b1.4k.g4.q1", ratio=2.0, peer="FlashInfer XQA"),
        figure("attention_peers.b8.4k.g4.q1", ratio=0.5, peer="FlashInfer fa2"),
    )
    said = verdict(goal["G1"], rows, {}, "NVIDIA H200")
    assert (said.value, said.reached, said.decisive) == (0.7, False, "attention.b8.4k.g8.q8")
    del rows["attention.b8.4k.g8.q8"]
    assert verdict(goal["G1"], rows, {}, "NVIDIA H200").reached is True
    assert verdict(goal["G3"], rows, {}, "NVIDIA H200").reached is True
    said = verdict(goal["G3"], rows, {}, "NVIDIA A100")
    assert said.reached is None and said.value == 9.0 and said.reason == "a bar for H200"
    # A goal in microseconds applies only to GPUs of one bandwidth.
    assert verdict(goal["G3"], rows, {}, "NVIDIA H100 80GB HBM3").reached is None
    six = by_id(figure("sampling.verify.bf16.b256.greedy", us=112.0))
    assert verdict(goal["G6"], six, {}, "NVIDIA H100 80GB HBM3").reached is None
    assert verdict(goal["G6"], six, {}, "NVIDIA H200").reached is False
    # Every GPU has a goal for the fraction of bandwidth; it is lower on other GPUs.
    assert verdict(goal["G1"], rows, {}, "NVIDIA A100").reached is None
    assert verdict(goal["G10"], rows, {}, "NVIDIA A100").reached is True
    said = verdict(goal["G10"], rows, {}, "NVIDIA H200")
    assert said.reached is None and said.reason == "a bar for others than H100 and H200"
    said = verdict(goal["G4"], rows, {}, "NVIDIA A100")
    assert said.value == pytest.approx(1.0) and said.decisive == "attention_peers.b8.4k.g4.q1"
    said = verdict(goal["G5"], rows, {"cascade": "no FlashInfer: x"}, "NVIDIA H200")
    assert said.reached is None and said.reason == "no FlashInfer: x"
    assert verdict(goal["G6"], rows, {}, "NVIDIA H200").reason == "not measured"
    # A ratio to a peer needs the peer. A rehearsal decides no goal.
    alone = by_id(figure("cascade.b32.2k.q1.peers", ratio=None))
    assert verdict(goal["G5"], alone, {}, "NVIDIA H200").value is None
    assert verdict(goal["G1"], rows, {}, "none").reached is None


def test_goals_are_the_published_ones() -> None:
    """The benches use the goals as their bars, on the GPUs to which a goal applies."""
    wanted = {goal.id: (goal.bar, goal.is_at_most, goal.whose) for goal in GOALS}
    hopper = "for H100 and H200"
    assert wanted == {
        **{"G1": (0.85, False, hopper), "G2": (1.10, True, hopper), "G3": (10, True, "for H200")},
        **{"G4": (1.0, False, "for all"), "G5": (1.3, False, "for all")},
        **{"G6": (90, True, "for H200"), "G7": (1.25, True, "for all")},
        **{"G8": (1.05, True, "for all"), "G9": (1.0, False, "for all")},
        "G10": (0.70, False, "for others than H100 and H200"),
    }
    bench = CudaBench("cpu")
    bench.gpu = "NVIDIA H200"
    assert [bench.goal(id) for id in ("G1", "G3", "G6", "G10")] == [
        "ratio >= 0.85",
        "value <= 10",
        "value <= 90",
        None,
    ]
    bench.gpu = "NVIDIA A100-SXM4-80GB"
    assert [bench.goal(id) for id in ("G1", "G3", "G9", "G10")] == [
        None,
        None,
        "ratio >= 1",
        "ratio >= 0.7",
    ]


@pytest.mark.parametrize(
    ("hot", "launch", "unsplit", "said"),
    [
        (50, 10, 90, "splitting: unsplit it takes 0.90 of the time"),
        (95, 10, 120, "instructions: with pages in the cache it takes 0.95 of the time"),
        (95, 40, None, "instructions: .* launch, plan and results alone 0.40"),
        (60, 30, None, "launch, plan and results: alone 0.30 of the time"),
        (60, 10, 99, "memory: with pages in the cache it takes 0.60 of the time"),
    ],
)
def test_what_holds_a_call_back(
    hot: float, launch: float, unsplit: float | None, said: str
) -> None:
    us = {"whole": 100.0, "hot": hot, "launch": launch, "unsplit": unsplit}
    rows = by_id(
        *(figure(f"ablations.b8.4k.g4.q8.{case}", us=took) for case, took in us.items() if took)
    )
    found = held_back.of_figure(rows, "attention.b8.4k.g4.q5")
    assert re.fullmatch(said, found)
    for id in (
        "attention.b8.4k.g4.q8_over_q1",
        "exactness.b8.4k.q5",
        "attention_peers.b8.4k.g4.q8",
    ):
        assert held_back.of_figure(rows, id) == found
    assert held_back.of_figure(rows, "attention.b8.4k.g8.q8") == ""  # not measured
    if hot >= 95:
        rows |= by_id(figure("ablations.b8.4k.g4.q8.no_mma", us=70.0))
        told = held_back.of_figure(rows, "attention.b8.4k.g4.q5")
        assert f"{hot / 100:.2f} of the time, without the tensor cores 0.70" in told
        del rows["ablations.b8.4k.g4.q8.no_mma"]
    phases = {"plan": 0.06, "item": 0.01, "load": 0.2, "stream": 0.5, "merge": 0.04, "idle": 0.19}
    stamped = [figure(f"ablations.b8.4k.g4.q8.{name}", ratio=x) for name, x in phases.items()]
    told = held_back.of_figure({**rows, **by_id(*stamped)}, "attention.b8.4k.g4.q5")
    assert told == f"{found}; its blocks' time: stream 0.50, load 0.20, idle 0.19, plan 0.06"


def test_what_holds_verification_back() -> None:
    prefix = "sampling.verify.bf16.b256"
    rows = by_id(
        figure(f"{prefix}.greedy", us=100),
        figure(f"{prefix}.greedy.read", ratio=0.7),
        figure(f"{prefix}.rejection", ratio=2.0),
        figure("facts.gap", us=1.5),
    )
    said = held_back.of_figure(rows, f"{prefix}.rejection")
    assert said == (
        "not memory: greedy reads at 0.70 of bandwidth; an empty kernel takes 1.5 us; "
        "rejection takes 2.00 times it"
    )
    rows[f"{prefix}.greedy.read"]["ratio"] = 0.9
    assert held_back.of_figure(rows, f"{prefix}.greedy").startswith("memory")


@pytest.mark.parametrize(
    ("scan", "leaf", "said"),
    [
        (45, 10, "choosing over the whole row: the scan 0.35, choosing over the whole row 0.55"),
        (90, 10, "the scan: the scan 0.80, choosing over the whole row 0.10"),
        (95, 60, "launch, choice and walk: the scan 0.35, choosing over the whole row 0.05"),
    ],
)
def test_what_holds_rejection_back(scan: float, leaf: float, said: str) -> None:
    us = {"whole": 100.0, "scan": scan, "leaf": leaf}
    rows = by_id(*(figure(f"ablations.verify.{case}", us=took) for case, took in us.items()))
    told = held_back.of_figure(rows, "recorded.verify.bf16.rejection")
    assert told == f"{said}, launch, choice and walk {leaf / 100:.2f} of the time"
    assert held_back.of_figure({}, "recorded.verify.bf16.rejection") == ""
    shares = {"scan": 0.3, "choose": 0.66, "walk": 0.04}
    stamped = [figure(f"ablations.verify.blocks.{phase}", ratio=x) for phase, x in shares.items()]
    full = held_back.of_figure({**rows, **by_id(*stamped)}, "recorded.verify.bf16.rejection")
    assert full == f"{told}; its blocks' time: choose 0.66, scan 0.30"
    for row in rows.values():
        row["ratio"] = row["us"] / 100
    text = "\n".join(report.lines({"figures": list(rows.values())}, []))
    assert "## Ablations of verify" in text and "## Ablations and phases" not in text


def test_the_report() -> None:
    rows = [
        figure("attention.b8.4k.g4.q8", us=80.0, ratio=0.4),
        figure("facts.read", us=1.0),
        *(
            figure(f"ablations.b8.4k.g4.q8.{case}", us=us, ratio=us / 80)
            for case, us in {"whole": 80.0, "hot": 79.0, "launch": 8.0, "stream": 48.0}.items()
        ),
    ]
    found = {"check": "interpreter", "cases": 9, "equal": 8, "worst": 0.5, "remark": "odd"}
    saved = {
        "machine": {"gpu": "NVIDIA H200", "driver": "1"},
        "figures": rows,
        "notes": {"attention_peers.b8.4k.g4.q1.fa3": "RuntimeError: no | pipes"},
        "numerics": {"interpreter: linear": {**found, "passed": False}},
        "checks": {"build": {"status": "ok", "seconds": 1.0, "commit": "abc", "summary": "done"}},
    }
    said = Prediction("G1", "attention.b8.4k.g4.q8", "us", {"H200": 40.0, "H100": 60.0})
    text = "\n".join(report.lines(saved, [said]))
    assert text.startswith("# GPU check: NVIDIA H200")
    goal = next(line for line in text.splitlines() if line.startswith("| G1 | append"))
    assert "NOT reached" in goal and "instructions: with pages in the cache" in goal
    assert "its blocks' time: stream 0.60" in goal
    assert "| b8.4k.g4.q8 | 80.0 | 0.99 |  | 0.10 |  |  |  |  | 0.60 |  |  | instructions" in text
    assert "attention.b8.4k.g4.q8 (80 us, predicted 40)" in goal
    assert "| G1 | attention.b8.4k.g4.q8 | us | 40 | 80 | 2.00 |" in text
    assert "| interpreter: linear | 8 of 9 | 5.0e-01 | odd |" in text
    assert "| RuntimeError: no / pipes | attention_peers.b8.4k.g4.q1.fa3 |" in text
    assert text.count("not decided") == 9


def test_a_report_is_about_its_own_card() -> None:
    """The report of a GPU shows only the predictions for that GPU."""
    said = Prediction("G6", "sampling.verify.bf16.b256.greedy", "us", {"H200": 95.0, "H100": 128.0})
    saved = {"machine": {}, "figures": [figure(said.figure, us=112.0)], "notes": {}}
    rows = {}
    for gpu in ("NVIDIA H100 80GB HBM3", "NVIDIA H200", "NVIDIA A100-SXM4-80GB"):
        saved["machine"] = {"gpu": gpu}
        text = "\n".join(report.lines(saved, [said]))
        rows[gpu[7:11]] = [line for line in text.splitlines() if line.startswith("| G6 |")]
    assert "not decided" in rows["H100"][0] and "a bar for H200" in rows["H100"][0]
    assert "predicted 128" in rows["H100"][0] and rows["H100"][1].endswith("| 128 | 112 | 0.88 |")
    assert "NOT reached" in rows["H200"][0] and rows["H200"][1].endswith("| 95 | 112 | 1.18 |")
    assert len(rows["A100"]) == 1 and "predicted" not in rows["A100"][0]


def test_the_predictions_of_the_document_are_read() -> None:
    said = read_predictions()
    assert {one.goal for one in said} == {goal.id for goal in GOALS}
    (greedy,) = [one for one in said if one.goal == "G6"]
    assert greedy.value_on("NVIDIA H100 80GB HBM3") == 116 and greedy.value_on("L40S") is None


def test_a_report_of_nothing() -> None:
    text = "\n".join(report.lines({}, []))
    assert text.count("not decided") == len(GOALS)
