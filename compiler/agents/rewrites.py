"""Known ways to write a module faster, as text with knobs. Nothing here runs what it writes.

A `Rewrite` is one idea for one module class. Each setting of its knobs is another forward pass;
which of them wins depends on the model, the machine and the batch, so the search measures.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from string import Template

from engines.engine import CandidateError, ForwardPass, Guard

Knobs = Mapping[str, str]

DECODE, PREFILL, ALL = Guard(1, 16), Guard(17), Guard()  # by tokens of a step


@dataclass(frozen=True, slots=True, eq=False)
class Rewrite:
    """`knobs` names what can be turned; the first value of each is the one to try first."""

    name: str
    cls: str  # module class whose forward it replaces
    knobs: Mapping[str, tuple[str, ...]]
    body: Callable[[Knobs], str]  # `prepare` and a function `forward`; $tag is unique to the file
    guards: tuple[Guard, ...]  # the batches to try it on first
    needs: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # see `fits`

    def fits(self, source: Callable[[str], str]) -> bool:
        """Whether the engine's modules are those that it was written for: each target of `needs`
        is there, and its class says all those words. `source` is the bench's."""
        targets = {f"cls:{self.cls}": (), **self.needs}
        try:
            return all(
                all(word in text for word in words)
                for text, words in ((source(target), words) for target, words in targets.items())
            )
        except CandidateError:
            return False

    def settings(self) -> Iterator[Knobs]:
        """Every setting, the first choices first."""
        for values in itertools.product(*self.knobs.values()):
            yield dict(zip(self.knobs, values, strict=True))

    def first(self) -> Knobs:
        return next(self.settings())


@dataclass(frozen=True, slots=True)
class Idea:
    """One rewrite, set, for some batches: a single forward pass to try."""

    rewrite: Rewrite
    knobs: tuple[tuple[str, str], ...]
    guard: Guard

    @property
    def slot(self) -> tuple[str, Guard]:
        """One winner a slot goes into a portfolio."""
        return self.rewrite.cls, self.guard

    @property
    def summary(self) -> str:
        said = ", ".join(f"{name} {value}" for name, value in self.knobs)
        return f"{self.rewrite.name} {batches(self.guard)}{': ' if said else ''}{said}"

    def forward_pass(self) -> ForwardPass:
        return ForwardPass.from_source(self.source())

    def source(self) -> str:
        low, high = self.guard.min_tokens, self.guard.max_tokens
        when = "" if self.guard == ALL else f'WHEN = {{"num_tokens": ({low}, {high})}}\n'
        words = (self.rewrite.name, *(value for _, value in self.knobs), str(low), str(high))
        tag = re.sub(r"\W+", "_", "_".join(words))
        body = Template(self.rewrite.body(dict(self.knobs))).substitute(tag=tag)
        return f'TARGETS = {{"cls:{self.rewrite.cls}": "forward"}}\n{when}\n{body.strip()}\n'


def idea(rewrite: Rewrite, knobs: Knobs, guard: Guard) -> Idea:
    return Idea(rewrite, tuple(knobs.items()), guard)


def batches(guard: Guard) -> str:
    """In words: which steps."""
    if guard == ALL:
        return "for all batches"
    if guard.max_tokens == ALL.max_tokens:
        return f"from {guard.min_tokens} tokens"
    return f"up to {guard.max_tokens} tokens"


# --- norms ----------------------------------------------------------------------------------------

_NORM_BY_KERNEL = """
import torch.nn.functional as F


def forward(self, x, residual=None):
    if residual is None:
        return F.rms_norm(x, (x.shape[-1],), self.weight, self.variance_epsilon)
    $add
    return F.rms_norm(residual, (x.shape[-1],), self.weight, self.variance_epsilon), residual
"""
_NORM_BY_MOMENT = """
import torch


def prepare(module):
    size = module.weight.shape[0]
    module.scaled_$tag = module.weight * size**0.5
    module.floor_$tag = size * module.variance_epsilon


def forward(self, x, residual=None):
    if residual is None:
        return _norm(self, x)
    $add
    return _norm(self, residual), residual


def _norm(self, x):
    length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return torch.mul(x, self.scaled_$tag).mul_(length.square_().add_(self.floor_$tag).rsqrt_())
"""


