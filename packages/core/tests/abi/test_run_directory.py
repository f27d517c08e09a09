import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from stack_core.abi.errors import RunDirectoryError
from stack_core.abi.run_directory import RunDirectory

HOLD = """
import sys
from pathlib import Path
from stack_core.abi.run_directory import RunDirectory
with RunDirectory(Path(sys.argv[1])).open(resume=False):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return RunDirectory(tmp_path / "run")


def write(run: RunDirectory, config_yaml: str = "a: 1\n") -> None:
    with run.open(resume=run.config.exists()):
        run.write(config_yaml, lambda directory: (directory / "vocabulary").write_text("{}"))


def test_holds_what_was_written(run: RunDirectory) -> None:
    write(run)
    assert run.config_yaml() == "a: 1\n"
    assert sorted(path.name for path in run.path.iterdir()) == ["config.yaml", "run.lock", "vocabulary"]
    write(run, "a: 2\n")
    assert run.config_yaml() == "a: 2\n"


def test_checking_writes_nothing(run: RunDirectory) -> None:
    run.check(resume=False)
    assert not run.path.exists()


def test_two_trainers_on_one_directory(run: RunDirectory) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(run.path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"held\n"
        for refused in (lambda: run.check(resume=True), lambda: run.open(resume=False).__enter__()):
            with pytest.raises(RunDirectoryError, match=f"in use by the process with pid {child.pid}"):
                refused()
        child.send_signal(signal.SIGKILL)
        child.wait()
        with run.open(resume=False):
            assert (run.path / "run.lock").read_text() == f"{os.getpid()}\n"


def test_another_run_is_not_overwritten(run: RunDirectory) -> None:
    write(run)
    with pytest.raises(RunDirectoryError, match=r"holds another run\. Continue it with --resume"):
        run.check(resume=False)
    run.check(resume=True)


def test_nothing_to_resume(run: RunDirectory) -> None:
    with pytest.raises(RunDirectoryError, match="nothing to resume"):
        run.check(resume=True)
    assert not run.path.exists()


def test_foreign_files_are_left_alone(run: RunDirectory) -> None:
    run.path.mkdir()
    (run.path / "thesis.tex").touch()
    with pytest.raises(RunDirectoryError, match="is not empty and holds no run"):
        run.check(resume=False)
    assert [path.name for path in run.path.iterdir()] == ["thesis.tex"]


def test_a_start_that_was_killed_at_once_may_be_started_again(run: RunDirectory) -> None:
    with run.open(resume=False):
        run.metrics.touch()
    run.check(resume=False)


def test_a_file_in_the_way(run: RunDirectory) -> None:
    run.path.touch()
    with pytest.raises(RunDirectoryError, match="is a file"):
        run.check(resume=False)


def test_a_directory_without_a_run_has_no_config(run: RunDirectory) -> None:
    with pytest.raises(RunDirectoryError, match=r"holds no run: it has no config\.yaml"):
        run.config_yaml()


def test_a_parent_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with (
        pytest.raises(RunDirectoryError, match=r"cannot be created: .* Set another output"),
        RunDirectory(tmp_path / "file" / "run").open(resume=False),
    ):
        pass
