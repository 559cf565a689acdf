"""Which tokens run in the next step: continuous batching, first come first served. No tensors."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum

from engines.embedded.blocks import BlockPool, OutOfBlocks, chain


class Finish(StrEnum):
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to pick a token. `seed` makes it independent of what else is in the batch."""

    max_tokens: int = 16
    temperature: float = 1.0  # 0 is greedy
    top_p: float = 1.0
    top_k: int = 0  # 0: all
    seed: int = 0
    stop_token_ids: frozenset[int] = frozenset()
    num_logprobs: int | None = None  # of output tokens, beside the chosen one
    num_prompt_logprobs: int | None = None


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """One token's log-probability (nats), its rank from 1, and the best tokens at its place."""

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """One generated token, or the end. `finish` comes with the last token, or alone on abort."""

    token_id: int | None
    logprob: TokenLogprob | None = None
    finish: Finish | None = None


@dataclass(slots=True, eq=False)
class Request:
    """A request on its way. `on_event` runs on the engine's thread and must not block."""

    id: str
    prompt: tuple[int, ...]
    params: SamplingParams
    on_event: Callable[[TokenEvent], None]
    forced: tuple[int, ...] | None = None  # replay: outputs that are taken whatever is sampled
    output: list[int] = field(default_factory=list)
    num_computed: int = 0  # tokens whose KV is in `blocks`
    num_cached: int | None = None  # prompt tokens found in the cache, at the first admission
    blocks: list[int] = field(default_factory=list)
    keys: list[bytes] = field(default_factory=list)  # of full blocks
    prompt_logprobs: list[TokenLogprob | None] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return len(self.prompt) + len(self.output)

    def token(self, index: int) -> int:
        return (
            self.prompt[index]
            if index < len(self.prompt)
            else self.output[index - len(self.prompt)]
        )

    def tokens(self, start: int, end: int) -> list[int]:
        return [self.token(i) for i in range(start, end)]


@dataclass(frozen=True, slots=True)
class Work:
    """`num_new` tokens of one request, from `request.num_computed` on."""

    request: Request
    num_new: int
    starts_block: bool = False  # its last block is new to it and holds what others left there

    @property
    def samples(self) -> bool:
        return self.request.num_computed + self.num_new == self.request.num_tokens


class Scheduler:
    """Belongs to the engine's thread."""

    def __init__(
        self, pool: BlockPool, max_num_seqs: int, max_num_batched_tokens: int, salt: bytes = b""
    ) -> None:
        """`salt` names the portfolio whose KV this is: no other one's prefix is ever hit."""
        self.pool = pool
        self.salt = salt
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.num_preemptions = 0
        self._max_num_seqs = max_num_seqs
        self._budget = max_num_batched_tokens

    @property
    def is_idle(self) -> bool:
        return not self.running and not self.waiting

    def add(self, request: Request) -> None:
        self.waiting.append(request)

    def remove(self, request: Request) -> None:
        """Finished or aborted, wherever it is; nothing happens when it is nowhere."""
        if request in self.running:
            self.running.remove(request)
            self._release(request)
        elif request in self.waiting:
            self.waiting.remove(request)

    def preempt_all(self) -> int:
        """Everybody waits again, in order, and recomputes. Returns how many ran."""
        num = len(self.running)
        while self.running:
            self._preempt_last()
        return num

    def next_step(self) -> list[Work]:
        """What runs now; blocks are there for it. Empty when there is nothing to do."""
        works: list[Work] = []
        budget = self._budget
        for request in tuple(self.running):
            if budget and request in self.running:
                num_new = min(request.num_tokens - request.num_computed, budget)
                num_held = len(request.blocks)
                if self._make_room(request, num_new):
                    works.append(Work(request, num_new, len(request.blocks) > num_held))
                    budget -= num_new
        works = [w for w in works if w.request in self.running]
        while budget and self.waiting and len(self.running) < self._max_num_seqs:
            work = self._admit(self.waiting[0], budget)
            if work is None:
                break
            works.append(work)
            budget -= work.num_new
        return works

    def computed(self, work: Work) -> None:
        """The step ran: the new tokens' KV is there, full blocks can be found again."""
        request, size = work.request, self.pool.block_size
        request.num_computed += work.num_new
        while len(request.keys) < request.num_computed // size:
            i = len(request.keys)
            previous = request.keys[-1] if request.keys else self.salt
            request.keys.append(chain(previous, request.tokens(i * size, (i + 1) * size)))
            self.pool.remember(request.blocks[i], request.keys[i])

    def _admit(self, request: Request, budget: int) -> Work | None:
        self._find_prefix(request)
        num_new = min(request.num_tokens - request.num_computed, budget)
        needed = -(-(request.num_computed + num_new) // self.pool.block_size)
        num_held = len(request.blocks)
        if needed - num_held > self.pool.num_free:
            self._release(request)
            return None
        while len(request.blocks) < needed:
            request.blocks.append(self.pool.allocate())
        self.waiting.popleft()
        self.running.append(request)
        return Work(request, num_new, needed > num_held)

    def _find_prefix(self, request: Request) -> None:
        """At least one token is left to compute: the last one's logits are wanted."""
        if request.params.num_prompt_logprobs is None:
            size, previous, keys = self.pool.block_size, self.salt, []
            for i in range((request.num_tokens - 1) // size):
                previous = chain(previous, request.tokens(i * size, (i + 1) * size))
                keys.append(previous)
            request.blocks = self.pool.match(keys)
            request.keys = keys[: len(request.blocks)]
            request.num_computed = len(request.blocks) * size
        if request.num_cached is None:
            request.num_cached = min(request.num_computed, len(request.prompt))

    def _make_room(self, request: Request, num_new: int) -> bool:
        """Blocks for the new tokens, at the cost of the youngest; False when that was this one."""
        needed = -(-(request.num_computed + num_new) // self.pool.block_size)
        while len(request.blocks) < needed:
            try:
                request.blocks.append(self.pool.allocate())
            except OutOfBlocks:
                youngest = self.running[-1]
                self._preempt_last()
                if youngest is request:
                    return False
        return True

    def _preempt_last(self) -> None:
        request = self.running.pop()
        self._release(request)
        request.prompt_logprobs.clear()
        self.waiting.appendleft(request)
        self.num_preemptions += 1

    def _release(self, request: Request) -> None:
        self.pool.release(request.blocks)
        request.blocks, request.keys, request.num_computed = [], [], 0
