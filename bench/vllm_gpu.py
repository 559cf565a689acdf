"""Swap, revert and start of stock vLLM under Trimtab, and what being swappable costs.

    python -m bench.vllm_gpu --shape llama-1b --starts stock,ours --out results.json

Every start is the launch command given by `--vllm` with dummy weights. `stock` is vLLM with its
default settings and one timing event a step; `ours` is the same with Trimtab attached, where swaps
are measured too; `tuning` has compile mode 0 and seven graph sizes. Results are added to `--out`.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import random
import re
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np

from engines.engine import ForwardPass, Portfolio, Scope, sign
from engines.inside.wire import EXPERT_COUNTS
from engines.vllm_adapter import VllmEngine
from engines.vllm_launch import EXTENSION, VllmProcess, parse

KEY = b"k" * 32
SEVEN = (1, 2, 4, 8, 16, 32, 64)
BLOCK = 16  # steps in a row with Trimtab, then as many without
BATCHES = (1, 16, 64)
PROMPTS = (128, 1024, 8192)
LLAMA_1B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
}
QWEN3_30B = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
}
SMALL_MOE = {
    **QWEN3_30B,
    "hidden_size": 512,
    "moe_intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "num_attention_heads": 8,
    "head_dim": 64,
    "vocab_size": 4096,
}
SHAPES: dict[str, tuple[dict[str, Any], str]] = {
    "llama-1b": (LLAMA_1B, "cls:LlamaMLP"),
    "qwen3-30b-a3b": (QWEN3_30B, "cls:Qwen3MoeSparseMoeBlock"),
    "small-moe": (SMALL_MOE, "cls:Qwen3MoeSparseMoeBlock"),
}
PHASES = {
    "weights_s": r"Loading weights took ([\d.]+) seconds",
    "model_s": r"Model loading took [\d.]+ GiB(?: memory)? and ([\d.]+) seconds",
    "compile_s": r"torch\.compile (?:took|takes) ([\d.]+) s",
    "capture_s": r"Graph capturing finished in ([\d.]+) secs",
    "init_s": r"init engine \(profile, create kv cache, warmup model\) took ([\d.]+)",
}


def marked(target: str, factor: float) -> Portfolio:
    """The module's own forward with a number added to its result: dummy weights are small."""
    source = (
        f'TARGETS = {{"{target}": "scaled"}}\n'
        "def scaled(self, *args, **kwargs):\n"
        f"    return ORIG(self, *args, **kwargs) + {factor}\n"
    )
    return Portfolio((ForwardPass.from_source(source),))


def same(target: str) -> Portfolio:
    """A portfolio that changes nothing."""
    source = (
        f'TARGETS = {{"{target}": "same"}}\n'
        "def same(self, *args, **kwargs):\n    return ORIG(self, *args, **kwargs)\n"
    )
    return Portfolio((ForwardPass.from_source(source),))


class Server:
    """One started vLLM and what is asked of it."""

    def __init__(self, process: VllmProcess, url: str, ready_s: float) -> None:
        self.process, self.url, self.ready_s = process, url, ready_s
        self.engine: VllmEngine | None = None

    def attach(self) -> VllmEngine:
        self.ask("bench_memory")  # the bench's events first, so that Trimtab is around them
        path = self.process.socket
        self.engine = VllmEngine(path, KEY, Scope.TRIAL, self.ready_s, timeout_s=120.0)
        return self.engine

    def ask(self, what: str, **said: Any) -> dict[str, Any]:
        """A `bench_` operation; before the engine is attached too."""
        bare = VllmEngine.__new__(VllmEngine)
        bare._path, bare._timeout_s, bare.is_lost = self.process.socket, 120.0, False
        return bare._ask(what, **said)

    def swap(self, change: Portfolio) -> tuple[float, dict[str, Any]]:
        """(seconds on the wire, the worker's own account)."""
        assert self.engine is not None
        signature = sign(KEY, Scope.TRIAL, change.digest)
        sources = [f.source for f in change.forwards]
        started_s = time.monotonic()
        reply = self.engine._ask("swap", sources=sources, signature=signature)
        return time.monotonic() - started_s, reply


