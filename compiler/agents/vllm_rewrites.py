"""Known ways to write vLLM's own modules faster, where it runs eagerly on a CPU.

There a step of a small model is mostly Python and small kernels. Its wheel for the CPU holds
kernels that its layers do not call on that platform, and layers that do much beside what a plain
model needs. Each rewrite goes the short way where `prepare` finds that nothing is left out by it,
and calls `ORIG` elsewhere. They say by `needs` which vLLM they were written for (0.32).
"""

from __future__ import annotations

from compiler.agents.rewrites import ALL, Knobs, Rewrite, filled

# --- norms ----------------------------------------------------------------------------------------

_NORM = """
import torch


def prepare(module):
    plain = module.variance_size_override is None and module.has_weight
    module.is_plain_$tag = plain and hasattr(torch.ops._C, "fused_add_rms_norm")


def forward(self, x, residual=None):
    if not self.is_plain_$tag:
        return ORIG(self, x, residual)
    if residual is None:
        x = x.contiguous()
        out = torch.empty_like(x)
        torch.ops._C.rms_norm(out, x, self.weight, self.variance_epsilon)
        return out
    torch.ops._C.fused_add_rms_norm(x, residual, self.weight, self.variance_epsilon)
    return x, residual
"""
NORM = Rewrite(
    "norm by vLLM's kernel",
    "RMSNorm",
    {},
    lambda knobs: _NORM,
    (ALL,),
    {"cls:RMSNorm": ("ir.ops.fused_add_rms_norm", "variance_size_override", "has_weight")},
)

# --- linear layers --------------------------------------------------------------------------------

_LINEAR = '''
def _linear(layer):
    """x to x @ weight: on a CPU the packed product at once, else through the layer."""
    product = getattr(layer, "cpu_linear", None)
    is_whole = getattr(layer, "tp_size", 1) == 1 and getattr(layer, "out_dtype", None) is None
    if product is None or layer.bias is not None or not is_whole:
        return lambda x: layer(x)[0]
    return lambda x: product(x, layer.weight, None)
'''
_LINEARS = {"layer": "lambda x, layer={0}: layer(x)[0]", "packed": "_linear({0})"}

_MLP = """
import torch.nn.functional as F


def prepare(module):
    is_plain = getattr(module, "expert_gate", None) is None
    both, down = _linear(module.gate_up_proj), _linear(module.down_proj)
    module.parts_$tag = (both, down) if is_plain else None


def forward(self, x):
    if self.parts_$tag is None:
        return ORIG(self, x)
    both, down = self.parts_$tag
    gate, up = both(x).chunk(2, dim=-1)
    return down(F.silu(gate).mul_(up))
"""


def _mlp(cls: str) -> Rewrite:
    return Rewrite(
        "gated MLP the short way",
        cls,
        {},
        lambda knobs: _MLP + _LINEAR,
        (ALL,),
        {f"cls:{cls}": ("self.gate_up_proj(x)",), "cls:SiluAndMul": ("forward_native",)},
    )


# --- mixture of experts ---------------------------------------------------------------------------

_EXPERTS = '''
import torch


def prepare(module):
    """What the kernel is called with; None where the layers around it do more than choose."""
    runner, router = module.experts, module.experts.router
    layer = runner.routed_experts
    kernel = getattr(layer.quant_method, "moe_kernel", None)
    experts = getattr(kernel, "fused_experts", None)
    config = runner.moe_config
    is_plain = (
        type(router).__name__ == "CPURouter"
        and type(experts).__name__.endswith("CPUUnquantizedExperts")
        and not experts._use_zentorch
        and experts.w1_bias is None
        and experts.w2_bias is None
        and router.scoring_func == "softmax"
        and router.custom_routing_function is None
        and router.e_score_correction_bias is None
        and not router.use_grouped_topk
        and router.routed_scaling_factor == 1.0
        and runner.routed_scaling_factor == 1.0
        and not module.enable_eplb
        and module.shared_expert is None
        and not module.is_sequence_parallel
        and config.tp_size == config.ep_size == config.dp_size == config.pcp_size == 1
        and not layer.apply_router_weight_on_input
    )
    weights = (layer.w13_weight, layer.w2_weight) if is_plain else None
    module.weights_$tag = weights
    if is_plain:
        module.gate_$tag = $gate
        module.kernel_$tag = layer.activation.value, experts.isa


def forward(self, hidden_states):
    if self.weights_$tag is None:
        return ORIG(self, hidden_states)
    router = self.experts.router
    logits = self.gate_$tag(hidden_states)
    $route
    (w13, w2), (activation, isa) = self.weights_$tag, self.kernel_$tag
    out = torch.empty_like(hidden_states)
    torch.ops._C.cpu_fused_moe(
        out, hidden_states, w13, w2, None, None, weights, chosen, False, activation, isa
    )
    return out
'''
_ROUTES = {
    "layer": """weights, chosen = router.select_experts(
        hidden_states=hidden_states, router_logits=logits, topk_indices_dtype=torch.int32
    )""",
    "short": """weights, chosen = logits.topk(router.top_k, dim=-1, sorted=False)
    if router.renormalize:
        weights = weights.softmax(-1, dtype=torch.float32)
    else:
        weights = (weights - logits.logsumexp(-1, keepdim=True)).exp().float()
    chosen = chosen.to(torch.int32)
    if router.capture_fn is not None:  # whoever counts experts goes on counting
        router.capture_fn(chosen)""",
}


