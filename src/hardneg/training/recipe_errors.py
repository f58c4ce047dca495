"""Formats pydantic's validation errors of a recipe as one line that names the key, the value and the fix."""

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ValidationError, WithJsonSchema

from hardneg import spelling

_TYPES = {
    "int_type": "an integer",
    "float_type": "a number",
    "bool_type": "true or false",
    "string_type": "text",
    "dict_type": "keys and values",
    "tuple_type": "a list",
    "model_type": "keys and values",
    "model_attributes_type": "keys and values",
}


def hint(name: str, names: Sequence[str], section: str = "") -> str:
    """The nearest of the names, or all of them. section: of the recipe, if the names are keys in it."""
    near = spelling.nearest(name, names)
    below = f"{section}." if section else ""
    return f"did you mean {below}{near}?" if near else "choose one of " + ", ".join(below + each for each in names)


def explained(
    error: ValidationError,
    tree: Mapping[str, Any],
    chosen: tuple[str, str],
    models: Mapping[tuple[str, str], type[BaseModel]],
) -> str:
    """The first error of a recipe in one line. chosen: its method and modality · models: of all combinations."""
    found = error.errors()[0]
    path = _path(found["loc"], models[chosen])
    key = ".".join(path)
    given = found["input"]
    if found["type"] == "extra_forbidden":
        return _unknown(path, chosen, models)
    if found["type"] in _TYPES:
        if not path or (len(path) == 1 and found["type"].startswith("model")):
            return f"{key or 'the recipe'} must hold keys and values, got {given!r}"
        return f"{key} must be {_TYPES[found['type']]}, got {given!r}"
    limits = found.get("ctx", {})
    if found["type"] == "value_error":  # of a section's own check
        return f"{key}.{limits['error']}"
    if found["type"] == "literal_error":
        options = [text.strip(" '") for text in str(limits["expected"]).replace(" or ", ", ").split(", ")]
        return f"{key}={given!r} is not known: {hint(str(given), options)}"
    for name, sign in (("ge", "≥"), ("gt", ">"), ("le", "≤"), ("lt", "<")):
        if name in limits:
            return f"{key} must be {sign} {limits[name]:g}, got {given!r}"
    if found["type"] == "finite_number":
        return f"{key} must be a finite number, got {given!r}"
    return f"{key}: {found['msg']}, got {given!r}"


def _path(loc: tuple[int | str, ...], model: type[BaseModel]) -> list[str]:
    """The keys of an error's location, without the members of unions and the positions in lists that pydantic adds."""
    path: list[str] = []
    kind: Any = model
    for number, step in enumerate(loc):
        if not isinstance(kind, type) or not issubclass(kind, BaseModel):
            break
        path.append(str(step))
        kind = kind.model_fields[str(step)].annotation if str(step) in kind.model_fields else None
        if kind is None and number + 1 < len(loc):
            break
    return path


def _unknown(path: list[str], chosen: tuple[str, str], models: Mapping[tuple[str, str], type[BaseModel]]) -> str:
    """Why a key is not part of the recipe: it belongs to another method or modality, or is misspelled."""
    key = ".".join(path)
    users = [names for names, model in models.items() if key in keys_of(model)]
    if users:
        method, modality = chosen
        fitting = sorted(name for name, other in users if other == modality)
        remedy = f"leave it out, or use method={' or '.join(fitting)}" if fitting else "leave it out"
        return f"{key} is not used by method={method} on {modality}: {remedy}"
    if len(path) == 1 and (full := keys_named(key, models[chosen])):
        return f"{key} is not a key of the recipe: did you mean {' or '.join(full)}?"
    section = ".".join(path[:-1])
    parts = (name.rpartition(".") for name in keys_of(models[chosen]))
    names = [name for parent, _, name in parts if parent == section]
    if not names:
        return f"{key} is not a key of the recipe: {path[0]} has no keys for method={chosen[0]}"
    return f"{key} is not a key of the recipe: {hint(path[-1], names, section)}"


def keys_named(name: str, model: type[BaseModel]) -> list[str]:
    """The keys of all sections that have this name, such as ``trainer.epochs`` for ``epochs``."""
    found = [key for key in keys_of(model) if key.partition(".")[2] == name]
    for section, field in model.model_fields.items():  # a section that is no model has its keys in a JSON schema
        schemas = (each.json_schema or {} for each in field.metadata if isinstance(each, WithJsonSchema))
        found += [f"{section}.{name}" for schema in schemas if name in schema.get("properties", {})]
    return found


def keys_of(model: type[BaseModel]) -> list[str]:
    """All keys of a recipe model: sections, and the keys in each."""
    found = []
    for name, field in model.model_fields.items():
        found.append(name)
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            found += [f"{name}.{key}" for key in field.annotation.model_fields]
    return found
