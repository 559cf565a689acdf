"""Trains the demo model: a Qwen3-MoE of 3 M parameters, on a CPU, in under twenty minutes.

    python -m engines.embedded.train --corpus DIR --out engines/embedded/models/tiny-moe

`DIR` holds one `DOMAIN.txt.xz` per kind of text (`code_py.txt.xz`, `chat.txt.xz`, …), UTF-8,
documents separated by NUL. `chat` is expected to be in ChatML already; a quarter of the other
documents is framed as ChatML turns here, so that a chat prompt about code is answered with code.

Every step sees each domain once and the load-balancing loss is taken over the whole step, so
experts may specialise by domain while none of them starves. Needs `transformers`, which only
this script uses: the engine that serves the model does not.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import logging
import lzma
import math
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import Qwen3MoeForCausalLM

log = logging.getLogger(__name__)

END, TURN_START, TURN_END, PAD = SPECIALS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|pad|>",
)
LAYERS, HEADS, EXPERTS, TOP_K = 4, 4, 8, 2
SHAPE: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "vocab_size": 4096,
    "hidden_size": 128,
    "intermediate_size": 384,
    "moe_intermediate_size": 192,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "hidden_act": "silu",
    "num_experts": EXPERTS,
    "num_experts_per_tok": TOP_K,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "router_aux_loss_coef": 0.001,
    "output_router_logits": False,
    "max_position_embeddings": 4096,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "rms_norm_eps": 1e-6,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "use_sliding_window": False,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "initializer_range": 0.02,
    "use_cache": True,
    "bos_token_id": None,
    "eos_token_id": SPECIALS.index(TURN_END),
    "pad_token_id": SPECIALS.index(PAD),
    "torch_dtype": "bfloat16",
}
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LICENCES = (
    "Trained on free texts only: Python's standard library (PSF), C headers (LGPL, GPL with "
    "exception, MIT, Apache-2.0), Debian's anarchism book (GPL-2+), manual pages (mixed free "
    "licences), LibreOffice help and manual pages in Chinese and German (MPL-2.0, GFDL, GPL), "
    "botocore's API models (Apache-2.0), Metamath databases (CC0), AIML bot rules (GPL). "
    "No text of the corpus is included."
)

TRAIN_BYTES, HELD_OUT_BYTES, VOCABULARY_BYTES = 8_000_000, 120_000, 1_000_000
"""Text taken from each domain: to train on, to measure on, to learn the vocabulary from."""
HELD_OUT_PERCENT, HELD_OUT_CHARS = 5, 6_000
"""Share of documents held out, and how much of the start of each is measured."""
ROWS = ((0.6, 128), (0.85, 384), (1.0, 1024))
"""Tokens in a row until that share of the time is over: many small steps learn fastest, and the
long rows at the end teach the positions that prompts reach."""
EVAL_ROW, EVAL_ROWS = 512, 8
PEAK_LR, WARMUP_STEPS, BALANCE, CLIP = 4e-3, 100, 0.01, 1.0
CHECKPOINT, CHECKPOINT_S = "checkpoint.pt", 180.0

TURNS = re.compile(
    r"(?P<user>.{1,160}\n|.{1,160}\s|.{1,160})"
    r"(?P<assistant>.{1,600}\n|.{1,600}\s|.{1,600})?",
    re.DOTALL,
)

Tokens = NDArray[np.uint16]
Share = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Domain:
    """One kind of text as token ids; every document ends with `<|endoftext|>`."""

    name: str
    train: Tokens
    held_out: Tokens
    held_out_bytes: int


@dataclass(frozen=True, slots=True)
class Measured:
    """Held-out figures of one domain."""

    loss: float
    """Nats per token."""
    bits_per_byte: float
    tokens: int
    load: Share
    """[layers, experts]; the share of a layer's routed tokens that each expert got."""


@dataclass(slots=True)
class Progress:
    """What a checkpoint carries beside the weights and the optimizer."""

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0


