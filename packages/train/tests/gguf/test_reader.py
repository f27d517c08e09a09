"""The reader of GGUF files and its dequantization, against the `gguf` package."""

from pathlib import Path

import gguf
import numpy as np
import pytest

from stack_train.gguf.blocks import dequantize
from stack_train.gguf.reader import StoredTensor, read_file

TYPES = ("F32", "F16", "Q4_0", "Q4_1", "Q8_0", "Q6_K")


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("reader") / "model.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_bool("a.bool", True)
    writer.add_uint32("a.uint", 7)
    writer.add_int64("a.int", -7)
    writer.add_float32("a.float", 0.1)
    writer.add_string("a.text", "é")
    writer.add_array("a.texts", ["x", "", "ab"])
    writer.add_array("a.numbers", [1.5, 2.5])
    random = np.random.default_rng(0)
    for name in TYPES:
        kind = gguf.GGMLQuantizationType[name]
        if name == "Q6_K":  # the package reads this type, and does not write it
            rows = random.integers(0, 256, (3, 210), dtype=np.uint8)
            rows[:, -2:] = np.full((3, 1), 0.5, np.float16).view(np.uint8)
        else:
            rows = gguf.quants.quantize(random.standard_normal((3, 2 * 256), np.float32), kind)
        writer.add_tensor(name, rows, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_a_file_is_read_as_by_the_package(path: Path) -> None:
    ours, reader = read_file(gguf, path), gguf.GGUFReader(path)
    expected = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    assert ours.settings == expected and expected["a.texts"] == ["x", "", "ab"]
    assert list(ours.tensors) == [each.name for each in reader.tensors] == list(TYPES)
    for each in reader.tensors:
        stored = ours.tensors[each.name]
        assert stored.shape == tuple(reversed(each.shape.tolist()))
        values = gguf.quants.dequantize(each.data, each.tensor_type).reshape(stored.shape)
        np.testing.assert_array_equal(dequantize(gguf, stored), values)


def test_released_pages_are_read_again(path: Path) -> None:
    file = read_file(gguf, path)

    def resident_kb() -> int:
        _, _, mapped = Path("/proc/self/smaps").read_text().partition(f" {path}\n")
        return int(mapped.partition("Rss:")[2].split()[0])

    before = {name: each.data.copy() for name, each in file.tensors.items()}
    assert resident_kb() > 0
    file.release_pages()
    assert resident_kb() == 0
    for name, data in before.items():
        np.testing.assert_array_equal(file.tensors[name].data, data)


@pytest.mark.parametrize("name", ["Q4_0", "Q4_1", "Q8_0"])
def test_every_code_has_the_value_of_the_package(name: str) -> None:
    kind = gguf.GGMLQuantizationType[name]
    size, size_bytes = gguf.GGML_QUANT_SIZES[kind]
    data = np.random.default_rng(1).integers(0, 256, (3000, size_bytes), dtype=np.uint8)
    data[:, 1] &= 0x3F  # finite scales
    data[:, 3] &= 0x3F
    ours = dequantize(gguf, StoredTensor((3000, size), kind, data))
    np.testing.assert_array_equal(ours, gguf.quants.dequantize(data, kind))


def test_a_cut_or_foreign_file_is_refused(path: Path, tmp_path: Path) -> None:
    content = path.read_bytes()
    for size in (0, 3, 7, 20, 100, 400, len(content) - 100):
        (tmp_path / "cut").write_bytes(content[:size])
        with pytest.raises(ValueError, match=r"ends at|magic|empty"):
            read_file(gguf, tmp_path / "cut")
    for changed, message in ((b"GGUF\0\0\0\3", "version"), (b"GGUF\1\0\0\0", "version 1;"), (b"GGML", "magic")):
        (tmp_path / "other").write_bytes(changed + content[len(changed) :])
        with pytest.raises(ValueError, match=message):
            read_file(gguf, tmp_path / "other")
