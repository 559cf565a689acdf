"""Every name of vLLM's that Trimtab hooks into, and whether a release still has it.

vLLM promises none of them and moves some, so all are looked up before the first is used: live in
the process that serves, or in the files of an unpacked wheel, where nothing is imported
(`python -m engines.inside.vllm_hooks SITE_PACKAGES`). What is there decides; the version only helps
to say why it is not.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

SUPPORTED = (0, 26)  # the first release whose hooks are known


@dataclass(frozen=True, slots=True)
class Hook:
    """One name, and what of it is used. A function within a function is written like a member:
    `decorate.__call__`."""

    group: str
    module: str  # where the newest known release has it
    qualname: str
    what_for: str  # goes on from "needed to"
    parameters: tuple[str, ...] = ()  # of a function; **kwargs takes any
    attributes: tuple[str, ...] = ()  # of a class or its instances, those of its bases too
    tests: tuple[str, ...] = ()  # what an `if` of it reads: `self.x`, or `x` of anything
    strings: tuple[str, ...] = ()  # literals in it
    or_in: tuple[str, ...] = ()  # modules that older ones have it in
    any_of: str = ""  # a group's alternatives by name: one of them must be there whole
    optional: bool = False


@dataclass(frozen=True, slots=True)
class Verdict:
    """Of one hook."""

    hook: Hook
    name: str  # in the module that this release has it in
    lack: str  # a readable line; empty: all of it is there


@dataclass(frozen=True, slots=True)
class Findings:
    """What a release has. Trimtab can run in it when nothing is `missing`."""

    missing: tuple[str, ...]  # a readable line each
    absent_options: tuple[str, ...]  # likewise; also of an alternative that can be done without
    version: str  # empty: unknown
    verdicts: tuple[Verdict, ...] = ()  # in the table's order


V1, V2 = "the V1 model runner", "the V2 model runner"
_in_v1 = partial(Hook, "model runner", "vllm.v1.worker.gpu_model_runner", any_of=V1)
_in_v2 = partial(Hook, "model runner", "vllm.v1.worker.gpu.model_runner", any_of=V2)
_in_client = partial(Hook, "pause", "vllm.v1.engine.core_client")
_in_server = partial(Hook, "server", "vllm.v1.engine.async_llm")
_in_graphs = partial(Hook, "graph capture")
_in_step = partial(Hook, "replay", "vllm.v1.core.sched.output")

# fmt: off
HOOKS: tuple[Hook, ...] = (
    # the way in
    Hook("worker extension", "vllm.config", "ParallelConfig", "be mixed into the worker",
         attributes=("worker_extension_cls",)),
    Hook("worker extension", "vllm.v1.worker.worker_base", "WorkerWrapperBase.init_worker",
         "be mixed into the worker", tests=("worker_extension_cls",)),
    Hook("middleware", "vllm.entrypoints.common.cli_args", "FrontendArgs",
         "open a socket in the API process", attributes=("middleware",),
         or_in=("vllm.entrypoints.launchers.cli_args", "vllm.entrypoints.openai.cli_args")),
    Hook("middleware", "vllm.entrypoints.launchers.api_server.app_state", "init_app_state",
         "find the engine from the middleware", parameters=("engine_client", "state"),
         or_in=("vllm.entrypoints.openai.api_server",)),
    _in_server("AsyncLLM", "reach the engine's core and count its requests",
               attributes=("engine_core", "output_processor")),
    _in_server("AsyncLLM.collective_rpc", "reach the workers",
               parameters=("method", "timeout", "args", "kwargs")),
    _in_server("AsyncLLM.reset_prefix_cache", "forget what a replay wrote"),
    Hook("server", "vllm.v1.engine.output_processor",
         "OutputProcessor.get_num_unfinished_requests", "know that nobody is being served"),
    Hook("gauges", "vllm.v1.metrics.loggers", "PrometheusStatLogger",
         "report queue and KV cache", optional=True,
         strings=("vllm:num_requests_waiting", "vllm:num_requests_running",
                  "vllm:kv_cache_usage_perc")),
    # between two steps
    Hook("pause", "vllm.v1.engine", "PauseMode", "pause without losing requests",
         strings=("keep",)),
    Hook("pause", "vllm.v1.engine.async_llm", "AsyncLLM.pause_generation",
         "pause between two steps", parameters=("mode", "clear_cache")),
    Hook("pause", "vllm.v1.engine.async_llm", "AsyncLLM.resume_generation", "go on after a swap"),
    _in_client("AsyncMPClient.pause_scheduler_async", "pause between two steps",
               parameters=("mode", "clear_cache")),
    _in_client("AsyncMPClient.resume_scheduler_async", "go on after a swap"),
    Hook("pause", "vllm.v1.engine.core", "EngineCore._reset_caches",
         "preempt what is running, whose KV another forward pass wrote",
         parameters=("reset_running_requests",)),
    # steps
    Hook("worker", "vllm.v1.worker.gpu_worker", "Worker", "reach the model and its settings",
         attributes=("model_runner", "model_config", "vllm_config", "device")),
    Hook("worker", "vllm.v1.worker.gpu_worker", "Worker.execute_model", "run a step",
         parameters=("scheduler_output",)),
    Hook("worker", "vllm.v1.worker.gpu_worker", "Worker.sample_tokens", "end a step",
         parameters=("grammar_output",)),
    Hook("uncompiled steps", "vllm.compilation.decorators", "_support_torch_compile.__call__",
         "run a portfolio's steps uncompiled", tests=("self.do_not_compile",)),
    Hook("uncompiled steps", "vllm.model_executor.custom_op", "CustomOp.dispatch_forward",
         "give uncompiled steps the kernels of eager mode", parameters=("compile_native",)),
    Hook("uncompiled steps", "vllm.model_executor.custom_op", "CustomOp",
         "give uncompiled steps the kernels of eager mode", attributes=("_forward_method",)),
    Hook("uncompiled steps", "vllm.config", "get_cached_compilation_config",
         "ask for the kernels of eager mode"),
    Hook("module calls", "vllm.forward_context", "set_forward_context", "call one module alone",
         parameters=("attn_metadata", "vllm_config", "num_tokens")),
    Hook("step view", "vllm.forward_context", "get_forward_context",
         "show a forward pass its step"),
    Hook("step view", "vllm.forward_context", "ForwardContext", "show a forward pass its step",
         attributes=("attn_metadata", "no_compile_layers", "batch_descriptor")),
    Hook("step view", "vllm.forward_context", "BatchDescriptor", "tell graphs apart by size",
         attributes=("num_tokens",)),
    Hook("step view", "vllm.config", "set_current_vllm_config", "run a module outside of a step",
         parameters=("vllm_config",)),
    # V1: a wrapper around the model keeps the graphs
    _in_v1("GPUModelRunner", "know the runner's state",
           attributes=("cudagraph_dispatcher", "input_batch", "requests", "kv_caches",
                       "max_num_tokens", "kv_cache_config", "execute_model_state", "positions")),
    _in_v1("GPUModelRunner.execute_model", "run a step", parameters=("scheduler_output",)),
    _in_v1("GPUModelRunner.sample_tokens", "end a step", parameters=("grammar_output",)),
    _in_v1("GPUModelRunner.get_model", "reach the model"),
    _in_v1("GPUModelRunner._dummy_run", "try a forward pass",
           parameters=("num_tokens", "skip_eplb", "force_attention", "uniform_decode",
                       "cudagraph_runtime_mode")),
    _in_v1("GPUModelRunner.capture_model", "capture graphs"),
    _in_v1("GPUModelRunner._warmup_and_capture", "capture one graph",
           parameters=("desc", "cudagraph_runtime_mode", "num_warmups")),
    Hook("model runner", "vllm.compilation.cuda_graph", "CUDAGraphWrapper", "swap graphs",
         attributes=("concrete_cudagraph_entries", "graph_pool", "_all_instances"), any_of=V1),
    Hook("model runner", "vllm.v1.cudagraph_dispatcher", "CudagraphDispatcher", "swap graphs",
         attributes=("cudagraph_keys", "keys_initialized",), any_of=V1),
    Hook("model runner", "vllm.v1.cudagraph_dispatcher", "CudagraphDispatcher.get_capture_descs",
         "know which graphs there are", any_of=V1),
    # V2: a manager keeps them
    _in_v2("GPUModelRunner", "know the runner's state",
           attributes=("cudagraph_manager", "req_states", "kv_caches", "max_num_tokens",
                       "kv_cache_config", "execute_model_state", "input_buffers")),
    _in_v2("GPUModelRunner.execute_model", "run a step",
           parameters=("scheduler_output", "dummy_run")),
    _in_v2("GPUModelRunner.sample_tokens", "end a step", parameters=("grammar_output",)),
    _in_v2("GPUModelRunner.get_model", "reach the model"),
    _in_v2("GPUModelRunner._dummy_run", "try a forward pass",
           parameters=("num_tokens", "skip_eplb", "uniform_decode")),
    _in_v2("GPUModelRunner.capture_model", "capture graphs"),
    _in_v2("ExecuteModelState", "know the order of a step's rows", attributes=("input_batch",)),
    Hook("model runner", "vllm.v1.worker.gpu.states", "RequestState", "know who is being served",
         attributes=("req_id_to_index",), any_of=V2),
    Hook("model runner", "vllm.v1.worker.gpu.cudagraph_utils", "CudaGraphManager", "swap graphs",
         attributes=("graphs", "pool", "_graphs_captured", "_capture_descs", "_candidates"),
         any_of=V2),
    Hook("model runner", "vllm.v1.worker.gpu.cudagraph_utils", "CudaGraphManager.capture",
         "capture a graph", parameters=("create_forward_fn",), any_of=V2),
    # capturing as vLLM does at its start
    _in_graphs("vllm.config", "CUDAGraphMode", "tell full graphs from piecewise ones",
               attributes=("NONE", "FULL")),
    _in_graphs("vllm.compilation.monitor", "set_cudagraph_capturing_enabled", "capture a graph"),
    _in_graphs("vllm.distributed.parallel_state", "graph_capture", "capture a graph",
               parameters=("device",)),
    _in_graphs("vllm.v1.worker.workspace", "lock_workspace", "capture a graph"),
    _in_graphs("vllm.v1.worker.workspace", "unlock_workspace", "capture a graph"),
    # steps that the scheduler never made
    _in_step("SchedulerOutput", "run real requests again",
             attributes=("scheduled_new_reqs", "scheduled_cached_reqs", "num_scheduled_tokens",
                         "total_num_scheduled_tokens", "finished_req_ids",
                         "num_common_prefix_blocks")),
    _in_step("SchedulerOutput.make_empty", "run real requests again"),
    _in_step("NewRequestData", "run real requests again",
             attributes=("req_id", "prompt_token_ids", "mm_features", "sampling_params",
                         "pooling_params", "block_ids", "num_computed_tokens", "lora_request",
                         "prefill_token_ids")),
    _in_step("CachedRequestData", "run real requests again",
             attributes=("req_ids", "resumed_req_ids", "new_token_ids", "all_token_ids",
                         "new_block_ids", "num_computed_tokens", "num_output_tokens")),
    # options
    Hook("expert counts", "vllm.model_executor.layers.fused_moe.router.base_router", "BaseRouter",
         "count the experts that live steps choose",
         attributes=("set_capture_fn", "capture_fn", "global_num_experts"), optional=True),
    Hook("layer-cut loader", "vllm.model_executor.model_loader", "register_model_loader",
         "load a model's first layers only", parameters=("load_format",), optional=True),
    Hook("layer-cut loader", "vllm.model_executor.model_loader.default_loader",
         "DefaultModelLoader.get_all_weights", "load a model's first layers only",
         parameters=("model_config", "model"), optional=True),
)
# fmt: on


def probe_live(hooks: Sequence[Hook] = HOOKS) -> Findings:
    """In a process that has vLLM. Imports every module that a hook is in: seconds, where they are
    not loaded yet. Raises nothing."""
    top = hooks[0].module.partition(".")[0]
    try:
        package = importlib.import_module(top)
    except Exception as e:  # an import runs anything
        return Findings((f"{top} cannot be imported: {type(e).__name__}: {e}",), (), "")
    site = Path(str(package.__file__)).parent.parent
    version = str(getattr(package, "__version__", "")) or _version(site, top)
    return _findings(hooks, _Live(site).find, version)


def probe_files(site: Path, hooks: Sequence[Hook] = HOOKS) -> Findings:
    """In the files under `site`, the folder that holds `vllm/`. Nothing of them is run."""
    top = hooks[0].module.partition(".")[0]
    if not (site / top).is_dir():
        return Findings((f"{site} holds no folder {top}",), (), "")
    return _findings(hooks, _Files(site).find, _version(site, top))


def _version(site: Path, top: str) -> str:
    """What the package says of itself, or else the name of its metadata's folder."""
    try:
        text = (site / top / "_version.py").read_text()
    except OSError:
        text = ""
    if said := re.search(r"""^__version__\s*=.*?["']([^"']+)["']""", text, re.MULTILINE):
        return said[1]
    return next((p.stem.split("-")[1] for p in sorted(site.glob(f"{top}*-*.dist-info"))), "")


