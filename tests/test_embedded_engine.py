"""The embedded engine on the shipped model: same tokens as transformers, swap, revert, faults."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from engines.checks import RMS_NORM_REWRITE, check_engine
from engines.embedded.engine import EmbeddedEngine, EngineSettings
from engines.embedded.scheduler import Finish, Request, SamplingParams, TokenEvent
from engines.embedded.weights import SHIPPED_MODEL, ModelError, load_model
from engines.engine import STOCK, CandidateError, EngineGone, ForwardPass, Portfolio, Scope, sign
from engines.host import Host
from engines.remote import RemoteEngine
from profiler.reservoir import Workload, WorkloadKind, WorkloadRequest

KEY = b"k" * 32
PROMPT = tuple(range(100, 160))

RAISES_LATE = """
TARGETS = {"cls:Qwen3MoeSparseMoeBlock": "moe"}
CALLS = []
def moe(self, hidden_states):
    CALLS.append(1)
    if len(CALLS) > 10:
        raise ValueError("late")
    return ORIG(self, hidden_states)
"""
ZERO_MOE = """
TARGETS = {"cls:Qwen3MoeSparseMoeBlock": "moe"}
def moe(self, hidden_states):
    return hidden_states * 0
"""
GUARDED = 'WHEN = {"num_tokens": (1, 4)}\n' + ZERO_MOE
NAN_MOE = ZERO_MOE.replace("* 0", "* float('nan')")
CUT_MOE = ZERO_MOE.replace("* 0", "[:, :7]")
EXITS = ZERO_MOE.replace("return hidden_states * 0", "raise SystemExit(3)")
NO_MOE = """
TARGETS = {"cls:Qwen3MoeDecoderLayer": "layer"}
def layer(self, positions, hidden_states, residual):
    return hidden_states, hidden_states
"""


def portfolio(*sources: str) -> Portfolio:
    return Portfolio(tuple(ForwardPass.from_source(s) for s in sources))


def install(engine: EmbeddedEngine, *sources: str) -> None:
    changed = portfolio(*sources)
    engine.swap(changed, sign(KEY, engine.settings.scope, changed.digest))


def make(scope: Scope = Scope.SERVE, **settings: object) -> EmbeddedEngine:
    return EmbeddedEngine(EngineSettings(scope=scope, key=KEY, **settings))  # type: ignore[arg-type]


@pytest.fixture
def engine() -> Iterator[EmbeddedEngine]:
    made = make()
    yield made
    made.close()


class Client:
    """Collects one request's events."""

    def __init__(self, engine: EmbeddedEngine, prompt: tuple[int, ...], **params: object) -> None:
        self.tokens: list[int] = []
        self.finish: Finish | None = None
        self._done = threading.Event()
        sampling = SamplingParams(**{"temperature": 0.0, **params})  # type: ignore[arg-type]
        self.request = Request("r", prompt, sampling, self._take)
        engine.submit(self.request)

    def _take(self, event: TokenEvent) -> None:
        if event.token_id is not None:
            self.tokens.append(event.token_id)
        if event.finish is not None:
            self.finish = event.finish
            self._done.set()

    def wait(self) -> list[int]:
        assert self._done.wait(30)
        return self.tokens


def generate(engine: EmbeddedEngine, prompt: tuple[int, ...], **params: object) -> list[int]:
    return Client(engine, prompt, **params).wait()


def theirs(directory: Path, prompt: tuple[int, ...], num: int) -> list[int]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    ids = torch.tensor([prompt])
    with torch.inference_mode():
        for _ in range(num):
            ids = torch.cat((ids, model(ids).logits[:, -1:].argmax(-1)), dim=1)
    return ids[0, len(prompt) :].tolist()


def workload(num: int = 3) -> Workload:
    rng = np.random.default_rng(0)
    requests = tuple(
        WorkloadRequest(
            tuple(rng.integers(4, 4000, 20 + i).tolist()), tuple(rng.integers(4, 4000, 4).tolist())
        )
        for i in range(num)
    )
    return Workload(WorkloadKind.REAL, requests, 2)


def test_it_keeps_the_engine_protocol() -> None:
    check_engine(lambda: make(Scope.TRIAL), KEY)


def test_it_keeps_the_engine_protocol_over_the_wire(tmp_path: Path) -> None:
    engine = make(Scope.TRIAL)
    host = Host(engine, f"unix:{tmp_path}/c.sock")
    host.start()
    check_engine(lambda: RemoteEngine(f"unix:{tmp_path}/c.sock"), KEY)
    host.stop()
    engine.close()


