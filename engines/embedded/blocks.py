"""Paged KV: blocks, who holds them, and which prefix each one remembers. No tensors here."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field


class OutOfBlocks(RuntimeError):
    """No free block is left; somebody must be preempted."""


@dataclass(slots=True)
class _Block:
    id: int
    num_users: int = 0
    key: bytes | None = None  # chained hash of all tokens up to its end


@dataclass(slots=True)
class BlockPool:
    """`num_blocks` blocks of `block_size` tokens. A full block is found again by the hash of the
    whole prefix, salted by the portfolio that wrote it; a free one is forgotten when it is reused,
    longest unused first."""

    num_blocks: int
    block_size: int
    _blocks: list[_Block] = field(init=False)
    _free: OrderedDict[int, None] = field(init=False)
    _by_key: dict[bytes, int] = field(init=False)

    def __post_init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Forget every prefix. Only when nobody holds a block."""
        self._blocks = [_Block(i) for i in range(self.num_blocks)]
        self._free = OrderedDict((i, None) for i in range(self.num_blocks))
        self._by_key = {}

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def usage(self) -> float:
        return 1.0 - len(self._free) / self.num_blocks

    def match(self, keys: Sequence[bytes]) -> list[int]:
        """Take the longest known run of leading blocks; the caller holds them from now on."""
        found: list[int] = []
        for key in keys:
            block_id = self._by_key.get(key)
            if block_id is None:
                break
            self._hold(block_id)
            found.append(block_id)
        return found

    def allocate(self) -> int:
        """One block, with whatever was left in it. Raises `OutOfBlocks`."""
        if not self._free:
            raise OutOfBlocks(f"all {self.num_blocks} KV blocks are in use")
        block = self._blocks[next(iter(self._free))]
        self._forget(block)
        self._hold(block.id)
        return block.id

    def remember(self, block_id: int, key: bytes) -> None:
        """The block is full and holds the prefix `key`. The first block with a key keeps it."""
        block = self._blocks[block_id]
        if block.key is None and key not in self._by_key:
            block.key = key
            self._by_key[key] = block_id

    def release(self, block_ids: Sequence[int]) -> None:
        """Let go; the last blocks are forgotten first, since they need the first ones to be hit."""
        for block_id in reversed(block_ids):
            block = self._blocks[block_id]
            block.num_users -= 1
            if block.num_users == 0:
                self._free[block_id] = None

    def _hold(self, block_id: int) -> None:
        self._free.pop(block_id, None)
        self._blocks[block_id].num_users += 1

    def _forget(self, block: _Block) -> None:
        if block.key is not None:
            del self._by_key[block.key]
            block.key = None


def chain(previous: bytes, tokens: Sequence[int]) -> bytes:
    """The key of a full block behind the prefix `previous`; the first one's is the salt."""
    h = hashlib.blake2b(previous, digest_size=16)
    h.update(b"".join(t.to_bytes(4, "little") for t in tokens))
    return h.digest()
