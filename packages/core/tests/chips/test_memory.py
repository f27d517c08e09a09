import jax

from stack_core.chips import machine, memory


class Device:
    """What `free_bytes` asks of a `jax.Device`."""

    def __init__(self, limit, used):
        self.limit, self.used = limit, used

    def memory_stats(self):
        return {"bytes_limit": self.limit, "bytes_in_use": self.used}


def test_a_device_with_memory_of_its_own_has_what_is_not_in_use():
    assert memory.free_bytes([Device(100, 30), Device(100, 40)]) == 60


def test_cpu_devices_share_the_machine_s_memory(monkeypatch):
    monkeypatch.setattr(memory, "available_memory_bytes", lambda: 1000)
    device = jax.devices("cpu")[0]
    assert memory.free_bytes([device]) == 1000
    assert memory.free_bytes([device] * 8) == 125
    monkeypatch.setattr(memory, "available_memory_bytes", lambda: None)
    assert memory.free_bytes([device]) is None


def test_a_cpu_has_less_than_the_machine():
    assert 0 < memory.free_bytes(jax.devices("cpu")[:1]) <= machine.memory_bytes()
