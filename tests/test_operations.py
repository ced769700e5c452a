# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: E402  (where the server's packages are missing, nothing else is imported)
"""Tests of log lines, traces, TLS, and options in the environment."""

import configparser
import json
import logging
import re
import ssl
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

for name in ("fastapi", "uvicorn", "pydantic", "msgspec", "prometheus_client", "jinja2", "httpx"):
    pytest.importorskip(name)

import httpx
from fake_engine import FakeEngine
from serving import CHAT, STREAM, TEXT, USER, http, post, serving
from specops.cli import serve as serve_module
from specops.cli.environment import environment_arguments, unknown_variables
from specops.cli.roles import setups
from specops.cli.serve import _parser, _read, _tls, main
from specops.server import listen
from specops.server.api_error import ApiError
from specops.server.requests import reason_of

SECRET = "my secret words"
KEY = "sk-secret-key"


def printed(log_format: str) -> list[str]:
    """Return the lines that a process logs in a format."""
    code = f"""
import logging
from specops.service import logs
logs.configure("info", {log_format!r})
logging.getLogger("uvicorn.error").info("Started %s", "it")
logging.getLogger("specops.x").debug("not shown")
logging.getLogger("specops.x").warning("a", extra={{"fields": {{"request_id": "r"}}}})
try:
    1 / 0
except ZeroDivisionError:
    logging.getLogger("specops.x").exception("failed")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0 and not done.stdout
    return done.stderr.splitlines()


def test_log_lines_have_time_and_level() -> None:
    lines = printed("text")
    assert [re.sub(r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z ", "TIME ", one) for one in lines][
        :3
    ] == [
        "TIME INFO uvicorn.error: Started it",
        "TIME WARNING specops.x: a",
        "TIME ERROR specops.x: failed",
    ]
    assert lines[-1] == "ZeroDivisionError: division by zero"
    started, second, failed = map(json.loads, printed("json"))
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", started.pop("time"))
    assert started == {"level": "info", "logger": "uvicorn.error", "message": "Started it"}
    assert (second["level"], second["request_id"]) == ("warning", "r")
    assert failed["exception"].endswith("ZeroDivisionError: division by zero")


REQUESTS: list[tuple[str, Any, int, str]] = [
    ("completions", TEXT, 200, ""),
    ("completions", TEXT | STREAM, 200, ""),
    ("completions", {"prompt": SECRET, "max_tokens": -2}, 400, "max_tokens must be"),
    ("completions", {"prompt": "a", "max_tokens": SECRET}, 400, "max_tokens must be an integer"),
    ("completions", {"prompt": "a", "model": "other"}, 404, "the model 'other' does not exist"),
    ("completions", {"prompt": {SECRET: SECRET}}, 400, "prompt must be"),
    ("completions", {SECRET: "a", "prompt": "a"}, 400, "unknown field ..."),
    ("completions", {"tempreature": 1, "prompt": "a"}, 400, "unknown field tempreature"),
    ("completions", {"prompt": "a", "logit_bias": {SECRET: 1}}, 400, "logit_bias must have token"),
    ("completions", {"prompt": SECRET * 100_000}, 400, "exceeds the context"),
    ("chat/completions", {"messages": [{"role": SECRET, "content": "a"}]}, 400, "messages.0.role"),
    ("chat/completions", {"messages": [USER | {SECRET: 1}]}, 400, "unknown field ..."),
    ("chat/completions", CHAT | {"response_format": {"type": SECRET}}, 400, "response_format"),
    ("chat/completions", CHAT | {"tool_choice": SECRET}, 400, "tool_choice"),
    ("messages", {"messages": [{"role": "user", "content": SECRET}]}, 400, "max_tokens is missing"),
    ("nothing", {"prompt": SECRET}, 404, "Not Found: POST /v1/nothing"),
]


def test_every_request_has_a_line_with_its_id_and_reason(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "specops")
    with serving(FakeEngine(), api_keys=[KEY]) as served:
        headers = {"Authorization": f"Bearer {KEY}"}
        ids = [
            post(served, path, body, headers=headers).headers["x-request-id"]
            for path, body, _, _ in REQUESTS
        ]
        wrong = {"Authorization": f"Bearer {KEY}x", "x-request-id": "mine"}
        post(served, "completions?key=" + KEY, TEXT, headers=wrong)
        http().get(f"{served.url}/health")
        assert http().get(f"{served.url}/v1/mod%0Aels").status_code == 404
        message = http().post(f"{served.url}/chat/completions").json()["error"]["message"]
        assert message == "Not Found: POST /chat/completions; did you mean /v1/chat/completions?"
    records = [one for one in caplog.records if one.name == "specops.server.requests"]
    lines = {one.fields["request_id"]: one for one in records}  # type: ignore[attr-defined]
    for id, (path, _, status, reason) in zip(ids, REQUESTS, strict=True):
        line = lines[id]
        found = line.fields  # type: ignore[attr-defined]
        assert (found["path"], found["status"]) == (f"/v1/{path}", status)
        assert found.get("reason", "").startswith(reason) or reason in found["reason"]
        assert bool(reason) == ("reason" in found)
        start = rf"127\.0\.0\.1 POST /v1/{path} {status} \d+\.\d{{3}} s {id}"
        assert re.fullmatch(start + (": .+" if reason else ""), line.getMessage())
    assert "the API key is missing or wrong" in lines["mine"].getMessage()
    assert len(records) == len(REQUESTS) + 3, "/health is not logged"
    for secret in (SECRET, KEY):
        assert secret not in caplog.text
    assert all("\n" not in one.getMessage() for one in records)


@pytest.mark.parametrize(
    "message,param,expected",
    [
        ("n must be at least 1, got -2.5", "n", "n must be at least 1, got -2.5"),
        ("n must be an integer, got a string", "n", "n must be an integer, got a string"),
        ("n must be 1, got 'a b'; omit it", "n", "n must be 1, got ..."),
        ("stop: one of 'a b' and 'c' is missing", "stop", "stop: one of '...' and 'c' is missing"),
        ("first\nsecond", None, "first"),
        (
            "the chat template refused the messages: a",
            None,
            "the chat template refused the messages",
        ),
        ("a" * 300, None, "a" * 200 + "..."),
    ],
)
def test_reasons_in_the_log_quote_no_input(message: str, param: str | None, expected: str) -> None:
    assert reason_of(ApiError(400, message, param=param)) == expected


def test_failures_are_logged_with_their_reason(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "specops")
    engine = FakeEngine()
    with serving(engine) as served:
        engine.num_failures = 1
        answer = post(served, "completions", TEXT)
        assert answer.status_code == 500
        engine.num_failures = 1
        streamed = post(served, "completions", TEXT | STREAM)
        assert streamed.status_code == 200
    for one in (answer, streamed):
        (line,) = [
            record
            for record in caplog.records
            if getattr(record, "fields", {}).get("request_id") == one.headers["x-request-id"]
        ]
        assert "a step of the engine failed" in line.getMessage()


def test_exceptions_of_handlers_are_answered_and_logged_with_the_id(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    from specops.server.generation import Generation

    def fail(self: Any, name: str) -> None:
        raise RuntimeError("unforeseen")

    monkeypatch.setattr(Generation, "model_card", fail)
    with serving(FakeEngine()) as served:
        answer = http().get(f"{served.url}/v1/models")
    assert answer.status_code == 500
    assert answer.json()["error"]["message"] == "internal error; see the server's log"
    assert f"request {answer.headers['x-request-id']} failed" in caplog.text
    assert "RuntimeError: unforeseen" in caplog.text


def read(*words: str, **variables: str) -> Any:
    """Parse the options of `specops serve` in an environment."""
    parser = _parser("specops serve")
    before = environment_arguments(parser, variables)
    return parser.parse_args([*before, *words])


def test_every_flag_of_serve_may_be_set_in_the_environment() -> None:
    assert read(SPECOPS_MAX_NUM_SEQS="3").max_num_seqs == 3
    assert read("--max-num-seqs", "4", SPECOPS_MAX_NUM_SEQS="3").max_num_seqs == 4
    assert read(SPECOPS_METHODS="mtp ngram").methods == ["mtp", "ngram"]
    assert read(SPECOPS_ALLOWED_HOSTS="a *.b").allowed_hosts == ["a", "*.b"]
    assert read(SPECOPS_MAX_BODY_BYTES="8M").max_body_bytes == 8 << 20
    assert read(SPECOPS_SPLITWISE_ROLE="prefill").role == "prefill"
    config = '{"method": "naive"}'
    assert read(SPECOPS_SPECULATIVE_CONFIG=config).speculative_config == config
    for value, expected in (("true", True), ("1", True), ("FALSE", False), ("no", False)):
        assert read(SPECOPS_ENABLE_PREFIX_CACHING=value).enable_prefix_caching is expected
        assert bool(read(SPECOPS_ENFORCE_EAGER=value).enforce_eager) is expected
    with pytest.raises(ValueError, match="SPECOPS_ENFORCE_EAGER must be true or false, got 'x'"):
        read(SPECOPS_ENFORCE_EAGER="x")
    # These keep their own meaning: a further key, and the kernels' defaults in every process.
    own = read(SPECOPS_API_KEY="k", SPECOPS_ISA="avx2", SPECOPS_NUM_THREADS="2")
    assert (own.api_key, own.isa, own.num_threads) == ([], None, None)


def test_command_line_wins_over_environment_and_environment_over_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("yaml")
    file = tmp_path / "options.yaml"
    file.write_text("port: 1\nmax-waiting: 1\nmax-num-seqs: 1\nmodel: one\n")
    monkeypatch.setenv("SPECOPS_CONFIG", str(file))
    monkeypatch.setenv("SPECOPS_MAX_WAITING", "2")
    monkeypatch.setenv("SPECOPS_MAX_NUM_SEQS", "2")
    monkeypatch.setenv("SPECOPS_MODEL", "two")
    args = _read(_parser("specops serve"), ["--max-num-seqs", "3"])
    assert (args.port, args.max_waiting, args.max_num_seqs, args.model) == (1, 2, 3, "two")
    assert _read(_parser("specops serve"), ["three"]).model == "three"
    with pytest.raises(ValueError, match="must be named once, got three and --model four"):
        _read(_parser("specops serve"), ["three", "--model", "four"])


def test_mistakes_in_the_environment_name_the_variable(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # Kubernetes sets this for a service that is named specops.
    monkeypatch.setenv("SPECOPS_PORT", "tcp://10.0.0.1:8000")
    with pytest.raises(SystemExit) as exit:
        main([])
    assert exit.value.code == 2
    assert "(from the environment variable SPECOPS_PORT)" in capsys.readouterr().err
    variables = {"SPECOPS_PORTS": "1", "SPECOPS_ZZZ": "1", "SPECOPS_VLLM": "1", "SPECOPS_ISA": "x"}
    assert unknown_variables(_parser(), variables) == (
        "ignoring unknown environment variables: SPECOPS_PORTS (did you mean SPECOPS_PORT?), "
        "SPECOPS_ZZZ"
    )
    assert unknown_variables(_parser(), {"SPECOPS_PORT": "1", "SPECOPS_CUDA_ARCHS": "90"}) == ""


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """Return the files of a certificate of 127.0.0.1 and of its key."""
    folder = tmp_path_factory.mktemp("tls")
    files = str(folder / "cert.pem"), str(folder / "key.pem")
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"]
    command += ["-nodes", "-days", "2", "-subj", "/CN=x", "-addext", "subjectAltName=IP:127.0.0.1"]
    try:
        subprocess.run(
            [*command, "-out", files[0], "-keyout", files[1]], check=True, capture_output=True
        )
    except FileNotFoundError:
        pytest.skip("openssl is not installed")
    return files


def test_server_speaks_https_and_may_require_certificates_of_clients(
    certificate: tuple[str, str],
) -> None:
    from serving import serving_app
    from specops.server import make_app
    from specops.service.thread import ThreadClient

    cert, key = certificate
    trusting = ssl.create_default_context(cafile=cert)
    known = ssl.create_default_context(cafile=cert)
    known.load_cert_chain(cert, key)
    options = ["--ssl-certfile", cert, "--ssl-keyfile", key]
    for words, answered in ((options, [trusting]), ([*options, "--ssl-ca-certs", cert], [known])):
        engine = FakeEngine()
        app = make_app(ThreadClient(engine), engine.tokenizer)  # type: ignore[arg-type]
        with serving_app(app, **_tls(_parser().parse_args(words))) as url:
            url = url.replace("http://", "https://")
            for context in answered:
                with httpx.Client(verify=context, timeout=60) as client:
                    assert client.get(f"{url}/health").json() == {"status": "ok"}
            with httpx.Client(timeout=60) as plain, pytest.raises(httpx.TransportError):
                plain.get(url.replace("https://", "http://"))
            if answered == [known]:
                with httpx.Client(verify=trusting) as client, pytest.raises(httpx.TransportError):
                    client.get(f"{url}/health")


@pytest.mark.parametrize(
    "words,message",
    [
        (["--ssl-keyfile", "CERT"], "ssl_keyfile has no effect without ssl_certfile"),
        (["--ssl-ca-certs", "CERT"], "ssl_ca_certs has no effect without ssl_certfile"),
        (["--ssl-certfile", "CERT"], "ssl_certfile and ssl_keyfile must be a certificate and its"),
        (["--ssl-certfile", "/no/such"], "ssl_certfile and ssl_keyfile must be a certificate"),
        (["--ssl-certfile", "CERT", "--ssl-keyfile", "KEY", "--ssl-ca-certs", "KEY"],
         "ssl_ca_certs must be certificates in PEM format, got"),
        (["--otlp-traces-endpoint", "x:1"], "--otlp-traces-endpoint must begin with http://"),
    ],
)  # fmt: skip
def test_invalid_tls_and_trace_options_are_reported(
    words: list[str], message: str, certificate: tuple[str, str]
) -> None:
    files = {"CERT": certificate[0], "KEY": certificate[1]}
    args = _parser().parse_args([files.get(word, word) for word in words])
    with pytest.raises(ValueError, match=re.escape(message)):
        _tls(args)
        serve_module._tracing(args.otlp_traces_endpoint)


def test_every_request_is_a_span() -> None:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
    from opentelemetry.trace import SpanKind, StatusCode
    from specops.server.tracing import Tracing

    exporter = InMemorySpanExporter()
    engine = FakeEngine()
    trace = f"{7:032x}"
    headers = {"traceparent": f"00-{trace}-{9:016x}-01", "x-request-id": "mine"}
    with serving(engine, tracing=Tracing(SimpleSpanProcessor(exporter))) as served:
        body = {"prompt": SECRET, "max_tokens": 5, "temperature": 0.5, "seed": 3, "n": 2}
        answer = post(served, "completions", body, headers=headers).json()
        post(served, "chat/completions", CHAT | STREAM | {"max_tokens": 2, "seed": 2**63})
        post(served, "completions", {"prompt": "a", "max_tokens": "a"})
        engine.num_failures = 1
        post(served, "completions", TEXT | STREAM)
        http().get(f"{served.url}/health")
    by_name: dict[str, list[Any]] = {}
    for span in exporter.get_finished_spans():
        by_name.setdefault(span.name, []).append(span)
    assert {name: len(spans) for name, spans in by_name.items()} == {
        "text_completion fake": 2,
        "chat fake": 1,
        "POST /v1/completions": 1,
    }
    first, failed = sorted(by_name["text_completion fake"], key=lambda span: span.start_time)
    assert first.kind == SpanKind.SERVER and first.status.status_code == StatusCode.UNSET
    assert f"{first.context.trace_id:032x}" == trace and first.parent.span_id == 9
    usage = answer["usage"]
    expected = {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.request.id": "mine",
        "gen_ai.request.model": "fake",
        "gen_ai.response.id": answer["id"],
        "gen_ai.request.max_tokens": 5,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.seed": 3,
        "gen_ai.request.choice.count": 2,
        "gen_ai.response.finish_reasons": ("length", "length"),
        "gen_ai.usage.input_tokens": usage["prompt_tokens"],
        "gen_ai.usage.output_tokens": 10,
        "http.response.status_code": 200,
        "http.route": "/v1/completions",
    }
    assert first.attributes.items() >= expected.items()
    latency = first.attributes["gen_ai.latency.time_to_first_token"]
    assert 0 < latency <= (first.end_time - first.start_time) / 1e9
    assert SECRET not in str(first.attributes)
    assert by_name["chat fake"][0].attributes["gen_ai.usage.output_tokens"] == 2
    assert "gen_ai.request.seed" not in by_name["chat fake"][0].attributes, "it has 64 bits"
    (refused,) = by_name["POST /v1/completions"]
    assert refused.attributes["error.type"] == "invalid_type"
    assert refused.status.status_code == StatusCode.UNSET
    assert failed.attributes["error.type"] == "internal_error"
    assert failed.status.status_code == StatusCode.ERROR


@pytest.mark.parametrize(
    "host,is_open,url,warns",
    [
        ("127.0.0.1", True, "http://127.0.0.1", False),
        ("0.0.0.0", True, "http://localhost", True),
        ("0.0.0.0", False, "http://localhost", False),
        ("::1", True, "http://[::1]", False),
    ],
)
def test_address_in_the_log_can_be_opened_and_open_servers_are_warned_of(
    host: str, is_open: bool, url: str, warns: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "specops")
    config = {"method": "naive", "num_speculative_tokens": 0}
    capabilities = SimpleNamespace(model_name="m", device="cpu", speculative_config=config)
    client: Any = SimpleNamespace(capabilities=capabilities)
    try:
        listener = listen(host, 0)
    except ValueError:
        pytest.skip("IPv6 is off")
    with listener:
        serve_module._log_address(client, "http", listener, is_open=is_open)
        assert f"at {url}:{listener.getsockname()[1]}/" in caplog.text
    assert ("may use this server without a key; set --api-key" in caplog.text) == warns


def test_engines_log_in_the_format_of_the_server() -> None:
    for words in ([], ["--data-parallel-size", "2"]):
        args = _parser().parse_args(["--log-format", "json", *words])
        assert {setup.log_format for setup in setups(args, {})} == {"json"}


EXAMPLES = Path(__file__).resolve().parent.parent / "docs" / "examples"


def documents(name: str) -> list[Any]:
    yaml = pytest.importorskip("yaml")
    return list(yaml.safe_load_all((EXAMPLES / name).read_text()))


def unit() -> configparser.ConfigParser:
    found = configparser.ConfigParser(interpolation=None, strict=False)
    found.optionxform = str  # type: ignore[assignment,method-assign]
    found.read_string((EXAMPLES / "specops.service").read_text())
    return found


def variables_of_examples() -> dict[str, dict[str, str]]:
    """Return the options that each example sets in the environment."""
    (deployment, _, _), (compose,) = documents("kubernetes.yaml"), documents("compose.yaml")
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    text = (EXAMPLES / "specops.service").read_text()
    return {
        "systemd": dict(re.findall(r"(SPECOPS_\w+)=(\S+)", text)),
        "compose": compose["services"]["specops"]["environment"],
        "kubernetes": {one["name"]: one.get("value", "a key") for one in container["env"]},
    }


@pytest.mark.parametrize("example", ["systemd", "compose", "kubernetes"])
def test_examples_of_deployment_set_known_options(
    example: str, capsys: pytest.CaptureFixture[str]
) -> None:
    variables = variables_of_examples()[example]
    assert variables["SPECOPS_MODEL"] == "Qwen/Qwen3-0.6B"
    assert unknown_variables(_parser(), variables) == ""
    read(**variables)  # exits if a value is invalid


def test_examples_of_deployment_fit_together() -> None:
    (compose,), (prometheus,) = documents("compose.yaml"), documents("prometheus.yml")
    services = compose["services"]
    port = services["specops"]["environment"]["SPECOPS_METRICS_PORT"]
    assert prometheus["scrape_configs"][0]["static_configs"] == [{"targets": [f"specops:{port}"]}]
    for service in services.values():
        for volume in service["volumes"]:
            source = volume.partition(":")[0]
            assert (EXAMPLES / source).is_file() or source in compose["volumes"]
    (datasource,), (dashboards,) = (
        documents(f"grafana-{kind}.yaml") for kind in ("datasource", "dashboards")
    )
    assert datasource["datasources"][0]["type"] == "prometheus"
    home = services["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert home.startswith(dashboards["providers"][0]["options"]["path"])

    deployment, claim, service = documents("kubernetes.yaml")
    pod = deployment["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    ports = {one["name"] for one in container["ports"]}
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        (target,) = (
            container[probe].get(kind)
            for kind in ("httpGet", "tcpSocket")
            if kind in container[probe]
        )
        assert target["port"] in ports and target.get("path") in ("/health", None)
    assert pod["enableServiceLinks"] is False
    assert pod["volumes"][0]["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
    assert (
        service["spec"]["selector"].items()
        <= deployment["spec"]["template"]["metadata"]["labels"].items()
    )
    assert {one["targetPort"] for one in service["spec"]["ports"]} <= ports

    found = unit()
    assert {"Unit", "Service", "Install"} == set(found.sections())
    assert found["Service"]["ExecStart"].endswith("/specops serve")
    drain = _parser().get_default("drain_timeout")
    seconds = (pod["terminationGracePeriodSeconds"], int(found["Service"]["TimeoutStopSec"]))
    assert min(*seconds, int(services["specops"]["stop_grace_period"][:-1])) > drain + 60


def test_missing_opentelemetry_is_reported(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "specops.server.tracing", raising=False)
    missing = "opentelemetry.exporter.otlp.proto.http.trace_exporter"
    monkeypatch.setitem(sys.modules, missing, None)
    assert main(["--port", "0", "--in-process", "--otlp-traces-endpoint", "http://x/y"]) == 2
    assert "pip install 'specops[otel]'" in capsys.readouterr().err
