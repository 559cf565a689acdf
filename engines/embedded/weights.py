"""A Hugging Face directory to a model: config.json, safetensors, fused and stacked as vLLM does."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from engines.embedded import SHIPPED_MODEL as SHIPPED_MODEL
from engines.embedded.model import ARCHITECTURES, CausalLM, ModelConfig, RotaryEmbedding

DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}
FUSED = {  # our name -> the checkpoint's, in row order
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}
HARMLESS = ("rotary_emb.inv_freq", "lm_head.weight")  # computed; tied to the embedding


class ModelError(ValueError):
    """The directory does not hold a model that this engine can run. Says which file, and why."""


def read_config(directory: Path) -> ModelConfig:
    """Raises `ModelError`."""
    if not directory.is_dir():
        raise ModelError(f"model directory {directory} does not exist")
    raw = read_json(directory / "config.json")
    architecture = (raw.get("architectures") or ["none"])[0]
    if architecture not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise ModelError(f"{directory}: architecture {architecture} is not one of {known}")
    try:
        return _config(architecture, raw)
    except KeyError as e:
        raise ModelError(f"{directory / 'config.json'} lacks {e.args[0]!r}") from e


def read_json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_bytes())
    except FileNotFoundError as e:
        raise ModelError(f"{path} does not exist") from e
    except ValueError as e:
        raise ModelError(f"{path} is not JSON: {e}") from e
    if not isinstance(found, dict):
        raise ModelError(f"{path} holds no JSON object")
    return found


def _config(architecture: str, raw: dict[str, Any]) -> ModelConfig:
    num_layers = raw["num_hidden_layers"]
    sparse = raw.get("decoder_sparse_step", 1)
    dense = set(raw.get("mlp_only_layers") or ())
    _refuse_unknown(raw)
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    if rope.get("rope_type", rope.get("type", "default")) != "default":
        raise ModelError(f"rope type {rope.get('rope_type', rope.get('type'))} is not supported")
    return ModelConfig(
        architecture=architecture,
        vocab_size=raw["vocab_size"],
        hidden_size=raw["hidden_size"],
        num_layers=num_layers,
        num_heads=raw["num_attention_heads"],
        num_kv_heads=raw.get("num_key_value_heads", raw["num_attention_heads"]),
        head_dim=raw.get("head_dim") or raw["hidden_size"] // raw["num_attention_heads"],
        intermediate_size=raw.get("intermediate_size", 0),
        rms_norm_eps=raw.get("rms_norm_eps", 1e-6),
        rope_theta=rope.get("rope_theta", raw.get("rope_theta", 10000.0)),
        max_model_len=raw["max_position_embeddings"],
        tie_word_embeddings=raw.get("tie_word_embeddings", False),
        attention_bias=raw.get("attention_bias", False),
        num_experts=raw.get("num_experts") or raw.get("num_local_experts", 0),
        num_experts_per_tok=raw.get("num_experts_per_tok", 0),
        moe_intermediate_size=raw.get("moe_intermediate_size", 0),
        norm_topk_prob=raw.get("norm_topk_prob", False),
        dense_layers=tuple(i for i in range(num_layers) if i in dense or (i + 1) % sparse != 0),
    )


def _refuse_unknown(raw: dict[str, Any]) -> None:
    """What would be computed otherwise than the model was trained is refused, not ignored."""
    for key, known in (("hidden_act", "silu"), ("mlp_bias", False), ("use_sliding_window", False)):
        if raw.get(key, known) != known:
            raise ModelError(f"{key} {raw[key]!r} is not supported; only {known!r} is")


def load_model(directory: Path, dtype: torch.dtype) -> CausalLM:
    """The model with its weights, in `dtype`, on the CPU. Raises `ModelError`."""
    config = read_config(directory)
    with torch.device("meta"):
        model = ARCHITECTURES[config.architecture](config)
    model = model.to_empty(device="cpu").to(dtype)
    if config.tie_word_embeddings:  # leaving the meta device has untied them
        model.lm_head.weight = model.model.embed_tokens.weight
    _restore_buffers(model, config, dtype)
    tensors = _Tensors(directory)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(tensors.take(name, parameter.shape))
    tensors.check_all_taken()
    return model.eval().requires_grad_(False)


def _restore_buffers(model: CausalLM, config: ModelConfig, dtype: torch.dtype) -> None:
    """Buffers are computed, not loaded: compute them off the meta device, share them by layer."""
    whole = RotaryEmbedding(config.head_dim, config.max_model_len, config.rope_theta)
    cache = whole.cos_sin_cache.to(dtype)
    for module in model.modules():
        if isinstance(module, RotaryEmbedding):
            module.cos_sin_cache = cache


class _Tensors:
    """Every tensor of the checkpoint by name, read when it is asked for."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._file_of = {name: file for file in _files(directory) for name in _names(file)}
        self._taken: set[str] = set()

    def take(self, name: str, shape: torch.Size) -> torch.Tensor:
        """Our parameter `name`, put together from the checkpoint's tensors."""
        found = self._find(name)
        if found.shape != shape:
            raise ModelError(f"{self._directory}: {name} is {list(found.shape)}, not {list(shape)}")
        return found

    def check_all_taken(self) -> None:
        """A tensor that nobody asked for belongs to another model, or a quantised one."""
        left = [n for n in self._file_of.keys() - self._taken if not n.endswith(HARMLESS)]
        if left:
            raise ModelError(f"{self._directory}: tensor {min(left)} has no place in this model")

    def _find(self, name: str) -> torch.Tensor:
        if name.endswith(("experts.w13_weight", "experts.w2_weight")):
            return self._experts(name)
        for ours, theirs in FUSED.items():
            if f".{ours}." in name and name not in self._file_of:
                return torch.cat([self._read(name.replace(ours, part)) for part in theirs])
        return self._read(name)

    def _experts(self, name: str) -> torch.Tensor:
        prefix = name.rpartition(".")[0]
        fused = f"{prefix}.{'gate_up_proj' if name.endswith('w13_weight') else 'down_proj'}"
        if fused in self._file_of:
            return self._read(fused)
        parts = ("gate_proj", "up_proj") if name.endswith("w13_weight") else ("down_proj",)
        num = sum(f"{prefix}.{i}.{parts[0]}.weight" in self._file_of for i in range(4096))
        if not num:
            raise ModelError(f"{self._directory}: no experts are stored for {prefix}")
        return torch.stack(
            [
                torch.cat([self._read(f"{prefix}.{i}.{part}.weight") for part in parts])
                for i in range(num)
            ]
        )

    def _read(self, name: str) -> torch.Tensor:
        if name not in self._file_of:
            raise ModelError(f"{self._directory}: tensor {name} is missing from the checkpoint")
        self._taken.add(name)
        with _open(self._file_of[name]) as file:
            return file.get_tensor(name)  # type: ignore[no-any-return]


def _files(directory: Path) -> list[Path]:
    index = directory / "model.safetensors.index.json"
    if index.exists():
        named = sorted(set(read_json(index).get("weight_map", {}).values()))
        files = [directory / name for name in named]
    else:
        files = [directory / "model.safetensors"]
    for file in files:
        if not file.exists():
            raise ModelError(f"{file} does not exist")
    return files


def _names(file: Path) -> Iterator[str]:
    with _open(file) as opened:
        yield from opened.keys()


def _open(file: Path) -> Any:
    try:
        return safe_open(file, framework="pt")
    except (SafetensorError, OSError) as e:
        raise ModelError(f"{file} cannot be read, perhaps it is truncated: {e}") from e
