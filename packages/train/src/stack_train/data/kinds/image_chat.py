"""`data.name: image_chat`: conversations with images for supervised fine-tuning on the assistant's tokens."""

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Annotated, Any, Literal

import jax
import numpy as np
from jaxtyping import Int64
from pydantic import Field, NonNegativeInt, PositiveInt

from stack_core.abi.config import config
from stack_core.abi.data import Shapes
from stack_core.abi.errors import ConfigError, DataError, GenerationError
from stack_core.text.images import (
    ImageReader,
    ImageSize,
    ReadImage,
    SeesImages,
    check_image_tokens,
    join_images,
    load_image,
    resolve_url,
    take_images,
)
from stack_core.text.packing import divide_row
from stack_train.data.conversations import Conversation, Tokenization
from stack_train.data.examples import fitting
from stack_train.data.files import expand_glob
from stack_train.data.jsonl import jsonl_records
from stack_train.data.kinds.chat import ChatBatches, ChatData, load_tokenizer
from stack_train.data.kinds.text import check_positions, check_vocabulary, language_model_shapes
from stack_train.vision.reader import image_reader

__all__ = ["ImageChatData"]

_DECODERS = 4
_MESSAGES = ("messages", "prompt", "completion")


@config
class ImageChatData:
    """Conversations with images in JSONL files, in the form of `chat` with content parts of OpenAI's API.

    The content of a message is a text or a list of parts, `{"type": "text", "text": ...}` and `{"type": "image_url",
    "image_url": {"url": ...}}`. A URL is a data URL, or the path of a file relative to its JSONL file. Images are
    decoded while batches are assembled; needs stack-train[images]. A batch also contains "pixels", and "grids" if the
    number of an image's tokens depends on its size.

    Attributes:
      source: glob of JSONL files, such as "chats/*.jsonl".
      name: selects this kind of data.
      tokenizer: directory of the tokenizer, or its `tokenizer.json`; None uses the tokenizer of `run.init_from`.
      chat_template: file with the Jinja source of a chat template; None uses the tokenizer's template.
      seq_tokens: tokens per row.
      packed: True packs several conversations into a row, as segments that do not attend to each other.
      too_long: policy for conversations longer than a row: "error" or "drop".
      batch_size: rows per batch, over all processes.
      validation_fraction: fraction of the conversations held out for validation.
      prefetch_batches: number of batches that a thread assembles ahead; 0 assembles them in the step's thread.
      row_images: maximum number of images per row.
    """

    source: str
    name: Literal["image_chat"] = "image_chat"
    tokenizer: str | None = None
    chat_template: str | None = None
    seq_tokens: PositiveInt = 512
    packed: bool = True
    too_long: Literal["error", "drop"] = "error"
    batch_size: PositiveInt = 8
    validation_fraction: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.05
    prefetch_batches: NonNegativeInt = 2
    row_images: PositiveInt = 1

    def spec(self, model: Any) -> Shapes:
        images = {
            name: jax.ShapeDtypeStruct((self.batch_size, *array.shape), array.dtype)
            for name, array in model.image_arrays(self.row_images, self.seq_tokens).items()
        }
        return {**language_model_shapes(self.batch_size, self.seq_tokens), **images}

    def work(self) -> tuple[str, int]:
        return "tokens", self.batch_size * self.seq_tokens

    def check(self, model: Any) -> None:
        if not isinstance(model, SeesImages):
            raise ConfigError(
                f"Data of kind image_chat is for language models with images, not for family {model.name!r}; use "
                "gemma3_vision, gemma4_vision, mistral3, pixtral, qwen2_5_vl, qwen3_vl or qwen3_vl_moe, or data of "
                "kind chat."
            )
        check_image_tokens(model)
        check_positions(self.seq_tokens, model)

    def build(self, *, seed: int, model: Any) -> "ImageChatBatches":
        """Reads and tokenizes every conversation, and hashes its image files.

        Raises:
          ConfigError: no tokenizer is configured, or its vocabulary is larger than the model's.
          DataError: a record is malformed, too long, or has too many images, or the training split is empty.
          ChatTemplateError: the template rejects a conversation.
        """
        tokenizer = load_tokenizer(self.tokenizer, self.name, self.chat_template)
        check_vocabulary(tokenizer.vocab_size, model)
        reader = image_reader(model, tokenizer)
        if reader is None:
            raise ConfigError(f"Images have {model.vision.channels} channels; set model.vision.channels to 1 or 3.")
        tokenization = Tokenization.by_template_of(tokenizer, reader)
        conversations = [
            self._conversation(tokenization, reader, name, record)
            for name, record in jsonl_records(expand_glob(self.source, self.name))
        ]
        if not conversations:
            raise DataError(f"{self.source} holds no conversation. Point data.source at files with some.")
        same = ("tokenizer", "chat_template", "seq_tokens", "packed", "too_long", "batch_size", "validation_fraction")
        chat = ChatData(prefetch_batches=self.prefetch_batches, **{name: getattr(self, name) for name in same})
        kept = fitting(conversations, self.seq_tokens, self.too_long)
        arrays = model.image_arrays(self.row_images, self.seq_tokens)
        return ImageChatBatches(
            chat, tokenizer, kept, seed=seed, reader=reader, row_images=self.row_images, arrays=arrays
        )

    def _conversation(
        self, tokenization: Tokenization, reader: ImageReader, name: str, record: Mapping[str, Any]
    ) -> "ImageConversation":
        folder, urls, sizes = Path(name.rpartition(":")[0]).parent, list[str](), list[ImageSize]()
        digest = sha256()

        def load(url: str) -> bytes:
            # Batches read the image again.
            url = resolve_url(url, folder)
            contents = load_image(url)
            digest.update(contents)
            try:
                sizes.append(reader.measure(contents))
            except DataError as error:
                raise DataError(f"{name}: {_abbreviated(url)}: {error}") from error
            urls.append(url)
            return b""

        lists = {key: record[key] for key in _MESSAGES if isinstance(record.get(key), list)}
        taken = {key: take_images(messages, load)[0] for key, messages in lists.items()}
        if len(urls) > self.row_images:
            raise DataError(
                f"{name} has {len(urls)} images, and a row {self.row_images}. Raise data.row_images, or divide it."
            )
        found = tokenization.conversation(name, {**record, **taken}, sizes)
        images = tuple(zip(urls, sizes, strict=True))
        return ImageConversation(found.name, found.tokens, found.supervised, images, digest.hexdigest())


