# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: E402  (where a package is missing, nothing else is imported)
"""Chats on the page at `/`: Markdown, requests as code, and errors with labels of the form."""

import contextlib
import io
import json
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest

for name in ("fastapi", "uvicorn", "pydantic", "prometheus_client", "jinja2", "playwright"):
    pytest.importorskip(name)

import httpx
from browsing import (
    choose,
    connected,
    fill,
    needs_chromium,
    opened,
    run,
    text_of,
)
from fake_engine import FakeEngine
from playwright.sync_api import Browser, Page, expect
from serving import Served, serving

pytestmark = pytest.mark.ci


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving(FakeEngine()) as served:
        yield served


# ---- Markdown ----

PRE = '<pre tabindex="0" role="group" aria-label="Code{}"><code>{}</code></pre>'
MARKDOWN = {
    "one\ntwo\n\nthree": "<p>one<br>two</p><p>three</p>",
    "## A *b*\ntext": "<h3>A <em>b</em></h3><p>text</p>",
    "# a\nx = 1\n\n# B\n\nif x:\n    # c": ("<p># a<br>x = 1</p><h3>B</h3><p>if x:<br>    # c</p>"),
    "**a** `b*c*` 2*3*4 d": "<p><strong>a</strong> <code>b*c*</code> 2<em>3</em>4 d</p>",
    "a * b * c ** d": "<p>a * b * c ** d</p>",
    "- a\n- b\n  - c\n- d": "<ul><li>a</li><li>b<ul><li>c</li></ul></li><li>d</li></ul>",
    "3. a\n4. b\n\nend": '<ol start="3"><li>a</li><li>b</li></ol><p>end</p>',
    "> a\n> b": "<blockquote><p>a<br>b</p></blockquote>",
    "a\n\n---\n\nb": "<p>a</p><hr><p>b</p>",
    "```py\nx = '*a*'\n\n# b\n```\nc": PRE.format(": py", "x = '*a*'\n\n# b") + "<p>c</p>",
    "```\nnot closed": PRE.format("", "not closed"),
    "[a](https://b.c) [d](javascript:e)": (
        '<p><a href="https://b.c" target="_blank" rel="noopener noreferrer">a</a> '
        "[d](javascript:e)</p>"
    ),
    "<b onclick=x>a</b> &amp;": "<p>&lt;b onclick=x&gt;a&lt;/b&gt; &amp;amp;</p>",
    "": "",
}
RENDER = """async texts => {
  const {rendered} = await import("/page/markdown.js");
  return texts.map(text => rendered(text).innerHTML);
}"""


@needs_chromium
def test_markdown_becomes_elements(page: Page) -> None:
    made = page.evaluate(RENDER, list(MARKDOWN))
    assert dict(zip(MARKDOWN, made, strict=True)) == MARKDOWN


@needs_chromium
def test_long_texts_of_marks_are_rendered_quickly(page: Page) -> None:
    marks = ("*", "`", "x`", "*a ", "[", "**a", "[a](", "> ", "- ", "- a ", "# ")
    texts = [f"{begin}{mark * 4000}" for mark in marks for begin in ("", "x")]
    session = page.context.new_cdp_session(page)
    # CPU time of the page's thread, which other load on the machine does not change.
    session.send("Performance.enable", {"timeDomain": "threadTicks"})

    def spent() -> float:
        metrics = session.send("Performance.getMetrics")["metrics"]
        return next(float(one["value"]) for one in metrics if one["name"] == "ThreadTime")

    begin = spent()
    page.evaluate(RENDER, texts)
    assert 0 < spent() - begin < 5


# ---- chats ----


def messages(page: Page) -> list[str]:
    return page.locator(".message").all_inner_texts()


@needs_chromium
def test_message_is_edited_and_answer_regenerated(page: Page) -> None:
    sent: list[Any] = []
    page.on("request", lambda one: sent.extend([one.post_data_json] * bool(one.post_data)))
    fill(page, tokens="20")
    choose(page, "chat")
    fill(page, message="*one*<|end|>")
    run(page)
    expect(page.locator("article .prose em")).to_have_text("one")
    assert text_of(page) == "*one*", "its tokens are shown, too"
    fill(page, message="two")
    run(page)
    page.get_by_role("button", name="Regenerate").click()
    expect(page.locator("body")).to_have_attribute("data-state", "done")
    assert [one["content"] for one in sent[-1]["messages"]] == ["*one*<|end|>", "*one*", "two"]
    assert sent[-1]["seed"] != sent[-2]["seed"]
    assert len(messages(page)) == page.locator("article").count() == 2
    edit = page.locator(".asked").first.get_by_role("button", name="Edit")
    edit.click()
    expect(page.locator("#message")).to_have_value("*one*<|end|>")
    expect(page.locator("#replaces")).to_be_visible()
    assert page.locator(".replaced").count() == 4
    page.locator("#keep-message").click()
    assert page.locator(".replaced").count() == 0
    edit.click()
    fill(page, message="other<|end|>")
    run(page)
    assert [one["content"] for one in sent[-1]["messages"]] == ["other<|end|>"]
    assert len(messages(page)) == page.locator("article").count() == 1
    expect(page.locator("#replaces")).to_be_hidden()


