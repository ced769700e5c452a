# SPDX-License-Identifier: Apache-2.0
"""The files, tests and links that the documents name exist."""

import contextlib
import io
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = sorted(
    path
    for place in ("*", "docs/**/*", "tests/*", "tools/**/*")
    for path in ROOT.glob(f"{place}.md")
)
ADDRESS = "http://127.0.0.1:8000"  # of the server, in examples
TESTS = {
    name
    for folder in ("tests", "tools/tests")
    for path in (ROOT / folder).rglob("test_*.py")
    for name in [path.stem, *re.findall(r"^def (test_\w+)", path.read_text(), re.MULTILINE)]
}


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", DOCUMENTS, ids=relative)
def test_links_have_targets(path: Path) -> None:
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


def targets(makefile: str) -> set[str]:
    """Return the targets of a Makefile without those in $(VENV) and other variables."""
    text = (ROOT / makefile).read_text()
    return {
        name for line in re.findall(r"^([a-z][\w ./-]*):(?!=)", text, re.M) for name in line.split()
    }


@pytest.mark.parametrize("path", DOCUMENTS, ids=relative)
def test_make_has_the_targets_that_are_named(path: Path) -> None:
    """`make -C tools TARGET` finds its rules in tools/tools.mk."""
    for folder, name in re.findall(
        r"(?:`|^)make (-C tools )?([a-z][a-z/.-]+)", path.read_text(), re.M
    ):
        assert name in targets("tools/tools.mk" if folder else "Makefile"), name


def test_the_makefile_has_at_most_15_targets() -> None:
    text = (ROOT / "Makefile").read_text()
    (phony,) = re.findall(r"^\.PHONY: (.*)$", text, re.M)
    assert len(phony.split()) <= 15
    assert targets("Makefile") == {*phony.split(), "build/specops.pyz"}


def files_of(nav: Any) -> list[str]:
    """Return the files of a navigation in order."""
    if isinstance(nav, str):
        return [nav]
    parts = nav.values() if isinstance(nav, dict) else nav
    return [file for part in parts for file in files_of(part)]


def test_navigation_lists_every_document_once() -> None:
    """`make docs` does not report files that the navigation lacks."""
    yaml = pytest.importorskip("yaml")
    site = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
    files = {path.relative_to(ROOT / "docs").as_posix() for path in ROOT.glob("docs/**/*.md")}
    assert sorted(files_of(site["nav"])) == sorted(files)
    assert site["theme"]["font"] is False, "the site must not load fonts from another host"


def test_every_op_module_has_a_reference_page() -> None:
    modules = {path.stem for path in (ROOT / "python" / "specops").glob("[!_]*.py")}
    pages = {path.stem: path.read_text() for path in (ROOT / "docs" / "reference").glob("*.md")}
    assert set(pages) == modules | {"engine", "transformers"}
    for name in modules:
        assert f"\n::: specops.{name}\n" in pages[name]


def shell_lines(path: Path) -> list[list[list[str]]]:
    """Return the words of each line of each shell block."""
    blocks = re.findall(r"^```bash\n(.*?)^```", path.read_text(), re.MULTILINE | re.DOTALL)
    return [
        [shlex.split(line, comments=True) for line in block.replace("\\\n", " ").splitlines()]
        for block in blocks
    ]


READS = ("<", "--prompt-file", "--config")


@pytest.mark.parametrize("path", DOCUMENTS, ids=relative)
def test_shell_commands_read_existing_files(path: Path) -> None:
    """A file is in the repository, or an earlier line of the block writes it."""
    for block in shell_lines(path):
        made: set[str] = set()
        for words in block:
            read = [words[at + 1] for at, word in enumerate(words) if word in READS]
            if words[:2] == ["specops", "plot"]:
                read += [word for word in words if word.endswith(".json")]
            for name in read:
                assert name in made or (ROOT / name).is_file(), f"{' '.join(words)}: {name}"
            made |= {words[at + 1] for at, word in enumerate(words) if word == "--json"}


def test_lists_of_models_match_the_families() -> None:
    """The lists are in the README and on the first page of the site."""
    from specops.engine.models.families import FAMILIES

    runs = {family.title for family in FAMILIES}
    for path in (ROOT / "README.md", ROOT / "docs/index.md"):
        text = " ".join(path.read_text().split())
        (listed,) = re.findall(r"Hugging Face checkpoint(?: of your own)?: (.+?)\. ", text)
        assert set(listed.split(", ")) == runs, path.name


