"""`environment.name: count_shapes`: questions about the number of shapes in generated pictures."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from pydantic import Field, NonNegativeInt, PositiveInt

from stack_core.abi.config import config
from stack_core.abi.errors import ConfigError
from stack_core.abi.formats import GenerativeCheckpoint
from stack_core.text.images import image_reader_of
from stack_rl.contracts import Environment, Tasks
from stack_rl.environments.image_parts import require_reader
from stack_rl.environments.messages import Message, MessageEnvironment, Reply, renderer_of
from stack_rl.environments.optional import optional_module
from stack_rl.environments.tasks import SeededTasks

__all__ = ["CountShapesConfig", "Question"]

_COLORS = {"red": (220, 50, 50), "green": (60, 190, 70), "blue": (60, 80, 220), "yellow": (230, 210, 60)}
_SMALLEST_SHAPE = 6  # pixels

Color = Literal["red", "green", "blue", "yellow"]
Shape = Literal["circle", "square", "triangle"]


@dataclass(frozen=True)
class Question:
    """A picture with a question and its answer.

    Attributes:
      picture: an image of Pillow.
      text: the question, such as "how many red circles ?".
      answer: the number of shapes in question.
    """

    picture: Any
    text: str
    answer: int

    @property
    def messages(self) -> list[Message]:
        """The conversation before the answer."""
        parts = [{"type": "image", "image": self.picture}, {"type": "text", "text": self.text}]
        return [{"role": "user", "content": parts}]


@config
class CountShapesConfig:
    """Pictures with colored shapes on a dark background, and the question for the number of one kind.

    The question is "how many red circles ?". The answer is right if it is this number in digits, for which the reward
    is 1, otherwise 0. Numbers from 0 to `max_count` are equally frequent, so guessing one of them earns 1 / (max_count
    + 1). Each shape has its own cell of a grid, with a random place and size in it. A picture is a function of the seed
    of the run and the number of its task. Needs the extra `images` (Pillow) and a policy with images.

    Attributes:
      name: selects this environment.
      colors: colors that occur.
      shapes: shapes that occur.
      max_count: maximum number of the shapes in question.
      max_others: maximum number of other shapes in a picture; 0 if there is only one kind.
      side_pixels: side of the pictures.
      max_tokens: maximum number of tokens of an answer, including the end token.
      held_out: number of evaluation tasks.
    """

    name: Literal["count_shapes"] = "count_shapes"
    colors: Annotated[tuple[Color, ...], Field(min_length=1)] = ("red", "green", "blue", "yellow")
    shapes: Annotated[tuple[Shape, ...], Field(min_length=1)] = ("circle", "square", "triangle")
    max_count: PositiveInt = 3
    max_others: NonNegativeInt = 1
    side_pixels: PositiveInt = 32
    max_tokens: PositiveInt = 2
    held_out: NonNegativeInt = 128

    has_images: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.max_others and len(set(self.colors)) * len(set(self.shapes)) < 2:
            raise ConfigError(
                f"environment.max_others is {self.max_others}, but there is only one kind of shapes. Set it to 0, or "
                "add to environment.colors or environment.shapes."
            )
        if self.side_pixels < (least := self._columns * (_SMALLEST_SHAPE + 2)):
            raise ConfigError(
                f"environment.side_pixels is {self.side_pixels}; {self.max_count + self.max_others} shapes need at "
                f"least {least}. Raise it, or lower environment.max_count or environment.max_others."
            )

    @property
    def _columns(self) -> int:
        """Columns and rows of cells."""
        return int(np.ceil(np.sqrt(self.max_count + self.max_others)))

    def check(self, model: Any) -> None:
        optional_module("PIL.ImageDraw", environment=self.name, extra="images")

    def build(self, policy: GenerativeCheckpoint, *, seq_tokens: int, seed: int) -> Tasks:
        """Creates the tasks.

        Raises:
          ConfigError: Pillow is not installed.
          DataError: the policy reads text only, or has no tokenizer or end token.
        """
        self.check(None)
        require_reader(image_reader_of(policy))
        renderer = renderer_of(policy)

        def start(episode_seed: int) -> Environment:
            conversation = _Conversation(self, episode_seed)
            return MessageEnvironment(conversation, renderer, max_tokens=self.max_tokens, max_turns=1)

        return SeededTasks(seed, self.held_out, start=start, label=self.name, renderer=renderer)

    def question(self, seed: int) -> Question:
        """Draws a picture, a function of the seed."""
        rng = np.random.default_rng(seed)
        kinds = list(itertools.product(dict.fromkeys(self.colors), dict.fromkeys(self.shapes)))
        kind = kinds[rng.integers(len(kinds))]
        others = [each for each in kinds if each != kind]
        count, more = rng.integers(self.max_count + 1), rng.integers(self.max_others + 1)
        shown = [kind] * count + [others[rng.integers(len(others))] for _ in range(more)]
        text = f"how many {kind[0]} {kind[1]}s ?"
        return Question(_draw(shown, self._columns, self.side_pixels, rng), text, int(count))


@dataclass
class _Conversation:
    settings: CountShapesConfig
    seed: int
    answer: int = 0

    async def begin(self) -> Sequence[Message]:
        question = self.settings.question(self.seed)
        self.answer = question.answer
        return question.messages

    async def reply(self, text: str, *, is_finished: bool, tokens: tuple[int, ...]) -> Reply:
        right = is_finished and text.strip() == str(self.answer)
        return Reply(reward=float(right), verdict="correct" if right else "wrong", parsed=text.strip())

    async def close(self) -> None: ...


def _draw(kinds: Sequence[tuple[Color, Shape]], columns: int, side: int, rng: np.random.Generator) -> Any:
    """Draws shapes in different cells of a grid, with slightly varied colors."""
    from PIL import Image, ImageDraw

    image = Image.new("RGB", (side, side), tuple(rng.integers(40, size=3).tolist()))
    pen, cell = ImageDraw.Draw(image), side // columns
    cells = rng.permutation(columns**2)[: len(kinds)]
    for (color, shape), (row, column) in zip(kinds, (divmod(int(each), columns) for each in cells), strict=True):
        size = int(rng.integers(max(_SMALLEST_SHAPE, cell * 5 // 8), cell))
        left, top = (each * cell + int(rng.integers(cell - size)) for each in (column, row))
        right, bottom = left + size - 1, top + size - 1
        fill = tuple(np.clip(np.add(_COLORS[color], rng.integers(-25, 26, size=3)), 0, 255).tolist())
        if shape == "square":
            pen.rectangle((left, top, right, bottom), fill=fill)
        elif shape == "circle":
            pen.ellipse((left, top, right, bottom), fill=fill)
        else:
            pen.polygon([(left, bottom), (right, bottom), ((left + right) // 2, top)], fill=fill)
    return image