def test_greedy_tokens_are_those_of_transformers(engine: EmbeddedEngine) -> None:
    assert generate(engine, PROMPT, max_tokens=12) == theirs(SHIPPED_MODEL, PROMPT, 12)


SHAPE: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
}


def save_llama(directory: Path, max_shard_size: str = "1GB", **changed: Any) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**{**SHAPE, **changed}))
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):  # they start at zero, which hides a bias that is left out
            torch.nn.init.normal_(parameter)
    model.save_pretrained(directory, max_shard_size=max_shard_size)


def save_moe(directory: Path, **changed: Any) -> None:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
    shape = {**SHAPE, **experts, "head_dim": 16, **changed}
    Qwen3MoeForCausalLM(Qwen3MoeConfig(**shape)).save_pretrained(directory)


def stack_experts(directory: Path) -> None:
    """The same weights with all experts of a layer in one tensor."""
    file = directory / "model.safetensors"
    tensors = load_file(file)
    for i in range(2):
        prefix = f"model.layers.{i}.mlp.experts"
        one = {
            part: torch.stack([tensors.pop(f"{prefix}.{e}.{part}.weight") for e in range(4)])
            for part in ("gate_proj", "up_proj", "down_proj")
        }
        tensors[f"{prefix}.gate_up_proj"] = torch.cat((one["gate_proj"], one["up_proj"]), dim=1)
        tensors[f"{prefix}.down_proj"] = one["down_proj"]
    save_file(tensors, file, {"format": "pt"})


def assert_answers_as_transformers(directory: Path) -> None:
    engine = make(model_dir=directory)
    try:
        assert generate(engine, PROMPT, max_tokens=12) == theirs(directory, PROMPT, 12)
    finally:
        engine.close()


def test_a_llama_answers_as_in_transformers(tmp_path: Path) -> None:
    save_llama(tmp_path)
    assert_answers_as_transformers(tmp_path)


def test_biases_tied_embeddings_and_shards_are_loaded(tmp_path: Path) -> None:
    save_llama(tmp_path, max_shard_size="50KB", attention_bias=True, tie_word_embeddings=True)
    assert (tmp_path / "model.safetensors.index.json").exists()
    assert_answers_as_transformers(tmp_path)


def test_a_mixture_saved_by_transformers_answers_as_there(tmp_path: Path) -> None:
    save_moe(tmp_path, norm_topk_prob=True, mlp_only_layers=[0])
    assert_answers_as_transformers(tmp_path)


def test_experts_stored_in_one_tensor_are_loaded(tmp_path: Path) -> None:
    save_moe(tmp_path)
    stack_experts(tmp_path)
    assert_answers_as_transformers(tmp_path)


def test_a_prefix_hit_gives_the_same_tokens(engine: EmbeddedEngine) -> None:
    first = generate(engine, PROMPT, max_tokens=8)
    again = Client(engine, PROMPT, max_tokens=8)
    assert again.wait() == first
    assert again.request.num_cached == 48


def test_other_requests_in_the_batch_change_no_token(engine: EmbeddedEngine) -> None:
    alone = generate(engine, PROMPT, max_tokens=8)
    others = [Client(engine, tuple(range(5 * i, 5 * i + 40)), max_tokens=8) for i in range(2, 7)]
    together = Client(engine, PROMPT, max_tokens=8)
    assert together.wait() == alone
    assert all(len(o.wait()) == 8 for o in others)


def test_a_seed_gives_the_same_tokens_in_any_batch(engine: EmbeddedEngine) -> None:
    params = {"temperature": 1.0, "top_p": 0.9, "seed": 7, "max_tokens": 8}
    alone = generate(engine, PROMPT, **params)
    other = Client(engine, PROMPT[:30], **{**params, "seed": 8})
    assert generate(engine, PROMPT, **params) == alone
    assert other.wait() != alone


def test_requests_that_do_not_fit_are_preempted_and_end_the_same() -> None:
    roomy, tight = make(), make(num_kv_blocks=12)
    try:
        prompts = [tuple(range(50 * i, 50 * i + 60)) for i in range(1, 4)]
        expected = [generate(roomy, p, max_tokens=30) for p in prompts]
        clients = [Client(tight, p, max_tokens=30) for p in prompts]
        assert [c.wait() for c in clients] == expected
        assert tight.num_preemptions > 0
    finally:
        roomy.close()
        tight.close()


def test_an_aborted_request_frees_its_blocks(engine: EmbeddedEngine) -> None:
    client = Client(engine, PROMPT, max_tokens=3000)
    engine.abort(client.request)
    assert engine.drain(5.0)
    assert engine.kv_cache_usage == 0.0


