"""The base of all recipe sections: typed, frozen, and strict about unknown keys."""

import re
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Annotated, Any

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    ValidatorFunctionWrapHandler,
    WithJsonSchema,
    WrapValidator,
)


def _as_tuple(given: Any) -> Any:
    return tuple(given) if isinstance(given, list) else given


Count = Annotated[int, Field(ge=1)]
AUTO = 0  # the value of a number that a recipe writes as ``auto``


def _count_or_auto(given: Any, check: ValidatorFunctionWrapHandler) -> Any:
    return AUTO if given == "auto" else check(given)


CountOrAuto = Annotated[
    Count,
    WrapValidator(_count_or_auto),
    PlainSerializer(lambda number: number or "auto"),
    WithJsonSchema({"anyOf": [{"type": "integer", "minimum": 1}, {"const": "auto"}]}),
]
CountOrZero = Annotated[int, Field(ge=0)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Fraction = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
Counts = Annotated[tuple[CountOrZero, ...], BeforeValidator(_as_tuple)]  # YAML has lists only
Names = Annotated[tuple[str, ...], BeforeValidator(_as_tuple)]


class Section(BaseModel):
    """A part of a recipe. Unknown keys are an error, and a value must have the type of its field.

    Examples:
        >>> class Trainer(Section):
        ...     epochs: Count = 100
        >>> Trainer(epochs=5)
        Trainer(epochs=5)
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True)


@contextmanager
def naming(section: str, keys: Collection[str]) -> Iterator[None]:
    """Name arguments in an error as the keys of a section of the recipe, which is what the user has written.

    Examples:
        >>> with naming("data", ["size"]):
        ...     raise ValueError("images differ in size: pass size=224")
        Traceback (most recent call last):
        ValueError: images differ in size: pass data.size=224
    """
    try:
        yield
    except (ValueError, FileNotFoundError) as error:
        if not keys:
            raise
        names = "|".join(map(re.escape, keys))
        # The first word of a message, and every "key=".
        message = re.sub(rf"^({names})\b|(?<=[\s(])({names})(?==)", lambda found: f"{section}.{found[0]}", str(error))
        if message == str(error):
            raise
        kind = FileNotFoundError if isinstance(error, FileNotFoundError) else ValueError
        raise kind(message) from error
