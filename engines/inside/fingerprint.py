"""Digest of what a forward pass must leave alone: weights, hooks, dtypes, settings, functions.

The installed portfolio's own attributes are not part of it. What differs after a swap was changed
by somebody who had no business with it, and the engine is recycled.
"""

from __future__ import annotations

import gc
import hashlib
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Set

import torch

CHUNK = 1 << 24  # bytes of device memory hashed at once: 0.5 GiB of scratch


def fingerprint(model: torch.nn.Module, installed: Callable[[str], Set[str]]) -> str:
    """Hex digest of `model` and its process; `installed(path)` names a portfolio's attributes."""
    h = hashlib.blake2b(digest_size=16)
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        h.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        h.update(_content(tensor.detach().contiguous()))
    for path, module in model.named_modules():
        own = set(module.__dict__) - installed(path)
        settings = [(name, _plain(module.__dict__[name])) for name in sorted(own)]
        h.update(f"{path} {type(module).__qualname__} {settings}".encode())
    owners = {c for m in model.modules() for c in type(m).__mro__}
    for owner in sorted(owners, key=lambda c: c.__qualname__):
        h.update(repr(_functions(owner)).encode())
    h.update(repr(_process_state()).encode())
    return h.hexdigest()


def _content(tensor: torch.Tensor) -> memoryview | bytes:
    """The bytes themselves on a CPU; elsewhere sums that move when a bit or two bytes do."""
    flat = tensor.reshape(-1).view(torch.uint8)
    if tensor.device.type == "cpu":
        return flat.numpy().data
    return repr([_sums(flat[at : at + CHUNK]) for at in range(0, len(flat), CHUNK)]).encode()


def _sums(part: torch.Tensor) -> tuple[int, int]:
    """Fletcher's: the sum, and the sum weighted by position, modulo 2**64."""
    wide = part.to(torch.int64)
    position = torch.arange(1, len(part) + 1, device=part.device)
    return int(wide.sum()), int((wide * position).sum())


def _plain(value: object) -> object:
    """What of an attribute is worth a look: numbers and names as they are, and who the hooks are.
    Tensors have been hashed already."""
    if isinstance(value, bool | int | float | str | tuple | None):
        return value
    return [id(v) for v in value.values()] if isinstance(value, OrderedDict) else None


def _functions(owner: object) -> list[tuple[str, int]]:
    """Who they are, but for two of `nn.Module` that dynamo wraps and no step calls."""
    found = {name: id(value) for name, value in vars(owner).items() if callable(value)}
    return sorted((n, i) for n, i in found.items() if n not in ("__init__", "__setstate__"))


def _process_state() -> tuple[object, ...]:
    """Settings and functions that a forward pass has no business with."""
    return (
        torch.get_default_dtype(),
        torch.get_num_threads(),
        torch.get_num_interop_threads(),
        torch.is_grad_enabled(),
        torch.get_float32_matmul_precision(),
        torch.are_deterministic_algorithms_enabled(),
        torch.backends.mkldnn.enabled,
        torch.backends.cuda.flash_sdp_enabled(),  # type: ignore[no-untyped-call]
        torch.backends.cuda.math_sdp_enabled(),  # type: ignore[no-untyped-call]
        gc.isenabled(),
        threading.active_count(),
        *(id(f) for f in (time.time, time.monotonic, time.perf_counter)),
        *(id(f) for f in (torch.matmul, torch.topk, torch.cat, torch.zeros_like, torch.where)),
        *(_functions(owner) for owner in (torch.nn.functional, torch.Tensor)),
        len(torch.nn.modules.module._global_forward_hooks),
        len(torch.nn.modules.module._global_forward_pre_hooks),
    )
