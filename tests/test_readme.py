# SPDX-License-Identifier: Apache-2.0
"""The first example of the ops prints what its comments say, and what the README names exists."""

import contextlib
import io
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_example_prints_what_its_comments_say() -> None:
    section = (ROOT / "docs/ops.md").read_text(encoding="utf-8").split("## Verify drafts")[1]
    code = section.split("```python\n")[1].split("```")[0]
    expected = re.findall(r"print\(.*\)  # (.*)", code)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(code, "docs/ops.md", "exec"), {})
    assert printed.getvalue().splitlines() == expected


def test_every_link_exists() -> None:
    for link in re.findall(r"\]\(([^)#]+)\)", README):
        assert link.startswith("http") or (ROOT / link).exists(), link


def test_map_and_traced_op_name_existing_files() -> None:
    contributing = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    blocks = contributing.split("## Map")[1].split("\n## ")[0]
    for written in re.findall(r"(?:csrc|python|tools|docs)/[\w./<>]*", blocks):
        path = written.replace("<family>", "sampling").replace("<op>", "verify")
        assert (ROOT / path).exists(), written
    for name in ("<op>.h", "<op>_cpu.cpp", "<op>.cuh", "<op>.cu"):
        assert name in blocks
        assert (ROOT / "csrc/sampling/verify" / name.replace("<op>", "verify")).exists(), name
    trace = blocks.split("layer by layer")[1]
    for name, path in re.findall(r"(verify\w*)\(.*?\)\s+(\S+\.(?:py|cpp|cu))", trace):
        assert re.search(rf"\b{name}\b", (ROOT / path).read_text(encoding="utf-8")), (name, path)
