"""The stock forward: Llama-style dense and Qwen3-style mixture-of-experts decoders, plain and fair.

Class and attribute names, arguments and fused weights are vLLM's (see `engines.engine`). Hidden
states are [num_tokens, hidden_size]. This is the reference that every candidate must beat, so it is
written as one would write it for clarity *and* as fast as plain torch allows without tuning.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engines.inside.step import step


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The shape, as read from a Hugging Face `config.json`."""

    architecture: str  # Qwen3MoeForCausalLM | LlamaForCausalLM
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    rms_norm_eps: float
    rope_theta: float
    max_model_len: int
    tie_word_embeddings: bool
    attention_bias: bool = False
    num_experts: int = 0  # 0: dense
    num_experts_per_tok: int = 0
    moe_intermediate_size: int = 0
    norm_topk_prob: bool = False
    dense_layers: tuple[int, ...] = ()  # of a mixture of experts


class Linear(nn.Module):
    """Weight [out, in]. Returns (output, None), as vLLM's linear layers do."""

    def __init__(self, in_features: int, out_features: int, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_features, in_features))
        self.bias = nn.Parameter(torch.empty(out_features)) if bias else None

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        return F.linear(x, self.weight, self.bias), None


class QKVParallelLinear(Linear):
    """Rows: all queries, then all keys, then all values."""


class MergedColumnParallelLinear(Linear):
    """Rows: gate, then up."""


class RowParallelLinear(Linear): ...


class ReplicatedLinear(Linear): ...


class RMSNorm(nn.Module):
    """Root mean square over the last dimension, computed in float32 at least."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.variance_epsilon = eps

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        if residual is not None:
            x = residual = x + residual
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        variance = wide.pow(2).mean(-1, keepdim=True)
        out = self.weight * (wide * torch.rsqrt(variance + self.variance_epsilon)).to(x.dtype)
        return out if residual is None else (out, residual)


class SiluAndMul(nn.Module):
    """silu(left half) * right half of the last dimension."""

    def forward(self, x: Tensor) -> Tensor:
        gate, up = x.chunk(2, dim=-1)
        return F.silu(gate) * up


class RotaryEmbedding(nn.Module):
    """Neox-style rotation; cosines and sines are kept for every position."""

    cos_sin_cache: Tensor  # [max_model_len, head_dim]: cosines, then sines

    def __init__(self, head_dim: int, max_model_len: int, theta: float) -> None:
        super().__init__()
        self.head_size = head_dim
        exponent = torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim
        angles = torch.outer(torch.arange(max_model_len, dtype=torch.float64), theta**-exponent)
        cache = torch.cat((angles.cos(), angles.sin()), dim=-1)
        self.register_buffer("cos_sin_cache", cache, persistent=False)

    def forward(self, positions: Tensor, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """Query and key are flat: [num_tokens, heads * head_dim]."""
        cos, sin = self.cos_sin_cache[positions].unsqueeze(1).chunk(2, dim=-1)
        return self._rotate(query, cos, sin), self._rotate(key, cos, sin)

    def _rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        left, right = x.view(x.shape[0], -1, self.head_size).chunk(2, dim=-1)
        rotated = torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1)
        return rotated.view(x.shape)


class Attention(nn.Module):
    """Writes keys and values to the paged cache and attends over it, request by request."""

    def __init__(self, layer_name: str, config: ModelConfig) -> None:
        super().__init__()
        self.layer_name = layer_name
        self.num_heads = config.num_heads
        self.num_kv_heads = config.num_kv_heads
        self.head_size = config.head_dim
        self.scale = config.head_dim**-0.5

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        view = step()
        num_tokens = query.shape[0]
        keys, values = view.kv_cache(self.layer_name)
        keys.view(-1, self.num_kv_heads, self.head_size)[view.slot_mapping] = key.view(
            num_tokens, self.num_kv_heads, self.head_size
        )
        values.view(-1, self.num_kv_heads, self.head_size)[view.slot_mapping] = value.view(
            num_tokens, self.num_kv_heads, self.head_size
        )
        query = query.view(num_tokens, self.num_heads, self.head_size)
        if max(view.query_lens_list) == 1:
            return self._decode(query, keys, values)
        return self._by_request(query, keys, values)

    def _decode(self, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """One new token a request: a padded batch, [num_requests, heads, 1, longest]."""
        view = step()
        longest = max(view.seq_lens_list)
        tables = view.block_tables[:, : -(-longest // view.block_size)]
        k = keys[tables].flatten(1, 2)[:, :longest].transpose(1, 2)
        v = values[tables].flatten(1, 2)[:, :longest].transpose(1, 2)
        mask = None
        if min(view.seq_lens_list) < longest:
            steps = torch.arange(longest, device=query.device)
            mask = (steps < view.seq_lens.unsqueeze(1))[:, None, None, :]
        out = F.scaled_dot_product_attention(
            query.unsqueeze(2), k, v, attn_mask=mask, scale=self.scale, enable_gqa=True
        )
        return out.reshape(query.shape[0], -1)

    def _by_request(self, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        view = step()
        outs, start = [], 0
        for i, (new, total) in enumerate(
            zip(view.query_lens_list, view.seq_lens_list, strict=True)
        ):
            table = view.block_tables[i, : -(-total // view.block_size)]
            k = keys[table].flatten(0, 1)[:total].transpose(0, 1)
            v = values[table].flatten(0, 1)[:total].transpose(0, 1)
            q = query[start : start + new].transpose(0, 1)
            outs.append(self._attend(q, k, v).transpose(0, 1).reshape(new, -1))
            start += new
        return torch.cat(outs)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Causal, with the queries at the end of the keys; [heads, tokens, head_dim]."""
        new, total = q.shape[1], k.shape[1]
        mask = None
        if 1 < new < total:
            mask = torch.ones(new, total, dtype=torch.bool, device=q.device).tril(total - new)
        return F.scaled_dot_product_attention(
            q[None],
            k[None],
            v[None],
            attn_mask=mask,
            is_causal=new == total > 1,
            scale=self.scale,
            enable_gqa=True,
        )[0]


