# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: E402  (where the server's packages are missing, nothing else is imported)
"""LoRA adapters over HTTP: names of models, loading and unloading, and their refusals."""

import asyncio
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

for name in ("fastapi", "uvicorn", "pydantic", "msgspec", "prometheus_client", "jinja2", "httpx"):
    pytest.importorskip(name)

from adapters import write_adapter
from serving import JSON, Served, http, post, serving, serving_app, wait_for
from specops.api.contract import with_adapter
from specops.api.errors import UnknownAdapter
from specops.api.messages import LoadAdapter, Submit, UnloadAdapter
from specops.api.tokenizer import Tokenizer
from specops.cli.options import lora_module
from specops.cli.serve import _parser, _read, main
from specops.engine import SamplingParams
from specops.server import make_app
from specops.server.chat import ChatFormat
from specops.server.dispatch import Dispatch
from specops.server.jobs import EngineAway
from specops.server.metrics import Metrics
from specops.service.process import EngineProcess, ProcessClient
from specops.service.thread import ThreadClient
from specops.service.wire import Frames, Setup, encoded, to_process
from test_lora import PROMPT, engine, model_dir

BODY = {"prompt": PROMPT, "max_tokens": 8, "temperature": 0, "logprobs": 2, "ignore_eos": True}
CHAT = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2, "ignore_eos": True}


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    ours = engine(["lora0", "lora1"], max_loras=4)
    template = ChatFormat("{% for m in messages %}<{{ m.content }}>{% endfor %}")
    with serving(ours, chat_format=template, runtime_lora_dir=model_dir()) as one:
        yield one


def get(served: Served, path: str) -> Any:
    return http().get(f"{served.url}/v1/{path}")


def load(served: Served, name: str, path: str) -> Any:
    return post(served, "load_lora_adapter", {"lora_name": name, "lora_path": path})


def unload(served: Served, name: str) -> Any:
    return post(served, "unload_lora_adapter", {"lora_name": name})


def answer(served: Served, model: str | None, **more: Any) -> Any:
    response = post(served, "completions", {**BODY, "model": model, **more})
    assert response.status_code == 200, response.text
    return response.json()


def expected(adapter: str | None) -> list[float]:
    """Return the logprobs of an engine that has only this adapter."""
    alone = engine([] if adapter is None else [adapter])
    params = SamplingParams(max_tokens=8, temperature=0.0, logprobs=2, ignore_eos=True)
    (done,) = alone.generate(
        [PROMPT], params, adapter=adapter, speculative_config={"method": "naive"}
    )
    return [one.logprob for one in done.logprobs]


def test_model_of_a_request_names_an_adapter(served: Served) -> None:
    found = {}
    for name in ("model", "lora0", "lora1"):
        reply = found[name] = answer(served, name)
        adapter = None if name == "model" else name
        assert reply["model"] == name
        assert reply["choices"][0]["logprobs"]["token_logprobs"] == expected(adapter)
        contract = get(served, f"contract?model={name}").json()
        assert reply["system_fingerprint"].endswith(contract["digest"])
        assert contract.get("adapter") == served.engine.adapters.get(name)
    assert len({one["system_fingerprint"] for one in found.values()}) == 3
    assert get(served, "contract").json() == get(served, "contract?model=model").json()
    assert answer(served, None)["model"] == "model"
    for path, body in (
        ("chat/completions", CHAT),
        ("messages", CHAT),
        ("responses", {"input": "a", "max_output_tokens": 2, "ignore_eos": True}),
    ):
        reply = post(served, path, {**body, "model": "lora1"})
        assert reply.status_code == 200 and reply.json()["model"] == "lora1", reply.text


def test_answers_of_adapters_are_audited_and_scored(served: Served) -> None:
    for name in ("model", "lora1"):
        (choice,) = answer(served, name, audit=True)["choices"]
        record = choice["audit"]
        assert record.get("adapter") == served.engine.adapters.get(name)
        (verdict,) = post(served, "audit", {"records": [record]}).json()["verdicts"]
        assert verdict["confirmed"] and verdict["same_contract"], verdict
        scored = post(
            served,
            "score",
            {"prompt": PROMPT, "continuations": [record["token_ids"]], "model": name},
        ).json()
        assert scored["model"] == name
        assert scored["scores"][0]["logprobs"] == choice["logprobs"]["token_logprobs"]
    other = {**record, "adapter": "0" * 16, "contract": None}
    response = post(served, "audit", {"records": [other]})
    assert response.status_code == 400
    sentence = "adapter must be the digest of a loaded adapter"
    assert sentence in response.json()["error"]["message"]
    model = {**record, "adapter": None, "contract": None}
    (verdict,) = post(served, "audit", {"records": [model]}).json()["verdicts"]
    assert not verdict["confirmed"] and verdict["what"] in ("token", "logprob")


