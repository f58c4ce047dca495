"""Settings of a recipe file that an override makes useless: those of the encoder, preset or method that it replaces."""

import warnings
from collections.abc import Callable, Collection, Mapping
from typing import Any

from pydantic import BaseModel

from hardneg import methods
from hardneg import modality as modalities
from hardneg.losses.jsd import JSD
from hardneg.training import objectives
from hardneg.training.recipe_errors import keys_of


def without_replaced(
    tree: dict[str, Any],
    written: Mapping[str, Any],
    typed: Collection[str],
    chosen: tuple[str, str],
    model: Callable[[str, str], type[BaseModel]],
) -> dict[str, Any]:
    """The tree without settings that only the replaced encoder, preset or method has; a warning names them.

    What the user has typed is never left out: if it does not fit, it is an error later.

    tree: the settings with overrides · written: those of the recipe file · typed: the keys of the overrides · chosen:
    method and modality of the tree · model: of a method and a modality
    """
    method, kind = chosen
    before = written.get("method", methods.DEFAULT)
    changed = {key: dict(part) if isinstance(part, Mapping) else part for key, part in tree.items()}
    left_out: list[str] = []

    def leave_out(where: str, section: dict[str, Any], useless: Collection[str]) -> None:
        for key in [key for key in section if key in useless and not _is_typed(f"{where}.{key}", typed)]:
            left_out.append(f"{where}.{key}={section.pop(key)}")

    reasons: list[str] = []
    if "method" in typed and before != method:
        reasons.append(f"method={method}")
        missing = {*keys_of(model(before, kind))} - {*keys_of(model(*chosen))} if kind in _modalities(before) else set()
        for where, section in changed.items():
            if isinstance(section, dict):
                leave_out(where, section, {key for key in section if f"{where}.{key}" in missing})
        objective = changed.get("objective", {})
        if isinstance(objective, dict) and not _is_typed("objective.preset", typed):
            preset = objective.get("preset", objectives.DEFAULT)
            if preset in objectives.names() and (objectives.makes(preset) is JSD) != (method == "infograph"):
                own = method if method in objectives.names() else objectives.DEFAULT
                if "preset" in objective:
                    left_out.append(f"objective.preset={preset}")
                changed["objective"] = {**objective, "preset": own}
    objective = changed.get("objective")
    if isinstance(objective, dict) and (preset := objective.get("preset")) in objectives.names():
        old = written.get("objective")
        if preset != (old.get("preset", objectives.DEFAULT) if isinstance(old, Mapping) else objectives.DEFAULT):
            if "objective.preset" in typed:
                reasons.append(f"objective.preset={preset}")
            leave_out("objective", objective, set(objective) - objectives.arguments(preset) - {"preset"})
    encoder, old = changed.get("encoder"), written.get("encoder")
    if "encoder.name" in typed and isinstance(encoder, dict) and "name" in encoder:
        name, owner = str(encoder["name"]), modalities.get(kind)
        if not isinstance(old, Mapping) or old.get("name") != name:
            reasons.append(f"encoder.name={name}")
            unused = owner.unused_encoder_keys(name)
            leave_out("encoder", encoder, {key for key in unused if encoder.get(key) is not None})
            if isinstance(options := encoder.get("options"), Mapping):
                encoder["options"] = dict(options)
                leave_out("encoder.options", encoder["options"], set(options) - owner.encoder_options(name))
    if left_out:
        verb = "is" if len(left_out) == 1 else "are"
        warnings.warn(
            f"{' and '.join(reasons)}: {', '.join(left_out)} of the recipe {verb} left out",
            stacklevel=3,
        )
    return changed


def _modalities(method: object) -> tuple[str, ...]:
    """The modalities of a method; none if there is no such method."""
    return methods.get(method).modalities if isinstance(method, str) and method in methods.METHODS else ()


def _is_typed(key: str, typed: Collection[str]) -> bool:
    """Whether an override has set the key, a part of its value, or the whole section that it is in."""
    return any(key == given or given.startswith(f"{key}.") or key.startswith(f"{given}.") for given in typed)
