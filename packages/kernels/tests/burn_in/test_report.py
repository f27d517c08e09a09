from collections import Counter
from pathlib import Path

from stack_kernels.burn_in.contracts import Contract
from stack_kernels.burn_in.report import BurnInResults, markdown


def test_the_page_tells_what_failed_and_what_is_missing() -> None:
    broken = Contract("norm", "mine", Counter(passed=3, failed=10), tuple(f"case{i}: a | b" for i in range(10)))
    page = markdown(
        BurnInResults(
            "today, h100", [broken], table=Path("out/h100.json"), missing=["speeds: exit status 1: no device"]
        )
    )
    assert "| `norm/mine` | 3 | 0 | 10 | 0 |" in page
    assert "- `norm/mine` case7: a | b" in page and "case8" not in page and "- and 2 more of `norm/mine`" in page
    assert "Nothing was measured." in page
    assert "- tuned table: h100.json" in page and "- profile: none" in page
    assert page.endswith("## Not reached\n\n- speeds: exit status 1: no device\n")
