"""Conversions between PEFT directories and run directories."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from stack_core.abi.adapters import Adapters
from stack_core.abi.config import to_yaml
from stack_core.abi.errors import ConversionError
from stack_core.abi.formats import Conversion, Progress
from stack_core.abi.run_directory import RunDirectory
from stack_core.runtime.atomic_directory import atomic_directory
from stack_core.runtime.digest import array_digests
from stack_train.checkpoint import CheckpointStore
from stack_train.checkpoint.leaves import LeafSpec
from stack_train.diffusion.components import Component
from stack_train.diffusion.exchange import component_of
from stack_train.diffusion.lora import KOHYA_FILE, LORA_FILE, write_lora
from stack_train.diffusion.pipeline_classes import PIPELINES
from stack_train.peft.reading import read_base_copies, read_base_digests, read_peft
from stack_train.peft.settings import CONFIG, read_settings
from stack_train.peft.writing import write_peft
from stack_train.run.config import run_config
from stack_train.run.program import single_device_program
from stack_train.run.start import open_start
from stack_train.run.transforms import transform_names
from stack_train.variables.trained_adapters import (
    Digests,
    RunAdapters,
    adapter_section,
    check_base,
    digests_of_run,
    run_adapters,
    with_adapters,
)
from stack_train.variables.weights import init_state

__all__ = ["FORMAT", "PeftFormat"]


class PeftFormat:
    """The model format `peft:DIR`: an adapter without its base model."""

    base_key = "base_model_name_or_path"

    def recognizes(self, directory: Path) -> bool:
        return (directory / CONFIG).is_file()

    def read_adapters(self, directory: Path, config: Any, digests: Callable[[], Digests]) -> Adapters:
        """Reads an adapter for a model with this config.

        Args:
          digests: returns the digests of the model's leaves. It is called only if the directory has something to
            compare: digests of the base, which `export_run` writes, or copies of embeddings or head, which PEFT writes.

        Raises:
          ConversionError: the adapter does not fit the model, or was trained on a different base.
        """
        adapters = read_peft(directory, config)
        known = {name: (_spec(leaf), leaf["digest"]) for name, leaf in read_base_digests(directory).items()}
        if known:
            check_base(str(directory), known, digests())
        if copies := read_base_copies(directory, config):
            _check_copies(directory, copies, digests())
        return adapters

    def import_run(
        self, directory: Path, run: Path, *, progress: Progress | None = None, base: Path | None = None
    ) -> Conversion:
        """Converts an adapter to a run that starts from its base.

        The config of the run gets a section that adds adapters, and its checkpoint contains only the adapters.

        Args:
          base: run with the base model in float; None uses the base in the adapter's config.

        Raises:
          ConversionError: the base is unknown, is not a run, or does not match the adapter; or `run` exists.
        """
        named = read_settings(directory).base if base is None else str(base)
        if named is None or not RunDirectory(Path(named)).config.is_file():
            raise ConversionError(
                f"{directory} is an adapter of {named!r}, which is not a run. Name the run that holds its base, "
                "--base RUN; `stack convert hf:DIR RUN` makes one of a Hugging Face checkpoint."
            )
        # Absolute, because the new run may be resumed from another folder.
        source = Path(named).absolute()
        saved = run_config(source)
        if transform_names(saved):
            raise ConversionError(
                f"The model of {source} is changed by section {' and '.join(transform_names(saved))} of its config. "
                "Give the run that it was made from."
            )
        adapters = self.read_adapters(directory, saved.model, lambda: digests_of_run(source))
        name, section = adapter_section(adapters)
        settings = replace(saved.run, init_from=str(source))
        config = replace(saved, output=str(run), run=settings, sections={**saved.sections, name: section})
        program = single_device_program(config)
        start = open_start(str(source))
        state, records = init_state(program, config, start)
        state = with_adapters(state, program, config, adapters)
        with atomic_directory(run) as partial:
            paths = RunDirectory(partial)
            start.copy_tokenizer(partial)
            with CheckpointStore(paths.checkpoints) as store:
                held = {"params": state.params, "moved": state.mutable}
                # Without an optimizer state and a position in the data: runs can start from it, but not resume.
                store.save(0, held, None, to_yaml(config), frozen=records, kind="weights")
            paths.config.write_text(to_yaml(config), encoding="utf-8")
        return _conversion(run, adapters, progress)

    def export_run(
        self, run: Path, directory: Path, *, base_model: str | None = None, progress: Progress | None = None
    ) -> Conversion:
        """Converts the adapters in a run's newest checkpoint to a PEFT directory, or of a denoiser to LoRA files.

        Args:
          base_model: name or directory of the base model for transformers; None writes the source of the run's base. If
            that is a run, `stack convert` can import the directory, but transformers cannot.

        Raises:
          ConversionError: the run lacks adapters, PEFT cannot represent an adapter, or `directory` exists.
          RunDirectoryError: `run` is not a run directory.
          CheckpointError: the newest checkpoint of the run is missing or damaged.
        """
        found = run_adapters(run)
        base = base_model
        if base is None and found.base is not None:
            base = found.base.source.removeprefix("run:").removeprefix("hf:")
        if (component := component_of(found.config.model.name)) is not None:
            _write_image_adapters(directory, found, component, base_model)
            return _conversion(directory, found.adapters, progress)
        digests = {} if found.base is None else found.base.to_plain()["leaves"]
        with atomic_directory(directory) as partial:
            write_peft(partial, found.adapters, found.config.model, base=base, digests=digests)
        return _conversion(directory, found.adapters, progress)


FORMAT = PeftFormat()


def _write_image_adapters(directory: Path, found: RunAdapters, component: Component, base_model: str | None) -> None:
    """Writes a LoRA file in diffusers' layout and one in kohya's."""
    if base_model is not None:
        raise ConversionError(f"LoRA files of image models name no base; leave out --base-model {base_model}.")
    folder = next((each.folder for each in PIPELINES if each.denoiser is component), "transformer")
    with atomic_directory(directory) as partial:
        for file, layout in ((LORA_FILE, "diffusers"), (KOHYA_FILE, "kohya")):
            write_lora(partial / file, found.adapters, component, found.config.model, folder=folder, layout=layout)


def _check_copies(directory: Path, copies: Mapping[str, tuple[str, np.ndarray]], digests: Digests) -> None:
    """Compares copies of base parameters in an adapter's file with the base.

    Raises:
      ConversionError: a copy differs in shape or values, for example after full training of the embeddings or a change
        of the vocabulary size.
    """
    problems = []
    for path, (name, values) in copies.items():
        if path not in digests:  # the leaves of a quantized base have other paths
            continue
        spec, digest = digests[path]
        if values.shape != spec.shape:
            problems.append(f"{name} is {list(values.shape)} as a parameter, {list(spec.shape)} in the base")
        # The copy may have another dtype than the base.
        elif array_digests({path: np.ascontiguousarray(values.astype(spec.dtype))})[path] != digest:
            problems.append(f"{name} holds other values than the base")
    if problems:
        raise ConversionError(
            f"{directory} brings embeddings or a head of its own:\n  " + "\n  ".join(problems) + "\nAdapters alone are "
            "read. Give the base that it was trained on, or merge it there (PEFT's merge_and_unload) and convert that."
        )


def _conversion(destination: Path, adapters: Adapters, progress: Progress | None) -> Conversion:
    arrays = {
        f"{path}/{name}": array
        for path, factors in adapters.items()
        for name, array in (("down", factors.down), ("up", factors.up), ("magnitude", factors.magnitude))
        if array is not None
    }
    total_bytes = sum(array.nbytes for array in arrays.values())
    if progress is not None:
        progress(list(arrays)[-1], total_bytes, total_bytes)
    dtype = str(next(iter(arrays.values())).dtype)
    return Conversion(destination, sum(array.size for array in arrays.values()), total_bytes, dtype, ())


def _spec(leaf: Mapping[str, Any]) -> LeafSpec:
    spec = leaf["spec"]
    return LeafSpec(tuple(spec["shape"]), spec["dtype"], spec["key_impl"])
