"""Regenerate the committed gRPC code: `python -m protos` (needs grpcio-tools and mypy-protobuf)."""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).parent


def generate(out: Path) -> None:
    """Write every generated file below `out`/protos. Raises `RuntimeError` when protoc refuses."""
    from grpc_tools import protoc

    names = [f"protos/{p.name}" for p in sorted(HERE.glob("sidecar_*.proto"))]
    kinds = ("python", "grpc_python", "mypy", "mypy_grpc")
    scripts = Path(sys.executable).parent  # of this environment, whatever PATH says
    plugins = [f"--plugin=protoc-gen-{kind}={scripts}/protoc-gen-{kind}" for kind in kinds[2:]]
    outs = [f"--{kind}_out={out}" for kind in kinds]
    if protoc.main(["protoc", f"-I{HERE.parent}", *plugins, *outs, *names]) != 0:
        raise RuntimeError(f"protoc failed on {', '.join(names)}")


if __name__ == "__main__":
    generate(HERE.parent)
