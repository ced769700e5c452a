# SPDX-License-Identifier: Apache-2.0
"""Prometheus metrics: vLLM's names and meanings under the prefix `specops:`.

Counters are copied from the engine's last status, so that they cannot disagree with it. Only
histograms of times and lengths are recorded here, as events occur.
"""

import time
from collections import deque
from collections.abc import Iterator

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    PlatformCollector,
    ProcessCollector,
    generate_latest,
)
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from specops.server.jobs import Span
from specops.server.unread import Unread
from specops.service.client import EngineClient

_SECONDS = (
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1.0,
    2.5,
    5.0,
    10.0,
    30.0,
    60.0,
)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)
_LENGTHS = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24)
_LABELS = ("model_name",)
_MAX_RENDERED = 10  # renderings per second


class Metrics:
    """Metrics of one engine.

    Args:
        client: connection to the engine.
    """

    def __init__(self, client: EngineClient) -> None:
        self._model = client.capabilities.model_name
        self._text = b""  # the last rendering
        self._rendered: deque[float] = deque(maxlen=_MAX_RENDERED)  # rendering times in order
        self._registry = CollectorRegistry()
        ProcessCollector(registry=self._registry)
        PlatformCollector(registry=self._registry)
        if client.pid is not None:
            ProcessCollector("engine", pid=lambda: client.pid or 0, registry=self._registry)
        self._registry.register(_EngineCollector(client))
        self._success = Counter(
            "specops:request_success",
            "Finished choices by the reason they ended",
            (*_LABELS, "finished_reason"),
            registry=self._registry,
        )
        for reason in ("stop", "length", "abort", "error"):
            self._success.labels(self._model, reason)
        self._first_token = self._histogram(
            "time_to_first_token_seconds", "From arrival to the first token", _SECONDS
        )
        self._between_tokens = self._histogram(
            "inter_token_latency_seconds",
            "Time per output token; a step's time is shared by the tokens it emitted",
            _SECONDS,
        )
        self._queued = self._histogram(
            "request_queue_time_seconds", "From arrival to the first step of a choice", _SECONDS
        )
        self._prefilled = self._histogram(
            "request_prefill_time_seconds",
            "From the first step of a choice to its first token",
            _SECONDS,
        )
        self._decoded = self._histogram(
            "request_decode_time_seconds", "From the first token of a choice to its last", _SECONDS
        )
        self._per_token = self._histogram(
            "request_time_per_output_token_seconds",
            "Mean of a choice, over the tokens after the first ones",
            _SECONDS,
        )
        self._step_tokens = self._histogram(
            "iteration_tokens", "Rows of a step: tokens of prompts, decoding and drafts", _TOKENS
        )
        self._answers = Counter(
            "specops:http_requests",
            "Answers by method, route and status",
            (*_LABELS, "method", "route", "status"),
            registry=self._registry,
        )
        self._audits = Counter(
            "specops:audited_answers",
            "Answers that /v1/audit derived again, by verdict",
            (*_LABELS, "verdict"),
            registry=self._registry,
        )
        self._whole = self._histogram(
            "e2e_request_latency_seconds", "From arrival to the end of a choice", _SECONDS
        )
        self._prompt = self._histogram(
            "request_prompt_tokens", "Prompt tokens of finished choices", _TOKENS
        )
        self._generated = self._histogram(
            "request_generation_tokens", "Output tokens of finished choices", _TOKENS
        )

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        histogram = Histogram(
            f"specops:{name}", text, _LABELS, registry=self._registry, buckets=buckets
        )
        labeled: Histogram = histogram.labels(self._model)
        return labeled

    def watch(self, unread: Unread) -> None:
        """Add a gauge of the bytes of output that clients have not read; call this once."""
        text = "Estimated bytes of output that clients have not read yet"
        gauge = Gauge("specops:unread_output_bytes", text, _LABELS, registry=self._registry)
        gauge.labels(self._model).set_function(lambda: unread.total)

    def tokens(self, count: int, seconds: float, *, first: bool) -> None:
        """Record `count` new tokens of a choice, `seconds` after its last ones or its arrival."""
        if first:
            self._first_token.observe(seconds)
            # For a client, further tokens of the first step arrive together with the first token.
            for _ in range(count - 1):
                self._between_tokens.observe(0.0)
        else:
            for _ in range(count):
                self._between_tokens.observe(seconds / count)

    def audited(self, is_confirmed: bool) -> None:
        """Count an audited answer."""
        self._audits.labels(self._model, "confirmed" if is_confirmed else "differs").inc()

    def dropped(self, reason: str, count: int) -> None:
        """Count choices that ended early."""
        self._success.labels(self._model, reason).inc(count)

    def finished(self, reason: str, num_prompt: int, num_tokens: int, span: Span) -> None:
        """Record a finished choice with its numbers of tokens and its timeline."""
        self._success.labels(self._model, reason).inc()
        self._whole.observe(span.last)
        self._queued.observe(span.begin)
        self._prefilled.observe(span.first - span.begin)
        self._decoded.observe(span.last - span.first)
        num_later = num_tokens - span.num_first
        if num_later > 0:
            self._per_token.observe((span.last - span.first) / num_later)
        self._prompt.observe(num_prompt)
        self._generated.observe(num_tokens)

    def step(self, num_rows: int) -> None:
        """Record a step of the engine with its number of rows; do nothing if 0."""
        if num_rows:
            self._step_tokens.observe(num_rows)

    def answer(self, method: str, route: str, status: int) -> None:
        """Count an HTTP response; call this when the response begins."""
        self._answers.labels(self._model, method, route, str(status)).inc()

    def render(self) -> bytes:
        """Return all metrics in Prometheus' text format.

        Return the last rendering again after `_MAX_RENDERED` renderings within a second: each takes
        milliseconds in which no answer makes progress, so a client in a loop must not cause more.
        """
        now = time.monotonic()
        if len(self._rendered) < _MAX_RENDERED or now - self._rendered[0] >= 1.0:
            self._rendered.append(now)
            self._text = generate_latest(self._registry)
        return self._text


