"""A small honest LLM server in torch: paged KV, prefix cache, continuous batching, hot swap."""

from pathlib import Path

SHIPPED_MODEL = Path(__file__).parent / "models" / "tiny-moe"  # here: to name it imports no torch
