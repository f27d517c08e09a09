from stack_core.abi.plugins import plugins


def test_core_loads_and_lists_the_plugin() -> None:
    (report,) = (report for report in plugins.reports() if report.name == "rl")
    assert (report.distribution, report.status, report.problems) == ("stack-rl", "loaded", [])
