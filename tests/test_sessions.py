# SPDX-License-Identifier: Apache-2.0

"""Sessions as files: a resumed conversation equals an uninterrupted one, bit for bit."""

import errno
import fcntl
import os
import queue
import random
import re
import struct
import subprocess
import sys
import zlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

import pytest

pytest.importorskip("msgspec")

import msgspec
from checkpoints import write_config
from engine_campaign import FAMILIES
from fake_engine import FakeEngine
from msgspec import structs
from ranks import on_ranks
from serving import HANG_SECONDS, USER, serving, wait_for
from specops.api.messages import Abort, Batch, Begin, Command, Output, Stop, Submit
from specops.disaggregated import session_file, session_inbox
from specops.disaggregated.session_file import Contents, SessionDirectory, SessionError
from specops.disaggregated.session_inbox import SessionInbox
from specops.disaggregated.sessions import Sessions
from specops.engine import Completion, Engine, SamplingParams
from specops.engine.prompt_pages import PagesEvicted
from specops.service.loop import EngineLoop
from test_kv_transfer import METHODS, NAIVE, make

GREEDY = SamplingParams(max_tokens=20, temperature=0.0, logprobs=2, seed=1)
SEEDED = replace(GREEDY, temperature=0.9, top_p=0.9, seed=7)
KINDS: dict[str, dict[str, Any]] = {
    "dense": {},
    "window": FAMILIES["gpt_oss"],
    "latent": FAMILIES["deepseek_v3"],
    "states": FAMILIES["qwen3_5"],
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    sizes = {"num_hidden_layers": 2, "max_position_embeddings": 192}
    return {
        kind: write_config(
            tmp_path_factory.mktemp(kind), **config | sizes, num_nextn_predict_layers=1
        )
        for kind, config in KINDS.items()
    }


def conversation(
    ask: Callable[[list[int], SamplingParams], Completion], params: SamplingParams
) -> list[tuple[Any, ...]]:
    """Hold a conversation of three turns, and repeat the last one; return all results.

    The second turn leaves the first answer's last tokens out, as a chat template may do.
    """
    draw = random.Random(1)
    text: list[int] = draw.choices(range(3, 150), k=37)
    results = []
    for left_out in (0, 3, 0):
        done = ask(text, params)
        results.append(result_of(done))
        text = text + done.token_ids[: len(done.token_ids) - left_out]
        text += draw.choices(range(3, 150), k=9)
    results.append(result_of(ask(text, params)))
    return [*results, result_of(ask(text, params))]


def result_of(done: Completion) -> tuple[Any, ...]:
    return done.token_ids, done.logprobs, done.stats, done.num_cached_tokens


INT8, FP8 = {"kv_cache_dtype": "int8"}, {"kv_cache_dtype": "fp8_e4m3"}
CASES: dict[str, tuple[str, dict[str, Any], str]] = {
    "dense-naive": ("dense", {}, "naive"),
    "dense-ngram": ("dense", {}, "ngram"),
    "dense-suffix": ("dense", {}, "suffix"),
    "dense-mtp": ("dense", {}, "mtp"),
    "dense-int8-mtp": ("dense", INT8, "mtp"),
    "dense-fp8-suffix": ("dense", FP8, "suffix"),
    "window-suffix": ("window", {}, "suffix"),
    "latent-mtp": ("latent", {}, "mtp"),
    "states-suffix": ("states", {}, "suffix"),
    "states-int8-mtp": ("states", INT8, "mtp"),
    "states-draft_model": ("states", {}, "draft_model"),
}


@pytest.mark.fast(
    "greedy-dense-fp8-suffix",
    "greedy-dense-mtp",
    "greedy-latent-mtp",
    "greedy-states-int8-mtp",
    "seeded-states-suffix",
    "seeded-window-suffix",
)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_resumed_conversation_equals_an_uninterrupted_one(
    models: dict[str, Path],
    tmp_path: Path,
    case: str,
    params: SamplingParams,
) -> None:
    """Tokens, logprobs, drafts, accepted drafts and cached tokens are equal."""
    kind, settings, method = CASES[case]
    own = {"model": str(models["states"])} if method == "draft_model" else {}
    options = {**settings, "model": str(models[kind])}
    file = tmp_path / "a.session"

    def resumed(prompt: list[int], params: SamplingParams) -> Completion:
        engine = make(METHODS[method] | own, **options)
        sessions = Sessions(engine)
        if file.exists():
            assert sessions.restore(file, params) > 0
        (done,) = engine.generate([prompt], params)
        sessions.save(file, done, params)
        assert engine.num_free_pages == engine.num_pages
        return done

    def asking(engine: Engine) -> Callable[[list[int], SamplingParams], Completion]:
        return lambda prompt, params: engine.generate([prompt], params)[0]

    got = conversation(resumed, params)
    assert got == conversation(asking(make(METHODS[method] | own, **options)), params)
    plain = conversation(asking(make(NAIVE, **options, enable_prefix_caching=False)), params)
    assert [one[:2] for one in got] == [one[:2] for one in plain]
    if method not in ("naive", "ngram"):
        assert sum(one[2].num_draft_tokens for one in got) > 0


# ---- files that cannot be used ----

PROMPT = random.Random(3).choices(range(3, 150), k=70)


def saved(engine: Engine, file: Path, params: SamplingParams = GREEDY) -> Completion:
    """Complete `PROMPT`, and save the session."""
    (done,) = engine.generate([PROMPT], params)
    Sessions(engine).save(file, done, params)
    return done


def refusal(engine: Engine, file: Path, prompt: Sequence[int]) -> str:
    """Return why an engine cannot resume a file; nothing of it is used then."""
    with pytest.raises(SessionError) as error:
        Sessions(engine).restore(file, GREEDY)
    assert engine.num_free_pages == engine.num_pages
    (done,) = engine.generate([prompt], replace(GREEDY, max_tokens=1))
    assert done.num_cached_tokens == 0
    return str(error.value)


FOREIGN: dict[str, tuple[str, str, dict[str, Any], str]] = {
    "model": (
        "naive",
        "naive",
        {"model": "states"},
        "contract.model.digest must be '.*', got '.*'",
    ),
    "KV dtype": (
        "naive",
        "naive",
        INT8,
        "contract.model.kv_cache_dtype must be 'int8', got 'bfloat16'",
    ),
    "virtual ranks": (
        "naive",
        "naive",
        {"exact_across_tp": 2},
        "contract.num_virtual_ranks must be 2, got 1",
    ),
    "page size": ("naive", "naive", {"page_size": 32}, "page_size must be 32, got 16"),
    "no drafter": ("mtp", "naive", {}, "owner must be '', got 'mtp'"),
    "drafter": ("naive", "mtp", {}, "owner must be 'mtp', got ''"),
    "context": (
        "naive",
        "naive",
        {"max_model_len": 64},
        "a prompt of 90 tokens exceeds the context of 64 tokens",
    ),
}


@pytest.mark.parametrize("name", FOREIGN)
def test_session_of_another_engine_is_refused_by_name(
    models: dict[str, Path], tmp_path: Path, name: str
) -> None:
    writer, reader, options, message = FOREIGN[name]
    saved(make(METHODS[writer], model=str(models["dense"])), file := tmp_path / "a.session")
    model = models[options.get("model", "dense")]
    engine = make(METHODS[reader], **options | {"model": str(model)})
    assert re.fullmatch(message, refusal(engine, file, PROMPT[:40]))


def with_contents(data: bytes, change: Callable[[Contents], Contents], version: int = 1) -> bytes:
    """Return a file with other contents and right checksums."""
    length = struct.unpack_from("<I", data, 20)[0]
    contents = msgspec.msgpack.decode(data[28 : 28 + length], type=Contents)
    body = msgspec.msgpack.encode(change(contents))
    head = data[:16] + struct.pack("<III", version, len(body), zlib.crc32(body))
    return head + body + data[28 + length :]


def with_header(**changes: Any) -> Callable[[Contents], Contents]:
    def change(contents: Contents) -> Contents:
        parts = [
            structs.replace(part, header=structs.replace(part.header, **changes))
            for part in contents.parts
        ]
        return structs.replace(contents, parts=parts)

    return change


def test_damaged_files_are_never_used(models: dict[str, Path], tmp_path: Path) -> None:
    """Every byte of the prefix, and some of each part of contents, pages and states, is damaged."""
    file = tmp_path / "a.session"
    engine = make(METHODS["suffix"], model=str(models["states"]))
    done = saved(engine, file)
    whole = file.read_bytes()
    contract = Sessions(engine).contract
    (length,) = struct.unpack_from("<I", whole, 20)
    num_parts = len(session_file.read(file, contract).contents.parts)
    assert num_parts == 2 and len(whole) > 28 + length + 10_000

    def refused(data: bytes) -> str:
        file.write_bytes(data)
        with pytest.raises(SessionError) as error:
            session_file.read(file, contract)
        return str(error.value)

    draw = random.Random(1)
    contents = range(28, 28 + length, 13)
    for place in (*range(28), *contents, *range(28 + length, len(whole), 4096), len(whole) - 1):
        damaged = bytearray(whole)
        damaged[place] ^= 1 << draw.randrange(8)
        refused(damaged)
    for end in (0, 1, 27, 28, 28 + length - 1, 28 + length, len(whole) - 1):
        refused(whole[:end])
    assert "got" in refused(whole + b"x")
    assert refused(b"not a session" * 9) == "it is no session file: its first bytes differ"
    assert refused(with_contents(whole, lambda one: one, 2)) == "version must be 1, got 2"
    # Contents with right checksums that no engine writes.
    wrong: dict[str, Callable[[Contents], Contents]] = {
        "version must be 5, got 4": with_header(version=4),
        "num_ranks must be 1, got 2": with_header(num_ranks=2),
        "model must be": with_header(model=[]),
        "num_pages must be in": with_header(num_pages=-1),
        "data must have": with_header(num_pages=1),
        "contract must be": with_header(contract="0"),
        "is outside the vocabulary": with_header(token_ids=[1 << 30]),
        "its answers must hold token ids in": lambda one: structs.replace(
            one, answers=[session_file.Answer.of([1], [-1])]
        ),
        "buffer size must be a multiple": lambda one: structs.replace(
            one, answers=[session_file.Answer(b"", b"abc")]
        ),
        "it must have pages or a text": lambda one: structs.replace(one, parts=[]),
    }
    for message, change in wrong.items():
        data = with_contents(whole, change)
        if "pages or a text" in message:
            data = data[: 28 + struct.unpack_from("<I", data, 20)[0]]
        file.write_bytes(data)
        assert message in refusal(
            make(METHODS["suffix"], model=str(models["states"])), file, PROMPT
        )
    file.write_bytes(whole)
    again = make(METHODS["suffix"], model=str(models["states"]))
    assert Sessions(again).restore(file, GREEDY) == 80
    assert again.generate([PROMPT], GREEDY)[0].logprobs == done.logprobs


def test_sessions_are_refused_where_they_are_not_supported(models: dict[str, Path]) -> None:
    options = {"model": str(models["dense"])}
    with pytest.raises(ValueError, match=r"^enable_prefix_caching must be on for sessions"):
        Sessions(make(NAIVE, **options, enable_prefix_caching=False))

    def refused(ranks: Any) -> str:
        with pytest.raises(ValueError, match="sessions") as error:
            Sessions(make(NAIVE, ranks, **options, tensor_parallel_size=2))
        return str(error.value)

    expected = "tensor_parallel_size must be 1 for sessions, got 2"
    assert on_ranks(2, refused) == [expected] * 2


def test_saving_fails_if_pages_were_evicted(models: dict[str, Path], tmp_path: Path) -> None:
    engine = make(NAIVE, model=str(models["dense"]), num_pages=12)
    (done,) = engine.generate([PROMPT], GREEDY)
    sessions = Sessions(engine)
    copy = sessions.copy(tmp_path, PROMPT, done.token_ids, GREEDY, most=1)
    assert next(copy) > 0
    engine.generate([PROMPT[::-1] * 2], GREEDY)
    with pytest.raises(PagesEvicted):
        list(copy)
    assert engine.num_free_pages == engine.num_pages


def test_full_context_and_short_texts_are_saved(models: dict[str, Path], tmp_path: Path) -> None:
    """A text that fills the context, and one of less than a page."""
    options = {"model": str(models["dense"])}
    for prompt, count, cached in ((PROMPT * 2, 52, 176), (PROMPT[:3], 4, 0)):
        engine, file = make(METHODS["suffix"], **options), tmp_path / "a.session"
        params = replace(GREEDY, max_tokens=count)
        (done,) = engine.generate([prompt], params)
        Sessions(engine).save(file, done, params)
        again = make(METHODS["suffix"], **options)
        assert Sessions(again).restore(file, params) == cached
        assert again.generate([prompt], params)[0].token_ids == done.token_ids


def test_drafters_learn_each_answer_once(models: dict[str, Path], tmp_path: Path) -> None:
    """Also if a session is read again, because its pages were evicted; old answers are dropped."""
    options = {"model": str(models["dense"]), "num_pages": 12}
    engine, file = make(METHODS["suffix"], **options), tmp_path / "a.session"
    sessions = Sessions(engine)
    for _ in range(12):
        (done,) = engine.generate([PROMPT], GREEDY)
        sessions.save(file, done, GREEDY)
    assert sessions.is_cached(file, GREEDY)
    engine.generate([PROMPT[::-1] * 2], GREEDY)
    assert not sessions.is_cached(file, GREEDY)
    sessions.restore(file, GREEDY)
    assert engine.drafter_gauges["suffix_cache_requests"] == 13
    again = make(METHODS["suffix"], **options)
    sessions = Sessions(again)
    for _ in range(2):
        sessions.restore(file, GREEDY)
    # Each answer takes 20 tokens and a digest as large as 8; the context has 192 tokens.
    assert again.drafter_gauges["suffix_cache_requests"] == 192 // 28


# ---- the directory ----


def unsaved(size: int) -> session_file.UnsavedSession:
    header = structs.replace(HEADER, num_pages=0)
    return session_file.UnsavedSession({}, [(header, [bytes(size)])], [])


HEADER = session_file.Header(5, 1, "", 1, 0, 1, 0, 16, [], 0, "", 0, [], [], [])


def test_least_recently_used_sessions_are_evicted(tmp_path: Path) -> None:
    directory = SessionDirectory(str(tmp_path / "new" / "sessions"), 35_000)
    folder = tmp_path / "new" / "sessions"
    assert folder.stat().st_mode & 0o777 == 0o700
    for place, name in enumerate("abc"):
        directory.write(directory.file(name), unsaved(10_000))
        os.utime(directory.file(name), (place, place))
    directory.read(directory.file("a"), {})  # used again: "b" is the oldest now
    (folder / "other.txt").write_bytes(bytes(50_000))  # is not a session
    directory.write(directory.file("d"), unsaved(10_000))
    assert names(folder) == ["a.session", "c.session", "d.session", "other.txt"]
    directory.write(directory.file("c"), unsaved(12_000))  # replaces its older version
    assert names(folder) == ["a.session", "c.session", "d.session", "other.txt"]
    with pytest.raises(SessionError, match=r"session_bytes must be at least 4\d+, .* got 35000"):
        directory.write(directory.file("c"), unsaved(40_000))
    assert names(folder) == ["a.session", "c.session", "d.session", "other.txt"]
    directory.write(directory.file("e"), unsaved(30_000))
    assert names(folder) == ["e.session", "other.txt"]
    assert (folder / "e.session").stat().st_mode & 0o777 == 0o600


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_unfinished_files_of_killed_processes_are_removed(tmp_path: Path) -> None:
    abandoned, locked = (tmp_path / f".{name}.session.1.tmp" for name in "ab")
    for path in (abandoned, locked):
        path.write_bytes(b"x")
    with open(locked, "rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # as the process that writes it does
        SessionDirectory(str(tmp_path), 1)
    assert names(tmp_path) == [locked.name]


def test_directory_must_be_usable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"^session_dir: .*/file/a cannot be created: Not a dir"):
        SessionDirectory(str(tmp_path / "file" / "a"), 1)
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # tests may run as root
    with pytest.raises(ValueError, match=r"^session_dir: files in .* cannot be written"):
        SessionDirectory(str(tmp_path), 1)


class FullDisk:
    """File on a disk that is full after some bytes."""

    def __init__(self, file: IO[bytes], left: int, code: int) -> None:
        self._file, self._left, self._code = file, left, code

    def write(self, data: bytes) -> None:
        self._left -= len(data)
        if self._left < 0:
            raise OSError(self._code, os.strerror(self._code))
        self._file.write(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def __enter__(self) -> "FullDisk":
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()


def fill_disk(monkeypatch: pytest.MonkeyPatch, left: int, code: int = errno.ENOSPC) -> None:
    real = session_file._temporary
    monkeypatch.setattr(session_file, "_temporary", lambda path: FullDisk(real(path), left, code))


@pytest.mark.parametrize("left", [0, 100, 20_000])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EACCES])
def test_full_disk_leaves_the_older_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, left: int, code: int
) -> None:
    directory = SessionDirectory(str(tmp_path), 1 << 30)
    file = directory.file("a")
    directory.write(file, unsaved(10_000))
    before = file.read_bytes()
    fill_disk(monkeypatch, left, code)
    with pytest.raises(OSError, match=os.strerror(code)):
        directory.write(file, unsaved(30_000))
    assert file.read_bytes() == before and names(tmp_path) == ["a.session"]


