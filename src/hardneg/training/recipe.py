"""Recipes: everything that makes a run, typed, from YAML and ``key=value`` overrides.

A recipe is a tree of dataclasses. Unknown keys are refused with a suggestion, values are checked against the type of
their field, and what was resolved can be written back as YAML and read again.
"""

import contextlib
import dataclasses
import inspect
import json
import math
import re
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from hardneg import checks
from hardneg.losses import presets, schedules
from hardneg.losses.infonce import InfoNCE
from hardneg.losses.jsd import JSD
from hardneg.training import optimizers, yaml_files

# Losses and memories are in float32: what holds weights in another precision would not meet them.
PRECISIONS = ("32-true", "bf16-mixed", "16-mixed")
LOGGERS = ("csv", "tensorboard", "wandb", "mlflow")
COMPILE_MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
RECIPES = Path(__file__).parents[1] / "recipes"


@dataclass(frozen=True)
class Data:
    """source: see `load_images`, or ``tu:MUTAG`` for graphs · size: side of the pictures, if they differ ·
    workers: that decode · features: of the nodes of graphs, see `hardneg.graphs.data.load_graphs`."""

    source: str = "digits"
    size: int | None = None
    workers: int = 2
    features: str = "auto"


@dataclass(frozen=True)
class Views:
    """preset: ``"simclr"`` or ``"moco"`` · options: any field of `hardneg.images.views.ImageViews`, which then wins."""

    preset: str = "simclr"
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Encoder:
    """name: known, or ``package.module:callable`` · options: of the encoder · hidden, outputs, norm: of the head,
    which is linear if hidden is 0."""

    name: str = "tiny"
    options: dict[str, Any] = field(default_factory=dict)
    hidden: int = 512
    outputs: int = 128
    norm: bool = True


@dataclass(frozen=True)
class Optimizer:
    """name, lr, weight_decay, momentum · schedule, warmup (epochs), drops (epochs) · clip: largest gradient norm."""

    name: str = "adam"
    lr: float = 1e-3
    weight_decay: float = 1e-6
    momentum: float = 0.9
    schedule: str = "constant"
    warmup: float = 0.0
    drops: tuple[int, ...] = ()
    clip: float | None = None


@dataclass(frozen=True)
class Trainer:
    """epochs · batch_size: of all processes together · precision, accelerator, devices: Lightning's words ·
    nodes: machines of so many devices each, started by torchrun ·
    compile: a mode of torch.compile, ``default`` or ``reduce-overhead`` · channels_last: memory layout ·
    knn_every: epochs between online kNN, 0 for never · save_every: steps between checkpoints, beside those at every
    epoch's end; 0 for none · logger: ``csv``, ``tensorboard``, ``wandb`` or ``mlflow``, writing to ``logs`` ·
    accumulate: batches per optimizer step · chunk_size: samples that an encoder processes at a time, with the gradient
    of the whole batch · sync_batchnorm: batch-norm statistics over the batches of all processes."""

    epochs: int = 100
    batch_size: int = 256
    precision: str = "32-true"
    accelerator: str = "auto"
    devices: int = 1
    nodes: int = 1
    compile: str | None = None
    channels_last: bool = True
    knn_every: int = 10
    save_every: int = 0
    logger: str | None = None
    accumulate: int = 1
    chunk_size: int | None = None
    sync_batchnorm: bool = False


@dataclass(frozen=True)
class Batches:
    """sampler: ``uniform``, ``proximity`` or ``knn`` · candidates, neighbors, restart (a number or a schedule), walk,
    coverage: see `hardneg.ProximityBatchSampler` · refresh_every: steps between two graphs · embeddings: what a graph
    is built from: ``encode`` all samples anew, or the ``bank`` of what training last saw of each · drop_last: leave
    what does not fill a batch for another epoch."""

    sampler: str = "uniform"
    candidates: int = 1000
    neighbors: int = 100
    restart: float | dict[str, Any] = 0.1
    walk: str = "restart"
    coverage: str = "walk"
    refresh_every: int = 100
    embeddings: str = "encode"
    drop_last: bool = True


