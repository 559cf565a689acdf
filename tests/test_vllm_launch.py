"""A user's vLLM command: what is read from it, what is refused, and that it starts and ends."""

from __future__ import annotations

import io
import os
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import psutil
import pytest

from engines import vllm_launch
from engines.inside.wire import SOCKET
from engines.vllm_launch import (
    EXTENSION,
    MIDDLEWARE,
    VllmCommand,
    VllmLaunchError,
    VllmProcess,
    check,
    explain,
    inside_folder,
    parse,
)
from sidecar.commands.engine import EngineFailed, _watch
from sidecar.supervisor import free_port, our_command

HOOKS = ("--worker-extension-cls", EXTENSION, "--middleware", MIDDLEWARE)
OURS = (*HOOKS, "--enable-prompt-tokens-details")
HERE = ("--host", "127.0.0.1")


def read(line: str, environment: Mapping[str, str] | None = None, config: str = "") -> VllmCommand:
    return parse(line.split(), environment or {}, lambda path: config)


# --- what is read ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "model", "url"),
    [
        ("vllm serve m", "m", "http://127.0.0.1:8000"),
        ("/opt/v/bin/vllm serve org/m --port 81", "org/m", "http://127.0.0.1:81"),
        ("vllm serve --port=81 --model m", "m", "http://127.0.0.1:81"),
        ("vllm serve m --host 0.0.0.0", "m", "http://127.0.0.1:8000"),
        ("vllm serve m --host ::1 --por 81", "m", "http://[::1]:81"),
        ("vllm serve m --port 81 --port 82", "m", "http://127.0.0.1:82"),
        ("vllm serve m --ssl_certfile c --ssl-keyfile k", "m", "https://127.0.0.1:8000"),
        ("python -m vllm.entrypoints.openai.api_server --model m", "m", "http://127.0.0.1:8000"),
        ("/v/python3.11 -u -m vllm.entrypoints.cli.main serve m", "m", "http://127.0.0.1:8000"),
        ("python /opt/v/bin/vllm serve m", "m", "http://127.0.0.1:8000"),
        ("numactl -N 0 vllm serve m", "m", "http://127.0.0.1:8000"),
        ("uv run --python 3.11 vllm serve m", "m", "http://127.0.0.1:8000"),
        ("vllm serve m -tp 2 -pp 1 --data-parallel-size 1", "m", "http://127.0.0.1:8000"),
    ],
)
def test_the_model_and_the_url_are_read(line: str, model: str, url: str) -> None:
    command = read(line)
    assert (command.model, command.url) == (model, url)


def test_our_flags_come_last_and_a_host_is_added_where_none_was_given() -> None:
    assert read("vllm serve m").words == ("vllm", "serve", "m", *HERE, *OURS)
    assert read("vllm serve m --host h").words == ("vllm", "serve", "m", "--host", "h", *OURS)
    no = "--no-enable-prompt-tokens-details"
    assert read(f"vllm serve m {no}").words == ("vllm", "serve", "m", no, *HERE, *HOOKS)


def test_the_users_middleware_stays() -> None:
    words = read("vllm serve m --middleware a.B --middleware c.D").words
    assert [words[i + 1] for i, w in enumerate(words) if w == "--middleware"] == [
        *("a.B", "c.D", MIDDLEWARE)
    ]


@pytest.mark.parametrize("line", ["A=1 B= vllm serve m", "env A=1 B= vllm serve m"])
def test_what_is_written_in_front_becomes_environment(line: str) -> None:
    command = read(line)
    assert command.environment == (("A", "1"), ("B", ""))
    assert command.words[0] == "vllm"


def test_a_config_file_counts_for_less_than_the_command() -> None:
    config = "# mine\nmodel: 'm'\nport: 81\nhost: 0.0.0.0  # all\nheadless: false\nx:\n  port: 9\n"
    assert read("vllm serve --config c.yaml", config=config).url == "http://127.0.0.1:81"
    assert read("vllm serve --config c.yaml", config=config).model == "m"
    assert read("vllm serve n --config c.yaml --port 82", config=config).port == 82
    assert "--host" not in read("vllm serve --config c.yaml", config=config).words