# --- verdicts -------------------------------------------------------------------------------------


class _Absent(LookupError):
    """It is not there. The text goes on from its name: "is missing"."""


class _Thing(Protocol):
    """What was found under a hook's name."""

    def accepts(self, parameter: str) -> bool: ...
    def attributes(self) -> set[str]: ...
    def tests(self) -> set[str]: ...
    def strings(self) -> set[str]: ...


_Find = Callable[[str, str], _Thing]  # (module, qualname); raises `_Absent`


def _findings(hooks: Sequence[Hook], find: _Find, version: str) -> Findings:
    verdicts = tuple(_verdict(hook, find) for hook in hooks)
    lacking = [v for v in verdicts if v.lack]
    needed = [v.lack for v in lacking if _is_needed(v.hook, verdicts)]
    options = [v.lack for v in lacking if not _is_needed(v.hook, verdicts)]
    return Findings((*_age(version, needed), *needed), tuple(options), version, verdicts)


def _is_needed(hook: Hook, verdicts: Sequence[Verdict]) -> bool:
    """An alternative is, unless another one is there whole."""
    if hook.optional or not hook.any_of:
        return not hook.optional
    group = [v for v in verdicts if v.hook.group == hook.group and v.hook.any_of]
    lacking = {v.hook.any_of for v in group if v.lack}
    return not {v.hook.any_of for v in group} - lacking


