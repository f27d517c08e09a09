"""`stack doctor` as a user meets it, on machines that are broken in one way each: it says so, and never crashes."""

import json
import os
import subprocess
import sys

import pytest

_CHANGED = ("JAX_", "STACK_TUNED_TABLES", "XLA_FLAGS", "PYTHONPATH")


@pytest.fixture
def doctor(tmp_path):
    """Runs `stack doctor` with variables set, from an empty folder; returns the process."""

    def run(*arguments, **variables):
        environment = {name: value for name, value in os.environ.items() if not name.startswith(_CHANGED)}
        return subprocess.run(
            [sys.executable, "-m", "stack_core", "doctor", *arguments],
            check=False,
            capture_output=True,
            text=True,
            timeout=180,
            cwd=tmp_path,
            env={**environment, **variables},
        )

    return run


@pytest.fixture
def fake_jax(tmp_path):
    """Writes a `jax` that hides the installed one; returns the folder for PYTHONPATH."""

    def write(source):
        package = tmp_path / "shadow" / "jax"
        package.mkdir(parents=True)
        (package / "__init__.py").write_text(source)
        return str(package.parent)

    return write


def findings(done, check, status):
    assert "Traceback" not in done.stderr
    answer = json.loads(done.stdout)
    return [one for one in answer["findings"] if (one["check"], one["status"]) == (check, status)]


def test_a_sound_installation_passes_and_names_what_it_found(doctor):
    done = doctor("--json")
    assert done.returncode == 0
    answer = json.loads(done.stdout)
    assert answer["status"] in ("ok", "note", "warning")
    assert all(set(one) == {"check", "status", "found", "advice"} for one in answer["findings"])
    for check in ("python", "stack-core", "plugins", "environment", "jax", "devices"):
        assert findings(done, check, "ok"), check
    (devices,) = findings(done, "devices", "ok")
    assert "'cpu'" in devices["found"]


def test_text_shows_status_finding_and_advice_on_lines_that_are_not_broken(doctor):
    done = doctor(JAX_PLATFORMS="nonsense")
    lines = done.stdout.splitlines()
    assert done.returncode == 1
    (problem,) = [line for line in lines if line.startswith("problem  devices: ")]
    assert "Unable to initialize backend 'nonsense'" in problem
    assert lines[lines.index(problem) + 1].startswith("         -> JAX_PLATFORMS is 'nonsense': unset it")
    assert lines[-1].startswith("1 problem")
    assert "\x1b" not in done.stdout


def test_a_flag_that_xla_does_not_know_is_named(doctor):
    done = doctor("--json", XLA_FLAGS="--xla_force_host_platform_device_count=2 --xla_bogus=1")
    assert done.returncode == 1
    (problem,) = findings(done, "devices", "problem")
    assert "Unknown flag in XLA_FLAGS: --xla_bogus=1" in problem["found"]
    assert problem["advice"].startswith("Correct XLA_FLAGS or unset it")
    notes = [note["found"] for note in findings(done, "XLA_FLAGS", "note")]
    assert any("acts as this many devices" in note for note in notes)


def test_unusual_settings_are_notes_and_warnings_and_no_failure(doctor, tmp_path):
    (tmp_path / "jax.py").write_text("raise RuntimeError('mine')")
    flags = "--xla_force_host_platform_device_count=2"
    done = doctor("--json", JAX_ENABLE_X64="1", XLA_FLAGS=flags, STACK_LOAD_PLUGINS="core,nobody")
    assert done.returncode == 0
    assert findings(done, "JAX_ENABLE_X64", "note")
    (devices,) = findings(done, "devices", "ok")
    assert devices["found"].startswith("2 x 'cpu'")
    assert any("'nobody'" in one["found"] for one in findings(done, "plugins", "warning"))
    assert findings(done, "STACK_LOAD_PLUGINS", "note")
    (warning,) = findings(done, "jax", "warning")
    assert warning["advice"] == f"Rename {tmp_path / 'jax.py'}."


def test_a_jax_that_hides_the_installed_one_and_fails_is_located(doctor, fake_jax):
    folder = fake_jax("raise ImportError('undefined symbol: PyFoo')")
    done = doctor("--json", PYTHONPATH=folder)
    assert done.returncode == 1
    hidden, failed = findings(done, "jax", "problem")
    assert f"imports {folder}/jax/__init__.py, which hides the installed" in hidden["found"]
    assert "PYTHONPATH" in hidden["advice"]
    assert "ImportError: undefined symbol: PyFoo" in failed["found"]


@pytest.mark.parametrize(
    ("source", "timeout_s", "check", "found"),
    [
        ("import time; time.sleep(600)", "3", "jax", "importing JAX failed: no answer after 3 s"),
        ("import os; os.abort()", "90", "jax", "importing JAX failed: the process was killed by SIGABRT"),
        pytest.param("raise SystemExit(3)", "90", "jax", "importing JAX failed: SystemExit: 3", marks=pytest.mark.slow),
        ("__version__ = '9'", "90", "devices", "listing JAX's devices failed: AttributeError"),
    ],
    ids=["hangs", "aborts", "exits", "is not jax"],
)
def test_whatever_jax_does_is_a_finding(doctor, fake_jax, source, timeout_s, check, found):
    done = doctor("--json", "--timeout-s", timeout_s, PYTHONPATH=fake_jax(source))
    assert done.returncode == 1
    assert any(one["found"].startswith(found) for one in findings(done, check, "problem"))


def test_a_plugin_that_fails_is_a_problem_and_says_how_to_block_it(doctor, tmp_path):
    info = tmp_path / "site" / "acme_tools-0.1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-tools\nVersion: 0.1\n")
    (info / "entry_points.txt").write_text("[stack.plugins.v1]\nacme = acme_plugin\n")
    (info.parent / "acme_plugin.py").write_text("import a_module_that_is_not_there")
    done = doctor("--json", PYTHONPATH=str(info.parent))
    assert done.returncode == 1
    (problem,) = findings(done, "plugins", "problem")
    assert problem["found"].startswith("'acme' of acme-tools 0.1, failed: ")
    assert "a_module_that_is_not_there" in problem["found"]
    assert "STACK_DISABLE_PLUGINS=acme" in problem["advice"]
    assert doctor("--json", PYTHONPATH=str(info.parent), STACK_DISABLE_PLUGINS="acme").returncode == 0


def test_importing_the_doctor_brings_no_jax():
    code = "import sys, stack_core.commands.doctor; print('jax' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "False"
