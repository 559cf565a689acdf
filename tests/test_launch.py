"""Launch commands: read, written again, and turned into a search's engines."""

from __future__ import annotations

import inspect

import pytest

from compiler.launch import OPTIONS_WITH_VALUE, EmbeddedPlan, LaunchError, VllmPlan, parse
from sidecar.commands import engine


def test_a_launch_command_is_read_and_written_again() -> None:
    plan = parse("trimtab engine embedded --model DIR --dtype=float32 --port 8000 --threads 2")
    assert plan == EmbeddedPlan("DIR", "float32", port=8000, rest=("--threads", "2"))
    assert parse(plan.line) == plan


def test_the_embedded_reference_is_the_same_model_in_float64_on_loopback() -> None:
    plan = parse("python -m sidecar engine embedded --model DIR --host 0.0.0.0 --threads 2")
    reference = EmbeddedPlan("DIR", "float64", port=9001, rest=("--threads", "2"))
    assert plan.reference(9001) == reference


def test_the_embedded_tuning_engine_keeps_the_users_dtype() -> None:
    plan = parse(["trimtab", "engine", "embedded", "--dtype", "bfloat16"]).tuning(9002)
    assert plan == EmbeddedPlan(dtype="bfloat16", port=9002)
    assert plan.url == "http://127.0.0.1:9002"


VLLM = "trimtab engine vllm --scope serve -- A=1 taskset -c 1 /v/bin/vllm serve DIR --port 8000"


def test_a_vllm_launch_is_read_and_written_again() -> None:
    plan = parse(VLLM)
    head = ("A=1", "taskset", "-c", "1", "/v/bin/vllm", "serve")
    assert plan == VllmPlan(("--scope", "serve"), head, ("DIR", "--port", "8000"))
    assert plan.line == VLLM
    assert parse(plan.line) == plan


@pytest.mark.parametrize(
    "command",
    [
        "vllm serve m",
        "/opt/v/bin/vllm serve m",
        "python -m vllm.entrypoints.openai.api_server --model m",
        "python3 -m vllm.entrypoints.cli.main serve m",
        "numactl -N 0 vllm serve m",
        "trimtab engine vllm vllm serve m",
    ],
)
def test_a_bare_vllm_command_becomes_a_swappable_one(command: str) -> None:
    plan = parse(command)
    assert plan.words[:4] == ("trimtab", "engine", "vllm", "--")
    assert plan.words[4:] == tuple(command.removeprefix("trimtab engine vllm ").split())
    assert plan.url == "http://127.0.0.1:8000"


def test_every_option_of_our_vllm_command_is_known() -> None:
    named = inspect.signature(engine.vllm).parameters.keys() - {"context"}
    assert {f"--{name.replace('_', '-')}" for name in named} == set(OPTIONS_WITH_VALUE)
    plan = parse("trimtab engine vllm --call-timeout 9 -- vllm serve m")
    assert isinstance(plan, VllmPlan)
    assert (plan.options, plan.head) == (("--call-timeout", "9"), ("vllm", "serve"))


def test_the_vllm_tuning_engine_differs_in_port_and_scope_only() -> None:
    words = parse("trimtab engine vllm --scope serve -- vllm serve m --host 0.0.0.0 --port=1 -O3")
    expected = "trimtab engine vllm -- vllm serve m -O3 --host 127.0.0.1 --port 9001"
    assert words.tuning(9001).line == expected


def test_the_vllm_reference_is_the_same_model_in_float32_and_eager() -> None:
    plan = parse("vllm serve m --dtype bfloat16 --kv_cache_dtype fp8 --max-model-len 2048")
    assert plan.reference(9002).line == (
        "trimtab engine vllm -- vllm serve m --max-model-len 2048 --dtype float32 --enforce-eager "
        "--no-enable-prefix-caching --host 127.0.0.1 --port 9002"
    )


def test_the_last_port_counts_as_for_vllm() -> None:
    assert parse("vllm serve m --port 1 --port=2").url == "http://127.0.0.1:2"


@pytest.mark.parametrize(
    ("command", "says"),
    [
        ("python -m sglang.launch_server --model m", "SGLang launches are recognised"),
        ("sleep 5", "starts no engine"),
        ("trimtab engine embedded --port x", "--port is 'x'"),
        ("trimtab engine embedded --model", "--model has no value"),
        ("trimtab engine vllm -- sleep 5", "starts no vLLM server"),
        ("vllm serve m --port 70000", "--port is '70000'"),
        ("vllm serve m --port", "--port has no value"),
        ("trimtab 'engine", "no command line"),
    ],
)
def test_a_launch_that_cannot_be_used_says_why(command: str, says: str) -> None:
    with pytest.raises(LaunchError, match=says):
        parse(command)
