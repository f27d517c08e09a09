from collections import Counter
from pathlib import Path

from stack_kernels.burn_in.contracts import Contract
from stack_kernels.burn_in.report import BurnInResults, markdown


def results() -> BurnInResults:
    problems = tuple(f"case{i}: a | b" for i in range(10))
    return BurnInResults(
        "today, h100",
        [
            Contract("norm", "mine", 13, Counter(passed=3, failed=10), problems),
            Contract("norm", "other", 4, Counter(refused=4), refusal="float32"),
            Contract("norm", "reference", 4, Counter(passed=4)),
        ],
        table=Path("out/h100.json"),
        failures=["speeds: exit status 1: no device"],
        not_reached=["speeds norm rms forward"],
        not_applicable=["tuning rope: nothing else supports it"],
    )


def test_the_page_has_a_status_for_each_implementation_and_names_the_rest() -> None:
    page = markdown(results())
    assert "| `norm/mine` | failed | 3 | 0 | 10 | 0 | 0 |" in page
    assert "| `norm/other` | not tested | 0 | 4 | 0 | 0 | 0 |" in page
    assert "| `norm/reference` | passed |" in page
    assert "- `norm/other` is not tested: it refused all 4 checks; most often: float32" in page
    assert "- `norm/mine` case7: a | b" in page and "case8" not in page and "- and 2 more of `norm/mine`" in page
    assert "Nothing was measured." in page
    assert "- tuned table: h100.json" in page and "- profile: none" in page
    assert page.endswith(
        "## Failed\n\n- speeds: exit status 1: no device\n\n## Not reached\n\n- speeds norm rms forward\n\n"
        "## Not applicable\n\n- tuning rope: nothing else supports it\n"
    )


def test_what_did_not_pass_is_a_problem() -> None:
    problems = results().defects
    assert problems[0] == "failed: norm/mine case0: a | b"
    assert problems[10:] == [
        "failed: speeds: exit status 1: no device",
        "not tested: norm/other, it refused all 4 checks; most often: float32",
        "not reached: speeds norm rms forward",
    ]
    assert BurnInResults("today", [Contract("norm", "reference", 1, Counter(passed=1))]).defects == []