def test_requests_in_flight_go_on_under_the_new_forward(engine: EmbeddedEngine) -> None:
    client = Client(engine, PROMPT, max_tokens=400)
    install(engine, RMS_NORM_REWRITE)
    assert engine.info().digest == portfolio(RMS_NORM_REWRITE).digest
    assert client.wait() == generate(engine, PROMPT, max_tokens=400)


def test_no_prefix_is_hit_that_another_forward_wrote(engine: EmbeddedEngine) -> None:
    generate(engine, PROMPT, max_tokens=2)
    install(engine, ZERO_MOE)
    client = Client(engine, PROMPT, max_tokens=2)
    client.wait()
    assert client.request.num_cached == 0


def test_revert_is_bit_equal_to_before() -> None:
    engine = make(Scope.TRIAL)
    try:
        before = engine.probe(workload())
        install(engine, ZERO_MOE)
        assert not np.array_equal(engine.probe(workload())[0], before[0])
        engine.revert()
        assert all(map(np.array_equal, engine.probe(workload()), before))
    finally:
        engine.close()


def test_a_guard_leaves_other_batches_to_stock() -> None:
    engine = make(Scope.TRIAL)
    try:
        install(engine, GUARDED)
        small, large = (np.ones((n, 128), np.float32) for n in (4, 5))
        assert not engine.call("model.layers.0.mlp", [small])[0].any()
        assert engine.call("model.layers.0.mlp", [large])[0].any()
    finally:
        engine.close()


def test_a_forward_that_raises_while_serving_gives_way_to_stock(engine: EmbeddedEngine) -> None:
    expected = generate(engine, PROMPT, max_tokens=20)
    install(engine, RAISES_LATE)
    assert generate(engine, PROMPT, max_tokens=20) == expected
    assert engine.info().digest == STOCK.digest
    assert "ValueError: late" in engine.faults[0]


@pytest.mark.parametrize("source", [CUT_MOE, EXITS])
def test_a_fault_of_any_kind_gives_way_to_stock(engine: EmbeddedEngine, source: str) -> None:
    expected = generate(engine, PROMPT, max_tokens=4)
    install(engine, source)
    assert generate(engine, PROMPT, max_tokens=4) == expected
    assert (engine.info().digest, engine.info().previous_digest) == (STOCK.digest, None)


def test_a_client_that_raises_leaves_the_others_alone(engine: EmbeddedEngine) -> None:
    def broken(event: TokenEvent) -> None:
        raise RuntimeError("nobody listens")

    engine.submit(Request("b", PROMPT, SamplingParams(max_tokens=9), broken))
    assert len(generate(engine, PROMPT, max_tokens=4)) == 4
    assert engine.info().num_running == 0


def test_a_closed_engine_says_so() -> None:
    engine = make()
    engine.close()
    with pytest.raises(EngineGone, match="was closed"):
        engine.info()


def test_a_replay_is_refused_while_it_serves(engine: EmbeddedEngine) -> None:
    client = Client(engine, PROMPT, max_tokens=200)
    with pytest.raises(CandidateError, match="serving; drain it first"):
        engine.measure(workload())
    assert len(client.wait()) == 200


def test_a_replay_with_an_unknown_token_is_refused(engine: EmbeddedEngine) -> None:
    wrong = Workload(WorkloadKind.REAL, (WorkloadRequest((5, 4096), (3,)),))
    with pytest.raises(CandidateError, match="not within 0-4095"):
        engine.probe(wrong)


def test_what_is_not_a_number_ends_with_the_forward_that_made_it() -> None:
    engine = make(num_kv_blocks=32)
    try:
        prompts = [PROMPT[: 20 + 7 * i] for i in range(4)]
        expected = [generate(engine, p, max_tokens=12) for p in prompts]
        install(engine, NAN_MOE)
        for i in range(8):  # fills every block
            generate(engine, tuple(range(i, i + 100)), max_tokens=4)
        engine.revert()
        clients = [Client(engine, p, max_tokens=12) for p in prompts]
        assert [c.wait() for c in clients] == expected
    finally:
        engine.close()


def test_an_engine_whose_step_hangs_is_silent(engine: EmbeddedEngine, tmp_path: Path) -> None:
    host = Host(engine, f"unix:{tmp_path}/c.sock")
    host.start()
    remote = RemoteEngine(f"unix:{tmp_path}/c.sock", timeout_s=0.3)
    install(engine, "import time\n" + ZERO_MOE.replace("return", "time.sleep(0.5); return"))
    client = Client(engine, PROMPT, max_tokens=1)
    with pytest.raises(EngineGone):
        remote.info()
    client.wait()
    remote.close()
    host.stop()


