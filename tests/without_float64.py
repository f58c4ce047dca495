"""A device without float64, as Apple's are, emulated in host memory, and what must run on it.

Its tensors say that they are on the device "apple" and hold their values in a tensor of the host. Every operator runs
on the host, and one that would make a float64 tensor on the device raises, as PyTorch does on such a device.
"""

import json
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import processes
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_flatten, tree_map, tree_map_only
from torch.utils.backend_registration import _DummyBackendModule, _setup_privateuseone_for_python_backend

import hardneg as hn
from hardneg import matmul
from hardneg.evaluation import evaluate_features
from hardneg.evaluation.alignment import alignment, uniformity
from hardneg.evaluation.sentences import logistic_accuracy, nearest_accuracy
from hardneg.evaluation.svm import svm_accuracy
from hardneg.graphs.data import assemble
from hardneg.graphs.equivalent_nodes import equivalent_nodes
from hardneg.graphs.views import GraphViews
from hardneg.images.views import simclr_views
from hardneg.insight import (
    alignment_estimate,
    class_means,
    gradient_shares,
    hubs,
    loss_ordering,
    uniformity_estimate,
)
from hardneg.insight.diagnostics import cosine_histograms, hardest_negatives
from hardneg.insight.suspects import suspected_false_negatives
from hardneg.samplers import cosine_histogram, mean_cosine
from hardneg.training.callbacks.metrics_writer import running_sum

Place = Callable[[Tensor], Tensor]


class _Module(_DummyBackendModule):  # type: ignore[misc]
    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.float16]


# For the whole process: import this file in a process of its own.
_setup_privateuseone_for_python_backend(rename="apple", backend_module=_Module())
DEVICE = torch.device("apple:0")


class DeviceTensor(Tensor):
    """A tensor of the emulated device."""

    host: Tensor

    @staticmethod
    def __new__(cls, host: Tensor) -> "DeviceTensor":
        made = torch.Tensor._make_wrapper_subclass(
            cls, host.shape, host.stride(), host.storage_offset(), dtype=host.dtype, device=DEVICE
        )
        made.host = host
        return made  # type: ignore[no-any-return]

    def tolist(self) -> Any:  # type: ignore[override]
        return self.cpu().tolist()

    def __repr__(self) -> str:  # type: ignore[override]
        return f"DeviceTensor({self.host})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


class _Operators(TorchDispatchMode):
    """Makes tensors on the emulated device."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


class _Constructors(TorchFunctionMode):
    """``torch.tensor`` reaches no dispatch mode: it makes its tensor on the host, and copies it."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (torch.tensor, torch.as_tensor) and kwargs.get("device") is not None:
            place = kwargs["device"]
            return func(*args, **{**kwargs, "device": None}).to(place)
        return func(*args, **kwargs)


@contextmanager
def emulated() -> Iterator[None]:
    """While it is open, tensors can be made on the emulated device."""
    with _Constructors(), _Operators():
        yield


def on_device(tensor: Tensor) -> Tensor:
    """A copy of a tensor of the host on the emulated device; a leaf, if it is one."""
    _refuse(tensor)
    return DeviceTensor(tensor.detach().clone()).requires_grad_(tensor.requires_grad)


def _run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    given = [value for value in tree_flatten((args, kwargs))[0] if isinstance(value, Tensor)]
    here = [tensor for tensor in given if isinstance(tensor, DeviceTensor)]
    wanted = kwargs.get("device")
    stays = torch.device(wanted).type == DEVICE.type if wanted is not None else bool(here)
    if here and func is not torch.ops.aten._to_copy.default and func is not torch.ops.aten.copy_.default:
        for tensor in given:
            # Numbers of the host take part in operators of any device, tensors with dimensions do not.
            if not isinstance(tensor, DeviceTensor) and tensor.dim() > 0:
                raise RuntimeError(f"{func}: tensors of the host and of the device are mixed")
    host_args, host_kwargs = tree_map_only(DeviceTensor, lambda tensor: tensor.host, (args, kwargs))
    if wanted is not None and torch.device(wanted).type == DEVICE.type:
        host_kwargs = {**host_kwargs, "device": torch.device("cpu")}
    if func is torch.ops.aten.copy_.default:
        stays = isinstance(args[0], DeviceTensor)
    out = func(*host_args, **host_kwargs)
    if not stays:
        return out
    out = tree_map(lambda value: _placed(func, value), out)
    return return_and_correct_aliasing(func, args, kwargs, out)


