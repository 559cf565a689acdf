"""`trimtab engine embedded`: our own server, swappable through its control socket. `trimtab engine
vllm`: the user's own vLLM, made so by what we add to its launch command."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from engines.vllm_adapter import VllmEngine
    from engines.vllm_launch import VllmCommand, VllmProcess

TRIAL_KEY = "TRIMTAB_TRIAL_KEY"  # hex, from whoever launches a tuning engine
POLL_S = 0.2


class EngineFailed(RuntimeError):
    """The engine did not start. Says what was wrong and what to do."""


def add_to(app: typer.Typer) -> None:
    engine = typer.Typer(help="Engines.", no_args_is_help=True)
    engine.command("embedded")(embedded)
    words = {"allow_extra_args": True, "allow_interspersed_args": False}
    engine.command("vllm", context_settings=words)(vllm)
    app.add_typer(engine, name="engine")


def embedded(
    model: Annotated[
        Path | None, typer.Option(help="A folder as Hugging Face has it, or tiny-moe.")
    ] = None,
    host: str = "127.0.0.1",
    port: int = 8000,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float64.")] = "float32",
    num_threads: Annotated[int, typer.Option(min=1)] = 1,
    max_num_seqs: Annotated[int, typer.Option(min=1)] = 16,
    max_num_batched_tokens: Annotated[int, typer.Option(min=1)] = 2048,
    kv_cache_blocks: Annotated[int, typer.Option(min=1)] = 2048,
    kv_cache_block_size: Annotated[int, typer.Option(min=1)] = 16,
    scope: Annotated[
        str | None, typer.Option(help="serve; or trial, the default where a trial key is given.")
    ] = None,
    cpu: Annotated[int | None, typer.Option(help="Run on this CPU only.")] = None,
) -> None:
    """Serve a small model on the CPU, as OpenAI's API, until SIGTERM."""
    if cpu is not None:
        _pin(cpu)
    os.environ.setdefault("OMP_NUM_THREADS", str(num_threads))  # read when torch is imported
    try:
        from engines.embedded.engine import EmbeddedEngine, EngineSettings
        from engines.embedded.weights import SHIPPED_MODEL, ModelError
        from engines.engine import Scope
    except ModuleNotFoundError as e:
        raise EngineFailed(f"{e.name} is missing; pip install 'trimtab[engine]'") from e

    key, scope = _key(scope)
    settings = EngineSettings(
        model_dir=_folder(model, SHIPPED_MODEL),
        dtype=dtype,
        num_threads=num_threads,
        num_kv_blocks=kv_cache_blocks,
        block_size=kv_cache_block_size,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        scope=Scope(scope),
        key=key,
    )
    try:
        engine = EmbeddedEngine(settings)
    except ModelError as e:
        raise EngineFailed(str(e)) from e
    try:
        _serve(engine, host, port)
    finally:
        engine.close()


def _serve(engine: object, host: str, port: int) -> None:
    """The control socket opens when the port is ours."""
    from engines.embedded.engine import EmbeddedEngine
    from engines.embedded.server import run
    from engines.host import Host
    from engines.remote import control_address

    assert isinstance(engine, EmbeddedEngine)
    url_host = f"[{host}]" if ":" in host else host
    control = Host(engine, control_address(f"http://{url_host}:{port}"))
    try:
        run(engine, host, port, on_ready=control.start)
    except OSError as e:
        raise EngineFailed(e.strerror or str(e)) from e
    finally:
        control.stop()