def _norm(knobs: Knobs) -> str:
    body = _NORM_BY_KERNEL if knobs["norm"] == "kernel" else _NORM_BY_MOMENT
    in_place = knobs["residual"] == "in-place"
    return body.replace("$add", "residual.add_(x)" if in_place else "residual = x + residual")


NORM = Rewrite(
    "norm with residual",
    "RMSNorm",
    {"norm": ("moment", "kernel"), "residual": ("in-place", "new")},
    _norm,
    (ALL,),
)

# --- mixture of experts ---------------------------------------------------------------------------

_ROUTE = """
def _route(self, hidden_states):
    experts = self.experts
    logits, _ = self.gate(hidden_states)
    wide = torch.promote_types(logits.dtype, torch.float32)
    if experts.renormalize:  # a softmax over all, renormalised, is a softmax over the chosen
        weights, chosen = logits.topk(experts.top_k, dim=-1)
        weights = weights.softmax(-1, dtype=wide)
    else:
        weights, chosen = logits.softmax(-1, dtype=wide).topk(experts.top_k, dim=-1)
    return weights.to(hidden_states.dtype), chosen
"""
_MOE_DENSE = """
import torch
import torch.nn.functional as F


def prepare(module):
    w13, w2 = module.experts.w13_weight, module.experts.w2_weight
    num, both, hidden = w13.shape
    gate, up = w13.split(both // 2, dim=1)
    rows = torch.cat((gate.reshape(-1, hidden), up.reshape(-1, hidden)))
    module.w13_$tag = $pack13
    module.w2_$tag = $pack2
    module.num_$tag = num


def forward(self, hidden_states):
    weights, chosen = _route(self, hidden_states)
    num_tokens, num = hidden_states.shape[0], self.num_$tag
    gate, up = $times13.chunk(2, dim=-1)
    act = F.silu(gate).mul_(up)
    shares = hidden_states.new_zeros(num_tokens, num).scatter_(1, chosen, weights)
    act.view(num_tokens, num, -1).mul_(shares.unsqueeze(-1))
    return $times2
"""
_MOE_GROUPED = """
import torch
import torch.nn.functional as F


def prepare(module):
    w13, w2 = module.experts.w13_weight, module.experts.w2_weight
    module.w13_$tag = list($pack13)
    module.w2_$tag = list($pack2)


def forward(self, hidden_states):
    weights, chosen = _route(self, hidden_states)
    experts = chosen.flatten()
    order = experts.argsort()
    counts = torch.bincount(experts, minlength=len(self.w13_$tag)).tolist()
    token = order // chosen.shape[1]
    rows = hidden_states.index_select(0, token)
    out = torch.empty_like(rows)
    start = 0
    for count, w13, w2 in zip(counts, self.w13_$tag, self.w2_$tag):
        if count:
            part = rows[start : start + count]
            gate, up = torch.mm(part, w13).chunk(2, dim=-1)
            torch.mm(F.silu(gate).mul_(up), w2, out=out[start : start + count])
            start += count
    $combine
"""
_MOE_LOOP = """
import torch
import torch.nn.functional as F


def prepare(module):
    w13, w2 = module.experts.w13_weight, module.experts.w2_weight
    module.w13_$tag = list($pack13)
    module.w2_$tag = list($pack2)


def forward(self, hidden_states):
    weights, chosen = _route(self, hidden_states)
    experts, weights = chosen.flatten(), weights.flatten()
    order = experts.argsort()
    counts = torch.bincount(experts, minlength=len(self.w13_$tag)).tolist()
    out, start = torch.zeros_like(hidden_states), 0
    for expert, count in enumerate(counts):
        if count:
            picked = order[start : start + count]
            token = picked // chosen.shape[1]
            gate, up = torch.mm(hidden_states.index_select(0, token), self.w13_$tag[expert]).chunk(
                2, dim=-1
            )
            part = torch.mm(F.silu(gate).mul_(up), self.w2_$tag[expert])
            out.index_add_(0, token, part.mul_(weights[picked].unsqueeze(-1)))
            start += count
    return out
"""
_MOE_GATHER = """
import torch
import torch.nn.functional as F


def prepare(module):
    w13, w2 = module.experts.w13_weight, module.experts.w2_weight
    module.w13_$tag = $pack13
    module.w2_$tag = $pack2


def forward(self, hidden_states):
    weights, chosen = _route(self, hidden_states)
    experts, (num_tokens, top_k) = chosen.flatten(), chosen.shape
    rows = hidden_states.repeat_interleave(top_k, dim=0).unsqueeze(1)
    gate, up = torch.bmm(rows, self.w13_$tag[experts]).chunk(2, dim=-1)
    act = F.silu(gate).mul_(up)
    parts = torch.bmm(act, self.w2_$tag[experts]).view(num_tokens, top_k, -1)
    return torch.bmm(weights.unsqueeze(1), parts).squeeze(1)
"""
_COMBINE = {
    "add": """out.mul_(weights.flatten()[order].unsqueeze(-1))
    return torch.zeros_like(hidden_states).index_add_(0, token, out)""",
    "unsort": """back = torch.empty_like(order)
    back[order] = torch.arange(order.shape[0], device=order.device)
    parts = out.index_select(0, back).view(*chosen.shape, -1)
    return torch.bmm(weights.unsqueeze(1), parts).squeeze(1)""",
}


