"""The command that a message names installs what it names, however stack-core was installed."""

import json
import shlex
import shutil
import subprocess
import sys
from importlib.metadata import Distribution

import pytest

from stack_core.abi.installing import _command, install_command


@pytest.fixture
def installed(tmp_path):
    """Makes the record of an installed stack-core."""

    def make(installer, direct_url=None):
        record = tmp_path / "stack_core-0.1.0.dist-info"
        record.mkdir()
        (record / "INSTALLER").write_text(f"{installer}\n")
        if direct_url is not None:
            (record / "direct_url.json").write_text(json.dumps(direct_url))
        return Distribution.at(record)

    return make


def test_pip_installs_into_the_python_that_runs(installed, tmp_path):
    prefix = tmp_path / "env"
    (prefix / "bin").mkdir(parents=True)
    (prefix / "bin" / "pip").touch(mode=0o755)
    core = installed("pip")
    python = f"{prefix}/bin/python"
    assert _command("stack-train", core, prefix, {"PATH": f"{prefix}/bin"}) == "pip install stack-train"
    assert _command("stack-core[tpu]", core, prefix, {}, upgrade=True) == (
        f"{python} -m pip install --upgrade 'stack-core[tpu]'"
    )
    assert _command("jax<2", core, prefix, {}, reinstall=True) == f"{python} -m pip install --force-reinstall 'jax<2'"
    assert _command("jax", None, prefix, {}) == f"{python} -m pip install jax"


def test_uv_installs_into_the_python_that_runs_or_adds_to_the_project(installed, tmp_path):
    core, prefix = installed("uv"), tmp_path / ".venv"
    active = {"VIRTUAL_ENV": str(prefix)}
    assert _command("stack-train", core, prefix, active) == "uv pip install stack-train"
    assert _command("jax", core, prefix, {}, reinstall=True) == (
        f"uv pip install --python {prefix}/bin/python --reinstall jax"
    )
    (tmp_path / "uv.lock").touch()
    assert _command("stack-train", core, prefix, {}) == "uv add stack-train"


def test_packages_of_stack_come_from_where_the_core_came_from(installed, tmp_path):
    source, wheels = tmp_path / "my packages", tmp_path / "wheels"
    (source / "train").mkdir(parents=True)
    (source / "train" / "pyproject.toml").touch()
    wheels.mkdir()
    (wheels / "stack_train-0.1.0-py3-none-any.whl").touch()
    url = f"file://{tmp_path}/my%20packages/core"
    editable = installed("pip", {"url": url, "dir_info": {"editable": True}})
    assert shlex.split(_command("stack-train[cpu]", editable, tmp_path, {}))[-2:] == [
        "--editable",
        f"{source}/train[cpu]",
    ]
    assert _command("stack-other", editable, tmp_path, {}).endswith(" install stack-other")
    assert _command("jax[tpu]", editable, tmp_path, {}).endswith(" install 'jax[tpu]'")
    shutil.rmtree(tmp_path / "stack_core-0.1.0.dist-info")
    wheel = installed("pip", {"url": f"file://{wheels}/stack_core-0.1.0-py3-none-any.whl", "archive_info": {}})
    assert _command("stack-train", wheel, tmp_path, {}).endswith(f"{wheels}/stack_train-0.1.0-py3-none-any.whl")


def test_the_command_of_this_environment_is_understood_by_its_installer():
    command = [*shlex.split(install_command("stack-core")), "--dry-run", "--no-deps"]
    if "uv" in command[:1] and shutil.which("uv") is None:
        pytest.skip("needs uv on the PATH, which installed this environment")
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 0, f"{sys.prefix}: {command}\n{done.stderr}"
