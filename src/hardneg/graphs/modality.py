"""Graphs as a modality: TU sets or the user's own, GraphCL's views, GIN, and a cross-validated SVM."""

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from hardneg import callables, checks
from hardneg.division import Division, difference
from hardneg.evaluation import EvaluationResult, evaluate_set
from hardneg.extras import required
from hardneg.graphs import files, tu_files
from hardneg.graphs.data import GraphSet, load_graphs
from hardneg.graphs.exported import GraphTensors
from hardneg.graphs.features import extract_graphs
from hardneg.graphs.gin import GIN
from hardneg.graphs.thumbnails import draw
from hardneg.graphs.transform import GraphTransform, describe
from hardneg.graphs.tu_files import TU
from hardneg.graphs.views import GraphViews
from hardneg.modality import GIVEN, DataSection, EncoderSection, EvaluationRequest, Modality, ViewsSection
from hardneg.recipe_section import Section

ENCODERS: dict[str, Callable[..., nn.Module]] = {"gin": GIN}  # called with the number of node features


class GraphData(DataSection):
    """A set of graphs."""

    source: str = "tu:MUTAG"
    """``tu:NAME``, an .npz or .safetensors file, a folder of TU text files, or ``package.module:callable``, which
    returns a GraphSet or a list of PyG graphs."""
    features: Literal["auto", "own", "degree", "constant"] = "auto"
    """Node features; see `hardneg.graphs.data.load_graphs`."""


class GraphViewsSection(ViewsSection):
    """Augmentations of graphs."""

    preset: str = "graphcl"
    """``graphcl``, or ``package.module:callable``, which is called with the options."""


class GraphEncoder(EncoderSection):
    """A graph encoder."""

    name: str = "gin"
    """``gin``, or ``package.module:callable``."""


