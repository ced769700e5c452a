# SPDX-License-Identifier: Apache-2.0
"""The documents speak of files, tests and links that exist."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])
TESTS = {
    name
    for path in (ROOT / "tests").rglob("test_*.py")
    for name in [path.stem, *re.findall(r"^def (test_\w+)", path.read_text(), re.MULTILINE)]
}


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", DOCUMENTS, ids=relative)
def test_links_lead_somewhere(path: Path) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", path.read_text()):
        if "://" not in target:
            assert (path.parent / target).exists(), target


@pytest.mark.parametrize("path", DOCUMENTS, ids=relative)
def test_named_files_and_tests_exist(path: Path) -> None:
    for quoted in re.findall(r"`([^`\n]+)`", path.read_text()):
        if re.fullmatch(r"test_\w+", quoted):
            assert quoted in TESTS, quoted
        if re.fullmatch(r"(csrc|python|tests|bench|tools|docs)/[\w./]+", quoted):
            assert (ROOT / quoted).exists(), quoted
