"""Random calls in a process of its own, which a kernel that leaves its buffers would end."""

import subprocess
import sys
from pathlib import Path

import pytest

OPS = (
    "attention",
    "gated_linear_unit",
    "linear",
    "linear_attention",
    "linear_cross_entropy",
    "low_rank",
    "norm",
    "paged_attention",
    "ragged_dot",
    "rope",
)


def check_calls(signatures: int, draws: int, *names: str) -> None:
    command = [sys.executable, "-W", "error", Path(__file__).with_name("random_calls.py")]
    done = subprocess.run([*command, str(signatures), str(draws), *names], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [line.partition(":")[0] for line in done.stdout.splitlines()] == list(names)


def test_twenty_random_calls_give_what_the_references_give() -> None:
    check_calls(2, 2, *OPS)


@pytest.mark.slow
@pytest.mark.parametrize("op", OPS)
def test_ten_thousand_random_calls_of_an_op_give_what_its_reference_gives(op: str) -> None:
    check_calls(200, 50, op)
