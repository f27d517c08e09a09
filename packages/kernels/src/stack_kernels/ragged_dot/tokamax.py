"""`ragged_dot` by Tokamax's kernels: Mosaic on Hopper and Blackwell, Triton on NVIDIA GPUs, two Mosaic kernels on TPUs.

None of them writes the rows after the last group, and some require full tiles of rows. This adapter pads rows, cuts
sizes off at the last row, and zeroes the rows after the last group, in the cotangent too: a kernel that masks one
operand of a product would let NaN through from the other.

Hopper's kernel for the gradient of the matrices is not used. On an H100 it returned infinite entries for groups of 100,
0, 37, 63, 128, 1, 150 and 33 rows, although groups without rows were masked; the cause is unknown.
"""

import functools
import importlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from stack_core.abi.ops import OpCall, OpImplementation
from stack_core.chips import Chip
from stack_core.ops.building import BackwardCall, as_backward, is_quantized, ragged_product, vary_alike
from stack_kernels import from_tokamax
from stack_kernels.ragged_dot.groups import cut, padded, zero_after
from stack_kernels.supports import first_problem, takes_no, unquantized

__all__ = [
    "TOKAMAX_MOSAIC_GPU",
    "TOKAMAX_TPU_V1",
    "TOKAMAX_TPU_V2",
    "TOKAMAX_TRITON",
    "GroupTiles",
    "Kernel",
    "WarpTiles",
]


@dataclass(frozen=True)
class GroupTiles:
    """Rows, d_in and d_out of a tile, and the number of prefetched tiles; with 0 rows the kernel chooses."""

    rows: int
    d_in: int
    d_out: int
    stages: int


@dataclass(frozen=True)
class WarpTiles:
    """`GroupTiles` plus the number of warps per tile."""

    rows: int
    d_in: int
    d_out: int
    stages: int
    warps: int