def _age(version: str, needed: Sequence[str]) -> Iterator[str]:
    """A line for a release that is too old, ahead of what it lacks."""
    numbers = re.match(r"(\d+)\.(\d+)", version)
    if needed and numbers and (int(numbers[1]), int(numbers[2])) < SUPPORTED:
        floor = ".".join(map(str, SUPPORTED))
        yield f"vLLM {version} is older than {floor}, the first release that Trimtab supports"


def _verdict(hook: Hook, find: _Find) -> Verdict:
    name, why = f"{hook.module}.{hook.qualname}", ""
    for module in (hook.module, *hook.or_in):
        try:
            thing = find(module, hook.qualname)
        except _Absent as e:
            why = why or str(e)
        else:
            name, why = f"{module}.{hook.qualname}", _gaps(hook, thing)
            break
    where = f" in {hook.any_of}" if hook.any_of else ""
    return Verdict(hook, name, f"{name} {why}; needed to {hook.what_for}{where}" if why else "")


def _gaps(hook: Hook, thing: _Thing) -> str:
    """What a thing that is there lacks."""
    parameters = [p for p in hook.parameters if not thing.accepts(p)]
    checks = (
        ("takes no", parameters),
        ("has no", _without(hook.attributes, thing.attributes)),
        ("does not test", _without(hook.tests, thing.tests)),
        ("does not know", _without(hook.strings, thing.strings)),
    )
    return " and ".join(f"{says} {', '.join(names)}" for says, names in checks if names)


