# SPDX-License-Identifier: Apache-2.0
"""`python -m specops.engine`: serves a model over HTTP. Without arguments: the bundled model.

`python -m specops.engine verify-exactness` compares speculation with plain decoding instead.
"""

import argparse
import json
import logging
import os
import socket
import sys
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from specops.engine import exactness
from specops.engine.config import EngineConfig
from specops.engine.config_file import arguments_of
from specops.engine.contract import contract_of
from specops.engine.engine import Engine
from specops.engine.speculative_config import SpeculativeConfig


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m specops.engine",
        description="Serves a model with speculative decoding behind an OpenAI-compatible API, and "
        "a page to try it in the browser.",
        epilog="verify-exactness as the first argument, with --help for more: compares every token "
        "with and without speculation, and serves nothing.",
    )
    parser.add_argument(
        "--config",
        metavar="FILE",
        help="options in YAML, under the names of these flags; the command line goes before them",
    )
    _add_engine_options(parser)
    _add_server_options(parser)
    return parser


def _add_engine_options(parser: argparse.ArgumentParser) -> None:
    # Absent means EngineConfig's default, so that every default is written down once.
    add = parser.add_argument
    add("--model", metavar="DIR", help="Hugging Face directory (default: the bundled model)")
    add("--served-model-name", metavar="NAME", help="name clients use (default: the directory's)")
    add(
        "--speculative-config",
        metavar="JSON",
        help='for requests that do not choose, e.g. \'{"method": "ngram", '
        '"num_speculative_tokens": 4}\' (default: this one)',
    )
    add(
        "--device",
        metavar="NAME",
        help="auto, cpu, cuda or cuda:N (default: auto, a GPU where one can be used)",
    )
    add(
        "--enforce-eager",
        action="store_true",
        default=None,
        help="on a GPU: no CUDA graphs, every kernel is launched on its own",
    )
    add(
        "--load-format",
        choices=("auto", "dummy"),
        help="dummy makes random weights for measurements (default: the checkpoint's)",
    )
    add(
        "--logprobs-mode",
        choices=("raw_logprobs", "processed_logprobs"),
        help="logprobs of the model's logits, or of what tokens are drawn from (default: raw)",
    )
    add("--dtype", choices=("auto", "bfloat16", "float32"), help="(default: the checkpoint's)")
    add(
        "--kv-cache-dtype",
        choices=("auto", "int8", "fp8_e4m3"),
        help="of keys and values: 8 bits take half the memory (default: the model's)",
    )
    _add_sizes(parser)
    add("--seed", type=int, metavar="N", help="makes the seeds of requests without one repeatable")
    add(
        "--suffix-corpus",
        metavar="PATH",
        help="text file, or folder of them, that suffix decoding drafts from",
    )
    add(
        "--suffix-cache",
        metavar="FILE",
        help="where suffix decoding keeps the responses it drafts from: loaded at the start if it "
        "is there, saved at the end and every few minutes",
    )
    add(
        "--calibrate",
        action="store_true",
        default=None,
        help="measure what steps cost anew, for adaptive verification (default: once per machine)",
    )


def _add_sizes(parser: argparse.ArgumentParser) -> None:
    default, add = EngineConfig, parser.add_argument
    add("--max-model-len", type=int, metavar="N", help="longest prompt and output together")
    add("--max-num-seqs", type=int, metavar="N", help=f"(default: {default.max_num_seqs})")
    add(
        "--max-num-batched-tokens",
        type=int,
        metavar="N",
        help=f"rows of one step (default: {default.max_num_batched_tokens})",
    )
    add("--page-size", type=int, choices=(16, 32, 64), help=f"(default: {default.page_size})")
    add("--num-pages", type=int, metavar="N", help="KV pages (default: what the requests need)")
    add(
        "--enable-prefix-caching",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="share the pages of equal prefixes (default: yes)",
    )
    add(
        "--enable-cascade-attention",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="read the pages that requests share once for all of them (default: yes)",
    )
    add("--num-threads", type=int, metavar="N", help="CPU threads (default: all usable)")
    add(
        "--max-waiting",
        type=int,
        metavar="N",
        help=f"requests that may wait, further ones get 429 (default: {default.max_waiting})",
    )


def _add_server_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    add("--port", type=int, default=8000, help="(default: %(default)s)")
    add(
        "--metrics-port",
        type=int,
        metavar="PORT",
        help="serve /metrics on this port instead (default: on --port)",
    )
    add(
        "--api-key",
        metavar="KEY",
        action="append",
        default=[],
        help="bearer token that requests must carry; may be given several times, and in the "
        "environment as SPECOPS_API_KEY. Slots are shared equally among keys",
    )
    add(
        "--tool-call-parser",
        choices=("hermes", "llama3_json", "mistral"),
        help="how the model writes calls of tools (default: as its chat template teaches it)",
    )
    add("--api-key-file", metavar="FILE", help="further keys, one a line")
    _add_limits(parser)
    add(
        "--log-level",
        choices=("debug", "info", "warning", "error"),
        default="info",
        help="(default: %(default)s)",
    )


