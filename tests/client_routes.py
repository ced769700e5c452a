# SPDX-License-Identifier: Apache-2.0
"""Every route of the official `openai` client, from its source, and the server's answers."""

import ast
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai

SERVED = {
    ("GET", "/models"),
    ("GET", "/models/{model}"),
    ("POST", "/chat/completions"),
    ("POST", "/completions"),
    ("POST", "/responses"),
    ("GET", "/responses/{response_id}"),
    ("DELETE", "/responses/{response_id}"),
    ("GET", "/responses/{response_id}/input_items"),
}
_CALLS = {"_get", "_post", "_put", "_patch", "_delete", "_get_api_list"}

# Common client calls that are not supported.
SURFACES: dict[str, Callable[[openai.OpenAI], Any]] = {
    "responses.cancel": lambda client: client.responses.cancel("x"),
    "embeddings.create": lambda client: client.embeddings.create(model="x", input="x"),
    "moderations.create": lambda client: client.moderations.create(input="x"),
    "images.generate": lambda client: client.images.generate(prompt="x"),
    "audio.speech.create": lambda client: client.audio.speech.create(
        model="x", input="x", voice="alloy"
    ),
    "files.list": lambda client: client.files.list(),
    "files.create": lambda client: client.files.create(file=b"x", purpose="batch"),
    "batches.list": lambda client: client.batches.list(),
    "fine_tuning.jobs.list": lambda client: client.fine_tuning.jobs.list(),
    "vector_stores.list": lambda client: client.vector_stores.list(),
    "chat.completions.list": lambda client: client.chat.completions.list(),
    "chat.completions.retrieve": lambda client: client.chat.completions.retrieve("x"),
    "models.delete": lambda client: client.models.delete("x"),
}


def client_routes() -> list[tuple[str, str]]:
    """Return method and path of every call in the client's resources."""
    assert openai.__file__ is not None
    found = set()
    for path in (Path(openai.__file__).parent / "resources").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and node.func.attr in _CALLS
            ):
                found.add((_verb(node), _template(node)))
    return sorted(found)


def _verb(call: ast.Call) -> str:
    assert isinstance(call.func, ast.Attribute)
    if call.func.attr != "_get_api_list":
        return call.func.attr[1:].upper()
    arguments_by_name = {one.arg: one.value for one in call.keywords}
    method = arguments_by_name.get("method")
    return str(method.value).upper() if isinstance(method, ast.Constant) else "GET"


def _template(call: ast.Call) -> str:
    """Return the path, with its parameters in braces."""
    path: Any = call.args[0]
    if isinstance(path, ast.Call):  # path_template("/batches/{batch_id}", ...)
        path = path.args[0]
    assert isinstance(path, ast.Constant), ast.unparse(call)
    return str(path.value).partition("?")[0]


def refusal_of(client: openai.OpenAI, verb: str, template: str) -> openai.APIStatusError:
    """Return the server's refusal of a route; fail unless it is an error of OpenAI's shape."""
    path = re.sub(r"\{\w+\}", "x", template)
    send = getattr(client, verb.lower())
    try:
        send(path, cast_to=object)
    except openai.APIStatusError as error:
        check_refusal(error, verb, f"/v1{path}")
        return error
    raise AssertionError(f"{verb} {path} is answered")


def check_refusal(error: openai.APIStatusError, verb: str, path: str) -> None:
    """Fail unless an error names the route, in JSON of OpenAI's shape."""
    assert error.response.headers["content-type"] == "application/json"
    body: Any = error.body
    assert set(body) == {"message", "type", "param", "code"}
    assert body["type"] == "invalid_request_error"
    _, route, *_ = body["message"].split(": ", 2)  # an alternative may follow
    assert route == f"{verb} {path}"
    if error.status_code == 404:
        assert isinstance(error, openai.NotFoundError) and body["code"] == "unknown_url"
    else:
        assert error.status_code == 405 and error.response.headers["allow"]


def surface_refusal(client: openai.OpenAI, name: str) -> openai.APIStatusError:
    """Return the error that a call of SURFACES raises."""
    try:
        SURFACES[name](client)
    except openai.APIStatusError as error:
        request = error.request
        check_refusal(error, request.method, request.url.path)
        return error
    raise AssertionError(f"{name} is answered")


def routes_text(client: openai.OpenAI) -> str:
    """Return the document's section on routes, after calling every route that is not served."""
    others = [one for one in client_routes() if one not in SERVED]
    statuses = Counter(refusal_of(client, *one).status_code for one in others)
    assert set(statuses) == {404, 405}
    lines = [
        "## Not supported",
        "",
        f"The client knows {len(others) + len(SERVED)} routes, of which {len(SERVED)} are served. "
        "The test calls each of the",
        "other routes. The server answers in OpenAI's error format with the route in the message: "
        f"{statuses[404]} with",
        f"404 and the code `unknown_url`, {statuses[405]} with 405, since their path has another "
        "method. Some of the calls:",
        "",
        "| call | status | message |",
        "| - | - | - |",
    ]
    for name in SURFACES:
        error = surface_refusal(client, name)
        body: Any = error.body
        lines.append(f"| `client.{name}` | {error.status_code} | {body['message']} |")
    return "\n".join(lines) + "\n"