def _without(wanted: Iterable[str], having: Callable[[], set[str]]) -> list[str]:
    wanted = list(wanted)
    return sorted(set(wanted) - having(), key=wanted.index) if wanted else []


# --- in files -------------------------------------------------------------------------------------

_Function = ast.FunctionDef | ast.AsyncFunctionDef
_Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Assign | ast.AnnAssign


class _Files:
    """Definitions by name, through re-exports and bases. Every file is parsed once."""

    def __init__(self, site: Path) -> None:
        self._site = site
        self._trees: dict[str, ast.Module | _Absent] = {}

    def find(self, module: str, qualname: str) -> _Node:
        first, *rest = qualname.split(".")
        node = self.top_level(module, first)
        for name in rest:
            node = node.member(name)
        return node

    def top_level(self, module: str, name: str, num_hops: int = 0) -> _Node:
        if num_hops > 8:
            raise _Absent("is imported in a circle")
        for statement in reversed(list(_statements(self._tree(module).body))):
            if isinstance(statement, ast.ImportFrom):
                for alias in statement.names:
                    if (alias.asname or alias.name) == name:
                        origin = self._origin(module, statement)
                        return self.top_level(origin, alias.name, num_hops + 1)
            elif isinstance(statement, _Definition) and name in _defines(statement):
                return _Node(self, module, statement)
        raise _Absent("is missing")

    def _tree(self, module: str) -> ast.Module:
        if module not in self._trees:
            self._trees[module] = self._parsed(module)
        tree = self._trees[module]
        if isinstance(tree, _Absent):
            raise tree
        return tree

    def _parsed(self, module: str) -> ast.Module | _Absent:
        path = self._path(module)
        try:
            return ast.parse(path.read_bytes())
        except OSError:
            return _Absent("is missing")
        except (SyntaxError, ValueError, RecursionError) as e:
            where = f"line {e.lineno}: {e.msg}" if isinstance(e, SyntaxError) else str(e)
            return _Absent(f"cannot be read ({path.name}, {where})")

    def _path(self, module: str) -> Path:
        path = self._site.joinpath(*module.split("."))
        return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")

    def _origin(self, module: str, statement: ast.ImportFrom) -> str:
        """The module that a statement in `module` imports from."""
        parts = module.split(".") + ["__init__"] * (self._path(module).name == "__init__.py")
        package = parts[: -statement.level] if statement.level else []
        return ".".join([*package, *filter(None, [statement.module])])


