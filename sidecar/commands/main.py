"""All commands under one name; what they raise becomes one line on stderr and an exit code."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, TextIO

import structlog
import typer

from sidecar.commands import compile as compile_command
from sidecar.commands import engine, judged, operate, processes, settings

app = typer.Typer(
    name="trimtab",
    help="A sidecar that keeps the LLM engine behind it tuned to the traffic it really gets.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def run(arguments: Sequence[str]) -> int:
    """One command from start to end; its exit code."""
    log_to(sys.stderr)
    try:
        code = app(args=list(arguments), prog_name="trimtab", standalone_mode=False)
        return code if isinstance(code, int) else 0
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # `trimtab watch | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except SystemExit as e:
        return _exited(e)
    except Exception as e:
        return _failed(e)


def _exited(error: SystemExit) -> int:
    if isinstance(error.code, str):
        print(error.code, file=sys.stderr)
        return 1
    return error.code or 0


def _failed(error: Exception) -> int:
    """Its exit code. What we did not foresee keeps its traceback."""
    from sidecar.commands.errors import exit_code

    code = exit_code(error)
    if code is None:
        logging.getLogger("trimtab").error("failed", exc_info=error)
        return 1
    text = error.format_message() if hasattr(error, "format_message") else str(error)
    print(f"trimtab: {text}", file=sys.stderr)
    return code


def log_to(stream: TextIO) -> None:
    """One JSON object a line: event, level, time, and the fields of `extra`."""
    handler = logging.StreamHandler(stream)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[
                structlog.stdlib.add_log_level,
                structlog.stdlib.add_logger_name,
                structlog.stdlib.ExtraAdder(),
                structlog.processors.TimeStamper(fmt="iso"),
                structlog.processors.format_exc_info,
            ],
            processors=[
                structlog.stdlib.ProcessorFormatter.remove_processors_meta,
                structlog.processors.JSONRenderer(),
            ],
        )
    )
    logging.basicConfig(handlers=[handler], level=logging.INFO, force=True)


@app.command("demo")
def demo(
    seed: Annotated[int, typer.Option(help="Of the requests and the search.")] = 0,
    agent: Annotated[str, typer.Option(help="search, or no-effect for one that cannot win.")] = (
        "search"
    ),
    budget: Annotated[str, typer.Option(help="Of the search, such as 65s.")] = "",
    engine: Annotated[str, typer.Option(help="embedded; or vllm, in about eight minutes.")] = (
        "embedded"
    ),
    vllm: Annotated[
        Path | None,
        typer.Option(help="vLLM's program; that of .venv-vllm, else of PATH, by default."),
    ] = None,
    keep: Annotated[str, typer.Option(help="Keep state and logs in this folder.")] = "",
) -> int:
    """The whole loop on this machine, in about three minutes."""
    from sidecar.demo import DemoSettings, run
    from sidecar.troupe import troupe_named

    logging.getLogger().setLevel(logging.WARNING)
    troupe = troupe_named(engine, vllm)
    return run(DemoSettings(troupe, seed, agent, budget, Path(keep) if keep else None))


for _commands in (processes, engine, compile_command, operate, judged, settings):
    _commands.add_to(app)
