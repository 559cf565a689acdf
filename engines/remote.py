"""The `Engine` protocol over the wire, where an engine's control lives, and the serve key.

A call blocks until the reply or its deadline: keep it off the event loop. gRPC does not survive
`os.fork`; a process that has connected starts others with spawn.
"""

from __future__ import annotations

import os
import secrets
import stat
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import grpc
import numpy as np
import numpy.typing as npt

from engines.engine import (
    Array,
    CandidateError,
    EngineGone,
    EngineInfo,
    ModuleInfo,
    Portfolio,
    Replay,
    RequestOutput,
    Scope,
    SwapReport,
)
from profiler.reservoir import Workload
from profiler.samples import StepSample
from protos import sidecar_engine_pb2 as pb
from protos.sidecar_engine_pb2_grpc import EngineStub

CHANNEL_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    ("grpc.enable_retries", 0),
    ("grpc.enable_http_proxy", 0),
    ("grpc.use_local_subchannel_pool", 1),  # a recycled engine does not inherit a back-off
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
)
DTYPES = frozenset({"float16", "float32", "float64", "int32", "int64"})
KEY_BYTES = 32
MAX_DRAIN_SLACK_S = 5.0


class EngineFault(RuntimeError):
    """The engine answered with an error that is neither the candidate's nor the connection's."""


class RemoteEngine:
    """An engine behind `engines.host`, at `unix:/path`. Each call has `timeout_s`; no call before
    the first connects, so that a dead engine shows as `EngineGone` there."""

    def __init__(self, address: str, timeout_s: float = 60.0) -> None:
        self._address = address
        self._timeout_s = timeout_s
        self._channel = grpc.insecure_channel(address, options=CHANNEL_OPTIONS)
        self._stub = EngineStub(self._channel)

    def info(self) -> EngineInfo:
        with self._errors("info"):
            reply = self._stub.Info(pb.InfoRequest(), timeout=self._timeout_s)
        return EngineInfo(
            engine=reply.engine,
            model=reply.model,
            dtype=reply.dtype,
            device=reply.device,
            num_layers=reply.num_layers,
            vocab_size=reply.vocab_size,
            max_model_len=reply.max_model_len,
            scope=Scope(reply.scope),
            digest=reply.digest,
            previous_digest=reply.previous_digest if reply.HasField("previous_digest") else None,
            num_running=reply.num_running,
            start_to_ready_s=reply.start_to_ready_s,
            modules=tuple(ModuleInfo(m.path, m.cls, m.num_weight_bytes) for m in reply.modules),
        )

    def source(self, target: str) -> str:
        with self._errors("source"):
            reply = self._stub.Source(pb.SourceRequest(target=target), timeout=self._timeout_s)
        return reply.source

    def swap(self, portfolio: Portfolio, signature: str) -> SwapReport:
        request = pb.SwapRequest(
            sources=[f.source for f in portfolio.forwards], signature=signature
        )
        with self._errors("swap"):
            return _swap_report(self._stub.Swap(request, timeout=self._timeout_s))

    def revert(self) -> SwapReport:
        with self._errors("revert"):
            return _swap_report(self._stub.Revert(pb.RevertRequest(), timeout=self._timeout_s))

    def call(self, module: str, inputs: Sequence[Array]) -> tuple[Array, ...]:
        request = pb.CallRequest(module=module, inputs=[to_tensor(a) for a in inputs])
        with self._errors("call"):
            reply = self._stub.Call(request, timeout=self._timeout_s)
        return tuple(from_tensor(t) for t in reply.outputs)

    def probe(
        self, workload: Workload, num_layers: int | None = None
    ) -> tuple[npt.NDArray[np.float32], ...]:
        request = _replay_request(workload, num_layers)
        with self._errors("probe"):
            replies = list(self._stub.Probe(request, timeout=self._timeout_s))
        return tuple(from_tensor(r.logprobs).astype(np.float32, copy=False) for r in replies)

    def measure(self, workload: Workload, num_layers: int | None = None) -> Replay:
        request = _replay_request(workload, num_layers)
        with self._errors("measure"):
            reply = self._stub.Measure(request, timeout=self._timeout_s)
        return Replay(
            outputs=tuple(
                RequestOutput(
                    from_tensor(o.logprobs).astype(np.float32, copy=False),
                    from_tensor(o.top_token_ids).astype(np.int64, copy=False),
                )
                for o in reply.outputs
            ),
            num_steps=reply.num_steps,
            num_tokens=reply.num_tokens,
            num_orig_calls=reply.num_orig_calls,
            num_candidate_calls=reply.num_candidate_calls,
        )

    def fingerprint(self) -> str:
        with self._errors("fingerprint"):
            reply = self._stub.Fingerprint(pb.FingerprintRequest(), timeout=self._timeout_s)
        return reply.fingerprint

    def drain(self, deadline_s: float) -> bool:
        request = pb.DrainRequest(deadline_s=deadline_s)
        with self._errors("drain"):
            return self._stub.Drain(request, timeout=deadline_s + MAX_DRAIN_SLACK_S).drained

    def steps(self) -> tuple[StepSample, ...]:
        with self._errors("steps"):
            reply = self._stub.Steps(pb.StepsRequest(), timeout=self._timeout_s)
        return tuple(
            StepSample(
                num_running=s.num_running,
                num_waiting=s.num_waiting,
                num_tokens=s.num_tokens,
                kv_cache_usage=s.kv_cache_usage,
                expert_load=_expert_load(s),
                step_s=s.step_s if s.HasField("step_s") else None,
            )
            for s in reply.steps
        )

    def close(self) -> None:
        self._channel.close()

    @contextmanager
    def _errors(self, what: str) -> Iterator[None]:
        try:
            yield
        except grpc.RpcError as e:
            raise _as_ours(e, f"engine at {self._address} during {what}") from e
        except ValueError as e:
            if isinstance(e, CandidateError):
                raise
            raise EngineGone(f"engine at {self._address} during {what}: {e}") from e