def _dense(knobs: Knobs) -> str:
    words = {
        "pack13": "rows.t().contiguous()",
        "pack2": "w2.transpose(1, 2).reshape(-1, hidden)",
        "times13": "torch.mm(hidden_states, self.w13_$tag)",
        "times2": "torch.mm(act, self.w2_$tag)",
    }
    if knobs["packing"] == "as-stored":
        words = {
            "pack13": "rows",
            "pack2": words["pack2"] + ".t().contiguous()",
            "times13": "F.linear(hidden_states, self.w13_$tag)",
            "times2": "F.linear(act, self.w2_$tag)",
        }
    return filled(_MOE_DENSE + "\n" + _ROUTE, words)


def _sparse(template: str) -> Callable[[Knobs], str]:
    def body(knobs: Knobs) -> str:
        turned = "{}.transpose(1, 2)"
        if knobs["packing"] == "transposed":
            turned += ".contiguous()"
        words = {"pack13": turned.format("w13"), "pack2": turned.format("w2")}
        words["combine"] = _COMBINE[knobs.get("combine", "add")]
        return filled(template + "\n" + _ROUTE, words)

    return body


def filled(template: str, words: Mapping[str, str]) -> str:
    return Template(template).safe_substitute(words)


_PACKING = ("transposed", "as-stored")
_BLOCK = "Qwen3MoeSparseMoeBlock"
_STACKED = {"cls:FusedMoE": ("w13_weight", "top_k", "renormalize")}  # not packed by a kernel

GROUPED = Rewrite(
    "experts by sorted tokens",
    _BLOCK,
    {"packing": _PACKING, "combine": ("add", "unsort")},
    _sparse(_MOE_GROUPED),
    (PREFILL, DECODE),
    _STACKED,
)
DENSE = Rewrite("all experts at once", _BLOCK, {"packing": _PACKING}, _dense, (DECODE,), _STACKED)
LOOP = Rewrite(
    "active experts in a loop",
    _BLOCK,
    {"packing": _PACKING},
    _sparse(_MOE_LOOP),
    (PREFILL,),
    _STACKED,
)
GATHER = Rewrite(
    "weights gathered by token",
    _BLOCK,
    {"packing": _PACKING},
    _sparse(_MOE_GATHER),
    (DECODE,),
    _STACKED,
)