@dataclass(frozen=True)
class Memory:
    """queue: keys that MoCo keeps · momentum: of the key encoder; MoCo v3's rises from it to 1 · split: parts of a
    batch that MoCo's batch-norm looks at one by one · bank: momentum of a bank's rows · clusters, repeats: of the
    k-means over the bank, 0 for none · cluster_after, cluster_every: epochs before the first clustering and between two
    · close: what rows of the same cluster are: ``negatives`` (Cave), ``positives`` (Ring(+C_i)) or ``ignored`` ·
    background: nearest rows that Local Aggregation compares with · form: of its loss, ``paper`` or ``published``."""

    queue: int = 65536
    momentum: float = 0.999
    split: int = 8
    bank: float = 0.5
    clusters: int = 0
    repeats: int = 1
    cluster_after: int = 10
    cluster_every: int = 1
    close: str = "ignored"
    background: int = 4096
    form: str = "paper"


@dataclass(frozen=True)
class Recipe:
    """A whole run. objective: a preset's name under ``preset``, and its arguments · about: what it stands for."""

    about: str = ""
    method: str = "simclr"
    seed: int = 0
    data: Data = field(default_factory=Data)
    views: Views = field(default_factory=Views)
    encoder: Encoder = field(default_factory=Encoder)
    objective: dict[str, Any] = field(default_factory=lambda: {"preset": "simclr"})
    batches: Batches = field(default_factory=Batches)
    memory: Memory = field(default_factory=Memory)
    optimizer: Optimizer = field(default_factory=Optimizer)
    trainer: Trainer = field(default_factory=Trainer)


def load(source: str | Path | Mapping[str, Any], overrides: Sequence[str] = ()) -> Recipe:
    """A recipe from a YAML file or a mapping, with ``key.subkey=value`` overrides.

    Examples:
        >>> recipe = load({"seed": 3}, ["trainer.epochs=5", "objective.preset=hcl", "objective.beta=0.5"])
        >>> recipe.trainer.epochs, objective(recipe).hardening
        (5, (Exponential(beta=0.5),))
        >>> load({}, ["trainer.epoch=5"])
        Traceback (most recent call last):
        ValueError: trainer.epoch is not a key of the recipe: did you mean trainer.epochs?
    """
    tree = dict(source) if isinstance(source, Mapping) else yaml_files.read_mapping(source)
    for override in overrides:
        path, separator, text = override.partition("=")
        if not separator or not path:
            raise ValueError(f"an override must be key=value, got {override!r}")
        *parents, last = path.split(".")
        place = tree
        for parent in parents:
            below = place.get(parent)
            place[parent] = dict(below) if isinstance(below, Mapping) else {}
            place = place[parent]
        place[last] = yaml_files.parse(text, f"the value of {path}") if text else None
    recipe: Recipe = _typed(Recipe, tree, "")
    _check(recipe)
    objective(recipe)  # a bad objective is refused now
    return recipe


def check_once(overrides: Sequence[str]) -> None:
    """Raise if one of the overrides ``key=value`` would undo an earlier one, which would then be ignored in silence."""
    for place, later in enumerate(overrides):
        key = later.partition("=")[0]
        for earlier in (entry.partition("=")[0] for entry in overrides[:place]):
            if earlier == key:
                raise ValueError(f"{key} stands twice, the second time as {later}: leave one out")
            if earlier.startswith(f"{key}."):
                raise ValueError(f"{later} would undo {earlier}: leave one out, or put both into one value")


def _check(recipe: Recipe) -> None:
    """Raise where a number or a word cannot be meant."""
    trainer, encoder, optimizer = recipe.trainer, recipe.encoder, recipe.optimizer
    for name, given, least in (
        ("trainer.epochs", trainer.epochs, 1),
        ("trainer.batch_size", trainer.batch_size, 1),
        ("trainer.devices", trainer.devices, 1),
        ("trainer.nodes", trainer.nodes, 1),
        ("trainer.knn_every", trainer.knn_every, 0),
        ("trainer.save_every", trainer.save_every, 0),
        ("trainer.accumulate", trainer.accumulate, 1),
        ("encoder.hidden", encoder.hidden, 0),
        ("encoder.outputs", encoder.outputs, 1),
        ("data.workers", recipe.data.workers, 0),
    ):
        checks.whole(name, given, least)
    checks.number("optimizer.lr", optimizer.lr, above=0, below=math.inf)
    for name in ("weight_decay", "momentum", "warmup"):
        checks.number(f"optimizer.{name}", getattr(optimizer, name), at_least=0, below=math.inf)
    checks.choice("optimizer.name", optimizer.name, optimizers.OPTIMIZERS)
    checks.choice("optimizer.schedule", optimizer.schedule, optimizers.SCHEDULES)
    checks.choice("trainer.precision", trainer.precision, PRECISIONS)
    if trainer.chunk_size is not None:
        checks.whole("trainer.chunk_size", trainer.chunk_size)
        if trainer.compile is not None:
            raise ValueError(
                f"trainer.chunk_size={trainer.chunk_size} runs encoders that are not compiled: leave out "
                f"trainer.compile={trainer.compile}"
            )
    if trainer.logger is not None:
        checks.choice("trainer.logger", trainer.logger, LOGGERS)
    if trainer.compile is not None:
        checks.choice("trainer.compile", trainer.compile, COMPILE_MODES)


