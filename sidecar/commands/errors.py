"""Which errors are an answer to whoever typed the command, and the exit code each one gives."""

from __future__ import annotations

FAILED, ASKED_WRONGLY, NO = 1, 2, 3


def exit_code(error: Exception) -> int | None:
    """None: nobody foresaw it, so it is a fault of ours."""
    from sidecar.config import ConfigError

    if isinstance(error, ConfigError) or _is_usage(error):
        return ASKED_WRONGLY
    if _is_any(error, "sidecar.control", "NotThere", "WronglyAsked"):
        return ASKED_WRONGLY
    if _is_any(error, "compiler.launch", "LaunchError"):
        return ASKED_WRONGLY
    foreseen = (
        ("sidecar.control", "Refused", "ControllerGone"),
        ("sidecar.app", "CannotServe"),
        ("sidecar.store", "StoreError"),
        ("sidecar.supervisor", "ProcessFailed"),
        ("sidecar.demo", "DemoFailed"),
        ("sidecar.commands.engine", "EngineFailed"),
        ("engines.engine", "CandidateError", "EngineGone"),
    )
    return FAILED if any(_is_any(error, *names) for names in foreseen) else None


def _is_usage(error: Exception) -> bool:
    """Typer's own: an unknown option, a missing argument."""
    return any(kind.__name__ == "ClickException" for kind in type(error).__mro__)


def _is_any(error: Exception, module: str, *names: str) -> bool:
    """By name, so that a command does not import what it never used."""
    return any(kind.__module__ == module and kind.__name__ in names for kind in type(error).__mro__)
