# SPDX-License-Identifier: Apache-2.0
"""docs/cuda_graphs.md: its code prints what it says, launched call by call and replayed."""

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


class NoHost(TorchDispatchMode):
    """Fails where a capture would: the host may not look at what is on the device."""

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


def test_call_by_call() -> None:
    assert run(None) == ["True"]


def test_replayed(device: str) -> None:
    """A replay repeats the calls of the recording, with its tensors and numbers."""
    replays = []

    def captured(launch: Callable[[], None]) -> Callable[[], None]:
        launch()  # with idle slots, as the page has it
        with NoHost():
            replay = FakeGpu().capture(launch)

        def counted() -> None:
            replays.append(replay)
            replay()

        return counted

    assert run(captured if device == "cpu" else None) == ["True"]
    assert device != "cpu" or len(replays) > 10