@contextmanager
def server(
    args: argparse.Namespace, extra: Sequence[str], environment: dict[str, str]
) -> Iterator[Server]:
    config, _ = SHAPES[args.shape]
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / args.shape
        model.mkdir()
        (model / "config.json").write_text(json.dumps(config))
        words = (
            *args.vllm.split(), "--model", str(model), "--tokenizer", str(args.tokenizer),
            "--load-format", "dummy", "--served-model-name", "m", "--port", str(args.port),
            "--max-model-len", "16384", "--max-num-batched-tokens", "8192",
            "--gpu-memory-utilization", "0.8", *extra, *args.also.split(),
        )  # fmt: skip
        settings = {**os.environ, **environment}
        here = str(Path(__file__).resolve().parent.parent)
        settings["PYTHONPATH"] = os.pathsep.join(
            p for p in (os.environ.get("PYTHONPATH"), here) if p
        )
        command = parse(words, settings)
        timed = tuple("bench.vllm_timed.Timed" if w == EXTENSION else w for w in command.words)
        with open(args.log, "ab") as log:
            process = VllmProcess(replace(command, words=timed), settings, log)
            try:
                yield Server(process, command.url, process.wait_ready(600.0))
            finally:
                process.close()


# --- steady state ---------------------------------------------------------------------------------


async def _decode(url: str, batch: int, num_tokens: int) -> None:
    timeout = aiohttp.ClientTimeout(total=600)
    async with aiohttp.ClientSession(timeout=timeout) as http, asyncio.TaskGroup() as group:
        for i in range(batch):
            prompt = [random.Random(i).randrange(10, 4000) for _ in range(64)]
            group.create_task(_complete(http, url, prompt, num_tokens))


async def _prefill(url: str, length: int, repeats: int) -> None:
    timeout = aiohttp.ClientTimeout(total=600)
    async with aiohttp.ClientSession(timeout=timeout) as http:
        for _ in range(repeats):
            prompt = [random.randrange(10, 4000) for _ in range(length)]
            await _complete(http, url, prompt, 1)


async def _complete(
    http: aiohttp.ClientSession, url: str, prompt: list[int], num_tokens: int, **more: Any
) -> dict[str, Any]:
    body = {
        "model": "m", "prompt": prompt, "max_tokens": num_tokens, "temperature": 0,
        "ignore_eos": True, **more,
    }  # fmt: skip
    async with http.post(f"{url}/v1/completions", json=body) as response:
        reply: dict[str, Any] = await response.json()
        if response.status != 200:
            raise RuntimeError(str(reply)[:500])
        return reply


def decode_steps(serving: Server, batch: int, num_steps: int) -> list[float]:
    """Milliseconds from each decode step's begin to the next one's."""
    serving.ask("bench_start")
    asyncio.run(_decode(serving.url, batch, num_steps))
    steps = serving.ask("bench_take")["steps"]
    return [
        to_next
        for (num, tokens, _, to_next, _), after in itertools.pairwise(steps)
        if num == tokens == batch == after[0] == after[1]
    ]


def prefill_steps(serving: Server, length: int, repeats: int) -> list[float]:
    """Milliseconds within each step that runs one whole prompt."""
    serving.ask("bench_start")
    asyncio.run(_prefill(serving.url, length, repeats + 1))
    steps = serving.ask("bench_take")["steps"]
    return [ms for _, tokens, ms, _, _ in steps if tokens == length]


