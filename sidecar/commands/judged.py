"""What the judge found: `trimtab explain` tells it, `trimtab verify` checks it again, offline."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from sidecar.commands.errors import NO
from sidecar.commands.settings import AsJson, ConfigFile, Name, PortOption, StateDir


def add_to(app: typer.Typer) -> None:
    app.command("explain")(explain)
    app.command("verify")(verify)


def explain(
    candidate: str,
    bundle: Annotated[bool, typer.Option(help="Only its evidence, for `verify`.")] = False,
    name: Name = None,
    port: PortOption = None,
    state: StateDir = None,
    config: ConfigFile = None,
    as_json: AsJson = False,
) -> None:
    """One candidate: its story, what was measured, its source. Needs no controller."""
    from sidecar.config import ConfigError, load
    from sidecar.store import FILE_NAME, SqliteStore

    flags = {"name": name, "port": port, "state_dir": state}
    path = load(flags, config).config.state / FILE_NAME
    if not path.exists():
        raise ConfigError(f"{path.parent} holds no state; name the sidecar with --name or --state")
    store = SqliteStore(path)
    try:
        found = store.candidate(candidate)
        if found is None:
            raise ConfigError(f"candidate {candidate} is not in {path}; see `trimtab candidates`")
        evidence = _evidence(store, found.search_id, found.change.digest)
    finally:
        store.close()
    if bundle:
        print(evidence or "")
    elif as_json:
        print(
            json.dumps(
                {
                    "id": found.id,
                    "stage": found.stage,
                    "summary": found.summary,
                    "gain": found.gain,
                    "evidence": json.loads(evidence or "null"),
                }
            )
        )
    else:
        _tell(found, json.loads(evidence) if evidence else {})


def _evidence(store: Any, search_id: str, digest: str) -> str | None:
    """The newest bundle of this digest that a post of its search points to."""
    for post in reversed(store.posts(search_id)):
        bundle = store.evidence(post.evidence) if post.evidence else None
        if bundle is not None and json.loads(bundle)["digest"] == digest:
            return str(bundle)
    return None


def _tell(found: Any, evidence: dict[str, Any]) -> None:
    print(f"{found.id} by {found.author}: {found.summary}")
    gain = "never timed" if found.gain is None else f"{found.gain:+.1%} tokens/s"
    print(f"{found.stage}, {gain}, portfolio {found.change.digest[:12]}")
    for line in found.story:
        at = time.strftime("%H:%M:%S", time.localtime(line.at))
        print(f"  {at} {line.event} → {line.stage}{': ' if line.note else ''}{line.note}")
    validation = evidence.get("validation")
    if validation:
        print(
            f"outputs: KL p99 {validation['kl_p99']:.2e} nats (stock leaves "
            f"{validation['band']:.2e}){''.join('; ' + f for f in validation['failures'])}"
        )
    for name in ("screen", "confirm"):
        if evidence.get(name):
            print(f"{name}: {evidence[name]['reason']}")
    for forward in found.change.forwards:
        print(f"\n# {forward.digest}\n{forward.source.rstrip()}")


def verify(
    bundle: Annotated[str, typer.Argument(help="A file, or - for stdin.")],
    as_json: AsJson = False,
) -> int:
    """Check a bundle again from its sources and raw samples; 3 when something does not hold."""
    from compiler import evidence
    from sidecar.config import ConfigError

    try:
        text = sys.stdin.read() if bundle == "-" else Path(bundle).read_text()
    except (OSError, UnicodeDecodeError) as e:
        raise ConfigError(f"{bundle} cannot be read: {e}") from e
    text = text.strip()
    wrong = evidence.verify(text)
    if as_json:
        print(json.dumps({"holds": not wrong, "digest": evidence.digest(text), "wrong": wrong}))
    else:
        print("\n".join(wrong) if wrong else f"{evidence.digest(text)} holds")
    return NO if wrong else 0