# ---- a server's loop ----


class Script:
    """Inbox that submits each job after the answer to the one before, and then ends the loop."""

    def __init__(self, jobs: Sequence[Submit], abort: bool = False) -> None:
        self._jobs = list(jobs)
        self._queue: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._queue.put(Begin(0))
        self._aborts = abort
        self.outputs: list[Output] = []
        self._next()

    def _next(self) -> None:
        self._token_ids: list[int] = []
        self._logprobs: list[Any] = []
        job = self._jobs.pop(0) if self._jobs else None
        self._queue.put(Stop() if job is None else job)
        if self._aborts and job is not None:
            self._queue.put(Abort(job.job))
            self._next()

    def put(self, command: Any) -> None:
        self._queue.put(command)

    def take(self, seconds: float | None) -> list[Command]:
        commands = []
        if seconds != 0.0:  # waits until there is a command, so the loop sends no idle batches
            commands.append(self._queue.get(timeout=HANG_SECONDS))
        while not self._queue.empty():
            commands.append(self._queue.get())
        return commands

    def receive(self, batch: Batch) -> None:
        for event in batch.events:
            if isinstance(event, Output):
                self._token_ids += event.token_ids
                self._logprobs += event.logprobs
                if event.end is not None:
                    self.outputs.append(
                        structs.replace(event, token_ids=self._token_ids, logprobs=self._logprobs)
                    )
                    self._next()


