"""Recipes: everything that defines a run, typed, from YAML and ``key=value`` overrides.

A recipe is a tree of pydantic models. Which keys it has depends on its method and modality: the method owns the section
``memory``, the modality the sections ``data``, ``views`` and ``encoder``. A key that the combination does not use is an
error with a suggestion, and so is a value of the wrong type.
"""

import json
from collections.abc import Collection, Mapping, Sequence
from functools import cache
from pathlib import Path, PurePath
from typing import Annotated, Any, Literal, Union

from pydantic import Field, Tag, TypeAdapter, ValidationError, WithJsonSchema, create_model

from hardneg import callables, checks, methods
from hardneg import modality as modalities
from hardneg.evaluation.metrics import get_metric
from hardneg.losses.infonce import InfoNCE
from hardneg.losses.jsd import JSD
from hardneg.modality import DataSection, EncoderSection
from hardneg.recipe_section import AUTO, Count, CountOrAuto, CountOrZero, Counts, Names, NotNegative, Positive, Section
from hardneg.training import objectives, yaml_files
from hardneg.training.recipe_errors import explained
from hardneg.training.recipe_files import about as about
from hardneg.training.recipe_files import find as find
from hardneg.training.recipe_files import known as known
from hardneg.training.replaced import without_replaced

DEFAULT_METHOD = methods.DEFAULT
ENCODER_CODE = ("encoder.name", "views.preset")  # keys that may name code, of what turns a sample into features
CODE = (*ENCODER_CODE, "evaluation.metrics", "data.source")


class Optimizer(Section):
    """The optimizer and its learning rate."""

    name: Literal["adam", "adamw", "sgd", "lars"] = "adam"
    lr: Positive = 1e-3
    weight_decay: NotNegative = 1e-6
    momentum: NotNegative = 0.9
    schedule: Literal["constant", "linear", "cosine", "step"] = "constant"
    warmup: NotNegative = 0.0
    """Epochs over which the learning rate rises from 0."""
    drops: Counts = ()
    """Epochs at which the schedule ``step`` divides the learning rate by 10."""
    clip: Positive | None = None
    """Largest norm of the gradient."""


class Trainer(Section):
    """Length, batch size and hardware of a run, with Lightning's names."""

    epochs: Count = 100
    batch_size: CountOrAuto = 256
    """Samples per batch, of all processes together; ``auto``: a power of two up to 256, at least 4 steps per epoch."""
    # Losses and memories are in float32, so weights are too.
    precision: Literal["auto", "32-true", "bf16-mixed", "16-mixed"] = "32-true"
    """``auto``: bf16-mixed on a GPU that supports it, else 32-true."""
    accelerator: str = "auto"
    devices: Count = 1
    nodes: Count = 1
    """Number of machines, each with ``devices`` devices, started by torchrun."""
    knn_every: CountOrZero = 10
    """Epochs between two online evaluations; 0 for none."""
    insight_every: CountOrZero = 10
    """Epochs between two measurements of losses and embeddings, which are also made after the first and the last; 0
    for none."""
    save_every: CountOrZero = 0
    """Steps between two checkpoints, in addition to those at the end of each epoch; 0 for none."""
    logger: Literal["csv", "tensorboard", "wandb", "mlflow"] | None = None
    """A Lightning logger, which writes to ``logs`` in the run folder."""
    accumulate: Count = 1
    """Batches per optimizer step."""
    sync_batchnorm: bool = False
    """Batch-norm statistics over the batches of all processes."""


class Batches(Section):
    """How batches are composed; see `hardneg.ProximityBatchSampler`."""

    sampler: Literal["uniform", "consecutive", "proximity", "knn"] = "uniform"
    candidates: int = 1000
    neighbors: int = 100
    restart: float | dict[str, Any] = 0.1
    """A number, or a schedule such as ``{schedule: linear, start: 0.2, end: 0.05}``."""
    walk: str = "restart"
    coverage: str = "walk"
    refresh_every: CountOrZero = 100
    """Steps between two graphs; 0 builds one graph, before the first step."""
    embeddings: Literal["encode", "bank"] = "encode"
    """What a graph is built from: all samples encoded again, or the last embedding of each in training (from the second
    epoch on, when each has one)."""
    drop_last: bool = True
    """Leave out the samples at the end of an epoch that do not fill a batch."""


class Evaluation(Section):
    """How the trained encoder is evaluated."""

    metrics: Names | None = None
    """Names of metrics, or ``package.module:callable``; by default those of the modality."""


class NoSettings(Section):
    """A section without keys."""


Objective = Annotated[dict[str, Any], WithJsonSchema(objectives.json_schema())]