class Graphs(Modality):
    """Graphs in a `GraphSet`."""

    name = unit = "graphs"
    Data, Views, Encoder, TrainerOptions = GraphData, GraphViewsSection, GraphEncoder, Section
    encoders = ENCODERS
    has_test_set = False

    def accepts(self, source: str) -> bool:
        return source.startswith(TU) or source.endswith(".safetensors")

    def resolve(self, source: str) -> str:
        """Files, and sets in ``data/tu``, get an absolute path; sets in ``$HARDNEG_DATA/tu`` are found by name."""
        if not source.startswith(TU):
            path = self.location(source)
            return source if path is None else str(path.absolute())
        name = source.removeprefix(TU)
        local = not Path(name).is_absolute() and tu_files.holds(tu_files.FOLDER, name)
        return f"{TU}{(tu_files.FOLDER / name).absolute()}" if local else source

    def location(self, source: str) -> Path | None:
        if source.startswith(TU):
            path = Path(source.removeprefix(TU))
            return path.parent if path.is_absolute() else None
        return None if source == GIVEN or callables.is_name(source) else Path(source).expanduser()

    def load(self, data: Any, *, labels: bool = False, given: Any = None) -> GraphSet:
        graphs = _given(data, given)
        if graphs is None and data.source.startswith(TU):
            path = Path(self.resolve(data.source).removeprefix(TU))
            graphs = load_graphs(path.name, path.parent if path.is_absolute() else None, data.features)
        elif graphs is None:
            graphs = files.read_graphs(data.source, data.features)
        if labels and not bool((graphs.labels >= 0).any()):
            raise ValueError(f"{graphs.name} has no labels, and this loss needs them: choose one without labels")
        return graphs

    def load_test(self, data: Any, train: Any, *, given: Any = None) -> None:
        return None

    def load_shown(self, data: Any, shape: tuple[int, ...], division: Division, *, given: Any = None) -> GraphSet:
        return self.load(data, given=given)

    def shape(self, samples: Any) -> tuple[int, ...]:
        return (samples.node_features,)

    def check_shape(self, shape: tuple[int, ...]) -> None:
        if len(shape) != 1 or not 1 <= shape[0] < 1 << 31:
            raise ValueError(f"shape {shape} is not the number of features of a node")

    def views(self, views: Any, shape: tuple[int, ...]) -> Any:
        if views.preset == GIVEN:
            raise ValueError("the views of this run were given in Python: pass views=")
        make: Callable[..., Any] = GraphViews
        if callables.is_name(views.preset):
            make = callables.load(views.preset, "views.preset")
        else:
            checks.choice("views.preset", views.preset, ("graphcl",))
        try:
            return make(**views.options)
        except TypeError as error:
            raise ValueError(f"views.options: {error}") from error

    def view_bytes(self, views: Any, shape: tuple[int, ...], count: int) -> int:
        return 0  # graphs differ in size

    def encoder(self, encoder: Any, shape: tuple[int, ...]) -> nn.Module:
        checks.choice("encoder.name", encoder.name, tuple(ENCODERS))
        try:
            return ENCODERS[encoder.name](shape[0], **encoder.options)
        except TypeError as error:
            raise ValueError(f"encoder.options: {error}") from error

    def encoder_options(self, name: str) -> set[str]:
        return super().encoder_options(name) - {"inputs"}  # follows from the data

    def feature_size(self, encoder: nn.Module, shape: tuple[int, ...]) -> int:
        width = getattr(encoder, "features", None)
        if not isinstance(width, int):
            raise ValueError("a graph encoder must have an attribute features, the number of features it returns")
        return width

    def embed(self, network: nn.Module, samples: Any, views: Any = None, workers: int = 0) -> Tensor:
        return extract_graphs(network, samples)

    def labeled(self, features: Tensor, samples: Any) -> tuple[Tensor, Tensor]:
        labels = samples.labels.to(features.device)
        return features[labels >= 0], labels[labels >= 0]

    def evaluate(self, encoder: nn.Module, request: EvaluationRequest, workers: int = 0) -> EvaluationResult:
        if request.named:
            raise ValueError(
                f"{request.data.source}: a graph encoder takes the node features of its own set only: evaluate it there"
            )
        graphs = self.load(request.data, given=request.given)
        if request.division is not None and (change := difference(request.division, graphs.division)):
            warnings.warn(f"{request.data.source} {change}", stacklevel=3)
        if not bool((graphs.labels >= 0).any()):
            raise ValueError(f"{graphs.name} has no labels, and an evaluation needs them")
        features = extract_graphs(encoder, graphs)
        return evaluate_set(features, graphs.labels, request.metrics or ("svm",), seed=request.seed)

    def sample(self, samples: Any, rows: Tensor) -> GraphSet:
        part: GraphSet = samples.subset(rows)
        return part

    def thumbnail(self, samples: Any, index: int) -> Tensor:
        graph = samples[index]
        return draw(int(graph.num_nodes), graph.edge_index)

    def exportable(self, encoder: nn.Module, shape: tuple[int, ...]) -> nn.Module:
        return GraphTensors(encoder, shape[0])

    def recorded(self, data: Any, samples: Any) -> dict[str, Any]:
        return describe(samples)

    def transform(
        self, data: Any, shape: tuple[int, ...], views: Any, recorded: Mapping[str, Any]
    ) -> Callable[[Any], Any]:
        return GraphTransform(shape[0], recorded)

    def features(self, encoder: nn.Module, inputs: Sequence[Any], device: torch.device) -> Tensor:
        batch = required("torch_geometric.data", "graph").Batch.from_data_list(list(inputs))
        found: Tensor = encoder(batch.to(device))
        return found

    def resident(self, samples: Any) -> GraphSet:
        found: GraphSet = samples
        return found


def _given(data: Any, given: Any) -> GraphSet | None:
    """The graphs that an object or a ``package.module:callable`` gives; None if the source is a set of files."""
    if given is None:
        if data.source == GIVEN:
            raise ValueError("the data of this run were given in Python: pass data=")
        if data.source.startswith(TU) or not callables.is_name(data.source):
            return None
        given = callables.load(data.source, "data.source")
    if callable(given):
        given = given("train")
    if isinstance(given, GraphSet):
        return given
    if not isinstance(given, Iterable):
        raise ValueError(
            f"data of type {type(given).__name__} cannot be read as graphs: give a GraphSet, a list of PyG graphs or a "
            "function that returns one of these"
        )
    return GraphSet.of(list(given), data.features)
