"""Scarce cores, memory and disks, folders that cannot be written, and a clock that is behind."""

import os
import shutil
from pathlib import Path

import pytest

from stack_core.chips import machine
from stack_core.doctor import resources
from stack_core.doctor.resources import (
    check_cache,
    check_clock,
    check_cores,
    check_memory,
    check_pages,
)

GIB = 2**30


@pytest.fixture
def load(monkeypatch):
    return lambda one_minute: monkeypatch.setattr(os, "getloadavg", lambda: (one_minute, 0.0, 0.0))


def test_cores_are_counted(load, tmp_path):
    load(0.0)
    (finding,) = check_cores(tmp_path)
    assert finding.status == "ok"
    assert finding.found.startswith(f"{machine.usable_cores()} of {os.cpu_count()} cores of ")


def test_a_container_that_grants_less_time_than_cores_is_a_warning(load, tmp_path):
    load(0.0)
    (tmp_path / "sys/fs/cgroup").mkdir(parents=True)
    (tmp_path / "sys/fs/cgroup/cpu.max").write_text("50000 100000\n")
    (finding,) = check_cores(tmp_path)
    assert finding.status == "warning"
    assert "grants the time of 0.5" in finding.found


def test_more_work_than_cores_is_a_warning(load, tmp_path):
    load(os.cpu_count() + 1.5)
    assert [(finding.check, finding.status) for finding in check_cores(tmp_path)][-1] == ("load", "warning")


@pytest.mark.parametrize(("available_gib", "status"), [(30, "ok"), (1, "warning")])
def test_little_memory_is_a_warning(tmp_path, available_gib, status):
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text(f"MemAvailable: {available_gib * 2**20} kB\n")
    (finding,) = check_memory(tmp_path)
    assert finding.status == status
    assert finding.found.startswith(f"{available_gib:.1f} of ")


def test_memory_that_the_system_does_not_tell_is_not_zero(tmp_path):
    (finding,) = check_memory(tmp_path)
    assert (finding.status, finding.found) == ("note", "the system does not report its free memory")


@pytest.mark.parametrize(
    ("enabled", "libc", "tunables", "statuses"),
    [
        ("always [madvise] never", "glibc 2.36", "", ["note"]),
        ("always [madvise] never", "glibc 2.36", "glibc.malloc.hugetlb=1", ["ok"]),
        ("[always] madvise never", "glibc 2.36", "", []),
        ("always madvise [never]", "glibc 2.36", "", []),
        ("always [madvise] never", "glibc 2.31", "", []),
        ("always [madvise] never", None, "", []),
        (None, "glibc 2.36", "", []),
    ],
)
def test_small_pages_are_noted_where_a_setting_would_make_them_large(
    monkeypatch, tmp_path, enabled, libc, tunables, statuses
):
    monkeypatch.setattr(os, "confstr", lambda name: libc)
    if enabled is not None:
        setting = tmp_path / "sys/kernel/mm/transparent_hugepage/enabled"
        setting.parent.mkdir(parents=True)
        setting.write_text(f"{enabled}\n")
    assert [finding.status for finding in check_pages({"GLIBC_TUNABLES": tunables}, tmp_path)] == statuses


def test_folders_that_can_be_written_and_have_room_are_ok(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "not" / "there" / "yet"))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(9 * GIB, 0, 9 * GIB))
    findings = {finding.check: finding for finding in check_cache({"JAX_COMPILATION_CACHE_DIR": str(tmp_path)})}
    assert {check: finding.status for check, finding in findings.items()} == {
        "temporary files": "ok",
        "JAX's compilations": "ok",
        "stack's cache": "ok",
    }
    assert str(tmp_path / "not/there/yet/stack") in findings["stack's cache"].found


def test_a_full_disk_is_a_warning_and_names_the_variable(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(9 * GIB, 8 * GIB, GIB))
    (finding,) = [finding for finding in check_cache({}) if finding.check == "stack's cache"]
    assert finding.status == "warning"
    assert "XDG_CACHE_HOME" in finding.advice


def test_a_folder_that_cannot_be_written_is_a_warning(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    (finding,) = [finding for finding in check_cache({}) if finding.check == "stack's cache"]
    assert (finding.status, finding.advice) == ("warning", "Set XDG_CACHE_HOME to a writable folder.")


def test_a_user_without_a_home_has_no_cache(monkeypatch):
    def home():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", home)
    assert [finding.status for finding in check_cache({}) if finding.check == "stack's cache"] == ["warning"]


def test_a_cache_in_a_bucket_is_not_a_folder():
    environ = {"JAX_COMPILATION_CACHE_DIR": "gs://bucket/cache"}
    assert "JAX's compilations" not in [finding.check for finding in check_cache(environ)]


def test_a_clock_that_is_behind_is_a_warning():
    assert list(check_clock()) == []
    (finding,) = check_clock(now_s=86400.0)
    assert "1970-01-02 00:00 UTC" in finding.found
    assert Path(resources.__file__).exists()