@needs_chromium
def test_answer_is_copied(served: Served, browser: Browser) -> None:
    with opened(browser, served, permissions=["clipboard-read", "clipboard-write"]) as page:
        connected(page)
        choose(page, "chat")
        fill(page, message="# a<|end|>")
        run(page)
        page.evaluate("setTimeout = () => 0")  # or the label changes back after two seconds
        page.locator("article").get_by_role("button", name="Copy").click()
        expect(page.locator("article").get_by_role("button", name="Copied")).to_be_visible()
        assert page.evaluate("navigator.clipboard.readText()") == "# a"


@needs_chromium
def test_chats_are_listed(page: Page) -> None:
    fill(page, tokens="9")
    choose(page, "chat")
    for text in ("first", "second"):
        page.locator("#new-chat").click()
        fill(page, message=f"{text}<|end|>")
        run(page)
    page.locator("#chats summary").click()
    chats = page.locator("#chat-list li")
    expect(chats).to_have_count(2)
    chats.nth(1).locator("button").first.click()
    expect(page.locator(".message")).to_have_text(["You: first<|end|>"])
    fill(page, message="more")
    run(page)
    page.reload()
    connected(page)
    expect(page.locator(".message")).to_have_text(["You: first<|end|>", "You: more"])
    page.locator("#chats summary").click()
    chats.nth(0).get_by_role("button", name="Delete").click()
    expect(page.locator(".message")).to_have_count(0)
    expect(chats).to_have_count(1)
    choose(page, "write")
    expect(page.locator("#chats")).to_be_hidden()


# ---- a request as code ----


def code(page: Page, language: str) -> str:
    page.locator("#language").select_option(language)
    return page.locator("#code-text").inner_text()


@needs_chromium
@pytest.mark.parametrize("mode", ["write", "chat"])
def test_request_is_shown_as_code_that_runs(page: Page, mode: str) -> None:
    pytest.importorskip("openai")
    fill(page, tokens="12", seed="9007199254740993")
    choose(page, mode)
    page.locator("#as-code").click()
    fill(page, **{"prompt" if mode == "write" else "message": 'it\'s "a" $HOME\n'})
    answer = json.loads(
        subprocess.run(
            ["bash", "-c", code(page, "curl")], capture_output=True, check=True, text=True
        ).stdout
    )
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(code(page, "python"), "code", "exec"), {})
    choice = answer["choices"][0]
    text = choice["text"] if mode == "write" else choice["message"]["content"]
    assert printed.getvalue() == text + "\n" and text.startswith('it\'s "a" $')
    assert all("9007199254740993" in code(page, language) for language in ("curl", "python"))
    run(page)
    assert text_of(page) == text, "the page sends the same request"
    page.locator("#as-code").click()
    expect(page.locator("#code")).to_be_hidden()


@needs_chromium
def test_code_never_contains_the_api_key(browser: Browser) -> None:
    with (
        serving(FakeEngine(), api_keys=["geheim"]) as served,
        opened(browser, served, expects=("401",)) as page,
    ):
        expect(page.locator("#error")).to_have_text("This server needs an API key.")
        expect(page.locator("#contract")).to_be_hidden()
        fill(page, key="geheim", prompt="abc", tokens="6")
        run(page)
        page.locator("#as-code").click()
        for language in ("curl", "python"):
            text = code(page, language)
            assert "API_KEY" in text and "geheim" not in text


# ---- errors and links ----


@needs_chromium
def test_errors_name_the_fields_by_their_labels(browser: Browser) -> None:
    engine = FakeEngine(methods=("naive", "mtp"))
    with serving(engine) as served, opened(browser, served, expects=("400",)) as page:
        connected(page)
        choose(page, "write")
        page.locator("#method").select_option("mtp")
        fill(page, prompt="abc", k="3", steps="6", tokens="5")
        run(page, "failed")
        expect(page.locator("#error")).to_have_text(
            "“Of these by MTP” must be at most “Drafts per step” = 3, got 6."
        )
        field = page.locator("#steps")
        expect(field).to_have_attribute("aria-invalid", "true")
        expect(field).to_have_attribute("aria-describedby", "error")
        fill(page, steps="2")
        run(page)
        assert page.locator("[aria-invalid]").count() == 0


@needs_chromium
def test_footer_links_work(page: Page, served: Served) -> None:
    links = page.locator("footer a").evaluate_all("links => links.map(link => link.href)")
    assert len(links) == 3
    for link in links:
        assert httpx.get(link).status_code == 200, link
    icon = httpx.get(f"{served.url}/favicon.ico")
    assert page.locator("link[rel=icon]").get_attribute("href") == "favicon.ico"
    assert icon.status_code == 200 and icon.headers["content-type"].startswith("image/svg+xml")