def _digest(document: str) -> bytes:
    return hashlib.blake2b(document[:200].encode(), digest_size=8).digest()


def _held_out(document: str) -> bool:
    """Decided by the document's start, so near copies land on the same side."""
    return int.from_bytes(_digest(document)) % 100 < HELD_OUT_PERCENT


def _up_to(documents: list[str], limit: int) -> list[str]:
    """Documents in the order given until `limit` bytes are reached, the last one cut short."""
    taken: list[str] = []
    for document in documents:
        if limit <= 0:
            break
        taken.append(document.encode()[:limit].decode(errors="ignore"))
        limit -= len(document.encode())
    return taken


def read_domain(path: Path) -> tuple[list[str], list[str]]:
    """Training and held-out documents of one domain, in an order that mixes its sources."""
    text = lzma.decompress(path.read_bytes()).decode()
    documents = sorted(filter(str.strip, text.split("\0")), key=_digest)
    train = [document for document in documents if not _held_out(document)]
    held_out = [document[:HELD_OUT_CHARS] for document in documents if _held_out(document)]
    return _up_to(train, TRAIN_BYTES), _up_to(held_out, HELD_OUT_BYTES)


def _turn(role: str, content: str) -> str:
    return f"{TURN_START}{role}\n{content.rstrip()}{TURN_END}\n"


def as_turns(document: str) -> str:
    """The document as a conversation in which each turn continues the one before.

    A last piece that nothing follows is left out: it would teach the model to answer nothing.
    """
    return "".join(
        _turn("user", match["user"]) + _turn("assistant", match["assistant"])
        for match in TURNS.finditer(document)
        if (match["assistant"] or "").strip()
    )


def _framed(documents: list[str]) -> list[str]:
    """A quarter of the documents as turns; those that are ChatML already stay as they are."""

    def wanted(document: str) -> bool:
        return TURN_START not in document and _digest(document)[-1] % 4 == 0

    return [as_turns(document) if wanted(document) else document for document in documents]


def train_tokenizer(texts: dict[str, list[str]]) -> Tokenizer:
    """A byte-level BPE over an equal share of each domain; the special tokens come first."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=SHAPE["vocab_size"],
        special_tokens=list(SPECIALS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    marks = re.compile("|".join(map(re.escape, SPECIALS)))
    samples = (_up_to(documents, VOCABULARY_BYTES) for documents in texts.values())
    plain = (marks.sub("", text) for text in itertools.chain.from_iterable(samples))
    tokenizer.train_from_iterator(plain, trainer)
    return tokenizer


def encode(tokenizer: Tokenizer, documents: list[str]) -> Tokens:
    """All documents as one stream."""
    end = [tokenizer.token_to_id(END)]
    encoded = tokenizer.encode_batch_fast(documents)
    return np.concatenate([np.array(document.ids + end, dtype=np.uint16) for document in encoded])


def load_corpus(corpus: Path) -> tuple[Tokenizer, list[Domain]]:
    """Reads the domains, learns the vocabulary and encodes; about two minutes on two cores."""
    paths = sorted(corpus.glob("*.txt.xz"))
    if not paths:
        raise SystemExit(f"{corpus} holds no DOMAIN.txt.xz; see `engines/embedded/train.py`")
    texts = {path.name.removesuffix(".txt.xz"): read_domain(path) for path in paths}
    tokenizer = train_tokenizer({name: train for name, (train, _) in texts.items()})
    domains = [
        Domain(
            name,
            encode(tokenizer, _framed(train)),
            encode(tokenizer, held_out),
            sum(len(document.encode()) for document in held_out),
        )
        for name, (train, held_out) in texts.items()
    ]
    return tokenizer, domains


def new_model(seed: int) -> Qwen3MoeForCausalLM:
    """An untrained model in float32; the seed decides its weights."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(seed)
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**SHAPE))


