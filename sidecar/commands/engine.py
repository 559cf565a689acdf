"""`trimtab engine embedded`: our own server, swappable through its control socket."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

TRIAL_KEY = "TRIMTAB_TRIAL_KEY"  # hex, from whoever launches a tuning engine


class EngineFailed(RuntimeError):
    """The engine did not start. Says what was wrong and what to do."""


def add_to(app: typer.Typer) -> None:
    engine = typer.Typer(help="Engines.", no_args_is_help=True)
    engine.callback()(lambda: None)  # else a single command takes the group's name
    engine.command("embedded")(embedded)
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