class _EngineCollector(Collector):
    """Collector that reads the engine's counters at each scrape."""

    def __init__(self, client: EngineClient) -> None:
        self._client = client
        self._model = client.capabilities.model_name

    def collect(self) -> Iterator[Metric]:
        yield from self._gauges()
        yield from self._counters()
        yield self._cache_config()
        yield self._draft_lengths()
        yield from self._positions()
        yield self._drafter_failures()
        yield self._drafter_warnings()

    def _gauges(self) -> Iterator[Metric]:
        """Yield gauges of the engine's current state."""
        status, capabilities = self._client.status, self._client.capabilities
        used = 1 - status.num_free_pages / capabilities.num_pages
        sizes, texts = status.drafter_gauges, capabilities.drafter_gauges
        for name, text, value in (
            ("num_requests_running", "Choices that run", status.num_running),
            ("num_requests_waiting", "Choices that wait", status.num_waiting),
            ("kv_cache_usage_perc", "Share of the KV pages in use, 0 to 1", used),
            *((name, texts[name], value) for name, value in sizes.items()),
        ):
            gauge = GaugeMetricFamily(f"specops:{name}", text, labels=_LABELS)
            gauge.add_metric([self._model], value)
            yield gauge

    def _counters(self) -> Iterator[Metric]:
        """Yield the engine's counters since its start."""
        stats = self._client.status.stats
        speculative = stats.speculative
        for name, text, count in (
            ("num_steps", "Engine steps", stats.num_steps),
            (
                "verify_seconds",
                "Time in which the model ran and tokens were chosen; 0 on a GPU",
                stats.verify_seconds,
            ),
            ("draft_seconds", "Time that drafting took; 0 on a GPU", stats.draft_seconds),
            (
                "num_preemptions",
                "Choices that lost their pages and began anew",
                stats.num_preemptions,
            ),
            ("prompt_tokens", "Prompt tokens, those of n choices once", stats.prompt_tokens),
            ("generation_tokens", "Tokens generated", stats.generation_tokens),
            ("prefix_cache_queries", "Prompt tokens looked up", stats.prefix_cache_queries),
            ("prefix_cache_hits", "Prompt tokens found", stats.prefix_cache_hits),
            (
                "cascade_saved_bytes",
                "Bytes of keys and values not read again, since choices share them",
                stats.cascade_saved_bytes,
            ),
            (
                "num_paused_steps",
                "Steps that skipped a running choice for other clients' requests",
                stats.num_paused_steps,
            ),
            (
                "kv_transfer_corrupt_pages",
                "Pages damaged in transit from other servers, and computed instead",
                stats.num_damaged_kv_pages,
            ),
            ("spec_decode_num_drafts", "Steps with drafts, per choice", speculative.num_drafts),
            ("spec_decode_num_draft_tokens", "Draft tokens", speculative.num_draft_tokens),
            (
                "spec_decode_num_accepted_tokens",
                "Draft tokens accepted",
                speculative.num_accepted_tokens,
            ),
        ):
            counter = CounterMetricFamily(f"specops:{name}", text, labels=_LABELS)
            counter.add_metric([self._model], count)
            yield counter

    def _cache_config(self) -> Metric:
        """Return the KV cache's settings as labels of a gauge whose value is 1."""
        capabilities = self._client.capabilities
        facts = {
            "block_size": str(capabilities.page_size),
            "num_blocks": str(capabilities.num_pages),
            "enable_prefix_caching": str(capabilities.enable_prefix_caching),
        }
        info = GaugeMetricFamily(
            "specops:cache_config_info", "The KV cache's settings", labels=(*_LABELS, *facts)
        )
        info.add_metric([self._model, *facts.values()], 1)
        return info

    def _positions(self) -> Iterator[Metric]:
        """Yield counters of draft tokens and accepted draft tokens by position in the draft."""
        speculative = self._client.status.stats.speculative
        for name, text, counts in (
            (
                "spec_decode_num_draft_tokens_per_pos",
                "Draft tokens at each position of a draft",
                speculative.num_draft_tokens_per_pos(),
            ),
            (
                "spec_decode_num_accepted_tokens_per_pos",
                "Draft tokens accepted at each position of a draft",
                list(speculative.num_accepted_tokens_per_pos),
            ),
        ):
            per_pos = CounterMetricFamily(f"specops:{name}", text, labels=(*_LABELS, "position"))
            for position, count in enumerate(counts):
                per_pos.add_metric([self._model, str(position)], count)
            yield per_pos

    def _drafter_failures(self) -> Metric:
        """Return the failures of drafters by method."""
        failures = CounterMetricFamily(
            "specops:drafter_failures",
            "Failures of a drafter; the requests concerned continue without drafts",
            labels=(*_LABELS, "method"),
        )
        for method, count in self._client.status.stats.drafter_failures.items():
            failures.add_metric([self._model, method], count)
        return failures

    def _drafter_warnings(self) -> Metric:
        """Return the warnings about drafters, with the number of engines that warn."""
        warnings = GaugeMetricFamily(
            "specops:drafter_warnings",
            "Drafters whose drafts seem useless; no answer depends on drafts",
            labels=(*_LABELS, "warning"),
        )
        for sentence, count in self._client.status.stats.drafter_warnings.items():
            warnings.add_metric([self._model, sentence], count)
        return warnings

    def _draft_lengths(self) -> Metric:
        """Return the histogram of verified drafts per step, over all steps of all choices."""
        speculative = self._client.status.stats.speculative
        counts = [speculative.num_steps - speculative.num_drafts]
        counts += speculative.num_drafts_per_length[1:]
        counts += [0] * (_LENGTHS[-1] + 1 - len(counts))
        total = 0
        buckets = []
        for length, count in enumerate(counts):
            total += count
            if length in _LENGTHS:
                buckets.append((str(float(length)), total))
        buckets.append(("+Inf", total))
        histogram = HistogramMetricFamily(
            "specops:spec_decode_draft_length",
            "Drafts verified in a step, per choice",
            labels=_LABELS,
        )
        weighed = sum(length * count for length, count in enumerate(counts))
        histogram.add_metric([self._model], buckets, weighed)
        return histogram
