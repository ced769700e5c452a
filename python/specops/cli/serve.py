# SPDX-License-Identifier: Apache-2.0
"""`python -m specops.engine`: serve a model over HTTP, by default the bundled one.

`python -m specops.engine verify-exactness` compares speculation with plain decoding instead.
"""

import argparse
import contextlib
import ipaddress
import json
import logging
import os
import socket
import ssl
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import specops
from specops.api.config import EngineConfig
from specops.api.tokenizer import Tokenizer
from specops.cli import Parser, byte_size, finite, require_url, shown_bytes
from specops.cli.config_file import arguments_of
from specops.cli.environment import environment_arguments, unknown_variables
from specops.cli.fastdeploy import require_known
from specops.cli.options import (
    ADAPTERS,
    CACHE,
    DEFAULTS,
    DEVICES,
    DRAFTS,
    LIMITS,
    MODEL,
    PROCESSES,
    SERVICE,
    WEIGHTS,
    add_adapter_options,
    add_engine_options,
    engine_settings,
    group,
    plain_settings,
    require_effective_drafts,
)
from specops.cli.roles import (
    EVENTS,
    QUEUE,
    ROLE,
    add_data_parallel_options,
    add_kv_event_options,
    add_role_options,
    add_scheduler_options,
    check_scheduler,
    require_effect,
    scheduled,
    setups,
)
from specops.cli.sessions import add_session_options
from specops.service import logs
from specops.service.file_lock import FileLock

if TYPE_CHECKING:
    from fastapi import FastAPI

    from specops.server.tracing import Tracing
    from specops.service.client import EngineClient
    from specops.service.process import EngineProcess
    from specops.service.wire import Setup

logger = logging.getLogger(__name__)

_PROGRAM = "python -m specops.engine"
_EXTRAS = {
    "redis": "redis",
    "zmq": "events",
    "nixl": "nixl",
    "opentelemetry": "otel",
}  # module -> extra that installs it, for modules not in the extra "server"

ACCESS = "access"
DEBUGGING = "debugging"
# Groups of the help, in the order of the table in docs/server.md.
_GROUPS = (
    SERVICE,
    MODEL,
    WEIGHTS,
    DEVICES,
    PROCESSES,
    ROLE,
    EVENTS,
    QUEUE,
    CACHE,
    DRAFTS,
    DEFAULTS,
    ADAPTERS,
    ACCESS,
    DEBUGGING,
    LIMITS,
)


def _parser(program: str = _PROGRAM) -> Parser:
    """Return the parser of the server's command line."""
    parser = Parser(
        prog=program,
        usage=f"{program} [MODEL] [OPTIONS]",
        description="Serve a model with speculative decoding: an OpenAI-compatible API and a web "
        "page to try it.",
        epilog="Every option may be set in the environment: --max-num-seqs as "
        "SPECOPS_MAX_NUM_SEQS. The command line takes precedence over the environment, and the "
        "environment over --config. Sizes are bytes, or numbers with a unit such as 512M or 64G."
        + (
            " Other commands, as the first argument: verify-exactness compares every token with "
            "and without speculation; contract prints the settings that output bits depend on. "
            "Add --help for their options."
            if program == _PROGRAM
            else ""
        ),
    )
    for title in _GROUPS:
        group(parser, title)
    parser.add_argument("given_model", nargs="?", metavar="MODEL", help="the same as --model MODEL")
    group(parser, SERVICE).add_argument(
        "--config",
        metavar="FILE",
        help="YAML file with options under the names of these flags; flags on the command line "
        "take precedence",
    )
    add_engine_options(parser)
    add_session_options(parser)
    _add_server_options(parser)
    add_data_parallel_options(parser)
    add_role_options(parser)
    add_kv_event_options(parser)
    add_scheduler_options(parser)
    return parser


def _contract_parser(program: str) -> Parser:
    """Return the server's parser with shorter help, so that `contract` accepts the same options."""
    from specops.service.contract import OPTIONS

    parser = _parser(program)
    parser.description = (
        "Print everything that the output bits of a server with these options depend on, and its "
        "digest."
    )
    parser.epilog = "The server's other options are accepted but have no effect."
    for action in parser._actions:
        if action.dest not in {"help", "config", "given_model", "revision", *OPTIONS}:
            action.help = argparse.SUPPRESS
    return parser