class Recipe(Section):
    """A whole run. `load` makes the model of a recipe's method and modality, whose sections have more keys."""

    about: str = ""
    """What the recipe is for."""
    method: str = DEFAULT_METHOD
    modality: str = "images"
    seed: int = 0
    data: DataSection
    views: Section
    encoder: EncoderSection
    objective: Objective = Field(default_factory=lambda: {"preset": objectives.DEFAULT})
    """The loss: a preset's name under ``preset``, and its arguments."""
    batches: Batches = Batches()
    memory: Section
    """Settings of the method."""
    optimizer: Optimizer = Optimizer()
    trainer: Trainer
    evaluation: Evaluation = Evaluation()

    @property
    def kind(self) -> modalities.Modality:
        """The modality."""
        return modalities.get(self.modality)

    def make_loss(self, **more: Any) -> InfoNCE | JSD:
        """The loss that the section ``objective`` describes; ``more`` replaces its settings."""
        return objectives.make(self.objective, **more)

    def with_source(self, source: str) -> "Recipe":
        """The same recipe with another ``data.source``."""
        return self.model_copy(update={"data": self.data.model_copy(update={"source": source})})

    def with_batch_size(self, batch_size: int) -> "Recipe":
        """The same recipe with this batch size if its own is ``auto``."""
        if self.trainer.batch_size != AUTO:
            return self
        return self.model_copy(update={"trainer": self.trainer.model_copy(update={"batch_size": batch_size})})


@cache
def model(method: str, kind: str) -> type[Recipe]:
    """The model of recipes for a method and a modality."""
    owner, samples = methods.get(method), modalities.get(kind)
    trainer = create_model("Trainer", __base__=(Trainer, samples.TrainerOptions), __doc__=Trainer.__doc__)
    views = samples.Views if owner.uses_views else NoSettings
    settings = owner.Settings if owner.Settings is not Section else NoSettings
    sections: dict[str, Any] = {
        "data": samples.Data,
        "views": views,
        "encoder": samples.Encoder,
        "memory": settings,
        "trainer": trainer,
    }
    fields: dict[str, Any] = {name: (section, section()) for name, section in sections.items()}
    fields |= {"method": (Literal[method], method), "modality": (Literal[kind], kind)}
    return create_model("Recipe", __base__=Recipe, __doc__=Recipe.__doc__, **fields)


def models() -> dict[tuple[str, str], type[Recipe]]:
    """The models of all combinations of method and modality."""
    return {(name, kind): model(name, kind) for name in methods.METHODS for kind in methods.get(name).modalities}


def json_schema() -> dict[str, Any]:
    """The JSON schema of a recipe file, from which editors complete keys and values."""
    each = tuple(Annotated[made, Tag(f"{name} {kind}")] for (name, kind), made in models().items())
    schema = TypeAdapter(Union[each]).json_schema()  # type: ignore[arg-type]  # noqa: UP007  # a tuple of types
    for recipe_schema in schema["$defs"].values():
        if "method" in (keys := recipe_schema["properties"]) and keys["method"]["const"] != DEFAULT_METHOD:
            recipe_schema["required"] = ["method"]
    return schema


def load(source: str | Path | Mapping[str, Any], overrides: Sequence[str] = ()) -> Recipe:
    """A recipe from a YAML file or a mapping, with ``key.subkey=value`` overrides.

    A later override replaces an earlier one, so that a list of defaults can be extended; the command line refuses that.

    Examples:
        >>> recipe = load({"seed": 3}, ["trainer.epochs=5", "objective.preset=hcl", "objective.beta=0.5"])
        >>> recipe.trainer.epochs, recipe.make_loss().hardening
        (5, (Exponential(beta=0.5),))
        >>> load({}, ["seed=1", "seed=2"]).seed
        2
        >>> load({}, ["trainer.epoch=5"])
        Traceback (most recent call last):
        ValueError: trainer.epoch is not a key of the recipe: did you mean trainer.epochs?
    """
    tree = dict(source) if isinstance(source, Mapping) else yaml_files.read_mapping(source)
    written, typed = dict(tree), set()
    for override in overrides:
        path, separator, text = override.partition("=")
        if not separator or not path:
            remedy = f": did you mean data.source={override}?" if override and Path(override).exists() else ""
            raise ValueError(f"an override must be key=value, got {override!r}{remedy}")
        typed.add(path)
        *parents, last = path.split(".")
        node = tree
        for parent in parents:
            below = node.get(parent)
            node[parent] = dict(below) if isinstance(below, Mapping) else {}
            node = node[parent]
        node[last] = yaml_files.parse(text, f"the value of {path}") if text else None
    _check_keys(tree, "the recipe")
    method, kind = _method_and_modality(tree)
    tree = without_replaced(tree, written, typed, (method, kind), model)
    try:
        recipe = model(method, kind).model_validate({**tree, "method": method, "modality": kind})
    except ValidationError as error:
        raise ValueError(explained(error, tree, (method, kind), models())) from error
    recipe.make_loss()  # a bad loss is an error now
    if recipe.data.not_negatives is not None and not methods.get(method).takes_not_negatives:
        fitting = [name for name in methods.METHODS if _leaves_out(name, kind)]
        raise ValueError(
            f"data.not_negatives has no meaning for method={method}, which does not compare samples one by one: leave "
            f"it out, or use method={' or '.join(fitting)}"
        )
    for metric in recipe.evaluation.metrics or ():
        if not callables.is_name(metric):
            get_metric(metric)  # an unknown name is an error now
    return recipe


