"""What JAX's own process tells is understood however it ends."""

import json
import sys
import time

import pytest

from stack_core.abi.installing import install_command
from stack_core.doctor.backend import Answer, ask_jax, check_jax

FIND = {"stage": "find", "file": None}
IMPORT = {"stage": "import", "jax": "0.12.0", "jaxlib": "0.12.0"}


def device(kind, **memory):
    return {"id": 0, "kind": kind, "local": True, "memory": memory}


def started(*devices, platform="cpu", right=True, chips=None):
    return Answer(
        {
            "find": FIND,
            "import": IMPORT,
            "devices": {"platform": platform, "devices": list(devices)},
            "compute": {"right": right},
            "rows": {"chips": chips or {}},
        }
    )


def ask(code, timeout_s=30.0):
    return ask_jax(timeout_s, (sys.executable, "-c", code))


def say(*answers):
    return "; ".join(["import sys, time", *(f"print({json.dumps(json.dumps(one))}, flush=True)" for one in answers)])


def test_jax_starts_here_and_all_stages_answer():
    answer = ask_jax(120.0)
    assert answer.failed is None
    assert answer.platform == "cpu"
    assert answer.stages["compute"]["right"] is True
    assert [finding.status for finding in check_jax(answer)] == ["ok", "ok"]


def test_what_libraries_print_in_between_does_no_harm():
    answer = ask(say(FIND) + "; print('hello'); print('3'); print('[]'); print('{}'); " + say(IMPORT))
    assert list(answer.stages) == ["find", "import"]
    assert (answer.failed, answer.error) == ("devices", "the process ended with status 0")


def test_a_process_that_hangs_is_ended_and_the_stage_named():
    started_s = time.monotonic()
    answer = ask(say(FIND, IMPORT) + "; sys.stderr.write('waiting for the driver\\n'); time.sleep(600)", timeout_s=2.0)
    assert time.monotonic() - started_s < 30
    assert (answer.failed, answer.error, answer.log) == ("devices", "no answer after 2 s", "waiting for the driver")
    (finding,) = [finding for finding in check_jax(answer) if finding.check == "devices"]
    assert finding.status == "problem"
    assert "run `stack doctor` on all of them at once" in finding.advice


def test_a_processor_without_what_jaxlib_needs_is_told_from_a_bad_installation():
    answer = ask("import os, signal; os.kill(os.getpid(), signal.SIGILL)")
    assert answer.error == "the process was killed by SIGILL"
    (finding,) = check_jax(Answer({"find": FIND}, "import", answer.error))
    assert "AVX" in finding.advice


def test_a_missing_jax_says_which_command_installs_it():
    failed = Answer({"find": FIND}, "import", "ModuleNotFoundError: No module named 'jax'", "probe.py")
    (finding,) = check_jax(failed)
    assert (finding.status, finding.advice) == ("problem", f"JAX is missing: {install_command('stack-core')}")


def test_a_jax_that_cannot_be_imported_is_to_be_installed_in_the_range_that_core_supports():
    (finding,) = check_jax(Answer({"find": FIND}, "import", "RuntimeError: jaxlib is too old", "/x/jax/version.py"))
    command = install_command("jax<0.13,>=0.10.2", reinstall=True)
    assert finding.advice == f"Install JAX again (it failed in /x/jax/version.py): {command}"


def test_devices_are_counted_by_kind_with_their_memory_and_row():
    answer = started(
        *[device("NVIDIA H200", bytes_limit=100 * 2**30)] * 8, platform="gpu", chips={"NVIDIA H200": "h200"}
    )
    finding = list(check_jax(answer))[-1]
    assert finding.status == "ok"
    assert finding.found == "8 x 'NVIDIA H200' on platform 'gpu', 100.0 GiB for arrays on each, chip 'h200'"


def test_a_device_without_a_row_is_a_note():
    finding = list(check_jax(started(device("odd"), chips={"odd": None})))[-1]
    assert finding.status == "note"
    assert "no chip row" in finding.found


def test_a_device_that_computes_wrong_is_a_problem():
    statuses = {finding.found: finding.status for finding in check_jax(started(device("odd"), right=False))}
    assert statuses["a product of two small matrices is wrong on 'odd'"] == "problem"


@pytest.mark.parametrize(
    ("platforms", "advice"), [("tpu", "JAX_PLATFORMS is 'tpu'"), (None, "JAX_PLATFORMS=cpu runs without")]
)
def test_a_backend_that_does_not_start_says_what_to_do(monkeypatch, platforms, advice):
    if platforms is None:
        monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    else:
        monkeypatch.setenv("JAX_PLATFORMS", platforms)
    answer = Answer({"find": FIND, "import": IMPORT}, "devices", "RuntimeError: no such device", log="driver too old")
    finding = list(check_jax(answer))[-1]
    assert finding.found.endswith("RuntimeError: no such device\ndriver too old")
    assert finding.advice.startswith(advice)
