"""Logits to a token and its log-probabilities, one request at a time."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from engines.embedded.scheduler import SamplingParams, TokenLogprob


def sample(logits: Tensor, params: SamplingParams, position: int) -> int:
    """A token from one row [vocab_size]. Depends on the row, the seed and the position alone."""
    if params.temperature == 0.0:
        return int(logits.argmax())
    wide = logits.double() / params.temperature
    values, ids = wide.sort(descending=True)
    if params.top_k:
        values, ids = values[: params.top_k], ids[: params.top_k]
    probabilities = values.softmax(-1)
    before = probabilities.cumsum(-1) - probabilities
    probabilities = probabilities.masked_fill(before >= params.top_p, 0.0)
    total = probabilities.cumsum(-1)
    drawn = np.random.default_rng((params.seed, position)).random() * float(total[-1])
    index = int(torch.searchsorted(total, drawn, right=True))
    return int(ids[min(index, int((probabilities > 0).sum()) - 1)])


def describe(logprobs: Tensor, token_id: int, num_top: int) -> TokenLogprob:
    """A token at one row of log-probabilities [vocab_size]."""
    own = logprobs[token_id]
    values, ids = logprobs.topk(num_top) if num_top else (logprobs[:0], logprobs[:0])
    top = tuple(zip(map(int, ids.tolist()), values.tolist(), strict=True))
    return TokenLogprob(token_id, float(own), int((logprobs > own).sum()) + 1, top)
