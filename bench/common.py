# SPDX-License-Identifier: Apache-2.0
"""Tools of all benchmarks: alternating timings with the read bandwidth, and figures with bars.

A figure's `bar` is its required value. With `ratio >= x`, the ratio is how many times better we are
than the peer, or which fraction of a limit we reach. With `ratio <= x`, the ratio is our value over
the peer's. `value <= x` bounds our value alone. `limit` names what bounds the speed most, reading
or an instruction, and `of_limit` is the reached fraction of that bound (bench/limits.py). Memory
bandwidth drifts on shared machines. So cases alternate, the read bandwidth is measured right before
each case, and fractions of it are computed per round.
"""

import ctypes
import json
import operator
import os
import platform
import re
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

from tools.cuda_toolkit import gpu_names

BENCH = Path(__file__).resolve().parent
ROOT = BENCH.parent
WORK = BENCH / "work"
RESULTS = BENCH / "results"
PEER_PYTHON = BENCH / ".venv" / "bin" / "python"

READ_BYTES = 256 << 20
Result = TypeVar("Result")
BAR = re.compile(r"(value|ratio) (<=|>=|==) ([0-9.]+)")


@dataclass(frozen=True)
class Figure:
    """One measured figure: a line of the table, and an object of the results file."""

    id: str
    what: str
    value: float
    unit: str
    peer: str | None = None
    peer_value: float | None = None
    ratio: float | None = None
    bar: str | None = None
    met: bool | None = None
    threads: int | None = 1
    read_gb_s: float | None = None
    us: float | None = None
    spread: float | None = None
    limit: str | None = None
    of_limit: float | None = None


@dataclass
class Timing:
    """Seconds per call of each case by round, and the read bandwidth measured just before each."""

    seconds: dict[str, list[float]] = field(default_factory=dict)
    reads: dict[str, list[float]] = field(default_factory=dict)

    def median(self, case: str) -> float:
        """Return the median seconds of one call."""
        return median(self.seconds[case])

    def read_gb_s(self, *cases: str) -> float:
        """Return the median read bandwidth of these cases (by default, of all), in GB/s."""
        return median([x for case in cases or self.reads for x in self.reads[case]])

    def share(self, case: str, num_bytes: float) -> float:
        """Return the median over rounds of (bytes moved per second / read bandwidth)."""
        pairs = zip(self.seconds[case], self.reads[case], strict=True)
        return median([num_bytes * 1e-9 / seconds / read for seconds, read in pairs])

    def ratio(self, case: str, other: str) -> float:
        """Return the median over rounds of (time of `case` / time of `other` in the round)."""
        pairs = zip(self.seconds[case], self.seconds[other], strict=True)
        return median([a / b for a, b in pairs])


