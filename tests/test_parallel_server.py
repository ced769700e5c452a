# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: E402  (where the server's packages are missing, nothing else is imported)
"""A server over ranks in processes: the answers of one engine, and recovery from deaths."""

import fcntl
import json
import os
import signal
import socket
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

for name in ("fastapi", "uvicorn", "pydantic", "msgspec", "prometheus_client", "jinja2", "httpx"):
    pytest.importorskip(name)

from mtp_checkpoints import make_mtp_model
from server_pairs import children_of
from serving import Served, serving, wait_for
from specops.api.messages import Abort, Overdue, Stop
from specops.engine import Engine, EngineConfig
from specops.service import lockstep
from specops.service.lockstep import FollowInbox
from specops.service.process import ENGINE_TIMEOUT, EngineProcess
from specops.service.wire import Frames, Setup, StepCommands, encoded
from test_server_process import BODIES, STRUCTURED, Apart, answer_of, is_running, serving_apart

pytestmark = pytest.mark.ci


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return {
        "model": str(make_mtp_model(tmp_path_factory.mktemp("model"))),
        "device": "cpu",
        "num_threads": 1,
        "served_model_name": "tiny",
        "speculative_config": json.dumps({"method": "ngram", "num_speculative_tokens": 4}),
        "methods": ["mtp"],
        "num_pages": 512,
        "seed": 5,
    }


@pytest.fixture(scope="module")
def apart(settings: dict[str, Any]) -> Iterator[Apart]:
    with serving_apart(settings | {"tensor_parallel_size": 2}) as one:
        yield one


@pytest.fixture(scope="module")
def together(settings: dict[str, Any]) -> Iterator[Served]:
    with serving(Engine(EngineConfig.from_plain(settings | {"exact_across_tp": 2}))) as one:
        yield one


def test_answers_are_those_of_one_engine(apart: Apart, together: Served) -> None:
    """This includes requests without a seed, because both servers draw seeds from the same seed."""
    for body in BODIES + [{"seed": None}] * 3:
        assert answer_of(apart.url, body) == answer_of(together.url, body), body
    apart.wait_until_idle()


def test_constrained_answers_are_the_same(apart: Apart, together: Served) -> None:
    """Each rank compiles the grammar, and the job is added when all ranks have it."""
    pytest.importorskip("llguidance")
    for body in STRUCTURED:
        assert answer_of(apart.url, body) == answer_of(together.url, body), body


def test_first_rank_decides_that_a_grammar_takes_too_long() -> None:
    """Ranks compile at different speeds, but must refuse the same jobs before the same step."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        inbox = FollowInbox(theirs, Frames())
        inbox.put(Overdue(1))
        ours.sendall(encoded(StepCommands(encoded(Overdue(2)) + encoded(Abort(3)))))
        assert list(inbox.take(None)) == [Overdue(2), Abort(3)]


def test_killed_rank_restarts_all_ranks(apart: Apart, together: Served) -> None:
    _, expected = answer_of(together.url, BODIES[0])
    first = apart.client.pid
    (follower,) = children_of(first)
    os.kill(follower, signal.SIGKILL)
    wait_for(lambda: not is_running(first) and not is_alive(follower))
    wait_for(lambda: apart.health() == (200, "ok"))
    assert answer_of(apart.url, BODIES[0])[1]["choices"] == expected["choices"]
    second = apart.client.pid
    (follower,) = children_of(second)
    assert second is not None
    os.kill(second, signal.SIGKILL)
    wait_for(lambda: not is_alive(follower))
    assert not list(Path(tempfile.gettempdir()).glob(f"specops-ranks-{second}-*"))


def test_folders_of_killed_ranks_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Folders of living ranks, which hold a lock, and of starting ranks stay, and so do links."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    hour, week = 3600.0, 7 * 86400.0
    folders = {  # age, and whether there is the file that the first rank locks
        "left": (hour, True),
        "locked": (hour, True),
        "new": (0.0, True),
        "old-without": (week, False),
        "without": (hour, False),
    }
    for name, (age, has_owner) in folders.items():
        folder = tmp_path / f"specops-ranks-{name}"
        folder.mkdir()
        (folder / "meeting").touch()
        if has_owner:
            (folder / "owner").touch()
        os.utime(folder, 2 * (time.time() - age,))
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "specops-ranks-link").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "specops-ranks-file").touch()
    with (tmp_path / "specops-ranks-locked/owner").open("w") as owner:
        fcntl.flock(owner, fcntl.LOCK_EX)
        lockstep.remove_abandoned_folders()
    left = {one.name.removeprefix("specops-ranks-") for one in tmp_path.iterdir()}
    assert left == {"locked", "new", "without", "elsewhere", "link", "file"}


def test_rank_that_ends_on_request_is_not_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank that was asked to end may do so before the first rank does."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    settings = {"tensor_parallel_size": 2, "device": "cpu"}
    ends, lost = [], list[str]()

    class Rank:
        def __init__(self, setup: Setup) -> None:
            self.connection, theirs = socket.socketpair()
            ends.append(theirs)

        def end(self, seconds: float) -> str:
            return "exit status 0"

    monkeypatch.setattr(lockstep, "EngineProcess", Rank)
    for commands in ([Abort(1)], [Abort(1), Stop()]):
        followers = lockstep.Followers(Setup(settings, "error"), lost.append)
        followers.forward(commands)
        ends.pop().close()
        followers._watcher.join()
    assert lost == ["rank 1 has ended (exit status 0)"]


@pytest.mark.slow
def test_hanging_rank_is_noticed_without_requests(apart: Apart, together: Served) -> None:
    """The other ranks wait for it, so they give no sign of life either."""
    wait_for(lambda: apart.health() == (200, "ok"))
    first, apart.client._num_deaths = apart.client.pid, 0
    (follower,) = children_of(first)
    os.kill(follower, signal.SIGSTOP)
    wait_for(lambda: apart.client.silent_seconds > 3.0)  # an idle engine beats every second
    apart.client._timeout = 0.1
    wait_for(lambda: not is_running(first) and not is_alive(follower))
    apart.client._timeout = ENGINE_TIMEOUT
    wait_for(lambda: apart.health() == (200, "ok"))
    _, expected = answer_of(together.url, BODIES[0])
    assert answer_of(apart.url, BODIES[0])[1]["choices"] == expected["choices"]


def is_alive(pid: int) -> bool:
    """Return whether a process runs, and is not a zombie that its parent has not reaped."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.slow
def test_errors_of_starting_ranks_are_reported(settings: dict[str, Any]) -> None:
    """Both ranks find the error, and one reports it."""
    sizes = {"tensor_parallel_size": 2, "exact_across_tp": 8}
    started = EngineProcess(Setup(settings | sizes, "error"))
    with pytest.raises(ValueError, match="exact_across_tp must divide the 4 heads of queries"):
        started.hello()
    started.end()
