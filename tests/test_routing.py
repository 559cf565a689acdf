"""Who serves the next request."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sidecar.routing import Role, Routing, RoutingTable, load_table, position, save_table

A, B, C = "http://127.0.0.1:1", "http://127.0.0.1:2", "http://127.0.0.1:3"


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def leased(version: int, weight: float = 1.0) -> RoutingTable:
    return RoutingTable(version, (A,), (B,), weight, lease_s=30.0)


def test_a_rising_weight_moves_nobody_back() -> None:
    keys = [str(i).encode() for i in range(500)]
    moved: set[bytes] = set()
    for weight in (0.0, 0.1, 0.35, 0.9, 1.0):
        table = RoutingTable(1, (A,), (B,), weight)
        now = {k for k in keys if table.role(k) is Role.CANARY}
        assert moved <= now
        moved = now
    assert len(moved) == 500


def test_a_session_keeps_its_place() -> None:
    assert position(b"alice") == position(b"alice") != position(b"bob")


@pytest.mark.parametrize(
    "url", ["", "127.0.0.1:8000", "ftp://h", "http://", "http://127.0.0.1:8000/"]
)
def test_a_table_with_a_bad_url_is_refused_whole(url: str) -> None:
    with pytest.raises(ValueError, match="no upstream"):
        RoutingTable(2, (A, url))


def test_the_least_busy_of_the_arm_is_picked() -> None:
    routing = Routing(RoutingTable(1, (A, B, C)))
    picked = {routing.pick(b"s").url for _ in range(3)}
    assert picked == {A, B, C}


def test_an_idle_arm_gives_a_session_the_same_upstream_again() -> None:
    routing = Routing(RoutingTable(1, (A, B, C)))
    urls = set()
    for _ in range(5):
        upstream = routing.pick(b"alice")
        urls.add(upstream.url)
        routing.release(upstream)
    assert len(urls) == 1
    assert routing.num_in_flight() == 0


def test_a_release_after_the_table_changed_still_counts() -> None:
    routing = Routing(RoutingTable(1, (A,)))
    upstream = routing.pick(b"s")
    routing.install(RoutingTable(2, (B,)))
    assert routing.num_in_flight() == 1
    routing.release(upstream)
    assert routing.num_in_flight() == 0


def test_only_newer_tables_are_installed() -> None:
    routing = Routing(RoutingTable(5, (A,)))
    assert not routing.install(RoutingTable(4, (B,)))
    assert not routing.install(RoutingTable(5, (B,)))
    assert routing.install(RoutingTable(6, (B,)))
    assert routing.table.stable == (B,)


def test_a_lease_lapses_to_the_last_committed_table() -> None:
    clock = Clock()
    routing = Routing(RoutingTable(1, (A,)), clock)
    routing.install(leased(2))
    assert routing.pick(b"s").role is Role.CANARY
    clock.now_s += 30.0
    assert (routing.table.version, routing.pick(b"s").role) == (1, Role.STABLE)


def test_the_same_table_again_renews_its_lease() -> None:
    clock = Clock()
    routing = Routing(RoutingTable(1, (A,)), clock)
    routing.install(leased(2))
    clock.now_s += 29.0
    assert routing.install(leased(2))
    clock.now_s += 29.0
    assert routing.table.version == 2


def test_a_committed_table_never_lapses() -> None:
    clock = Clock()
    routing = Routing(RoutingTable(1, (A,)), clock)
    routing.install(leased(2))
    routing.install(RoutingTable(3, (B,)))
    clock.now_s += 1e9
    assert routing.table.version == routing.committed.version == 3


def test_bypass_keeps_every_session_on_stable() -> None:
    routing = Routing(RoutingTable(1, (A,), (B,), weight=1.0, bypass=True))
    assert routing.pick(b"s").role is Role.STABLE


def test_a_kept_table_comes_back_whole(tmp_path: Path) -> None:
    table = RoutingTable(7, (A, B), (C,), 0.25, True, digests=((A, "d1"), (C, "d2")))
    save_table(tmp_path / "new" / "table.json", table)
    assert load_table(tmp_path / "new" / "table.json") == table


def test_an_older_table_is_never_kept_over_a_newer_one(tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    save_table(path, RoutingTable(7, (A,)))
    save_table(path, RoutingTable(6, (B,)))
    kept = load_table(path)
    assert kept is not None
    assert kept.version == 7


def test_a_leased_table_is_not_kept(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="leased"):
        save_table(tmp_path / "table.json", leased(2))


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"version": 1}', json.dumps({"stable": 3})])
def test_a_broken_file_is_no_table(tmp_path: Path, text: str) -> None:
    (tmp_path / "t").write_text(text)
    assert load_table(tmp_path / "t") is None
