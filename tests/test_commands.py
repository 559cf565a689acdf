"""The commands as they are typed: real processes, real ports, exit codes and what is said."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
from fakes_control import keep_confirmed

from sidecar.supervisor import EngineProcess, free_port, free_ports, our_command


@pytest.fixture(scope="module")
def home() -> Iterator[Path]:
    """Short, since sockets lie in it."""
    folder = Path(tempfile.mkdtemp(prefix="tt-", dir="/tmp"))
    (folder / "trimtab.toml").write_text(
        "[canary]\nsteps = [0.5, 1.0]\nstep_s = 0.5\nstep_requests = 3\nshadow_requests = 3\n"
        "max_latency_ratio = 50.0\n"
    )
    yield folder
    shutil.rmtree(folder)


def environment(home: Path) -> dict[str, str]:
    return {
        **os.environ,
        "XDG_STATE_HOME": str(home / "s"),
        "XDG_RUNTIME_DIR": str(home),
        "OMP_NUM_THREADS": "1",
    }


def trimtab(home: Path, *arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        our_command(*arguments),
        cwd=home,
        env={**environment(home), "PYTHONPATH": str(Path(__file__).parent.parent)},
        input=stdin,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def until(true: Callable[[], Any], within_s: float = 30.0) -> Any:
    end_s = time.monotonic() + within_s
    while not (found := true()):
        assert time.monotonic() < end_s, "it did not come true"
        time.sleep(0.1)
    return found


# --- without anything running ---------------------------------------------------------------------

SGLANG = "python -m sglang.launch_server --model m"


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["status"], 1, "no controller answers"),
        (["serve"], 2, "write --upstream"),
        (["serve", "--nope"], 2, "No such option"),
        (["serve", "--upstream", "a:1"], 2, "is not a URL"),
        (["engine", "embedded", "--model", "/nope"], 1, "/nope"),
        (["explain", "c-0001"], 2, "holds no state"),
        (["verify", "/nope.json"], 2, "cannot be read"),
        (["compile", "--launch", SGLANG, "--workload", "-"], 2, "SGLang launches are recognised"),
        (["compile", "--launch", "vllm serve m --port x", "--workload", "-"], 2, "--port is 'x'"),
        (["demo", "--engine", "vllm", "--vllm", "/nope/vllm"], 2, "make demo-vllm"),
        (["compile", "--launch", "trimtab engine embedded"], 2, "nothing to be fast for"),
    ],
)
def test_what_cannot_be_done_is_one_line_and_an_exit_code(
    home: Path, arguments: list[str], code: int, said: str
) -> None:
    done = trimtab(home, *arguments)
    assert done.returncode == code
    assert said in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_config_check_says_where_each_value_came_from(home: Path) -> None:
    rows = json.loads(trimtab(home, "config", "check", "--json").stdout)
    assert rows["canary.step_s"] == {"value": 0.5, "from": "trimtab.toml"}
    assert rows["port"] == {"value": 8080, "from": "default"}


def test_a_bundle_that_does_not_hold_is_an_answer(home: Path) -> None:
    done = trimtab(home, "verify", "-", stdin='{"version": 1}')
    assert done.returncode == 3


@pytest.mark.slow
def test_a_search_without_a_winner_says_no_and_leaves_no_engine(home: Path) -> None:
    requests = [[[n + 1, 7, 8, 9], [1, 2, 3], 0.0] for n in range(6)]
    workload = {"version": 1, "kind": "real", "max_concurrency": 2, "requests": requests}
    what = ("--launch", "trimtab engine embedded", "--workload", "-", "--json")
    how = ("--agent", "no-effect", "--budget", "1 experiment", "--name", "search")
    done = trimtab(home, "compile", *what, *how, stdin=json.dumps(workload))
    assert done.returncode == 3, done.stderr
    assert json.loads(done.stdout)["winner_id"] is None
    assert not any((home / "trimtab").glob("*.sock"))


# --- a sidecar between two engines ----------------------------------------------------------------


@dataclass
class Sidecar:
    home: Path
    port: int
    admin_port: int
    upstream: str
    serve: EngineProcess

    def ask(self, *arguments: str) -> Any:
        done = trimtab(self.home, *arguments, "--port", str(self.port), "--json")
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    def send(self, num: int, session: str = "") -> list[int]:
        return [complete(self.port, f"{session}{n}") for n in range(num)]

    def keep(self) -> str:
        """A confirmed candidate, as a search leaves it."""
        return keep_confirmed(self.home / "s/trimtab" / str(self.port))

    def stage(self, id: str) -> str:
        return next(str(c["stage"]) for c in self.ask("candidates") if c["id"] == id)

    def is_joined(self) -> bool:
        done = trimtab(self.home, "status", "--port", str(self.port), "--json")
        return done.returncode == 0 and json.loads(done.stdout)["num_data_planes"] == 1

    def controller(self) -> int:
        return next(
            p.pid
            for p in psutil.Process(self.serve.pid).children()
            if "controller-process" in p.cmdline()
        )


def complete(port: int, session: str) -> int:
    body = {"model": "tiny-moe", "prompt": f"def f{session}():", "max_tokens": 4, "temperature": 0}
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions",
        json.dumps(body).encode(),
        {"content-type": "application/json", "x-session-id": session},
    )
    with urllib.request.urlopen(request, timeout=20) as reply:
        assert json.loads(reply.read())["usage"]["completion_tokens"] > 0
        return int(reply.status)


@pytest.fixture(scope="module")
def sidecar(home: Path) -> Iterator[Sidecar]:
    ports = free_ports(4)
    primary, shadow = (f"http://127.0.0.1:{p}" for p in ports[:2])
    where = {**environment(home), "PYTHONPATH": str(Path(__file__).parent.parent)}
    started = [
        EngineProcess(
            our_command("engine", "embedded", "--port", str(port)),
            f"http://127.0.0.1:{port}",
            home / f"{port}.log",
            where,
        )
        for port in ports[:2]
    ]
    command = our_command(
        *("serve", "--upstream", primary, "--shadow", shadow, "--config", f"{home}/trimtab.toml"),
        *("--port", str(ports[2]), "--admin-port", str(ports[3]), "--autonomy", "auto"),
    )
    try:
        for engine in started:
            engine.wait_ready(60.0)
        serve = EngineProcess(command, f"http://127.0.0.1:{ports[2]}", home / "serve.log", where)
        started.append(serve)
        serve.wait_ready(60.0)
        running = Sidecar(home, ports[2], ports[3], primary, serve)
        until(lambda: running.is_joined())
        yield running
    finally:
        for process in reversed(started):
            process.close(15.0)


def test_requests_pass_and_are_counted(sidecar: Sidecar) -> None:
    before = sidecar.ask("status")["num_requests"]
    assert sidecar.send(3) == [200, 200, 200]
    until(lambda: sidecar.ask("status")["num_requests"] >= before + 3)


def test_the_admin_port_has_metrics_and_readiness(sidecar: Sidecar) -> None:
    sidecar.send(1)
    base = f"http://127.0.0.1:{sidecar.admin_port}"
    assert urllib.request.urlopen(f"{base}/ready").status == 200

    def scraped() -> bool:
        text = urllib.request.urlopen(f"{base}/metrics").read().decode()
        return 'trimtab_requests_total{arm="stable",outcome="ok"' in text

    until(scraped)


def test_both_engines_can_be_swapped(sidecar: Sidecar) -> None:
    assert [a["swappable"] for a in sidecar.ask("status")["arms"]] == [True, True]


def test_a_candidate_is_promoted_and_taken_back(sidecar: Sidecar) -> None:
    id = sidecar.keep()
    assert sidecar.ask("promote", id, "--why", "test") == {"state": "shadow"}
    rounds = iter(range(1000))
    until(lambda: sidecar.send(3, f"r{next(rounds)}-") and sidecar.ask("status")["state"] == "live")
    arms = {a["role"]: a for a in sidecar.ask("status")["arms"]}
    assert arms["canary"]["weight"] == 1.0
    assert arms["canary"]["digest"]
    done = sidecar.ask("rollback", "--why", "test")
    assert (done["state"], done["complete"]) == ("rolled_back", True)
    until(lambda: {a["digest"] for a in sidecar.ask("status")["arms"]} == {""})


def test_explain_tells_a_candidate_without_a_controller(sidecar: Sidecar) -> None:
    id = sidecar.keep()
    done = trimtab(sidecar.home, "explain", id, "--port", str(sidecar.port))
    assert "cls:RMSNorm" in done.stdout


def test_a_killed_controller_hurts_no_request_and_ends_its_rollout(sidecar: Sidecar) -> None:
    id, old = sidecar.keep(), sidecar.controller()
    sidecar.ask("promote", id)
    until(lambda: sidecar.stage(id) in ("shadow", "canary"))
    os.kill(old, signal.SIGKILL)
    assert set(sidecar.send(10, "killed-")) == {200}
    until(lambda: sidecar.is_joined() and sidecar.controller() != old)
    stages = {c["id"]: c["story"][-1] for c in sidecar.ask("candidates")}
    assert stages[id]["note"] == "controller restarted"
    until(lambda: {a["digest"] for a in sidecar.ask("status")["arms"]} == {""})


def test_a_second_sidecar_on_one_state_is_refused(sidecar: Sidecar) -> None:
    where = ("--port", str(sidecar.port), "--admin-port", str(free_port()))
    done = trimtab(sidecar.home, "serve", "--upstream", sidecar.upstream, *where)
    assert done.returncode == 1
    assert "another `trimtab serve`; stop it" in done.stderr


def test_a_taken_port_is_one_line(sidecar: Sidecar) -> None:
    where = ("--name", "other", "--port", str(sidecar.port), "--admin-port", str(free_port()))
    done = trimtab(sidecar.home, "serve", "--upstream", sidecar.upstream, *where)
    assert done.returncode == 1
    assert f"127.0.0.1:{sidecar.port} cannot be listened on" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_an_engine_on_a_taken_port_is_one_line(sidecar: Sidecar) -> None:
    port = sidecar.upstream.rsplit(":", 1)[1]
    done = trimtab(sidecar.home, "engine", "embedded", "--port", port)
    assert done.returncode == 1
    assert f"port {port} on 127.0.0.1 is taken" in done.stderr


def test_prompts_reach_no_log(sidecar: Sidecar) -> None:
    sidecar.send(1, "S3CRET")
    logs = "".join(p.read_text() for p in sidecar.home.rglob("*.log"))
    assert "S3CRET" not in logs
