import json
import mmap
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from stack_core.abi.errors import BundleDamaged, BundleError, InferenceError
from stack_serve import bundle
from stack_serve.bundle import stablehlo, weights
from stack_serve.bundle.integrity import digest, digest_line

from .digits import images, params, predict

MUTATIONS = 500


def _mutated(random: np.random.Generator, content: bytes) -> bytes | None:
    """Another content; None removes the file."""
    kind = random.integers(6)
    at = int(random.integers(len(content)))
    if kind == 0:
        return None
    if kind == 1:
        return content[:at]
    if kind == 2:
        return content + random.bytes(int(random.integers(1, 100)))
    if kind == 3:
        return content[:at] + content[at + 1 :]
    if kind == 4:
        return content[:at] + bytes([content[at] ^ (1 << int(random.integers(8)))]) + content[at + 1 :]
    block = random.bytes(min(64, len(content) - at))
    return content[:at] + block + content[at + len(block) :]


def test_every_damage_is_refused_by_the_name_of_the_file_before_it_is_parsed(
    digits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(digits, tmp_path / "digits")
    parsed: list[str] = []
    monkeypatch.setattr("stack_serve.bundle.opened.open_module", lambda *_: parsed.append("program"))
    monkeypatch.setattr("stack_serve.bundle.weights.read", lambda *_: parsed.append("weights"))
    files = sorted(path for path in (tmp_path / "digits").rglob("*") if path.is_file())
    assert {path.name for path in files} >= {"manifest.json", "manifest.sha256"}
    random = np.random.default_rng(0)
    for number in range(MUTATIONS):
        path = files[number % len(files)]
        content = path.read_bytes()
        mutated = _mutated(random, content)
        if mutated == content:
            continue
        path.unlink() if mutated is None else path.write_bytes(mutated)
        for opens in (bundle.load, bundle.verify):
            with pytest.raises(BundleDamaged) as caught:
                opens(tmp_path / "digits")
            assert path.name in str(caught.value)
        path.write_bytes(content)
    assert parsed == []


def test_it_shows_what_it_computes(digits: Path) -> None:
    assert repr(bundle.load(digits, replay=False)) == (
        "<Bundle 'digits' on cpu, 0.00964 MB: predict(pixels: float32[batch, 64]) -> "
        "(probabilities: float32[batch, 10]) with batch in 1, 2, 8>"
    )


def test_a_manifest_of_another_format_is_refused(digits: Path, tmp_path: Path) -> None:
    shutil.copytree(digits, tmp_path / "digits")
    for old, new, message in (
        (b'"format": 1', b'"format": 2', "has the format 2; this stack-serve opens 1"),
        (b'"dtype": "float32"', b'"dtype": "string"', "dtype"),
        (b'"examples/predict', b'"../predict', "is not a path inside the bundle"),
        (b'"kept"', b'"keeps"', "keeps"),
    ):
        content = (digits / "manifest.json").read_bytes().replace(old, new)
        (tmp_path / "digits/manifest.json").write_bytes(content)
        (tmp_path / "digits/manifest.sha256").write_bytes(digest_line(content))
        with pytest.raises(BundleError, match=message):
            bundle.load(tmp_path / "digits")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            lambda manifest: manifest["programs"].append(manifest["programs"][0]),
            "two programs compute 'predict' on cpu",
        ),
        (lambda manifest: manifest["programs"].pop(), "no program computes 'predict' on cpu for the sizes"),
        (lambda manifest: manifest["programs"][0].update(kept=[0, 0]), r"takes the arguments \[0, 0\] of 5"),
        (lambda manifest: manifest["programs"][0].update(kept=[5]), r"takes the arguments \[5\] of 5"),
        (
            lambda manifest: manifest["examples"].append(manifest["examples"][0]),
            "two programs or examples have the file",
        ),
        (
            lambda manifest: manifest["weights"].append(manifest["weights"][0]),
            "the parameter 'layers/0/bias' is there twice",
        ),
        (
            lambda manifest: manifest["signatures"]["predict"]["outputs"][0].update(shape=[10]),
            "rows are joined, but 'batch'",
        ),
    ],
)
def test_a_manifest_that_contradicts_itself_is_refused(
    digits: Path, tmp_path: Path, changes: Callable[[dict[str, Any]], object], message: str
) -> None:
    shutil.copytree(digits, tmp_path / "digits")
    manifest = json.loads((digits / "manifest.json").read_bytes())
    changes(manifest)
    _write_manifest(tmp_path / "digits", json.dumps(manifest).encode())
    with pytest.raises(BundleError, match=message):
        bundle.load(tmp_path / "digits")