# --- attention ------------------------------------------------------------------------------------

_ATTENTION = """
import torch
import torch.nn.functional as F

from engines.inside.step import step

_seen = [None, None]  # the last step and what its layers share


def forward(self, query, key, value):
    view = step()
    num_tokens, heads, size = query.shape[0], self.num_kv_heads, self.head_size
    keys, values = view.kv_cache(self.layer_name)
    key, value = key.view(num_tokens, heads, size), value.view(num_tokens, heads, size)
    keys.view(-1, heads, size).index_copy_(0, view.slot_mapping, key)
    values.view(-1, heads, size).index_copy_(0, view.slot_mapping, value)
    query = query.view(num_tokens, self.num_heads, size)
    rows, requests, $plan = _shared(view, query)
    if requests is not None and len(requests) == view.num_requests:
        return _decode(self, query, keys, values, $plan).view(num_tokens, -1)
    out = torch.empty_like(query)
    if requests is not None:
        out[rows] = _decode(self, query[rows], keys, values, $plan)
    start = 0
    for i, (new, total) in enumerate(zip(view.query_lens_list, view.seq_lens_list)):
        if new > 1:
            k, v = key[start : start + new], value[start : start + new]
            if new < total:
                table = view.block_tables[i, : -(-total // view.block_size)]
                k = keys.index_select(0, table).view(-1, heads, size)[:total]
                v = values.index_select(0, table).view(-1, heads, size)[:total]
            out[start : start + new] = _prefill(self, query[start : start + new], k, v)
        start += new
    return out.view(num_tokens, -1)


def _shared(view, query):
    if _seen[0] is not view:
        _seen[:] = view, _plan(view, query)
    return _seen[1]


def _plan(view, query):
    requests = [i for i, new in enumerate(view.query_lens_list) if new == 1]
    if not requests:
        return None, None, None, None
    longest = max(view.seq_lens_list[i] for i in requests)
    tables, lens = view.block_tables[:, : -(-longest // view.block_size)], view.seq_lens
    rows = view.query_start_loc[:-1]
    if len(requests) < view.num_requests:
        picked = torch.tensor(requests, device=lens.device)
        tables, lens, rows = tables[picked], lens[picked], rows[picked].long()
    steps = torch.arange(tables.shape[1] * view.block_size, device=lens.device)
    beyond = (steps >= lens.unsqueeze(1))[:, None, None, :]
    mask = torch.zeros(beyond.shape, dtype=query.dtype, device=query.device)
    return rows, requests, tables.flatten(), mask.masked_fill_(beyond, float("-inf"))


def _decode(self, query, keys, values, tables, mask):
    num, heads, size = query.shape[0], self.num_kv_heads, self.head_size
    k = keys.index_select(0, tables).view(num, -1, heads, size).transpose(1, 2)
    v = values.index_select(0, tables).view(num, -1, heads, size).transpose(1, 2)
    $decode


def _prefill(self, query, k, v):
    new, total = query.shape[0], k.shape[0]
    q, k, v = query.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1)
    $prefill
"""
_GROUPS = "query.view(num, heads, -1, size)"  # the queries that share a key
_DECODES = {
    "grouped": f"""out = F.scaled_dot_product_attention(
        {_GROUPS}, k, v, attn_mask=mask, scale=self.scale
    )
    return out.view(num, -1, size)""",
    "gqa": """out = F.scaled_dot_product_attention(
        query.unsqueeze(2), k, v, attn_mask=mask, scale=self.scale, enable_gqa=True
    )
    return out.view(num, -1, size)""",
    "products": f"""scores = torch.matmul({_GROUPS} * self.scale, k.transpose(-1, -2))
    return torch.matmul(scores.add_(mask).softmax(-1), v).view(num, -1, size)""",
}
_PREFILLS = {
    "gqa": """mask = None
    if new < total:
        mask = torch.ones(new, total, dtype=torch.bool, device=q.device).tril(total - new)
    out = F.scaled_dot_product_attention(
        q[None], k[None], v[None], attn_mask=mask, is_causal=mask is None, scale=self.scale,
        enable_gqa=True,
    )
    return out[0].transpose(0, 1)""",
    "blocks": """outs, heads = [], k.shape[0]
    for start in range(0, new, 64):
        end = min(new, start + 64)
        seen = total - new + end  # keys that the last query of this block sees
        part = (q[:, start:end] * self.scale).reshape(heads, -1, q.shape[2])
        scores = torch.bmm(part, k[:, :seen].transpose(1, 2)).view(q.shape[0], end - start, seen)
        later = torch.ones(end - start, end - start, dtype=torch.bool, device=q.device).triu(1)
        scores[:, :, seen - (end - start) :].masked_fill_(later, float("-inf"))
        scores = scores.softmax(-1).view(heads, -1, seen)
        outs.append(torch.bmm(scores, v[:, :seen]).view(q.shape[0], end - start, -1))
    return torch.cat(outs, dim=1).transpose(0, 1)""",
}


