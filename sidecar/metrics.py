"""What Prometheus sees: one process group, one scrape, bounded labels; and the admin port.

Data planes report totals since their own start. They are summed over all planes that ever were, so
that a restarted worker never makes a counter fall.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import asynccontextmanager

from aiohttp import web
from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from profiler.samples import Outcome, RequestSample
from sidecar.control import Status
from sidecar.link import PlaneState

Labels = tuple[tuple[str, str], ...]

HELP = {
    "requests": "Finished requests by outcome, arm and route.",
    "mirrored": "Eligible requests by what the mirror made of them.",
    "results_dropped": "Mirror results that the controller never got.",
    "samples_dropped": "Request samples that the controller never got.",
}
MAX_SERIES = 200  # of one name; labels come from enums, so more is a mistake
MAX_PLANES = 256  # remembered as they were; beyond it the oldest fold into one
MAX_DIGESTS = 8
TOKEN_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
REQUEST_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


class Totals:
    """Counters over all data planes, past and present."""

    def __init__(self) -> None:
        self._planes: OrderedDict[str, dict[tuple[str, Labels], float]] = OrderedDict()
        self._folded: dict[tuple[str, Labels], float] = {}

    def update(self, state: PlaneState) -> None:
        counters = {(c.name, c.labels): c.value for c in state.counters}
        counters["samples_dropped", ()] = float(state.num_samples_dropped)
        self._planes[state.plane_id] = counters
        self._planes.move_to_end(state.plane_id)
        while len(self._planes) > MAX_PLANES:
            _, oldest = self._planes.popitem(last=False)
            _add(self._folded, oldest)

    def all(self) -> dict[tuple[str, Labels], float]:
        total = dict(self._folded)
        for counters in self._planes.values():
            _add(total, counters)
        return total

    def sum(self, name: str, where: Callable[[dict[str, str]], bool] = lambda _: True) -> int:
        return int(
            sum(v for (n, labels), v in self.all().items() if n == name and where(dict(labels)))
        )


def _add(into: dict[tuple[str, Labels], float], more: dict[tuple[str, Labels], float]) -> None:
    for key, value in more.items():
        into[key] = into.get(key, 0.0) + value


class Metrics(Collector):
    """Keeps what `/metrics` shows. Belongs to one thread, the event loop's."""

    def __init__(self) -> None:
        self.totals = Totals()
        self._registry = CollectorRegistry()
        self._digests: list[str] = []
        self._status: Status | None = None
        self._ttft = self._histogram(
            "trimtab_time_to_first_token_seconds", "Request sent to first token.", REQUEST_BUCKETS
        )
        self._tpot = self._histogram(
            "trimtab_time_per_output_token_seconds", "Between two tokens.", TOKEN_BUCKETS
        )
        self._e2e = self._histogram(
            "trimtab_request_seconds", "Whole requests that went well.", REQUEST_BUCKETS
        )
        self._registry.register(self)

    def observe(self, state: PlaneState) -> None:
        self.totals.update(state)
        for sample in state.samples:
            if sample.outcome is Outcome.OK:
                self._time(sample)

    def show(self, status: Status) -> None:
        """What the gauges say from now on."""
        self._status = status

    def render(self) -> bytes:
        return generate_latest(self._registry)

    def collect(self) -> Iterable[Metric]:
        families: dict[str, CounterMetricFamily] = {}
        for (name, labels), value in sorted(self.totals.all().items()):
            names = [k for k, _ in labels]
            family = families.setdefault(
                name,
                CounterMetricFamily(f"trimtab_{name}", HELP.get(name, name), labels=names),
            )
            if len(family.samples) < MAX_SERIES:
                family.add_metric([v for _, v in labels], value)
        yield from families.values()
        yield from _gauges(self._status)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(name, text, ("arm", "digest"), buckets=buckets, registry=self._registry)

    def _time(self, sample: RequestSample) -> None:
        labels = sample.arm, self._digest_label(sample.digest)
        for histogram, seconds in (
            (self._ttft, sample.ttft_s),
            (self._tpot, sample.tpot_s),
            (self._e2e, sample.e2e_s),
        ):
            if seconds is not None:
                histogram.labels(*labels).observe(seconds)

    def _digest_label(self, digest: str) -> str:
        """The first few by name: a series for each candidate ever tried would have no bound."""
        if not digest:
            return "stock"
        if digest not in self._digests:
            if len(self._digests) >= MAX_DIGESTS:
                return "other"
            self._digests.append(digest)
        return digest[:12]


def _gauges(status: Status | None) -> Iterator[Metric]:
    if status is None:
        return
    weight = GaugeMetricFamily(
        "trimtab_arm_weight", "Share of sessions.", labels=["role", "url", "digest"]
    )
    healthy = GaugeMetricFamily("trimtab_arm_healthy", "1 when it answers.", labels=["role", "url"])
    for arm in status.arms:
        weight.add_metric([arm.role, arm.url, arm.digest[:12] or "stock"], arm.weight)
        healthy.add_metric([arm.role, arm.url], float(arm.healthy))
    yield weight
    yield healthy
    for name, text, value in (
        ("trimtab_table_version", "Of the newest routing table.", status.table_version),
        ("trimtab_data_planes", "Joined now.", status.num_data_planes),
    ):
        yield GaugeMetricFamily(name, text, value=float(value))


@asynccontextmanager
async def admin_site(
    metrics: Metrics, is_ready: Callable[[], bool], host: str, port: int
) -> AsyncIterator[None]:
    """Serve `/metrics`, `/ready` and `/health` until left. Raises `OSError` when taken."""

    async def scrape(_: web.Request) -> web.Response:
        return web.Response(body=metrics.render(), content_type="text/plain", charset="utf-8")

    async def ready(_: web.Request) -> web.Response:
        return web.Response(status=200 if is_ready() else 503, text="ready" if is_ready() else "no")

    async def health(_: web.Request) -> web.Response:
        return web.Response(text="ok")

    app = web.Application()
    app.add_routes(
        [web.get("/metrics", scrape), web.get("/ready", ready), web.get("/health", health)]
    )
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    try:
        await web.TCPSite(runner, host, port, reuse_address=True).start()
        yield
    finally:
        await runner.cleanup()