def _placed(func: Any, value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    _refuse(value, str(func))
    return DeviceTensor(value)


def _refuse(tensor: Tensor, where: str = "a copy") -> None:
    if tensor.dtype in (torch.float64, torch.complex128):
        raise TypeError(f"{where}: float64 on a device that does not support it")


def cases() -> dict[str, Callable[[Callable[[Tensor], Tensor]], Any]]:
    """What training, evaluation and reports compute on the device, by name; each is told how to place a tensor."""
    draw = torch.Generator().manual_seed(0)
    labels = torch.arange(120) % 4
    features = torch.eye(4).repeat(30, 2) + 0.7 * torch.randn(120, 8, generator=draw)
    z1, z2 = features[:24], features[:24] + 0.2 * torch.randn(24, 8, generator=draw)

    def probe(place: Place) -> Any:
        sets = place(features), place(labels), place(features), place(labels)
        found = hn.linear_probe(*sets)
        return found.accuracy, found.note, found.weight.cpu()

    def judged(place: Place) -> Any:
        sets = place(features[:80]), place(labels[:80]), place(features[80:]), place(labels[80:])
        return dict(evaluate_features(*sets))

    def machine(place: Place) -> Any:
        return svm_accuracy(place(features), place(labels), folds=3, inner_folds=2).accuracies.tolist()

    def folded(place: Place) -> Any:
        found = logistic_accuracy(place(features), place(labels), folds=3)
        return found.accuracies, nearest_accuracy(place(features), place(labels), folds=3)

    def diagnosed(place: Place) -> Any:
        histograms = cosine_histograms(place(features), place(labels), bins=10)
        hardest = hardest_negatives(place(features), place(torch.arange(5)), k=3)
        return (
            alignment(place(z1), place(z2)),
            uniformity(place(z1)),
            histograms.same,
            histograms.same_mean,
            histograms.different_mean,
            hardest.indices.cpu(),
        )

    def measured(place: Place) -> Any:
        first, second, known = place(z1), place(z2), place(labels[:24])
        loss = hn.hcl()
        loss(first, second)
        shares = gradient_shares(loss, first, second, torch.arange(4))
        found = loss_ordering(first, second, labels[:24], temperature=0.5)
        assert found is not None
        numbers = (uniformity_estimate(first), alignment_estimate(first, second), shares.of_largest(3), found.ucl)
        means = (class_means(first, known), class_means(first, labels[:24], centered=True))
        suspects = suspected_false_negatives(first, known, k=3, count=5)
        occurrences = hubs(first, 5).counts.cpu()
        return [each.value for each in numbers], [each.deviation for each in means], occurrences, suspects.pairs

    def batches(place: Place) -> Any:
        allowed = labels[:24, None] != labels[:24]
        return mean_cosine(place(z1)), cosine_histogram(place(z1), bins=9, allowed=place(allowed))[0]

    def clustered(place: Place) -> Any:
        clusters = hn.Clusters(k=4, repeats=2, backend="torch").fit(place(features))
        return clusters.same(torch.arange(3))

    def graph(place: Place) -> Any:
        return hn.ProximityGraph.build(place(features), candidates=60, neighbors=5).neighbors.cpu()

    def nodes(place: Place) -> Any:
        star = torch.tensor([[0, 1, 0, 2, 3, 4], [1, 0, 2, 0, 4, 3]])
        owner = torch.tensor([0, 0, 0, 1, 1])
        return equivalent_nodes(place(torch.ones(5, 1)), place(star), place(owner), hops=2).cpu()

    def rewired(place: Place) -> Any:
        star = torch.tensor([[0, 1, 0, 2, 3, 4], [1, 0, 2, 0, 4, 3]])
        owner = torch.tensor([0, 0, 0, 1, 1])
        views = []
        for kind in ("perturb_edges", "subgraph", "drop_nodes", "mask_attributes"):
            batch = assemble(
                place(torch.arange(5.0)[:, None]), place(star), place(owner), place(torch.tensor([0, 3, 5])), {}, {}, {}
            )
            seen = GraphViews(kind, kind)(batch, torch.Generator().manual_seed(0))
            assert int(seen.edge_index.max()) < len(seen.x)
            views.append(len(seen.x) > 0)
        return views

    def pictures(place: Place) -> Any:
        images = (torch.rand(4, 3, 8, 8, generator=torch.Generator().manual_seed(1)) * 255).to(torch.uint8)
        return simclr_views(8).plain(place(images)).cpu()

    def summed(place: Place) -> Any:
        total = None
        for number in range(5):
            total = running_sum(total, place(torch.tensor(0.1 * number)))
        resumed = running_sum(torch.tensor(7.0, dtype=torch.float64), place(torch.tensor(0.5)))
        assert total is not None
        return float(total), float(resumed)

    def nodes_and_graphs(place: Place) -> Any:
        given = place(z1.clone().requires_grad_())
        value = hn.JSD(beta=1.0)(given, place(z2[:6]), place(torch.arange(24) // 4))
        value.backward()
        return value.detach().cpu(), given.grad.cpu()  # type: ignore[union-attr]

    def aggregated(place: Place) -> Any:
        clusters = hn.Clusters(k=4, repeats=2, backend="torch").fit(features)
        given = place(z1.clone().requires_grad_())
        value = hn.LocalAggregation(background=40)(given, place(features), place(torch.arange(24)), clusters)
        value.backward()
        return value.detach().cpu(), given.grad.cpu()  # type: ignore[union-attr]

    def objective(name: str, backend: str, place: Place) -> Any:
        options, names = processes.settings()[name]
        whole = {
            key: value.float() if value.is_floating_point() else value for key, value in processes.inputs().items()
        }
        views = [place(whole[view].requires_grad_()) for view in ("z1", "z2")]
        given: dict[str, Any] = {key: whole[key] for key in names if "bank" not in names}
        if "bank" in names:
            given = processes.sources(whole, slice(None), names)
        placed = tree_map_only(Tensor, place, given)
        loss = hn.InfoNCE(**options, backend=backend)
        value = loss(*views, **placed)
        (value.mean() if value.dim() else value).backward()
        return value.detach().cpu(), *(view.grad.cpu() for view in views), loss.diagnostics()  # type: ignore[union-attr]

    found: dict[str, Callable[[Place], Any]] = {
        "linear probe": probe,
        "all metrics": judged,
        "support vector machine": machine,
        "sentences by folds": folded,
        "diagnostics of embeddings": diagnosed,
        "diagnostics of training": measured,
        "hardness of batches": batches,
        "clusters": clustered,
        "proximity graph": graph,
        "equivalent nodes": nodes,
        "views of graphs": rewired,
        "plain images": pictures,
        "sum of losses": summed,
        "JSD": nodes_and_graphs,
        "local aggregation": aggregated,
    }
    for name in processes.settings():
        if name not in ("learnable temperature", "other view", "symmetric", "draws"):  # parameters stay on the host
            for backend in ("reference", "tiled"):
                found[f"{name}, {backend}"] = partial(objective, name, backend)
    return found


def main() -> None:
    """Print, by case, the error that the device raised, or how its result differs from the host's; else nothing."""
    matmul.WITHOUT_FLOAT64.add(DEVICE.type)
    failures = {}
    for name, case in cases().items():
        expected = case(lambda tensor: tensor)
        try:
            with emulated():
                found = case(on_device)
            assert_close(_numbers(found), _numbers(expected), rtol=1e-4, atol=1e-5)
        except Exception:
            failures[name] = traceback.format_exc().splitlines()[-12:]
    print(json.dumps({"cases": len(cases()), "failures": failures}))


def _numbers(found: Any) -> list[Any]:
    return [value for value in tree_flatten(found)[0] if not isinstance(value, str)]


if __name__ == "__main__":
    main()
