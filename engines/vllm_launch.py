"""The user's own vLLM launch command, started with our two hooks and nothing else changed.

`parse` and `explain` are pure; `check` looks at this machine; `VllmProcess` owns the process. What
is added to the command: a worker extension, a middleware, cached tokens in `usage`, a folder in
front of PYTHONPATH that holds `engines/inside` alone, and the path of the unix socket that the
middleware opens. Where the user names no host, vLLM would listen on every interface: ours is then
127.0.0.1.
"""

from __future__ import annotations

import contextlib
import ipaddress
import itertools
import os
import re
import shlex
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import psutil

from engines.inside import vllm_hooks, wire

EXTENSION = "engines.inside.vllm_worker.Extension"
MIDDLEWARE = "engines.inside.vllm_server.Middleware"
DETAILS = "--enable-prompt-tokens-details"  # `usage.prompt_tokens_details` in every answer
LOOPBACK = "127.0.0.1"
DEFAULT_PORT = 8000
MAX_SOCKET_BYTES = 107  # sun_path
WHERE = "import importlib.util as u; print(*u.find_spec('vllm').submodule_search_locations)"
NUM_MISSING = 4  # hooks that are named
WHERE_S = 20.0  # to find vLLM's folder: importing nothing, it takes a twentieth of a second
NUM_LINES = 400  # of vLLM's output, to say why it ended: three processes' traces follow the cause
POLL_S = 0.1
SOCKET_S = 15.0  # from the first healthy answer to our socket


class VllmLaunchError(RuntimeError):
    """The command cannot be used, or vLLM did not start. Says why, and the way out."""


# --- the command ----------------------------------------------------------------------------------

RUNNERS = frozenset("nice ionice chrt numactl taskset stdbuf uv poetry".split())
CONTAINERS = frozenset("docker podman nerdctl kubectl ssh srun singularity apptainer".split())
PYTHON = re.compile(r"python(\d(\.\d+)?)?")
ISOLATED = re.compile(r"-[bBdiOPqsSuvx]*[EI][bBdEiIOPqsSuvx]*")  # these ignore PYTHONPATH
MODULES = {
    "vllm.entrypoints.openai.api_server": (),
    "vllm.entrypoints.cli.main": ("serve",),
}
SHORT = {
    "-asc": "--api-server-count",
    "-dp": "--data-parallel-size",
    "-pp": "--pipeline-parallel-size",
    "-n": "--nnodes",
}
SWITCHES = {
    "--headless": "it starts no API server, which Trimtab reaches the workers through",
    "--grpc": "it serves gRPC in the place of HTTP",
}
COUNTS = ("--api-server-count", "--data-parallel-size", "--pipeline-parallel-size", "--nnodes")
VALUES = ("--model", "--host", "--port", "--config")
REFUSED = ("--worker-extension-cls", "--uds")
TLS = ("--ssl-keyfile", "--ssl-certfile")
FLAGS = (*SWITCHES, *COUNTS, *VALUES, *REFUSED, *TLS)


@dataclass(frozen=True, slots=True)
class VllmCommand:
    """How to start one vLLM server. `words` are the user's with our flags behind them."""

    words: tuple[str, ...]
    environment: tuple[tuple[str, str], ...]  # what was written in front, as in `FOO=bar vllm …`
    model: str
    host: str
    port: int
    scheme: str = "http"
    warnings: tuple[str, ...] = ()

    @property
    def url(self) -> str:
        """Where this machine reaches it, also when it listens on every interface."""
        host = {"": LOOPBACK, "0.0.0.0": LOOPBACK, "::": "::1"}.get(self.host, self.host)
        return f"{self.scheme}://{f'[{host}]' if ':' in host else host}:{self.port}"


def parse(
    words: Sequence[str],
    environment: Mapping[str, str],
    read: Callable[[str], str] = lambda path: Path(path).read_text(),
) -> VllmCommand:
    """Read `[FOO=bar …] vllm serve MODEL …` or `python -m vllm.entrypoints.… …`. `environment` is
    what it would be started in; `read` gives the text of a `--config`. Raises `VllmLaunchError`."""
    given, rest = _assignments(words)
    num_head = _num_head(rest)
    arguments = rest[num_head:]
    flags = _flags(arguments)
    if "--config" in flags:
        flags = {**_config_flags(flags["--config"], read), **flags}
    settings = {**environment, **given}
    _refuse_unsupported(flags, settings)
    host, port = flags.get("--host", LOOPBACK), _port(flags.get("--port", str(DEFAULT_PORT)))
    return VllmCommand(
        words=(*rest, *_ours("--host" in flags), *_details(arguments)),
        environment=tuple(given.items()),
        model=_model(arguments, flags),
        host=host,
        port=port,
        scheme="https" if any(name in flags for name in TLS) else "http",
        warnings=_dev_mode(settings, host),
    )


