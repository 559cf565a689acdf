"""Any `Engine` behind gRPC on a unix socket that only its owner can open."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NoReturn

import grpc

from engines.engine import (
    CandidateError,
    Engine,
    EngineGone,
    ForwardPass,
    Portfolio,
    SwapReport,
)
from engines.remote import CHANNEL_OPTIONS, from_tensor, to_tensor
from profiler.reservoir import Workload, WorkloadKind, WorkloadRequest
from profiler.samples import StepSample
from protos import sidecar_engine_pb2 as pb
from protos.sidecar_engine_pb2_grpc import EngineServicer, add_EngineServicer_to_server

NUM_THREADS = 8  # `info` answers while a replay runs
MAX_PATH_BYTES = 107  # sun_path
MAX_DETAILS = 2000  # gRPC trailers are small


class Host:
    """Serves `engine` at `unix:/path` between `start` and `stop`. The engine stays the caller's.

    `start` replaces the socket of a dead process and raises `OSError` when a live one owns it.
    """

    def __init__(self, engine: Engine, address: str) -> None:
        self._engine = engine
        self._address = address
        self._server: grpc.Server | None = None

    def start(self) -> None:
        path = socket_path(self._address)
        _claim(path)
        server = grpc.server(_pool(), options=CHANNEL_OPTIONS)
        add_EngineServicer_to_server(_Servicer(self._engine), server)
        server.add_insecure_port(self._address)
        path.chmod(0o600)  # the folder is 0700, so nobody came in before
        server.start()
        self._server = server

    def stop(self, grace_s: float = 1.0) -> None:
        """Refuse new calls, wait `grace_s` for running ones, remove the socket. Twice is fine."""
        if self._server is None:
            return
        self._server.stop(grace_s).wait()
        self._server = None
        socket_path(self._address).unlink(missing_ok=True)


def socket_path(address: str) -> Path:
    """The file of a `unix:` address. Raises `ValueError` for any other kind or a path too long."""
    kind, _, name = address.partition(":")
    if kind != "unix" or not name.startswith("/"):
        raise ValueError(f"engine control at {address!r}: write unix:/absolute/path.sock")
    if len(os.fsencode(name)) > MAX_PATH_BYTES:
        raise ValueError(f"engine control at {address!r}: over {MAX_PATH_BYTES} bytes; shorten it")
    return Path(name)


def _pool() -> ThreadPoolExecutor:
    """With all threads running: an engine's fingerprint counts them, and they must not grow."""
    pool = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="engine-control")
    everyone = threading.Barrier(NUM_THREADS + 1)
    for _ in range(NUM_THREADS):
        pool.submit(everyone.wait)
    everyone.wait()
    return pool


def _claim(path: Path) -> None:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder = path.parent.stat()
    if folder.st_uid != os.getuid() or stat.S_IMODE(folder.st_mode) & 0o077:
        raise PermissionError(f"{path.parent} is open to others; chmod 700 it, or use another")
    if not path.exists():
        return
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink()  # its process is gone
            return
    raise OSError(f"{path} is in use by a running engine; stop it, or use another address")