def _leaves_out(method: str, kind: str) -> bool:
    """Whether a method trains on this kind of data and can leave pairs out of its negatives."""
    owner = methods.get(method)
    return kind in owner.modalities and owner.takes_not_negatives


def _check_keys(tree: Any, where: str) -> None:
    """Raise if a key of a mapping is not text, also in lists and mappings within."""
    if isinstance(tree, Mapping):
        for key, below in tree.items():
            if not isinstance(key, str):
                raise ValueError(f"{where} must have text for keys, got {key!r}")
            _check_keys(below, key if where == "the recipe" else f"{where}.{key}")
    elif isinstance(tree, list):
        for below in tree:
            _check_keys(below, where)


def _method_and_modality(tree: Mapping[str, Any]) -> tuple[str, str]:
    """The method and the modality that a tree names, or that follow from its source."""
    method = tree.get("method", DEFAULT_METHOD)
    checks.choice("method", method, tuple(methods.METHODS))
    allowed = methods.get(method).modalities
    data = tree.get("data")
    source = data.get("source") if isinstance(data, Mapping) else None
    by_source = modalities.of_source(source, allowed) if isinstance(source, str) else None
    kind = tree.get("modality") or by_source or allowed[0]
    checks.choice("modality", kind, tuple(modalities.MODALITIES))
    if kind not in allowed:
        fitting = [name for name in methods.METHODS if kind in methods.get(name).modalities]
        example = modalities.get(allowed[0]).Data.model_fields["source"].default
        given = f"data.source={source} holds {kind}" if tree.get("modality") is None else f"modality={kind}"
        raise ValueError(
            f"{given}, and method={method} trains on {' or '.join(allowed)}: give such a source, as "
            f"{example}, or use method={', '.join(fitting)}"
        )
    return method, kind


def check_once(overrides: Sequence[str]) -> None:
    """Raise if one of the overrides ``key=value`` would undo an earlier one."""
    for position, later in enumerate(overrides):
        key = later.partition("=")[0]
        for earlier in (entry.partition("=")[0] for entry in overrides[:position]):
            if earlier == key:
                raise ValueError(f"{key} is given twice, the second time as {later}: leave one out")
            if earlier.startswith(f"{key}."):
                raise ValueError(f"{later} would undo {earlier}: leave one out, or put both into one value")


def check_trust(recipe: Recipe, folder: str | Path, trust: bool, keys: Collection[str] = CODE) -> None:
    """Raise if building the parts of a run folder's recipe would run code that the folder names.

    keys: those of the parts that are built. Importing a module already runs it, so nothing is imported to find out.
    """
    for key, name in code_names(recipe):
        if trust or key not in keys:
            continue
        raise ValueError(
            f"{folder}: {key}={name!r} is code that the folder asks to run: if you trust it, add --trust (in Python: "
            "trust=True)"
        )


def code_names(recipe: Recipe) -> list[tuple[str, str]]:
    """The keys of the recipe that name a ``package.module:callable``, with the names."""
    named = [("encoder.name", recipe.encoder.name)] if ":" in recipe.encoder.name else []
    preset = getattr(recipe.views, "preset", "")
    metrics = recipe.evaluation.metrics or ()
    others = [("views.preset", preset), *(("evaluation.metrics", metric) for metric in metrics)]
    if not recipe.kind.accepts(recipe.data.source):
        others.append(("data.source", recipe.data.source))
    return named + [(key, name) for key, name in others if callables.is_name(name)]


def needs_trust(recipe: Recipe) -> bool:
    """Whether the recipe names a ``package.module:callable``."""
    return bool(code_names(recipe))


def tree_of(recipe: Recipe) -> dict[str, Any]:
    """The recipe as plain data, with all defaults, as JSON and YAML hold it."""
    tree: dict[str, Any] = json.loads(json.dumps(recipe.model_dump(mode="json"), default=str))
    return tree


def dump(recipe: Recipe) -> str:
    """The recipe as YAML that `load` reads back."""
    import yaml

    return str(yaml.safe_dump(tree_of(recipe), sort_keys=False, allow_unicode=True))


def without_folders(recipe: Recipe) -> Recipe:
    """The recipe with the names of its files instead of absolute paths, which say nothing on another machine."""

    def name(given: str) -> str:
        path = PurePath(given)
        return path.name if path.is_absolute() and path.name else given

    encoder = recipe.encoder.model_copy(update={"name": name(recipe.encoder.name)})
    return recipe.with_source(name(recipe.data.source)).model_copy(update={"encoder": encoder})


def differences(tree: Mapping[str, Any], recipe: Recipe) -> list[str]:
    """The keys in which a tree of settings, as `tree_of` returns it, differs from a recipe.

    Examples:
        >>> differences(tree_of(load({})), load({}, ["seed=3", "trainer.epochs=5"]))
        ['seed', 'trainer.epochs']
    """
    now = tree_of(recipe)
    found = []
    for key in sorted({*now, *tree}):
        one, other = now.get(key), tree.get(key)
        if not (isinstance(one, dict) and isinstance(other, dict)):
            found += [key] * (one != other)
        else:
            found += [f"{key}.{name}" for name in sorted({*one, *other}) if one.get(name) != other.get(name)]
    return found