def _ours(has_host: bool) -> tuple[str, ...]:
    host = () if has_host else ("--host", LOOPBACK)
    return (*host, "--worker-extension-cls", EXTENSION, "--middleware", MIDDLEWARE)


def _details(arguments: Sequence[str]) -> tuple[str, ...]:
    """vLLM keeps what came from its prefix cache to itself unless it is asked; a profile needs it.
    Who said yes or no is left alone."""
    said = {word.partition("=")[0].replace("_", "-") for word in arguments}
    return () if said & {DETAILS, f"--no-{DETAILS[2:]}"} else (DETAILS,)


def _assignments(words: Sequence[str]) -> tuple[dict[str, str], tuple[str, ...]]:
    """The environment written in front of the command, and the command."""
    given, rest = {}, list(words)
    while rest:
        name, is_assignment, value = rest[0].partition("=")
        if is_assignment and name.isidentifier():
            given[name] = value
        elif rest[0] != "env":
            break
        rest.pop(0)
    return given, tuple(rest)


def _num_head(words: Sequence[str]) -> int:
    """How many words come before vLLM's own arguments."""
    if not words:
        raise VllmLaunchError(
            "there is no launch command; write trimtab engine vllm -- vllm serve MODEL"
        )
    first = Path(words[0]).name
    for i in range(len(words)):
        num = _starts_vllm(words[i:])
        if num and (i == 0 or first in RUNNERS):
            return i + num
    line = shlex.join(words)
    if first in CONTAINERS:
        raise VllmLaunchError(
            f"{line!r} runs vLLM where Trimtab's folder and socket are not; run trimtab in there, "
            "with the plain command 'vllm serve MODEL …'"
        )
    raise VllmLaunchError(
        f"{line!r} starts no vLLM server; write 'vllm serve MODEL …' or "
        "'python -m vllm.entrypoints.openai.api_server --model MODEL …'"
    )


def _starts_vllm(words: Sequence[str]) -> int:
    """How many words it takes to start vLLM's server, 0 where they do not."""
    name = Path(words[0]).name
    if name == "vllm" and words[1:2] == ("serve",):
        return 2
    if not PYTHON.fullmatch(name):
        return 0
    for i, word in enumerate(words[1:], 1):
        if ISOLATED.fullmatch(word):
            raise VllmLaunchError(
                f"{name} {word} ignores PYTHONPATH, by which vLLM finds Trimtab's worker "
                "extension; leave that option out"
            )
        if word == "-m":
            module, after = words[i + 1 : i + 2], MODULES.get("".join(words[i + 1 : i + 2]))
            is_ours = after is not None and tuple(words[i + 2 : i + 2 + len(after)]) == after
            return i + len(module) + 1 + len(after or ()) if is_ours else 0
        if not word.startswith("-"):
            num = _starts_vllm(words[i:]) if Path(word).name == "vllm" else 0
            return i + num if num else 0
    return 0


def _flags(arguments: Sequence[str]) -> dict[str, str]:
    """Those that we look at, by their long names; the last one counts, as for vLLM."""
    found: dict[str, str] = {}
    for i, word in enumerate(arguments):
        name, is_joined, value = word.partition("=")
        flag = _long_name(name)
        if flag is None:
            continue
        following = arguments[i + 1] if i + 1 < len(arguments) else "--"
        if not is_joined and flag not in SWITCHES:
            if following.startswith("--"):
                raise VllmLaunchError(f"{name} has no value; write {name} VALUE")
            value = following
        found[flag] = value
    return found


def _long_name(name: str) -> str | None:
    """Of a flag that we look at. Like vLLM: `_` is `-`, and a beginning does where it is unique."""
    if not name.startswith("--"):
        return SHORT.get(name)
    name = name.replace("_", "-")
    if name in FLAGS:
        return name
    meant = [flag for flag in FLAGS if len(name) > 4 and flag.startswith(name)]
    return meant[0] if len(meant) == 1 else None


