"""A user's kernel is built, installed, used, held to its contract, tuned, benchmarked and removed."""

import json
import re
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[1] / "examples" / "plugins" / "kernel"

CALL = """
import jax, jax.numpy as jnp
from stack_core import ops
from stack_core.abi.plugins import plugins
x, scale = jax.random.normal(jax.random.key(0), (67, 96)), jnp.linspace(0.5, 2, 96)
expected = ops.norm(x, scale, implementation="reference")
assert jnp.allclose(ops.norm(x, scale, implementation="acme_rows"), expected, rtol=1e-5)
assert "pallas_call" in str(jax.make_jaxpr(lambda x: ops.norm(x, scale, implementation="acme_rows"))(x))
assert "pallas_call" not in str(jax.make_jaxpr(lambda x: ops.norm(x, scale))(x)), "its priority is negative"
(registered,) = (each.registered for each in plugins.reports() if each.distribution == "acme-rows")
assert registered == {"ops": ("norm/acme_rows",)}, registered
"""
TUNED = """
import jax, jax.numpy as jnp
from stack_core import ops

def normed(x, scale):
    return ops.norm(x, scale)

def example_args():
    return jnp.ones((64, 128)), jnp.ones(128)
"""


COMPILED = """
import jax, jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
from stack_core import ops
from stack_core.chips import Target
from stack_core.chips.targets import use_target
from stack_core.abi.mesh import MeshConfig, use_mesh
from stack_core.chips.device_mesh import make_mesh

def loss(x, scale):
    normed = ops.norm(x, scale, axes={"x": ("batch", None, None)}, implementation="acme_rows")
    return jnp.sum(normed.astype(jnp.float32) ** 2)

for target, rows in (Target("v6e:1x1"), 67), (Target("v6e:2x2"), 64):
    mesh = make_mesh(MeshConfig(), target.devices)
    x = jax.ShapeDtypeStruct((rows, 7, 512), "bfloat16", sharding=NamedSharding(mesh, PartitionSpec("fsdp")))
    scale = jax.ShapeDtypeStruct((512,), "float32", sharding=NamedSharding(mesh, PartitionSpec()))
    with use_target(target), use_mesh(mesh):
        step = jax.jit(jax.value_and_grad(loss, (0, 1)))
        text = step.lower(x, scale).compile().as_text()
    calls = [line for line in text.splitlines() if 'custom_call_target="tpu_custom_call"' in line]
    part = f"bf16[{7 * rows // len(target.devices)},512]"
    assert len(calls) == 2 and all(part in call for call in calls), (target.name, part, calls)
    assert "all-gather" not in text
"""


def test_the_kernel_of_the_example_has_fewer_than_a_hundred_lines():
    assert len((EXAMPLE / "acme_rows" / "kernel.py").read_text().splitlines()) < 100


@pytest.mark.tpu_aot
def test_the_example_compiles_for_one_tpu_and_for_four(environment):
    """Forward and backward, on each device's part and with nothing gathered."""
    with environment.installed(EXAMPLE):
        environment.run("-c", COMPILED)


def test_a_kernel_of_a_user_gets_all_that_our_own_get(environment, tmp_path):
    (tmp_path / "tuned.py").write_text(TUNED)
    tables, results = tmp_path / "tables", tmp_path / "results.json"
    tune = ["tune", f"{tmp_path / 'tuned.py'}:normed", "--tables", str(tables), "--budget-s", "120"]
    chosen = ["--ops", "norm", "--implementations", "acme_rows", "--dtypes", "float32", "--rounds", "2"]
    with environment.installed(EXAMPLE):
        passed = environment.check_contract(EXAMPLE, "-k", "float32 or shard_map", code=CALL)
        tuned, measured = environment.stack_each(
            tune, ["bench", "ops", *chosen, "--json", str(results)], XDG_CACHE_HOME=str(tmp_path / "cache")
        )
    assert re.search(r"^\d+ passed, \d+ skipped", passed, re.MULTILINE), passed
    assert tuned.returncode == 0, tuned.stderr
    _check_table(tables)
    _check_benchmark(json.loads(results.read_text())["rows"], measured.stdout)


def _check_table(tables):
    (table,) = tables.iterdir()
    (case,) = json.loads(table.read_text())["cases"]
    measured = [each["config"] for each in case["measurements"] if each["implementation"] == "acme_rows"]
    assert sorted(config["rows"] for config in measured) == [8, 32]
    assert {each["outcome"] for each in case["measurements"]} == {"measured"}


def _check_benchmark(rows, printed):
    assert [(row["case"], row["direction"]) for row in rows] == [("rms", "forward"), ("rms", "gradient")]
    assert rows[0]["ran"] == "acme_rows Tile(rows=32)"
    assert rows[1]["ran"] == "acme_rows Tile(rows=32)"
    assert "left out: norm 66m rms, residual float32 forward acme_rows" in printed
    assert "computes only rms norms of the last axis, from x and scale" in printed
