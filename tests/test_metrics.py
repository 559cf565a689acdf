from __future__ import annotations

from aiohttp import ClientSession
from fakes_control import FakeOperator, sample

from sidecar.link import CounterTotal, PlaneState
from sidecar.metrics import MAX_DIGESTS, MAX_PLANES, Metrics, Totals, admin_site
from sidecar.supervisor import free_port


def plane(id: str, num: float, outcome: str = "ok") -> PlaneState:
    labels = (("outcome", outcome), ("arm", "stable"))
    return PlaneState(id, 1, counters=(CounterTotal("requests", labels, num),))


def test_a_total_is_over_all_workers() -> None:
    totals = Totals()
    for state in (plane("a", 3), plane("b", 4), plane("a", 5)):
        totals.update(state)
    assert totals.sum("requests") == 9


def test_a_restarted_worker_makes_no_counter_fall() -> None:
    totals = Totals()
    totals.update(plane("host/1", 10))
    totals.update(plane("host/2", 1))
    assert totals.sum("requests") == 11


def test_workers_long_gone_are_folded_and_still_counted() -> None:
    totals = Totals()
    for n in range(MAX_PLANES + 20):
        totals.update(plane(str(n), 1))
    assert totals.sum("requests") == MAX_PLANES + 20


def test_a_total_can_be_asked_for_some_labels() -> None:
    totals = Totals()
    totals.update(plane("a", 3, "ok"))
    totals.update(plane("b", 2, "server_error"))
    assert totals.sum("requests", lambda of: of["outcome"] == "server_error") == 2


def test_digests_get_a_bounded_number_of_series() -> None:
    metrics = Metrics()
    for n in range(50):
        metrics.observe(PlaneState("a", 1, (sample("canary", f"{n:012}"),)))
    lines = metrics.render().decode().splitlines()
    assert sum(x.startswith("trimtab_request_seconds_count") for x in lines) == MAX_DIGESTS + 1


async def test_gauges_say_what_status_says() -> None:
    metrics = Metrics()
    metrics.show(await FakeOperator().status())
    assert "trimtab_table_version 7.0" in metrics.render().decode()


async def test_readiness_is_a_status_code() -> None:
    port, ready = free_port(), [False]
    async with admin_site(Metrics(), lambda: ready[0], "127.0.0.1", port), ClientSession() as http:
        url = f"http://127.0.0.1:{port}/ready"
        async with http.get(url) as before:
            assert before.status == 503
        ready[0] = True
        async with http.get(url) as after:
            assert after.status == 200