def _config_flags(path: str, read: Callable[[str], str]) -> dict[str, str]:
    """The plain `name: value` lines of vLLM's YAML; what is nested is never ours to look at."""
    try:
        text = read(path)
    except (OSError, UnicodeDecodeError) as e:
        raise VllmLaunchError(f"--config {path} cannot be read: {e}") from e
    words = []
    for name, value in re.findall(r"^([\w-]+)[ \t]*:[ \t]*([^\n#]*)", text, re.MULTILINE):
        plain = value.strip().strip("'\"")
        if plain.lower() not in ("false", "no", "off"):
            words.append(f"--{name}={plain}")
    return _flags(words)


def _model(arguments: Sequence[str], flags: Mapping[str, str]) -> str:
    if "--model" in flags:
        return flags["--model"]
    if arguments and not arguments[0].startswith("-"):
        return arguments[0]
    raise VllmLaunchError("which model? write it right behind 'serve', or as --model MODEL")


def _port(value: str) -> int:
    if not value.isdecimal() or not 0 < int(value) < 2**16:
        raise VllmLaunchError(f"--port is {value!r}; write a number from 1 to 65535")
    return int(value)


def _refuse_unsupported(flags: Mapping[str, str], environment: Mapping[str, str]) -> None:
    if "--worker-extension-cls" in flags:
        raise VllmLaunchError(
            "--worker-extension-cls is taken by Trimtab's own, and vLLM takes one; leave it out"
        )
    if "--uds" in flags:
        raise VllmLaunchError("--uds is not supported yet: Trimtab needs --host and --port")
    for name, why in SWITCHES.items():
        if name in flags:
            raise VllmLaunchError(f"{name} is not supported: {why}; leave it out")
    for name in COUNTS:
        if flags.get(name, "1") != "1":
            raise VllmLaunchError(
                f"{name} {flags[name]} is not supported yet; use 1 (tensor parallelism is fine)"
            )
    if _is_on(environment.get("VLLM_USE_RUST_FRONTEND")):
        raise VllmLaunchError(
            "VLLM_USE_RUST_FRONTEND=1 loads no middleware, which Trimtab reaches the workers "
            "through; unset it"
        )


def _dev_mode(environment: Mapping[str, str], host: str) -> tuple[str, ...]:
    if not _is_on(environment.get("VLLM_SERVER_DEV_MODE")):
        return ()
    if not _is_loopback(host):
        raise VllmLaunchError(
            f"VLLM_SERVER_DEV_MODE=1 on --host {host} lets whoever reaches the port run any method "
            "of the workers; unset it (Trimtab does not need it), or use --host 127.0.0.1"
        )
    return (
        "VLLM_SERVER_DEV_MODE=1 lets any user of this machine run any method of the workers; "
        "Trimtab does not need it: unset it unless you do",
    )


def _is_on(value: str | None) -> bool:
    return (value or "0").strip() not in ("0", "")


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


# --- before the start -----------------------------------------------------------------------------


def check(command: VllmCommand, environment: Mapping[str, str]) -> None:
    """What can be known at once, since vLLM takes ten seconds to say it. Raises
    `VllmLaunchError`."""
    program = command.words[0]
    if shutil.which(program, path=environment.get("PATH")) is None:
        raise VllmLaunchError(
            f"{program} is not found; activate vLLM's environment, or give the path of its program "
            "as in /path/to/venv/bin/vllm serve …"
        )
    _check_hidden(command)
    _check_model(command)
    _check_port(command.host, command.port)
    _check_version(command, environment)


def _check_version(command: VllmCommand, environment: Mapping[str, str]) -> None:
    """The files of the vLLM that it will run are searched for our hooks, where they can be found
    without running it; the worker looks again."""
    site = _site(command, environment)
    if site is None:
        return
    findings = vllm_hooks.probe_files(site)
    if findings.missing:
        first, num_more = findings.missing[:NUM_MISSING], len(findings.missing) - NUM_MISSING
        more = f"; and {num_more} more" if num_more > 0 else ""
        raise VllmLaunchError(
            f"vLLM {findings.version} in {site} lacks what Trimtab hooks into: "
            + "; ".join(first)
            + more
        )