class Bench:
    """One run of the benchmarks: threads, read bandwidth and figures."""

    def __init__(self, num_threads: int, *, rehearsal: bool = False) -> None:
        """Prepare a run; a rehearsal runs every case once without peers, to test the code."""
        self.num_threads = num_threads
        self.rehearsal = rehearsal
        self.cpus = sorted(os.sched_getaffinity(0))
        self.figures: list[Figure] = []
        self.disturbed_windows = 0
        self.windows = 0
        self._peers: list[Peer] = []
        self._read = (lambda _: 1.0) if rehearsal else _read_line()

    def pick(self, real: Result, rehearsed: Result) -> Result:
        """Return `real`, or in a rehearsal the smaller `rehearsed`."""
        return rehearsed if self.rehearsal else real

    def read_gb_s(self, num_threads: int | None = None) -> float:
        """Measure the read bandwidth: read 256 MiB once, and return GB/s (10^9)."""
        return self._read(num_threads or self.num_threads)

    def alternate(
        self,
        cases: Mapping[str, Callable[[], object]],
        *,
        rounds: int = 9,
        window_s: float = 0.05,
    ) -> Timing:
        """Time the cases in turn, `rounds` times; each window runs a case for about `window_s`.

        A window in which other processes used over 5 % of this run's cores is repeated up to three
        times; the last result is used even if disturbed, and counted.
        """
        calls: dict[str, int] = {}
        for case, function in cases.items():
            if self.rehearsal:
                calls[case] = 1
                continue
            function()
            seconds = _timed(function, 1)
            calls[case] = max(1, min(1_000_000, round(window_s / max(seconds, 1e-7))))
            if calls[case] > 1000:
                calls[case] = max(1, round(window_s / _timed(function, 1000)))
        return self.rounds(
            {case: _window(function, calls[case]) for case, function in cases.items()},
            rounds=rounds,
        )

    def rounds(
        self, cases: Mapping[str, Callable[[], float]], *, rounds: int, guarded: bool = True
    ) -> Timing:
        """Run the cases in turn, `rounds` times, and measure the read bandwidth before each.

        Args:
            cases: functions that each return the seconds they took.
            rounds: number of runs of each case; 1 in a rehearsal.
            guarded: whether to repeat a run that other processes disturbed.
        """
        timing = Timing({case: [] for case in cases}, {case: [] for case in cases})
        for _ in range(self.pick(rounds, 1)):
            for case, window in cases.items():
                # Wait for OpenMP threads of the previous case, which spin for some milliseconds.
                time.sleep(0.015)
                timing.reads[case].append(self.read_gb_s())
                seconds = self.undisturbed(window) if guarded else window()
                timing.seconds[case].append(seconds)
        return timing

    def undisturbed(self, window: Callable[[], Result]) -> Result:
        """Run `window`; repeat it if other processes used over 5 % of the cores meanwhile."""
        if self.rehearsal:
            return window()
        for _ in range(3):
            self.windows += 1
            before, started = self._foreign_seconds(), time.perf_counter()
            result = window()
            elapsed = time.perf_counter() - started
            foreign = self._foreign_seconds() - before
            # /proc counts in steps of 10 ms, so less than three steps is noise.
            if foreign < max(0.03, 0.05 * elapsed * len(self.cpus)):
                return result
        self.disturbed_windows += 1
        return result

    def _foreign_seconds(self) -> float:
        """Return the CPU seconds that foreign processes (not peers) used on this run's cores."""
        names = {f"cpu{cpu}" for cpu in self.cpus}
        busy = 0
        for line in Path("/proc/stat").read_text().splitlines():
            name, *ticks = line.split()
            if name in names:
                user, nice, system, _, _, irq, softirq, steal = map(int, ticks[:8])
                busy += user + nice + system + irq + softirq + steal
        seconds = busy / os.sysconf("SC_CLK_TCK")
        # Time of ended children; the running children are peers.
        for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN):
            usage = resource.getrusage(who)
            seconds -= usage.ru_utime + usage.ru_stime
        return seconds - sum(peer.cpu_seconds() for peer in self._peers)

    def peer(self, name: str, *, own: bool = False) -> "Peer | None":
        """Start bench/peers/`name`.py in the peers' environment; return None if it cannot run.

        own: use this environment instead, to measure specops in a separate process.
        """
        if self.rehearsal and not own:
            return None
        try:
            peer = Peer(name, self.num_threads, own)
        except PeerError as error:
            print(f"  no {name}: {error}", flush=True)
            return None
        self._peers.append(peer)
        return peer

    def peer_versions(self) -> dict[str, str]:
        """Return the versions of the peers that this run has started."""
        return {peer.name: peer.version for peer in self._peers if not peer.own}

    def add(self, figure: Figure) -> None:
        """Compare a figure with its bar, record it and print it."""
        self.figures.append(judged(figure))
        print(format_row(self.figures[-1]), flush=True)

    def close(self) -> None:
        """Stop the peers that are still running."""
        for peer in self._peers:
            peer.close()


def judged(figure: Figure) -> Figure:
    """Return the figure with `met` set: whether it meets its bar."""
    if figure.bar is None:
        return figure
    match = BAR.match(figure.bar)
    assert match, f"{figure.id}: bar {figure.bar!r} does not start with `value|ratio <=|>=|== x`"
    subject = figure.value if match[1] == "value" else figure.ratio
    limit = float(match[3])
    compare = {"<=": operator.le, ">=": operator.ge, "==": operator.eq}[match[2]]
    met = subject is not None and compare(subject, limit)
    return Figure(**{**asdict(figure), "met": met})


