"""The embedded engine on the shipped model: same tokens as transformers, swap, revert, faults."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

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


def test_greedy_tokens_are_those_of_transformers(engine: EmbeddedEngine) -> None:
    assert generate(engine, PROMPT, max_tokens=12) == theirs(SHIPPED_MODEL, PROMPT, 12)


def test_a_llama_answers_as_in_transformers(tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    shape = LlamaConfig(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.2,
    )
    LlamaForCausalLM(shape).save_pretrained(tmp_path)
    llama = make(model_dir=tmp_path)
    try:
        assert generate(llama, PROMPT, max_tokens=12) == theirs(tmp_path, PROMPT, 12)
    finally:
        llama.close()


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


def test_a_serving_engine_refuses_a_trial_signature(engine: EmbeddedEngine) -> None:
    change = portfolio(RMS_NORM_REWRITE)
    with pytest.raises(PermissionError, match="scope serve"):
        engine.swap(change, sign(KEY, Scope.TRIAL, change.digest))


def test_a_fingerprint_shows_a_changed_weight(engine: EmbeddedEngine) -> None:
    before = engine.fingerprint()
    weights = engine.model.get_parameter("model.layers.1.mlp.experts.w13_weight")
    weights.data[3, 5, 7] += 1e-3
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


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    shutil.copytree(SHIPPED_MODEL, tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 5}))
    with pytest.raises(ModelError, match=r"model\.layers\.4\.\S+ is missing"):
        load_model(tmp_path, torch.float32)
