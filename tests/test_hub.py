# SPDX-License-Identifier: Apache-2.0
"""Models by name: from the cache of the Hugging Face Hub, or downloaded from a fake Hub."""

import argparse
import contextlib
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("huggingface_hub")

from specops.cli import hub as hub_module
from specops.cli import main, options
from specops.cli.hub import is_name

ASSETS = Path(options.__file__).parents[1] / "assets"
SHA = "1234567890" * 4
FILES = {"config.json": b"{}", "model.safetensors": b"weights", "pytorch_model.bin": b"never"}
_PARTS = ("model-1-of-2.safetensors", "model-2-of-2.safetensors")
_INDEX = {"weight_map": {"a.weight": _PARTS[0], "b.weight": _PARTS[1]}}
# Files of other models: one with copies in the authors' format, and draft heads.
OTHERS: dict[str, dict[str, bytes]] = {
    "org/parts": {
        "config.json": b"{}",
        "chat_template.jinja": b"{{ messages }}",
        "model.safetensors.index.json": json.dumps(_INDEX).encode(),
        **{name: b"part" for name in _PARTS},
        "consolidated.safetensors": b"copy",
        "original/model.safetensors": b"copy",
        "original/config.json": b"{}",
        "model.fp32.safetensors": b"copy",
        "tokenizer.model": b"never",
    },
    "org/eagle": {"config.json": b"{}", "pytorch_model.bin": b"head", "optimizer.pt": b"never"},
    "org/medusa": {"config.json": b"{}", "medusa_lm_head.pt": b"head"},
    "org/hydra": {"config.json": b"{}", "hydra_lm_head.pt": b"head"},
    "org/gguf": {
        "model-Q4_K_M.gguf": b"four",
        "sub/model.q8_0.gguf": b"eight",
        "a-Q2_K.gguf": b"",
        "b-Q2_K.gguf": b"",
        "sub/c-Q5_0-00001-of-00002.gguf": b"five",
        "sub/c-Q5_0-00002-of-00002.gguf": b"and five",
    },
    "org/dflash": {**FILES, "mask_embedding.pt": b"mask"},
}
REFUSALS = {
    "org/gated": (403, "GatedRepo"),
    "org/none": (404, "RepoNotFound"),
    "org/broken": (500, ""),
}