def check_trust(recipe: Recipe, folder: str | Path, trust: bool) -> None:
    """Raise if building the parts of a run folder's recipe would run code that the folder names.

    Importing a module already runs it, so nothing is imported to find out.
    """
    if not trust and needs_trust(recipe):
        raise ValueError(
            f"{folder}: encoder.name={recipe.encoder.name!r} is code that the folder asks to run: if you trust it, add "
            "--trust (in Python: trust=True)"
        )


def needs_trust(recipe: Recipe) -> bool:
    """Whether the recipe names a ``module:callable``."""
    return ":" in recipe.encoder.name


def known() -> dict[str, Path]:
    """The recipes that come with the library, by name."""
    return {file.stem: file for file in sorted(RECIPES.glob("*.yaml"))}


def find(name: str | Path) -> Path:
    """The file of a recipe: a path, or the name of one that comes with the library.

    Examples:
        >>> find("digits-simclr").name
        'digits-simclr.yaml'
        >>> find("digit-simclr")
        Traceback (most recent call last):
        ValueError: there is no recipe 'digit-simclr': did you mean digits-simclr?
    """
    ours = known()
    if str(name) in ours:
        return ours[str(name)]
    if Path(name).is_file():
        return Path(name)
    if Path(name).is_dir():
        if (Path(name) / "recipe.yaml").is_file():
            raise ValueError(f"{name} is a run: give --resume {name}, or its recipe.yaml to begin another run")
        raise ValueError(f"{name} is a folder: give a YAML file, or the name of one of our recipes")
    if Path(name).suffix in (".yaml", ".yml"):
        raise ValueError(f"there is no file {str(name)!r}: give the path of a recipe, or the name of one of ours")
    raise ValueError(f"there is no recipe {str(name)!r}: {_hint(str(name), list(ours))}")


def dump(recipe: Recipe) -> str:
    """The recipe as YAML that `load` reads back."""
    import yaml

    tree = dataclasses.asdict(recipe)
    tree["optimizer"]["drops"] = list(tree["optimizer"]["drops"])
    return str(yaml.safe_dump(tree, sort_keys=False, allow_unicode=True))


def differences(tree: Mapping[str, Any], recipe: Recipe) -> list[str]:
    """The keys in which a tree of settings, as `dataclasses.asdict` makes it and JSON keeps it, differs from a recipe.

    Examples:
        >>> differences(dataclasses.asdict(load({})), load({}, ["seed=3", "trainer.epochs=5"]))
        ['seed', 'trainer.epochs']
    """
    wanted = json.loads(json.dumps(dataclasses.asdict(recipe), default=str))
    tree = json.loads(json.dumps(tree, default=str))
    found = []
    for key in sorted({*wanted, *tree}):
        one, other = wanted.get(key), tree.get(key)
        if not (isinstance(one, dict) and isinstance(other, dict)):
            found += [key] * (one != other)
        else:
            found += [f"{key}.{name}" for name in sorted({*one, *other}) if one.get(name) != other.get(name)]
    return found