def test_models_lists_adapters_with_their_parent(served: Served) -> None:
    cards = {card["id"]: card for card in get(served, "models").json()["data"]}
    assert list(cards) == ["model", "lora0", "lora1"]
    assert "parent" not in cards["model"]
    assert cards["lora0"] == {**cards["model"], "id": "lora0", "parent": "model"}
    assert get(served, "models/lora1").json() == cards["lora1"]


def test_unknown_adapters_are_unknown_models(served: Served) -> None:
    sentence = "the model 'lora9' does not exist; this server serves 'model', 'lora0', 'lora1'"
    for response in (
        post(served, "completions", {**BODY, "model": "lora9"}),
        get(served, "models/lora9"),
        get(served, "contract?model=lora9"),
    ):
        assert response.status_code == 404
        error = response.json()["error"]
        assert error["message"] == sentence and error["code"] == "model_not_found"


def test_adapters_are_loaded_and_unloaded(served: Served) -> None:
    response = load(served, "more", str(model_dir() / "lora2"))
    assert response.status_code == 200
    assert response.json()["message"] == "Success: LoRA adapter 'more' added successfully."
    reply = answer(served, "more")
    assert reply["choices"][0]["logprobs"]["token_logprobs"] == expected("lora2")
    stream = {**BODY, "model": "more", "stream": True, "max_tokens": 150, "n": 2}
    with http().stream("POST", f"{served.url}/v1/completions", json=stream) as running:
        lines = running.iter_lines()
        first = json.loads(next(lines)[6:])
        assert first["model"] == "more"
        response = unload(served, "more")
        assert response.json()["message"] == "Success: LoRA adapter 'more' removed successfully."
        assert post(served, "completions", {**BODY, "model": "more"}).status_code == 404
        rest = [line for line in lines if line]
    assert rest[-1] == "data: [DONE]" and "error" not in json.loads(rest[-2][6:])
    assert load(served, "more", "lora3").status_code == 200  # another one, by its relative path
    other = answer(served, "more")
    assert other["choices"][0]["logprobs"]["token_logprobs"] == expected("lora3")
    assert other["system_fingerprint"] != reply["system_fingerprint"]
    assert unload(served, "more").status_code == 200


def test_adapters_that_cannot_be_loaded_are_refused(served: Served, tmp_path: Path) -> None:
    folder = model_dir()
    outside = write_adapter(tmp_path / "outside", folder / "model", 0)
    (folder / "link").symlink_to(outside)
    (folder / "loop").symlink_to(folder / "loop")
    below = "lora_path must be a directory below that of --runtime-lora-dir, got "
    cases = [
        ("more", str(outside), f"{below}'{outside}'"),
        ("more", "../outside", f"{below}'../outside'"),
        ("more", "link", f"{below}'link'"),
        ("more", ".", f"{below}'.'"),
        ("more", "a\0b", below),
        ("more", "absent", "adapter 'more' of absent: adapter_config.json cannot be read"),
        ("more", "loop", "loop"),
        ("more", "model", "adapter 'more' of model: adapter_config.json cannot be read"),
        ("model", "lora2", "lora_name must differ from the model's names, got 'model'"),
        ("lora0", "lora2", "the name of an adapter must be free, got 'lora0', which is in use"),
        ("a\nb", "lora2", "the name of an adapter must have 1 to 256 printable characters"),
        ("", "lora2", "the name of an adapter must have 1 to 256 printable characters"),
    ]
    for name, path, message in cases:
        response = load(served, name, path)
        assert response.status_code == 400, path
        assert message in response.json()["error"]["message"]
    for path, body in (  # half of a surrogate pair
        ("load_lora_adapter", r'{"lora_name": "\ud800", "lora_path": "lora2"}'),
        ("load_lora_adapter", r'{"lora_name": "more", "lora_path": "\ud800"}'),
        ("load_lora_adapter", r'{"lora_name": "more", "lora_path": "\udc80"}'),
        ("unload_lora_adapter", r'{"lora_name": "\ud800"}'),
    ):
        response = http().post(f"{served.url}/v1/{path}", content=body, headers=JSON)
        assert response.status_code in (400, 404), path
    for index in (2, 3):
        assert load(served, f"more{index}", f"lora{index}").status_code == 200
    response = load(served, "more", "lora4")
    assert "4 adapters are loaded, as many as max_loras allows; unload one first" in response.text
    for index in (2, 3):
        assert unload(served, f"more{index}").status_code == 200
    response = unload(served, "more")
    assert response.status_code == 404
    assert "must be one that is loaded ('lora0', 'lora1'), got 'more'" in response.text
    for field in ({"load_inplace": True}, {"speed": 1}):
        body = {"lora_name": "more", "lora_path": "lora2", **field}
        assert post(served, "load_lora_adapter", body).status_code == 400
    assert list(served.engine.adapters) == ["lora0", "lora1"]


def test_routes_need_the_option() -> None:
    with serving(engine(["lora0"])) as served:
        for response in (load(served, "more", "lora1"), unload(served, "lora0")):
            assert response.status_code == 404
            assert "only with --runtime-lora-dir" in response.json()["error"]["message"]
        assert answer(served, "lora0")["model"] == "lora0"


