# SPDX-License-Identifier: Apache-2.0
"""`specops audit`: derive recorded answers again, and say where one differs."""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from specops.api.audit import AuditRecord, AuditVerdict
from specops.api.config import EngineConfig
from specops.api.errors import EngineError
from specops.audit import audit
from specops.cli import Parser, fail, require_writable, write_file
from specops.cli.options import add_adapter_options, add_model_options, engine_settings
from specops.cli.progress import loading_shown
from specops.engine.engine import Engine
from specops.service.contract import contract_of

_MAX_NUM_SEQS = 8  # enough rows to keep a CPU busy


def main(arguments: Sequence[str], program: str) -> int:
    """Audit the records of files.

    Returns:
        The exit code: 1 if an answer differs, 2 for an invalid option or file.
    """
    args = _parser(program).parse_args(arguments)
    try:
        records = [
            (f"{file}: record {place}", record)
            for file in args.files
            for place, record in enumerate(_records(file), 1)
        ]
        if not records:
            raise ValueError(f"no audit record in {', '.join(args.files)}")
        if args.json is not None:
            require_writable("--json", args.json)
        with loading_shown():
            engine = Engine(EngineConfig(max_num_seqs=_MAX_NUM_SEQS, **engine_settings(args)))
        contract = contract_of(engine)["digest"]
        verdicts = audit(engine, [record for _, record in records], contract=contract)
        if args.json is not None:
            write_file("--json", args.json, _report(records, verdicts, contract))
    except (EngineError, OSError, ValueError) as error:
        return fail(str(error))
    for (name, _), verdict in zip(records, verdicts, strict=True):
        if not (args.quiet and verdict.is_confirmed):
            print(f"{name}: {verdict.sentence(lambda token_id: _shown(engine, token_id))}")
    confirmed = sum(verdict.is_confirmed for verdict in verdicts)
    print(f"{confirmed} of {len(verdicts)} answers confirmed")
    return int(confirmed < len(verdicts))


def _parser(program: str) -> argparse.ArgumentParser:
    parser = Parser(
        prog=program,
        description="Derive every token and every logprob bit of recorded answers again, at the "
        "speed of prefill, and say where an answer differs. The model and the options of the "
        "engine must be those that the answers are said to come from.",
    )
    add = parser.add_argument
    add(
        "files",
        nargs="+",
        metavar="FILE",
        help="audit records: a file of `specops complete --json`, a response of a server to a "
        "request with audit: true, or JSON lines of either; - for standard input",
    )
    add_model_options(parser)
    add_adapter_options(parser)
    add(
        "--logprobs-mode",
        type=str.lower,
        choices=("raw_logprobs", "processed_logprobs"),
        help="logprobs mode in which the answers were computed (default: raw_logprobs)",
    )
    add("--quiet", action="store_true", help="print only answers that differ, and the count")
    add("--json", metavar="FILE", help="also write the verdicts to this file")
    return parser


def _records(file: str) -> list[AuditRecord]:
    """Read the records of a file.

    Raises:
        ValueError: the file cannot be read, or holds something else.
    """
    try:
        text = sys.stdin.read() if file == "-" else Path(file).read_text(encoding="utf-8")
        try:
            values = [json.loads(text)]
        except ValueError:
            values = [json.loads(line) for line in text.splitlines() if line.strip()]
    except (OSError, ValueError) as error:
        raise ValueError(f"{file} must be a file of JSON or JSON lines: {error}") from None
    found = [one for value in values for one in _records_in(value)]
    try:
        return [AuditRecord.from_dict(one) for one in found]
    except (TypeError, ValueError) as error:
        raise ValueError(f"{file}: {error}") from None


def _records_in(value: Any) -> Iterator[Any]:
    """Yield the records in a JSON value, at any depth."""
    if isinstance(value, list):
        for one in value:
            yield from _records_in(one)
    elif isinstance(value, dict):
        if "params" in value and "prompt_token_ids" in value:
            yield value
        else:
            for one in value.values():
                yield from _records_in(one)


def _shown(engine: Engine, token_id: int) -> str:
    text = engine.tokenizer.decode([token_id], skip_special_tokens=False)
    return f"{token_id} ({text!r})"


def _report(
    records: Sequence[tuple[str, AuditRecord]], verdicts: Sequence[AuditVerdict], contract: str
) -> str:
    report = {
        "contract": contract,
        "verdicts": [
            {"record": name, **verdict.as_dict()}
            for (name, _), verdict in zip(records, verdicts, strict=True)
        ],
    }
    return json.dumps(report, indent=2) + "\n"
