# SPDX-License-Identifier: Apache-2.0
"""The code in docs/own_loop.md prints what its comments say."""

import contextlib
import io
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from specops import attention

pytest.importorskip("transformers")

PAGE = Path(__file__).resolve().parent.parent / "docs" / "own_loop.md"


def test_code_prints_what_its_comments_say(monkeypatch: pytest.MonkeyPatch) -> None:
    copied = []

    def copy_kv(k_cache: Any, v_cache: Any, from_slots: torch.Tensor, to_slots: Any) -> None:
        copied.append(int((from_slots >= 0).sum()))
        original(k_cache, v_cache, from_slots, to_slots)

    original = attention.copy_kv
    monkeypatch.setattr(attention, "copy_kv", copy_kv)
    code = "".join(re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL))
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(code, PAGE.name, "exec"), {})
    lines = printed.getvalue().splitlines()
    in_batch = ["True True"] * 6  # printed once, in a loop over six requests
    assert lines == [
        "True",
        "64 True",
        "True",
        "True",
        *in_batch,
        "True True",
        "128 True",
        "True True",
    ]
    expected = re.findall(r"^ *print\(.*\)  # (.*)", code, re.MULTILINE)
    assert list(dict.fromkeys(lines)) == list(dict.fromkeys(expected))
    assert sum(map(bool, copied)) > 20, "trees branch"
