import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stack_core import ops
from stack_core.errors import BundleError, ConversionError, InferenceError, UnknownName
from stack_serve import bundle

from .digits import export, images, params, predict


def _function(function: Any, *shape: int | str, **options: Any) -> dict[str, bundle.Function]:
    return {"predict": bundle.Function(function, inputs={"x": ("float32", shape)}, **options)}


def test_it_computes_what_the_function_computes(digits: Path) -> None:
    opened = bundle.load(digits)
    for rows in (1, 3, 8, 19):
        x = images(rows, seed=rows)
        found = opened({"pixels": x})["probabilities"]
        np.testing.assert_allclose(found, predict(params(), x)["probabilities"], rtol=1e-5, atol=1e-6)


def test_the_process_that_opens_it_imports_jax_and_nothing_of_flax_or_training(digits: Path) -> None:
    np.save(digits.parent / "images.npy", images(4))
    code = """
import json, sys
import numpy as np
from stack_serve import bundle
found = bundle.load(sys.argv[1])({"pixels": np.load(sys.argv[2])})["probabilities"]
foreign = {"flax", "optax", "stack_train", "stack_kernels", "orbax"} & {name.partition(".")[0] for name in sys.modules}
print(json.dumps([found.tolist(), sorted(foreign)]))
"""
    command = [sys.executable, "-c", code, str(digits), str(digits.parent / "images.npy")]
    found, foreign = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
    assert foreign == []
    np.testing.assert_allclose(found, predict(params(), images(4))["probabilities"], atol=1e-5)


def test_the_manifest_tells_what_is_in_it(tmp_path: Path) -> None:
    manifest = export(tmp_path / "digits")
    assert manifest.name == export(tmp_path / "digits" / "1").name == "digits"
    assert str(manifest.signatures["predict"]) == (
        "(pixels: float32[batch, 64]) -> (probabilities: float32[batch, 10]) with batch in 1, 2, 8"
    )
    assert [weight.path for weight in manifest.weights] == [
        "layers/0/bias", "layers/0/kernel", "layers/1/bias", "layers/1/kernel",
    ]  # fmt: skip
    assert len(manifest.files) == 3 + 1 + 1
    assert bundle.verify(tmp_path / "digits") == manifest


def test_the_digest_of_the_manifest_is_one_that_sha256sum_checks(digits: Path) -> None:
    subprocess.run(["sha256sum", "-c", "manifest.sha256"], cwd=digits, check=True, capture_output=True)


def test_nothing_is_overwritten_and_nothing_half_written(tmp_path: Path) -> None:
    export(tmp_path / "digits")
    with pytest.raises(ConversionError, match="exists already"):
        export(tmp_path / "digits")

    def fails(params: Any, x: Any) -> Any:
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        bundle.export(tmp_path / "other", _function(fails, 2), licence="MIT")
    assert [path.name for path in tmp_path.iterdir()] == ["digits"]


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (_function(lambda params, x: x, "batch", 2), "'batch' of 'predict' is in a shape and has no sizes"),
        (_function(lambda params, x: x, 2, sizes={"seq": (1, 2)}), "'seq' of 'predict' has sizes and is in no input"),
        (_function(lambda params, x: x.reshape(-1), "batch", 2, sizes={"batch": (1, 2)}), "Axis 0 of the output"),
        (_function(lambda params, x: jax.pure_callback(np.sin, x, x), 2), "cannot be exported"),
    ],
)
def test_what_cannot_be_exported_is_refused_with_the_reason(
    function: dict[str, bundle.Function], message: str, tmp_path: Path
) -> None:
    with pytest.raises(BundleError, match=message):
        bundle.export(tmp_path / "none", function, licence="MIT")
    assert not list(tmp_path.iterdir())


def test_examples_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    function = _function(lambda params, x: x, 2, examples=[{"x": np.zeros(3, "f4")}])
    with pytest.raises(InferenceError, match=r"'x' has the shape \[3\]. Expected \(x: float32\[2\]\)"):
        bundle.export(tmp_path / "none", function, licence="MIT")


def test_functions_share_parameters_and_have_names(tmp_path: Path) -> None:
    weight = np.arange(6, dtype="f4").reshape(2, 3)
    functions = {
        "up": bundle.Function(lambda params, x: x @ params, inputs={"x": ("float32", (2,))}),
        "down": bundle.Function(lambda params, y: params @ y, inputs={"y": ("float32", (3,))}),
    }
    bundle.export(tmp_path / "two", functions, weight, licence="MIT")
    opened = bundle.load(tmp_path / "two")
    assert opened({"x": np.ones(2, "f4")}, signature="up")["output"].tolist() == [3.0, 5.0, 7.0]
    assert opened({"y": np.ones(3, "f4")}, signature="down")["output"].tolist() == [3.0, 12.0]
    with pytest.raises(UnknownName, match="It has: up, down"):
        opened({"x": np.ones(2, "f4")})


def test_a_padded_axis_is_cropped_from_the_outputs(tmp_path: Path) -> None:
    def total(params: Any, x: jax.Array) -> dict[str, jax.Array]:
        return {"sum": x.sum(1), "same": x * 2}

    shape = ("batch", "seq")
    function = _function(total, *shape, sizes={"batch": (1, 4), "seq": (2, 8)}, pad={"seq": 7})
    bundle.export(tmp_path / "sums", function, licence="MIT")
    x = np.ones((6, 5), "f4")
    found = bundle.load(tmp_path / "sums")({"x": x})
    assert found["same"].tolist() == (2 * x).tolist()
    assert found["sum"].tolist() == [5 + 3 * 7] * 6  # the function sees what the axis is filled with


def test_bfloat16_bool_and_integers_come_through(tmp_path: Path) -> None:
    def choose(params: Any, where: jax.Array, index: jax.Array) -> dict[str, jax.Array]:
        return {"chosen": jnp.where(where, params["table"][index], -params["table"][index])}

    table = np.arange(4).astype(jnp.bfloat16)
    inputs = {"where": ("bool", ("batch",)), "index": ("int8", ("batch",))}
    function = bundle.Function(choose, inputs=inputs, sizes={"batch": (2,)})
    bundle.export(tmp_path / "kinds", {"predict": function}, {"table": table}, licence="MIT")
    found = bundle.load(tmp_path / "kinds")({"where": np.array([True, False]), "index": np.array([3, 2], "i1")})
    assert found["chosen"].dtype == jnp.bfloat16
    assert found["chosen"].tolist() == [3.0, -2.0]


def test_ops_export_with_whatever_implementations_are_installed(tmp_path: Path) -> None:
    def block(params: Any, x: jax.Array) -> jax.Array:
        x = ops.norm(x, params["scale"])
        heads = ops.linear(x, params["mix"]).reshape(*x.shape[:2], 2, 16)
        return ops.attention(heads, heads, heads, causal=True).reshape(x.shape)

    random = np.random.default_rng(0)
    weights = {"scale": np.ones(32, "f4"), "mix": random.normal(size=(32, 32)).astype("f4")}
    x = random.normal(size=(2, 8, 32)).astype("f4")
    function = _function(block, "batch", 8, 32, sizes={"batch": (2,)}, examples=[{"x": x}])
    manifest = bundle.export(tmp_path / "block", function, weights, licence="MIT")
    assert manifest.programs[0].custom_calls == ()
    expected = jax.jit(block)(weights, x)
    np.testing.assert_allclose(bundle.load(tmp_path / "block")({"x": x})["output"], expected, atol=1e-4)
