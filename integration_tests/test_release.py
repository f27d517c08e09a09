"""The release's notes and the judgement of its audit, and the page of benchmarks."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "tools" / "release.py"
spec = importlib.util.spec_from_file_location("release", SOURCE)
assert spec is not None and spec.loader is not None
release = importlib.util.module_from_spec(spec)
spec.loader.exec_module(release)

CHANGELOG = "# Changelog\n\n## Unreleased\n\n- new\n\n## 0.1.0 (2026-01-01)\n\n- old\n"
AUDITED = {"name": "numpy", "version": "2.4.0", "vulns": []}
SKIPPED = {"name": "jax", "skip_reason": "Dependency not found on PyPI"}
VULNERABLE = {"name": "pyyaml", "version": "5.3", "vulns": [{"id": "PYSEC-2021-142"}]}


def test_notes_take_the_section_of_the_version_or_what_is_unreleased(tmp_path: Path) -> None:
    assert release.changes(CHANGELOG, "0.1.0") == "- old"
    assert release.changes(CHANGELOG, "0.2.0") == "- new"
    assert "stack 0.1.0" in release.write_notes(tmp_path / "notes.md")
    assert (tmp_path / "notes.md").read_text().count("\n## stack-") == 7


def test_an_audit_passes_only_if_every_dependency_was_looked_up() -> None:
    assert release.check_audit([AUDITED]) == "1 dependencies, no known vulnerabilities"
    with pytest.raises(SystemExit, match="1 of 2 dependencies were not audited"):
        release.check_audit([AUDITED, SKIPPED])
    with pytest.raises(SystemExit, match=r"pyyaml 5\.3: PYSEC-2021-142"):
        release.check_audit([AUDITED, SKIPPED, VULNERABLE])


def test_the_page_of_benchmarks_is_what_the_results_say() -> None:
    command = [sys.executable, str(SOURCE.with_name("benchmarks_page.py")), "--check"]
    done = subprocess.run(command, check=False, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 0, done.stderr