def test_request_of_an_adapter_that_has_just_gone_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The engine may unload or replace an adapter after the server has looked for it."""
    ours = engine(["lora0", "lora1"])
    other = ours.adapter("lora1")

    def gone(name: str) -> Any:
        raise UnknownAdapter("it has gone")

    with serving(ours) as served:
        for found, message in (
            (gone, "it has gone"),
            (lambda name: other, "adapter 'lora0' has just been replaced; try again"),
        ):
            monkeypatch.setattr(ours, "adapter", found)
            response = post(served, "completions", {**BODY, "model": "lora0"})
            error = response.json()["error"]
            assert response.status_code == 404
            assert error["message"] == message and error["param"] == "model"


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_restarted_engine_has_the_adapters_again(num_ranks: int) -> None:
    folder = model_dir()
    settings = {
        "model": str(folder / "model"),
        "device": "cpu",
        "dtype": "float32",
        "num_threads": 1,
        "tensor_parallel_size": num_ranks,
        "lora_modules": [["lora0", str(folder / "lora0")], ["lora1", str(folder / "lora1")]],
    }
    client = ProcessClient(EngineProcess(Setup(settings, "error")))
    tokenizer = Tokenizer.from_dir(settings["model"])
    with serving_app(make_app(client, tokenizer, runtime_lora_dir=folder)) as url:
        served = Served(None, url)
        assert unload(served, "lora0").status_code == 200
        assert load(served, "lora0", "lora3").status_code == 200
        assert load(served, "more", "lora2").status_code == 200
        assert unload(served, "lora1").status_code == 200

        def answers() -> list[Any]:
            replies = [answer(served, name) for name in ("lora0", "more")]
            return [(one["system_fingerprint"], one["choices"][0]["logprobs"]) for one in replies]

        before = answers()
        assert client.pid is not None
        pid = client.pid
        os.kill(pid, signal.SIGKILL)
        wait_for(lambda: client.pid != pid and client.health == "ok")
        wait_for(lambda: set(client.status.adapters) == {"lora0", "more"})
        assert answers() == before


def test_change_of_adapters_ends_when_the_engine_is_replaced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The new engine does not know of a change that the old one has not answered."""
    client = ThreadClient(engine(["lora0"]))

    async def replaced(settings: Any) -> None:
        pass

    monkeypatch.setattr(client, "change_adapters", lambda change: None)
    monkeypatch.setattr(client, "update", replaced)

    async def run() -> None:
        dispatch = Dispatch(client, Metrics(client))
        await dispatch.start()
        change = asyncio.ensure_future(dispatch.change_adapters(LoadAdapter(1, "more", "/a")))
        await asyncio.sleep(0)
        await dispatch.pause(aborts=False)
        await dispatch.update({})
        with pytest.raises(EngineAway, match="was replaced while its adapters changed"):
            await change
        await dispatch.stop()

    asyncio.run(run())


def test_commands_are_unchanged_by_encoding() -> None:
    job = Submit(3, "", [[1]], SamplingParams(), None, True, adapter=("one", "digest"))
    for command in (LoadAdapter(1, "one", "/a"), UnloadAdapter(2, "one"), job):
        (found,) = map(to_process, Frames().feed(encoded(command)))
        for field in type(command).__struct_fields__:
            assert getattr(found, field) == getattr(command, field)


def test_contract_of_an_adapter_has_another_digest() -> None:
    own = {"specops": "1", "digest": "x"}
    assert with_adapter(own, None) == own
    one, other = with_adapter(own, "a"), with_adapter(own, "b")
    assert one["adapter"] == "a" and len({own["digest"], one["digest"], other["digest"]}) == 3


def test_options_of_adapters_are_read_and_checked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--lora-modules", "a=x/y=z", '{"name": "b", "path": "p", "base_model_name": "m"}']
    assert _read(_parser(), flags).lora_modules == [("a", "x/y=z"), ("b", "p")]
    for text in (
        "a",
        "=x",
        "a=",
        "{",
        '{"name": "a"}',
        '{"name": "a", "path": 3}',
        '{"path": "b"}',
    ):
        with pytest.raises(Exception, match="must be NAME=PATH or"):
            lora_module(text)
    folder = ["--runtime-lora-dir", str(tmp_path)]
    splitwise = ["--scheduler-name", "splitwise", "--role", "mixed"]
    cases = {
        "runtime_lora_dir must be a directory": ["--runtime-lora-dir", str(tmp_path / "none")],
        "runtime_lora_dir needs data_parallel_size 1": [*folder, "--data-parallel-size", "2"],
        "runtime_lora_dir needs scheduler_name local": [*folder, *splitwise],
        "max_loras must be at least the 2": ["--max-loras", "1", "--lora-modules", "a=b", "c=d"],
    }
    for message, options in cases.items():
        assert main(options) == 2
        assert message in capsys.readouterr().err