def forward(
    model: Qwen3MoeForCausalLM, ids: torch.Tensor
) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    """Loss of each predicted token [rows * (length - 1)] and router logits, one per layer."""
    out = model.model(input_ids=ids[:, :-1], output_router_logits=True, use_cache=False)
    logits = model.lm_head(out.last_hidden_state).flatten(0, 1)
    losses = functional.cross_entropy(logits, ids[:, 1:].flatten(), reduction="none")
    return losses, out.router_logits


def expert_counts(logits: torch.Tensor) -> torch.Tensor:
    """How many tokens each expert is chosen for, [experts], from one layer's router logits."""
    chosen = logits.topk(TOP_K, dim=-1).indices
    return torch.bincount(chosen.flatten(), minlength=EXPERTS)


def balance_loss(router_logits: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """One when every layer spreads the step's tokens evenly, up to EXPERTS / TOP_K when not."""
    per_layer = []
    for logits in router_logits:
        share = expert_counts(logits).float() / (logits.numel() // EXPERTS * TOP_K)
        per_layer.append(EXPERTS * (share * logits.float().softmax(-1).mean(0)).sum())
    return torch.stack(per_layer).mean()


def _windows(tokens: Tokens) -> Iterator[torch.Tensor]:
    """Batches that predict each token once; the stream's last part row is left out."""
    rows = (len(tokens) - 1) // EVAL_ROW
    starts = np.arange(rows)[:, None] * EVAL_ROW
    windows = tokens[starts + np.arange(EVAL_ROW + 1)].astype(np.int64)
    for first in range(0, rows, EVAL_ROWS):
        yield torch.from_numpy(windows[first : first + EVAL_ROWS])


@torch.no_grad()
def measure(model: Qwen3MoeForCausalLM, domain: Domain) -> Measured:
    """Loss and expert load on the domain's held-out text."""
    nats, tokens = 0.0, 0
    counts = torch.zeros(LAYERS, EXPERTS, dtype=torch.float64)
    for ids in _windows(domain.held_out):
        losses, router_logits = forward(model, ids)
        nats, tokens = nats + losses.sum().item(), tokens + losses.numel()
        counts += torch.stack([expert_counts(logits) for logits in router_logits])
    loss = nats / tokens
    bits_per_byte = loss * len(domain.held_out) / domain.held_out_bytes / math.log(2)
    return Measured(loss, bits_per_byte, tokens, (counts / counts.sum(1, keepdim=True)).numpy())


def divergence(one: Share, other: Share) -> Share:
    """Jensen-Shannon divergence in bits of two loads [layers, experts], one figure per layer."""
    middle = (one + other) / 2

    def entropy(share: Share) -> Share:
        return np.asarray(-(share * np.log2(np.where(share > 0, share, 1.0))).sum(-1))

    return entropy(middle) - (entropy(one) + entropy(other)) / 2


def row_length(done: float) -> int:
    """Tokens in a row once the share `done` of the time is over."""
    return next((length for until, length in ROWS if done < until), ROWS[-1][1])


def batch(domains: list[Domain], length: int, seed: int, step: int) -> torch.Tensor:
    """A row of each domain [domains, length + 1]; a resumed run draws the rows it would have."""
    random = np.random.default_rng((seed, step))
    starts = [random.integers(len(domain.train) - length) for domain in domains]
    rows = [d.train[start : start + length + 1] for d, start in zip(domains, starts, strict=True)]
    return torch.from_numpy(np.stack(rows).astype(np.int64))


def new_optimizer(model: Qwen3MoeForCausalLM) -> torch.optim.AdamW:
    """AdamW that decays matrices only."""
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=PEAK_LR, betas=(0.9, 0.95), fused=True)


def learning_rate(step: int, done: float) -> float:
    """Linear warmup by step, then a cosine to a twentieth over the share of time `done`."""
    cosine = (1 + math.cos(math.pi * min(done, 1.0))) / 2
    return PEAK_LR * min(1.0, (step + 1) / WARMUP_STEPS) * (0.05 + 0.95 * cosine)


class Training:
    """A run that can stop at any checkpoint; `seconds` counts every run that led here."""

    def __init__(self, domains: list[Domain], out: Path, seconds: float, seed: int) -> None:
        self._domains, self._seconds, self._seed = domains, seconds, seed
        self.model = new_model(seed)
        self.progress = Progress()
        self._optimizer = new_optimizer(self.model)
        self._checkpoint = out / CHECKPOINT

    def resume(self) -> None:
        """Continues from the checkpoint, which must be there."""
        saved = torch.load(self._checkpoint, weights_only=True)
        self.model.load_state_dict(saved["model"])
        self._optimizer.load_state_dict(saved["optimizer"])
        self.progress = Progress(**saved["progress"])

    def run(self, started: float) -> None:
        """Trains until the time is up; `started` (monotonic) is when this run's share began."""
        began, saved = started - self.progress.seconds, time.monotonic()
        while (elapsed := time.monotonic() - began) < self._seconds:
            loss = self._step(elapsed / self._seconds)
            self.progress.seconds = time.monotonic() - began
            if self.progress.step % 200 == 0:
                log.info("step %d, %.0f s, loss %.3f", self.progress.step, elapsed, loss)
            if time.monotonic() - saved > CHECKPOINT_S:
                self._save()
                saved = time.monotonic()

    def finish(self) -> None:
        """Removes the checkpoint, which is no part of the model."""
        self._checkpoint.unlink(missing_ok=True)

    def _step(self, done: float) -> float:
        ids = batch(self._domains, row_length(done), self._seed, self.progress.step)
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate(self.progress.step, done)
        losses, router_logits = forward(self.model, ids)
        loss = losses.mean()
        (loss + BALANCE * balance_loss(router_logits)).backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        self.progress.step += 1
        self.progress.tokens += losses.numel()
        return loss.item()

    def _save(self) -> None:
        state = {
            "model": self.model.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "progress": {name: getattr(self.progress, name) for name in Progress.__slots__},
        }
        part = self._checkpoint.with_suffix(".part")
        torch.save(state, part)
        part.replace(self._checkpoint)


def published_names(model: Qwen3MoeForCausalLM) -> dict[str, torch.Tensor]:
    """bf16 weights under the names of published checkpoints: one matrix per expert, not fused."""
    weights: dict[str, torch.Tensor] = {}
    for name, value in model.state_dict().items():
        stem, _, leaf = name.rpartition(".")
        if leaf == "gate_up_proj":
            for expert, (gate, up) in enumerate(pair.chunk(2) for pair in value):
                weights[f"{stem}.{expert}.gate_proj.weight"] = gate
                weights[f"{stem}.{expert}.up_proj.weight"] = up
        elif leaf == "down_proj":
            weights |= {f"{stem}.{e}.down_proj.weight": down for e, down in enumerate(value)}
        elif name != "lm_head.weight":
            weights[name] = value
    return {name: value.to(torch.bfloat16).contiguous() for name, value in weights.items()}


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n")


def write_tokenizer(tokenizer: Tokenizer, out: Path) -> None:
    """`tokenizer.json` and the configs that do not depend on the weights."""
    tokenizer.save(str(out / "tokenizer.json"))
    _write_json(
        out / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": SHAPE["max_position_embeddings"],
            "bos_token": None,
            "eos_token": TURN_END,
            "pad_token": PAD,
            "additional_special_tokens": [TURN_START],
            "clean_up_tokenization_spaces": False,
            "chat_template": CHAT_TEMPLATE,
        },
    )
    stops = [SPECIALS.index(TURN_END), SPECIALS.index(END)]
    generation = {"eos_token_id": stops, "pad_token_id": SPECIALS.index(PAD), "do_sample": False}
    _write_json(out / "generation_config.json", generation)
    _write_json(out / "config.json", SHAPE)


