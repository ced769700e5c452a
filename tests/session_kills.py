# SPDX-License-Identifier: Apache-2.0
"""Cycles of saving a session, `kill -9` at a known point of saving, and resuming it.

`python tests/session_kills.py --cycles N`. Each cycle is a process that resumes a conversation,
holds its next turn, and is killed while it saves. Its tokens, logprobs, drafts and cached tokens
must equal those of an uninterrupted process. A turn whose file was not complete is repeated.
"""

import argparse
import json
import os
import random
import signal
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

from checkpoints import write_config
from specops.disaggregated import session_file
from specops.disaggregated.session_file import SUFFIX, SessionDirectory
from specops.disaggregated.sessions import Sessions
from specops.engine import Completion, Engine, EngineConfig, SamplingParams

# Points of saving, in order; the file is complete from "renamed" on.
POINTS = ("created", "half", "written", "synced", "renamed", "saved")
TURNS = 4
PARAMS = SamplingParams(max_tokens=16, temperature=0.0, logprobs=1, seed=1)
LINEAR = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 4,
}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "mtp": ({}, {"method": "mtp", "num_speculative_tokens": 3}),
    "linear": (LINEAR, {"method": "suffix", "num_speculative_tokens": 4}),
}


def engine_of(model: Path, method: dict[str, Any]) -> Engine:
    settings = {
        "model": str(model),
        "device": "cpu",
        "load_format": "dummy",
        "page_size": 16,
        "num_pages": 64,
        "num_threads": 1,
        "speculative_config": json.dumps(method),
    }
    return Engine(EngineConfig.from_plain(settings))


def next_prompt(text: list[int], turn: int) -> list[int]:
    """Return a text with the user's next message."""
    return text + random.Random(turn).choices(range(3, 150), k=9 if turn else 40)


def result_of(done: Completion) -> dict[str, Any]:
    return {
        "token_ids": done.token_ids,
        "logprobs": [one.logprob.hex() for one in done.logprobs],
        "stats": asdict(done.stats),
        "num_cached_tokens": done.num_cached_tokens,
    }


def in_process(work: Callable[[], Any]) -> tuple[Any, int]:
    """Run work in a new process; return what it has yielded, and the signal that ended it."""
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        try:
            for value in work():
                os.write(writer, json.dumps(value).encode() + b"\n")
            os._exit(0)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)
    os.close(writer)
    with os.fdopen(reader) as lines:
        values = [json.loads(line) for line in lines]
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0, "a process failed"
    return values, os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def die_at(point: str) -> None:
    """Have this process killed at a point of saving."""
    create, sync, rename = session_file._temporary, os.fsync, os.replace

    def killed_when_created(path: Path) -> IO[bytes]:
        file = create(path)
        if point == "created":
            die()
        if point == "half":
            write, count = file.write, Counter[str]()

            class Half:
                def __getattr__(self, name: str) -> Any:
                    return getattr(file, name)

                def __enter__(self) -> "Half":
                    return self

                def __exit__(self, *error: object) -> None:
                    file.close()

                def write(self, data: bytes) -> int:
                    count["pieces"] += 1
                    if count["pieces"] == 3:
                        write(data[: len(data) // 2])
                        file.flush()
                        die()
                    return write(data)

            return Half()  # type: ignore[return-value]
        return file

    def killed_when_synced(number: int) -> None:
        if point == "written":
            die()
        sync(number)
        if point == "synced":
            die()

    def killed_when_renamed(old: str, new: Path) -> None:
        rename(old, new)
        if point == "renamed":
            die()

    session_file._temporary = killed_when_created
    session_file.os.fsync = killed_when_synced  # type: ignore[attr-defined]
    session_file.os.replace = killed_when_renamed  # type: ignore[attr-defined]


class Conversation:
    """Conversation with a model, whose turns may be repeated.

    Args:
        folder: an empty folder for its files.
        case: the model and the method.
    """

    def __init__(self, folder: Path, case: str) -> None:
        config, self.method = CASES[case]
        sizes = {"num_hidden_layers": 2, "max_position_embeddings": 192}
        (folder / "model").mkdir(parents=True)
        self.model = write_config(folder / "model", **sizes, **config, num_nextn_predict_layers=1)
        self.folder = folder / "sessions"
        self.turn = 0
        self.text: list[int] = []
        self.expected, _ = in_process(self._uninterrupted)

    def _uninterrupted(self) -> Any:
        engine, text = engine_of(self.model, self.method), list[int]()
        for turn in range(TURNS):
            text = next_prompt(text, turn)
            (done,) = engine.generate([text], PARAMS)
            text = text + done.token_ids
            yield result_of(done)

    def cycle(self, point: str) -> int:
        """Resume, hold a turn, and save until killed; return the number of differing results."""
        prompt = next_prompt(self.text, self.turn)

        def work() -> Any:
            engine = engine_of(self.model, self.method)
            sessions, directory = Sessions(engine), SessionDirectory(str(self.folder), 1 << 30)
            file = directory.file("a")
            if self.turn:
                sessions.restore(file, PARAMS)
            (done,) = engine.generate([prompt], PARAMS)
            yield result_of(done)
            die_at(point)
            copy = sessions.copy(file, prompt, done.token_ids, PARAMS)
            for _ in copy:
                pass
            directory.write(file, copy.session)
            die()

        (got,), signal_number = in_process(work)
        assert signal_number == signal.SIGKILL
        expected = self.expected[self.turn]
        files = {path.suffix for path in self.folder.iterdir()}
        is_complete = point in ("renamed", "saved")
        assert files <= ({SUFFIX} if is_complete else {SUFFIX, ".tmp"})
        assert (SUFFIX in files) == (self.turn > 0 or is_complete)
        if is_complete:
            self.text = prompt + expected["token_ids"]
            self.turn += 1
        if self.turn == TURNS:  # begin again
            self.turn, self.text = 0, []
            for path in self.folder.iterdir():
                path.unlink()
        return int(got != expected)


def run(cycles: int, folder: Path) -> int:
    """Run cycles that are killed at each point in turn; return the number of differing results."""
    talks = [Conversation(folder / case, case) for case in CASES]
    num_different = 0
    for number in range(cycles):
        talk = talks[number % len(talks)]
        num_different += talk.cycle(POINTS[number // len(talks) % len(POINTS)])
    return num_different


def main() -> int:
    """Run the cycles that the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cycles", type=int, default=500)
    cycles = parser.parse_args().cycles
    with tempfile.TemporaryDirectory() as folder:
        num_different = run(cycles, Path(folder))
    print(f"{cycles} cycles, {num_different} with different tokens, logprobs or drafts")
    return min(num_different, 1)


if __name__ == "__main__":
    raise SystemExit(main())
