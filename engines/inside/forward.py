"""Source to callable: loads forward passes, binds them to modules, flips between portfolios.

Nothing is patched in place. A module gets a `forward` of its own beside its class's, and what a
forward pass's `prepare` hung on it, both taken away again by the next flip. Two portfolios stay
resident, the one that runs and the one before it, so that going back loads nothing.
"""

from __future__ import annotations

import fnmatch
import importlib.util
import itertools
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from engines.inside import step
from engines.inside.source import CandidateError, ForwardPass, Guard

Function = Callable[..., Any]
REGISTERED = ("_parameters", "_buffers", "_modules")  # where nn.Module keeps what it was given
_serial = itertools.count(1)  # of this process: module names are global to it


class Fault(RuntimeError):
    """A forward pass could not be loaded or bound, or raised while it ran."""


@dataclass(frozen=True, slots=True)
class File:
    """A forward pass whose file has run, under a module name of its own."""

    source: ForwardPass
    module: types.ModuleType


@dataclass(slots=True)
class Calls:
    """Counts since they were last reset."""

    candidate: int = 0
    orig: int = 0


@dataclass(frozen=True, slots=True)
class Bound:
    """What one portfolio puts on one module."""

    module: torch.nn.Module
    forward: types.MethodType
    attributes: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Loaded:
    """A portfolio, loaded and bound but not installed. The empty one is stock."""

    digest: str = ""
    bounds: tuple[Bound, ...] = ()
    files: tuple[File, ...] = ()
    guards: tuple[Guard, ...] = ()
    faults: list[Fault] = field(default_factory=list)  # not empty: stock answers in its place
    serial: int = 0  # of this binding, whose buffers are its own; 0 is stock

    def serves(self, low: int, high: int) -> bool:
        """Whether one forward of it at least runs in every step of `low` to `high` tokens."""
        return not self.faults and any(low in guard and high in guard for guard in self.guards)


