from __future__ import annotations

from pathlib import Path

import pytest

from sidecar.config import Autonomy, ConfigError, known_keys, load, parse_budget


@pytest.fixture(autouse=True)
def _alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def refused(toml: str, tmp_path: Path) -> str:
    file = tmp_path / "trimtab.toml"
    file.write_text(toml)
    with pytest.raises(ConfigError) as e:
        load()
    return str(e.value)


def test_every_setting_has_a_default() -> None:
    assert load().config.autonomy is Autonomy.RECOMMEND


def test_a_number_in_quotes_is_named_with_what_to_write(tmp_path: Path) -> None:
    said = refused('[proxy]\nconnect_timeout_s = "5"', tmp_path)
    assert said == 'proxy.connect_timeout_s is "5" (a string) in trimtab.toml; write 5.0'


def test_an_unknown_key_names_the_nearest_one(tmp_path: Path) -> None:
    said = refused("[proxy]\nconect_timeout_s = 5", tmp_path)
    assert said.endswith("is no setting; did you mean proxy.connect_timeout_s?")


def test_an_unknown_variable_names_the_nearest_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRIMTAB_UPSTREAM", "http://a:1")
    with pytest.raises(ConfigError, match="did you mean TRIMTAB_UPSTREAMS"):
        load()


def test_flags_win_over_the_environment_and_that_over_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "trimtab.toml").write_text('port = 1001\nhost = "::1"\nworkers = 2')
    monkeypatch.setenv("TRIMTAB_PORT", "1002")
    monkeypatch.setenv("TRIMTAB_WORKERS", "3")
    config = load({"port": 1003}).config
    assert (config.port, config.workers, config.host) == (1003, 3, "::1")


def test_each_value_says_where_it_came_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "trimtab.toml").write_text("workers = 2")
    monkeypatch.setenv("TRIMTAB_PROXY__DRAIN_S", "3")
    origins = {key: origin for key, _, origin in load({"port": 9}).rows()}
    picked = ("workers", "proxy.drain_s", "port", "host")
    assert [origins[k] for k in picked] == ["trimtab.toml", "environment", "flags", "default"]


def test_lists_in_the_environment_are_separated_by_commas(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRIMTAB_UPSTREAMS", "http://a:1,http://b:2/")
    assert load().config.upstreams == ("http://a:1", "http://b:2")


def test_a_named_file_must_exist() -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.toml does not exist"):
        load(file=Path("nowhere.toml"))


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"upstreams": ("a:1",)}, "is not a URL"),
        ({"port": 70000}, "less than or equal to 65535"),
        ({"port": 8081}, "port and admin_port are both 8081"),
        ({"upstreams": ("http://a:1",), "shadows": ("http://a:1",)}, "upstream and a shadow"),
        ({"canary": {"steps": [0.5, 0.1]}}, "write rising shares"),
        ({"name": "../up"}, "name is"),
    ],
)
def test_what_cannot_work_is_refused(flags: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        load(flags)


def test_state_lies_under_the_name_or_else_the_port(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", "/s")
    named, numbered = load({"name": "n"}).config, load({"port": 9}).config
    assert (named.state, numbered.state) == (Path("/s/trimtab/n"), Path("/s/trimtab/9"))


def test_autonomy_rises_from_observe_to_auto() -> None:
    assert Autonomy.AUTO.allows(Autonomy.CANARY)
    assert not Autonomy.RECOMMEND.allows(Autonomy.SHADOW)


def test_a_budget_is_a_time_or_a_number_of_experiments() -> None:
    assert parse_budget("30m").max_s == 1800
    assert parse_budget("200 experiments").max_experiments == 200
    with pytest.raises(ConfigError, match="write 30m"):
        parse_budget("soon")


def test_settings_survive_the_way_to_the_controller() -> None:
    config = load({"upstreams": ("http://a:1",), "engine_control": "http://a:1=unix:/s"}).config
    assert type(config).model_validate_json(config.model_dump_json()) == config


def test_every_key_is_reachable_from_the_environment() -> None:
    assert {"port", "canary.lease_s", "reservoir.enabled"} <= set(known_keys())
