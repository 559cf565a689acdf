"""What any engine must satisfy. A new one earns its place by passing `check_engine`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import numpy.typing as npt

from engines.engine import (
    STOCK,
    CandidateError,
    Engine,
    ForwardPass,
    Guard,
    ModuleInfo,
    Portfolio,
    Replay,
    Scope,
    SwapReport,
    sign,
)
from profiler.reservoir import Workload, WorkloadKind, WorkloadRequest

RMS_NORM_REWRITE = """
TARGETS = {"cls:RMSNorm": "norm"}
def norm(self, x, residual=None):
    import torch.nn.functional as F
    if residual is None:
        return F.rms_norm(x, x.shape[-1:], self.weight, self.variance_epsilon)
    residual = x + residual
    return F.rms_norm(residual, x.shape[-1:], self.weight, self.variance_epsilon), residual
"""
DOUBLED_NORM = """
TARGETS = {"cls:RMSNorm": "norm"}
def norm(self, x, residual=None):
    out = ORIG(self, x, residual)
    return out * 2 if residual is None else (out[0] * 2, out[1])
"""
GUARDED_NORM = 'WHEN = {"num_tokens": (1, 4)}\n' + DOUBLED_NORM
NAN_NORM = DOUBLED_NORM.replace("* 2", "* float('nan')")
CUT_NORM = DOUBLED_NORM.replace("* 2", "[..., :3]")
BAD = {
    "import nothing_of_this_name\n" + DOUBLED_NORM: "nothing_of_this_name",
    DOUBLED_NORM.replace("cls:RMSNorm", "cls:NoSuchModule"): "NoSuchModule",
    "def prepare(module):\n    raise ValueError('not prepared')\n" + DOUBLED_NORM: "not prepared",
}
RAISES = (
    'TARGETS = {"cls:RMSNorm": "norm"}\ndef norm(self, x, residual=None):\n    raise KeyError(1)\n'
)


def check_engine(make: Callable[[], Engine], key: bytes, scope: Scope = Scope.TRIAL) -> None:
    """Run an idle engine with `RMSNorm` modules through the protocol; `make` gives a fresh stock
    one that takes `key` in `scope`. Raises `AssertionError`."""
    engine = make()
    try:
        check = _Check(engine, key, scope)
        check.is_stock_at_first()
        check.swaps_and_reverts()
        check.refuses_what_is_not_signed()
        check.refuses_bad_candidates()
        check.survives_faulty_candidates()
        check.leaves_other_batches_to_stock()
        check.counts_what_it_runs()
        assert engine.drain(5.0), "an idle engine drains"
    finally:
        engine.close()


class _Check:
    def __init__(self, engine: Engine, key: bytes, scope: Scope) -> None:
        self._engine, self._key, self._scope = engine, key, scope
        self._workload = _workload(engine.info().vocab_size)

    def is_stock_at_first(self) -> None:
        info = self._engine.info()
        assert info.digest == STOCK.digest
        assert info.previous_digest is None
        assert any(m.cls == "RMSNorm" for m in info.modules)
        assert "class RMSNorm" in self._engine.source("cls:RMSNorm")
        assert _raises(CandidateError, self._engine.revert), "nothing to revert to"

    def swaps_and_reverts(self) -> None:
        engine = self._engine
        before, state = engine.probe(self._workload), engine.fingerprint()
        report = self._swap(DOUBLED_NORM)
        assert engine.info().digest == report.digest != STOCK.digest
        assert engine.info().previous_digest == STOCK.digest
        assert not np.array_equal(engine.probe(self._workload)[0], before[0])
        assert engine.revert().digest == STOCK.digest
        assert all(map(np.array_equal, engine.probe(self._workload), before)), "bit-equal again"
        assert engine.fingerprint() == state, "a revert leaves nothing behind"

    def refuses_what_is_not_signed(self) -> None:
        change = _portfolio(DOUBLED_NORM)
        other = Scope.SERVE if self._scope is Scope.TRIAL else Scope.TRIAL
        wrong_key = sign(b"wrong", self._scope, change.digest)
        wrong_scope = sign(self._key, other, change.digest)
        for signature in ("", wrong_key, wrong_scope):
            assert _raises(PermissionError, partial(self._engine.swap, change, signature))
        assert self._engine.info().digest == STOCK.digest

    def refuses_bad_candidates(self) -> None:
        broken = ForwardPass("def norm(:", (("cls:RMSNorm", "norm"),), Guard(), "0" * 64)
        signature = sign(self._key, self._scope, Portfolio((broken,)).digest)
        assert _raises(CandidateError, lambda: self._engine.swap(Portfolio((broken,)), signature))
        for source, why in BAD.items():
            error = _raises(CandidateError, partial(self._swap, source))
            assert error, f"{why!r} must be refused"
            assert why in str(error), f"{error} does not say {why!r}"
            assert self._engine.info().digest == STOCK.digest

    def survives_faulty_candidates(self) -> None:
        """They raise, give a wrong shape or no numbers: an engine may try them and refuse, or
        install them and say so later."""
        before = self._engine.probe(self._workload)
        for source, why in ((RAISES, "KeyError"), (CUT_NORM, "Error"), (NAN_NORM, "finite")):
            error = _raises(CandidateError, partial(self._runs, source))
            assert error, f"a forward pass at fault must be told: {source}"
            assert why in str(error), f"{error} does not say {why!r}"
            if self._engine.info().digest != STOCK.digest:
                self._engine.revert()
            assert all(map(np.array_equal, self._engine.probe(self._workload), before))

    def _runs(self, source: str) -> None:
        self._swap(source)
        if any(np.isnan(table).any() for table in self._engine.probe(self._workload)):
            raise CandidateError("it gives numbers that are not finite")

    def leaves_other_batches_to_stock(self) -> None:
        info = self._engine.info()
        norm = next(m for m in info.modules if m.cls == "RMSNorm")
        batches = [_rows(num, norm, info.dtype) for num in (4, 5)]
        stock = [self._engine.call(norm.path, [x])[0] for x in batches]
        self._swap(GUARDED_NORM)
        small, large = (self._engine.call(norm.path, [x])[0] for x in batches)
        assert np.array_equal(small, stock[0] * 2), "within its guard it serves"
        assert np.array_equal(large, stock[1]), "outside of it stock does"
        self._engine.revert()
        assert _raises(CandidateError, lambda: self._engine.call("no.such.module", batches))

    def counts_what_it_runs(self) -> None:
        stock = self._engine.measure(self._workload)
        self._agrees(stock)
        assert stock.num_candidate_calls == 0
        self._swap(DOUBLED_NORM)
        changed = self._engine.measure(self._workload)
        assert changed.num_orig_calls == changed.num_candidate_calls > 0
        assert (changed.num_steps, changed.num_tokens) == (stock.num_steps, stock.num_tokens)
        self._engine.revert()

    def _agrees(self, replay: Replay) -> None:
        """`measure` and `probe` run the same steps."""
        probe = self._engine.probe(self._workload)
        for request, table, output in zip(
            self._workload.requests, probe, replay.outputs, strict=True
        ):
            rows = np.arange(len(request.output_token_ids))
            assert np.array_equal(table[rows, list(request.output_token_ids)], output.logprobs)
            assert np.array_equal(table.argmax(axis=-1), output.top_token_ids)

    def _swap(self, source: str) -> SwapReport:
        change = _portfolio(source)
        return self._engine.swap(change, sign(self._key, self._scope, change.digest))


def _portfolio(source: str) -> Portfolio:
    return Portfolio((ForwardPass.from_source(source),))


def _raises(kind: type[Exception], call: Callable[[], object]) -> Exception | None:
    try:
        call()
    except kind as e:
        return e
    return None


def _rows(num: int, module: ModuleInfo, dtype: str) -> npt.NDArray[np.float32]:
    """Input of a module that has one weight, [hidden_size]."""
    width = module.num_weight_bytes // {"bfloat16": 2, "float16": 2, "float64": 8}.get(dtype, 4)
    return np.random.default_rng(num).standard_normal((num, width), dtype=np.float32)


def _workload(vocab_size: int) -> Workload:
    rng = np.random.default_rng(0)

    def ids(num: int) -> tuple[int, ...]:
        return tuple(rng.integers(1, vocab_size, num).tolist())

    requests = tuple(WorkloadRequest(ids(5 + 7 * i), ids(3)) for i in range(4))
    return Workload(WorkloadKind.REAL, requests, max_concurrency=2)
