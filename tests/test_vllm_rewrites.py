"""Rewrites of vLLM's modules: where they fit, and that they compute the same. Real vLLM runs them
in tests/e2e/test_demo_vllm.py."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from compiler.agents.rewrites import ALL, REWRITES, Rewrite, idea
from compiler.agents.vllm_rewrites import (
    BLOCK,
    DENSE_BLOCK,
    EXPERTS,
    MLPS,
    NORM,
    VLLM_REWRITES,
)
from engines.embedded import model as embedded
from engines.engine import CandidateError
from engines.inside.forward import Forwards

# --- where they fit -------------------------------------------------------------------------------

VLLM_0_32 = {  # what of each class the rewrites look at
    "cls:RMSNorm": "ir.ops.fused_add_rms_norm.maybe_inplace(variance_size_override) has_weight",
    "cls:Qwen3MoeSparseMoeBlock": "self.experts(hidden_states) shared_expert enable_eplb",
    "cls:MoERunner": "routed_experts moe_config router.select_experts",
    "cls:RoutedExperts": "quant_method apply_router_weight_on_input",
    "cls:UnquantizedFusedMoEMethod": "self.moe_kernel.fused_experts",
    "cls:Qwen3MoeAttention": "self.qkv_proj(hidden_states) self.rotary_emb(positions, q, k)",
    "cls:Attention": "unified_kv_cache_update kv_sharing_target_layer_name",
    "cls:RotaryEmbedding": "is_neox_style",
    "cls:QKVParallelLinear": "class QKVParallelLinear(ColumnParallelLinear):",
    "cls:RowParallelLinear": "class RowParallelLinear(LinearBase):",
}


def bench(sources: Mapping[str, str]) -> Callable[[str], str]:
    def source(target: str) -> str:
        if target not in sources:
            raise CandidateError(f"no module matches {target}")
        return sources[target]

    return source


def embedded_source(target: str) -> str:
    cls = getattr(embedded, target.removeprefix("cls:"), None)
    if cls is None:
        raise CandidateError(f"no module matches {target}")
    return inspect.getsource(cls)


def test_a_mixture_of_experts_on_vllm_gets_the_rewrites_that_were_written_for_it() -> None:
    fitting = [r for r in (*VLLM_REWRITES, *REWRITES) if r.fits(bench(VLLM_0_32))]
    assert fitting[:3] == [NORM, EXPERTS, BLOCK]
    assert {r.cls for r in fitting} == {"RMSNorm", "Qwen3MoeSparseMoeBlock", "Qwen3MoeAttention"}


def test_a_dense_model_on_vllm_gets_the_rewrites_of_its_classes() -> None:
    dense = {
        "cls:RMSNorm": VLLM_0_32["cls:RMSNorm"],
        "cls:LlamaAttention": VLLM_0_32["cls:Qwen3MoeAttention"],
        "cls:Attention": VLLM_0_32["cls:Attention"],
        "cls:RotaryEmbedding": VLLM_0_32["cls:RotaryEmbedding"],
        "cls:LlamaMLP": "self.gate_up_proj(x)",
        "cls:SiluAndMul": "def forward_native(x):",
    }
    fitting = [r for r in VLLM_REWRITES if r.fits(bench(dense))]
    assert fitting == [NORM, DENSE_BLOCK, MLPS[0]]


@pytest.mark.parametrize("rewrite", VLLM_REWRITES, ids=lambda r: f"{r.name} {r.cls}")
def test_none_fits_the_embedded_engine(rewrite: Rewrite) -> None:
    assert not rewrite.fits(embedded_source)


@pytest.mark.parametrize("rewrite", REWRITES, ids=lambda r: r.name)
def test_the_embedded_engines_own_fit_it_still(rewrite: Rewrite) -> None:
    assert rewrite.fits(embedded_source)


@pytest.mark.parametrize("missing", ["cls:MoERunner", "cls:UnquantizedFusedMoEMethod"])
def test_another_vllm_is_left_alone(missing: str) -> None:
    other = {target: text for target, text in VLLM_0_32.items() if target != missing}
    assert not EXPERTS.fits(bench(other))


@pytest.mark.parametrize("rewrite", VLLM_REWRITES, ids=lambda r: f"{r.name} {r.cls}")
def test_every_setting_is_a_forward_pass_of_its_own(rewrite: Rewrite) -> None:
    passes = [idea(rewrite, knobs, ALL).forward_pass() for knobs in rewrite.settings()]
    assert len({p.digest for p in passes}) == len(passes)
    for one in passes:
        compile(one.source, "candidate", "exec")
        assert "$" not in one.source


# --- that they compute the same -------------------------------------------------------------------


class RMSNorm(embedded.RMSNorm):
    """With what vLLM's has besides."""

    variance_size_override: int | None = None
    has_weight = True

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        return super().forward(x, residual)