def _site(command: VllmCommand, environment: Mapping[str, str]) -> Path | None:
    """The folder that holds its `vllm`; None when that takes more than asking its Python."""
    program = Path(shutil.which(command.words[0], path=environment.get("PATH")) or "")
    python = str(program)
    if not PYTHON.fullmatch(program.name):
        with contextlib.suppress(OSError, UnicodeDecodeError), program.open() as script:
            python = script.readline(500).removeprefix("#!").strip()
    if not PYTHON.fullmatch(Path(python).name):
        return None
    try:
        found = subprocess.run(
            [python, "-c", WHERE],
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=WHERE_S,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    folder = found.stdout.strip()
    return Path(folder).parent if found.returncode == 0 and folder else None


def _check_hidden(command: VllmCommand) -> None:
    """`python -m` looks into the current folder before PYTHONPATH."""
    here = Path.cwd()
    for at in (here / "engines", here / "engines.py"):
        if "-m" in command.words and at.exists() and not (here / "engines" / "inside").is_dir():
            raise VllmLaunchError(
                f"{at} would hide Trimtab's own 'engines' from vLLM; start from another folder, or "
                "use 'vllm serve'"
            )


def _check_model(command: VllmCommand) -> None:
    if not command.model.startswith(("/", "./", "../", "~")):
        return
    if command.model.startswith("~"):
        full = Path(command.model).expanduser()
        raise VllmLaunchError(f"vLLM does not read ~ in {command.model}; write {full}")
    path = Path(command.model)
    if not path.exists():
        raise VllmLaunchError(f"model {path} does not exist; give its folder, or a name on the Hub")
    known = [path / name for name in ("config.json", "params.json")]
    if path.is_dir() and not any(p.exists() for p in known) and not _has_own_config(command):
        raise VllmLaunchError(f"model {path} has no config.json; give the folder that holds it")


def _has_own_config(command: VllmCommand) -> bool:
    return any(w.replace("_", "-").startswith("--hf-config-path") for w in command.words)


def _check_port(host: str, port: int) -> None:
    try:
        found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=1)
        kind, _, _, _, address = found[0]
        with socket.socket(kind) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as e:
        raise VllmLaunchError(
            f"port {port} on {host} cannot be listened on ({(e.strerror or str(e)).lower()}): stop "
            "who does, or give another --port"
        ) from e


def inside_folder(at: Path) -> Path:
    """Make a folder that holds `engines/inside` and nothing else of ours, for PYTHONPATH. vLLM's
    environment is another one, so nothing else could be imported there."""
    package, source = at / "engines", Path(__file__).parent / "inside"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text('"""Of Trimtab: what runs inside vLLM."""\n')
    shutil.copytree(source, package / "inside", ignore=_all_but_python)
    return at


def _all_but_python(folder: str, names: list[str]) -> set[str]:
    return {n for n in names if not n.endswith(".py") and not (Path(folder) / n).is_dir()} | {
        "__pycache__"
    }


# --- why it ended ---------------------------------------------------------------------------------

PREFIX = re.compile(
    r"^(\([^()]*pid=\d+\) )?((DEBUG|INFO|WARNING|ERROR|CRITICAL) \d\d-\d\d [\d:.]+ \[[^\]]*\] ?)?"
)
EXCEPTION = re.compile(r"^([A-Za-z_][\w.]*)?(Error|Exception|Exit|Interrupt|Timeout)(:|$)")
NUM_DETAILS = 7  # lines of a pydantic error
DEATH = re.compile(r"^Worker proc \S+ died unexpectedly")
SECONDHAND = (
    "Engine core initialization failed",
    "WorkerProc initialization failed",
    "EngineCore encountered an issue",
    "Executor failed",
)
HINTS: tuple[tuple[str, str], ...] = (
    (
        r"error: (unrecognized arguments|argument |ambiguous option)",
        "it does not take this command line; `vllm serve --help=all` lists what it takes",
    ),
    (
        r"No module named '?vllm\b|PackageNotFoundError: .*\bvllm\b",
        "vLLM is not installed in that environment; give the path of a program from one where it "
        "is, as in /path/to/venv/bin/vllm serve …",
    ),
    (
        r"No module named '?engines|has no attribute '?(Extension|Middleware)",
        "something hides Trimtab's modules from it; start from another folder",
    ),
    (
        r"HFValidationError|LocalEntryNotFoundError|RepositoryNotFoundError|GatedRepoError"
        r"|Invalid repository ID|is not a valid model identifier|[Cc]an't load the configuration"
        r"|not appear to have a file named config.json",
        "the model is not there; give its folder, or a name that the Hub (or its cache here) has",
    ),
    (r"[Aa]ddress already in use", "the port is taken; stop who has it, or give another --port"),
    (
        r"OutOfMemoryError|out of memory|less than desired|No available memory for the cache"
        r"|larger than the available KV cache",
        "memory does not suffice; lower --max-model-len or --gpu-memory-utilization, or free some",
    ),
    (DEATH.pattern, "a worker died; was it killed, or did the machine run out of memory?"),
    (r"worker_extension_cls|[Ww]orker extension", "Trimtab's worker extension does not fit it"),
)


