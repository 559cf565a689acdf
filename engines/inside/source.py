"""A forward pass as text: parsed without running it, named by its digest, signed.

Standard library only: an engine's own process re-reads what it is told, and checks the signature
over the digest that it computed itself.
"""

from __future__ import annotations

import ast
import hashlib
import hmac
import json
from dataclasses import dataclass, field
from enum import StrEnum

CONTRACT_VERSION = 1


class CandidateError(ValueError):
    """The source cannot be a forward pass, or the engine could not install or run it. Says why."""


class Scope(StrEnum):
    """What a signature allows: a trial on an engine without clients, or serving them."""

    TRIAL = "trial"
    SERVE = "serve"


@dataclass(frozen=True, slots=True)
class Guard:
    """Which batches a forward pass serves: scheduled tokens without padding, bounds inclusive."""

    min_tokens: int = 1
    max_tokens: int = 2**31 - 1

    def __contains__(self, num_tokens: int) -> bool:
        return self.min_tokens <= num_tokens <= self.max_tokens


@dataclass(frozen=True, slots=True)
class ForwardPass:
    """One candidate file. Build it with `from_source`, which reads it without running it."""

    source: str = field(repr=False)
    targets: tuple[tuple[str, str], ...]  # (pattern, function name), in the file's order
    guard: Guard
    digest: str  # sha256 hex over source, guard and contract version

    @classmethod
    def from_source(cls, source: str) -> ForwardPass:
        """Parse a candidate. Raises `CandidateError` with the line that breaks the contract."""
        try:
            tree = ast.parse(source)
        except (SyntaxError, ValueError, RecursionError, MemoryError) as e:
            where = f"line {e.lineno}: {e.msg}" if isinstance(e, SyntaxError) else str(e)
            raise CandidateError(f"the source does not parse: {where}") from e
        names = _literals(tree, ("TARGETS", "WHEN"))
        functions = {n.name for n in tree.body if isinstance(n, ast.FunctionDef)}
        targets, guard = _targets(names.get("TARGETS"), functions), _guard(names.get("WHEN"))
        text = json.dumps([CONTRACT_VERSION, source, guard.min_tokens, guard.max_tokens])
        return cls(source, targets, guard, hashlib.sha256(text.encode()).hexdigest())


def _literals(tree: ast.Module, wanted: tuple[str, ...]) -> dict[str, object]:
    found: dict[str, object] = {}
    for node in tree.body:
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=value) if name in wanted:
                try:
                    found[name] = ast.literal_eval(value)
                except ValueError as e:
                    raise CandidateError(
                        f"line {node.lineno}: {name} must be a plain literal"
                    ) from e
    return found


def _targets(value: object, functions: set[str]) -> tuple[tuple[str, str], ...]:
    if not isinstance(value, dict) or not value:
        raise CandidateError('TARGETS is missing; write TARGETS = {"cls:RMSNorm": "norm"}')
    for pattern, name in value.items():
        if not isinstance(pattern, str) or not pattern.startswith(("cls:", "path:")):
            raise CandidateError(f"TARGETS key {pattern!r} must start with cls: or path:")
        if name not in functions:
            raise CandidateError(f"TARGETS names {name!r}, but the file defines no such function")
    return tuple(value.items())


def _guard(value: object) -> Guard:
    match value:
        case None:
            return Guard()
        case {"num_tokens": (int(low), int(high)), **rest} if not rest and 1 <= low <= high:
            return Guard(low, high)
    raise CandidateError(f'WHEN is {value!r}; write WHEN = {{"num_tokens": (1, 64)}}')


@dataclass(frozen=True, slots=True)
class Portfolio:
    """What an engine runs: the first forward pass whose target and guard fit a batch serves it.

    The empty portfolio is the stock engine; its digest is "".
    """

    forwards: tuple[ForwardPass, ...] = ()

    @property
    def digest(self) -> str:
        if not self.forwards:
            return ""
        return hashlib.sha256("/".join(f.digest for f in self.forwards).encode()).hexdigest()


STOCK = Portfolio()


def sign(key: bytes, scope: Scope, digest: str) -> str:
    """HMAC-SHA256 hex that lets an engine holding `key` take the portfolio `digest` in `scope`."""
    return hmac.new(key, f"{scope}:{digest}".encode(), "sha256").hexdigest()
