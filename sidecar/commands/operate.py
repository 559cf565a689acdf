"""The control plane's client: what runs, what happened, and the three calls that change it."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator
from dataclasses import asdict
from typing import Annotated

import typer

from sidecar.commands.errors import FAILED
from sidecar.commands.settings import AsJson, ConfigFile, Name, PortOption, StateDir, show
from sidecar.control import ControlClient

Why = Annotated[str, typer.Option(help="For the audit.")]


def add_to(app: typer.Typer) -> None:
    for command in (status, watch, candidates, profile, drift, retune, promote, rollback):
        app.command(command.__name__)(command)


@contextlib.contextmanager
def _controller(
    name: str | None, port: int | None, state: object, config: object
) -> Iterator[ControlClient]:
    from pathlib import Path

    from sidecar.config import load
    from sidecar.control import control_address

    file = config if isinstance(config, Path) else None
    found = load({"name": name, "port": port, "state_dir": state}, file).config
    client = ControlClient(control_address(found.state))
    try:
        yield client
    finally:
        client.close()


def status(
    name: Name = None,
    port: PortOption = None,
    state: StateDir = None,
    config: ConfigFile = None,
    as_json: AsJson = False,
) -> None:
    """What serves whom, with which forward pass."""
    with _controller(name, port, state, config) as controller:
        found = controller.status()
    if as_json:
        print(json.dumps(asdict(found)))
        return
    of = f" ({found.candidate_id})" if found.candidate_id else ""
    print(
        f"{found.name}: {found.state}{of}, autonomy {found.autonomy}, table "
        f"{found.table_version}, {found.num_data_planes} data planes"
    )
    print(
        f"requests {found.num_requests}, failed {found.num_failed}, mirrored "
        f"{found.num_mirrored}, diverged {found.num_diverged}"
    )
    if found.last_verdict:
        print(found.last_verdict)
    show(
        ("role", "url", "share", "forward pass", "health", "swappable"),
        [
            (
                a.role,
                a.url,
                f"{a.weight:g}",
                a.digest[:12] or "stock",
                "answers" if a.healthy else "silent",
                "yes" if a.swappable else "no",
            )
            for a in found.arms
        ],
    )


def watch(
    after: Annotated[int, typer.Option(help="Resume behind this seq.")] = 0,
    name: Name = None,
    port: PortOption = None,
    state: StateDir = None,
    config: ConfigFile = None,
    as_json: AsJson = False,
) -> None:
    """Verdicts, experiments, stages, tables and calls as they happen."""
    with _controller(name, port, state, config) as controller:
        for h in controller.watch(after):
            if as_json:
                print(json.dumps(asdict(h)), flush=True)
            else:
                at = time.strftime("%H:%M:%S", time.localtime(h.at))
                print(f"{h.seq:>5} {at} {h.kind:<10} {h.text}", flush=True)


def candidates(
    stage: Annotated[str, typer.Option(help="Only those in this stage.")] = "",
    name: Name = None,
    port: PortOption = None,
    state: StateDir = None,
    config: ConfigFile = None,
    as_json: AsJson = False,
) -> None:
    """Every proposal, its stage and its story."""
    with _controller(name, port, state, config) as controller:
        found = list(controller.candidates(stage))
    if as_json:
        print(json.dumps([asdict(c) for c in found]))
        return
    show(
        ("id", "stage", "gain", "author", "what it does", "so far"),
        [
            (
                c.id,
                c.stage,
                "" if c.gain is None else f"{c.gain:+.1%}",
                c.author,
                c.summary,
                " → ".join(line.event for line in c.story),
            )
            for c in found
        ],
    )


def profile(
    name: Name = None,
    port: PortOption = None,
    state: StateDir = None,
    config: ConfigFile = None,
    as_json: AsJson = False,
) -> None:
    """The last full window of traffic; with --json, what `compile --profile` takes."""
    with _controller(name, port, state, config) as controller:
        text = controller.profile()
    if as_json:
        print(text)
        return
    facts = json.loads(text)
    show(
        ("feature", "value"),
        [
            (k, "not known" if v is None else f"{v:g}" if isinstance(v, float) else v)
            for k, v in facts.items()
            if k != "expert_load"
        ],
    )


def drift(
    most: Annotated[int, typer.Option(help="Of the newest verdicts.")] = 20,
    name: Name = None,
    port: PortOption = None,
    state: StateDir = None,
    config: ConfigFile = None,
    as_json: AsJson = False,
) -> None:
    """What the detector said, newest first."""
    with _controller(name, port, state, config) as controller:
        found = controller.verdicts(most)
    if as_json:
        print(json.dumps([{"at": v.at, "text": v.text, **json.loads(v.json)} for v in found]))
        return
    for v in found:
        print(f"{time.strftime('%H:%M:%S', time.localtime(v.at))} {v.text}")


def retune(
    why: Why = "",
    name: Name = None,
    port: PortOption = None,
    state: StateDir = None,
    config: ConfigFile = None,
    as_json: AsJson = False,
) -> None:
    """Start a search on the present traffic."""
    with _controller(name, port, state, config) as controller:
        search_id = controller.retune(why)
    print(json.dumps({"search_id": search_id}) if as_json else f"search {search_id} starts")


def promote(
    candidate: str,
    why: Why = "",
    name: Name = None,
    port: PortOption = None,
    state: StateDir = None,
    config: ConfigFile = None,
    as_json: AsJson = False,
) -> None:
    """Let a confirmed candidate go all the way, through every check."""
    with _controller(name, port, state, config) as controller:
        now = controller.promote(candidate, why)
    print(json.dumps({"state": now}) if as_json else f"{candidate} is on its way: {now}")


def rollback(
    why: Why = "",
    name: Name = None,
    port: PortOption = None,
    state: StateDir = None,
    config: ConfigFile = None,
    as_json: AsJson = False,
) -> int:
    """Everything back to the stable arm, from any state."""
    with _controller(name, port, state, config) as controller:
        done = controller.rollback(why)
    if as_json:
        print(json.dumps(asdict(done)))
    elif done.complete:
        print(f"{done.state}: table {done.table_version} everywhere in {done.took_s * 1e3:.0f} ms")
    else:
        print(f"{done.state}: table {done.table_version}, not yet acknowledged by every data plane")
    if not done.complete:
        return FAILED
    return 0