class _DecoderAttention(nn.Module):
    """Projections, per-head norms where the model has them, rotation, attention."""

    def __init__(self, layer_name: str, config: ModelConfig, head_norms: bool) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads = config.num_heads, config.num_kv_heads
        self.head_dim = config.head_dim
        self.q_size = self.num_heads * self.head_dim
        self.kv_size = self.num_kv_heads * self.head_dim
        self.scaling = self.head_dim**-0.5
        self.qkv_proj = QKVParallelLinear(
            config.hidden_size, self.q_size + 2 * self.kv_size, config.attention_bias
        )
        self.o_proj = RowParallelLinear(self.q_size, config.hidden_size, config.attention_bias)
        self.rotary_emb = RotaryEmbedding(self.head_dim, config.max_model_len, config.rope_theta)
        self.attn = Attention(f"{layer_name}.attn", config)
        if head_norms:
            self.q_norm = RMSNorm(self.head_dim, config.rms_norm_eps)
            self.k_norm = RMSNorm(self.head_dim, config.rms_norm_eps)


class LlamaAttention(_DecoderAttention):
    def __init__(self, layer_name: str, config: ModelConfig) -> None:
        super().__init__(layer_name, config, head_norms=False)

    def forward(self, positions: Tensor, hidden_states: Tensor) -> Tensor:
        qkv, _ = self.qkv_proj(hidden_states)
        q, k, v = qkv.split((self.q_size, self.kv_size, self.kv_size), dim=-1)
        q, k = self.rotary_emb(positions, q, k)
        out, _ = self.o_proj(self.attn(q, k, v))
        return out  # type: ignore[no-any-return]


class Qwen3MoeAttention(_DecoderAttention):
    def __init__(self, layer_name: str, config: ModelConfig) -> None:
        super().__init__(layer_name, config, head_norms=True)

    def forward(self, positions: Tensor, hidden_states: Tensor) -> Tensor:
        qkv, _ = self.qkv_proj(hidden_states)
        q, k, v = qkv.split((self.q_size, self.kv_size, self.kv_size), dim=-1)
        q = self.q_norm(q.reshape(-1, self.num_heads, self.head_dim)).view(q.shape)
        k = self.k_norm(k.reshape(-1, self.num_kv_heads, self.head_dim)).view(k.shape)
        q, k = self.rotary_emb(positions, q, k)
        out, _ = self.o_proj(self.attn(q, k, v))
        return out  # type: ignore[no-any-return]


class _GatedMLP(nn.Module):
    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_up_proj = MergedColumnParallelLinear(hidden_size, 2 * intermediate_size)
        self.down_proj = RowParallelLinear(intermediate_size, hidden_size)
        self.act_fn = SiluAndMul()

    def forward(self, x: Tensor) -> Tensor:
        gate_up, _ = self.gate_up_proj(x)
        out, _ = self.down_proj(self.act_fn(gate_up))
        return out  # type: ignore[no-any-return]


class LlamaMLP(_GatedMLP): ...


class Qwen3MoeMLP(_GatedMLP): ...


