"""`/metrics` under vLLM's names, so that whoever scrapes vLLM scrapes this engine."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from engines.embedded.engine import EmbeddedEngine
from engines.embedded.scheduler import Finish, Request

LABELS = ("engine", "model_name")
LATENCIES_S = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.08,
    0.16,
    0.32,
    0.64,
    1.28,
    2.56,
    5.12,
    10.24,
    40.96,
)
TOKENS = tuple(2.0**n for n in range(18))


@dataclass(slots=True)
class Timing:
    """One request's clock, `time.monotonic` seconds."""

    began_s: float
    first_s: float | None = None
    last_s: float | None = None


class Metrics:
    """Counters and histograms of one engine, in a registry of their own."""

    def __init__(self, engine: EmbeddedEngine, model_name: str) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_Gauges(engine, model_name))
        values = ("0", model_name)

        def counter(name: str, text: str) -> Counter:
            return Counter(f"vllm:{name}", text, LABELS, registry=self._registry).labels(*values)

        def histogram(name: str, text: str, buckets: tuple[float, ...] = LATENCIES_S) -> Histogram:
            made = Histogram(f"vllm:{name}", text, LABELS, registry=self._registry, buckets=buckets)
            return made.labels(*values)

        self._prompt = counter("prompt_tokens", "Prompt tokens, cached ones included.")
        self._cached = counter("prompt_tokens_cached", "Prompt tokens found in the prefix cache.")
        self._queries = counter("prefix_cache_queries", "Tokens looked up in the prefix cache.")
        self._hits = counter("prefix_cache_hits", "Tokens found in the prefix cache.")
        self._generated = counter("generation_tokens", "Tokens generated.")
        self._success = Counter(
            "vllm:request_success",
            "Finished requests.",
            (*LABELS, "finished_reason"),
            registry=self._registry,
        )
        self._values = values
        self._ttft = histogram("time_to_first_token_seconds", "Arrival to first token.")
        self._itl = histogram("inter_token_latency_seconds", "Token to token.")
        self._tpot = histogram("request_time_per_output_token_seconds", "Mean after the first.")
        self._e2e = histogram("e2e_request_latency_seconds", "Arrival to last token.")
        self._lengths = histogram("request_prompt_tokens", "Prompt tokens of a request.", TOKENS)

    def page(self) -> bytes:
        return generate_latest(self._registry)

    def begin(self, num_prompt_tokens: int) -> Timing:
        self._prompt.inc(num_prompt_tokens)
        self._lengths.observe(num_prompt_tokens)
        return Timing(time.monotonic())

    def token(self, timing: Timing) -> None:
        now_s = time.monotonic()
        self._generated.inc()
        if timing.last_s is None:
            timing.first_s = now_s
            self._ttft.observe(now_s - timing.began_s)
        else:
            self._itl.observe(now_s - timing.last_s)
        timing.last_s = now_s

    def end(self, timing: Timing, request: Request, finish: str | None) -> None:
        """`finish` is None when the client left."""
        if request.num_cached is not None:
            self._queries.inc(len(request.prompt))
            self._hits.inc(request.num_cached)
            self._cached.inc(request.num_cached)
        self._success.labels(*self._values, finish or Finish.ABORT.value).inc()
        if finish is None or timing.first_s is None or timing.last_s is None:
            return
        self._e2e.observe(timing.last_s - timing.began_s)
        if len(request.output) > 1:
            self._tpot.observe((timing.last_s - timing.first_s) / (len(request.output) - 1))


class _Gauges(Collector):
    """Read from the engine when somebody scrapes."""

    def __init__(self, engine: EmbeddedEngine, model_name: str) -> None:
        self._engine, self._values = engine, ("0", model_name)

    def collect(self) -> Iterator[Metric]:
        engine = self._engine
        for name, text, value in (
            ("num_requests_running", "Requests in a batch.", engine.num_running),
            ("num_requests_waiting", "Requests that wait for a batch.", engine.num_waiting),
            ("kv_cache_usage_perc", "KV blocks in use, 1 is all.", engine.kv_cache_usage),
        ):
            gauge = GaugeMetricFamily(f"vllm:{name}", text, labels=LABELS)
            gauge.add_metric(self._values, value)
            yield gauge
        preemptions = CounterMetricFamily(
            "vllm:num_preemptions", "Requests put back to recompute.", labels=LABELS
        )
        preemptions.add_metric(self._values, engine.num_preemptions)
        yield preemptions