def vllm(
    context: typer.Context,
    scope: Annotated[
        str | None, typer.Option(help="serve; or trial, the default where a trial key is given.")
    ] = None,
    expert_counts_every: Annotated[
        int, typer.Option(min=0, help="Count each expert's tokens in every n-th step; 0: never.")
    ] = 128,
    ready_timeout: Annotated[
        float, typer.Option(min=1.0, help="Seconds that vLLM has until it serves.")
    ] = 900.0,
    call_timeout: Annotated[
        float, typer.Option(min=1.0, help="Seconds until a call that hangs ends the engine.")
    ] = 60.0,
) -> None:
    """Start the launch command behind `--`, as in `trimtab engine vllm -- vllm serve MODEL`, and
    make it swappable, until SIGTERM. Nothing of Trimtab is installed into vLLM's environment."""
    from compiler.launch import LaunchError
    from engines.inside import wire
    from engines.vllm_launch import VllmLaunchError, VllmProcess, parse

    key, scope = _key(scope)
    environment = {**os.environ, wire.EXPERT_COUNTS: str(expert_counts_every)}
    try:
        command = parse(context.args, environment)
    except VllmLaunchError as e:
        raise LaunchError(str(e)) from e
    for warning in command.warnings:
        print(f"trimtab: {warning}", file=sys.stderr)
    with _until_signal():
        try:
            process = VllmProcess(command, environment)
        except VllmLaunchError as e:
            raise EngineFailed(str(e)) from e
        try:
            _control(command, process, key, scope, ready_timeout, call_timeout)
        except VllmLaunchError as e:
            raise EngineFailed(str(e)) from e
        finally:
            process.close()


class _Stopped(BaseException):
    """SIGTERM or SIGINT."""


@contextmanager
def _until_signal() -> Iterator[None]:
    """The first SIGTERM or SIGINT ends what is inside, wherever it is; while that cleans up, later
    ones are ignored."""

    def stop(number: int, frame: FrameType | None) -> None:
        for each in before:
            signal.signal(each, signal.SIG_IGN)
        raise _Stopped

    before = {s: signal.getsignal(s) for s in (signal.SIGTERM, signal.SIGINT)}
    try:
        for each in before:
            signal.signal(each, stop)
        yield
    except _Stopped:
        pass
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


def _control(
    command: VllmCommand,
    process: VllmProcess,
    key: bytes,
    scope: str,
    within_s: float,
    call_s: float,
) -> None:
    """Once vLLM is ready: attach to it, open the control socket, and wait for an end."""
    from engines.engine import Scope
    from engines.vllm_adapter import VllmEngine, VllmUnsupported

    ready_s = process.wait_ready(within_s)
    try:
        engine = VllmEngine(process.socket, key, Scope(scope), ready_s, call_s)
    except (VllmUnsupported, OSError) as e:  # EngineGone is one of the latter
        raise EngineFailed(f"Trimtab cannot attach to this vLLM: {e}") from e
    try:
        _host(command, process, engine, ready_s)
    finally:
        engine.close()


def _host(command: VllmCommand, process: VllmProcess, engine: VllmEngine, ready_s: float) -> None:
    from engines.host import Host
    from engines.remote import control_address

    address = control_address(command.url)
    control = Host(engine, address)
    try:
        control.start()
    except OSError as e:
        raise EngineFailed(str(e)) from e
    try:
        print(
            f"trimtab: vLLM is ready at {command.url} after {ready_s:.1f} s, control at {address}",
            file=sys.stderr,
            flush=True,
        )
        _watch(process, engine)
    finally:
        control.stop()


def _watch(process: VllmProcess, engine: VllmEngine) -> None:
    """Returns never: what hangs is ended, since nothing else gets it out of a worker."""
    while process.is_alive:
        if engine.is_lost:
            raise EngineFailed("vLLM hangs: a call passed its deadline; it is ended now")
        time.sleep(POLL_S)
    raise EngineFailed(process.why_it_ended())


def _folder(model: Path | None, shipped: Path) -> Path:
    """A model that we ship can be given by its name."""
    if model is None or (str(model) == shipped.name and not model.exists()):
        return shipped
    return model


def _key(scope: str | None) -> tuple[bytes, str]:
    """The key that lets forward passes in, and what it is for."""
    from engines.remote import swap_key

    trial = os.environ.pop(TRIAL_KEY, "")
    scope = scope or ("trial" if trial else "serve")
    if scope == "serve":
        return swap_key(), scope
    if scope != "trial":
        raise typer.BadParameter(f"scope is {scope!r}; write serve or trial")
    try:
        return bytes.fromhex(trial), scope
    except ValueError as e:
        raise EngineFailed(f"{TRIAL_KEY} is not hex") from e


def _pin(cpu: int) -> None:
    try:
        os.sched_setaffinity(0, {cpu})
    except (OSError, AttributeError) as e:
        raise EngineFailed(f"cannot run on CPU {cpu} only: {e}") from e
