"""vLLM as far as `engines.inside` sees it: its modules' names, a tiny model over a paged KV cache,
the V1 model runner, a worker and the API process's engine client."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum, IntEnum
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from engines.engine import ForwardPass, Portfolio, Scope, sign
from engines.inside import vllm_hooks, wire
from engines.inside.vllm_runner import V1, GraphSet
from engines.inside.vllm_worker import Extension

KEY = b"k" * 32
VOCAB, HIDDEN, LAYERS, EXPERTS, TOP_K = 32, 8, 2, 4, 2

DOUBLE = """
TARGETS = {"cls:RMSNorm": "norm"}
def norm(self, x, residual=None):
    out = ORIG(self, x, residual)
    return out * 2 if residual is None else (out[0] * 2, out[1])
"""
SMALL = 'WHEN = {"num_tokens": (1, 4)}\n'  # ahead of another one: its guard


# --- what vLLM's modules hold ---------------------------------------------------------------------


@dataclass
class SamplingParams:
    temperature: float = 1.0
    max_tokens: int | None = 16
    ignore_eos: bool = False


@dataclass
class NewRequestData:
    req_id: str
    prompt_token_ids: list[int] | None
    mm_features: list[Any]
    sampling_params: SamplingParams | None
    pooling_params: Any
    block_ids: tuple[list[int], ...]
    num_computed_tokens: int
    lora_request: Any
    prompt_embeds: Any = None
    prompt_is_token_ids: list[bool] | None = None
    prefill_token_ids: list[int] | None = None


@dataclass
class CachedRequestData:
    req_ids: list[str] = field(default_factory=list)
    resumed_req_ids: set[str] = field(default_factory=set)
    new_token_ids: list[list[int]] = field(default_factory=list)
    all_token_ids: dict[str, list[int]] = field(default_factory=dict)
    new_block_ids: list[Any] = field(default_factory=list)
    num_computed_tokens: list[int] = field(default_factory=list)
    num_output_tokens: list[int] = field(default_factory=list)

    @classmethod
    def make_empty(cls) -> CachedRequestData:
        return cls()


@dataclass
class SchedulerOutput:
    scheduled_new_reqs: list[NewRequestData]
    scheduled_cached_reqs: CachedRequestData
    num_scheduled_tokens: dict[str, int]
    total_num_scheduled_tokens: int
    finished_req_ids: set[str]
    new_block_ids_to_zero: list[int] | None = None
    num_common_prefix_blocks: list[int] = field(default_factory=list)

    @classmethod
    def make_empty(cls) -> SchedulerOutput:
        return cls([], CachedRequestData(), {}, 0, set())


class CUDAGraphMode(Enum):
    NONE, PIECEWISE, FULL = range(3)


class _Capturing:
    """What vLLM switches while it captures: its settings in the order that they changed."""

    def __init__(self) -> None:
        self.log: list[str] = []

    def set_cudagraph_capturing_enabled(self, enabled: bool) -> None:
        self.log.append("enabled" if enabled else "disabled")

    def unlock_workspace(self) -> None:
        self.log.append("unlocked")

    def lock_workspace(self) -> None:
        self.log.append("locked")

    @contextlib.contextmanager
    def graph_capture(self, device: torch.device) -> Iterator[None]:
        yield


capturing = _Capturing()


class CompilationMode(IntEnum):
    NONE, STOCK_TORCH_COMPILE, DYNAMO_TRACE_ONCE, VLLM_COMPILE = range(4)


class _Now:
    """What vLLM keeps in its modules."""

    context: ForwardContext | None = None
    compilation_config: Any = None
    ir_ops = "for the compiler"


_now = _Now()


def get_cached_compilation_config() -> Any:
    return _now.compilation_config


class CustomOp(nn.Module):
    """Leaves itself to the compiler where there is one."""

    def __init__(self) -> None:
        super().__init__()
        self._forward_method = self.dispatch_forward(compile_native=True)

    def dispatch_forward(self, compile_native: bool) -> Any:
        module = sys.modules["vllm.model_executor.custom_op"]
        is_on = "all" in module.get_cached_compilation_config().custom_ops
        return self.forward_cuda if is_on else self.forward_native

    def forward(self, *args: Any) -> Any:
        return self._forward_method(*args)

    def forward_native(self, *args: Any) -> Any:
        raise NotImplementedError

    def forward_cuda(self, *args: Any) -> Any:
        return self.forward_native(*args)


class Platform:
    """Of which the eager mode has kernels of its own for IR ops."""

    def get_default_ir_op_priority(self, vllm_config: Any) -> Platform:
        assert vllm_config.compilation_config.mode is CompilationMode.NONE
        return self

    @contextlib.contextmanager
    def set_priority(self) -> Iterator[None]:
        before, _now.ir_ops = _now.ir_ops, "eager"
        try:
            yield
        finally:
            _now.ir_ops = before


class BaseRouter:
    """Of one MoE layer."""

    def __init__(self, num_experts: int, top_k: int) -> None:
        self.global_num_experts, self.top_k = num_experts, top_k
        self.capture_fn: Callable[[Tensor], None] | None = None

    def __deepcopy__(self, memo: object) -> BaseRouter:
        return self  # what was compiled finds it by its layer's name

    def select(self, hidden_states: Tensor) -> None:
        """Which experts; here nothing comes of it."""
        ids = hidden_states[:, : self.global_num_experts].topk(self.top_k, -1).indices
        if self.capture_fn is not None:
            self.capture_fn(ids)

    def set_capture_fn(self, fn: Callable[[Tensor], None] | None) -> None:
        self.capture_fn = fn


@dataclass
class ForwardContext:
    attn_metadata: dict[str, Any] | None
    no_compile_layers: dict[str, Any]


def get_forward_context() -> ForwardContext:
    assert _now.context is not None, "Forward context is not set"
    return _now.context


@contextlib.contextmanager
def _forward_context(metadata: dict[str, Any] | None, layers: dict[str, Any]) -> Iterator[None]:
    _now.context = ForwardContext(metadata, layers)
    try:
        yield
    finally:
        _now.context = None


MODULES: dict[str, dict[str, Any]] = {
    "vllm": {"SamplingParams": SamplingParams},
    "vllm.config": {
        "set_current_vllm_config": contextlib.nullcontext,
        "CUDAGraphMode": CUDAGraphMode,
        "CompilationMode": CompilationMode,
    },
    "vllm.platforms": {"current_platform": Platform()},
    "vllm.model_executor": {},
    "vllm.model_executor.custom_op": {
        "CustomOp": CustomOp,
        "get_cached_compilation_config": get_cached_compilation_config,
    },
    "vllm.forward_context": {
        "get_forward_context": get_forward_context,
        "set_forward_context": lambda *_, **__: contextlib.nullcontext(),
    },
    "vllm.compilation.monitor": {
        "set_cudagraph_capturing_enabled": capturing.set_cudagraph_capturing_enabled
    },
    "vllm.distributed.parallel_state": {"graph_capture": capturing.graph_capture},
    "vllm.v1.worker.workspace": {
        "lock_workspace": capturing.lock_workspace,
        "unlock_workspace": capturing.unlock_workspace,
    },
    "vllm.v1.core.sched.output": {
        "SchedulerOutput": SchedulerOutput,
        "NewRequestData": NewRequestData,
        "CachedRequestData": CachedRequestData,
    },
    "vllm.model_executor.layers.fused_moe.router.base_router": {"BaseRouter": BaseRouter},
}


@pytest.fixture
def fake_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """`import vllm` finds the fakes, and every hook is there."""
    capturing.log.clear()
    for name, members in MODULES.items():
        module = ModuleType(name)
        module.__dict__.update(members)
        monkeypatch.setitem(sys.modules, name, module)
    all_there = vllm_hooks.Findings((), (), "0.32.0")
    monkeypatch.setattr(vllm_hooks, "probe_live", lambda: all_there)


# --- a model --------------------------------------------------------------------------------------


class RMSNorm(CustomOp):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight, self.variance_epsilon = nn.Parameter(torch.ones(width)), 1e-6

    def forward_native(self, x: Tensor, residual: Tensor | None = None) -> Any:
        x = x if residual is None else x + residual
        scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + self.variance_epsilon)
        return x * scale * self.weight if residual is None else (x * scale * self.weight, x)


class Attention(nn.Module):
    """One head over the paged cache of the layer of its name, as vLLM finds it."""

    def __init__(self, layer_name: str, num_blocks: int, block_size: int) -> None:
        super().__init__()
        self.layer_name, self.head_size = layer_name, HIDDEN
        self.num_heads = self.num_kv_heads = 1
        self.kv_cache = torch.full((num_blocks, block_size, 1, 2 * HIDDEN), float("nan"))
        self.kv_cache[0] = 0  # the null block, of dummy steps

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        context = get_forward_context()
        if context.attn_metadata is None:
            return value
        cache = context.no_compile_layers[self.layer_name].kv_cache
        m = context.attn_metadata[self.layer_name]
        is_kept = m.slot_mapping >= 0
        slots = m.slot_mapping[is_kept]
        cache.view(-1, 2 * HIDDEN)[slots] = torch.cat((key, value), -1)[is_kept]
        ends = m.query_start_loc.tolist()
        rows = [
            _attend(query[start:end], cache[m.block_table[i]].reshape(-1, 2 * HIDDEN), int(seq_len))
            for i, (start, end, seq_len) in enumerate(
                zip(ends, ends[1:], m.seq_lens.tolist(), strict=False)
            )
        ]
        return torch.cat(rows)


def _attend(query: Tensor, cached: Tensor, seq_len: int) -> Tensor:
    keys, values = cached[:seq_len].chunk(2, -1)
    at = torch.arange(seq_len - len(query), seq_len)[:, None]
    scores = (query @ keys.T).masked_fill(torch.arange(seq_len) > at, -torch.inf)
    out: Tensor = scores.softmax(-1) @ values
    return out


class LlamaMLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj = nn.Linear(HIDDEN, 4 * HIDDEN, bias=False)
        self.down_proj = nn.Linear(2 * HIDDEN, HIDDEN, bias=False)
        self.router = BaseRouter(EXPERTS, TOP_K)

    def forward(self, x: Tensor) -> Tensor:
        self.router.select(x)
        gate, up = self.gate_up_proj(x).chunk(2, -1)
        out: Tensor = self.down_proj(nn.functional.silu(gate) * up)
        return out


class LlamaDecoderLayer(nn.Module):
    def __init__(self, attention: Attention) -> None:
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = RMSNorm(HIDDEN), RMSNorm(HIDDEN)
        self.qkv_proj = nn.Linear(HIDDEN, 3 * HIDDEN, bias=False)
        self.attn, self.mlp = attention, LlamaMLP()

    def forward(self, hidden_states: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        x, residual = self.input_layernorm(hidden_states, residual)
        x = self.attn(*self.qkv_proj(x).chunk(3, -1))
        x, residual = self.post_attention_layernorm(x, residual)
        return self.mlp(x), residual


class LlamaModel(nn.Module):
    """Decorated by `support_torch_compile`: what was compiled runs stock code whatever forwards the
    modules have been given since."""

    def __init__(self, num_blocks: int, block_size: int, compiled: bool) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCAB, HIDDEN)
        self.layers = nn.ModuleList(
            LlamaDecoderLayer(Attention(f"model.layers.{i}.attn", num_blocks, block_size))
            for i in range(LAYERS)
        )
        self.norm = RMSNorm(HIDDEN)
        self.start_layer, self.end_layer = 0, LAYERS
        self.do_not_compile = True
        self.was_compiled: list[bool] = []  # of each run
        self.kernels: list[tuple[str, str]] = []  # of each run: the last norm's, IR ops'
        self.__dict__["code"] = copy.deepcopy(self)
        self.do_not_compile = not compiled

    def __call__(self, *args: Any) -> Any:
        self.was_compiled.append(not self.do_not_compile)
        self.kernels.append((self.norm._forward_method.__name__, _now.ir_ops))
        return super().__call__(*args) if self.do_not_compile else self.__dict__["code"](*args)

    def forward(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        x = self.embed_tokens(input_ids) + torch.sin(positions)[:, None]
        residual = torch.zeros_like(x)
        for i in range(self.start_layer, self.end_layer):
            x, residual = self.layers[i](x, residual)
        out: Tensor = self.norm(x, residual)[0]
        return out


class LlamaForCausalLM(nn.Module):
    def __init__(self, num_blocks: int, block_size: int, compiled: bool) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.model = LlamaModel(num_blocks, block_size, compiled)
        self.lm_head = nn.Linear(HIDDEN, VOCAB, bias=False)

    def forward(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        out: Tensor = self.model(input_ids, positions)
        return out

    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        out: Tensor = self.lm_head(hidden_states)
        return out

    @torch.inference_mode()
    def logprobs(self, token_ids: Sequence[int]) -> Tensor:
        """float32[num_tokens, VOCAB] after each token of one request alone, all in one step."""
        num, block_size = len(token_ids), next(iter(self.attention().values())).kv_cache.shape[1]
        blocks = torch.arange(1, 2 + num // block_size)
        slots = (blocks[:, None] * block_size + torch.arange(block_size)).reshape(-1)[:num]
        starts = torch.tensor([0, num])
        m = SimpleNamespace(
            slot_mapping=slots,
            block_table=blocks[None],
            query_start_loc=starts,
            seq_lens=starts[1:],
        )
        with _forward_context({n: m for n in self.attention()}, self.attention()):
            hidden_states = self(torch.tensor(token_ids), torch.arange(num))
        return self.compute_logits(hidden_states).log_softmax(-1)

    def attention(self) -> dict[str, Attention]:
        return {m.layer_name: m for m in self.modules() if isinstance(m, Attention)}


# --- a worker -------------------------------------------------------------------------------------


@dataclass
class _State:
    """A request as the runner keeps it."""

    token_ids: list[int]
    blocks: tuple[list[int], ...]
    num_computed: int = 0


class FakeRunner:
    """The V1 one, on a CPU."""

    def __init__(
        self, model: LlamaForCausalLM, num_blocks: int, block_sizes: tuple[int, ...]
    ) -> None:
        self.model = model
        groups = [SimpleNamespace(kv_cache_spec=SimpleNamespace(block_size=b)) for b in block_sizes]
        self.kv_cache_config = SimpleNamespace(num_blocks=num_blocks, kv_cache_groups=groups)
        self.block_size, self.max_num_tokens = block_sizes[0], 64
        self.positions = torch.zeros(self.max_num_tokens, dtype=torch.int64)
        self.cudagraph_dispatcher = SimpleNamespace(cudagraph_keys={}, keys_initialized=True)
        self.input_batch = SimpleNamespace(req_ids=list[str]())
        self.requests: dict[str, _State] = {}
        self.execute_model_state: Tensor | None = None
        self.outputs: list[SchedulerOutput] = []  # what it was told to do
        self.reorder: Callable[[list[str]], list[str]] = list  # the rows of a step
        self.breaks_in_step = 0  # counted from 1

    def get_model(self) -> LlamaForCausalLM:
        return self.model

    def execute_model(self, scheduler_output: SchedulerOutput) -> Any:
        """None: `sample_tokens` is to follow."""
        if self.execute_model_state is not None:
            raise RuntimeError("State error: sample_tokens() must be called after execute_model()")
        self.outputs.append(copy.deepcopy(scheduler_output))
        self._update(scheduler_output)
        works = scheduler_output.num_scheduled_tokens
        if not works:
            return "nothing"
        self.input_batch.req_ids = self.reorder(list(works))
        work = [(self.requests[i], works[i]) for i in self.input_batch.req_ids]
        ids, at, metadata = self._prepare(work)
        self.positions[: len(at)] = at
        with _forward_context(metadata, self.model.attention()):
            hidden_states = self.model(ids, at)
        if self.breaks_in_step == len(self.outputs):
            raise ZeroDivisionError("this step breaks")
        ends = torch.tensor([n for _, n in work]).cumsum(0) - 1
        self.execute_model_state = self.model.compute_logits(hidden_states[ends])
        return None

    def sample_tokens(self, grammar_output: Any) -> list[int]:
        assert self.execute_model_state is not None
        chosen, self.execute_model_state = self.execute_model_state.argmax(-1).tolist(), None
        for i, token in zip(self.input_batch.req_ids, chosen, strict=True):
            self.requests[i].token_ids.append(token)
        return list(chosen)

    def _update(self, output: SchedulerOutput) -> None:
        for i in output.finished_req_ids:
            self.requests.pop(i, None)
        for new in output.scheduled_new_reqs:
            assert new.req_id not in self.requests
            self.requests[new.req_id] = _State(list(new.prompt_token_ids or ()), new.block_ids)
        cached = output.scheduled_cached_reqs
        for i, num in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
            self.requests[i].num_computed = num

    def _prepare(
        self, work: Sequence[tuple[_State, int]]
    ) -> tuple[Tensor, Tensor, dict[str, SimpleNamespace]]:
        """Token ids, positions, attention metadata by layer."""
        ids = [t for s, n in work for t in s.token_ids[s.num_computed :][:n]]
        at = torch.cat([torch.arange(s.num_computed, s.num_computed + n) for s, n in work])
        assert len(ids) == len(at) <= self.max_num_tokens
        whose = torch.arange(len(work)).repeat_interleave(torch.tensor([n for _, n in work]))
        most = max(len(s.blocks[0]) for s, _ in work)
        table = torch.tensor(
            [s.blocks[0] + [s.blocks[0][-1]] * (most - len(s.blocks[0])) for s, _ in work]
        )
        m = SimpleNamespace(
            slot_mapping=table[whose, at // self.block_size] * self.block_size
            + at % self.block_size,
            block_table=table,
            query_start_loc=torch.tensor([0, *(n for _, n in work)]).cumsum(0),
            seq_lens=torch.tensor([s.num_computed + n for s, n in work]),
        )
        return torch.tensor(ids), at, {name: m for name in self.model.attention()}

    def _dummy_run(
        self,
        num_tokens: int,
        cudagraph_runtime_mode: CUDAGraphMode | None = None,
        force_attention: bool = False,
        uniform_decode: bool = False,
        skip_eplb: bool = False,
    ) -> tuple[Tensor, Tensor]:
        assert skip_eplb
        ids, lens = torch.arange(num_tokens) % VOCAB, [1] * num_tokens
        lens = lens if uniform_decode else [num_tokens]
        m = SimpleNamespace(
            slot_mapping=torch.full((num_tokens,), -1),
            block_table=torch.zeros(len(lens), num_tokens, dtype=torch.int64),
            query_start_loc=torch.tensor([0, *lens]).cumsum(0),
            seq_lens=torch.tensor(lens),
        )
        metadata = {name: m for name in self.model.attention()} if force_attention else None
        with _forward_context(metadata, self.model.attention()):
            hidden_states = self.model(ids, torch.zeros_like(ids))
        return hidden_states, hidden_states


class FakeWorker:
    """vLLM's, without the extension."""

    def __init__(
        self,
        num_blocks: int = 64,
        block_sizes: tuple[int, ...] = (4,),
        max_num_batched_tokens: int = 16,
        max_num_seqs: int = 8,
        compiled: bool = False,
    ) -> None:
        mode = CompilationMode.VLLM_COMPILE if compiled else CompilationMode.NONE
        _now.compilation_config = SimpleNamespace(
            mode=mode, custom_ops=["none" if compiled else "all"], enabled_custom_ops=Counter[str]()
        )
        model = LlamaForCausalLM(num_blocks, block_sizes[0], compiled)
        self.model_runner = FakeRunner(model, num_blocks, block_sizes)
        self.device = torch.device("cpu")
        self.model_config = SimpleNamespace(
            model="tiny",
            dtype=torch.float32,
            max_model_len=48,
            hf_text_config=SimpleNamespace(num_hidden_layers=LAYERS),
            get_vocab_size=lambda: VOCAB,
        )
        self.vllm_config = SimpleNamespace(
            compilation_config=_now.compilation_config,
            scheduler_config=SimpleNamespace(
                max_num_batched_tokens=max_num_batched_tokens, max_num_seqs=max_num_seqs
            ),
        )

    @torch.inference_mode()
    def execute_model(self, scheduler_output: SchedulerOutput) -> Any:
        return self.model_runner.execute_model(scheduler_output)

    @torch.inference_mode()
    def sample_tokens(self, grammar_output: Any) -> Any:
        return self.model_runner.sample_tokens(grammar_output)

    @property
    def model(self) -> LlamaForCausalLM:
        return self.model_runner.model


