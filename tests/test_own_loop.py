# SPDX-License-Identifier: Apache-2.0
"""docs/own_loop.md: its code prints what its comments say."""

import contextlib
import io
import re
from pathlib import Path

import pytest

pytest.importorskip("transformers")

PAGE = Path(__file__).resolve().parent.parent / "docs" / "own_loop.md"


def test_the_loop_prints_what_its_comments_say() -> None:
    code = "".join(re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL))
    expected = re.findall(r"^print\(.*\)  # (.*)", code, re.MULTILINE)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(code, PAGE.name, "exec"), {})
    assert printed.getvalue().splitlines() == expected
    assert expected == ["True", "64 True", "True", "True True", "128 True", "True True"]