@dataclass(frozen=True)
class Kernel:
    """A kernel, with the properties that its adapter needs.

    Attributes:
      name: name of the implementation.
      place: names of the module and of its op's class.
      platform: "gpu" or "tpu".
      generations: supported GPU generations by direction; empty for TPUs.
      tiles: configs worth measuring, the default first.
      made: builds the library's config from (module, config, transposed).
      dtypes: supported dtypes.
      rows_of_tile: multiple to which rows are padded; 0 for the config's rows.
      multiple: required divisor of d_in and d_out.
      fewest: minimum of d_in and d_out.
      needs: further modules that must be installed.
      op: keywords of the op, from the number of groups.
      priority: as in `OpImplementation`.
      differentiates: True if its backward pass is used.
      sums_by_group: True if its gradient of the matrices is used; False for core's reference.
    """

    name: str
    place: tuple[str, str]
    platform: str
    generations: Mapping[str, tuple[str, ...]]
    tiles: Callable[[OpCall], Iterator[Any]]
    made: Callable[[Any, Any, bool], Any]
    dtypes: tuple[str, ...] = ("bfloat16", "float16")
    rows_of_tile: int = 8
    multiple: int = 8
    fewest: int = 1
    needs: tuple[str, ...] = ()
    op: Callable[[int], dict[str, Any]] = lambda groups: {}
    priority: int = 2
    differentiates: bool = True
    sums_by_group: bool = True

    places: ClassVar[str] = "tokamax._src.ops.ragged_dot"

    def implementation(self) -> OpImplementation:
        return OpImplementation(
            "ragged_dot",
            self.name,
            self._forward,
            as_backward(self._backward) if self.differentiates else None,
            platforms=(self.platform,),
            supports=self._supports,
            default=lambda call, chip: next(self._space(call, chip), None),
            space=self._space,
            is_opaque=True,
            exports=self.platform == "tpu",
            priority=self.priority,
        )

    def _supports(self, call: OpCall, chip: Chip, config: Any = None) -> bool | str:
        if (plain := unquantized(call, chip)) is not True:
            return plain
        if (refusal := takes_no(call, "bias")) is not True:
            return refusal
        lhs, rhs = call.arrays["lhs"], call.arrays["rhs"]
        generation = from_tokamax.GENERATIONS.get(chip.kind.partition("-")[0].lower(), "another")
        known, sizes = self.generations.get(call.direction, ()), (*lhs.shape, rhs.shape[2])
        absent = from_tokamax.missing(*self.needs)
        problems = {
            f"its {call.direction} pass is for {_chips(known)}, not {chip.kind}": self.platform == "gpu"
            and generation not in known,
            f"it takes {' or '.join(self.dtypes)}, not {lhs.dtype.name}": lhs.dtype.name not in self.dtypes,
            f"d_in and d_out are multiples of {self.multiple}": any(size % self.multiple for size in sizes[1:]),
            f"d_in and d_out are at least {self.fewest}": min(sizes[1:]) < self.fewest,
            str(absent): absent is not None,
        }
        return first_problem(problems)

    def _space(self, call: OpCall, chip: Chip) -> Iterator[Any]:
        # Core asks for the default before `_supports` can refuse, and a quantized array need not have a shape.
        return iter(()) if is_quantized(call.arrays["rhs"]) else self.tiles(call)

    def _forward(
        self, *, lhs: Any, rhs: Any, group_sizes: Any, bias: None, requested: Any, config: Any
    ) -> tuple[Any, Mapping[str, Any]]:
        del bias, requested
        sizes = cut(group_sizes, len(lhs))
        return self._by_group(lhs, rhs, sizes, config, transposed=False), {}

    def _backward(self, call: BackwardCall, *, config: Any) -> Mapping[str, Any]:
        lhs, rhs = call.arrays["lhs"], call.arrays["rhs"]
        sizes = cut(call.arrays["group_sizes"], len(lhs))
        cotangents = zero_after(sizes, call.cotangents)
        found: dict[str, Any] = {}
        if "lhs" in call.requested:
            found["lhs"] = self._by_group(cotangents, rhs, sizes, config, transposed=True)
        if "rhs" in call.requested:
            outer = self._outer if self.sums_by_group else _reference_outer
            found["rhs"] = outer(zero_after(sizes, lhs), cotangents, sizes, config)
        return found

    def _by_group(self, rows: Any, matrices: Any, sizes: Any, config: Any, *, transposed: bool) -> Any:
        """Multiplies each row by the matrix of its group, or by its transpose; zeros after the last group."""
        base, library = self._library()
        numbers = base.TRANS_RHS_RAGGED_DOT_DIM_NUMS if transposed else base.DEFAULT_RAGGED_DOT_DIM_NUMS
        product = self._product(library, len(sizes), numbers, self.made(library, config, transposed), rows.dtype)
        found = from_tokamax.on_arrays(product, padded(rows, self._tile(config)), matrices, sizes)
        return zero_after(sizes, found[: len(rows)])

    def _outer(self, lhs: Any, cotangent: Any, sizes: Any, config: Any) -> Any:
        """Computes the gradient of each group's matrix, [groups, d_in, d_out]; zeros for a group without rows."""
        base, library = self._library()
        numbers, tile = base.RAGGED_CONTRACTING_DOT_DIM_NUMS, self._tile(config)
        product = self._product(library, len(sizes), numbers, self.made(library, config, False), lhs.dtype)
        found = from_tokamax.on_arrays(product, padded(lhs, tile), padded(cotangent, tile), sizes)
        # Not every kernel writes the matrix of a group without rows.
        return jnp.where(sizes[:, None, None] > 0, found, 0).astype(lhs.dtype)

    def _product(self, library: Any, groups: int, numbers: Any, config: Any, dtype: Any) -> Callable[..., Any]:
        op = getattr(library, self.place[1])(**self.op(groups))

        def product(lhs: Any, rhs: Any, sizes: Any) -> Any:
            return from_tokamax.run(
                op,
                config,
                lhs,
                rhs,
                group_sizes=sizes,
                ragged_dot_dimension_numbers=numbers,
                preferred_element_type=dtype,
            )[0]

        return product

    def _library(self) -> tuple[Any, Any]:
        base, library = (importlib.import_module(f"{self.places}.{name}") for name in ("base", self.place[0]))
        return base, library

    def _tile(self, config: Any) -> int:
        return self.rows_of_tile or config.rows


def _reference_outer(lhs: Any, cotangent: Any, sizes: Any, config: Any) -> Any:
    """Computes the gradient of each group's matrix, [groups, d_in, d_out], with core's reference."""
    del config
    matrices = jnp.zeros((len(sizes), lhs.shape[1], cotangent.shape[1]), lhs.dtype)
    # Inside `jax.shard_map` the gradient of constant matrices would be summed over the devices.
    lhs, cotangent, sizes, matrices = vary_alike(lhs, cotangent, sizes, matrices)
    _, pull_back = jax.vjp(lambda matrices: ragged_product(lhs, matrices, sizes), matrices)
    return pull_back(cotangent)[0]