class ExtendedWorker(FakeWorker, Extension):
    """As `--worker-extension-cls` mixes it."""

    def ask(self, what: str, **said: Any) -> wire.Message:
        """One message there and back."""
        return wire.unpack(self.trimtab(wire.pack({"do": what, "deadline_s": 20.0, **said})))

    def close(self) -> None:
        """Its files go before the garbage collector complains of them."""
        if (inside := self.__dict__.get("_trimtab_inside")) is not None:
            inside._files.cleanup()

    def attach(self) -> wire.Message:
        return self.ask("attach", key=KEY, scope="serve")

    def swap(self, *sources: str, **said: Any) -> wire.Message:
        """Signed as it should be, unless `said` otherwise."""
        return self.ask("swap", **{**swap_message(*sources), **said})

    def replay(self, rows: bool = True, num_layers: int | None = None) -> wire.Message:
        requests = [{"prompt": [3, 1, 4, 1, 5], "output": [9, 2, 6]}]
        return self.ask(
            "replay", requests=requests, max_concurrency=2, num_layers=num_layers, rows=rows
        )

    def serve(self, prompt: Sequence[int], num_output: int = 1, keep: bool = False) -> list[int]:
        """One client's request, alone. With `keep` it does not finish."""
        return serve(self, prompt, num_output, keep)