# --- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("", "there is no launch command"),
        ("A=1", "there is no launch command"),
        ("sglang serve m", "starts no vLLM server"),
        ("vllm chat m", "starts no vLLM server"),
        ("python -m http.server", "starts no vLLM server"),
        ("python train.py", "starts no vLLM server"),
        ("python -m vllm.entrypoints.cli.main chat", "starts no vLLM server"),
        ("frobnicate vllm serve m", "starts no vLLM server"),
        ("docker run vllm/vllm-openai vllm serve m", "run trimtab in there"),
        ("python -I -m vllm.entrypoints.cli.main serve m", "-I ignores PYTHONPATH"),
        ("vllm serve", "which model?"),
        ("vllm serve --port 81", "which model?"),
        ("vllm serve m --port", "--port has no value"),
        ("vllm serve m --port --model", "--port has no value"),
        ("vllm serve m --port x", "--port is 'x'; write a number"),
        ("vllm serve m --worker-extension-cls a.B", "--worker-extension-cls is taken"),
        ("vllm serve m --worker_extension_cls=a.B", "--worker-extension-cls is taken"),
        ("vllm serve m --worker-ext a.B", "--worker-extension-cls is taken"),
        ("vllm serve m --headless", "--headless is not supported"),
        ("vllm serve m --grpc", "--grpc is not supported"),
        ("vllm serve m --uds /s", "--uds is not supported"),
        ("vllm serve m --api-server-count 2", "--api-server-count 2 is not supported yet"),
        ("vllm serve m -asc 0", "--api-server-count 0 is not supported yet"),
        ("vllm serve m -dp 2", "--data-parallel-size 2 is not supported yet"),
        ("vllm serve m --data_parallel_size=4", "--data-parallel-size 4 is not supported yet"),
        ("vllm serve m -pp=2", "--pipeline-parallel-size 2 is not supported yet"),
        ("VLLM_USE_RUST_FRONTEND=1 vllm serve m", "unset it"),
        ("VLLM_SERVER_DEV_MODE=1 vllm serve m --host 0.0.0.0", "unset it"),
    ],
)
def test_what_cannot_be_used_is_refused_by_name(line: str, said: str) -> None:
    with pytest.raises(VllmLaunchError, match=said.replace("?", r"\?")):
        read(line)


def test_a_config_file_hides_nothing_that_is_refused() -> None:
    with pytest.raises(VllmLaunchError, match="--data-parallel-size 2"):
        read("vllm serve m --config c.yaml", config="data_parallel_size: 2\n")


def test_a_config_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(VllmLaunchError, match=r"--config .*no\.yaml cannot be read"):
        parse(("vllm", "serve", "m", "--config", str(tmp_path / "no.yaml")), {})


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1", "127.9.9.9"])
def test_dev_mode_on_loopback_is_a_warning(host: str) -> None:
    command = read(f"vllm serve m --host {host}", {"VLLM_SERVER_DEV_MODE": "1"})
    assert "Trimtab does not need it" in command.warnings[0]
    assert read(f"vllm serve m --host {host}", {"VLLM_SERVER_DEV_MODE": "0"}).warnings == ()


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "example.org"])
def test_dev_mode_on_a_port_that_others_reach_is_refused(host: str) -> None:
    with pytest.raises(VllmLaunchError, match="any method of the workers"):
        read(f"vllm serve m --host {host}", {"VLLM_SERVER_DEV_MODE": "1"})


# --- what vLLM finds of ours ----------------------------------------------------------------------


def test_the_folder_holds_the_inside_and_nothing_else(tmp_path: Path) -> None:
    folder = inside_folder(tmp_path / "path")
    inside = Path(vllm_launch.__file__).parent / "inside"
    theirs = {f"engines/inside/{p.name}" for p in inside.glob("*.py")}
    files = {str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()}
    assert files == {"engines/__init__.py", *theirs}
    assert (folder / "engines/inside/forward.py").read_text() == (inside / "forward.py").read_text()