def _chips(generations: tuple[str, ...]) -> str:
    kinds = {"sm80": ("a100",), "sm90": ("h100", "h200"), "sm100": ("b200",)}
    *leading, last = (kind for generation in generations for kind in kinds[generation]) if generations else ("no GPU",)
    return f"{', '.join(leading)} and {last}" if leading else last


def _of_hopper(call: OpCall) -> Iterator[GroupTiles]:
    yield from (GroupTiles(rows, 64, 128, stages) for rows in (128, 64) for stages in (4, 2))


def _for_hopper(library: Any, config: GroupTiles, transposed: bool) -> Any:
    common = library.common
    is_blackwell = library.gpu_utils.is_sm100()
    return common.Config(
        block_m=config.rows,
        block_n=config.d_out,
        block_k=config.d_in,
        num_stages=config.stages,
        split_k=1,
        persistent=False,
        collective=is_blackwell,
        grid_minor_dim=common.MatmulDimension.M,
        grid_tile_width=4 if is_blackwell else 1,
    )


def _of_triton(call: OpCall) -> Iterator[WarpTiles]:
    rows = max(16, min(128, 1 << (call.arrays["lhs"].shape[0] - 1).bit_length()))
    for d_out in (128, 64):
        for warps, stages in ((4, 4), (8, 3)):
            yield WarpTiles(rows, 32, d_out, stages, warps)


def _for_triton(library: Any, config: WarpTiles, transposed: bool) -> Any:
    return library.Config(
        block_m=config.rows,
        block_n=config.d_out,
        block_k=config.d_in,
        num_warps=config.warps,
        num_stages=config.stages,
    )


def _of_v1(call: OpCall) -> Iterator[GroupTiles]:
    rows, d_in, d_out = (
        min(-(-size // 128) * 128, 512) for size in (*call.arrays["lhs"].shape, call.arrays["rhs"].shape[2])
    )
    while rows >= 128:
        yield GroupTiles(rows, d_in, d_out, 2)
        rows //= 2


def _for_v1(library: Any, config: GroupTiles, transposed: bool) -> Any:
    return library.Config(tile_m=config.rows, tile_k=config.d_in, tile_n=config.d_out, input_buffer_count=config.stages)


def _for_v2(library: Any, config: GroupTiles, transposed: bool) -> Any:
    if config.rows == 0:
        return library.Config()
    of_sums, of_results = (config.d_out, config.d_in) if transposed else (config.d_in, config.d_out)
    return library.Config(tile_m=config.rows, tile_k=of_sums, tile_n=of_results)


_on_tpu = functools.partial(
    Kernel, platform="tpu", generations={}, dtypes=("bfloat16", "float32"), rows_of_tile=0, multiple=128
)

MOSAIC_GPU = Kernel(
    "tokamax_mosaic_gpu",
    ("pallas_mosaic_gpu", "PallasMosaicGpuRaggedDot"),
    "gpu",
    dict.fromkeys(("forward", "backward"), ("sm90", "sm100")),
    _of_hopper,
    _for_hopper,
    rows_of_tile=64,
    multiple=64,
    priority=3,
    sums_by_group=False,
)
TOKAMAX_MOSAIC_GPU = MOSAIC_GPU.implementation()
TOKAMAX_TRITON = Kernel(
    "tokamax_triton",
    ("triton", "TritonRaggedDot"),
    "gpu",
    dict.fromkeys(("forward", "backward"), ("sm80", "sm90", "sm100")),
    _of_triton,
    _for_triton,
    needs=("jax_triton", "triton"),
).implementation()
V1 = _on_tpu(
    "tokamax_v1",
    ("pallas_mosaic_tpu", "PallasMosaicTpuRaggedDot"),
    tiles=_of_v1,
    made=_for_v1,
    fewest=128,
)
TOKAMAX_TPU_V1 = V1.implementation()
V2 = _on_tpu(
    "tokamax_v2",
    ("pallas_mosaic_tpu_v2", "PallasMosaicTpuV2RaggedDot"),
    tiles=lambda call: iter((GroupTiles(0, 0, 0, 2),)),
    made=_for_v2,
    op=lambda groups: {"num_actual_groups": groups},
    priority=3,
    differentiates=False,  # its gradient takes 90 s to compile; v1 computes it
    rows_of_tile=8,
)
TOKAMAX_TPU_V2 = V2.implementation()
