"""`trimtab config check`, and the flags that every command shares."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from sidecar.config import load

AsJson = Annotated[bool, typer.Option("--json", help="Machine-readable, on stdout.")]
Name = Annotated[str | None, typer.Option(help="Of the sidecar; its data port by default.")]
PortOption = Annotated[int | None, typer.Option(help="The sidecar's data port.")]
StateDir = Annotated[Path | None, typer.Option("--state", help="The sidecar's state folder.")]
ConfigFile = Annotated[Path | None, typer.Option("--config", help="trimtab.toml by default.")]


def add_to(app: typer.Typer) -> None:
    config = typer.Typer(help="Settings.", no_args_is_help=True)
    config.command("check")(check)
    app.add_typer(config, name="config")


def check(config: ConfigFile = None, as_json: AsJson = False) -> None:
    """Every setting, its value, and where it came from."""
    rows = load(file=config).rows()
    if as_json:
        print(json.dumps({k: {"value": json.loads(v), "from": o} for k, v, o in rows}))
        return
    show(("setting", "value", "from"), rows)


def show(header: tuple[str, ...], rows: list[tuple[str, ...]] | Any) -> None:
    """A table for people."""
    table = Table(*header, box=None, pad_edge=False, header_style="bold")
    for row in rows:
        table.add_row(*(str(cell) for cell in row))
    Console(highlight=False, markup=False, soft_wrap=True).print(table)
