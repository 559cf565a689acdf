"""A real vLLM on the CPU, made swappable by our own command, with models made on the spot."""

from __future__ import annotations

import json
import os
import sysconfig
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from engines.engine import ForwardPass, Portfolio, Scope, SwapReport, sign
from engines.host import socket_path
from engines.remote import RemoteEngine, control_address
from sidecar.supervisor import EngineProcess, free_port, our_command

KEY = b"a key of this test's own, 32 byt"
QUICK = (
    "--enforce-eager --kv-cache-memory-bytes 128M --max-model-len 2048 --max-num-seqs 16 "
    "--max-num-batched-tokens 1024 --served-model-name m --enable-prompt-tokens-details"
)
COMMON: dict[str, Any] = {
    "vocab_size": 1024,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "initializer_range": 0.08,  # random weights whose greedy text any real change changes
}
MOE: dict[str, Any] = {"moe_intermediate_size": 64, "num_experts": 8, "num_experts_per_tok": 2}


def make_models(home: Path) -> None:
    """`dense` and `moe`, with a byte-level tokenizer of the standard library's own text."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import (
        LlamaConfig,
        LlamaForCausalLM,
        PreTrainedTokenizerFast,
        Qwen3MoeConfig,
        Qwen3MoeForCausalLM,
    )

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=1024,
        special_tokens=["<pad>", "<bos>", "<eos>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train(sorted(map(str, Path(sysconfig.get_paths()["stdlib"]).glob("a*.py"))), trainer)
    fast = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>"
    )
    torch.manual_seed(0)
    dense = LlamaForCausalLM(LlamaConfig(**COMMON))
    moe = Qwen3MoeForCausalLM(Qwen3MoeConfig(**COMMON, **MOE))
    made: dict[str, Any] = {"dense": dense, "moe": moe}
    for name, model in made.items():
        model.to(torch.bfloat16).save_pretrained(home / name)
        fast.save_pretrained(home / name)


@dataclass(slots=True)
class Vllm:
    """One that runs."""

    process: EngineProcess
    engine: RemoteEngine

    @property
    def url(self) -> str:
        return self.process.url

    def swap(self, source: str) -> SwapReport:
        change = Portfolio((ForwardPass.from_source(source),))
        return self.engine.swap(change, sign(KEY, Scope.TRIAL, change.digest))

    def complete(self, prompt: str | list[int], num_tokens: int = 24) -> list[int]:
        """Greedy token ids."""
        body = {
            "model": "m",
            "prompt": prompt,
            "max_tokens": num_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        request = urllib.request.Request(
            f"{self.url}/v1/completions", json.dumps(body).encode(), {"content-type": "text/json"}
        )
        request.add_header("content-type", "application/json")
        with urllib.request.urlopen(request, timeout=100) as response:
            return list(json.load(response)["choices"][0]["token_ids"])

    def family(self) -> set[int]:
        """Every process of this engine."""
        return {p.pid for p in psutil.Process(self.process.pid).children(recursive=True)}


@contextmanager
def started(
    model: Path, logs: Path, flags: str = QUICK, ours: str = "", timeout_s: float = 60.0, **env: str
) -> Iterator[Vllm]:
    """`trimtab engine vllm -- vllm serve …`, in trial scope; ended with all that it started."""
    port = free_port()
    program = f"{os.environ['REAL_VLLM_ENV']}/bin/vllm"
    command = our_command("engine", "vllm", *ours.split(), "--", program, "serve", str(model))
    environment = {
        "TRIMTAB_TRIAL_KEY": KEY.hex(),
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        **env,
    }
    url = f"http://127.0.0.1:{port}"
    words = [*command, *flags.split(), "--port", str(port)]
    log, control = logs / f"{model.name}-{port}.log", socket_path(control_address(url))
    process = EngineProcess(words, url, log, environment, control, grace_s=20.0)
    try:
        process.wait_ready(400.0)
        engine = RemoteEngine(control_address(url), timeout_s)
        try:
            yield Vllm(process, engine)
        finally:
            engine.close()
    finally:
        process.close()
