"""Shared parts of language models with a tower for packed images of any size."""

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from jaxtyping import Array, Bool, Float, Int, UInt8

from stack_core.abi.caches import KVCache
from stack_core.abi.errors import ArgumentError, ConversionError
from stack_core.abi.models import ImageTokens, Outputs
from stack_train.models.decoder import Decoder
from stack_train.models.family import DecoderFamily
from stack_train.models.reader import ConfigMap, Reader, unsupported
from stack_train.models.weight_map import WeightRule
from stack_train.vision.image_tokens import select_image_tokens

__all__ = ["NestedFamily", "VisionConfigMap", "VisionDecoder"]


class VisionDecoder(Decoder):
    """A `Decoder` with a tower for images of any size; subclasses set `image_token`."""

    image_token: int | None

    def __call__(  # noqa: PLR0913  the arrays of a batch
        self,
        tokens: Int[Array, "batch seq"],
        positions: Int[Array, "batch seq"],
        segment_ids: Int[Array, "batch seq"] | None = None,
        cache: KVCache | None = None,
        *,
        images: ImageTokens | None = None,
        pixels: UInt8[Array, "batch patches values"] | None = None,
        grids: Int[Array, "batch images 2"] | None = None,
        image_mask: Bool[Array, "batch seq"] | None = None,
        experts: Int[Array, "batch seq mixtures active"] | None = None,
    ) -> Outputs:
        """Returns the normalized hidden states, see `Decoder`.

        Args:
          tokens, positions, segment_ids, cache, images, experts: see `Decoder`.
          pixels: patches of the images of each row, in the order of its image tokens; see the tower.
          grids: rows and columns of tokens of each of these images, 0 for padding.
          image_mask: the tokens of these images; None for all tokens with their id.

        Raises:
          ArgumentError: both `pixels` and `images`, one of `pixels` and `grids`, or `image_token` is not set.
        """
        if (pixels is None) != (grids is None):
            raise ArgumentError("Pixels and grids belong together; give both or none.")
        if pixels is not None and grids is not None:
            if images is not None:
                raise ArgumentError("Both pixels and images were given; leave one out.")
            if self.image_token is None:
                raise ArgumentError("The model has no image_token. Set model.image_token to the id of that token.")
            features = self.image_features(pixels, grids)
            images = self.place(features, select_image_tokens(tokens, image_mask), positions, grids, self.image_token)
        tokens = self.embedded_tokens(tokens)
        return super().__call__(tokens, positions, segment_ids, cache, images=images, experts=experts)

    def embedded_tokens(self, tokens: Int[Array, "batch seq"]) -> Int[Array, "batch seq"]:
        """Returns the tokens whose embeddings the decoder takes."""
        return tokens

    @abstractmethod
    def image_features(
        self, pixels: UInt8[Array, "batch patches values"], grids: Int[Array, "batch images 2"]
    ) -> Float[Array, "batch tokens features"]:
        """Computes the features of each row's image tokens."""

    @abstractmethod
    def place(
        self,
        features: Float[Array, "batch n features"],
        tokens: Int[Array, "batch seq"],
        positions: Int[Array, "batch seq"],
        grids: Int[Array, "batch images 2"],
        image_token: int,
    ) -> ImageTokens:
        """Assigns the packed features of each row's images, in order, to the row's image tokens."""


@dataclass(frozen=True, kw_only=True)
class VisionConfigMap(ConfigMap):
    """Mapping between a config and a `config.json` with a `text_config` and a `vision_config`."""

    @abstractmethod
    def text_map(self, model_type: str | None) -> ConfigMap:
        """Returns the mapping of a `text_config` with a `model_type`; raises a ConversionError for an unknown one."""

    @abstractmethod
    def read_tower(self, reader: Reader, text: Mapping[str, Any]) -> dict[str, Any]:
        """Reads the fields of the tower's config from the `vision_config`; `text` has the fields of the decoder."""

    @abstractmethod
    def read_outer(self, reader: Reader) -> dict[str, Any]:
        """Reads fields from further top-level keys."""

    def tied_default(self, text: Mapping[str, Any]) -> bool:
        """Returns whether embeddings are tied if the top-level key is missing."""
        return False

    def read(self, mapping: Mapping[str, Any]) -> dict[str, Any]:
        """Converts a `config.json` to fields of our config.

        Raises:
          ConversionError: the model does not support a setting, or a key is unknown; the message lists every problem.
        """
        outer = Reader(mapping)
        text, tower = (outer.get(name) for name in ("text_config", "vision_config"))
        parts = {"text_config": text, "vision_config": tower}
        if missing := [name for name, part in parts.items() if not isinstance(part, Mapping)]:
            raise ConversionError(f"{self.architecture}: config.json has no {' and no '.join(missing)}.")
        tied = outer.get("tie_word_embeddings", default=self.tied_default(text))
        found = self.text_map(text.get("model_type")).read({**text, "tie_word_embeddings": tied})
        vision = Reader(tower)
        found["vision"] = self.read_tower(vision, found)
        found |= self.read_outer(outer)
        if problems := [*outer.problems, *outer.unread(), *vision.problems, *vision.unread()]:
            raise unsupported(self.architecture, problems, has_unread=bool(outer.unread()))
        return found

    def written(
        self, config: Any, text: ConfigMap, vision: Mapping[str, Any], more: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Returns the `config.json` of a config.

        Args:
          text: mapping of the `text_config`.
          vision: the `vision_config`.
          more: other top-level keys.
        """
        language = text.write(config)
        del language["architectures"]
        return {
            "architectures": [self.architecture],
            "model_type": self.model_type,
            "text_config": language,
            "vision_config": vision,
            **more,
            "tie_word_embeddings": config.tie_embeddings,
            "torch_dtype": config.param_dtype,
        }


_PREFIX = "language_model."


@dataclass(frozen=True, kw_only=True)
class NestedFamily(DecoderFamily):
    """A family whose checkpoints have the language model's tensors under "language_model.".

    Attributes:
      text: family of the language model, for the names of its tensors.
    """

    text: DecoderFamily

    def text_rules(self, config: Any) -> list[WeightRule]:
        """Returns the rules of the language model."""
        return [replace(rule, tensor=_PREFIX + rule.tensor) for rule in self.text.weight_rules(config)]

    def redundant_tensors(self, config: Any) -> Mapping[str, str | None]:
        found = self.text.redundant_tensors(config)
        return {_PREFIX + name: None if same is None else _PREFIX + same for name, same in found.items()}

    def published_name(self, tensor: str) -> str:
        """Returns the published name of a tensor in layouts that releases of transformers have written since."""
        name = tensor.removeprefix("model.")
        if name.startswith(_PREFIX) and not name.startswith((f"{_PREFIX}model.", f"{_PREFIX}lm_")):
            return f"{_PREFIX}model.{name.removeprefix(_PREFIX)}"
        return _PREFIX + name if name.startswith("lm_head.") else name
