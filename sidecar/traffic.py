"""Chat-like and code-like traffic as an OpenAI client would send it, planned before it is sent.

Lengths and gaps follow two published production traces, lengths divided and gaps scaled as asked.
The text is cut from the Python on this machine, its sources (code) and their documentation (chat),
so it differs between machines; for one machine and seed the plan is the same, byte for byte.
"""

from __future__ import annotations

import ast
import sysconfig
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

CHARS_PER_TOKEN = 3.5  # where nobody gives a tokenizer
TEMPLATE_TOKENS = 10  # about what a chat template adds
NUM_PREFIXES = 4  # common beginnings, of each domain


class Domain(StrEnum):
    CHAT = "chat"
    CODE = "code"


@dataclass(frozen=True, slots=True)
class Quantiles:
    """What was published, at the shares `AT` of requests, as facts."""

    prompt_tokens: tuple[int, ...]
    output_tokens: tuple[int, ...]
    gap_s: tuple[float, ...]  # between arrivals


AT = (0.0, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99)

# Derived from Azure/AzurePublicDataset, AzureLLMInferenceTrace_conv.csv (19,366 requests) and
# AzureLLMInferenceTrace_code.csv (8,819), 16 November 2023, CC-BY-4.0; see Patel et al.,
# "Splitwise: Efficient generative LLM inference using phase splitting", ISCA 2024. Cut at the 99th
# percentile: the code trace has one gap of 217 s.
CONVERSATION = Quantiles(
    (2, 181, 207, 387, 403, 703, 1020, 1071, 1130, 1315, 2734, 4083, 4142),
    (7, 41, 54, 77, 91, 103, 129, 177, 384, 400, 424, 451, 601),
    (0, 0.0063, 0.0161, 0.0365, 0.0607, 0.0873, 0.118, 0.159, 0.214, 0.289, 0.421, 0.565, 0.890),
)
CODE = Quantiles(
    (3, 75, 147, 386, 770, 1075, 1469, 1909, 2433, 3192, 5188, 7303, 7436),
    (6, 6, 7, 8, 9, 11, 13, 16, 20, 29, 55, 90, 251),
    (0, 0.0001, 0.0002, 0.0012, 0.0033, 0.0151, 0.0638, 0.095, 0.1, 0.16, 0.273, 0.401, 2.21),
)


@dataclass(frozen=True, slots=True)
class Phase:
    """A stretch of one kind of traffic."""

    domain: Domain
    num_requests: int
    requests_per_s: float


@dataclass(frozen=True, slots=True)
class Shape:
    """How the published traffic is made to fit a small engine."""

    divide_lengths_by: float = 8.0
    prefix_share: float = 0.5  # of requests, those that begin with a common text
    prefix_tokens: float = 0.5  # length of that text, as a share of the median prompt
    sampled_share: float = 0.25  # of requests, those with a temperature and a seed; others greedy


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """One request to POST. The engine is told to write exactly `body["max_tokens"]` tokens."""

    arrival_s: float  # from the plan's start
    path: str
    body: dict[str, Any]
    domain: Domain
    num_prompt_tokens: int  # as planned; the text meets it within a few tokens


def plan(
    phases: Sequence[Phase],
    model: str,
    seed: int = 0,
    shape: Shape | None = None,
    encode: Callable[[str], Sequence[int]] | None = None,
) -> Iterator[PlannedRequest]:
    """Requests in order of arrival, one phase after the other.

    `encode` is the model's tokenizer; without one, lengths go by `CHARS_PER_TOKEN`. Reads the
    standard library's sources and tokenizes: consume it off the event loop. Raises
    `FileNotFoundError` where Python came without its sources.
    """
    shape = shape or Shape()
    writer = Writer(encode)
    start_s = 0.0
    for number, phase in enumerate(phases):
        rng = np.random.default_rng([seed, number])
        for request in _phase(phase, model, shape, writer, rng, start_s):
            yield request
            start_s = request.arrival_s


@dataclass(frozen=True, slots=True)
class Lengths:
    """What a phase's requests will look like, without their text."""

    arrivals_s: npt.NDArray[np.float64]  # [num_requests], from the phase's start
    prompt_tokens: npt.NDArray[np.int64]
    output_tokens: npt.NDArray[np.int64]


def lengths(phase: Phase, shape: Shape, rng: np.random.Generator) -> Lengths:
    """Draw from the published quantiles, linearly between them. The mean gap is exactly the asked
    rate's in expectation; bursts stay bursts."""
    table = CONVERSATION if phase.domain is Domain.CHAT else CODE
    mean_gap_s = np.trapezoid(table.gap_s, AT) / AT[-1]
    gaps = _draw(table.gap_s, phase.num_requests, rng) / (mean_gap_s * phase.requests_per_s)
    drawn = (
        _draw(values, phase.num_requests, rng) / shape.divide_lengths_by
        for values in (table.prompt_tokens, table.output_tokens)
    )
    prompts, outputs = (np.maximum(np.rint(d), 1).astype(np.int64) for d in drawn)
    return Lengths(np.cumsum(gaps), prompts, outputs)