def steady(serving: Server, num_steps: int) -> dict[str, list[float]]:
    """Of `num_steps` decode steps a batch size, and fewer the longer a prompt is."""
    found = {}
    for batch in BATCHES:
        found[f"decode {batch}"] = decode_steps(serving, batch, num_steps)
    for length in PROMPTS:
        repeats = max(8, min(num_steps, num_steps * 256 // length))
        found[f"prefill {length}"] = prefill_steps(serving, length, repeats)
    return found


def alternating(serving: Server, num_steps: int) -> dict[str, list[list[float]]]:
    """Medians (ms) of neighbouring blocks of steps, [without Trimtab, with it], within the same
    requests: decode from one step's begin to the next one's, prefill within the step."""
    pairs: dict[str, list[list[float]]] = {}
    for batch in BATCHES:
        serving.ask("bench_alternate", steps=BLOCK)
        serving.ask("bench_start")
        asyncio.run(_decode(serving.url, batch, num_steps))
        steps = serving.ask("bench_take")["steps"]
        rows = [
            (with_it, to_next)
            for (num, tokens, _, to_next, with_it), after in itertools.pairwise(steps)
            if num == tokens == batch == after[0] == after[1] and with_it == after[4]
        ]
        pairs[f"decode {batch}"] = _pairs(rows)
    for length in PROMPTS:
        serving.ask("bench_alternate", steps=2)
        serving.ask("bench_start")
        asyncio.run(_prefill(serving.url, length, max(60, num_steps * 128 // length)))
        steps = serving.ask("bench_take")["steps"]
        rows = [(with_it, ms) for _, tokens, ms, _, with_it in steps if tokens == length]
        pairs[f"prefill {length}"] = _pairs(rows)
    serving.ask("bench_alternate", steps=0)
    return pairs


def _pairs(rows: Sequence[tuple[bool, float]]) -> list[list[float]]:
    """Of rows in their order: each block without beside the block with that came before it."""
    blocks = [
        (with_it, float(np.median([ms for _, ms in block])))
        for with_it, block in itertools.groupby(rows, key=lambda r: r[0])
    ]
    return [
        [without, with_ms]
        for (with_it, with_ms), (_, without) in itertools.pairwise(blocks)
        if with_it
    ]


def loss(pairs: list[list[float]]) -> tuple[float, float, float]:
    """(median, low, high) of with over without, less one: a 95 % interval over the pairs of blocks
    by bootstrap."""
    ratios = np.array([b / a - 1 for a, b in pairs])
    draws = np.median(np.random.default_rng(0).choice(ratios, (4000, len(ratios))), axis=1)
    low, high = np.percentile(draws, [2.5, 97.5])
    return float(np.median(ratios)), float(low), float(high)


def tell(name: str, pairs: dict[str, list[list[float]]]) -> None:
    for what, found in pairs.items():
        mean, low, high = loss(found)
        a, b = np.median(np.array(found), axis=0)
        print(
            f"{name:8} {what:13} {len(found):4} pairs, {a:.3f} -> {b:.3f} ms, "
            f"loss {mean:+.2%} [{low:+.2%}, {high:+.2%}]",
            flush=True,
        )


# --- swaps ----------------------------------------------------------------------------------------


def tokens_of(serving: Server) -> list[int]:
    async def ask() -> list[int]:
        async with aiohttp.ClientSession() as http:
            reply = await _complete(
                http, serving.url, list(range(20, 60)), 32, return_token_ids=True
            )
            return list(reply["choices"][0]["token_ids"])

    return asyncio.run(ask())


def swaps(serving: Server, target: str, repeats: int = 3) -> list[dict[str, Any]]:
    """Swap and revert with one, seven and all capture sizes."""
    rows, engine = [], serving.engine
    assert engine is not None
    before = tokens_of(serving)
    every = serving.ask("bench_sizes", sizes=[])["sizes"]
    for sizes in ([1], [s for s in SEVEN if s in every], every) if every else ([],):
        serving.ask("bench_sizes", sizes=sizes)
        plain = serving.ask("bench_first", sizes=sizes)["sums"]
        row: dict[str, Any] = {"sizes": len(sizes), "swap_s": [], "first_s": [], "revert_s": []}
        for i in range(repeats):
            swap_s, said = serving.swap(marked(target, 0.5 + len(sizes) + i / 8))
            started_s = time.monotonic()
            sums = serving.ask("bench_first", sizes=sizes)["sums"]
            row["first_s"].append(swap_s + time.monotonic() - started_s)
            row["swap_s"].append(swap_s)
            row["captured"], row["capture_s"] = said["num_captured"], said["capture_s"]
            if i == 0:
                row["changed"] = [s for s in sums if sums[s] != plain[s]]
                row["num_changed"] = len(row["changed"])
                gaps = engine.graph_gaps()
                row["gap"] = max((g / max(scale, 1e-9) for g, scale in gaps.values()), default=0.0)
                row["gap_sizes"] = len(gaps)
                row["text_changed"] = tokens_of(serving) != before
            started_s = time.monotonic()
            reply = engine._ask("revert")
            row["revert_s"].append(time.monotonic() - started_s)
            row["revert_worker_s"] = reply["swap_s"]
        row["text_restored"] = tokens_of(serving) == before
        row["memory_gib"] = serving.ask("bench_memory")["gib"]
        rows.append(row)
        print(json.dumps({k: v for k, v in row.items() if k != "changed"}), flush=True)
    return rows


def experts(serving: Server) -> dict[str, Any]:
    """Counts of the extension against vLLM's own `routed_experts`, on the same requests."""
    engine = serving.attach()
    engine.steps()

    async def ask() -> list[dict[str, Any]]:
        async with aiohttp.ClientSession() as http, asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(
                    _complete(http, serving.url, [10 + i + j for j in range(40 + 7 * i)], 24)
                )
                for i in range(8)
            ]
        return [t.result() for t in tasks]

    replies = asyncio.run(ask())
    ours = sum(s.expert_load for s in engine.steps() if s.expert_load is not None)
    theirs = np.zeros_like(ours)
    for reply in replies:
        for layer, ids in enumerate(np.array(_routed(reply)).transpose(1, 0, 2)):
            theirs[layer] += np.bincount(ids.reshape(-1), minlength=theirs.shape[1])
    return {"ours": int(np.sum(ours)), "theirs": int(theirs.sum()),
            "gap": int(np.abs(ours - theirs).sum())}  # fmt: skip


def _routed(reply: dict[str, Any]) -> Any:
    """int[num_tokens, num_layers, top_k], whatever this release packs it in."""
    choice = reply["choices"][0]
    found = choice.get("routed_experts", reply.get("routed_experts"))
    if isinstance(found, str):
        import base64
        import io

        return np.load(io.BytesIO(base64.b64decode(found)))
    return found


# --- the runs -------------------------------------------------------------------------------------


def phases(serving: Server) -> dict[str, float]:
    text = "\n".join(serving.process._lines)
    found = {n: re.findall(p, text) for n, p in PHASES.items()}
    return {"ready_s": serving.ready_s, **{n: float(v[-1]) for n, v in found.items() if v}}


def run(kind: str, args: argparse.Namespace) -> dict[str, Any]:
    target = SHAPES[args.shape][1]
    extra: list[str] = []
    if kind == "tuning":
        extra = ["--compilation-config", json.dumps({
            "mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": SEVEN,
        })]  # fmt: skip
    if kind == "experts":
        extra = ["--enable-return-routed-experts"]
    counts = {"ours": str(args.counts_every), "experts": "1"}.get(kind, "0")
    result: dict[str, Any] = {"kind": kind, "shape": args.shape}
    with server(args, extra, {EXPERT_COUNTS: counts}) as serving:
        result["cold_start"] = phases(serving)
        print(kind, json.dumps(result["cold_start"]), flush=True)
        if kind == "experts":
            result["experts"] = experts(serving)
            return result
        if kind in ("ours", "tuning"):
            result["about"] = {k: v for k, v in serving.attach().about().items() if k != "modules"}
        if not args.no_steady:
            result["steady"] = steady(serving, args.steps)
        if kind == "stock":
            return result
        result["swaps"] = swaps(serving, target)
        if args.alternate:
            result["loss"] = alternating(serving, args.alternate)
            tell("stock", result["loss"])
            serving.ask("bench_sizes", sizes=list(SEVEN))
            serving.swap(same(target))
            result["loss under an identity"] = alternating(serving, args.alternate)
            tell("identity", result["loss under an identity"])
    return result


def medians(result: dict[str, Any]) -> str:
    lines = []
    for what, values in result.get("steady", {}).items():
        low, mid, high = np.percentile(values, [10, 50, 90]) if values else (0, 0, 0)
        lines.append(
            f"{result['kind']:7} {what:13} n={len(values):5} "
            f"p50 {mid:8.3f} ms (p10 {low:.3f}, p90 {high:.3f})"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="llama-1b")
    parser.add_argument("--starts", default="stock,ours")
    parser.add_argument("--vllm", default="python3 -m vllm.entrypoints.openai.api_server")
    parser.add_argument("--also", default="", help="more flags for vLLM")
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--port", type=int, default=8123)
    parser.add_argument("--steps", type=int, default=600, help="of each kind and start")
    parser.add_argument("--alternate", type=int, default=0, help="decode steps a batch size")
    parser.add_argument("--counts-every", type=int, default=0)
    parser.add_argument("--no-steady", action="store_true")
    parser.add_argument("--log", type=Path, default=Path("vllm.log"))
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    for kind in args.starts.split(","):
        try:
            result = run(kind, args)
        except Exception as e:
            print(f"{kind} failed: {type(e).__name__}: {e}", file=sys.stderr, flush=True)
            continue
        with args.out.open("a") as out:
            out.write(json.dumps(result) + "\n")
        print(medians(result), flush=True)


if __name__ == "__main__":
    main()