def _attention(knobs: Knobs) -> str:
    words = {
        "plan": "tables, mask",
        "decode": _DECODES[knobs["decode"]],
        "prefill": _PREFILLS[knobs["prefill"]],
    }
    return filled(_ATTENTION, words)


_STEPWISE = {"cls:Attention": ("step()",)}  # it reads the step view, which costs nothing then
ATTENTION = Rewrite(
    "attention",
    "Attention",
    {"decode": ("grouped", "gqa", "products"), "prefill": ("gqa", "blocks")},
    _attention,
    (ALL,),
    _STEPWISE,
)

# --- what surrounds it ----------------------------------------------------------------------------

_HEADS = """
import torch

from engines.inside.step import step

_seen = [None, None]  # the last step and the angles that its layers share


def prepare(module):
    q, k = module.q_norm.weight, module.k_norm.weight
    both = (q.expand(module.num_heads, -1), k.expand(module.num_kv_heads, -1))
    module.norm_$tag = torch.cat(both)
    cos, sin = module.rotary_emb.cos_sin_cache.chunk(2, dim=-1)
    module.cos_$tag = torch.cat((cos, cos), dim=-1)
    module.sin_$tag = torch.cat((-sin, sin), dim=-1)


def forward(self, positions, hidden_states):
    qkv, _ = self.qkv_proj(hidden_states)
    num_tokens, size = qkv.shape[0], self.q_size + self.kv_size
    heads = qkv[:, :size].view(num_tokens, -1, self.head_dim)
    wide = heads.to(torch.promote_types(heads.dtype, torch.float32))
    scale = $moment.add_(self.q_norm.variance_epsilon).rsqrt_()
    heads = (wide * scale).to(heads.dtype).mul_(self.norm_$tag)
    cos, sin = _angles(self, positions)
    $rotate
    heads = heads.view(num_tokens, size)
    q, k = heads[:, : self.q_size], heads[:, self.q_size :]
    out, _ = self.o_proj(self.attn(q, k, qkv[:, size:]))
    return out


def _angles(self, positions):
    view = step()
    if _seen[0] is not view:
        cos, sin = self.cos_$tag[positions], self.sin_$tag[positions]
        _seen[:] = view, (cos.unsqueeze(1), sin.unsqueeze(1))
    return _seen[1]
"""
_MOMENTS = {
    "mean": "wide.square().mean(-1, keepdim=True)",
    "length": "torch.linalg.vector_norm(wide, dim=-1, keepdim=True).square_().div_(self.head_dim)",
}
_ROTATIONS = {
    "whole": """left, right = heads.chunk(2, dim=-1)
    turned = torch.cat((right, left), dim=-1)
    heads = heads.mul_(cos).addcmul_(turned, sin)""",
    "halves": """half = self.head_dim // 2
    (left, right), cos, sin = heads.chunk(2, dim=-1), cos[..., :half], sin[..., half:]
    heads = torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1)""",
}