def explain(lines: Sequence[str]) -> tuple[str, tuple[str, ...]]:
    """From the end of vLLM's output: what to do about it (may be empty), and its own words, the
    cause first. What only says that another process failed is no cause."""
    plain = [PREFIX.sub("", line.rstrip(), count=1) for line in lines]
    said = _argparse_error(plain) or _exception(plain) or tuple(p for p in plain if p.strip())[-1:]
    for pattern, hint in HINTS:
        if any(re.search(pattern, line) for line in said):
            return hint, said
    return "", said


def _argparse_error(plain: Sequence[str]) -> tuple[str, ...]:
    found = [line for line in plain if re.match(r"^\S+( \S+)?: error: ", line)]
    return tuple(found[-1:])


def _exception(plain: Sequence[str]) -> tuple[str, ...]:
    """The last exception, or end of a worker, that is a cause. What is wrong with pydantic is said
    in the lines below."""
    found = [i for i, line in enumerate(plain) if EXCEPTION.match(line) or DEATH.match(line)]
    causes = [i for i in found if not any(text in plain[i] for text in SECONDHAND)] or found
    if not causes:
        return ()
    at = causes[-1]
    if "ValidationError: " not in plain[at]:
        return (plain[at],)
    below = itertools.takewhile(
        lambda line: line.strip() and not line.startswith((" [type=", "Traceback")),
        plain[at + 1 : at + 1 + NUM_DETAILS],
    )
    return (plain[at], *below)


def ended(status: int) -> str:
    if status >= 0:
        return f"ended with status {status}"
    return f"was ended by {signal.Signals(-status).name}"


# --- the process ----------------------------------------------------------------------------------

# By exec, so that the process is vLLM's own and the kernel ends it when we are gone, however we
# went; a preexec function would run between fork and exec in a process that has threads.
TETHERED = """
import ctypes, os, signal, sys
if sys.platform.startswith("linux"):
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)
if os.getppid() != int(sys.argv[1]):
    sys.exit(1)
signal.signal(signal.SIGPIPE, signal.SIG_DFL)
os.execvp(sys.argv[2], sys.argv[2:])
"""


