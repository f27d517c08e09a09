"""Variables that change results or speed are told with what they do; the rest of the environment is left alone."""

import pytest

from stack_core.doctor.environment import check_environment


def told(**environ):
    return [(finding.check, finding.status) for finding in check_environment(environ)]


def test_an_environment_without_them_is_ok():
    assert told(HOME="/root", PATH="/bin", TPU_NAME="x") == [("environment", "ok")]


@pytest.mark.parametrize(
    ("name", "value", "status"),
    [
        ("JAX_DISABLE_JIT", "1", "warning"),
        ("JAX_DEBUG_NANS", "True", "warning"),
        ("JAX_ENABLE_X64", "true", "note"),
        ("JAX_DEFAULT_MATMUL_PRECISION", "highest", "note"),
        ("JAX_NUMPY_DTYPE_PROMOTION", "strict", "note"),
        ("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.1", "note"),
        ("LIBTPU_INIT_ARGS", "--x", "note"),
        ("NVIDIA_TF32_OVERRIDE", "0", "note"),
        ("CUDA_VISIBLE_DEVICES", "", "note"),
        ("STACK_DISABLE_PLUGINS", "rl", "note"),
        ("OMP_NUM_THREADS", "1", "note"),
    ],
)
def test_a_variable_is_told_with_its_value(name, value, status):
    (finding,) = check_environment({name: value})
    assert (finding.check, finding.status) == (name, status)
    assert finding.found.startswith(f"is {value!r}: ")
    assert bool(finding.advice) is (status == "warning")


@pytest.mark.parametrize("value", ["", "0", "false", "False"])
def test_a_switch_that_is_off_is_none(value):
    assert told(JAX_DISABLE_JIT=value, JAX_ENABLE_X64=value) == [("environment", "ok")]


def test_flags_of_xla_that_matter_are_explained():
    findings = list(check_environment({"XLA_FLAGS": "--xla_dump_to=/tmp/x --xla_gpu_autotune_level=2"}))
    assert [finding.status for finding in findings] == ["note", "warning"]
    assert findings[1].found.startswith("--xla_dump_to=/tmp/x: ")
    assert findings[1].advice == "Remove --xla_dump_to from XLA_FLAGS."


@pytest.mark.parametrize(
    ("name", "meant"),
    [("JAX_PLATFORM", "JAX_PLATFORMS"), ("jax_enable_x64", "JAX_ENABLE_X64"), ("XLA_FLAG", "XLA_FLAGS")],
)
def test_a_slip_of_the_finger_is_a_warning(name, meant):
    (finding,) = check_environment({name: "cpu"})
    assert (finding.status, finding.advice) == ("warning", f"Did you mean {meant}?")


def test_other_variables_of_jax_are_left_alone():
    assert told(JAX_PLATFORM_NAME="cpu", JAX_COORDINATOR_ADDRESS="x", JAX_NUM_PROCESSES="2") == [("environment", "ok")]


def test_variables_that_a_package_declares_are_left_to_its_check():
    assert [one.check for one in check_environment({"STACK_ACME": "1"}, ["STACK_ACME"])] == ["environment"]


def test_a_variable_of_stack_that_nobody_reads_is_a_note():
    (finding,) = check_environment({"STACK_DISABLED_PLUGINS": "rl"})
    assert finding.status == "note"
    assert "Did you mean 'STACK_DISABLE_PLUGINS'" in finding.found
