import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from stack_core.abi.errors import BenchmarkError
from stack_kernels.bench import run
from stack_kernels.burn_in import children, speeds
from stack_kernels.burn_in.children import ChildResult
from stack_kernels.burn_in.report import BurnInResults
from stack_kernels.commands import burn_in


def test_each_call_that_fails_is_told_and_the_rest_is_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    errors = iter([BenchmarkError("norm: mine failed\nwith ValueError"), RuntimeError("no such device")])

    def measured(task: object, **_: object) -> str:
        if (error := next(errors, None)) is not None:
            raise error
        return "refused"

    monkeypatch.setattr(run, "measured", measured)
    monkeypatch.setattr(sys, "argv", ["speeds", str(tmp_path / "out.json"), "60", "norm"])
    speeds.main()
    first, second = (json.loads(line)["left_out"] for line in capsys.readouterr().out.splitlines())
    assert first == "norm: mine failed with ValueError"
    assert second.endswith(": RuntimeError: no such device") and second.startswith("norm")


@pytest.mark.parametrize(
    ("ended", "more"), [(ChildResult(0, ""), []), (ChildResult(1, "no device"), ["speeds: exit status 1: no device"])]
)
def test_the_page_has_what_speeds_told(
    ended: ChildResult, more: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def child(
        arguments: list[str], deadline_s: float, *, on_message: Callable[[dict[str, str]], None], **_: object
    ) -> ChildResult:
        on_message({"left_out": "norm: mine failed"})
        return ended

    monkeypatch.setattr(children, "run_child", child)
    found = BurnInResults("today")
    burn_in._measure(found, tmp_path, "cpu", ["norm"], 0.0)
    assert found.missing == ["speeds: norm: mine failed", *more]
