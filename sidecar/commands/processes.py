"""`trimtab serve`, and the two processes that it starts."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from sidecar.commands.settings import ConfigFile, Name, StateDir

Urls = Annotated[list[str] | None, typer.Option(metavar="URL")]
Pairs = Annotated[list[str] | None, typer.Option(metavar="URL=ADDRESS")]


def add_to(app: typer.Typer) -> None:
    app.command("serve")(serve)
    app.command("plane-process", hidden=True)(plane_process)
    app.command("controller-process", hidden=True)(controller_process)


def serve(
    upstream: Urls = None,
    shadow: Urls = None,
    host: str | None = None,
    port: int | None = None,
    admin_port: int | None = None,
    workers: int | None = None,
    engine_control: Pairs = None,
    name: Name = None,
    autonomy: Annotated[
        str | None, typer.Option(help="observe, recommend, shadow, canary or auto.")
    ] = None,
    state: StateDir = None,
    config: ConfigFile = None,
) -> None:
    """The sidecar: relay in front, controller beside it."""
    from sidecar import app
    from sidecar.config import load

    flags = {
        "upstreams": tuple(upstream or ()),
        "shadows": tuple(shadow or ()),
        "host": host,
        "port": port,
        "admin_port": admin_port,
        "workers": workers,
        "engine_control": ",".join(engine_control) if engine_control else None,
        "name": name,
        "autonomy": autonomy,
        "state_dir": state,
    }
    app.serve(load(flags, config).config)


def plane_process() -> None:
    """One data plane; its settings come from `serve` on stdin."""
    import pickle

    from sidecar.plane import run_plane

    run_plane(pickle.load(sys.stdin.buffer))


def controller_process() -> None:
    """The controller; its settings come from `serve` on stdin."""
    from sidecar.app import run_controller
    from sidecar.config import Config

    run_controller(Config.model_validate_json(sys.stdin.buffer.read()))
