# SPDX-License-Identifier: Apache-2.0
"""The code of docs/cuda_graphs.md prints what its comments say, with and without graphs."""

import contextlib
import io
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from fake_gpu import FakeGpu
from torch.utils._python_dispatch import TorchDispatchMode

DOCS = Path(__file__).resolve().parent.parent / "docs"


def blocks(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(), re.DOTALL)


class NoHostReads(TorchDispatchMode):
    """Failure of every operation that reads device data on the host, as in a capture."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__.partition(".")[0]
        assert name not in ("_local_scalar_dense", "nonzero", "equal", "masked_select"), name
        return func(*args, **(kwargs or {}))


def run(captured: Callable[[Any], Any] | None) -> list[str]:
    (model,) = [block for block in blocks("own_loop.md") if "class TinyModel" in block]
    step, loop = blocks("cuda_graphs.md")
    names: dict[str, Any] = {"torch": torch}
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        for code in (model, step):
            exec(compile(code, "docs", "exec"), names)
        if captured is not None:
            names["captured"] = captured
        exec(compile(loop, "docs", "exec"), names)
    assert re.findall(r"^print\(.*\)  # (.*)", loop, re.MULTILINE) == ["True"]
    return printed.getvalue().splitlines()


def test_page_prints_its_comments_without_graphs() -> None:
    assert run(None) == ["True"]


def test_page_prints_its_comments_with_graphs(device: str) -> None:
    """A replay repeats the calls of the recording, with its tensors and numbers."""
    replays = []

    def captured(launch: Callable[[], None]) -> Callable[[], None]:
        launch()  # with idle slots, as on the page
        with NoHostReads():
            replay = FakeGpu().capture(launch)

        def counted() -> None:
            replays.append(replay)
            replay()

        return counted

    assert run(captured if device == "cpu" else None) == ["True"]
    assert device != "cpu" or len(replays) > 10