def serve(engine: Engine, folder: Path, *jobs: Submit, abort: bool = False) -> list[Output]:
    """Run jobs one after the other, and return their last outputs, with all tokens."""
    script = Script(jobs, abort)
    directory = SessionDirectory(str(folder), 1 << 30)
    with SessionInbox(engine, directory, script, script.receive) as inbox:
        EngineLoop(engine, inbox, inbox.send).run()
    assert engine.num_free_pages == engine.num_pages
    return script.outputs


def job(prompt: list[int], session: str | None = "a", number: int = 1, **more: Any) -> Submit:
    params = replace(GREEDY, **more)
    return Submit(number, "", [prompt], params, None, False, session=session)


@pytest.mark.parametrize("case", ["dense-mtp", "states-suffix"])
@pytest.mark.parametrize("piece_bytes,streaming", [(1, True), (1 << 23, False)])
def test_served_session_equals_an_uninterrupted_one(
    models: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    case: str,
    piece_bytes: int,
    streaming: bool,
) -> None:
    kind, settings, method = CASES[case]
    monkeypatch.setattr(session_inbox, "_PIECE_BYTES", piece_bytes)
    options = {**settings, "model": str(models[kind])}
    alone = make(METHODS[method], **options)
    text = PROMPT
    for number in range(3):
        turn = structs.replace(job(text), streaming=streaming)
        (got,) = serve(make(METHODS[method], **options), tmp_path, turn)
        (want,) = alone.generate([text], GREEDY)
        assert got.end is not None
        assert (got.token_ids, got.logprobs) == (want.token_ids, want.logprobs)
        assert (got.end.stats, got.end.num_cached_tokens) == (want.stats, want.num_cached_tokens)
        assert (number > 0) == (want.num_cached_tokens > 0)
        text = [*text, *got.token_ids, *PROMPT[:5]]
    assert names(tmp_path) == ["a.session"]


