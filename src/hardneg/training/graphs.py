"""Graphs in the engine: their data, their methods and how they are judged."""

from pathlib import Path

import torch
from torch import nn

from hardneg import checks, randomness
from hardneg.evaluation import EvaluationResult, evaluate_set
from hardneg.graphs.data import GraphSet, load_graphs
from hardneg.graphs.features import extract_graphs
from hardneg.graphs.gin import GIN, Discriminator
from hardneg.graphs.views import GraphViews
from hardneg.images import encoders
from hardneg.losses.infonce import InfoNCE
from hardneg.losses.jsd import JSD
from hardneg.methods.graphcl import GraphCL, GraphMethod, graph_projection
from hardneg.methods.infograph import InfoGraph
from hardneg.training import optimizers, recipe
from hardneg.training.recipe import Recipe

SOURCE = "tu:"  # what the name of a set of the TU collection begins with
METHODS = ("graphcl", "infograph")


def load(settings: Recipe) -> GraphSet:
    """The graphs that the recipe names, from ``data/tu`` or ``$HARDNEG_DATA/tu``."""
    place = Path(located(settings.data.source).removeprefix(SOURCE))
    return load_graphs(place.name, place.parent if place.is_absolute() else None, settings.data.features)


def located(source: str) -> str:
    """The source with the absolute path of a set in ``data/tu``; one of ``$HARDNEG_DATA`` keeps its name alone."""
    name = source.removeprefix(SOURCE)
    folder = Path("data", "tu").absolute()
    return source if Path(name).is_absolute() or not folder.is_dir() else f"{SOURCE}{folder / name}"


def method(settings: Recipe, graphs: GraphSet, processes: int = 1) -> GraphMethod:
    """The method that the recipe describes, with fresh weights drawn from its seed."""
    checks.choice("method for graphs", settings.method, METHODS)
    if processes > 1:
        raise ValueError(f"trainer.devices={processes}: graphs are trained on one device")
    torch.manual_seed(randomness.mix(settings.seed))
    encoder = encoder_of(settings, graphs.node_features)
    objective = recipe.objective(settings)
    optimizer, rate = optimizers.of_recipe(settings)
    width = getattr(encoder, "features", None)
    if not isinstance(width, int):
        raise ValueError("a graph encoder must say how many features it gives: set its attribute features")
    module: GraphMethod
    if settings.method == "infograph":
        if not isinstance(objective, JSD):
            raise ValueError("method=infograph compares nodes with graphs: use objective.preset=infograph")
        heads = Discriminator(width), Discriminator(width)
        module = InfoGraph(encoder, *heads, objective, optimizer, rate, settings.seed)
    else:
        if not isinstance(objective, InfoNCE):
            raise ValueError("method=graphcl compares graphs: use objective.preset=graphcl, simclr, hcl …")
        views = GraphViews(**settings.views.options)
        module = GraphCL(encoder, graph_projection(width), objective, views, optimizer, rate, settings.seed)
    module.graphs, module.labels = graphs, graphs.labels
    return module


def encoder_of(settings: Recipe, node_features: int) -> nn.Module:
    """The encoder, for nodes with so many features."""
    chosen = settings.encoder
    if ":" in chosen.name:
        return encoders.build(chosen.name, **chosen.options)
    checks.choice("encoder for graphs", chosen.name, ("gin",))
    try:
        return GIN(node_features, **chosen.options)
    except TypeError as error:
        raise ValueError(f"options of encoder='gin': {error}") from error


def judge(encoder: nn.Module, graphs: GraphSet, seed: int = 0) -> EvaluationResult:
    """Accuracy of a support vector machine on frozen embeddings, by ten folds; its penalty chosen within each."""
    if graphs.labels is None:
        raise ValueError(f"{graphs.name} has no labels, and an evaluation needs them")
    return evaluate_set(extract_graphs(encoder, graphs), graphs.labels, seed=seed)
