"""The base of all recipe sections: typed, frozen, and strict about unknown keys."""

from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field


def _as_tuple(given: Any) -> Any:
    return tuple(given) if isinstance(given, list) else given


Count = Annotated[int, Field(ge=1)]
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
