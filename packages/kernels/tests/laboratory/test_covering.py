"""Every kernel of an accelerator supports enough calls of its op's contract for accelerators to be tested there."""

import dataclasses
import re
import sys
from pathlib import Path

import pytest

from stack_core.abi.plugins import registries
from stack_core.ops.building import implementations_of
from stack_core.testing import accelerator_checks
from stack_kernels.attention.splash import SPLASH
from stack_kernels.laboratory import covering

PAGE = Path(__file__).parents[4] / "docs/accelerators.md"
FEWEST = 8


@pytest.mark.parametrize("name", covering.accelerator_kernels())
def test_a_kernel_supports_eight_calls_on_each_of_its_chips(name: str) -> None:
    """Reads the page's table, which the last test compares with the code, as counting again takes seconds."""
    _, _, table = PAGE.read_text().partition(covering._BEGIN)
    row = re.search(rf"^\| `{name}` \|(.*)\|$", table, re.MULTILINE)
    assert row is not None
    cells = [re.fullmatch(r"(\d+)/\d+(?: \((\d+)\))?", cell.strip()) for cell in row[1].split("|")]
    counts = [(int(cell[1]), int(cell[2] or cell[1])) for cell in cells if cell]
    assert counts, "it supports no call, so it is not tested"
    assert min(forward for forward, _ in counts) >= FEWEST
    if registries.ops[name].backward is not None:
        assert max(gradients for _, gradients in counts) >= FEWEST


def test_a_kernel_that_refuses_everything_has_no_covering_call(monkeypatch: pytest.MonkeyPatch) -> None:
    refuses = dataclasses.replace(SPLASH, supports=lambda call, chip, config: "not today")
    found = {**implementations_of("attention"), "splash": refuses}
    monkeypatch.setattr(covering, "implementations_of", lambda op: found)
    calls = len(accelerator_checks("attention"))
    assert covering.count_covered("attention/splash", "v6e") == covering.Covered(calls, 0, 0)


def test_the_page_has_the_table(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "argv", ["covering", str(PAGE), "--check"])
    covering.main()
    stale = tmp_path / "page.md"
    stale.write_text(PAGE.read_text().replace("| `attention/splash` | 2", "| `attention/splash` | 3"))
    monkeypatch.setattr(sys, "argv", ["covering", str(stale), "--check"])
    with pytest.raises(SystemExit, match="is out of date"):
        covering.main()
    monkeypatch.setattr(sys, "argv", ["covering", str(stale)])
    covering.main()
    assert stale.read_text() == PAGE.read_text()
