from pathlib import Path

import pytest

from stack_core.abi.errors import HardwareError
from stack_serve.parallel import devices
from stack_serve.parallel.devices import divide_devices
from stack_serve.parallel.router import Router


def digests(*names: str) -> list[bytes]:
    return [name.encode() for name in names]


def test_the_longest_cached_prefix_wins_within_the_bound_on_load() -> None:
    router = Router(3, "cache_aware", pages=4)
    assert router.choose(digests("a", "b"), [0, 0, 0]) == 0
    assert router.choose(digests("c"), [1, 0, 0]) == 1  # nothing cached: the least loaded
    assert router.choose(digests("a", "x"), [1, 1, 0]) == 0  # the bound is ceil(1.25 * 3 / 3) = 2
    assert router.choose(digests("a", "x"), [2, 1, 0]) == 2
    assert router.matches(2, digests("a", "x")) == 2
    # The bound of six continuations is 3, and never excludes the least loaded engine.
    assert router.choose(digests("a", "b"), [3, 1, 1]) == 2
    assert router.choose(digests("a", "b"), [3, 3, 3], continuations=8) == 0
    assert router.choose(digests("a", "b"), [None, 5, 10]) == 1
    router.forget(0)
    assert router.matches(0, digests("a", "b")) == 0
    # An engine keeps as many prefixes as it has pages, the ends of prompts go first.
    router.choose(digests("p", "q", "r", "s", "t"), [0, 9, 9])
    assert router.matches(0, digests("p", "q", "r", "s", "t")) == 4


def test_round_robin_takes_turns_among_running_engines() -> None:
    router = Router(3, "round_robin", pages=4)
    assert [router.choose((), [0, 9, 0]) for _ in range(4)] == [0, 1, 2, 0]
    assert [router.choose((), [0, None, 0]) for _ in range(3)] == [2, 0, 2]
    assert not router.uses_digests


def test_devices_are_divided_and_too_few_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("JAX_PLATFORMS", "CUDA_VISIBLE_DEVICES", "TPU_VISIBLE_CHIPS", "XLA_FLAGS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(devices.os, "sched_getaffinity", lambda _: {3, 5, 6, 7, 9})
    one, two = divide_devices(2, 2, root=tmp_path)
    assert (one.cores, two.cores) == ((3, 5), (6, 7))
    assert one.environment == {"NPROC": "2", "XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    assert divide_devices(1, 1, root=tmp_path)[0].environment == {"NPROC": "5"}
    with pytest.raises(HardwareError, match=r"3 engines with 2 each need 6 CPU cores, but there are 5\. Lower"):
        divide_devices(3, 2, root=tmp_path)
    for number in range(4):
        (tmp_path / f"proc/driver/nvidia/gpus/000{number}").mkdir(parents=True)
    monkeypatch.setenv("JAX_PLATFORMS", "cuda,cpu")
    found = [each.environment for each in divide_devices(2, 2, root=tmp_path)]
    assert found == [{"CUDA_VISIBLE_DEVICES": "0,1"}, {"CUDA_VISIBLE_DEVICES": "2,3"}]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-a, GPU-b")
    assert divide_devices(2, 1, root=tmp_path)[1].environment == {"CUDA_VISIBLE_DEVICES": "GPU-b"}
    with pytest.raises(HardwareError, match="5 engines with one each need 5 GPUs, but there are 2"):
        divide_devices(5, 1, root=tmp_path)
    monkeypatch.setenv("JAX_PLATFORMS", "tpu")
    (tmp_path / "dev").mkdir()
    for number in range(4):
        (tmp_path / f"dev/accel{number}").touch()
    assert divide_devices(4, 1, root=tmp_path)[3].environment == {
        "TPU_PROCESS_BOUNDS": "1,1,1",
        "TPU_CHIPS_PER_PROCESS_BOUNDS": "1,1,1",
        "TPU_VISIBLE_CHIPS": "3",
    }
    with pytest.raises(HardwareError, match="3 TPU chips per engine: expected 1, 2, 4"):
        divide_devices(1, 3, root=tmp_path)