class _Servicer(EngineServicer):
    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def Info(self, request: pb.InfoRequest, context: grpc.ServicerContext) -> pb.InfoReply:
        with _errors(context):
            info = self._engine.info()
        return pb.InfoReply(
            engine=info.engine,
            model=info.model,
            dtype=info.dtype,
            device=info.device,
            num_layers=info.num_layers,
            vocab_size=info.vocab_size,
            max_model_len=info.max_model_len,
            scope=info.scope,
            digest=info.digest,
            previous_digest=info.previous_digest,
            num_running=info.num_running,
            start_to_ready_s=info.start_to_ready_s,
            modules=[
                pb.ModuleInfo(path=m.path, cls=m.cls, num_weight_bytes=m.num_weight_bytes)
                for m in info.modules
            ],
        )

    def Source(self, request: pb.SourceRequest, context: grpc.ServicerContext) -> pb.SourceReply:
        with _errors(context):
            return pb.SourceReply(source=self._engine.source(request.target))

    def Swap(self, request: pb.SwapRequest, context: grpc.ServicerContext) -> pb.SwapReply:
        with _errors(context):
            portfolio = Portfolio(tuple(ForwardPass.from_source(s) for s in request.sources))
            return _swap_reply(self._engine.swap(portfolio, request.signature))

    def Revert(self, request: pb.RevertRequest, context: grpc.ServicerContext) -> pb.SwapReply:
        with _errors(context, grpc.StatusCode.FAILED_PRECONDITION):
            return _swap_reply(self._engine.revert())

    def Call(self, request: pb.CallRequest, context: grpc.ServicerContext) -> pb.CallReply:
        with _errors(context):
            outputs = self._engine.call(request.module, [from_tensor(t) for t in request.inputs])
            return pb.CallReply(outputs=[to_tensor(a) for a in outputs])

    def Probe(
        self, request: pb.ReplayRequest, context: grpc.ServicerContext
    ) -> Iterator[pb.ProbeReply]:
        with _errors(context):
            for logprobs in self._engine.probe(_workload(request), _num_layers(request)):
                yield pb.ProbeReply(logprobs=to_tensor(logprobs))

    def Measure(self, request: pb.ReplayRequest, context: grpc.ServicerContext) -> pb.MeasureReply:
        with _errors(context):
            replay = self._engine.measure(_workload(request), _num_layers(request))
        return pb.MeasureReply(
            outputs=[
                pb.RequestOutput(
                    logprobs=to_tensor(o.logprobs), top_token_ids=to_tensor(o.top_token_ids)
                )
                for o in replay.outputs
            ],
            num_steps=replay.num_steps,
            num_tokens=replay.num_tokens,
            num_orig_calls=replay.num_orig_calls,
            num_candidate_calls=replay.num_candidate_calls,
        )

    def Fingerprint(
        self, request: pb.FingerprintRequest, context: grpc.ServicerContext
    ) -> pb.FingerprintReply:
        with _errors(context):
            return pb.FingerprintReply(fingerprint=self._engine.fingerprint())

    def Drain(self, request: pb.DrainRequest, context: grpc.ServicerContext) -> pb.DrainReply:
        with _errors(context):
            return pb.DrainReply(drained=self._engine.drain(request.deadline_s))

    def Steps(self, request: pb.StepsRequest, context: grpc.ServicerContext) -> pb.StepsReply:
        with _errors(context):
            return pb.StepsReply(steps=[_step(s) for s in self._engine.steps()])


@contextlib.contextmanager
def _errors(
    context: grpc.ServicerContext,
    at_fault: grpc.StatusCode = grpc.StatusCode.INVALID_ARGUMENT,
) -> Iterator[None]:
    try:
        yield
    except CandidateError as e:
        _abort(context, at_fault, str(e))
    except PermissionError as e:
        _abort(context, grpc.StatusCode.PERMISSION_DENIED, str(e))
    except EngineGone as e:
        _abort(context, grpc.StatusCode.UNAVAILABLE, str(e))
    except (Exception, SystemExit) as e:  # a candidate can raise anything; a trace shows too much
        _abort(context, grpc.StatusCode.INTERNAL, f"{type(e).__name__}: {e}")


def _abort(context: grpc.ServicerContext, code: grpc.StatusCode, details: str) -> NoReturn:
    context.abort(code, details[:MAX_DETAILS])
    raise AssertionError("abort returned")


def _workload(request: pb.ReplayRequest) -> Workload:
    return Workload(
        WorkloadKind(request.kind),
        tuple(
            WorkloadRequest(tuple(r.prompt_token_ids), tuple(r.output_token_ids), r.arrival_s)
            for r in request.requests
        ),
        request.max_concurrency,
    )


def _num_layers(request: pb.ReplayRequest) -> int | None:
    return request.num_layers if request.HasField("num_layers") else None


def _swap_reply(report: SwapReport) -> pb.SwapReply:
    return pb.SwapReply(
        digest=report.digest,
        num_modules=report.num_modules,
        num_preempted=report.num_preempted,
        load_s=report.load_s,
        swap_s=report.swap_s,
    )


def _step(sample: StepSample) -> pb.StepSample:
    return pb.StepSample(
        num_running=sample.num_running,
        num_waiting=sample.num_waiting,
        num_tokens=sample.num_tokens,
        kv_cache_usage=sample.kv_cache_usage,
        expert_load=None if sample.expert_load is None else to_tensor(sample.expert_load),
        step_s=sample.step_s,
    )