def _heads(knobs: Knobs) -> str:
    words = {"moment": _MOMENTS[knobs["moment"]], "rotate": _ROTATIONS[knobs["rotation"]]}
    return filled(_HEADS, words)


HEADS = Rewrite(
    "head norms and rotation",
    "Qwen3MoeAttention",
    {"rotation": ("whole", "halves"), "moment": ("length", "mean")},
    _heads,
    (ALL,),
    _STEPWISE,
)

# --- linear layers --------------------------------------------------------------------------------

_LINEAR = """
import torch
import torch.nn.functional as F


def prepare(module):
    module.weight_$tag = module.weight.t().contiguous()


def forward(self, x):
    if self.bias is not None:
        return torch.addmm(self.bias, x, self.weight_$tag), None
    return torch.mm(x, self.weight_$tag), None
"""
_LINEAR_BF16 = """
import torch
import torch.nn.functional as F


def prepare(module):
    module.weight_$tag = module.weight.to(torch.bfloat16)


def forward(self, x):
    out = F.linear(x.to(torch.bfloat16), self.weight_$tag).to(x.dtype)
    return (out if self.bias is None else out + self.bias), None
"""
_MLP = """
import torch
import torch.nn.functional as F


def prepare(module):
    module.w13_$tag = module.gate_up_proj.weight.t()$pack
    module.w2_$tag = module.down_proj.weight.t()$pack


def forward(self, x):
    gate, up = torch.mm(x, self.w13_$tag).chunk(2, dim=-1)
    return torch.mm(F.silu(gate).mul_(up), self.w2_$tag)
"""


def _mlp(knobs: Knobs) -> str:
    is_packed = knobs["packing"] == "transposed"
    return _MLP.replace("$pack", ".contiguous()" if is_packed else "")


def _packed(cls: str, name: str) -> Rewrite:
    return Rewrite(name, cls, {}, lambda knobs: _LINEAR, (ALL,), _raw(cls))


def _raw(*classes: str) -> dict[str, tuple[str, ...]]:
    """Linear layers that hold their weight as it was loaded; vLLM packs it away on a CPU."""
    return {f"cls:{cls}": ("(Linear)",) for cls in classes}


QKV = _packed("QKVParallelLinear", "packed queries, keys, values")
OUTPUT = _packed("RowParallelLinear", "packed output projection")
MLP = Rewrite(
    "gated MLP",
    "LlamaMLP",
    {"packing": _PACKING},
    _mlp,
    (ALL,),
    _raw("MergedColumnParallelLinear", "RowParallelLinear"),
)
BF16 = Rewrite(  # rounds more than stock does: an honest gate turns it down
    "bfloat16 queries, keys, values",
    "QKVParallelLinear",
    {},
    lambda knobs: _LINEAR_BF16,
    (ALL,),
    _raw("QKVParallelLinear"),
)

REWRITES = (GROUPED, DENSE, HEADS, ATTENTION, NORM, MLP, BF16, QKV, LOOP, GATHER, OUTPUT)

# --- for a search that cannot win -----------------------------------------------------------------

_SAME = """
def forward(self, *args, **kwargs):
    return ORIG(self, *args, **kwargs)
"""
NOTHING = tuple(
    Rewrite(f"unchanged {cls}", cls, {}, lambda knobs: _SAME, (ALL,))
    for cls in ("RMSNorm", "Qwen3MoeSparseMoeBlock", "Attention", "LlamaMLP")
)