def write_weights(model: Qwen3MoeForCausalLM, out: Path) -> None:
    """Replaces the weights in one step, so a reader has the old ones or the new ones."""
    from safetensors.torch import save_file

    part = out / "model.safetensors.part"
    save_file(published_names(model), part, metadata={"format": "pt"})
    part.chmod(0o644)
    part.replace(out / "model.safetensors")


def reload_weights(out: Path) -> Qwen3MoeForCausalLM:
    """The written weights, as a user loads them, computed in float32."""
    from transformers import Qwen3MoeForCausalLM

    model: Qwen3MoeForCausalLM = Qwen3MoeForCausalLM.from_pretrained(out, dtype=torch.float32)
    return model


def measure_all(model: Qwen3MoeForCausalLM, domains: list[Domain]) -> dict[str, Measured]:
    """Held-out figures by domain."""
    return {domain.name: measure(model, domain) for domain in domains}


def _mean(values: list[float]) -> float:
    return round(sum(values) / len(values), 4)


def load_report(measured: dict[str, Measured]) -> dict[str, Any]:
    """Expert loads on held-out text, and how far those of two domains lie apart, by layer."""
    pairs = {
        f"{a} {b}": divergence(measured[a].load, measured[b].load).round(4).tolist()
        for a, b in itertools.combinations(measured, 2)
    }
    return {
        "share": {name: figures.load.round(4).tolist() for name, figures in measured.items()},
        "jensen_shannon_bits": pairs,
        "jensen_shannon_bits_mean": np.mean(list(pairs.values()), axis=0).round(4).tolist(),
    }