def _experts(knobs: Knobs) -> str:
    gate = _LINEARS[knobs["gate"]].format("module.gate")
    return filled(_EXPERTS + _LINEAR, {"gate": gate, "route": _ROUTES[knobs["routing"]]})


EXPERTS = Rewrite(
    "experts the short way",
    "Qwen3MoeSparseMoeBlock",
    {"routing": ("layer", "short"), "gate": ("packed", "layer")},
    _experts,
    (ALL,),
    {
        "cls:Qwen3MoeSparseMoeBlock": ("self.experts(", "shared_expert", "enable_eplb"),
        "cls:MoERunner": ("routed_experts", "moe_config", "select_experts"),
        "cls:RoutedExperts": ("quant_method", "apply_router_weight_on_input"),
        "cls:UnquantizedFusedMoEMethod": ("moe_kernel.fused_experts",),
    },
)

# --- attention ------------------------------------------------------------------------------------

_BLOCK = """
import torch
from vllm.model_executor.layers.attention import attention as vllm_attention


def prepare(module):
    rotary, attn = module.rotary_emb, module.attn
    is_plain = (
        type(rotary).__name__ == "RotaryEmbedding"
        and rotary.rotary_dim == module.head_dim
        and hasattr(torch.ops._C, "rms_norm")
        and attn.query_quant is None
        and attn.kv_sharing_target_layer_name is None
        and not attn.attn_backend.forward_includes_kv_cache_update
        and getattr(module, "dual_chunk_attention_config", None) is None
    )
    module.is_plain_$tag = is_plain
    if is_plain:
        module.angles_$tag = rotary.cos_sin_cache.to(module.qkv_proj.params_dtype)
        module.qkv_$tag, module.out_$tag = $qkv, $out


def forward(self, positions, hidden_states):
    if not self.is_plain_$tag:
        return ORIG(self, positions, hidden_states)
    qkv, size = self.qkv_$tag(hidden_states), self.head_dim
    q, k, v = qkv.split((self.q_size, self.kv_size, self.kv_size), dim=-1)
    $norms
    torch.ops._C.rotary_embedding(
        positions, q, k, size, self.angles_$tag, self.rotary_emb.is_neox_style
    )
    $attend
    return self.out_$tag(attended)


def _normed(norm, x, size):
    heads = x.reshape(-1, size)
    out = torch.empty_like(heads)
    torch.ops._C.rms_norm(out, heads, norm.weight, norm.variance_epsilon)
    return out.view(x.shape)
"""
_HEAD_NORMS = "q, k = _normed(self.q_norm, q, size), _normed(self.k_norm, k, size)"
_ATTENDS = {
    "direct": """attn, num = self.attn, q.shape[0]
    q, k = q.view(num, -1, size), k.view(num, -1, size)
    v, attended = v.view(num, -1, size), q.new_empty(q.shape)
    vllm_attention.unified_kv_cache_update(k, v, attn.layer_name)
    vllm_attention.unified_attention_with_output(q, k, v, attended, attn.layer_name)
    attended = attended.view(num, -1)""",
    "layer": "attended = self.attn(q, k, v)",
}


def _block(cls: str, norms: str) -> Rewrite:
    def body(knobs: Knobs) -> str:
        linear = _LINEARS[knobs["linear"]]
        words = {
            "qkv": linear.format("module.qkv_proj"),
            "out": linear.format("module.o_proj"),
            "norms": norms,
            "attend": _ATTENDS[knobs["attention"]],
        }
        return filled(_BLOCK + _LINEAR, words)

    return Rewrite(
        "attention block the short way",
        cls,
        {"attention": ("direct", "layer"), "linear": ("packed", "layer")},
        body,
        (ALL,),
        {
            f"cls:{cls}": ("self.qkv_proj(", "self.rotary_emb(positions, q, k)"),
            "cls:Attention": ("unified_kv_cache_update", "kv_sharing_target_layer_name"),
            "cls:RotaryEmbedding": ("is_neox_style",),
        },
    )


BLOCK = _block("Qwen3MoeAttention", _HEAD_NORMS)
DENSE_BLOCK = _block("LlamaAttention", norms="")
MLPS = _mlp("LlamaMLP"), _mlp("Qwen3MoeMLP")

VLLM_REWRITES = (NORM, EXPERTS, BLOCK, DENSE_BLOCK, *MLPS)