@dataclass(frozen=True, slots=True)
class _Node:
    """A definition as its file has it."""

    files: _Files
    module: str
    definition: _Definition

    def member(self, name: str) -> _Node:
        for node in (*reversed(list(self._within())), None):
            if isinstance(node, _Definition) and name in _defines(node):
                return _Node(self.files, self.module, node)
        for base in self._bases():
            try:
                return base.member(name)
            except _Absent:
                continue
        raise _Absent("is missing")

    def _within(self) -> Iterable[ast.AST]:
        if isinstance(self.definition, ast.ClassDef):
            return _statements(self.definition.body)
        if isinstance(self.definition, _Function):
            return (n for n in ast.walk(self.definition) if isinstance(n, _Function))
        return ()

    def _bases(self) -> Iterator[_Node]:
        """Those of a class that are in the files; others are somebody else's."""
        for base in self.definition.bases if isinstance(self.definition, ast.ClassDef) else ():
            if isinstance(base, ast.Name):
                try:
                    yield self.files.top_level(self.module, base.id)
                except _Absent:
                    continue

    def accepts(self, parameter: str) -> bool:
        if not isinstance(self.definition, _Function):
            return False
        args = self.definition.args
        named = {a.arg for a in (*args.args, *args.kwonlyargs)}
        return args.kwarg is not None or parameter in named

    def attributes(self) -> set[str]:
        """Of the class, and what any method assigns to `self`."""
        found = {name for n in self._within() for name in _defines(n)}
        for n in ast.walk(self.definition):
            if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store):
                found |= {n.attr} if ast.unparse(n.value) == "self" else set()
        return found.union(*(base.attributes() for base in self._bases()))

    def tests(self) -> set[str]:
        conditions = (n.test for n in ast.walk(self.definition) if isinstance(n, ast.If))
        parts = [part for condition in conditions for part in ast.walk(condition)]
        attributes = [p for p in parts if isinstance(p, ast.Attribute)]
        return {ast.unparse(a) for a in attributes} | {a.attr for a in attributes}

    def strings(self) -> set[str]:
        constants = (n.value for n in ast.walk(self.definition) if isinstance(n, ast.Constant))
        return {value for value in constants if isinstance(value, str)}


