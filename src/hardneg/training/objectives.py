"""The section ``objective`` of a recipe: a preset and its arguments, made into a loss."""

import inspect
from collections.abc import Mapping
from functools import cache
from typing import Any

from hardneg.losses import hardening, presets, schedules
from hardneg.losses.effective_share import EffectiveShare
from hardneg.losses.infonce import InfoNCE
from hardneg.losses.jsd import JSD
from hardneg.recipe_section import naming
from hardneg.training.recipe_errors import hint

DEFAULT = "simclr"  # the preset of a recipe that names none
SCHEDULES: dict[str, type[schedules.Schedule]] = {
    "constant": schedules.Constant,
    "linear": schedules.Linear,
    "steps": schedules.Steps,
    "hardness_anneal": schedules.HardnessAnneal,
    "ring_anneal": schedules.RingAnneal,
}
EFFECTIVE_SHARE = "effective_share"
# Those whose settings are numbers; a function cannot be written in a recipe.
HARDENINGS: dict[str, type[hardening.Hardening]] = {
    "uniform": hardening.Uniform,
    "exponential": hardening.Exponential,
    "threshold": hardening.Threshold,
    "ring": hardening.Ring,
    "below_positive": hardening.BelowPositive,
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
    made_by: tuple[Any, Any] = (getattr(presets, name), makes(name).__init__)
    found = {key for made in made_by for key in inspect.signature(made).parameters}
    return found - {"self", "options", "generator"}


def make(section: Mapping[str, Any], **more: Any) -> InfoNCE | JSD:
    """The loss of a section; ``more`` replaces its settings.

    hardening: see `hardenings` · other settings: see `changing`

    Examples:
        >>> make({"preset": "moco", "hardening": {"given": {"kind": "ring", "lower": 0.5, "upper": 0.9}}}).hardening
        {'given': (Ring(lower=0.5, upper=0.9),)}
    """
    options = dict(section)
    name = options.pop("preset", DEFAULT)
    if name not in names():
        raise ValueError(f"objective.preset={name!r} is not known: {hint(str(name), names())}")
    allowed = arguments(name)
    for key, setting in options.items():
        if key not in allowed:
            raise ValueError(f"objective.{key} is not an argument of {name}: {_remedy(name, key)}")
        if key == "hardening":
            options[key] = hardenings(f"objective.{key}", setting)
        else:
            options[key] = changing(f"objective.{key}", setting)
    with naming("objective", allowed):
        made: InfoNCE | JSD = getattr(presets, name)(**{**options, **more})
    return made


def _remedy(preset: str, key: str) -> str:
    """What to do about an argument that a preset does not have: use a preset that has it, or correct its name."""
    graphs = makes(preset) is JSD  # which another method trains with
    owners = [name for name in names() if key in arguments(name) and (makes(name) is JSD) == graphs]
    if owners:
        return f"it belongs to {', '.join(owners)}; add objective.preset={owners[0]}, or leave it out"
    return hint(key, ["preset", *sorted(arguments(preset))], "objective")


def makes(preset: str) -> type[InfoNCE] | type[JSD]:
    """The class of the loss that a preset returns."""
    return JSD if inspect.signature(getattr(presets, preset)).return_annotation is JSD else InfoNCE


def hardenings(key: str, settings: Any) -> Any:
    """The hardenings that a mapping ``{kind: ring, lower: 0.5, …}``, a list of them, or one by source describes.

    key: of the settings in the recipe, for messages
    """
    if isinstance(settings, list):
        return tuple([hardenings(f"{key}[{number}]", part) for number, part in enumerate(settings)])
    if not isinstance(settings, Mapping):
        raise ValueError(f"{key} must be a mapping such as {{kind: exponential, beta: 1.0}}, got {settings!r}")
    if "kind" not in settings:
        if not all(isinstance(part, Mapping | list) for part in settings.values()):
            raise ValueError(f"{key} has no kind: {hint('', sorted(HARDENINGS))}")
        return {source: hardenings(f"{key}.{source}", part) for source, part in settings.items()}
    options = {name: setting for name, setting in settings.items() if name != "kind"}
    kind = str(settings["kind"])
    if kind not in HARDENINGS:
        raise ValueError(f"{key}.kind={kind!r} is not known: {hint(kind, sorted(HARDENINGS))}")
    options = {name: changing(f"{key}.{name}", setting) for name, setting in options.items()}
    try:
        return HARDENINGS[kind](**options)
    except TypeError as error:
        raise ValueError(f"{key}: {error}") from error


def changing(key: str, setting: Any) -> Any:
    """A setting as it is, or what a mapping or a word describes: a schedule, or an effective share.

    Examples:
        >>> changing("objective.beta", "effective_share:0.6"), changing("objective.beta", {"effective_share": 0.6})
        (EffectiveShare(share=0.6), EffectiveShare(share=0.6))
    """
    if isinstance(setting, str) and setting.startswith(f"{EFFECTIVE_SHARE}:"):
        word = setting.partition(":")[2]
        try:
            setting = {EFFECTIVE_SHARE: float(word)}
        except ValueError as error:
            raise ValueError(f"{key}={setting!r}: {EFFECTIVE_SHARE} takes a number in (0, 1], got {word!r}") from error
    if not isinstance(setting, Mapping):
        return setting
    if EFFECTIVE_SHARE not in setting:
        return schedule(key, setting)
    if len(setting) > 1:
        others = ", ".join(str(name) for name in setting if name != EFFECTIVE_SHARE)
        raise ValueError(f"{key}: {EFFECTIVE_SHARE} takes no further keys, got {others}: leave them out")
    try:
        return EffectiveShare(setting[EFFECTIVE_SHARE])
    except ValueError as error:
        raise ValueError(f"{key}: {error}") from error


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