class _Hub(BaseHTTPRequestHandler):
    requested: list[str]

    def do_GET(self) -> None:
        self.requested.append(self.path)
        parts = self.path.partition("?")[0].strip("/").split("/")
        name = "/".join(parts[2:4] if parts[0] == "api" else parts[:2])
        if "no-such-tag" in parts:
            self._send(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
        elif name in REFUSALS:
            status, code = REFUSALS[name]
            self._send(status, b"{}", {"X-Error-Code": code} if code else {})
        elif parts[0] == "api":
            files = OTHERS.get(name, FILES)
            siblings = [{"rfilename": file} for file in files]
            whole = {"id": name, "modelId": name, "sha": SHA, "siblings": siblings}
            tree = [
                {"type": "file", "path": file, "size": len(data), "oid": file}
                for file, data in files.items()
            ]
            self._send(200, json.dumps(tree if "tree" in parts else whole).encode(), {})
        else:
            file = "/".join(parts[4:])
            data = OTHERS.get(name, FILES)[file]
            self._send(200, data, {"ETag": f'"{name}/{file}"', "X-Repo-Commit": SHA})

    do_HEAD = do_GET

    def _send(self, status: int, data: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(data)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(data)

    def log_message(self, *_: Any) -> None:
        pass


@contextlib.contextmanager
def hub() -> Iterator[tuple[str, list[str]]]:
    """Serve a Hub with some models and some refusals; yield its URL and the requested paths."""
    requested: list[str] = []
    handler = type("Handler", (_Hub,), {"requested": requested})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", requested
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def directories(
    names: list[str], cache: Path, *, of_drafters: bool = False, **environment: str
) -> list[str]:
    """Resolve names, which may have a revision, in a new process.

    Return the path or the error message of each.
    """
    found = "path_of(*name.split())"
    if of_drafters:
        found = "json.loads(resolved(json.dumps({'model': name})))['model']"
    code = f"""
import json, sys
from specops.cli.hub import path_of, resolved
for name in sys.argv[1:]:
    try:
        print({found})
    except ValueError as error:
        print(error)
"""
    own = {"HF_HUB_CACHE": str(cache), "HF_HUB_DISABLE_PROGRESS_BARS": "1", **environment}
    command = [sys.executable, "-c", code, *names]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=300, env=os.environ | own
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_model_is_downloaded_once_and_then_works_offline(tmp_path: Path) -> None:
    with hub() as (url, requested):
        (first,) = directories(["org/model"], tmp_path, HF_ENDPOINT=url)
        assert {path.name for path in Path(first).iterdir()} == {"config.json", "model.safetensors"}
        assert (Path(first) / "model.safetensors").read_bytes() == b"weights"
        assert not any("pytorch_model" in path for path in requested)
        count = len(requested)
        offline = directories(["org/model", "org/other"], tmp_path, HF_HUB_OFFLINE="1")
        assert offline[0] == first and len(requested) == count
    assert offline[1].startswith("--model must be a directory, or a model of the Hugging Face Hub")
    assert "got org/other: no such directory here; it is not in the cache" in offline[1]
    assert "HF_HUB_OFFLINE" in offline[1], "the reason why the Hub is not contacted"


def files_in(directory: str) -> set[str]:
    root = Path(directory)
    return {str(path.relative_to(root)) for path in root.rglob("*") if not path.is_dir()}


def test_only_required_files_are_downloaded(tmp_path: Path) -> None:
    """Weights in other formats are skipped, except those of drafters."""
    names = ["org/parts", "org/eagle"]
    with hub() as (url, requested):
        parts, eagle = directories(names, tmp_path, HF_ENDPOINT=url)
        known = {"config.json", "chat_template.jinja", "model.safetensors.index.json"}
        assert files_in(parts) == {*known, *_PARTS}
        assert files_in(eagle) == {"config.json"}, "a model needs safetensors"
        assert not any("consolidated" in path or "original" in path for path in requested)
        heads = ["org/parts", "org/eagle", "org/medusa", "org/hydra", "org/dflash"]
        found = directories(heads, tmp_path, of_drafters=True, HF_ENDPOINT=url)
        offline = directories(heads, tmp_path, of_drafters=True, HF_HUB_OFFLINE="1")
    assert offline == found
    config = {"config.json"}
    assert [files_in(one) for one in found] == [
        {*known, *_PARTS},
        config | {"pytorch_model.bin"},
        config | {"medusa_lm_head.pt"},
        config | {"hydra_lm_head.pt"},
        config | {"model.safetensors", "mask_embedding.pt"},
    ]


def test_drafters_are_resolved_by_name_like_models(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        hub_module, "directory_of", lambda name, field, **_: f"/cache/{name}: {field}"
    )
    parser = argparse.ArgumentParser()
    options.add_engine_options(parser)

    def model_of(config: str) -> Any:
        args = parser.parse_args(["--speculative-config", config])
        return options.plain_settings(args)["speculative_config"]

    named = "/cache/org/head: model of --speculative-config"
    for config in ({"method": "eagle3"}, {"method": "draft_model", "num_speculative_tokens": 2}):
        found = json.loads(model_of(json.dumps({**config, "model": "org/head"})))
        assert found == {**config, "model": named}
    own = {"options": {"mtp": {"model": "org/head"}, "eagle": {}}}
    assert json.loads(model_of(json.dumps(own)))["options"]["mtp"] == {"model": named}
    # Any other value is passed on unchanged.
    for left in ('{"model":  "/a/b"}', '{"model": 7}', "[]", "no JSON", '{"options": [1]}', "{}"):
        assert model_of(left) == left


def test_gguf_files_are_found_by_their_quantization(tmp_path: Path) -> None:
    names = [f"org/gguf:{one}" for one in ("Q4_K_M", "q4_k_m", "Q8_0", "Q5_0", "Q2_K", "Q5_K_M")]
    with hub() as (url, _):
        found = directories(names, tmp_path, HF_ENDPOINT=url)
        offline = directories(names, tmp_path, HF_HUB_OFFLINE="1")
        drafters = directories(names[2:], tmp_path, of_drafters=True, HF_ENDPOINT=url)
    texts = [Path(file).read_bytes() for file in found[:4]]
    assert texts == [b"four", b"four", b"eight", b"five"]
    assert found[3].endswith("sub/c-Q5_0-00001-of-00002.gguf")
    assert found[4:] == [
        "--model org/gguf:Q2_K must name one file *-Q2_K.gguf of org/gguf, found a-Q2_K.gguf, "
        "b-Q2_K.gguf",
        "--model org/gguf:Q5_K_M must name one file *-Q5_K_M.gguf of org/gguf, found none",
    ]
    assert offline == found
    assert drafters[:2] == found[2:4] and drafters[2].startswith(
        "model of --speculative-config org/gguf:Q2_K must name one file"
    )


def test_revisions_are_branches_tags_or_commits(tmp_path: Path) -> None:
    with hub() as (url, requested):
        names = ["org/model v2", "org/model no-such-tag"]
        found, unknown = directories(names, tmp_path, HF_ENDPOINT=url)
    assert Path(found).is_dir() and any("/revision/v2" in path for path in requested)
    assert unknown.endswith("got org/model: it has no branch, tag or commit no-such-tag")


def test_errors_say_why_a_model_is_unavailable(tmp_path: Path) -> None:
    with hub() as (url, _):
        gated, none, broken = directories(list(REFUSALS), tmp_path, HF_ENDPOINT=url)
    assert "got org/gated: its license must be accepted on its page" in gated
    assert "got org/none: no such directory here, and no such model there" in none
    assert "and the Hub is not reached (Server error '500 " in broken


def test_paths_and_existing_directories_are_not_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert is_name("org/model") and is_name("a.b/C-1_2") and is_name("org/model:Q4_K_M")
    (tmp_path / "org" / "model").mkdir(parents=True)
    for model in (
        "org/model",
        "/org/model",
        "a/b/c",
        "model",
        "./model/",
        "org/mo del",
        "org/m.gguf",
    ):
        assert not is_name(model)


def test_cached_models_are_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def put(name: str, *files: str, architecture: str = "Qwen3ForCausalLM") -> None:
        folder = tmp_path / f"models--{name.replace('/', '--')}"
        (folder / "refs").mkdir(parents=True)
        (folder / "refs" / "main").write_text(SHA)
        snapshot = folder / "snapshots" / SHA
        snapshot.mkdir(parents=True)
        config = json.loads((ASSETS / "config.json").read_text())
        (snapshot / "config.json").write_text(
            json.dumps(config | {"architectures": [architecture]})
        )
        for file in files:
            (snapshot / file).write_bytes(b"x" * 3_000_000)

    def card(name: str, text: str) -> None:
        folder = tmp_path / f"models--{name.replace('/', '--')}" / "snapshots" / SHA
        (folder / "README.md").write_text(text)

    put("org/whole", "model.safetensors")
    card("org/whole", "---\nlanguage: en\nlicense: mit\n---\n# A card\nlicense: none\n")
    put("org/half")
    card("org/half", "---\nlicense: other\nlicense_name: 'some terms'\n---\n")
    put("org/other", "model.safetensors", architecture="NobodysModel")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "own"))
    assert main(["models"]) == 0
    lines = [re.split("  +", one) for one in capsys.readouterr().out.splitlines()]
    assert lines[0] == ["model", "size", "license", "what pays"]
    assert lines[1][0] == "specops-bundled" and lines[1][2] == "psf-2.0"
    assert lines[1][3:] == ["ngram: 1.8x to 1.9x", "runs; without --model, it is this one"]
    assert lines[2][1:3] == ["253 MB", "Gemma Terms of Use"] and "make gemma" in lines[2][-1]
    assert lines[3][1:3] == ["98 MB", "apache-2.0"] and "make chat" in lines[3][-1]
    listed = {name: cells for name, *cells in lines[4:]}
    assert listed["org/half"][:3] == ["0 MB", "some terms", "not measured"]
    assert listed["org/half"][3].startswith("does not run: its weights are not here")
    assert (
        listed["org/other"][1] == "unknown"
        and "architecture NobodysModel" in listed["org/other"][3]
    )
    assert listed["org/whole"] == ["3 MB", "mit", "not measured", "runs"]
    file = tmp_path / "own" / "specops" / "gemma" / "gemma-3-270m-q4_k_m.gguf"
    file.parent.mkdir(parents=True)
    file.touch()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "none"))
    assert main(["models"]) == 0
    whole = capsys.readouterr().out.splitlines()
    assert len(whole) == 4 and whole[2].startswith(f"{file} ") and whole[2].endswith("  runs")


def test_served_model_name_defaults_to_the_hub_name(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(options, "path_of", lambda name, revision: f"/cache/{name}/{SHA}")
    parser = argparse.ArgumentParser()
    options.add_engine_options(parser)

    def settings(*arguments: str) -> dict[str, Any]:
        return options.plain_settings(parser.parse_args(arguments))

    by_name = settings("--model", "org/model")
    assert by_name == {"model": f"/cache/org/model/{SHA}", "served_model_name": "org/model"}
    names = ["--served-model-name", "x", "y"]  # the engine reports the first
    assert settings("--model", "org/model", *names)["served_model_name"] == "x"
    assert settings("--model", str(tmp_path)) == {"model": str(tmp_path)}
    with pytest.raises(ValueError, match="--revision needs a model of the Hugging Face Hub, ORG"):
        settings("--model", str(tmp_path), "--revision", "v1")
