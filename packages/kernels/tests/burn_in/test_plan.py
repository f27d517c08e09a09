"""The plan for a chip that this machine does not have."""

import re
from types import SimpleNamespace

import pytest

from stack_core.abi.errors import UnknownName
from stack_core.abi.plugins import registries
from stack_core.chips import use_chip
from stack_kernels.burn_in import plan
from stack_kernels.burn_in.checks import planned_checks
from stack_kernels.burn_in.plan import plan_lines, print_plan
from stack_kernels.burn_in.speeds import waves


@pytest.fixture
def has_profile_command(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the plan see stack-profile's command, which is absent where stack-kernels is tested alone."""
    monkeypatch.setattr(plan, "registries", SimpleNamespace(chips=registries.chips, commands={"profile run"}))


@pytest.mark.usefixtures("has_profile_command")
def test_the_plan_has_all_work_for_the_chip_in_the_order_of_the_run() -> None:
    chip = registries.chips["v6e"]
    with use_chip(chip):
        lines = list(plan_lines(chip, ["norm"], 600.0, 16))
        tasks = sum(map(len, waves(["norm"], "tpu")))
    checks = len(planned_checks("tpu", ["norm"]))
    assert lines[0].startswith("Plan for v6e, 10 minutes on 16 cores")
    assert lines[1].startswith(f"contracts: {checks} checks, in 1 process of 15 threads, about ")
    assert lines[2] == f"  norm/mosaic_tpu: {checks // 2} checks, chosen first"
    assert lines[3] == f"  norm/reference: {checks // 2} checks"
    assert "  norm rms forward: chosen, mosaic_tpu" in lines
    assert any(line.startswith("  norm forward features=4096") and "mosaic_tpu x 3" in line for line in lines)
    assert any(line.startswith(f"speeds: {tasks} calls, about ") for line in lines)
    assert "more than fits" not in "".join(lines)
    with use_chip(chip):
        assert "more than fits: raise --minutes" in list(plan_lines(chip, ["norm"], 20.0, 16))[1]
    shares = [int(re.findall(r"of (\d+) s$", line)[0]) for line in lines if re.search(r"about \d+ s of", line)]
    assert sum(shares) == pytest.approx(600, abs=len(shares))


def test_a_chip_nobody_knows_is_refused() -> None:
    with pytest.raises(UnknownName, match="Did you mean 'h100'"):
        print_plan("h1000", ["norm"], 600.0)