def test_what_prepare_hangs_on_a_module_goes_with_its_portfolio(engine: EmbeddedEngine) -> None:
    install(engine, "def prepare(m):\n    m.extra = 1\n" + ZERO_MOE)
    block = engine.model.get_submodule("model.layers.0.mlp")
    assert block.extra == 1
    engine.revert()
    assert not hasattr(block, "extra")


def test_experts_are_counted_whatever_forward_runs(engine: EmbeddedEngine) -> None:
    install(engine, ZERO_MOE)
    generate(engine, PROMPT, max_tokens=8)
    counted = [s for s in engine.steps() if s.expert_load is not None]
    assert counted
    assert all((s.expert_load.sum(axis=1) == 2 * s.num_tokens).all() for s in counted)  # type: ignore[union-attr]


def test_a_layer_without_its_block_has_no_count(engine: EmbeddedEngine) -> None:
    generate(engine, PROMPT, max_tokens=8)
    engine.steps()
    install(engine, NO_MOE)
    generate(engine, PROMPT, max_tokens=8)
    assert [s.expert_load for s in engine.steps() if s.expert_load is not None] == []


def test_a_serving_engine_refuses_a_trial_signature(engine: EmbeddedEngine) -> None:
    change = portfolio(RMS_NORM_REWRITE)
    with pytest.raises(PermissionError, match="scope serve"):
        engine.swap(change, sign(KEY, Scope.TRIAL, change.digest))


def test_a_fingerprint_shows_a_changed_weight(engine: EmbeddedEngine) -> None:
    before = engine.fingerprint()
    weights = engine.model.get_parameter("model.layers.1.mlp.experts.w13_weight")
    weights.data[3, 5, 7] += 1e-3
    assert engine.fingerprint() != before


def test_a_fingerprint_shows_a_changed_setting(engine: EmbeddedEngine) -> None:
    before = engine.fingerprint()
    engine.model.get_submodule("model.layers.1.mlp.experts").top_k = 1  # type: ignore[assignment]
    assert engine.fingerprint() != before


def test_the_first_layers_alone_take_fewer_weights_to_the_same_shape() -> None:
    engine = make(Scope.TRIAL)
    try:
        whole, fast = engine.probe(workload()), engine.probe(workload(), num_layers=1)
        assert whole[0].shape == fast[0].shape
        assert not np.array_equal(whole[0], fast[0])
        with pytest.raises(CandidateError, match="5 layers"):
            engine.probe(workload(), num_layers=5)
    finally:
        engine.close()


# --- what cannot be loaded ------------------------------------------------------------------------


def test_a_missing_directory_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="nowhere does not exist"):
        load_model(tmp_path / "nowhere", torch.float32)


def test_truncated_weights_are_named(tmp_path: Path) -> None:
    shutil.copytree(SHIPPED_MODEL, tmp_path, dirs_exist_ok=True)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:100_000])
    with pytest.raises(ModelError, match=r"model\.safetensors cannot be read, perhaps it is trunc"):
        load_model(tmp_path, torch.float32)


def test_an_unknown_architecture_names_the_known_ones(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["GPT2LMHeadModel"]}))
    with pytest.raises(ModelError, match=r"GPT2LMHeadModel is not one of Llama"):
        load_model(tmp_path, torch.float32)


@pytest.mark.parametrize(
    ("changed", "why"), [({"mlp_bias": True}, "mlp_bias True"), ({"hidden_act": "gelu"}, "gelu")]
)
def test_what_would_be_computed_otherwise_is_refused(
    tmp_path: Path, changed: dict[str, Any], why: str
) -> None:
    save_llama(tmp_path, **changed)
    with pytest.raises(ModelError, match=why):
        load_model(tmp_path, torch.float32)


def test_a_tensor_without_a_place_is_named(tmp_path: Path) -> None:
    save_llama(tmp_path)
    file = tmp_path / "model.safetensors"
    extra = {"model.layers.0.self_attn.q_norm.weight": torch.ones(16)}
    save_file({**load_file(file), **extra}, file, {"format": "pt"})
    with pytest.raises(ModelError, match=r"q_norm\.weight has no place"):
        load_model(tmp_path, torch.float32)


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    shutil.copytree(SHIPPED_MODEL, tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 5}))
    with pytest.raises(ModelError, match=r"model\.layers\.4\.\S+ is missing"):
        load_model(tmp_path, torch.float32)
