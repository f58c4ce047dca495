"""Names for the rows of a comparison, from the settings in which their recipes differ."""

import json
from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import Any

Settings = Mapping[str, Any]  # values by dotted key, as `flat` returns them

# Settings in which the runs of a row may differ, and one that follows from others.
_IGNORED = ("seed", "about", "modality")
# Settings whose value is a name that needs no key beside it, each with the heading of a column of such names.
_NAMED = {
    "method": "method",
    "objective.preset": "loss",
    "batches.sampler": "sampler",
    "encoder.name": "encoder",
    "data.source": "data",
    "optimizer.name": "optimizer",
    "views.preset": "views",
}
_MAX_SETTINGS = 4  # in a name


def flat(tree: Mapping[str, Any], parent: str = "") -> dict[str, Any]:
    """The values of a recipe by dotted key, without seed, description and modality.

    Examples:
        >>> flat({"seed": 3, "objective": {"preset": "hcl", "beta": 1.0}})
        {'objective.preset': 'hcl', 'objective.beta': 1.0}
    """
    leaves: dict[str, Any] = {}
    for key, value in tree.items():
        path = f"{parent}{key}"
        if path in _IGNORED:
            continue
        if isinstance(value, Mapping):
            leaves.update(flat(value, f"{path}."))
        else:
            leaves[path] = value
    return leaves


def row_names(rows: Sequence[Settings], otherwise: Sequence[str]) -> list[str]:
    """Name each row by the settings in which the rows differ: "temperature 0.2", or "hcl (beta 1)".

    otherwise: names to use if there is nothing to tell the rows apart by, or too much of it; names that are not
    distinct are not used

    Examples:
        >>> rows = [{"objective.preset": "simclr", "lr": 1.0}, {"objective.preset": "hcl", "objective.beta": 1.0}]
        >>> row_names([{**row, "trainer.epochs": 5} for row in rows], ["a", "b"])
        ['simclr (lr 1)', 'hcl (beta 1)']
    """
    keys = _differing(rows)
    chosen = [{key: row[key] for key in row if key in keys} for row in rows]
    short = [_short(row, _titles(keys)) for row in chosen]
    readable = bool(keys) and max(map(len, chosen), default=0) <= _MAX_SETTINGS
    spelled = [", ".join(f"{key}={json.dumps(row[key], default=str)}" for key in row) or "default" for row in chosen]
    by_method = [str(row.get("method", "default")) for row in rows] if "method" in keys else otherwise
    for names in (short if readable else by_method, otherwise, short):
        if len({*names}) == len(rows):
            return [*names]
    return spelled


def heading(rows: Sequence[Settings]) -> str:
    """The heading of the column of names: what the rows differ in.

    Examples:
        >>> heading([{"objective.temperature": 0.1}, {"objective.temperature": 0.2}])
        'temperature'
        >>> heading([{"objective.preset": "simclr"}, {"objective.preset": "hcl", "objective.beta": 1.0}])
        'loss'
    """
    keys = _differing(rows)
    for key in ("method", "objective.preset"):
        if key in keys:
            return _NAMED[key]
    titles = [_NAMED.get(key, title) for key, title in _titles(keys).items()]
    return "run" if not titles else ", ".join(titles) if len(titles) <= 2 else "settings"


def _differing(rows: Sequence[Settings]) -> list[str]:
    """The keys in which the rows differ, in the order of the recipes; without options that follow from the encoder."""
    keys = dict.fromkeys(key for row in rows for key in row)
    missing = object()
    encoders = [row.get("encoder.name") for row in rows]
    found = []
    for key in keys:
        # An option is compared with those of the first row of the same encoder, other settings with the first row's.
        options = key.startswith("encoder.options.")
        values = [row.get(key, missing) for row in rows]
        references = [values[encoders.index(name) if options else 0] for name in encoders]
        if any(value != reference for value, reference in zip(values, references, strict=True)):
            found.append(key)
    return found


def _titles(keys: Sequence[str]) -> dict[str, str]:
    """The last part of each key, or the whole key where two end alike."""
    last = [key.rpartition(".")[2] for key in keys]
    return {key: part if last.count(part) == 1 else key for key, part in zip(keys, last, strict=True)}


def _short(row: Settings, titles: Mapping[str, str]) -> str:
    names = ", ".join(_text(row[key], key) for key in _NAMED if key in row)
    rest = ", ".join(f"{titles[key]} {_text(value, key)}" for key, value in row.items() if key not in _NAMED)
    return f"{names} ({rest})" if names and rest else names or rest or "default"


def _text(value: object, key: str) -> str:
    if isinstance(value, bool) or value is None:
        return {True: "on", False: "off", None: "none"}[value]
    if isinstance(value, float):
        return repr(value).removesuffix(".0")
    return PurePath(value).name or value if key == "data.source" and isinstance(value, str) else str(value)