def _abbreviated(url: str) -> str:
    """Returns a URL for an error message: paths in full, only the beginning of data URLs."""
    return f"{url[:60]}..." if url.startswith("data:") else url


@dataclass(frozen=True)
class ImageConversation(Conversation):
    """A tokenized conversation with images.

    Attributes:
      images: path or data URL of each image, and its size.
      digest: hash of the image files.
    """

    images: tuple[tuple[str, ImageSize], ...] = ()
    digest: str = ""

    @property
    def identity(self) -> str:
        return self.digest + super().identity


class ImageChatBatches(ChatBatches):
    """Batches of conversations with the pixels of their images."""

    def __init__(
        self,
        config: ChatData,
        *rest: Any,
        reader: ImageReader,
        row_images: int,
        arrays: Mapping[str, jax.ShapeDtypeStruct],
        **options: Any,
    ) -> None:
        self._reader, self._row_images, self._arrays = reader, row_images, arrays
        super().__init__(config, *rest, **options)
        self.fingerprint["data.row_images"] = row_images

    def _plan(self, chosen: Int64[np.ndarray, " chosen"]) -> list[Int64[np.ndarray, " in_row"]]:
        parts: list[Int64[np.ndarray, " in_part"]] = []
        for row in super()._plan(chosen):
            parts += divide_row(row, [len(self._images_of(index)) for index in row.tolist()], self._row_images)
        return parts

    def _rows(self, plan: Sequence[Any], rows: Int64[np.ndarray, " batch"]) -> dict[str, Any]:
        places = [
            (number, int(index), *image)
            for number, row in enumerate(rows)
            for index in plan[row]
            for image in self._images_of(int(index))
        ]
        images: list[list[ReadImage]] = [[] for _ in rows]
        with ThreadPoolExecutor(_DECODERS) as decoders:
            decoded = decoders.map(lambda place: self._decoded(*place[1:]), places)
            for (number, *_), image in zip(places, decoded, strict=True):
                images[number].append(image)
        found = {name: np.zeros((len(rows), *array.shape), array.dtype) for name, array in self._arrays.items()}
        for number, row_images in enumerate(images):
            for name, values in join_images(row_images).items():
                found[name][number, : len(values)] = values
        return {**super()._rows(plan, rows), **found}

    def _decoded(self, index: int, url: str, size: ImageSize) -> ReadImage:
        where = f"{self._examples[index].name}: {_abbreviated(url)}"
        try:
            image = self._reader.read(load_image(url))
        except (DataError, GenerationError) as error:
            raise DataError(f"{where}: {error}") from error
        if self._reader.expansion(image.size) != self._reader.expansion(size):
            # Features would move to the tokens of other images.
            sizes = (image.size, size)
            rows = [f" in {each.grid[0]} rows" if self._reader.layout == "rows" and each.grid else "" for each in sizes]
            raise DataError(
                f"{where}: The image has {image.tokens} tokens{rows[0]}, and had {size.tokens}{rows[1]} when the data "
                "was tokenized. Keep image files unchanged during training; restore this one, or start again."
            )
        return image

    def _images_of(self, index: int) -> tuple[tuple[str, ImageSize], ...]:
        conversation: Any = self._examples[index]
        return conversation.images