class Forwards:
    """The forward passes of one model. Belongs to the thread that runs steps, but for `read`, which
    touches no module of the model."""

    def __init__(
        self,
        model: torch.nn.Module,
        directory: Path,
        on_fault: Callable[[Fault], None] | None = None,
        inside: AbstractContextManager[None] | None = None,
    ) -> None:
        """Files are written to `directory`: Triton and dynamo read source from there. With
        `on_fault` a forward that raises is told there, and stock answers that call and all later
        ones under that portfolio; without it the `Fault` is raised. What a forward pass brought
        runs within `inside`."""
        self._modules = dict(model.named_modules())
        self._directory = directory
        self._on_fault = on_fault
        self._inside = nullcontext() if inside is None else inside
        self.calls = Calls()
        self.current = Loaded()
        self.previous: Loaded | None = None
        self._dropped: Loaded | None = None  # what `undo` makes the previous one again

    def read(self, sources: Sequence[ForwardPass]) -> tuple[File, ...]:
        """Run the files. Raises `Fault`, and then keeps none."""
        files: list[File] = []
        try:
            for source in sources:
                files.append(File(source, self._execute(source)))
        except Fault:
            _forget(files)
            raise
        return tuple(files)

    def bind(self, digest: str, files: tuple[File, ...]) -> Loaded:
        """Find the modules and prepare them. Raises `Fault`; nothing is installed and nothing is
        left on a module then."""
        try:
            faults: list[Fault] = []
            guards = tuple(file.source.guard for file in files)
            bounds = tuple(self._bounds(files, faults))
            serial = next(_serial) if bounds else 0
            return Loaded(digest, bounds, files, guards, faults, serial)
        except Fault:
            _forget(files)
            raise

    def install(self, loaded: Loaded) -> None:
        """The flip; what ran becomes what `revert` restores."""
        with self.installing(loaded):
            pass
        self.settle()

    @contextmanager
    def installing(self, loaded: Loaded) -> Iterator[None]:
        """`install` when the block ends, for good after `settle`; when it raises, everything is as
        it was."""
        current, previous = self.current, self.previous
        self._flip(current, loaded)
        self.previous, self.current = current, loaded
        try:
            yield
        except BaseException:
            self._flip(loaded, current)
            self.previous, self.current = previous, current
            _forget(loaded.files)
            raise
        self.settle()
        self._dropped = previous

    def undo(self) -> None:
        """As if the last `install` had not been. Not after `settle`."""
        dropped, self._dropped = self._dropped, None
        self.revert()
        self.previous = dropped

    def settle(self) -> None:
        """The last `install` stays; what only `undo` needs goes."""
        if self._dropped is not None:
            _forget(self._dropped.files)
        self._dropped = None

    def revert(self) -> None:
        """Restore the portfolio before the last `install`. Raises `Fault` when there is none."""
        if self.previous is None:
            raise Fault("nothing to revert to: no portfolio was swapped in")
        self._flip(self.current, self.previous)
        _forget(self.current.files)
        self.current, self.previous = self.previous, None

    def give_way(self) -> None:
        """Stock runs, and there is nothing to revert to: what ran has raised."""
        self.install(Loaded())
        self.settle()
        assert self.previous is not None
        _forget(self.previous.files)
        self.previous = None

    def find(self, target: str) -> Iterator[torch.nn.Module]:
        """Modules that a `cls:` or `path:` pattern names."""
        return (self._modules[path] for path in self._paths(target))

    def installed(self, path: str) -> set[str]:
        """Attribute names that the running portfolio put on the module at `path`."""
        module = self._modules[path]
        bounds = (b for b in self.current.bounds if b.module is module)
        return {name for b in bounds for name in ("forward", *b.attributes)}

    def _wrapped(self, path: str) -> bool:
        """Somebody else, such as an offloader, put a forward on this very module."""
        mine = self.installed(path)
        return "forward" in self._modules[path].__dict__ and "forward" not in mine

    def _flip(self, old: Loaded, new: Loaded) -> None:
        for bound in old.bounds:
            for name in ("forward", *bound.attributes):
                bound.module.__dict__.pop(name, None)
        for bound in new.bounds:
            bound.module.__dict__.update(bound.attributes)
            bound.module.__dict__["forward"] = bound.forward

    def _bounds(self, files: Sequence[File], faults: list[Fault]) -> Iterator[Bound]:
        chosen: dict[str, list[tuple[ForwardPass, Function]]] = {}
        extra: dict[str, dict[str, Any]] = {}
        for file in files:
            for path, function in self._matches(file):
                if path not in chosen or all(s is not file.source for s, _ in chosen[path]):
                    self._prepare(file, path, extra.setdefault(path, {}))
                chosen.setdefault(path, []).append((file.source, function))
        for path, members in chosen.items():
            dispatcher = self._dispatcher(path, members, faults)
            yield Bound(self._modules[path], dispatcher, extra[path])

    def _execute(self, source: ForwardPass) -> types.ModuleType:
        name = f"trimtab_forward_{source.digest[:16]}_{next(_serial)}"
        self._directory.mkdir(parents=True, exist_ok=True)
        path = self._directory / f"{name}.py"
        path.write_text(source.source)
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        file = importlib.util.module_from_spec(spec)
        file.__dict__["ORIG"] = self._orig
        sys.modules[name] = file
        try:
            with self._inside:
                spec.loader.exec_module(file)
        except BaseException as e:
            _forget([File(source, file)])
            raise Fault(f"loading it raised {type(e).__name__}: {e}") from e
        return file

    def _orig(self, module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        self.calls.orig += 1
        return type(module).forward(module, *args, **kwargs)

    def _matches(self, file: File) -> Iterator[tuple[str, Function]]:
        for pattern, name in file.source.targets:
            paths = list(self._paths(pattern))
            if not paths:
                raise Fault(f"no module of this model matches {pattern!r}")
            if taken := [p for p in paths if self._wrapped(p)]:
                raise Fault(f"the engine itself wraps the forward of {taken[0]}; leave it alone")
            function = getattr(file.module, name, None)
            if not callable(function):
                raise Fault(f"TARGETS names {name!r}, which is not a function after loading")
            yield from ((path, function) for path in paths)

    def _paths(self, pattern: str) -> Iterable[str]:
        kind, _, rest = pattern.partition(":")
        if kind == "cls":
            return (p for p, m in self._modules.items() if type(m).__name__ == rest)
        return (p for p in self._modules if fnmatch.fnmatchcase(p, rest))

    def _prepare(self, file: File, path: str, into: dict[str, Any]) -> None:
        """Run `prepare` and take what it hung on the module off again, until the flip."""
        prepare = getattr(file.module, "prepare", None)
        if prepare is None:
            return
        before = _Before(self._modules[path])
        try:
            with torch.inference_mode(), self._inside:
                prepare(self._modules[path])
        except KeyboardInterrupt:
            raise
        except BaseException as e:
            raise Fault(f"prepare({path}) raised {type(e).__name__}: {e}") from e
        finally:
            added = before.restore()
        if both := set(added) & (set(into) | before.names):
            raise Fault(f"prepare sets {min(both)!r} on {path}, which is taken; use another name")
        into.update(added)

    def _dispatcher(
        self, path: str, members: list[tuple[ForwardPass, Function]], faults: list[Fault]
    ) -> types.MethodType:
        module = self._modules[path]
        stock = type(module).forward
        calls, on_fault, inside = self.calls, self._on_fault, self._inside
        ranges = [(s.guard.min_tokens, s.guard.max_tokens, f) for s, f in members]

        def forward(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
            num_tokens = step.num_tokens(next(iter((*args, *kwargs.values()))).shape[0])
            for low, high, function in ranges:
                if low <= num_tokens <= high and not faults:
                    calls.candidate += 1
                    try:
                        with inside:
                            return function(self, *args, **kwargs)
                    except KeyboardInterrupt:
                        raise
                    except BaseException as e:  # SystemExit must not end the engine's thread
                        if on_fault is None and isinstance(e, Fault):
                            raise
                        fault = Fault(f"{path} raised {type(e).__name__}: {e}")
                        if on_fault is None:
                            raise fault from e
                        faults.append(fault)
                        on_fault(fault)
            return stock(self, *args, **kwargs)

        return types.MethodType(forward, module)


def as_array(out: object) -> np.ndarray[Any, Any]:
    """A module's output as numpy. bfloat16 has no numpy type and travels as float32."""
    if type(out) is not torch.Tensor:
        raise CandidateError(f"a module returned {type(out).__name__}, not a plain tensor")
    out = out.float() if out.dtype is torch.bfloat16 else out
    return out.detach().contiguous().cpu().numpy()


class _Before:
    """A module as it was. What `prepare` hangs on it comes off again, a registered buffer too."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module
        self._plain = dict(module.__dict__)
        self._registered = {name: dict(self._plain[name]) for name in REGISTERED}

    @property
    def names(self) -> set[str]:
        return set(self._plain).union(*self._registered.values())

    def restore(self) -> dict[str, Any]:
        """What is new or another now, by name."""
        added = _changed(self._plain, self._module.__dict__)
        self._module.__dict__.clear()
        self._module.__dict__.update(self._plain)
        for name, before in self._registered.items():
            held = self._plain[name]
            added |= _changed(before, held)
            held.clear()
            held.update(before)
        self._plain["_non_persistent_buffers_set"].intersection_update(self._registered["_buffers"])
        return added


def _changed(before: dict[str, Any], now: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in now.items() if before.get(name, _absent) is not value}


def _forget(files: Iterable[File]) -> None:
    """What a forward pass keeps in its globals can be as large as the weights."""
    for file in files:
        sys.modules.pop(file.module.__name__, None)
        Path(str(file.module.__file__)).unlink(missing_ok=True)


_absent = object()