def test_a_key_that_is_there_twice_is_refused(digits: Path, tmp_path: Path) -> None:
    shutil.copytree(digits, tmp_path / "digits")
    content = (digits / "manifest.json").read_bytes().replace(b'"name":', b'"licence": "MIT", "name":', 1)
    _write_manifest(tmp_path / "digits", content)
    with pytest.raises(BundleError, match="an object has the key 'licence' twice"):
        bundle.load(tmp_path / "digits")
    weights.write(tmp_path / "w", {"a": np.ones(1, "f4"), "b": np.zeros(1, "f4")})
    with pytest.raises(BundleError, match="the key 'a' twice"):
        weights.read((tmp_path / "w").read_bytes().replace(b'"b"', b'"a"'))


def _write_manifest(directory: Path, content: bytes) -> None:
    (directory / "manifest.json").write_bytes(content)
    (directory / "manifest.sha256").write_bytes(digest_line(content))


def test_no_bundle_is_no_damaged_bundle(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match="holds no bundle"):
        bundle.load(tmp_path)
    with pytest.raises(BundleError, match="is not a directory"):
        bundle.load(tmp_path / "none")


def test_one_that_computes_something_else_is_refused(digits: Path, tmp_path: Path) -> None:
    shutil.copytree(digits, tmp_path / "digits")
    (path,) = (tmp_path / "digits/examples").iterdir()
    arrays = weights.read(path.read_bytes())
    weights.write(path, {name: array * np.float32(1.01) for name, array in arrays.items()})
    name = path.relative_to(tmp_path / "digits").as_posix()
    old, new = (digest((root / name).read_bytes()) for root in (digits, tmp_path / "digits"))
    content = (digits / "manifest.json").read_bytes().replace(old.encode(), new.encode())
    (tmp_path / "digits/manifest.json").write_bytes(content)
    (tmp_path / "digits/manifest.sha256").write_bytes(digest_line(content))
    with pytest.raises(BundleError, match="'probabilities' differs from the exported one"):
        bundle.load(tmp_path / "digits")
    bundle.load(tmp_path / "digits", replay=False)


def test_one_for_another_platform_is_refused(digits: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stack_serve.bundle.opened.current_target", lambda: "tpu")
    with pytest.raises(BundleError, match="has programs for cpu; JAX runs on tpu here"):
        bundle.load(digits)


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({}, "'pixels' is missing"),
        ({"pixels": images(1), "more": images(1)}, "'more' is not an input"),
        ({"pixels": images(1).astype("f8")}, "'pixels' has the dtype float64"),
        ({"pixels": images(1)[0]}, r"'pixels' has the shape \[64\]"),
        ({"pixels": images(1)[:, :63]}, r"'pixels' has the shape \[1, 63\]"),
        ({"pixels": images(1)[:0]}, "the axis 'batch' has the size 0"),
    ],
)
def test_inputs_that_do_not_fit_are_refused_with_the_signature(
    digits: Path, inputs: dict[str, np.ndarray], message: str
) -> None:
    with pytest.raises(InferenceError, match=message) as caught:
        bundle.load(digits, replay=False)(inputs)
    assert "Expected (pixels: float32[batch, 64])" in str(caught.value)


def test_a_sealed_bundle_does_not_follow_its_files(digits: Path, tmp_path: Path) -> None:
    shutil.copytree(digits, tmp_path / "digits")
    before = bundle.load(digits)({"pixels": images(2)})["probabilities"]
    sealed = bundle.load(tmp_path / "digits", sealed=True)
    (path,) = (tmp_path / "digits/weights").iterdir()
    with path.open("r+b") as file:
        file.write(bytes(path.stat().st_size))
    np.testing.assert_array_equal(sealed({"pixels": images(2)})["probabilities"], before)


def test_weights_lie_at_multiples_of_64_bytes_and_are_used_where_they_lie(tmp_path: Path) -> None:
    arrays = {"a": np.arange(3, dtype="f4"), "b": np.arange(70, dtype="i1"), "c": np.array(2.0)}
    weights.write(tmp_path / "w", arrays)
    found = weights.read((tmp_path / "w").read_bytes())
    assert list(found) == ["a", "b", "c"]
    for name, array in found.items():
        np.testing.assert_array_equal(array, arrays[name])
    with (tmp_path / "w").open("rb") as file:
        memory = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    for name in ("a", "b"):
        array = weights.read(memory)[name]
        assert array.ctypes.data % 64 == 0
        if jax.default_backend() == "cpu":
            assert jax.device_put(array, may_alias=True).unsafe_buffer_pointer() == array.ctypes.data


def test_one_that_another_jax_wrote_opens() -> None:
    stored = Path(__file__).parent / "stored" / "digits"
    opened = bundle.load(stored)
    assert opened.manifest.jax == "0.12.0.1"
    found = opened({"pixels": images(5)})["probabilities"]
    np.testing.assert_allclose(found, predict(params(), images(5))["probabilities"], rtol=1e-5, atol=1e-6)


def test_programs_are_of_the_pinned_version(digits: Path) -> None:
    content = next((digits / "programs").iterdir()).read_bytes()
    assert f"StableHLO_v{stablehlo.PINNED}".encode() in content
