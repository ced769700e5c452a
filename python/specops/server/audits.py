# SPDX-License-Identifier: Apache-2.0
"""Audits over HTTP: the records of answers, and POST /v1/audit, which derives answers again."""

from typing import Any, Literal

from pydantic import Field

from specops.api.audit import STRATEGIES, AuditRecord, AuditVerdict, Comparison
from specops.api.contract import digest_with_adapter
from specops.api.messages import Accepted, Capabilities
from specops.server.api_error import ApiError
from specops.server.jobs import Job
from specops.server.protocol import MAX_LISTS, MAX_STOP_LENGTH, Body
from specops.server.strict import Strict

MAX_RECORDS = 256


class AuditRequest(Body):
    """Body of POST /v1/audit."""

    model: str | None = None
    records: list[dict[str, Any]] = Field(min_length=1, max_length=MAX_RECORDS)


class Verdict(Strict):
    """Verdict on one record: the first difference, or none."""

    confirmed: bool
    num_confirmed: int
    what: Literal["token", "logprob", "rank", "alternatives", "ending"] | None
    given: Any
    derived: Any
    same_contract: bool | None
    message: str


class AuditReply(Strict):
    """The answer of POST /v1/audit."""

    object: Literal["audit"]
    model: str
    system_fingerprint: str
    verdicts: list[Verdict]


def require_auditable(accepted: Accepted | None) -> None:
    """Check that the answer to a request does not depend on its drafts.

    Raises:
        ApiError: the answer depends on its drafts.
    """
    assert accepted is not None, "the engine has accepted the request"
    strategy, policy = accepted.verify_strategy, accepted.accept_policy
    for name, value, allowed in (
        ("verify_strategy", strategy, STRATEGIES),
        ("accept_policy", policy, ("normal",)),
    ):
        if value not in allowed:
            raise ApiError(
                400,
                f"audit needs {name} {' or '.join(allowed)}, got {value}: otherwise an answer "
                "depends on the drafts that were verified, so it cannot be audited",
                param="audit",
                code="invalid_value",
            )


def records_of(request: AuditRequest, model: Capabilities) -> list[AuditRecord]:
    """Return the records of a request.

    Raises:
        ApiError: a record is invalid, or the model cannot have given its answer.
    """
    found = []
    for index, values in enumerate(request.records):
        try:
            record = AuditRecord.from_dict(values)
            _check(record, model)
        except (TypeError, ValueError) as error:
            raise bad_record(index, error) from None
        found.append(record)
    return found


def bad_record(index: int, error: Exception) -> ApiError:
    """Return the error for a record that cannot be audited."""
    name = f"records[{index}]"
    return ApiError(400, f"{name}: {error}", param=name, code="invalid_value")


def _check(record: AuditRecord, model: Capabilities) -> None:
    """Check that a record can be an answer of the model.

    Raises:
        ValueError: the record cannot be an answer of the model.
    """
    digest = digest_with_adapter(model.contract["digest"], record.adapter)
    if record.contract not in (None, digest):
        raise ValueError(
            f"contract {record.contract} is not this server's, {digest}, so other bits would prove "
            "nothing; remove contract from the record to compare the bits nevertheless"
        )
    if not record.prompt_token_ids:
        raise ValueError("prompt_token_ids must hold at least one token, got none")
    length = len(record.prompt_token_ids) + len(record.token_ids)
    if length > model.max_model_len:
        raise ValueError(
            f"prompt and output have {length} tokens, which exceeds the context of "
            f"{model.max_model_len} tokens"
        )
    for name, most in MAX_LISTS.items():
        count = len(getattr(record.params, name, None) or ())
        if count > most:
            raise ValueError(f"{name} must hold at most {most} elements, got {count}")
    if (longest := max(map(len, record.params.stop), default=0)) > MAX_STOP_LENGTH:
        raise ValueError(
            f"stop must hold strings of at most {MAX_STOP_LENGTH} characters, got one of {longest}"
        )
    for name in ("prompt_token_ids", "token_ids"):
        if max(getattr(record, name), default=0) >= model.vocab_size:
            raise ValueError(
                f"{name} must be in [0, {model.vocab_size}), got {max(getattr(record, name))}"
            )


async def compare(job: Job, comparison: Comparison) -> AuditVerdict:
    """Compare the outputs of an accepted job with its record until there is a verdict.

    Raises:
        JobFailed: the job failed.
    """
    while comparison.verdict is None:
        for output in await job.next_outputs():
            step = output.output
            comparison.take(step.token_ids, step.logprobs)
            if step.end is not None:
                comparison.end(step.end.finish_reason, step.end.stop_reason)
    return comparison.verdict