class VllmProcess:
    """vLLM from a launch command, in a session of its own, dead when we are. Start it in the main
    thread: the kernel ties it to the thread. Whoever starts it closes it. Raises
    `VllmLaunchError` when it cannot be started."""

    def __init__(
        self, command: VllmCommand, environment: Mapping[str, str], out: BinaryIO | None = None
    ) -> None:
        """What vLLM says goes to `out`, stderr by default."""
        self.start_to_ready_s: float | None = None
        self._command = command
        self._closed = False
        self._family: set[psutil.Process] = set()  # those found so far
        self._lines: deque[str] = deque(maxlen=NUM_LINES)
        self._folder = Path(tempfile.mkdtemp(prefix="trimtab-"))  # mode 0700
        self.socket = self._folder / "inside.sock"
        self._started_s = time.monotonic()
        try:
            self._process = self._start(environment)
        except BaseException:
            shutil.rmtree(self._folder, ignore_errors=True)
            raise
        self._reader = threading.Thread(
            target=self._pass_on, args=(out or sys.stderr.buffer,), name="vllm-output", daemon=True
        )
        self._reader.start()

    def _start(self, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
        if len(os.fsencode(self.socket)) > MAX_SOCKET_BYTES:
            raise VllmLaunchError(f"{self._folder} is too long for a socket; shorten TMPDIR")
        settings = {**environment, **dict(self._command.environment)}
        check(self._command, settings)
        theirs = settings.get("PYTHONPATH")
        ours = str(inside_folder(self._folder / "path"))
        settings |= {
            wire.SOCKET: str(self.socket),
            "PYTHONPATH": os.pathsep.join([ours, theirs] if theirs else [ours]),
        }
        tether = [sys.executable, "-I", "-S", "-c", TETHERED, str(os.getpid())]
        return subprocess.Popen(
            [*tether, *self._command.words],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=settings,
            start_new_session=True,
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def wait_ready(self, timeout_s: float) -> float:
        """Seconds from the start until it serves and our socket is there. Raises
        `VllmLaunchError` as soon as it has ended, or after `timeout_s`."""
        healthy_s: float | None = None
        while (now_s := time.monotonic()) < self._started_s + timeout_s:
            if not self.is_alive:
                raise VllmLaunchError(self.why_it_ended())
            if healthy_s is None and _answers(f"{self._command.url}/health"):
                healthy_s = now_s
            if healthy_s is not None and self.socket.exists():
                self.start_to_ready_s = time.monotonic() - self._started_s
                self._family |= _family(self.pid)  # some could outlive their parents elsewhere
                return self.start_to_ready_s
            if healthy_s is not None and now_s > healthy_s + SOCKET_S:
                raise VllmLaunchError(
                    f"vLLM serves on {self._command.url}, but Trimtab's middleware did not open "
                    f"{self.socket} within {SOCKET_S:g} s; does this vLLM know --middleware?"
                )
            time.sleep(POLL_S)
        raise VllmLaunchError(
            f"vLLM was not ready within {timeout_s:g} s; give more with --ready-timeout. It said "
            f"last:\n  {self._last_line()}"
        )

    def why_it_ended(self) -> str:
        """Once it has: ours on top, vLLM's own last words below."""
        passed_s = time.monotonic() - self._started_s
        self.close()  # ends what holds its output open, so that all of it has been read
        hint, said = explain(self._lines)
        when = f"after {passed_s:.1f} s" + (
            "" if self.start_to_ready_s else ", before it was ready"
        )
        first = f"vLLM {ended(self._process.returncode)} {when}" + (f": {hint}" if hint else "")
        return "\n  ".join((first, *said))

    def close(self, grace_s: float = 10.0) -> None:
        """End it and all that it started: SIGTERM, and SIGKILL for what is left after `grace_s`.
        Twice is fine."""
        if self._closed:
            return  # its number may be another's now
        self._closed = True
        self._family |= _family(self.pid)
        _signal_group(self.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(grace_s)
        _, left = psutil.wait_procs(self._family | _session(self.pid), timeout=0.5)
        _signal_group(self.pid, signal.SIGKILL)
        for process in left:
            with contextlib.suppress(psutil.Error):
                process.kill()
        self._process.wait()
        psutil.wait_procs(left, timeout=5.0)
        self._reader.join(2.0)
        shutil.rmtree(self._folder, ignore_errors=True)

    def _pass_on(self, out: BinaryIO) -> None:
        assert self._process.stdout is not None
        rest = b""
        with self._process.stdout as pipe:
            while chunk := os.read(pipe.fileno(), 1 << 16):
                with contextlib.suppress(OSError, ValueError):  # nobody reads ours any more
                    out.write(chunk)
                    out.flush()
                *lines, rest = (rest + chunk).split(b"\n")
                rest = rest[-(1 << 16) :]
                self._lines.extend(line.decode(errors="replace") for line in lines)
        if rest:
            self._lines.append(rest.decode(errors="replace"))

    def _last_line(self) -> str:
        lines = [line for line in list(self._lines) if line.strip()]
        return lines[-1][:300] if lines else "nothing"


def _family(pid: int) -> set[psutil.Process]:
    """Those that descend from it now, whatever session they chose."""
    try:
        return set(psutil.Process(pid).children(recursive=True)) | _session(pid)
    except psutil.NoSuchProcess:
        return _session(pid)


def _session(leader: int) -> set[psutil.Process]:
    """Those of its session, also when their parents are gone."""
    found = set()
    for pid in psutil.pids():
        with contextlib.suppress(OSError, psutil.Error):
            if pid != leader and os.getsid(pid) == leader:
                found.add(psutil.Process(pid))
    return found


def _signal_group(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, number)


def _answers(url: str) -> bool:
    """A 200 within a second, no proxy in between, whoever signed its certificate."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    opener = urllib.request.build_opener(
        urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context)
    )
    try:
        with opener.open(url, timeout=1.0) as reply:
            return bool(reply.status == 200)
    except (OSError, ValueError):
        return False
