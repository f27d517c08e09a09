"""`stack bench ops`, with times that the tests decide: what it measures, prints, writes and exits with."""

import json
import re
import sys
from pathlib import Path

import jax
import pytest

from stack_core import cli
from stack_core.abi.installing import install_command
from stack_core.chips import current_chip
from stack_kernels.bench import cases, run
from stack_kernels.bench.cases import BenchCase
from stack_kernels.tuning.measure import Measured, Timing

ROUNDS = 15


def normal(shape):
    return lambda rng: {"x": rng.standard_normal(shape, "float32")}


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Two calls in place of the standard ones."""
    few = (BenchCase("norm", "66m", "rows", normal((3, 8))), BenchCase("norm", "8b", "rows", normal((5, 8))))
    monkeypatch.setattr(cases, "CASES", few)


@pytest.fixture
def speed(monkeypatch):
    """Sets how many times as long as the reference's the time of each following measurement is, the last for all."""
    ratios = [1.0]

    def measured(candidates, *, rounds, budget_s, stop_early, compiled):
        assert not stop_early and not compiled and budget_s > 0
        for call in candidates.values():
            jax.block_until_ready(call())
        ratio = ratios.pop(0) if len(ratios) > 1 else ratios[0]
        wobble = [1e-3 * (1 + 0.01 * (number % 5)) for number in range(rounds)]
        own = tuple(ratio * seconds for seconds in wobble)
        return Measured({"reference": Timing((1e-3,) * rounds, (1e-3,) * rounds), "own": Timing(own, own)}, {})

    monkeypatch.setattr(run, "measure", measured)

    def of(*following):
        ratios[:] = following

    return of


@pytest.fixture
def bench(capsys, tmp_path, monkeypatch):
    """Runs `stack bench ops`; returns exit status, stdout and stderr."""
    monkeypatch.chdir(tmp_path)

    def stack(*arguments):
        try:
            cli.main(["bench", "ops", *map(str, arguments)])
            status = 0
        except SystemExit as error:
            status = error.code
        return (status, *capsys.readouterr())

    return stack


def test_a_line_a_pass_and_a_file(bench, speed):
    speed(0.5)
    status, printed, said = bench("--json", "base.json")
    assert status == 0
    lines = printed.splitlines()
    assert lines[0].startswith("20") and "jax " in lines[0] and current_chip().provenance in lines[0]
    assert lines[1] == "norm, 66m rows"
    assert [line.split()[:2] for line in lines[2:]] == [
        [dtype, direction] for dtype in ("float32", "bfloat16") for direction in ("forward", "gradient")
    ]
    assert re.search(r"510\.00 us \+- +2%  +0\.51x the reference's \[0\.51, 0\.52\] +0% of .* GB/s", lines[2])
    assert said.count("measuring norm 66m rows") == 4
    content = json.loads(Path("base.json").read_text())
    assert [row["direction"] for row in content["rows"]] == ["forward", "gradient"] * 2


def test_equal_speed_is_no_regression(bench, speed):
    speed(0.5)
    bench("--json", "base.json")
    status, printed, _ = bench("--compare", "base.json")
    assert status == 0
    assert "4 unchanged; changes beyond 5%, at 99% confidence for all calls together" in printed


def test_a_regression_that_is_confirmed_exits_with_1(bench, speed):
    speed(0.5)
    bench("--json", "base.json")
    speed(0.5, 0.75, 0.5, 0.5, 0.75)
    status, printed, said = bench("--compare", "base.json", "--json", "now.json")
    assert status == 1
    assert "slower: norm 66m rows float32 gradient: 0.51x the reference's time then (" in printed
    assert "0.77x now" in printed
    assert said.count("measuring again norm 66m rows float32 gradient") == 2
    assert len(json.loads(Path("now.json").read_text())["rows"]) == 4


def test_what_is_slow_but_once_is_no_regression(bench, speed):
    speed(0.5)
    bench("--json", "base.json")
    speed(0.5, 0.75, 0.5, 0.5, 0.75, 0.5)
    status, printed, said = bench("--compare", "base.json")
    assert (status, said.count("measuring again")) == (0, 2)
    assert "slower" not in printed