class PeerError(Exception):
    """Error: a peer is not installed, or a request failed."""


class Peer:
    """A peer in its own process: it reads a JSON request per line, and answers it with one line."""

    def __init__(self, name: str, num_threads: int, own: bool = False) -> None:
        self.name, self.own = name, own
        if not own and not PEER_PYTHON.exists():
            raise PeerError("bench/.venv is missing; `make -C tools bench-peers` makes it")
        WORK.mkdir(exist_ok=True)
        self._log = (WORK / f"{name}.log").open("w")
        path = os.pathsep.join(sys.path) if own else ""
        self._process = subprocess.Popen(
            [sys.executable if own else PEER_PYTHON, BENCH / "peers" / f"{name}.py"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": str(num_threads), "PYTHONPATH": path},
        )
        self.version: str = self.ask("start", threads=num_threads)["version"]

    def ask(self, op: str, **arguments: Any) -> dict[str, Any]:
        """Send one request and wait for its answer."""
        assert self._process.stdin and self._process.stdout
        try:
            self._process.stdin.write(json.dumps({"op": op, **arguments}) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise PeerError(f"ended early, see {self._log.name}") from None
        line = self._process.stdout.readline()
        if not line:
            raise PeerError(f"ended early, see {self._log.name}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise PeerError(answer["error"])
        return answer

    def cpu_seconds(self) -> float:
        """Return the CPU time the peer has used so far (0 once it has ended)."""
        try:
            fields = Path(f"/proc/{self._process.pid}/stat").read_text().rsplit(")", 1)[1].split()
        except (OSError, IndexError):
            return 0.0
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def resident_gb(self) -> tuple[float, float]:
        """Return the peer's memory in GB: (anonymous pages, pages of files)."""
        return resident_gb(self._process.pid)

    def close(self) -> None:
        """End the peer's process."""
        if self._process.poll() is None:
            self._process.terminate()
            self._process.wait()
        self._log.close()


def resident_gb(pid: int) -> tuple[float, float]:
    """Return a process's memory in GB (10^9): (anonymous pages, pages of files)."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    sizes = {
        name: int(value.split()[0]) * 1024e-9
        for name, value in (line.split(":", 1) for line in lines)
        if name.startswith("Rss")
    }
    return sizes["RssAnon"], sizes["RssFile"] + sizes["RssShmem"]


def _window(function: Callable[[], object], calls: int) -> Callable[[], float]:
    return lambda: _timed(function, calls)


def _timed(function: Callable[[], object], calls: int) -> float:
    start = time.perf_counter()
    for _ in range(calls):
        function()
    return (time.perf_counter() - start) / calls


def host_library(name: str) -> ctypes.CDLL:
    """Load the library of bench/`name`.cpp; compile it for this CPU at the first use."""
    WORK.mkdir(exist_ok=True)
    source, library = BENCH / f"{name}.cpp", WORK / f"{name}.so"
    if not library.exists() or library.stat().st_mtime < source.stat().st_mtime:
        flags = ["-O3", "-march=native", "-std=c++20", "-shared", "-fPIC", "-pthread"]
        subprocess.run(["g++", *flags, str(source), "-o", str(library)], check=True)
    return ctypes.CDLL(str(library))


def _read_line() -> Callable[[int], float]:
    """Load read_bandwidth.cpp and initialize the memory that it reads."""
    function = host_library("read_bandwidth").read_gb_s
    function.restype = ctypes.c_double
    function.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_void_p]
    memory = ctypes.create_string_buffer(READ_BYTES)
    ctypes.memset(memory, 1, READ_BYTES)
    sink = ctypes.c_uint64()
    return lambda num_threads: float(function(memory, READ_BYTES, num_threads, ctypes.byref(sink)))


def _number(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}"


HEADER = (
    f"{'figure':34} {'value':>8} {'unit':9} {'peer':22} {'value':>8} {'ratio':>6}  "
    f"{'bar':16} {'met':4} {'thr':>3} {'read GB/s':>9}  of limit"
)


def format_row(figure: Figure) -> str:
    """Format one line of the table."""
    met = {None: "", True: "yes", False: "NO"}[figure.met]
    bar = (figure.bar or "").split(",")[0]
    limit = f"  {_number(figure.of_limit)} {figure.limit}" if figure.limit else ""
    return (
        f"{figure.id:34} {_number(figure.value):>8} {figure.unit:9} {figure.peer or '':22} "
        f"{_number(figure.peer_value):>8} {_number(figure.ratio):>6}  {bar:16} {met:4} "
        f"{figure.threads or '':>3} {_number(figure.read_gb_s):>9}{limit}"
    )


def machine() -> dict[str, Any]:
    """Return a description of the kind of machine, which does not identify the instance."""
    from specops import runtime  # tools.gpu_check imports us before specops is built

    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    cpu = runtime.get_cpu_name()
    return {"cpu": cpu, "cores": os.cpu_count(), "memory_gib": round(memory / 2**30)}


def cpu_results(cpu: str) -> Path:
    """Return the results file of a kind of CPU, such as bench/results/amd-epyc-family-26.json."""
    bare = re.sub(r"@.*|[(]R[)]|[(]TM[)]|CPU", " ", cpu)
    return RESULTS / f"{_file_name(bare)}.json"


def _file_name(words: str) -> str:
    return "-".join(re.findall("[a-z0-9]+", words.lower()))


def commit() -> str:
    """Return the measured commit; it ends in "-dirty" if tracked files have changed since.

    Changes in bench/results do not count. Without git, return the environment variable COMMIT, or
    "unknown".
    """
    return _head(ROOT) or os.environ.get("COMMIT") or "unknown"


@cache
def _head(root: Path) -> str:
    """Return git's HEAD; empty without git. Cached, because each figure is saved separately."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(root), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()

    changed = git("status", "--porcelain", "--untracked-files=no", "--", ":!bench/results")
    head = git("rev-parse", "--short=12", "HEAD")
    return f"{head}-dirty" if head and changed else head


def gpu_results(date: str) -> Path:
    """Return the GPU's results file of a day, such as bench/results/nvidia-h200-2026-11-21.json."""
    name = (gpu_names() or ["no gpu"])[0]
    return RESULTS / f"{_file_name(name)}-{date}.json"


def save(
    figures: Sequence[Figure],
    *,
    family: str,
    minutes: float,
    versions: Mapping[str, str],
    disturbed: str | None = None,
    command: str | None = None,
    on: Mapping[str, Any] | None = None,
    path: Path,
    notes: Mapping[str, str] | None = None,
) -> None:
    """Merge one family's figures into the results by id; remove figures that it no longer has.

    notes: figure id -> reason why the case is missing.
    """
    saved: dict[str, Any] = {"machine": {}, "runs": {}, "figures": []}
    if path.exists():
        saved = {**saved, **json.loads(path.read_text())}
    saved["machine"] = machine() if on is None else dict(on)
    saved["runs"][family] = {
        "commit": commit(),
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "command": command or f"make bench ONLY={family}",
        "on": str(saved["machine"].get("cpu") or saved["machine"].get("gpu")),
        "minutes": round(minutes, 1),
        **({} if disturbed is None else {"disturbed_windows": disturbed}),
        "versions": dict(versions),
    }
    fresh = {figure.id: asdict(figure) for figure in figures}
    old = {row["id"]: row for row in saved["figures"] if not row["id"].startswith(f"{family}.")}
    saved["figures"] = sorted({**old, **fresh}.values(), key=lambda row: row["id"])
    if notes is not None:
        others = {id: n for id, n in saved.get("notes", {}).items() if _family(id) != family}
        saved["notes"] = dict(sorted({**others, **notes}.items()))
    path.parent.mkdir(exist_ok=True)
    write_whole(path, json.dumps(saved, indent=1) + "\n")


def _family(id: str) -> str:
    return id.split(".")[0]


def write_whole(path: Path, text: str) -> None:
    """Write a file atomically, so that a killed process leaves the previous version."""
    new = path.with_name(path.name + ".new")
    new.write_text(text)
    new.replace(path)


def versions(*modules: str) -> dict[str, str]:
    """Return the versions of Python and of imported modules."""
    found = {name: str(getattr(sys.modules.get(name), "__version__", "")) for name in modules}
    return {"python": platform.python_version(), **{k: v for k, v in found.items() if v}}
