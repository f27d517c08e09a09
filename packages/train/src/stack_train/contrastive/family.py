"""Families of image-text models: conversion of their configs and of the preprocessing of images."""

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax

from stack_core.abi.errors import ConversionError
from stack_core.abi.objectives import Objective
from stack_train.contrastive.dual_encoder import DualEncoder
from stack_train.data.kinds.image_texts import ImageTextsData
from stack_train.models.reader import Reader, unsupported
from stack_train.models.weight_map import WeightRule
from stack_train.vision.preprocessor import RESAMPLING, apply_preprocessor, read_resampling

__all__ = ["DualEncoderConfigMap", "DualEncoderFamily"]


@dataclass(frozen=True, kw_only=True)
class DualEncoderConfigMap:
    """Mapping between a config and a `config.json` with a `text_config` and a `vision_config`.

    Attributes:
      architecture: name in `architectures`.
      model_type: value of `model_type`.
    """

    architecture: str
    model_type: str

    @abstractmethod
    def read_parts(self, outer: Reader, vision: Reader, text: Reader) -> dict[str, Any]:
        """Reads the fields of our config; unsupported settings are added to the problems of their reader."""

    @abstractmethod
    def write_parts(self, config: Any) -> dict[str, Any]:
        """Returns the top-level keys of a config, with both towers."""

    def read(self, mapping: Mapping[str, Any]) -> dict[str, Any]:
        """Converts a `config.json` to fields of our config.

        Raises:
          ConversionError: the model does not support a setting, or a key is unknown; the message lists every problem.
        """
        outer = Reader(mapping)
        parts = {name: outer.get(name) for name in ("text_config", "vision_config")}
        if missing := [name for name, part in parts.items() if not isinstance(part, Mapping)]:
            raise ConversionError(f"{self.architecture}: config.json has no {' and no '.join(missing)}.")
        for name, part in parts.items():
            # Earlier releases of transformers wrote a second copy, which takes precedence there.
            copy = outer.get(f"{name}_dict") or {}
            differing = [key for key, value in copy.items() if key not in part or part[key] != value]
            outer.problems.extend(f"{name}_dict with {key}={copy[key]!r} unlike {name}" for key in differing)
        readers = {name: Reader(part) for name, part in parts.items()}
        found = self.read_parts(outer, readers["vision_config"], readers["text_config"])
        for reader in readers.values():
            reader.get("tie_word_embeddings")  # no tower has a head over the vocabulary
        problems = [*outer.problems, *outer.unread()]
        for name, reader in readers.items():
            problems += [f"{name}: {problem}" for problem in (*reader.problems, *reader.unread())]
        if problems:
            raise unsupported(self.architecture, problems, has_unread=bool(outer.unread()))
        return found

    def write(self, config: Any) -> dict[str, Any]:
        """Returns the `config.json` of a config."""
        kinds = {"architectures": [self.architecture], "model_type": self.model_type}
        return {**kinds, **self.write_parts(config), "torch_dtype": config.param_dtype}


@dataclass(frozen=True, kw_only=True)
class DualEncoderFamily:
    """A `ConvertibleFamily` of image-text models.

    Attributes:
      name: name of the family.
      config_class: config class of the family.
      config_map: mapping between the config and `config.json`.
      objective: the objective by which published models were trained.
      sizes: names of published models, for listings.
      tested: aspects covered by the project's tests.
    """

    name: str
    config_class: type
    config_map: DualEncoderConfigMap
    objective: Objective
    sizes: tuple[str, ...] = ()
    tested: tuple[str, ...] = ()

    @abstractmethod
    def build(self, config: Any, *, key: jax.Array) -> DualEncoder:
        """Returns the model with random weights."""

    @abstractmethod
    def weight_rules(self, config: Any) -> tuple[WeightRule, ...]:
        """Returns one rule per parameter."""

    @abstractmethod
    def square_keys(self, config: Any) -> dict[str, Any]:
        """Returns the keys of `preprocessor_config.json` that this config determines, except for the filter."""

    @abstractmethod
    def read_colors(self, mapping: dict[str, Any], config: Any) -> tuple[dict[str, Any], list[str]]:
        """Removes keys of colors that are fields; returns the fields, and the problems of the keys."""

    def run_sections(self, tokenizer: str) -> dict[str, Any]:
        """Returns the sections `data` and `objective` of a run that was imported from a checkpoint.

        The data names a folder `images`, to change before the run trains on.

        Args:
          tokenizer: directory of the tokenizer.
        """
        return {"data": ImageTextsData(source="images/**/*", tokenizer=tokenizer), "objective": self.objective}

    def redundant_tensors(self, config: Any) -> Mapping[str, str | None]:
        """Returns optional tensors of a checkpoint: earlier releases stored the positions 0, 1, 2, ..."""
        del config
        return dict.fromkeys(f"{part}_model.embeddings.position_ids" for part in ("text", "vision"))

    def preprocessed(self, config: Any, mapping: Mapping[str, Any]) -> Any:
        """Returns a config with the preprocessing of images in a `preprocessor_config.json`.

        Raises:
          ConversionError: the file asks for other preprocessing; the message lists every problem.
        """

        def read_fields(keys: dict[str, Any], config: Any) -> tuple[dict[str, Any], list[str]]:
            filter_name, problems = read_resampling(keys, config.resample)
            fields, others = self.read_colors(keys, config)
            return {"resample": filter_name, **fields}, problems + others

        return apply_preprocessor(config, mapping, fixed=self.square_keys(config), read_fields=read_fields)

    def preprocessor(self, config: Any) -> dict[str, Any]:
        """Returns the `preprocessor_config.json` of a config."""
        return {**self.square_keys(config), "resample": RESAMPLING[config.resample]}
