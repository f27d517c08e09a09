"""The model format `gguf:FILE`: conversions between GGUF files and run directories."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from stack_core.abi.adapters import Adapters
from stack_core.abi.config import to_yaml
from stack_core.abi.errors import ConversionError
from stack_core.abi.formats import Conversion, Progress
from stack_core.abi.run_directory import RunDirectory
from stack_core.runtime.atomic_directory import atomic_directory
from stack_train.checkpoint import CheckpointStore, named_leaves
from stack_train.data.kinds.text import TextData
from stack_train.data.tokenizer import HuggingFaceTokenizer
from stack_train.generation.generative import ModuleCheckpoint, generative_checkpoint
from stack_train.gguf.importance import Importance
from stack_train.gguf.library import library
from stack_train.gguf.names import architecture_of, settings_of
from stack_train.gguf.reader import MAGIC
from stack_train.gguf.source import Source
from stack_train.gguf.vocabulary import Vocabulary
from stack_train.gguf.writing import add_setting, tensors_of, write_tensors
from stack_train.nn.quantized import QuantizedMatrix, with_quantized
from stack_train.run.config import RunConfig, run_config
from stack_train.run.model import abstract_model, holds_codes
from stack_train.variables.weights import read_params

__all__ = ["FORMAT", "GgufFormat"]

# Numbers of llama.cpp's file types (LLAMA_FTYPE).
_FILE_TYPES = {"F16": 1, "Q4_0": 2, "Q8_0": 7, "Q4_K_M": 15, "Q5_K_M": 17, "Q6_K": 18}


class GgufFormat:
    """The model format `gguf:FILE` of llama.cpp; requires stack-train[gguf].

    Matrices are written as F16, Q8_0, Q6_K or Q4_0, or as llama.cpp's mixtures Q5_K_M and Q4_K_M: Q6_K for the values
    and the output of the MLP in half of the layers, and Q5_K or Q4_K for the others. With less than eight bits, the
    matrix that computes the logits is Q6_K: the head, or the embedding of a model with tied embeddings. K-quants need
    rows of a multiple of 256 entries; others become Q8_0, Q5_1 and Q5_0, or F16 if 32 does not divide them. Types of
    less than eight bits can be fitted to the importance of columns. Vectors and routers are F32.

    All types that the `gguf` package can dequantize are read, as float32. A file contains the tokenizer and its chat
    template. Imports hold one parameter in memory; exports load the model and convert one tensor at a time. Models
    opened for generation keep the quantized types in `gguf.quantized.FORMS` quantized.

    Attributes:
      stored_types: types of matrices that can be written; the first is the default.
      fits_importance: True; types of less than eight bits are fitted to the importance of columns.
    """

    stored_types = ("F16", "Q8_0", "Q6_K", "Q5_K_M", "Q4_K_M", "Q4_0")
    fits_importance = True

    def recognizes(self, directory: Path) -> bool:
        if not directory.is_file():
            return False
        with directory.open("rb") as file:
            return file.read(len(MAGIC)) == MAGIC

    def export_run(
        self,
        run: Path,
        directory: Path,
        *,
        stored: str | None = None,
        importance: Path | None = None,
        progress: Progress | None = None,
    ) -> Conversion:
        """Converts a run's newest checkpoint to a file, atomically and with merged adapters.

        Args:
          directory: path of the file.
          stored: storage type, from `stored_types`; None uses the first.
          importance: file with the mean squared inputs of matrices, by parameter or of llama.cpp; None fits none.

        Raises:
          ConversionError: GGUF cannot represent the model, a setting or the tokenizer; the importance belongs to
            another model; or the file exists.
        """
        gguf, stored = library(), stored or self.stored_types[0]
        if stored not in self.stored_types:
            raise ConversionError(
                f"{stored!r} is not a type that can be written; take one of {', '.join(self.stored_types)}."
            )
        if directory.exists():
            raise ConversionError(f"{directory} exists; a conversion overwrites nothing. Choose a new path.")
        if importance is not None and stored in ("F16", "Q8_0"):
            raise ConversionError(
                f"--importance has no effect on {stored}, which is not fitted. Add --stored Q4_K_M, or leave it out."
            )
        saved = run_config(run)
        if holds_codes(saved):
            raise ConversionError(f"The parameters of {run} are quantized. Convert the run that it was made from.")
        config = saved.model
        architecture = architecture_of(config)
        # Before the weights are read, which takes longer than all checks.
        vocabulary = Vocabulary.of(HuggingFaceTokenizer.load(run / "tokenizer"), config.vocab_size)
        leaves = named_leaves(read_params(run, config)[0])
        weighted = None if importance is None else Importance.read(gguf, importance)
        tensors = list(tensors_of(gguf, config, architecture, leaves, stored, weighted))
        if weighted is not None:
            weighted.check_used()
        directory.parent.mkdir(parents=True, exist_ok=True)
        # In the same folder, because a rename is atomic only within a file system.
        partial = directory.with_name(f".{directory.name}.partial")
        try:
            writer = gguf.GGUFWriter(partial, architecture.name)
            writer.add_name(run.resolve().name)
            writer.add_file_type(_FILE_TYPES[stored])
            writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
            if importance is not None:
                writer.add_string("quantize.imatrix.file", importance.name)
            for key, value in (*settings_of(config, architecture), *vocabulary.settings()):
                add_setting(gguf, writer, key, value)
            write_tensors(gguf, writer, tensors, progress)
            partial.rename(directory)
        except OSError as error:
            raise ConversionError(f"{directory} cannot be written: {error}.") from error
        finally:
            partial.unlink(missing_ok=True)
        parameters = sum(int(leaf.size) for leaf in leaves.values())
        return Conversion(directory, parameters, directory.stat().st_size, stored, ("the tokenizer",))

    def import_run(self, directory: Path, run: Path, *, progress: Progress | None = None) -> Conversion:
        """Converts a file to a run directory with float32 parameters.

        Args:
          directory: path of the file.

        Raises:
          ConversionError: the file is not a valid GGUF file; its architecture, a tensor type or its tokenizer is not
            supported; its tensors do not match its settings (all are listed); or `run` exists.
        """
        source = Source.open(directory)
        with atomic_directory(run) as partial:
            paths = RunDirectory(partial)
            paths.tokenizer.mkdir()
            for name, content in source.vocabulary.files().items():
                (paths.tokenizer / name).write_bytes(content)
            data = TextData(tokenizer=str(run / "tokenizer"))
            data = replace(data, seq_tokens=min(data.seq_tokens, source.config.max_positions))
            config = RunConfig(output=str(run), model=source.config, data=data)
            with CheckpointStore(paths.checkpoints) as store:
                leaves = source.leaves(progress)
                store.save_weights(leaves, to_yaml(config), total_bytes=source.total_bytes)
            paths.config.write_text(to_yaml(config), encoding="utf-8")
        parameters = sum(leaf.size for leaf in source.parameters.values())
        return Conversion(run, parameters, source.total_bytes, "float32", ("the tokenizer",))

    def open_for_generation(self, directory: Path) -> ModuleCheckpoint:
        """Opens a file for text generation, with its tokenizer and chat template; nothing is written.

        Activations are float32. Quantized matrices stay quantized; `dequantized` of the checkpoint reads them as
        float32.

        Args:
          directory: path of the file.

        Raises:
          ConversionError: as `import_run`.
          GenerationError: the tokenizer has more tokens than the model.
        """
        source = Source.open(directory)
        quantized = source.quantized()
        tokenizer = HuggingFaceTokenizer(source.vocabulary.files(), str(directory))

        def opened(quantized: Mapping[str, QuantizedMatrix]) -> ModuleCheckpoint:
            return generative_checkpoint(
                with_quantized(abstract_model(source.config), quantized),
                source.config,
                read=lambda shardings: source.values(quantized),
                adapters_at=lambda address: _refuse_adapters(address, directory),
                name=directory.stem,
                tokenizer=tokenizer,
                origin=None,
            )

        checkpoint = opened(quantized)
        return replace(checkpoint, as_floats=lambda: opened({})) if quantized else checkpoint


FORMAT = GgufFormat()


def _refuse_adapters(address: str, path: Path) -> Adapters:
    raise ConversionError(
        f"The adapters {address} cannot be combined with a GGUF file. Convert it: stack convert gguf:{path} RUN, and "
        "use RUN."
    )