@pytest.mark.parametrize(
    ("module", "is_there"),
    [
        *(("engines.inside", True), ("engines.inside.source", True)),
        *(("engines.engine", False), ("engines.vllm_launch", False), ("profiler", False)),
        *(("sidecar", False), ("protos", False), ("grpc", False)),
    ],
)
def test_only_the_inside_can_be_imported_from_the_folder(
    tmp_path: Path, module: str, is_there: bool
) -> None:
    folder = inside_folder(tmp_path / "path")
    done = subprocess.run(
        [sys.executable, "-S", "-c", f"import {module}"],
        cwd=tmp_path,
        env={"PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode == 0) is is_there, done.stderr
    assert is_there or "ModuleNotFoundError" in done.stderr


# --- why it ended ---------------------------------------------------------------------------------


def test_the_cause_is_found_above_those_who_only_saw_it() -> None:
    hint, said = explain(
        [
            "(Worker pid=7) ERROR 12-01 03:17:19 [core.py:15] torch.OutOfMemoryError: CUDA out of",
            "Traceback (most recent call last):",
            "(EngineCore pid=6) ERROR 12-01 03:17:20 [core.py:15] Exception: WorkerProc "
            "initialization failed due to an exception in a background process.",
            "RuntimeError: Engine core initialization failed. See root cause above.",
            "  warnings.warn('resource_tracker: There appear to be %d '",
        ]
    )
    assert said == ("torch.OutOfMemoryError: CUDA out of",)
    assert "memory does not suffice" in hint


def test_what_pydantic_says_below_its_first_line_is_told() -> None:
    hint, said = explain(
        [
            "pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig",
            "  Value error, Invalid repository ID or local directory specified: 'm'.",
            "Please verify the following:",
            " [type=value_error, input_value=ArgsKwargs(()), input_type=ArgsKwargs]",
        ]
    )
    assert len(said) == 3
    assert "the model is not there" in hint


@pytest.mark.parametrize(
    ("line", "hint"),
    [
        ("vllm serve: error: argument --dtype: invalid choice: 'x'", "command line"),
        ("/v/bin/python: No module named vllm", "vLLM is not installed"),
        ("ModuleNotFoundError: No module named 'engines.inside'", "another folder"),
        ("OSError: [Errno 98] Address already in use", "the port is taken"),
        ("Worker proc VllmWorker-0 died unexpectedly (exit code: -9), shutting", "a worker died"),
        ("KeyError: 'x'", ""),
    ],
)
def test_a_known_end_has_a_way_out(line: str, hint: str) -> None:
    found, said = explain(["INFO something", line])
    assert said == (line,)
    assert hint in found
    assert bool(hint) is bool(found)


def test_silence_is_explained_by_nothing() -> None:
    assert explain([]) == ("", ())


# --- the process ----------------------------------------------------------------------------------

FAKE = """#!{python} -S
import http.server, os, signal, socket, subprocess, sys, threading, time
mode, port = sys.argv[2], int(sys.argv[sys.argv.index("--port") + 1])
print("PYTHONPATH", os.environ["PYTHONPATH"], flush=True)
sleep = [sys.executable, "-S", "-c", "import signal, time; "
         "signal.signal(signal.SIGTERM, signal.SIG_IGN); print('asleep', flush=True); "
         "time.sleep(60)", sys.argv[0]]
if mode == "flag":
    print("usage: vllm serve [model_tag] [options]", file=sys.stderr)
    sys.exit("vllm: error: unrecognized arguments: --nope 3")
if mode == "trace":
    raise OSError("no such thing as a model")
if mode in ("deaf", "family"):
    family = [subprocess.Popen(sleep), subprocess.Popen(sleep, start_new_session=True)]
if mode == "deaf":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if mode == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
if mode == "slow":
    print("loading", flush=True)
    time.sleep(60)
if mode != "mute":
    inside = socket.socket(socket.AF_UNIX)
    inside.bind(os.environ["{inside}"])
    inside.listen()
    def answer():
        while True:
            inside.accept()[0].close()
    threading.Thread(target=answer, daemon=True).start()
class Health(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()
server = http.server.HTTPServer(("127.0.0.1", port), Health)
print("serving", flush=True)
server.serve_forever()
"""

Start = Callable[..., VllmProcess]


@pytest.fixture
def vllm(tmp_path: Path) -> Path:
    """A program called vllm that does what its model is called."""
    program = tmp_path / "bin" / "vllm"
    program.parent.mkdir()
    program.write_text(FAKE.format(python=sys.executable, inside=SOCKET))
    program.chmod(0o755)
    return program


@pytest.fixture
def start(vllm: Path) -> Iterator[Start]:
    started: list[VllmProcess] = []

    def begin(mode: str, out: io.BytesIO | None = None, **environment: str) -> VllmProcess:
        words = (str(vllm), "serve", mode, "--port", str(free_port()))
        where = {**os.environ, **environment}
        started.append(VllmProcess(parse(words, where), where, out or io.BytesIO()))
        return started[-1]

    yield begin
    for process in started:
        process.close(grace_s=0.0)


def until(true: Callable[[], object], within_s: float = 10.0) -> None:
    end_s = time.monotonic() + within_s
    while not true():
        assert time.monotonic() < end_s, "it did not come true"
        time.sleep(0.02)


def running(program: Path) -> set[int]:
    """Of the fake and what it started; the command that starts it names it too."""
    return {p.pid for p in psutil.process_iter(["cmdline"]) if _is_of(p, str(program))}


def _is_of(process: psutil.Process, program: str) -> bool:
    words = process.info["cmdline"] or []
    return program in words and "sidecar" not in words


def test_ready_is_a_healthy_answer_and_our_socket(start: Start) -> None:
    process = start("good")
    ready_s = process.wait_ready(20.0)
    assert process.socket.is_socket()
    assert stat.S_IMODE(process.socket.parent.stat().st_mode) == 0o700
    assert process.start_to_ready_s == ready_s


def test_our_folder_comes_first_and_the_users_path_stays(start: Start) -> None:
    out = io.BytesIO()
    start("good", out, PYTHONPATH="/theirs:/more").wait_ready(20.0)
    ours, *theirs = out.getvalue().split(b"\n")[0].removeprefix(b"PYTHONPATH ").split(b":")
    assert (Path(os.fsdecode(ours)) / "engines/inside/__init__.py").exists()
    assert theirs == [b"/theirs", b"/more"]


@pytest.mark.parametrize(
    ("mode", "first", "last"),
    [
        ("flag", "vLLM ended with status 1 .* it does not take this", "error: unrecognized"),
        ("trace", "vLLM ended with status 1 after .* before it was", "OSError: no such thing"),
    ],
)
def test_ours_comes_first_and_vllms_own_words_below(
    start: Start, mode: str, first: str, last: str
) -> None:
    with pytest.raises(VllmLaunchError, match=first) as error:
        start(mode).wait_ready(20.0)
    lines = str(error.value).splitlines()
    assert len(lines) == 2
    assert last in lines[1]


def test_a_signal_is_called_by_its_name(start: Start) -> None:
    with pytest.raises(VllmLaunchError, match="vLLM was ended by SIGKILL"):
        start("killed").wait_ready(20.0)


def test_too_slow_says_what_came_last(start: Start) -> None:
    with pytest.raises(VllmLaunchError, match=r"(?s)within 1 s.*--ready-timeout.*loading"):
        start("slow").wait_ready(1.0)


def test_a_server_without_our_middleware_is_found_out(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_launch, "SOCKET_S", 0.2)
    with pytest.raises(VllmLaunchError, match="middleware did not open"):
        start("mute").wait_ready(20.0)


@pytest.mark.parametrize("mode", ["family", "deaf"])
def test_nothing_is_left_of_it_and_of_what_it_started(start: Start, vllm: Path, mode: str) -> None:
    process = start(mode)
    process.wait_ready(20.0)
    until(lambda: len(running(vllm)) == 3)
    process.close(grace_s=0.5)
    assert not running(vllm)
    assert not process.socket.parent.exists()
    process.close()


def test_nothing_is_left_when_it_died_by_itself(start: Start, vllm: Path) -> None:
    process = start("family")
    process.wait_ready(20.0)
    os.kill(process.pid, signal.SIGKILL)
    until(lambda: not process.is_alive)
    assert "was ended by SIGKILL" in process.why_it_ended()
    assert not running(vllm)  # also the one that chose a session of its own


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the kernel's doing")
def test_it_dies_with_us(vllm: Path) -> None:
    code = (
        "import os, sys, time\n"
        "from engines.vllm_launch import VllmProcess, parse\n"
        "process = VllmProcess(parse(sys.argv[1:], os.environ), os.environ)\n"
        "process.wait_ready(20.0)\n"
        "print(process.pid, process.socket.parent, flush=True)\n"
        "time.sleep(60)\n"
    )
    us = subprocess.Popen(
        [sys.executable, "-c", code, str(vllm), "serve", "good", "--port", str(free_port())],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert us.stdout is not None
    with us.stdout as out:
        pid, folder = out.readline().split()
    assert int(pid) in running(vllm)
    us.kill()
    us.wait()
    until(lambda: not running(vllm))
    subprocess.run(["rm", "-r", folder], check=True)


# --- before the start -----------------------------------------------------------------------------


def failure(*words: str) -> str:
    with pytest.raises(VllmLaunchError) as error:
        VllmProcess(parse(words, os.environ), os.environ, io.BytesIO())
    return str(error.value)


def test_a_program_that_is_not_there_is_said_at_once() -> None:
    assert "/no/vllm is not found; activate" in failure("/no/vllm", "serve", "m")


def test_a_model_that_is_not_there_is_said_at_once(vllm: Path, tmp_path: Path) -> None:
    assert "does not exist" in failure(str(vllm), "serve", "/no/model")
    assert "has no config.json" in failure(str(vllm), "serve", str(tmp_path))
    assert "vLLM does not read ~" in failure(str(vllm), "serve", "~/model")


def test_a_taken_port_is_said_at_once(vllm: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        said = failure(str(vllm), "serve", "m", "--port", port)
    assert f"port {port} on 127.0.0.1 cannot be listened on (address already in use)" in said


def test_a_folder_that_would_hide_ours_is_said_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "engines").mkdir()
    monkeypatch.chdir(tmp_path)
    module = "vllm.entrypoints.openai.api_server"
    assert "would hide" in failure(sys.executable, "-m", module, "--model", "m")


# --- the command ----------------------------------------------------------------------------------


def command(home: Path, *words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        our_command("engine", "vllm", "--ready-timeout", "30", "--", *words),
        cwd=home,
        env={
            **os.environ,
            "XDG_RUNTIME_DIR": str(home),
            "XDG_STATE_HOME": str(home),
            "PYTHONPATH": str(Path(__file__).parent.parent),
        },
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("ls", "-l"), 2, "starts no vLLM server"),
        (("vllm", "serve", "m", "--headless"), 2, "--headless is not supported"),
        (("/no/vllm", "serve", "m"), 1, "/no/vllm is not found"),
    ],
)
def test_a_refusal_is_one_line_and_an_exit_code(
    tmp_path: Path, words: tuple[str, ...], code: int, said: str
) -> None:
    ours = command(tmp_path, *words)
    _, err = ours.communicate(timeout=30)
    assert ours.returncode == code
    assert said in err
    assert len(err.splitlines()) == 1


def test_what_vllm_says_passes_and_ours_ends_it(tmp_path: Path, vllm: Path) -> None:
    ours = command(tmp_path, str(vllm), "serve", "flag", "--port", str(free_port()))
    _, err = ours.communicate(timeout=30)
    assert ours.returncode == 1
    assert "usage: vllm serve" in err
    assert err.splitlines()[-2].startswith("trimtab: vLLM ended with status 1")


def test_a_server_that_cannot_be_attached_to_is_ended(tmp_path: Path, vllm: Path) -> None:
    ours = command(tmp_path, str(vllm), "serve", "family", "--port", str(free_port()))
    _, err = ours.communicate(timeout=30)
    assert ours.returncode == 1
    assert "cannot attach" in err
    assert not running(vllm)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_during_the_start_ends_both(tmp_path: Path, vllm: Path, number: int) -> None:
    ours = command(tmp_path, str(vllm), "serve", "slow", "--port", str(free_port()))
    assert ours.stderr is not None
    while "loading" not in ours.stderr.readline():
        pass
    ours.send_signal(number)
    ours.communicate(timeout=30)
    assert ours.returncode == 0
    assert not running(vllm)


@pytest.mark.parametrize("head", ["vllm serve", "{python} -m vllm.entrypoints.openai.api_server"])
def test_a_vllm_without_our_hooks_is_refused_before_it_starts(tmp_path: Path, head: str) -> None:
    old = tmp_path / "site" / "vllm"
    old.mkdir(parents=True)
    (old / "__init__.py").touch()
    (old / "_version.py").write_text('__version__ = "0.10.2"\n')
    program = tmp_path / "bin" / "vllm"
    program.parent.mkdir()
    program.write_text(f"#!{sys.executable}\nraise SystemExit(0)\n")
    program.chmod(0o755)
    where = {"PATH": str(program.parent), "PYTHONPATH": str(old.parent)}
    words = head.format(python=sys.executable).split()
    model = ["--model", "m"] if len(words) > 2 else ["m"]
    command = parse([*words, *model, "--port", str(free_port())], where)
    with pytest.raises(VllmLaunchError, match=r"vLLM 0\.10\.2 in .*lacks") as refused:
        check(command, where)
    assert "0.26" in str(refused.value)
    assert " is missing; needed to " in str(refused.value)


class _Lost:
    is_lost = True


def test_an_engine_that_hangs_is_not_waited_for(start: Start) -> None:
    process = start("slow")
    with pytest.raises(EngineFailed, match="vLLM hangs"):
        _watch(process, _Lost())  # type: ignore[arg-type]


@pytest.mark.vllm
def test_a_real_vllm_says_no_to_an_unknown_flag(tmp_path: Path) -> None:
    program = f"{os.environ['REAL_VLLM_ENV']}/bin/vllm"
    ours = command(tmp_path, program, "serve", "m", "--nope", "--port", str(free_port()))
    _, err = ours.communicate(timeout=100)
    assert ours.returncode == 1
    *_, first, last = err.splitlines()
    assert first.startswith("trimtab: vLLM ended with status 2")
    assert "does not take this command line" in first
    assert last.endswith("error: unrecognized arguments: --nope")