def _draw(values: Sequence[float], num: int, rng: np.random.Generator) -> npt.NDArray[np.float64]:
    return np.interp(rng.random(num) * AT[-1], AT, values)


def _phase(
    phase: Phase,
    model: str,
    shape: Shape,
    writer: Writer,
    rng: np.random.Generator,
    start_s: float,
) -> Iterator[PlannedRequest]:
    drawn = lengths(phase, shape, rng)
    table = CONVERSATION if phase.domain is Domain.CHAT else CODE
    median = table.prompt_tokens[AT.index(0.5)] / shape.divide_lengths_by
    num_prefix = max(1, round(median * shape.prefix_tokens))
    prefixes = [writer.text(phase.domain, num_prefix, rng) for _ in range(NUM_PREFIXES)]
    for at, num_prompt, num_output in zip(
        drawn.arrivals_s.tolist(),
        drawn.prompt_tokens.tolist(),
        drawn.output_tokens.tolist(),
        strict=True,
    ):
        prefix = prefixes[rng.integers(NUM_PREFIXES)]
        if rng.random() >= shape.prefix_share or num_prompt < 2 * num_prefix:
            prefix = ""
        overhead = TEMPLATE_TOKENS if phase.domain is Domain.CHAT else 0
        num_own = num_prompt - overhead - (num_prefix if prefix else 0)
        own = writer.text(phase.domain, max(1, num_own), rng)
        path, body = _asked(phase.domain, prefix, own)
        body |= {"model": model, "max_tokens": num_output, "ignore_eos": True}
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        body |= _sampling(shape, rng)
        yield PlannedRequest(start_s + at, path, body, phase.domain, num_prompt)


def _asked(domain: Domain, prefix: str, own: str) -> tuple[str, dict[str, Any]]:
    if domain is Domain.CODE:
        return "/v1/completions", {"prompt": prefix + own}
    system = [{"role": "system", "content": prefix}] if prefix else []
    return "/v1/chat/completions", {"messages": [*system, {"role": "user", "content": own}]}


def _sampling(shape: Shape, rng: np.random.Generator) -> dict[str, Any]:
    seed = int(rng.integers(2**31))
    if rng.random() >= shape.sampled_share:
        return {"temperature": 0}
    return {"temperature": 0.8, "top_p": 0.95, "seed": seed}


def tokenizer(model: Path) -> Callable[[str], list[int]]:
    """`encode` of the model in this folder, special tokens left out. Needs the extra `engine`."""
    from tokenizers import Tokenizer

    loaded = Tokenizer.from_file(str(model / "tokenizer.json"))
    return lambda text: list(loaded.encode(text, add_special_tokens=False).ids)


# ---- text --------------------------------------------------------------------------------------

CORPUS_CHARS = 1_000_000  # of sources read; some 150 kB of documentation lie in them


class Writer:
    """Cuts text of a wanted number of tokens out of the standard library."""

    def __init__(self, encode: Callable[[str], Sequence[int]] | None = None) -> None:
        self._encode = encode
        sources = _sources(Path(sysconfig.get_paths()["stdlib"]))
        prose = "\n\n".join(_documentation(source) for source in sources)
        self._text = {Domain.CODE: "\n".join(sources), Domain.CHAT: prose}

    def text(self, domain: Domain, num_tokens: int, rng: np.random.Generator) -> str:
        """Begins with a line of its own; the same text comes back only by chance."""
        corpus = self._text[domain]
        place = int(rng.integers(len(corpus)))
        begin = corpus.find("\n", place) + 1
        return self._cut(corpus[begin:] + corpus[:begin], num_tokens)

    def _cut(self, text: str, num_tokens: int) -> str:
        """The shortest beginning with that many tokens. A token is taken to be 16 characters at
        most; where it is longer, the text comes out short."""
        encode = self._encode
        if encode is None:
            return text[: max(1, round(num_tokens * CHARS_PER_TOKEN))]
        lengths = range(1, 16 * num_tokens)
        chars = bisect_left(lengths, num_tokens, key=lambda n: len(encode(text[:n])))
        return text[: chars + 1]


def _sources(stdlib: Path) -> list[str]:
    sources: list[str] = []
    for path in sorted(stdlib.glob("[a-z]*.py")):
        if sum(map(len, sources)) > CORPUS_CHARS:
            return sources
        sources.append(path.read_text(encoding="utf-8", errors="replace"))
    if not sources:
        raise FileNotFoundError(f"{stdlib} holds no Python sources to cut text from")
    return sources


def _documentation(source: str) -> str:
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef)
    found = (ast.get_docstring(n) for n in ast.walk(ast.parse(source)) if isinstance(n, kinds))
    return "\n\n".join(text for text in found if text)
