"""An accelerator that JAX does not use is found, and the command that would change it is named."""

import pytest

from stack_core.abi.installing import install_command
from stack_core.doctor.accelerators import Gpu, Hardware, check_hardware, find_hardware
from stack_core.doctor.backend import Answer

GIB = 2**30
H100 = Gpu("NVIDIA H100 80GB HBM3", "580.65.06", 9.0, 80 * GIB, 0)
V100 = Gpu("Tesla V100-SXM2-16GB", "580.65.06", 7.0, 16 * GIB, 0)
GPU = Hardware(nvidia_cards=1, nvidia_driver=True, gpus=(H100,))
TPU = Hardware(tpus=4)
CUDA = {"jax-cuda13-plugin": None}


def on(platform, devices=1, log=""):
    found = [{"id": index, "kind": "x", "local": True, "memory": {}} for index in range(devices)]
    return Answer({"devices": {"platform": platform, "devices": found}}, log=log)


def only(hardware, answer, environ=None, distributions=None):
    (finding,) = check_hardware(hardware, answer, environ or {}, distributions or {})
    return finding


@pytest.fixture
def system(tmp_path, monkeypatch):
    """Builds a system from PCI devices, given as (vendor, class, device), device nodes, and what nvidia-smi prints."""

    def build(pci=(), nodes=(), smi=None):
        for index, (vendor, kind, identity) in enumerate(pci):
            folder = tmp_path / f"sys/bus/pci/devices/0000:00:{index:02x}.0"
            folder.mkdir(parents=True)
            for name, text in (("vendor", vendor), ("class", kind), ("device", identity)):
                (folder / name).write_text(f"{text}\n")
        for node in nodes:
            (tmp_path / "dev").mkdir(exist_ok=True)
            (tmp_path / "dev" / node).touch()
        programs = tmp_path / "bin"
        programs.mkdir()
        if smi is not None:
            program = programs / "nvidia-smi"
            program.write_text(f"#!/bin/sh\n{smi}\n")
            program.chmod(0o755)
        monkeypatch.setenv("PATH", str(programs), prepend=":")
        return find_hardware(tmp_path)

    return build


def test_a_machine_without_accelerators_has_none(system):
    assert system(pci=[("0x8086", "0x060000", "0x1237"), ("0x1ae0", "0x020000", "0x0042")]) == Hardware()


def test_gpus_are_found_on_the_bus_and_listed_by_their_driver(system):
    hardware = system(
        pci=[("0x10de", "0x030200", "0x2330"), ("0x10de", "0x020000", "0x1021")],
        nodes=["nvidia0", "nvidiactl"],
        smi="echo 'NVIDIA H100 80GB HBM3, 580.65.06, 9.0, 81920, 1024'; echo 'Odd, 580.65.06, [N/A], [N/A], [N/A]'",
    )
    listed = (
        Gpu("NVIDIA H100 80GB HBM3", "580.65.06", 9.0, 80 * GIB, GIB),
        Gpu("Odd", "580.65.06", None, None, None),
    )
    assert hardware == Hardware(nvidia_cards=1, nvidia_driver=True, gpus=listed)


def test_an_nvidia_smi_that_fails_lists_nothing(system):
    assert system(smi="echo 'Failed to initialize NVML'; exit 9") == Hardware()


def test_tpus_are_told_from_googles_other_devices(system):
    hardware = system(pci=[("0x1ae0", "0x120000", "0x006f")] * 4 + [("0x1ae0", "0x020000", "0x0042")])
    assert hardware == Hardware(tpus=4)


def test_tpus_are_found_by_their_nodes_as_well(system):
    assert system(nodes=["accel0", "accel1"]) == Hardware(tpus=2)


def test_without_accelerators_the_cpu_is_right():
    assert only(Hardware(), on("cpu")).status == "ok"


def test_a_gpu_that_jax_was_installed_without_names_the_extra():
    finding = only(GPU, on("cpu"))
    assert (finding.check, finding.status) == ("gpu", "warning")
    assert finding.found.startswith(
        "NVIDIA H100 80GB HBM3, driver 580.65.06 is present, but JAX is installed without CUDA"
    )
    assert finding.advice == install_command("stack-core[cuda13]", upgrade=True)


def test_an_old_gpu_or_driver_gets_the_cuda_that_it_can_run():
    assert only(Hardware(gpus=(V100,)), on("cpu")).advice.endswith(install_command("jax[cuda12]"))
    old = Hardware(nvidia_driver=True, gpus=(Gpu("NVIDIA L4", "550.54.15", 8.9, None, None),))
    advice = only(old, on("cpu")).advice
    assert "CUDA 13 needs driver 580 or later; 550.54.15 is installed" in advice
    assert install_command("jax[cuda12]") in advice


def test_a_gpu_without_a_driver_asks_for_one():
    finding = only(Hardware(nvidia_cards=1), on("cpu"))
    assert finding.status == "warning"
    assert "Install NVIDIA's driver, release 580" in finding.advice
    assert "--gpus all" in finding.advice


@pytest.mark.parametrize(
    ("variable", "value", "hidden"),
    [
        ("JAX_PLATFORMS", "cpu", True),
        ("JAX_PLATFORMS", "cuda,cpu", False),
        ("CUDA_VISIBLE_DEVICES", "", True),
        ("CUDA_VISIBLE_DEVICES", "-1", True),
        ("CUDA_VISIBLE_DEVICES", "0", False),
    ],
)
def test_a_gpu_that_was_hidden_on_purpose_is_a_note(variable, value, hidden):
    finding = only(GPU, on("cpu"), {variable: value}, CUDA)
    assert finding.status == ("note" if hidden else "problem")
    assert (variable in finding.found) is hidden


def test_a_cuda_plugin_that_does_not_work_is_a_problem_with_what_jax_said():
    finding = only(GPU, on("cpu", log="Unable to load cuDNN. Is it installed?"), {}, CUDA)
    assert finding.status == "problem"
    assert finding.found.endswith("JAX runs on cpu: Unable to load cuDNN. Is it installed?")
    assert finding.advice == install_command("stack-core[cuda13]", upgrade=True)


def test_gpus_in_use_are_fine_unless_some_are_left_out_or_taken():
    assert list(check_hardware(GPU, on("gpu"), {}, CUDA)) == []
    two = Hardware(1, True, (H100, Gpu(H100.name, H100.driver, 9.0, 80 * GIB, 60 * GIB)))
    note, warning = check_hardware(two, on("gpu"), {}, CUDA)
    assert (note.status, note.found) == ("note", "JAX uses 1 of the 2 GPUs")
    assert (warning.status, warning.found[:33]) == ("warning", "other processes hold 60.0 of 80.0")


def test_a_tpu_that_jax_was_installed_without_names_the_extra():
    finding = only(TPU, on("cpu"))
    assert (finding.status, finding.advice) == ("warning", install_command("stack-core[tpu]"))


def test_a_tpu_that_is_not_used_though_libtpu_is_there_is_a_problem():
    finding = only(TPU, on("cpu", log="The TPU is already in use by process with pid 7."), {}, {"libtpu": None})
    assert finding.status == "problem"
    assert "already in use by process with pid 7" in finding.found
    assert only(TPU, on("cpu"), {"JAX_PLATFORMS": "cpu"}, {"libtpu": None}).status == "note"
    assert list(check_hardware(TPU, on("tpu"), {}, {"libtpu": None})) == []