def _statements(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    """Of a module or class, those under an `if` or a `try` too, but for handlers' fallbacks."""
    for statement in body:
        yield statement
        if isinstance(statement, ast.If | ast.Try):
            yield from _statements((*statement.body, *statement.orelse))


def _defines(node: ast.AST) -> set[str]:
    """Names that a statement binds; none for anything but a `_Definition`."""
    match node:
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            return {name}
        case ast.Assign(targets=targets):
            return {t.id for t in targets if isinstance(t, ast.Name)}
        case ast.AnnAssign(target=ast.Name(id=name)):
            return {name}
    return set()


# --- live -----------------------------------------------------------------------------------------


class _Live:
    """Objects by name. What no object tells, such as attributes that a method assigns, is read in
    the files that it came from."""

    def __init__(self, site: Path) -> None:
        self._files = _Files(site)

    def find(self, module: str, qualname: str) -> _Thing:
        value: Any = _imported(module)
        for name in qualname.split("."):
            if inspect.isfunction(value):  # a function within it is no object yet
                return self._files.find(module, qualname)
            try:
                value = getattr(value, name)
            except AttributeError:
                raise _Absent("is missing") from None
        return _Object(self._files, module, qualname, value)


def _imported(module: str) -> object:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as e:
        if e.name and f"{module}.".startswith(f"{e.name}."):
            raise _Absent("is missing") from e
        raise _Absent(f"cannot be imported ({e})") from e
    except Exception as e:  # an import runs anything
        raise _Absent(f"cannot be imported ({type(e).__name__}: {e})") from e


@dataclass(frozen=True, slots=True)
class _Object:
    files: _Files
    module: str
    qualname: str
    value: Any

    def accepts(self, parameter: str) -> bool:
        try:
            parameters = inspect.signature(self.value).parameters
        except (TypeError, ValueError):
            return False
        takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        return takes_any or parameter in parameters

    def attributes(self) -> set[str]:
        classes = self.value.__mro__ if isinstance(self.value, type) else ()
        return set(dir(self.value)).union(*map(self._assigned, classes))

    def _assigned(self, owner: type) -> set[str]:
        try:
            return self.files.find(owner.__module__, owner.__qualname__).attributes()
        except _Absent:
            return set()

    def tests(self) -> set[str]:
        return self.files.find(self.module, self.qualname).tests()

    def strings(self) -> set[str]:
        return self.files.find(self.module, self.qualname).strings()


# --- the command ----------------------------------------------------------------------------------


def main(arguments: Sequence[str]) -> int:
    """Print the table. 1 when a required hook is missing, 2 for a wrong call."""
    if len(arguments) != 1:
        print("usage: python -m engines.inside.vllm_hooks SITE_PACKAGES", file=sys.stderr)
        return 2
    findings = probe_files(Path(arguments[0]))
    print(f"vLLM {findings.version or 'of an unknown version'}")
    for verdict in findings.verdicts:
        print(f"{verdict.hook.group:17} {'lacks' if verdict.lack else 'found'}  {verdict.name}")
    for title, lines in (("missing", findings.missing), ("without", findings.absent_options)):
        print(*(f"{title}: {line}" for line in lines), sep="\n", end="\n" if lines else "")
    return 1 if findings.missing else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
