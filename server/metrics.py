# SPDX-License-Identifier: Apache-2.0
"""Metrics in Prometheus' text format, in a registry of their own.

Latencies are measured where the client waits: from the arrival of a request at this server to the
moment its output is ready to be sent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from kvferry.engine.request import RequestOutput
from kvferry.engine.scheduler_stats import SchedulerStats
from kvferry.server.call import SequenceResult

CONTENT_TYPE = CONTENT_TYPE_LATEST

_PREFIX = "kvferry"
_TTFT_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_TPOT_BUCKETS = (0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 2)
_TOTAL_BUCKETS = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)

_GAUGES = {
    "live": ("requests_live", "Requests accepted and not ended."),
    "waiting": ("requests_waiting", "Requests queued for prefill."),
    "prefilling": ("requests_prefilling", "Requests whose prompt is being computed."),
    "running": ("requests_running", "Requests in the decode batch."),
    "held": ("requests_held", "Requests waiting for, or busy with, a hand-over."),
    "queued": ("queue_depth", "Requests without a running slot."),
    "num_tokens": ("tokens_live", "Tokens of live requests, prompts and answers."),
    "num_pages": ("kv_pages", "KV pages in the pool."),
    "used_pages": ("kv_pages_used", "KV pages handed out."),
    "used_slots": ("slots_used", "Running slots taken."),
    "max_slots": ("slots", "Running slots."),
}
_COUNTERS = {
    "accepted_total": ("requests_accepted", "Requests taken in by the scheduler."),
    "prompt_tokens_total": ("prompt_tokens_computed", "Prompt tokens whose KV was computed here."),
    "generated_tokens_total": ("generated_tokens", "Tokens given to clients."),
    "preemptions_total": ("preemptions", "Times a sequence lost its pages to another."),
    "prefill_steps_total": ("prefill_steps", "Steps that computed prompts."),
    "decode_steps_total": ("decode_steps", "Steps that extended answers."),
    "step_seconds_total": ("step_seconds", "Time spent in steps."),
}


class MetricSample(NamedTuple):
    """One value that the rest of the process adds to /metrics.

    Attributes:
      name: name without the prefix `kvferry_`; a name that ends in `_total` is a counter, any
        other a gauge.
      value: the value.
      labels: label names and values; all samples of a name have the same label names.
      help: what it is.
    """

    name: str
    value: float
    labels: Mapping[str, str] = {}
    help: str = ""


class ServerMetrics:
    """The metrics of one server.

    Args:
      stats: returns the scheduler's numbers.
      collect: returns further samples; both are called at every scrape.
    """

    def __init__(
        self,
        stats: Callable[[], SchedulerStats],
        collect: Callable[[], Iterable[MetricSample]],
    ):
        self._registry = CollectorRegistry()
        self._answers = Counter(
            f"{_PREFIX}_http_answers",
            "HTTP answers begun, by route and status.",
            ["route", "status"],
            registry=self._registry,
        )
        self._cached = Counter(
            f"{_PREFIX}_cached_prompt_tokens",
            "Prompt tokens whose KV was found instead of computed.",
            registry=self._registry,
        )
        self._ttft = self._histogram(
            "time_to_first_token_seconds", "From arrival to the first output.", _TTFT_BUCKETS
        )
        self._tpot = self._histogram(
            "time_per_output_token_seconds",
            "Mean time per token after the first, one value per sequence.",
            _TPOT_BUCKETS,
        )
        self._total = self._histogram(
            "sequence_seconds", "From arrival to the last output.", _TOTAL_BUCKETS
        )
        self._stages = Histogram(
            f"{_PREFIX}_stage_seconds",
            "From arrival to each stage that the scheduler marks.",
            ["stage"],
            buckets=_TTFT_BUCKETS,
            registry=self._registry,
        )
        self._registry.register(_SchedulerCollector(stats))
        self._registry.register(_SampleCollector(collect))

    def answered(self, route: str, status: int) -> None:
        """Counts an HTTP answer.

        Args:
          route: path of the route.
          status: HTTP status.
        """
        self._answers.labels(route, str(status)).inc()

    def observe(self, output: RequestOutput, result: SequenceResult) -> None:
        """Records an output.

        Args:
          output: the output.
          result: its sequence, the output already added.
        """
        if result.first_output_seconds is None and output.token_ids:
            result.first_output_seconds = result.latency_seconds
            self._ttft.observe(result.latency_seconds)
        if output.finish is None:
            return
        self._cached.inc(output.cached_tokens)
        if output.finish.kind == "abort":
            return
        self._total.observe(result.latency_seconds)
        first, count = result.first_output_seconds, result.completion_tokens
        if first is not None and count > 1:
            self._tpot.observe((result.latency_seconds - first) / (count - 1))
        arrival = output.marks.get("arrival")
        for stage, reached in output.marks.items():
            if arrival is not None and stage != "arrival":
                self._stages.labels(stage).observe(max(0.0, reached - arrival))

    def text(self) -> bytes:
        """Returns all metrics as text."""
        return generate_latest(self._registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"{_PREFIX}_{name}", text, buckets=buckets, registry=self._registry)


class _SchedulerCollector:
    """Reads the scheduler's numbers at each scrape."""

    def __init__(self, stats: Callable[[], SchedulerStats]):
        self._stats = stats

    def describe(self) -> Iterable[Metric]:
        """Describes nothing: the registry need not scrape to learn the names."""
        return ()

    def collect(self) -> Iterator[Metric]:
        stats = self._stats()
        for field, (name, text) in _GAUGES.items():
            yield GaugeMetricFamily(f"{_PREFIX}_{name}", text, value=getattr(stats, field))
        yield GaugeMetricFamily(
            f"{_PREFIX}_kv_pages_free",
            "KV pages that are free.",
            value=stats.num_pages - stats.used_pages,
        )
        for field, (name, text) in _COUNTERS.items():
            yield CounterMetricFamily(f"{_PREFIX}_{name}", text, value=getattr(stats, field))
        finished = CounterMetricFamily(
            f"{_PREFIX}_requests_finished", "Requests ended, by finish reason.", labels=["reason"]
        )
        for reason, count in stats.finished_total.items():
            finished.add_metric([reason], count)
        yield finished


class _SampleCollector:
    """Reads the samples of the rest of the process at each scrape."""

    def __init__(self, collect: Callable[[], Iterable[MetricSample]]):
        self._collect = collect

    def describe(self) -> Iterable[Metric]:
        """Describes nothing: the registry need not scrape to learn the names."""
        return ()

    def collect(self) -> Iterator[Metric]:
        families: dict[str, GaugeMetricFamily | CounterMetricFamily] = {}
        for sample in self._collect():
            family = families.get(sample.name)
            if family is None:
                kind = CounterMetricFamily if sample.name.endswith("_total") else GaugeMetricFamily
                family = kind(
                    f"{_PREFIX}_{sample.name}",
                    sample.help or sample.name,
                    labels=list(sample.labels),
                )
                families[sample.name] = family
            family.add_metric(list(sample.labels.values()), sample.value)
        yield from families.values()