def connect(address: str) -> RemoteEngine:
    """A `RemoteEngine` with default deadlines. Picklable by reference, for spawned processes."""
    return RemoteEngine(address)


def control_address(url: str) -> str:
    """Where the engine that serves `url` listens for control: `unix:…/trimtab/HOST:PORT.sock`.

    `localhost` and the wildcard addresses are this machine's 127.0.0.1 or ::1.
    """
    parts = urlsplit(url)
    if not parts.hostname:
        raise ValueError(f"upstream {url!r} names no host; write http://HOST:PORT")
    port = parts.port or (443 if parts.scheme == "https" else 80)
    aliases = {"localhost": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}
    host = aliases.get(parts.hostname, parts.hostname)
    return f"unix:{_runtime_dir() / f'{host}:{port}.sock'}"


def _runtime_dir() -> Path:
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    return Path(runtime) / "trimtab" if runtime else Path(f"/tmp/trimtab-{os.getuid()}")


def swap_key() -> bytes:
    """The serve-scope key of this user, created by whoever comes first.

    Raises `PermissionError` when others can read it, `ValueError` when it is not 32 bytes.
    """
    state = os.environ.get("XDG_STATE_HOME")
    path = (Path(state) if state else Path.home() / ".local/state") / "trimtab" / "swap.key"
    if not path.exists():
        _create_key(path)
    if stat.S_IMODE(path.stat().st_mode) & 0o077:
        raise PermissionError(f"{path} is readable by others; chmod 600 it, or delete it")
    key = path.read_bytes()
    if len(key) != KEY_BYTES:
        raise ValueError(f"{path} holds {len(key)} bytes, not {KEY_BYTES}; delete it")
    return key


def _create_key(path: Path) -> None:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    fd, name = tempfile.mkstemp(dir=path.parent)  # mode 0600
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(secrets.token_bytes(KEY_BYTES))
        os.link(name, path)  # atomic, and the first one wins
    except FileExistsError:
        pass
    finally:
        os.unlink(name)


def to_tensor(array: npt.NDArray[np.generic]) -> pb.Tensor:
    name = array.dtype.name
    if name not in DTYPES:
        raise CandidateError(f"an array of dtype {name} cannot travel; use {sorted(DTYPES)}")
    little = np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<"))
    return pb.Tensor(dtype=name, shape=array.shape, data=little.tobytes())


def from_tensor(tensor: pb.Tensor) -> Array:
    """Raises `ValueError` when dtype, shape and bytes do not fit each other."""
    if tensor.dtype not in DTYPES:
        raise ValueError(f"dtype {tensor.dtype!r} is not one of {sorted(DTYPES)}")
    flat = np.frombuffer(tensor.data, dtype=np.dtype(tensor.dtype).newbyteorder("<"))
    native: Array = flat.reshape(tuple(tensor.shape)).astype(tensor.dtype)
    return native


def _replay_request(workload: Workload, num_layers: int | None) -> pb.ReplayRequest:
    return pb.ReplayRequest(
        kind=workload.kind,
        requests=[
            pb.WorkloadRequest(
                prompt_token_ids=r.prompt_token_ids,
                output_token_ids=r.output_token_ids,
                arrival_s=r.arrival_s,
            )
            for r in workload.requests
        ],
        max_concurrency=workload.max_concurrency,
        num_layers=num_layers,
    )


def _swap_report(reply: pb.SwapReply) -> SwapReport:
    return SwapReport(
        reply.digest, reply.num_modules, reply.num_preempted, reply.load_s, reply.swap_s
    )


def _expert_load(sample: pb.StepSample) -> npt.NDArray[np.int64] | None:
    if not sample.HasField("expert_load"):
        return None
    return from_tensor(sample.expert_load).astype(np.int64, copy=False)


def _as_ours(error: grpc.RpcError, where: str) -> Exception:
    code, details = error.code(), error.details() or ""
    match code:
        case grpc.StatusCode.INVALID_ARGUMENT | grpc.StatusCode.FAILED_PRECONDITION:
            return CandidateError(details)
        case grpc.StatusCode.PERMISSION_DENIED:
            return PermissionError(details)
        case (
            grpc.StatusCode.UNAVAILABLE
            | grpc.StatusCode.DEADLINE_EXCEEDED
            | grpc.StatusCode.CANCELLED
        ):
            return EngineGone(f"{where}: {code.name.lower()} ({details})")
    return EngineFault(f"{where}: {code.name.lower()} ({details})")
