"""The section ``objective`` of a recipe: a preset and its arguments, made into a loss."""

import inspect
from collections.abc import Mapping
from functools import cache
from typing import Any

from hardneg.losses import presets, schedules
from hardneg.losses.infonce import InfoNCE
from hardneg.losses.jsd import JSD
from hardneg.training.recipe_errors import hint

SCHEDULES: dict[str, type[schedules.Schedule]] = {
    "constant": schedules.Constant,
    "linear": schedules.Linear,
    "steps": schedules.Steps,
    "hardness_anneal": schedules.HardnessAnneal,
    "ring_anneal": schedules.RingAnneal,
}


@cache
def names() -> tuple[str, ...]:
    """The presets that a recipe can name."""
    return tuple(
        sorted(
            name
            for name, made in vars(presets).items()
            if inspect.isfunction(made) and made.__module__ == presets.__name__ and not name.startswith("_")
        )
    )


def arguments(name: str) -> set[str]:
    """The arguments of a preset that a recipe can set."""
    preset = getattr(presets, name)
    kind = JSD if inspect.signature(preset).return_annotation is JSD else InfoNCE
    found = {key for made in (preset, kind.__init__) for key in inspect.signature(made).parameters}
    return found - {"self", "options", "generator", "hardening"}


def make(section: Mapping[str, Any], **more: Any) -> InfoNCE | JSD:
    """The loss of a section; ``more`` replaces its settings. A mapping ``{schedule: linear, …}`` makes a schedule."""
    options = dict(section)
    name = options.pop("preset", "simclr")
    if name not in names():
        raise ValueError(f"objective.preset={name!r} is not known: {hint(str(name), names())}")
    allowed = arguments(name)
    for key, setting in options.items():
        if key not in allowed:
            raise ValueError(f"objective.{key} is not an argument of {name}: {hint(key, sorted(allowed))}")
        if isinstance(setting, Mapping):
            options[key] = schedule(f"objective.{key}", setting)
    made: InfoNCE | JSD = getattr(presets, name)(**{**options, **more})
    return made


def schedule(key: str, settings: Mapping[str, Any]) -> schedules.Schedule:
    """The schedule that a mapping ``{schedule: linear, …}`` describes; ``key`` is its key in the recipe."""
    settings = dict(settings)
    kind = str(settings.pop("schedule", None))
    if kind not in SCHEDULES:
        raise ValueError(f"{key}.schedule={kind!r} is not known: {hint(kind, sorted(SCHEDULES))}")
    try:
        return SCHEDULES[kind](**settings)
    except TypeError as error:
        raise ValueError(f"{key}: {error}") from error


def json_schema() -> dict[str, Any]:
    """The JSON schema of the section: presets by name, and the arguments of any of them."""
    keys = sorted(set().union(*map(arguments, names())))
    properties: dict[str, Any] = {"preset": {"enum": list(names())}, **{key: {} for key in keys}}
    return {"type": "object", "properties": properties, "additionalProperties": False}