def objective(recipe: Recipe, **more: Any) -> InfoNCE | JSD:
    """The loss that the recipe names; ``more`` wins over it. A mapping ``{schedule: linear, …}`` makes a schedule."""
    options = dict(recipe.objective)
    name = options.pop("preset", "simclr")
    names = sorted(
        n
        for n, made in vars(presets).items()
        if inspect.isfunction(made) and made.__module__ == presets.__name__ and not n.startswith("_")
    )
    if name not in names:
        raise ValueError(f"objective.preset={name!r} is not known: {_hint(str(name), names)}")
    preset = getattr(presets, name)
    kind = JSD if inspect.signature(preset).return_annotation is JSD else InfoNCE
    allowed = {key for made in (preset, kind.__init__) for key in inspect.signature(made).parameters}
    allowed -= {"self", "options", "generator", "hardening"}
    for key, setting in options.items():
        if key not in allowed:
            raise ValueError(f"objective.{key} is not an argument of {name}: {_hint(key, sorted(allowed))}")
        if isinstance(setting, Mapping):
            options[key] = schedule(f"objective.{key}", setting)
    made: InfoNCE | JSD = preset(**{**options, **more})
    return made


def schedule(where: str, settings: Mapping[str, Any]) -> schedules.Schedule:
    """The schedule that a mapping ``{schedule: linear, …}`` describes; ``where`` it stands in the recipe."""
    settings = dict(settings)
    kinds: dict[str, type[schedules.Schedule]] = {
        "constant": schedules.Constant,
        "linear": schedules.Linear,
        "steps": schedules.Steps,
        "hardness_anneal": schedules.HardnessAnneal,
        "ring_anneal": schedules.RingAnneal,
    }
    kind = str(settings.pop("schedule", None))
    if kind not in kinds:
        raise ValueError(f"{where}.schedule={kind!r} is not known: {_hint(str(kind), sorted(kinds))}")
    try:
        return kinds[kind](**settings)
    except TypeError as error:
        raise ValueError(f"{where}: {error}") from error


def _typed(kind: Any, given: Any, where: str) -> Any:
    """``given`` as a value of the annotated type ``kind``; ``where`` is its place in the recipe."""
    if dataclasses.is_dataclass(kind):
        if not isinstance(given, Mapping):
            raise ValueError(f"{where or 'the recipe'} must hold keys and values, got {given!r}")
        hints = typing.get_type_hints(kind)
        for key in given:
            if key not in hints:
                full, places = f"{where}.{key}".lstrip("."), [f"{where}.{name}".lstrip(".") for name in hints]
                raise ValueError(f"{full} is not a key of the recipe: {_hint(full, places)}")
        return kind(**{key: _typed(hints[key], value, f"{where}.{key}".lstrip(".")) for key, value in given.items()})  # type: ignore[operator]
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is types.UnionType:
        if given is None and type(None) in arguments:
            return None
        if isinstance(given, Mapping) and (
            mapping := next((a for a in arguments if typing.get_origin(a) is dict), None)
        ):
            return _typed(mapping, given, where)
        return _typed(next(argument for argument in arguments if argument is not type(None)), given, where)
    if origin is dict and isinstance(given, Mapping):
        return _mapping(given, where)
    if origin is tuple and isinstance(given, list | tuple):
        return tuple(_typed(arguments[0], value, where) for value in given)
    if kind is float and isinstance(given, str):  # YAML reads 1e-3 as text
        with contextlib.suppress(ValueError):
            given = float(given)
    if kind is float and isinstance(given, int) and not isinstance(given, bool):
        return float(given)
    if isinstance(kind, type) and isinstance(given, kind) and (kind is bool or not isinstance(given, bool)):
        return given
    raise ValueError(f"{where} must be {getattr(kind, '__name__', kind)}, got {given!r}")


def _mapping(given: Mapping[Any, Any], where: str) -> dict[str, Any]:
    """A mapping from text, also within, with the numbers that YAML takes for text, such as 1e-3."""
    for key in given:
        if not isinstance(key, str):
            raise ValueError(f"{where} must have text for keys, got {key!r}")
    return {key: _number(value, f"{where}.{key}") for key, value in given.items()}


def _number(given: Any, where: str) -> Any:
    if isinstance(given, Mapping):
        return _mapping(given, where)
    if isinstance(given, list):
        return [_number(value, where) for value in given]
    if isinstance(given, str) and re.fullmatch(r"[+-]?\d+(\.\d*)?[eE][+-]?\d+", given):
        return float(given)
    return given


def _hint(name: str, known: Sequence[str]) -> str:
    near = get_close_matches(name, known, n=1)
    return f"did you mean {near[0]}?" if near else "choose one of " + ", ".join(known)