def printed_and_expected(code: str) -> tuple[list[str], list[str]]:
    """Return the distinct lines that a document's code prints, and those in its comments."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(code, "document", "exec"), {})
    expected = re.findall(r"^ *print\(.*\)  # (.*)", code, re.MULTILINE)
    return list(dict.fromkeys(printed.getvalue().splitlines())), list(dict.fromkeys(expected))


def python_of(page: str) -> str:
    text = (ROOT / "docs" / page).read_text()
    return "".join(re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL))


def test_engine_page_prints_its_comments() -> None:
    printed, expected = printed_and_expected(python_of("embedding.md"))
    assert printed == expected and len(printed) == 3


@pytest.mark.parametrize(("page", "count"), [("requests.md", 2), ("audit.md", 1)])
def test_pages_print_their_comments(page: str, count: int) -> None:
    pytest.importorskip("openai")
    from serving import serving
    from specops.engine import Engine, EngineConfig

    with serving(Engine(EngineConfig(num_pages=64, seed=0))) as one:
        code = python_of(page).replace(ADDRESS, one.url)
        assert one.url in code
        printed, expected = printed_and_expected(code)
    assert printed == expected and len(printed) == count


def application_snippets() -> dict[str, str]:
    """Return the Python examples of the page on applications, by the package that they import."""
    text = (ROOT / "docs" / "applications.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    return {re.findall(r"^(?:from|import) (\w+)", code)[0]: code for code in blocks}


def require_equal_answers(url: str, packages: tuple[str, ...]) -> None:
    """Check that the page's examples print the answer to its curl command."""
    import httpx

    (curl,) = (
        line
        for block in shell_lines(ROOT / "docs/applications.md")
        for line in block[:1]
        if line[:1] == ["curl"]
    )
    body = curl[curl.index("-d") + 1]
    headers = dict([curl[curl.index("-H") + 1].split(": ")])
    answer = httpx.post(curl[1].replace(ADDRESS, url), content=body, headers=headers, timeout=300)
    content = answer.json()["choices"][0]["message"]["content"]
    for package in packages:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(application_snippets()[package].replace(ADDRESS, url), {})
        assert printed.getvalue().rstrip("\n") == content.rstrip("\n"), package


def test_applications_get_answers_at_the_named_addresses() -> None:
    pytest.importorskip("openai")
    pytest.importorskip("anthropic")
    import httpx
    from serving import serving
    from specops.engine import Engine, EngineConfig

    text = (ROOT / "docs" / "applications.md").read_text()
    with serving(Engine(EngineConfig(num_pages=64, seed=0))) as one:
        require_equal_answers(one.url, ("openai", "anthropic"))
        schema = httpx.get(f"{one.url}/openapi.json").json()
    routes = {"", "/v1", *schema["paths"]}
    assert set(re.findall(r"http://[\w.]+:8000([\w/]*)", text)) <= routes
    assert {f"/v1/{api}" for api in re.findall(r'wire_api = "(\w+)"', text)} <= routes
    (script,) = re.findall(r"^```js\n.*?create\(\{\n(.*?)^\}\);", text, re.MULTILINE | re.DOTALL)
    fields = re.findall(r"^  (\w+): ", script, re.MULTILINE)
    assert set(fields) <= set(
        schema["components"]["schemas"]["ChatCompletionRequest"]["properties"]
    )


def test_server_page_lists_every_option() -> None:
    """The table has the options of `specops serve` and no others."""
    pytest.importorskip("fastapi")
    from specops.cli.serve import _parser

    flags = {flag for action in _parser("specops")._actions for flag in action.option_strings}
    text = (ROOT / "docs" / "server.md").read_text()
    table = text.split("| options | for |")[1].split("\n\n")[0]
    options_in_table = {
        flag.replace("[no-]", "") for flag in re.findall(r"`(--[a-z\[\]-]+)`", table)
    }
    assert options_in_table == {flag for flag in flags if not re.match(r"-h|--help|--no-", flag)}


def test_commands_and_migration_tables_name_existing_options() -> None:
    pytest.importorskip("fastapi")
    from specops.cli.serve import _parser

    flags = set(_parser()._option_string_actions)
    for path in DOCUMENTS:
        for words in (line for block in shell_lines(path) for line in block):
            if words[:2] == ["specops", "serve"]:
                named = {word.partition("=")[0] for word in words if word.startswith("--")}
                assert named <= flags, f"{path.name}: {' '.join(words)}"
    text = (ROOT / "docs" / "migration.md").read_text()
    rows = re.findall(r"^\|[^|]+\|([^|]+)\|[^|]*\|$", text, re.MULTILINE)
    assert len(rows) > 50
    assert set(re.findall(r"`(--[a-z-]+)", "".join(rows))) <= flags