def test_an_improvement_is_said(bench, speed):
    speed(0.5)
    bench("--json", "base.json")
    speed(0.3)
    status, printed, _ = bench("--compare", "base.json")
    assert (status, "4 faster" in printed) == (0, True)


def test_a_yardstick_of_another_version_is_said(bench, speed):
    bench("--json", "base.json")
    content = json.loads(Path("base.json").read_text())
    content["versions"]["jax"] = "0.1"
    Path("base.json").write_text(json.dumps(content))
    status, printed, _ = bench("--compare", "base.json")
    assert status == 0
    assert f"jax was 0.1 and is {jax.__version__}: the reference's speed may differ, too" in printed


def test_a_named_implementation_runs(bench, speed):
    status, printed, _ = bench("--implementations", "reference", "--dtypes", "float16", "--models", "8b")
    assert status == 0
    assert printed.splitlines()[1] == "norm, 8b rows"
    assert printed.splitlines()[2].endswith("  reference")


def test_a_failure_costs_one_call_and_is_told(bench, speed, monkeypatch):
    failing = {"left": 1}
    measure = run.measure

    def fails_once(candidates, **settings):
        found = measure(candidates, **settings)
        if failing["left"]:
            failing["left"] -= 1
            return Measured({"reference": found.timings["reference"]}, {"own": ZeroDivisionError("by zero")})
        return found

    monkeypatch.setattr(run, "measure", fails_once)
    status, printed, said = bench()
    assert status == 2
    assert "left out: norm 66m rows float32 forward: it failed" in printed
    assert "norm 66m rows float32 gradient" in said
    assert "failed with ZeroDivisionError: by zero" in said


def test_a_budget_leaves_calls_out(bench, monkeypatch):
    now = iter(range(100))
    monkeypatch.setattr("time.monotonic", lambda: float(next(now)))
    status, printed, said = bench("--budget-s", "0.5")
    assert (status, printed) == (2, "")
    assert "Nothing was measured" in said and "the time budget did not reach it" in said


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--ops", "nrm"), "Unknown name 'nrm' among ops. Did you mean 'norm'?"),
        (("--ops", "collective_matmul"), "collective_matmul: there are no cases to measure"),
        (("--implementations", "fast"), "Unknown name 'fast' among implementations"),
        (("--models", "7b"), "Unknown name '7b' among models. There are: 66m, 8b"),
        (("--dtypes", "int8"), "Unknown name 'int8' among dtypes"),
        (("--rounds", "0"), "expected 1 to 50 rounds"),
        (("--budget-s", "0"), "a budget above 0"),
        (("--tolerance", "-1"), "a tolerance of at least 0"),
        (("--compare", "none.json"), "The baseline 'none.json' cannot be read"),
        (("--json", "nowhere/base.json"), "there is no directory 'nowhere'"),
        (("--opps", "norm"), "Run `stack bench ops --help`"),
    ],
)
def test_wrong_use_exits_with_2_before_anything_is_measured(bench, arguments, message):
    status, printed, said = bench(*arguments)
    assert (status, printed) == (2, "")
    assert message in said
    assert "measuring" not in said


def test_a_baseline_of_another_chip_exits_with_2(bench, speed):
    bench("--json", "base.json")
    content = json.loads(Path("base.json").read_text())
    Path("base.json").write_text(json.dumps({**content, "model": "other"}))
    status, _, said = bench("--compare", "base.json")
    assert (status, "was measured on cpu (other)" in said) == (2, True)


def test_plots_without_matplotlib_are_refused_at_once(bench, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    status, printed, said = bench("--html", "report.html")
    assert (status, printed) == (2, "")
    assert install_command("stack-kernels[plots]") in said


def test_a_report_is_one_file_that_loads_nothing(bench, speed):
    pytest.importorskip("matplotlib", reason="the report's plots need stack-kernels[plots]")
    speed(0.5)
    bench("--json", "base.json")
    speed(0.75)
    status, _, _ = bench("--compare", "base.json", "--html", "report.html")
    assert status == 1
    page = Path("report.html").read_text()
    assert page.count("<svg") == 2 and page.count('<tr class="slower">') == 4
    assert "norm 66m rows bfloat16 gradient" in page and f"jax {jax.__version__}" in page
    assert not re.findall(r"""(?:src|href)=["'](?!#)""", page) and "<script" not in page and "@import" not in page