def test_session_in_the_cache_is_not_read(
    models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make(NAIVE, model=str(models["dense"]))
    reads: list[str] = []
    read = SessionDirectory.read
    monkeypatch.setattr(
        SessionDirectory,
        "read",
        lambda self, path, contract: (reads.append(path.name), read(self, path, contract))[1],
    )
    serve(engine, tmp_path, job(PROMPT), job(PROMPT, number=2), job(PROMPT, "b", number=3))
    assert reads == ["a.session", "b.session"] and names(tmp_path) == ["a.session", "b.session"]


def test_sessions_of_different_salts_are_separate(models: dict[str, Path], tmp_path: Path) -> None:
    options = {"model": str(models["dense"])}
    serve(make(NAIVE, **options), tmp_path, job(PROMPT, cache_salt="x"))
    engine = make(NAIVE, **options)
    salts = (None, "y", "x")
    ends = serve(
        engine, tmp_path, *(job(PROMPT, number=i, cache_salt=salt) for i, salt in enumerate(salts))
    )
    assert [one.end.num_cached_tokens for one in ends if one.end] == [0, 0, 64]
    assert len(names(tmp_path)) == 3


def test_unusable_file_costs_only_time(
    models: dict[str, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The log names the reason, and the file is replaced at the end of the answer."""
    options = {"model": str(models["dense"])}
    (want,) = serve(make(NAIVE, **options), tmp_path, job(PROMPT))
    file = tmp_path / "a.session"
    whole = file.read_bytes()
    reasons = {
        "version must be 1, got 2": with_contents(whole, lambda one: one, 2),
        "it is damaged: a checksum of its pages does not match": whole[:-1] + b"?",
        "page_size must be 16, got 8": with_contents(whole, with_header(page_size=8)),
    }
    for reason, data in reasons.items():
        file.write_bytes(data)
        caplog.clear()
        (got,) = serve(make(NAIVE, **options), tmp_path, job(PROMPT))
        assert got.end is not None and got.end.num_cached_tokens == 0
        assert (got.token_ids, got.logprobs) == (want.token_ids, want.logprobs)
        assert caplog.messages == [
            f"session file a.session is not used, so the prompt is computed: {reason}"
        ]
        assert file.read_bytes() == whole
    file.unlink()
    file.mkdir()  # can neither be read nor replaced
    caplog.clear()
    (got,) = serve(make(NAIVE, **options), tmp_path, job(PROMPT))
    assert got.logprobs == want.logprobs and len(caplog.messages) == 2
    assert all("Is a directory" in one for one in caplog.messages)


def test_failure_to_save_costs_only_the_session(
    models: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A full disk, too many copies, and an unexpected error; later jobs are served."""
    engine = make(NAIVE, model=str(models["dense"]))
    (want,) = serve(engine, tmp_path, job(PROMPT))
    file = tmp_path / "a.session"
    whole = file.read_bytes()
    with monkeypatch.context() as patch:
        fill_disk(patch, 1000)
        got = serve(engine, tmp_path, job(PROMPT), job(PROMPT, number=2))
    assert [one.logprobs for one in got] == [want.logprobs] * 2
    full = "session file a.session could not be saved: [Errno 28] No space left on device"
    assert caplog.messages == [full] * 2
    caplog.clear()
    with monkeypatch.context() as patch:
        patch.setattr(session_inbox, "_MAX_COPIES", 0)
        serve(engine, tmp_path, job(PROMPT))
    with monkeypatch.context() as patch:
        patch.setattr(session_file, "write", lambda path, pieces: 1 / 0)
        serve(engine, tmp_path, job(PROMPT))
    assert caplog.messages == [
        "session file a.session could not be saved: 0 others wait to be copied",
        "session file a.session could not be saved: internal error",
    ]
    assert file.read_bytes() == whole


def test_aborted_and_refused_jobs_are_not_saved(models: dict[str, Path], tmp_path: Path) -> None:
    engine = make(NAIVE, model=str(models["dense"]))
    serve(engine, tmp_path, job(PROMPT), job(PROMPT, "b"), abort=True)
    assert names(tmp_path) == []


# ---- processes ----


@pytest.mark.slow
@pytest.mark.parametrize("count", [24, 500])
def test_killed_saves_lose_no_complete_turn(count: int) -> None:
    """Cycles of saving, `kill -9` at each point of saving, and resuming in another process."""
    script = Path(__file__).with_name("session_kills.py")
    done = subprocess.run(
        [sys.executable, script, "--cycles", str(count)], capture_output=True, text=True
    )
    assert done.stdout.startswith(f"{count} cycles, 0 with different"), done.stdout + done.stderr


@pytest.mark.ci
def test_killed_server_resumes_sessions(mtp_model: Path, tmp_path: Path) -> None:
    """Over HTTP, with keys: a key's sessions are its own, and tokens are those of one server."""
    import httpx
    from server_pairs import one_server, options, servers

    more = ("--session-dir", str(tmp_path), "--api-key", "alice", "--api-key", "bob")

    def ask(url: str, prompt: list[int], key: str, **body: Any) -> Any:
        body |= {"prompt": prompt, "max_tokens": 20, "temperature": 0, "logprobs": 1}
        body |= {"return_token_ids": True, "seed": 1}
        headers = {"Authorization": f"Bearer {key}"}
        answer = httpx.post(f"{url}/v1/completions", json=body, headers=headers, timeout=300).json()
        (choice,) = answer["choices"]
        return choice, answer["usage"]["prompt_tokens_details"]["cached_tokens"]

    with servers(options(mtp_model, *more)) as (server,), one_server(mtp_model) as one:
        text = PROMPT
        for turn in range(3):
            want, cached = ask(one.url, text, "any")
            assert ask(server.url, text, "alice", session_id="chat-1") == (want, cached)
            assert (cached > 0) == (turn > 0)
            text = [*text, *want["token_ids"], *PROMPT[:5]]
            wait_for(lambda turn=turn: turns_in(tmp_path) == turn + 1)
            server.kill()
            server.start()
            server.wait()
        assert ask(server.url, text, "bob", session_id="chat-1")[1] == 0
        server.stop()  # writes what is not written yet
        assert len(names(tmp_path)) == 2


def turns_in(folder: Path) -> int:
    """Return the number of answers in a folder's only session, which is always complete."""
    files = list(folder.glob("*.session"))
    if not files:
        return 0
    data = files[0].read_bytes()
    (length,) = struct.unpack_from("<I", data, 20)
    return len(msgspec.msgpack.decode(data[28 : 28 + length], type=Contents).answers)


# ---- the field of a request ----

BODIES: dict[str, dict[str, Any]] = {
    "completions": {"prompt": "abc", "max_tokens": 4},
    "chat/completions": {"messages": [USER], "max_tokens": 4},
    "responses": {"input": "abc", "max_output_tokens": 4},
    "messages": {"messages": [USER], "max_tokens": 4},
}
WRONG_NAMES = [
    *"./é ",
    "..",
    "../a",
    "a/b",
    "/etc/passwd",
    "a\\b",
    "a.b",
    "a\0",
    "a\n",
    "é",
    "",
    "a" * 65,
    " a",
]


@pytest.mark.parametrize("path", BODIES)
def test_session_ids_are_checked(path: str) -> None:
    import httpx

    engine = FakeEngine()
    with serving(engine) as served, httpx.Client(base_url=f"{served.url}/v1/") as client:

        def refusal_of(**more: Any) -> str:
            answer = client.post(path, json=BODIES[path] | more)
            assert answer.status_code == 400, answer.text
            return str(answer.json()["error"]["message"])

        for name in WRONG_NAMES:
            assert "session_id: must have 1 to 64 characters" in refusal_of(session_id=name)
        assert "session_id" in refusal_of(session_id=3)
        assert refusal_of(session_id="a-B_3") == "session_id: requires a server with --session-dir"
        assert not engine.salts  # nothing has reached the engine


@pytest.mark.parametrize(
    "more,adapter,message",
    [
        ({"n": 2}, None, "requires exactly one prompt and n 1, got 1 and 2"),
        ({"prompt": ["a", "b"]}, None, "requires exactly one prompt and n 1, got 2 and 1"),
        ({}, ("sql", "digest"), "requires the model without the adapter 'sql'"),
    ],
    ids=str,
)
def test_requests_that_have_no_session(
    more: dict[str, Any], adapter: tuple[str, str] | None, message: str
) -> None:
    from specops.server.api_error import ApiError
    from specops.server.kv_transfer import session_of
    from specops.server.protocol import CompletionRequest

    request = CompletionRequest(**{"prompt": "a", "session_id": "a"} | more)
    num_prompts = len(more.get("prompt", "a"))
    with pytest.raises(ApiError) as error:
        session_of(request, num_prompts, True, adapter)
    assert error.value.message == f"session_id: {message}"