def report(
    training: Training, seed: int, untrained: dict[str, Measured], trained: dict[str, Measured]
) -> dict[str, Any]:
    """What `training.json` says; every mean gives each domain the same weight."""
    return {
        "seed": seed,
        "seconds": round(training.progress.seconds, 1),
        "steps": training.progress.step,
        "tokens_seen": training.progress.tokens,
        "parameters": sum(p.numel() for p in training.model.parameters()),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "licences": LICENCES,
        "held_out_loss": _mean([figures.loss for figures in trained.values()]),
        "held_out_bits_per_byte": _mean([figures.bits_per_byte for figures in trained.values()]),
        "held_out": {
            name: {
                "loss": round(figures.loss, 4),
                "untrained_loss": round(untrained[name].loss, 4),
                "bits_per_byte": round(figures.bits_per_byte, 4),
                "tokens": figures.tokens,
            }
            for name, figures in trained.items()
        },
        "expert_load": load_report(trained),
    }


def run(corpus: Path, out: Path, minutes: float, seed: int, resume: bool) -> None:
    """Writes an untrained model first, then trains it and replaces the weights."""
    started = time.monotonic()
    if resume and not (out / CHECKPOINT).exists():
        raise SystemExit(f"{out} holds no {CHECKPOINT}; start without --resume")
    out.mkdir(parents=True, exist_ok=True)
    tokenizer, domains = load_corpus(corpus)
    write_tokenizer(tokenizer, out)
    log.info("corpus ready after %.0f s", time.monotonic() - started)
    training = Training(domains, out, minutes * 60, seed)
    untrained = measure_all(training.model, domains)
    if resume:
        training.resume()
        started = time.monotonic()
    else:
        write_weights(training.model, out)
    training.run(started)
    write_weights(training.model, out)
    summary = report(training, seed, untrained, measure_all(reload_weights(out), domains))
    _write_json(out / "training.json", summary)
    training.finish()
    log.info("took %.0f s", time.monotonic() - started)
    print(json.dumps(summary["held_out"], indent=2))
    print(f"held-out bits per byte: {summary['held_out_bits_per_byte']}")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--corpus", type=Path, required=True, help="folder of DOMAIN.txt.xz")
    parser.add_argument("--out", type=Path, required=True, help="model directory to write")
    parser.add_argument("--minutes", type=float, default=19.0, help="wall time until training ends")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--resume", action="store_true", help="continue from OUT/checkpoint.pt")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    torch.set_num_threads(args.threads)
    run(args.corpus, args.out, args.minutes, args.seed, args.resume)


if __name__ == "__main__":
    main()
