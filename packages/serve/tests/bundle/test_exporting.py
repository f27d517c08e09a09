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
from stack_core.abi.errors import BundleError, ConversionError, InferenceError, UnknownName
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
    with pytest.raises(BundleError, match="licence is empty"):
        bundle.export(tmp_path / "other", _function(fails, 2), licence="")
    assert [path.name for path in tmp_path.iterdir()] == ["digits"]


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (_function(lambda params, x: x, "batch", 2), "'batch' of 'predict' is in a shape and has no sizes"),
        (_function(lambda params, x: x, 2, sizes={"seq": (1, 2)}), "'seq' of 'predict' has sizes and is in no input"),
        (_function(lambda params, x: x.reshape(-1), "batch", 2, sizes={"batch": (1, 2)}), "Axis 0 of the output"),
        (_function(lambda params, x: jax.pure_callback(np.sin, x, x), 2), "cannot be exported"),
        (
            _function(lambda params, x: x, "batch", sizes={"batch": (0, 1)}),
            r"'batch' of 'predict' has the sizes \(0, 1\)",
        ),
        (_function(lambda params, x: {}, 2), "'predict' returns no array"),
        (_function(lambda params, x: {"kind": "cat"}, 2), "The output 'kind' of 'predict' is 'cat'"),
        (_function(lambda params, x: {"a": {"b": x}, "a.b": x}, 2), "two outputs called 'a.b'"),
        (
            _function(lambda params, x: x - x.mean(0), "batch", 3, sizes={"batch": (1, 2)}, joins=True),
            "Rows of 'predict' cannot be joined: the output 'output' of a row changes by",
        ),
        (_function(lambda params, x: x, 2, joins=True), "'batch' is not the first axis"),
    ],
)
def test_what_cannot_be_exported_is_refused_with_the_reason(
    function: dict[str, bundle.Function], message: str, tmp_path: Path
) -> None:
    with pytest.raises(BundleError, match=message):
        bundle.export(tmp_path / "none", function, licence="MIT")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("params", "message"),
    [
        (
            {"layers": [np.ones(2, "f4")], "activation": jax.nn.relu},
            r"'activation' is .* params, static = eqx.partition",
        ),
        ({"name": "mine"}, "'name' is 'mine' of type str; an array was expected"),
        (np.array(["a"], object), "'params' is object. A bundle can hold bool"),
        ({"key": jax.random.key(0)}, "'key' is key<fry>. A bundle can hold bool"),
    ],
)
def test_parameters_that_are_no_arrays_are_refused_by_their_path(params: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(BundleError, match=message):
        bundle.export(tmp_path / "none", _function(lambda params, x: x, 2), params, licence="MIT")


_MIXING: dict[str, Any] = {
    "mean": lambda x: x - x.mean(0),
    "sum so far": lambda x: jnp.cumsum(x, 0),
    "place": lambda x: x + jnp.arange(len(x), dtype="f4")[:, None],
    "rows": lambda x: x / len(x),
    "one scale": lambda x: jnp.round(x / jnp.abs(x).max() * 127),  # of dynamic quantization
    "capacity": lambda x: jnp.where((jnp.cumsum(x[:, :1] > 0, 0) <= 2), x, 0.0),  # of an expert
    "some sizes": lambda x: x - x.mean(0) if len(x) == 8 else x,
    "0 * NaN": lambda x: jnp.eye(len(x)) @ x,
}


@pytest.mark.parametrize("function", _MIXING.values(), ids=_MIXING)
def test_rows_that_depend_on_each_other_are_not_joined(function: Any, tmp_path: Path) -> None:
    rows = np.array([[0.5, 0.25, 0.125], [1.375, -1.0, 0.0]], "f4")
    exported = _function(
        lambda params, x: function(x), "batch", 3, sizes={"batch": (1, 2, 8)}, examples=[{"x": rows[:1]}]
    )
    with pytest.warns(
        bundle.RowsDependWarning, match="'predict' are not joined, and need a batch of exactly 1 or 2 or 8"
    ):
        manifest = bundle.export(tmp_path / "mixes", exported, licence="MIT")
    assert not manifest.signatures["predict"].joins
    opened = bundle.load(tmp_path / "mixes")
    assert opened.manifest == manifest and "requests are not joined" in repr(opened)
    np.testing.assert_allclose(opened({"x": rows})["output"], function(jnp.asarray(rows)), rtol=1e-5)
    with pytest.raises(InferenceError, match="the axis 'batch' has the size 3"):
        opened({"x": np.ones((3, 3), "f4")})


def test_rows_are_compared_in_two_rows_even_if_programs_take_one(tmp_path: Path) -> None:
    function = _function(lambda params, x: x - x.mean(0), "batch", 3, sizes={"batch": (1,)})
    with pytest.warns(bundle.RowsDependWarning):
        bundle.export(tmp_path / "mixes", function, licence="MIT")
    function = _function(lambda params, x: x - x.mean(0), "batch", 3, sizes={"batch": (1,)}, joins=False)
    assert not bundle.export(tmp_path / "alone", function, licence="MIT").signatures["predict"].joins


@pytest.mark.parametrize("dtype", ["bfloat16", "int32"])
def test_rows_of_one_number_are_joined(tmp_path: Path, dtype: str) -> None:
    function = bundle.Function(lambda params, x: x + x, {"x": (dtype, ("batch",))}, sizes={"batch": (2,)})
    assert bundle.export(tmp_path / "double", {"predict": function}, licence="MIT").signatures["predict"].joins


def test_independent_rows_are_joined_also_in_coarse_dtypes_and_of_integers(tmp_path: Path) -> None:
    weight = np.random.default_rng(0).normal(size=(64, 8)).astype(jnp.bfloat16)

    def predict(params: Any, x: jax.Array, tokens: jax.Array) -> dict[str, jax.Array]:
        return {"scores": x.astype(params.dtype) @ params, "same": params[tokens].sum(1)}

    inputs = {"x": ("float32", ("batch", 64)), "tokens": ("int32", ("batch", "seq"))}
    sizes = {"seq": (2, 4), "batch": (2, 16)}
    function = bundle.Function(predict, inputs, sizes=sizes, pad={"seq": 0}, joins=True)
    assert bundle.export(tmp_path / "joins", {"predict": function}, weight, licence="MIT").signatures["predict"].joins


def test_an_axis_that_is_the_batch_twice_is_not_cut(tmp_path: Path) -> None:
    function = _function(lambda params, x: x.T, "batch", "batch", sizes={"batch": (2, 4)})
    assert not bundle.export(tmp_path / "pairs", function, licence="MIT").signatures["predict"].joins


def test_outputs_in_a_tree_are_called_by_their_paths(tmp_path: Path) -> None:
    for name, function, expected in (
        ("tuple", lambda params, x: (x, x + 1), {"output.0": 0.0, "output.1": 1.0}),
        ("list", lambda params, x: [x], {"output.0": 0.0}),
        ("nested", lambda params, x: {"a": {"b": x}, "c": (x + 1, x + 2)}, {"a.b": 0.0, "c.0": 1.0, "c.1": 2.0}),
    ):
        bundle.export(tmp_path / name, _function(function, 1), licence="MIT")
        found = bundle.load(tmp_path / name)({"x": np.zeros(1, "f4")})
        assert {key: array.item() for key, array in found.items()} == expected


def test_linear_algebra_is_exported_and_opens_in_another_process(tmp_path: Path) -> None:
    def decompose(params: Any, x: jax.Array) -> dict[str, jax.Array]:
        return {
            "cholesky": jnp.linalg.cholesky(x),
            "solve": jnp.linalg.solve(x, x),
            "svd": jnp.linalg.svd(x)[1],
            "eigh": jnp.linalg.eigh(x)[0],
        }

    x = np.diag([4.0, 1.0, 9.0]).astype("f4")
    manifest = bundle.export(tmp_path / "lapack", _function(decompose, 3, 3, examples=[{"x": x}]), licence="MIT")
    assert "lapack_spotrf_ffi" in manifest.programs[0].custom_calls
    code = f"from stack_serve import bundle; bundle.load({str(tmp_path / 'lapack')!r})"  # repeats the example
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
    mesh = jax.make_mesh((1,), ("rows",), axis_types=(jax.sharding.AxisType.Auto,))
    rows = jax.NamedSharding(mesh, jax.P("rows"))
    meshed = _function(lambda params, x: jax.lax.with_sharding_constraint(x, rows), 2)
    with pytest.raises(BundleError, match=r"it has the operation sdy\.\w+, which needs a mesh"):
        bundle.export(tmp_path / "none", meshed, licence="MIT")


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
