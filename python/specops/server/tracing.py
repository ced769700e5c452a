# SPDX-License-Identifier: Apache-2.0
"""OpenTelemetry traces: one span per request, with the semantic conventions of generative AI."""

import os
import time
from typing import Any

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.propagate import extract
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import SpanKind, StatusCode
from starlette.datastructures import Headers
from starlette.types import Scope

import specops
from specops.server.answers import Answer
from specops.server.protocol import ChatCompletionRequest
from specops.server.requests import Record, reason_of
from specops.server.usage import add_stats


class Tracing:
    """Exporter of a span per request.

    Args:
        processor: receives the spans when requests end.
    """

    def __init__(self, processor: SpanProcessor) -> None:
        name = os.environ.get("OTEL_SERVICE_NAME", "specops")
        self._provider = TracerProvider(resource=Resource.create({"service.name": name}))
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("specops", specops.__version__)

    @classmethod
    def to(cls, endpoint: str) -> "Tracing":
        """Return an exporter to an OTLP endpoint, which sends spans from a thread of its own."""
        return cls(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))

    def export(self, scope: Scope, record: Record) -> None:
        """Export the span of a request that has ended, in the trace that its headers name."""
        attributes: dict[str, Any] = {
            "gen_ai.request.id": record.id,
            "http.request.method": scope["method"],
            "url.path": scope["path"],
            "http.response.status_code": record.status,
        }
        route = getattr(scope.get("route"), "path", None)
        if route is not None:
            attributes["http.route"] = route
        name = f"{scope['method']} {route or ''}".strip()
        if record.answer is not None:
            of_answer = _attributes(record.answer)
            name = f"{of_answer['gen_ai.operation.name']} {of_answer['gen_ai.response.model']}"
            attributes |= of_answer
        span = self._tracer.start_span(
            name,
            extract(Headers(scope=scope)),
            SpanKind.SERVER,
            attributes=attributes,
            start_time=record.began,
        )
        if (failure := record.failure) is not None:
            span.set_attribute("error.type", failure.code or failure.type)
            if record.status >= 500 or record.status == 200:  # a 4xx is not the server's error
                span.set_status(StatusCode.ERROR, reason_of(failure))
        span.end(time.time_ns())

    def close(self) -> None:
        """Export the spans that are left."""
        self._provider.shutdown()


def _attributes(answer: Answer[Any]) -> dict[str, Any]:
    """Return the attributes of an answer, complete or not; texts are not among them."""
    job, params = answer.job, answer.job.params
    is_chat = isinstance(answer.request, ChatCompletionRequest)
    ends = answer.ends.values()
    stats = add_stats([end.stats for end in ends])
    attributes: dict[str, Any] = {
        "gen_ai.operation.name": "chat" if is_chat else "text_completion",
        "gen_ai.provider.name": "specops",
        "gen_ai.request.model": answer.request.model or answer.frame["model"],
        "gen_ai.response.model": answer.frame["model"],
        "gen_ai.response.id": answer.frame["id"],
        "gen_ai.request.choice.count": params.n,
        "gen_ai.request.max_tokens": params.max_tokens,
        "gen_ai.request.temperature": params.temperature,
        "gen_ai.request.top_p": params.top_p,
        "gen_ai.request.seed": params.seed,
        "gen_ai.response.finish_reasons": [end.finish_reason for end in ends],
        "gen_ai.usage.input_tokens": sum(map(len, job.prompts)),
        "gen_ai.usage.output_tokens": sum(end.num_tokens for end in ends),
        "specops.usage.draft_tokens": stats.num_draft_tokens,
        "specops.usage.accepted_draft_tokens": stats.num_accepted_tokens,
    }
    first = min((times.first for times in job.times if times.first), default=None)
    if first is not None:
        attributes["gen_ai.latency.time_to_first_token"] = first - job.arrival
    # OpenTelemetry has no null, and its integers have 64 bits with a sign.
    return {
        name: value
        for name, value in attributes.items()
        if value is not None and not (isinstance(value, int) and value >= 1 << 63)
    }