MakeWorker = Callable[..., ExtendedWorker]


@pytest.fixture
def make_worker(fake_vllm: None) -> Iterator[MakeWorker]:
    """`FakeWorker`'s settings to a worker that has been attached."""
    made: list[ExtendedWorker] = []

    def make(**settings: Any) -> ExtendedWorker:
        made.append(ExtendedWorker(**settings))
        made[-1].attach()
        return made[-1]

    yield make
    for worker in made:
        worker.close()


def swap_message(*sources: str) -> dict[str, Any]:
    digest = Portfolio(tuple(ForwardPass.from_source(s) for s in sources)).digest
    return {"sources": list(sources), "signature": sign(KEY, Scope.SERVE, digest)}


def serve(
    worker: FakeWorker, prompt: Sequence[int], num_output: int = 1, keep: bool = False
) -> list[int]:
    """One client's request, alone: the tokens that it is answered with."""
    name, outputs = f"client-{len(worker.model_runner.outputs)}", list[int]()
    for i in range(num_output):
        output = SchedulerOutput.make_empty()
        if i:
            cached = output.scheduled_cached_reqs
            cached.req_ids, cached.new_block_ids = [name], [None]
            cached.num_computed_tokens, cached.num_output_tokens = [len(prompt) + i - 1], [i]
        else:
            blocks = list(range(40, 41 + (len(prompt) + num_output) // 4))
            output.scheduled_new_reqs = [
                NewRequestData(name, list(prompt), [], None, None, (blocks,), 0, None)
            ]
        output.num_scheduled_tokens = {name: 1 if i else len(prompt)}
        output.total_num_scheduled_tokens = output.num_scheduled_tokens[name]
        worker.execute_model(output)
        outputs += worker.sample_tokens(None)
    if not keep:
        last = SchedulerOutput.make_empty()
        last.finished_req_ids = {name}
        worker.execute_model(last)
    return outputs


# --- graphs ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class BatchDescriptor:
    num_tokens: int
    cg_mode: CUDAGraphMode = CUDAGraphMode.FULL


class GraphedRunner(V1):
    """V1 as on a device. A graph is the name of its capture: "stock", or which one it was."""

    def __init__(self, worker: FakeWorker, sizes: Sequence[int]) -> None:
        super().__init__(worker)
        self._sizes = [BatchDescriptor(n) for n in sorted(sizes, reverse=True)]
        self.installed = GraphSet({d: "stock" for d in self._sizes}, "stock's")
        self.captured: list[int] = []
        self.breaks: set[int] = set()  # sizes whose capture fails
        self.is_off_by: dict[int, float] = {}  # replays of a size

    def descriptors(self) -> list[BatchDescriptor]:
        return list(self._sizes)

    def graph_set(self) -> GraphSet:
        return self.installed

    def install(self, graphs: GraphSet) -> None:
        self.installed = graphs

    def capture(self, descriptor: BatchDescriptor, warm: bool) -> int:
        if descriptor.num_tokens in self.breaks:
            raise RuntimeError("CUDA error: out of memory")
        for _ in range(1 + warm):
            self.dummy_step(descriptor.num_tokens)
        self.installed.graphs[descriptor] = f"capture {len(self.captured)}"
        self.captured.append(descriptor.num_tokens)
        return 1 + warm

    def dummy_step(self, num_tokens: int, graph: bool | None = None) -> Tensor:
        hidden_states = super().dummy_step(num_tokens)
        return hidden_states + self.is_off_by.get(num_tokens, 0.0) if graph else hidden_states

    @property
    def names(self) -> dict[int, str]:
        """The installed graphs by size."""
        return {d.num_tokens: name for d, name in self.installed.graphs.items()}


# --- the API process ------------------------------------------------------------------------------

Rank = Callable[[wire.Message], wire.Message]


class FakeEngineClient:
    """AsyncLLM, with workers that answer on a thread, as in processes of their own."""

    def __init__(self, *ranks: Rank) -> None:
        self.ranks = ranks
        self.engine_core = self
        self.output_processor = self
        self.num_pending = 0
        self.log: list[str] = []  # what was asked of it, in order
        self.has_kv = True  # cached, or of requests that run
        self.pauses = True

    def get_num_unfinished_requests(self) -> int:
        return self.num_pending

    async def pause_scheduler_async(self, mode: str = "abort", clear_cache: bool = True) -> None:
        assert mode == "keep", "requests must not be lost"
        self.log.append("clear" if clear_cache else "pause")
        self.has_kv = self.has_kv and not clear_cache
        if not self.pauses:
            await asyncio.Event().wait()

    async def resume_scheduler_async(self) -> None:
        self.log.append("resume")

    async def collective_rpc(
        self,
        method: str,
        args: tuple[bytes, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> list[bytes]:
        assert method == "trimtab"
        message = wire.unpack(args[0])
        self.log.append(message["do"])
        return [wire.pack(await asyncio.to_thread(r, message)) for r in self.ranks]
