# SPDX-License-Identifier: Apache-2.0
"""`python -m specops.engine`: serve a model over HTTP, by default the bundled one.

`python -m specops.engine verify-exactness` compares speculation with plain decoding instead.
"""

import argparse
import contextlib
import json
import logging
import os
import socket
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specops.api.config import EngineConfig
from specops.api.tokenizer import Tokenizer
from specops.cli import Parser, finite
from specops.cli.config_file import arguments_of
from specops.cli.fastdeploy import require_known
from specops.cli.options import (
    add_engine_options,
    engine_settings,
    plain_settings,
    require_effective_drafts,
)
from specops.cli.roles import (
    add_data_parallel_options,
    add_kv_event_options,
    add_role_options,
    add_scheduler_options,
    check_scheduler,
    require_effect,
    scheduled,
    setups,
)
from specops.service.file_lock import FileLock

if TYPE_CHECKING:
    from fastapi import FastAPI

    from specops.service.client import EngineClient
    from specops.service.process import EngineProcess
    from specops.service.wire import Setup

_PROGRAM = "python -m specops.engine"
_EXTRAS = {
    "redis": "redis",
    "zmq": "events",
    "nixl": "nixl",
}  # module -> extra that installs it, for modules not in the extra "server"


def _parser(program: str = _PROGRAM) -> argparse.ArgumentParser:
    """Return the parser of the server's command line."""
    parser = Parser(
        prog=program,
        allow_abbrev=False,
        description="Serve a model with speculative decoding: an OpenAI-compatible API and a web "
        "page to try it.",
        epilog=(
            "Other commands, as the first argument: verify-exactness compares every token with and "
            "without speculation; contract prints the settings that output bits depend on. Add "
            "--help for their options."
            if program == _PROGRAM
            else None
        ),
    )
    parser.add_argument(
        "--config",
        metavar="FILE",
        help="YAML file with options under the names of these flags; flags on the command line "
        "take precedence",
    )
    add_engine_options(parser)
    _add_server_options(parser)
    add_data_parallel_options(parser)
    add_role_options(parser)
    add_kv_event_options(parser)
    add_scheduler_options(parser)
    return parser


def _contract_parser(program: str) -> argparse.ArgumentParser:
    """Return the server's parser with shorter help, so that `contract` accepts the same options."""
    from specops.service.contract import OPTIONS

    parser = _parser(program)
    parser.description = (
        "Print everything that the output bits of a server with these options depend on, and its "
        "digest."
    )
    parser.epilog = "The server's other options are accepted but have no effect."
    for action in parser._actions:
        if action.dest not in {"help", "config", *OPTIONS}:
            action.help = argparse.SUPPRESS
    return parser


def _add_server_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    add("--port", type=int, default=8000, help="port to listen on (default: %(default)s)")
    add(
        "--metrics-port",
        type=int,
        metavar="PORT",
        help="serve /metrics on this port instead of --port",
    )
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
        "--forwarded-allow-ips",
        metavar="ADDRESS",
        action="append",
        default=[],
        help="address or network of a proxy whose X-Forwarded-For header is trusted; may be "
        "repeated, * trusts any (default: none)",
    )
    _add_chat(parser)
    _add_limits(parser)
    add(
        "--in-process",
        action="store_true",
        help="run the engine in a thread of the server, which does not restart it, for debugging "
        "(default: in its own process)",
    )
    add(
        "--log-level",
        type=str.lower,
        choices=("debug", "info", "warning", "error"),
        default="info",
        help="minimum severity of log lines (default: %(default)s)",
    )


def _add_chat(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--tool-call-parser",
        type=str.lower,
        choices=("hermes", "llama3_json", "mistral"),
        help="syntax in which the model writes tool calls (default: detected from its chat "
        "template)",
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


def _add_limits(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--max-body-bytes",
        type=int,
        default=4 << 20,
        metavar="N",
        help="maximum length of a request body (default: %(default)s)",
    )
    add(
        "--body-timeout",
        type=finite,
        default=60.0,
        metavar="SECONDS",
        help="time within which a request body must arrive (default: %(default)s)",
    )
    add(
        "--header-timeout",
        type=finite,
        default=20.0,
        metavar="SECONDS",
        help="time within which the headers of a request must arrive (default: %(default)s)",
    )
    add(
        "--write-timeout",
        type=finite,
        default=60.0,
        metavar="SECONDS",
        help="time within which a client must read what was written for it (default: %(default)s)",
    )
    add(
        "--max-unread-bytes",
        type=int,
        default=64 << 20,
        metavar="N",
        help="bytes of output that a client may leave unread (default: %(default)s)",
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
        "restarted (default: %(default)s)",
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
    logging.basicConfig(level=args.log_level.upper(), format="%(levelname)s %(name)s: %(message)s")
    with contextlib.ExitStack() as stack:
        try:
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
            extra = _EXTRAS.get(error.name or "", "server")
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
    check_scheduler(args)
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
        chat_template=args.chat_template,
        access=access,
        sampling_defaults=defaults,
        cache_scope=args.cache_scope,
        model_aliases=(args.served_model_name or [""])[1:],
        unsupported_fields=args.unsupported_fields,
    )
    _log_address(client, args.host, listener.getsockname()[1])
    return app, {
        "listener": listener,
        "drain_timeout": args.drain_timeout,
        "log_level": args.log_level,
        "max_connections": args.max_connections,
        "header_timeout": args.header_timeout,
        "write_timeout": args.write_timeout,
        "metrics_listener": metrics_listener,
    }


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
    return ThreadClient(engine)


def _log_address(client: "EngineClient", host: str, port: int) -> None:
    capabilities = client.capabilities
    logging.getLogger(__name__).info(
        "serving %s on %s with method %s and %d drafts per step at http://%s:%d/",
        capabilities.model_name,
        capabilities.device,
        capabilities.speculative_config["method"],
        capabilities.speculative_config["num_speculative_tokens"],
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


def _read(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> argparse.Namespace:
    """Parse the command line, with the options of `--config` before its own.

    Raises:
        ValueError: the file cannot be read or does not hold options, or a flag is one of
            FastDeploy's that specops does not support.
    """
    for argument in arguments:
        require_known(argument)
    args = parser.parse_args(arguments)
    if args.config is None:
        return args
    merged = parser.parse_args([*arguments_of(args.config, parser), *arguments])
    if args.served_model_name:  # these names replace those of the file
        merged.served_model_name = args.served_model_name
    return merged


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