class LlamaMLP(embedded.LlamaMLP):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


@pytest.fixture(scope="module")
def kernels() -> Iterator[None]:
    """vLLM's, by name, in plain torch."""
    library: Any = torch.library.Library("_C", "DEF")  # type: ignore[no-untyped-call]
    library.define("rms_norm(Tensor(a!) out, Tensor input, Tensor? weight, float epsilon) -> ()")
    library.define(
        "fused_add_rms_norm(Tensor(a!) input, Tensor(b!) residual, Tensor? weight, float epsilon)"
        " -> ()"
    )
    library.impl("rms_norm", _rms_norm, "CPU")
    library.impl("fused_add_rms_norm", _fused_add_rms_norm, "CPU")
    yield
    library._destroy()


def _rms_norm(out: Tensor, x: Tensor, weight: Tensor, epsilon: float) -> None:
    assert x.is_contiguous()
    out.copy_(torch.nn.functional.rms_norm(x, x.shape[-1:], weight, epsilon))


def _fused_add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, epsilon: float) -> None:
    residual.add_(x)
    _rms_norm(x, residual, weight, epsilon)


def gap(model: nn.Module, rewrite: Rewrite, folder: Path, *inputs: Tensor) -> float:
    """Largest difference that the rewrite makes; infinite when `ORIG` answered for it."""
    torch.manual_seed(0)
    for weight in model.requires_grad_(False).parameters():
        torch.nn.init.normal_(weight, std=0.1)
    want = model(*(x.clone() for x in inputs))
    forwards = Forwards(nn.ModuleList([model]), folder)
    one = idea(rewrite, rewrite.first(), ALL).forward_pass()
    forwards.install(forwards.bind("ab", forwards.read([one])))
    got = model(*(x.clone() for x in inputs))
    if forwards.calls.orig:
        return float("inf")
    pairs = zip(got, want, strict=True)
    return max(float((a - b).abs().max()) for a, b in pairs)


@pytest.mark.usefixtures("kernels")
def test_the_norms_kernel_is_given_what_the_norm_is(tmp_path: Path) -> None:
    norm, heads = RMSNorm(16, 1e-6), torch.randn(3, 64)[:, :32].view(3, 2, 16)
    assert gap(norm, NORM, tmp_path, torch.randn(5, 16), torch.randn(5, 16)) < 1e-5
    assert gap(RMSNorm(16, 1e-6), NORM, tmp_path, heads) < 1e-5


@pytest.mark.usefixtures("kernels")
def test_a_norm_that_is_not_plain_stays_as_it_is(tmp_path: Path) -> None:
    norm = RMSNorm(16, 1e-6)
    norm.variance_size_override = 8
    assert gap(norm, NORM, tmp_path, torch.randn(5, 16)) == float("inf")


def test_without_the_kernel_stock_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.ops, "_C", SimpleNamespace())
    assert gap(RMSNorm(16, 1e-6), NORM, tmp_path, torch.randn(5, 16)) == float("inf")


def test_the_mlps_short_way_leads_to_the_same(tmp_path: Path) -> None:
    assert gap(LlamaMLP(32, 48), MLPS[0], tmp_path, torch.randn(5, 32)) == 0.0