class FusedMoE(nn.Module):
    """The experts: gate and up rows fused in `w13_weight`, all experts in one tensor each."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        size, hidden, num = config.moe_intermediate_size, config.hidden_size, config.num_experts
        self.num_experts, self.top_k = num, config.num_experts_per_tok
        self.renormalize = config.norm_topk_prob
        self.w13_weight = nn.Parameter(torch.empty(num, 2 * size, hidden))
        self.w2_weight = nn.Parameter(torch.empty(num, hidden, size))

    def forward(self, hidden_states: Tensor, router_logits: Tensor) -> Tensor:
        """Loops over the experts that got tokens."""
        weights, chosen = self.route(router_logits)
        out = torch.zeros_like(hidden_states)
        for expert in torch.unique(chosen).tolist():
            token, slot = torch.where(chosen == expert)
            gate, up = F.linear(hidden_states[token], self.w13_weight[expert]).chunk(2, dim=-1)
            part = F.linear(F.silu(gate) * up, self.w2_weight[expert])
            out.index_add_(0, token, part * weights[token, slot, None])
        return out

    def route(self, router_logits: Tensor) -> tuple[Tensor, Tensor]:
        """(weights, expert ids), each [num_tokens, top_k]."""
        wide = torch.promote_types(router_logits.dtype, torch.float32)
        weights, chosen = router_logits.softmax(-1, dtype=wide).topk(self.top_k, dim=-1)
        if self.renormalize:
            weights = weights / weights.sum(-1, keepdim=True)
        return weights.to(router_logits.dtype), chosen


class Qwen3MoeSparseMoeBlock(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate = ReplicatedLinear(config.hidden_size, config.num_experts)
        self.experts = FusedMoE(config)

    def forward(self, hidden_states: Tensor) -> Tensor:
        router_logits, _ = self.gate(hidden_states)
        return self.experts(hidden_states, router_logits)  # type: ignore[no-any-return]


class _DecoderLayer(nn.Module):
    self_attn: nn.Module
    mlp: nn.Module

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(
        self, positions: Tensor, hidden_states: Tensor, residual: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        if residual is None:
            residual = hidden_states
            hidden_states = self.input_layernorm(hidden_states)
        else:
            hidden_states, residual = self.input_layernorm(hidden_states, residual)
        hidden_states = self.self_attn(positions, hidden_states)
        hidden_states, residual = self.post_attention_layernorm(hidden_states, residual)
        return self.mlp(hidden_states), residual


class LlamaDecoderLayer(_DecoderLayer):
    def __init__(self, index: int, config: ModelConfig) -> None:
        super().__init__(config)
        self.self_attn = LlamaAttention(f"model.layers.{index}.self_attn", config)
        self.mlp = LlamaMLP(config.hidden_size, config.intermediate_size)


class Qwen3MoeDecoderLayer(_DecoderLayer):
    def __init__(self, index: int, config: ModelConfig) -> None:
        super().__init__(config)
        self.self_attn = Qwen3MoeAttention(f"model.layers.{index}.self_attn", config)
        self.mlp = (
            Qwen3MoeMLP(config.hidden_size, config.intermediate_size)
            if index in config.dense_layers
            else Qwen3MoeSparseMoeBlock(config)
        )


class _DecoderModel(nn.Module):
    """`layer_limit` runs the first layers only, with the final norm behind them."""

    layer: type[LlamaDecoderLayer] | type[Qwen3MoeDecoderLayer]

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(self.layer(i, config) for i in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.layer_limit = config.num_layers

    def forward(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        hidden_states, residual = self.embed_tokens(input_ids), None
        for layer in self.layers[: self.layer_limit]:
            hidden_states, residual = layer(positions, hidden_states, residual)
        hidden_states, _ = self.norm(hidden_states, residual)
        return hidden_states  # type: ignore[no-any-return]


class LlamaModel(_DecoderModel):
    layer = LlamaDecoderLayer


class Qwen3MoeModel(_DecoderModel):
    layer = Qwen3MoeDecoderLayer


class CausalLM(nn.Module):
    inner: type[LlamaModel] | type[Qwen3MoeModel]

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.model = self.inner(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        return self.model(input_ids, positions)  # type: ignore[no-any-return]

    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        """[num_rows, vocab_size], for the rows that sample."""
        return self.lm_head(hidden_states)  # type: ignore[no-any-return]


class LlamaForCausalLM(CausalLM):
    inner = LlamaModel


class Qwen3MoeForCausalLM(CausalLM):
    inner = Qwen3MoeModel


ARCHITECTURES: dict[str, type[CausalLM]] = {
    c.__name__: c for c in (LlamaForCausalLM, Qwen3MoeForCausalLM)
}