def _add_limits(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--max-body-bytes",
        type=int,
        default=4 << 20,
        metavar="N",
        help="longest request body (default: %(default)s)",
    )
    add(
        "--body-timeout",
        type=float,
        default=60.0,
        metavar="SECONDS",
        help="time that a client may take over a body (default: %(default)s)",
    )
    add(
        "--header-timeout",
        type=float,
        default=20.0,
        metavar="SECONDS",
        help="time that a client may take over the headers of a request (default: %(default)s)",
    )
    add(
        "--max-connections",
        type=int,
        default=1024,
        metavar="N",
        help="connections open at a time (default: %(default)s)",
    )
    add(
        "--drain-timeout",
        type=int,
        default=30,
        metavar="SECONDS",
        help="time that running requests get after SIGTERM (default: %(default)s)",
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Serves until it is told to stop; returns the exit code, 2 for a mistake in the arguments."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given[:1] == ["verify-exactness"]:
        return exactness.main(given[1:])
    if given[:1] == ["contract"]:
        return _print_contract(given[1:])
    parser = _parser()
    args = parser.parse_args(given)
    if args.config is not None:
        try:
            args = parser.parse_args([*arguments_of(args.config, parser), *given])
        except ValueError as error:
            return _fail(str(error))
    logging.basicConfig(level=args.log_level.upper(), format="%(levelname)s %(name)s: %(message)s")
    try:
        from specops.engine import server
    except ModuleNotFoundError as error:
        return _fail(
            f"the server needs {error.name}, which is not installed: pip install 'specops[server]'"
        )
    try:
        settings = _engine_settings(args)
        _check_limits(args)
        api_keys = _api_keys(args.api_key, args.api_key_file)
        listener, metrics_listener = _listeners(args)  # before the model, which takes longer
        engine = Engine(EngineConfig(**settings))
        app = server.make_app(
            engine,
            api_keys=api_keys,
            max_body_bytes=args.max_body_bytes,
            body_timeout=args.body_timeout,
            metrics_apart=metrics_listener is not None,
            tool_call_parser=args.tool_call_parser,
        )
    except ValueError as error:
        return _fail(str(error))
    speculative = engine.config.speculative_config
    logging.getLogger(__name__).info(
        "%s on %s with method %s, k = %d; the page is at http://%s:%d/",
        engine.model_name,
        engine.device,
        speculative.method,
        speculative.num_speculative_tokens,
        args.host,
        listener.getsockname()[1],
    )
    server.serve(
        app,
        listener,
        drain_timeout=args.drain_timeout,
        log_level=args.log_level,
        max_connections=args.max_connections,
        header_timeout=args.header_timeout,
        metrics_listener=metrics_listener,
    )
    return 0


def _check_limits(args: argparse.Namespace) -> None:
    """Refuses limits that would let nobody in.

    Raises:
        ValueError: one of them would.
    """
    for name in (
        *("max_body_bytes", "drain_timeout", "max_connections"),
        *("body_timeout", "header_timeout"),
    ):
        if getattr(args, name) < 1:
            raise ValueError(f"{name} must be at least 1, got {getattr(args, name)}")


def _listeners(args: argparse.Namespace) -> tuple[socket.socket, socket.socket | None]:
    """Where to answer, and where to tell metrics if they have a port of their own.

    Raises:
        ValueError: one of the addresses does not exist or is in use.
    """
    from specops.engine.server import listen

    listener = listen(args.host, args.port)
    if args.metrics_port is None:
        return listener, None
    if args.metrics_port == args.port != 0:
        raise ValueError(f"metrics_port must be another than port, got {args.port} twice")
    return listener, listen(args.host, args.metrics_port, name="metrics_port")


def _print_contract(given: Sequence[str]) -> int:
    """Prints what the bits of an engine with these options depend on; returns the exit code."""
    try:
        engine = Engine(EngineConfig(**_engine_settings(_parser().parse_args(given))))
    except ValueError as error:
        return _fail(str(error))
    print(json.dumps(contract_of(engine), indent=2))
    return 0


def _engine_settings(args: argparse.Namespace) -> dict[str, Any]:
    """What EngineConfig is made of: the options that were given.

    Raises:
        ValueError: the speculative configuration is none.
    """
    settings: dict[str, Any] = {
        field.name: getattr(args, field.name)
        for field in fields(EngineConfig)
        if getattr(args, field.name, None) is not None
    }
    if args.speculative_config is not None:
        settings["speculative_config"] = SpeculativeConfig.from_json(args.speculative_config)
    return settings


def _api_keys(given: Sequence[str], file: str | None) -> list[str]:
    """The keys of the command line, the environment and a file.

    Raises:
        ValueError: one is empty, or the file has none: a server that was meant to have a key would
            be open to everybody.
    """
    keys = [("--api-key", key) for key in given]
    if "SPECOPS_API_KEY" in os.environ:
        keys.append(("SPECOPS_API_KEY", os.environ["SPECOPS_API_KEY"]))
    if file is not None:
        try:
            lines = Path(file).read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"--api-key-file must be a text file, got {file}: {error}") from None
        keys += [("--api-key-file", line) for line in lines if line.strip()] or [
            ("--api-key-file", "")
        ]
    for where, key in keys:
        if not key.strip():
            raise ValueError(f"{where} must hold a key of at least one character, got none")
    return [key.strip() for _, key in keys]


def _fail(message: str) -> int:
    print(f"specops: {message}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