def _add_server_options(parser: argparse.ArgumentParser) -> None:
    _add_service(parser)
    _add_access(parser)
    _add_chat(parser)
    _add_adapters(parser)
    _add_limits(parser)
    group(parser, DEBUGGING).add_argument(
        "--in-process",
        action="store_true",
        help="run the engine in a thread of the server, which does not restart it, for debugging "
        "(default: in its own process)",
    )


def _add_service(parser: argparse.ArgumentParser) -> None:
    add = group(parser, SERVICE).add_argument
    add("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    add("--port", type=int, default=8000, help="port to listen on (default: %(default)s)")
    add(
        "--metrics-port",
        type=int,
        metavar="PORT",
        help="serve /metrics on this port instead of --port",
    )
    add(
        "--log-level",
        type=str.lower,
        choices=("debug", "info", "warning", "error"),
        default="info",
        help="minimum severity of log lines (default: %(default)s)",
    )
    add(
        "--log-format",
        type=str.lower,
        choices=logs.FORMATS,
        default="text",
        help="format of log lines (default: %(default)s)",
    )
    add(
        "--otlp-traces-endpoint",
        metavar="URL",
        help="OTLP endpoint over HTTP that receives a trace of every request, such as "
        "http://127.0.0.1:4318/v1/traces (requires specops[otel]; default: none)",
    )
    add(
        "--ssl-certfile", metavar="FILE", help="certificate for HTTPS in PEM format (default: none)"
    )
    add(
        "--ssl-keyfile",
        metavar="FILE",
        help="private key of --ssl-certfile, without a password (default: it is in --ssl-certfile)",
    )
    add(
        "--ssl-ca-certs",
        metavar="FILE",
        help="certificates of authorities; clients must then have a certificate from one of them",
    )


def _add_access(parser: argparse.ArgumentParser) -> None:
    add = group(parser, ACCESS).add_argument
    add(
        "--api-key",
        metavar="KEY",
        action="append",
        default=[],
        help="bearer token that requests must send; may be repeated, or set in the environment as "
        "SPECOPS_API_KEY. Keys share the slots equally",
    )
    add("--api-key-file", metavar="FILE", help="file with further keys, one per line")
    add(
        "--cache-scope",
        type=str.lower,
        choices=("key", "server"),
        default="key",
        help="requests that share pages of the prefix cache and earlier responses to draft from: "
        "those of one API key (key) or of all keys (server; default: %(default)s). "
        "cache_salt of a request separates them further",
    )
    add(
        "--allowed-hosts",
        metavar="NAME",
        action="append",
        help="names that are accepted in the Host header; may be repeated, * accepts any name "
        "(default: this machine's names on a loopback address without keys, else any)",
    )
    add(
        "--allowed-origins",
        metavar="ORIGIN",
        action="append",
        default=[],
        help="origins of web pages that may send requests from a browser, such as "
        "https://example.com; may be repeated, * allows any origin (default: only the "
        "server's own)",
    )
    add(
        "--weight-update-dir",
        metavar="DIR",
        help="let every client that may use the server pause it (/pause, /resume) and load the "
        "weights of models below this directory (/update_weights), as training loops do "
        "(default: these routes do not exist)",
    )
    add(
        "--forwarded-allow-ips",
        metavar="ADDRESS",
        action="append",
        default=[],
        help="address or network of a proxy whose X-Forwarded-For header is trusted; may be "
        "repeated, * trusts any (default: none)",
    )


def _add_chat(parser: argparse.ArgumentParser) -> None:
    add = group(parser, DEFAULTS).add_argument
    add(
        "--tool-call-parser",
        type=str.lower,
        choices=(
            "deepseek_v3",
            "deepseek_v31",
            "deepseek_v32",
            "glm45",
            "glm47",
            "hermes",
            "kimi_k2",
            "llama3_json",
            "mistral",
            "openai",
            "qwen3_coder",
        ),
        help="format in which the model writes tool calls (default: detected from its chat "
        "template)",
    )
    add(
        "--reasoning-parser",
        type=str.lower,
        default="auto",
        choices=(
            "auto",
            "none",
            "harmony",
            "openai_gptoss",
            "mistral",
            "ernie45",
            "think",
            "deepseek_r1",
            "deepseek_v3",
            "glm45",
            "kimi_k2",
            "qwen3",
        ),
        help="format of the reasoning that is separated from answers: detected from the chat "
        "template (auto), none, or a name; the names after think mean the same (default: "
        "%(default)s)",
    )
    add(
        "--chat-template",
        metavar="FILE",
        help="Jinja template that turns messages into a prompt, or `tools` for the one with tools "
        "that specops includes (default: the model's)",
    )
    add(
        "--unsupported-fields",
        type=str.lower,
        choices=("error", "warn", "ignore"),
        default="error",
        help="what to do with unknown fields of a request, and with unsupported ones that would "
        "change the output: refuse the request (error), ignore them and name them in the log and "
        "in the header x-ignored-fields (warn), or ignore them (ignore; default: %(default)s)",
    )
    add(
        "--generation-config",
        default="auto",
        metavar="auto|none|DIR",
        help="default sampling parameters: from the model's generation_config.json (auto), none, "
        "or from the file in another directory (default: %(default)s)",
    )


def _add_adapters(parser: argparse.ArgumentParser) -> None:
    add_adapter_options(parser)
    group(parser, ADAPTERS).add_argument(
        "--runtime-lora-dir",
        metavar="DIR",
        help="folder of adapters that clients may load and unload while the server runs, by POST "
        "/v1/load_lora_adapter and /v1/unload_lora_adapter (default: none)",
    )


def _check_adapters(args: argparse.Namespace) -> None:
    """Check options of LoRA adapters that concern the server rather than its engine.

    Raises:
        ValueError: an option cannot be combined with another one, or the folder does not exist.
    """
    folder = args.runtime_lora_dir
    if folder is not None:
        if not Path(folder).is_dir():
            raise ValueError(f"runtime_lora_dir must be a directory, got {folder}")
        args.enable_lora = True
        if args.data_parallel_size > 1:
            raise ValueError(
                "runtime_lora_dir needs data_parallel_size 1, since each engine loads its own "
                f"adapters, got {args.data_parallel_size}; use lora_modules"
            )
        if args.scheduler_name != "local":
            raise ValueError(
                "runtime_lora_dir needs scheduler_name local, since all servers of the queue must "
                f"have the same adapters, got {args.scheduler_name}; use lora_modules"
            )


def _add_limits(parser: argparse.ArgumentParser) -> None:
    add = group(parser, LIMITS).add_argument
    add(
        "--max-body-bytes",
        type=byte_size,
        default=4 << 20,
        metavar="SIZE",
        help=f"maximum length of a request body (default: {shown_bytes(4 << 20)})",
    )
    add(
        "--body-timeout",
        type=finite,
        default=60.0,
        metavar="SECONDS",
        help="time within which a request body must arrive (default: %(default)g)",
    )
    add(
        "--header-timeout",
        type=finite,
        default=20.0,
        metavar="SECONDS",
        help="time within which the headers of a request must arrive (default: %(default)g)",
    )
    add(
        "--write-timeout",
        type=finite,
        default=60.0,
        metavar="SECONDS",
        help="time within which a client must read what was written for it (default: %(default)g)",
    )
    add(
        "--max-unread-bytes",
        type=byte_size,
        default=64 << 20,
        metavar="SIZE",
        help=f"output that a client may leave unread (default: {shown_bytes(64 << 20)})",
    )
    add(
        "--max-connections",
        type=int,
        default=1024,
        metavar="N",
        help="maximum number of open connections (default: %(default)s)",
    )
    add(
        "--drain-timeout",
        type=int,
        default=30,
        metavar="SECONDS",
        help="time for running requests to finish after SIGTERM (default: %(default)s)",
    )
    add(
        "--engine-timeout",
        type=finite,
        default=300.0,
        metavar="SECONDS",
        help="time without a sign of life, such as the end of a step, after which an engine is "
        "restarted (default: %(default)g)",
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command named by the first argument, or serve if it names none."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    name = words[0] if words[:1] and words[0] in _COMMANDS else None
    if name is None:
        return serve(words, _PROGRAM)
    return _COMMANDS[name](words[1:], f"{_PROGRAM} {name}")


def serve(arguments: Sequence[str], program: str) -> int:
    """Serve until SIGTERM and return the exit code.

    The code is 2 for invalid arguments, and 1 if the engine has failed permanently.
    """
    parser = _parser(program)
    try:
        args = _read(parser, arguments)
        require_effect(parser, args)
    except ValueError as error:
        return _fail(str(error))
    logs.configure(args.log_level, args.log_format)
    if warning := unknown_variables(parser, os.environ):
        logger.warning(warning)
    logger.info("starting specops %s with %s", specops.__version__, args.model or "its own model")
    with contextlib.ExitStack() as stack:
        try:
            _check_adapters(args)
            settings = plain_settings(args)
            require_effective_drafts(settings)
            config = EngineConfig.from_plain(settings)
            if config.suffix_cache is not None:
                stack.enter_context(FileLock("suffix_cache", config.suffix_cache))
            processes = []
            for setup in setups(args, settings):  # models load while the server is prepared
                processes.append(_process(setup))
                stack.callback(processes[-1].kill)
            app, options = _app(args, config, processes)
        except ModuleNotFoundError as error:
            extra = _EXTRAS.get((error.name or "").partition(".")[0], "server")
            return _fail(
                f"the server needs {error.name}, which is not installed: "
                f"pip install 'specops[{extra}]'"
            )
        except ValueError as error:
            return _fail(str(error))
        from specops import server

        exit_code = server.serve(app, **options)
    return exit_code


def _process(setup: "Setup") -> "EngineProcess":
    from specops.service.process import EngineProcess

    return EngineProcess(setup)


def _app(
    args: argparse.Namespace, config: EngineConfig, processes: "Sequence[EngineProcess]"
) -> "tuple[FastAPI, dict[str, Any]]":
    """Return the application and the keyword arguments of `server.serve`.

    Raises:
        ModuleNotFoundError: a package that the server needs is not installed.
        ValueError: an option is invalid, or the engine cannot be created.
    """
    from specops import server

    _check_limits(args)
    _check_weight_updates(args, len(processes))
    check_scheduler(args)
    tls = _tls(args)
    tracing = _tracing(args.otlp_traces_endpoint)
    api_keys = _api_keys(args.api_key, args.api_key_file)
    listener, metrics_listener = _listeners(args)  # first, since loading takes long
    default_hosts = server.default_hosts(listener.getsockname()[0], has_keys=bool(api_keys))
    access = server.Access(
        args.allowed_hosts or default_hosts, args.allowed_origins, args.forwarded_allow_ips
    )
    defaults = server.sampling_defaults(args.generation_config, config.model_dir)
    with ThreadPoolExecutor(1) as pool:
        tokenizer = pool.submit(Tokenizer.from_dir, config.model_dir)  # while the engine loads
        client = scheduled(args, _client(config, processes, args.engine_timeout))
    app = server.make_app(
        client,
        tokenizer.result(),
        api_keys=api_keys,
        max_body_bytes=args.max_body_bytes,
        body_timeout=args.body_timeout,
        max_unread_bytes=args.max_unread_bytes,
        metrics_apart=metrics_listener is not None,
        tool_call_parser=args.tool_call_parser,
        reasoning_parser=args.reasoning_parser,
        chat_template=args.chat_template,
        access=access,
        sampling_defaults=defaults,
        cache_scope=args.cache_scope,
        tracing=tracing,
        model_aliases=(args.served_model_name or [""])[1:],
        unsupported_fields=args.unsupported_fields,
        runtime_lora_dir=args.runtime_lora_dir,
        weight_update_dir=args.weight_update_dir,
    )
    scheme = "https" if tls else "http"
    _log_address(client, scheme, listener, is_open=not api_keys)
    return app, {
        "listener": listener,
        "drain_timeout": args.drain_timeout,
        "log_level": args.log_level,
        "max_connections": args.max_connections,
        "header_timeout": args.header_timeout,
        "write_timeout": args.write_timeout,
        "metrics_listener": metrics_listener,
        "tls": tls,
        "tracing": tracing,
    }


def _tls(args: argparse.Namespace) -> dict[str, Any]:
    """Return uvicorn's options for HTTPS; an empty dict for HTTP.

    Raises:
        ValueError: an option requires another one, or a file cannot be used.
    """
    if args.ssl_certfile is None:
        for name in ("ssl_keyfile", "ssl_ca_certs"):
            if getattr(args, name) is not None:
                raise ValueError(f"{name} has no effect without ssl_certfile")
        return {}
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        # Without this password, OpenSSL would ask the terminal for one.
        context.load_cert_chain(args.ssl_certfile, args.ssl_keyfile, password="")
    except (OSError, ssl.SSLError) as error:
        raise ValueError(
            "ssl_certfile and ssl_keyfile must be a certificate and its private key without a "
            f"password, in PEM format, got {args.ssl_certfile} and "
            f"{args.ssl_keyfile or 'no other file'}: {error}"
        ) from None
    options = {"ssl_certfile": args.ssl_certfile, "ssl_keyfile": args.ssl_keyfile}
    if args.ssl_ca_certs is None:
        return options
    try:
        context.load_verify_locations(args.ssl_ca_certs)
    except (OSError, ssl.SSLError) as error:
        raise ValueError(
            f"ssl_ca_certs must be certificates in PEM format, got {args.ssl_ca_certs}: {error}"
        ) from None
    return {**options, "ssl_ca_certs": args.ssl_ca_certs, "ssl_cert_reqs": ssl.CERT_REQUIRED}


def _tracing(endpoint: str | None) -> "Tracing | None":
    """Return the exporter of traces; None without an endpoint.

    Raises:
        ModuleNotFoundError: OpenTelemetry is not installed.
        ValueError: the endpoint is not a URL.
    """
    if endpoint is None:
        return None
    require_url("--otlp-traces-endpoint", endpoint)
    from specops.server.tracing import Tracing

    return Tracing.to(endpoint)


def _client(
    config: EngineConfig, processes: "Sequence[EngineProcess]", timeout: float
) -> "EngineClient":
    """Return the client of one or several engines, in separate processes or in this one."""
    if processes:
        from specops.service.process import ProcessClient

        clients = [ProcessClient(process, timeout) for process in processes]
        if len(clients) == 1:
            return clients[0]
        from specops.service.data_parallel import DataParallelClient

        return DataParallelClient(clients, config.seed)
    from specops.engine.engine import Engine
    from specops.service.thread import ThreadClient

    engine = Engine(config)
    engine.measure_row_costs()
    engine.check_drafters()
    return ThreadClient(engine)


def _log_address(
    client: "EngineClient", scheme: str, listener: socket.socket, *, is_open: bool
) -> None:
    host, port = listener.getsockname()[:2]
    address = ipaddress.ip_address(host)
    if address.is_unspecified:
        host = "localhost"
    elif address.version == 6:
        host = f"[{host}]"
    if is_open and not address.is_loopback:
        logger.warning(
            "every machine that reaches %s port %d may use this server without a key; set "
            "--api-key or --api-key-file to require one",
            address,
            port,
        )
    capabilities = client.capabilities
    logger.info(
        "serving %s on %s with method %s and %d drafts per step at %s://%s:%d/",
        capabilities.model_name,
        capabilities.device,
        capabilities.speculative_config["method"],
        capabilities.speculative_config["num_speculative_tokens"],
        scheme,
        host,
        port,
    )


def _check_limits(args: argparse.Namespace) -> None:
    """Refuse limits that would block every client.

    Raises:
        ValueError: a limit is below 1.
    """
    for name in (
        "max_body_bytes",
        "drain_timeout",
        "max_connections",
        "max_unread_bytes",
        "body_timeout",
        "header_timeout",
        "write_timeout",
        "engine_timeout",
    ):
        if not getattr(args, name) >= 1:  # also refuses NaN
            raise ValueError(f"{name} must be at least 1, got {getattr(args, name)}")


def _check_weight_updates(args: argparse.Namespace, num_processes: int) -> None:
    """Refuse updates of weights where the engine cannot be replaced.

    Raises:
        ValueError: the directory does not exist, or another option needs the same engine.
    """
    if args.weight_update_dir is None:
        return
    if not Path(args.weight_update_dir).is_dir():
        raise ValueError(f"weight_update_dir must be a directory, got {args.weight_update_dir}")
    if num_processes != 1:
        raise ValueError(
            "weight_update_dir needs a single engine in its own process: leave out in_process and "
            "data_parallel_size"
        )
    for name, default in (
        ("role", None),
        ("scheduler_name", "local"),
        ("kv_events_endpoint", None),
    ):
        if getattr(args, name) != default:
            raise ValueError(f"weight_update_dir cannot be combined with {name}")


def _listeners(args: argparse.Namespace) -> tuple[socket.socket, socket.socket | None]:
    """Return the socket of the API and the socket of metrics, if metrics have their own port.

    Raises:
        ValueError: an address does not exist or is in use, or both ports are the same.
    """
    from specops.server import listen

    listener = listen(args.host, args.port)
    if args.metrics_port is None:
        return listener, None
    if args.metrics_port == args.port != 0:
        raise ValueError(f"metrics_port must differ from port, got {args.port} for both")
    return listener, listen(args.host, args.metrics_port, name="metrics_port")


def contract(arguments: Sequence[str], program: str) -> int:
    """Print the execution contract of an engine with these options; return the exit code."""
    from specops.engine.engine import Engine
    from specops.service.contract import contract_of

    try:
        args = _read(_contract_parser(program), arguments)
        engine = Engine(EngineConfig(**engine_settings(args)))
    except ValueError as error:
        return _fail(str(error))
    print(json.dumps(contract_of(engine), indent=2))
    return 0


def _read(parser: Parser, arguments: Sequence[str]) -> argparse.Namespace:
    """Parse the options of `--config`, of the environment and of the command line, in this order.

    Raises:
        ValueError: the file or a variable does not hold options, the model is named twice, or a
            flag is one of FastDeploy's that specops does not support.
    """
    for argument in arguments:
        require_known(argument)
    given = parser.parse_args(arguments)
    if given.model is not None and given.given_model is not None:
        raise ValueError(
            f"the model must be named once, got {given.given_model} and --model {given.model}"
        )
    before = environment_arguments(parser, os.environ)
    args = parser.parse_args([*before, *arguments])
    if args.config is not None:
        args = parser.parse_args([*arguments_of(args.config, parser), *before, *arguments])
    if given.served_model_name:  # these names replace those of the file and the environment
        args.served_model_name = given.served_model_name
    args.model = args.given_model or args.model
    return args


def _api_keys(from_flags: Sequence[str], file: str | None) -> list[str]:
    """Return the API keys of the command line, the environment and a file.

    Raises:
        ValueError: a key is empty or the file has none; a server meant to be protected would be
            open to all clients.
    """
    keys = [("--api-key", key) for key in from_flags]
    if "SPECOPS_API_KEY" in os.environ:
        keys.append(("SPECOPS_API_KEY", os.environ["SPECOPS_API_KEY"]))
    if file is not None:
        try:
            lines = Path(file).read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(
                f"--api-key-file must be a readable text file, got {file}: {error}"
            ) from None
        keys += [("--api-key-file", line) for line in lines if line.strip()] or [
            ("--api-key-file", "")
        ]
    for where, key in keys:
        if not key.strip():
            raise ValueError(f"{where} must hold a key of at least one character, got an empty one")
    return [key.strip() for _, key in keys]


def _verify_exactness(arguments: Sequence[str], program: str) -> int:
    from specops.cli import exactness  # imports torch, which a server's own process does not

    return exactness.main(arguments, program)


def _fail(message: str) -> int:
    print(f"specops: {message}", file=sys.stderr)
    return 2


_COMMANDS = {"verify-exactness": _verify_exactness, "contract": contract}
