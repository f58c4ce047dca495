"""Run the losses of other libraries on the cases of tests/peers, and write their values and gradients.

In an environment of its own, with torch, numpy, lightly, pytorch-metric-learning, sentence-transformers and solo-learn:

    python scripts/peer_values.py tests/peers/values.json

Everything runs in float64. solo-learn's package imports more than its losses need, so only its loss files are loaded;
its MoCo v3 loss, which the published package lacks, is computed by its formula, 2t times a cross entropy.
"""

import importlib.metadata
import importlib.util
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, normalize

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from peers.peer_cases import Case, cases, summary

Inputs = dict[str, Tensor]
Run = Callable[[dict[str, Any], Inputs], Tensor]
PEERS = ("lightly", "pytorch-metric-learning", "sentence-transformers", "solo-learn")
CLOSED_FORM = "MoCo v3 of solo-learn by its formula"


def declare_torchvision() -> None:
    """Import torchvision if its binary does not fit torch: declare the missing operators. No loss needs them."""
    library = torch.library.Library("torchvision", "DEF")
    while True:
        try:
            import torchvision  # noqa: F401
        except RuntimeError as error:
            missing = re.search(r"operator torchvision::(\w+) does not exist", str(error))
            if missing is None:
                raise
            library.define(f"{missing[1]}(Tensor x) -> Tensor")
            for name in [name for name in sys.modules if name.startswith("torchvision")]:
                del sys.modules[name]
        else:
            globals()["_torchvision_library"] = library  # operators exist as long as it does
            return


def lightly() -> dict[str, Run]:
    """The losses of lightly."""
    declare_torchvision()
    from lightly.loss import DCLLoss, NTXentLoss

    def nt_xent(settings: dict[str, Any], inputs: Inputs) -> Tensor:
        z1, z2, t = inputs["z1"], inputs["z2"], settings["temperature"]
        if "filled_bank" in settings:
            size = settings["filled_bank"]
            loss = NTXentLoss(t, memory_bank_size=(size, z1.shape[1])).double()
            for _ in range(size // len(z1) + 1):
                loss(z1, z2)
            return loss(z1, z2)
        if "negatives" in inputs:
            loss = NTXentLoss(t, memory_bank_size=tuple(inputs["negatives"].shape)).double()
            loss.memory_bank.bank = normalize(inputs["negatives"], dim=1)
            return loss(z1, z2)
        return NTXentLoss(t)(z1, z2)

    def of_layer(settings: dict[str, Any], inputs: Inputs) -> Tensor:
        return DCLLoss(settings["temperature"])(inputs["x1"] @ inputs["layer"].T, inputs["x2"] @ inputs["layer"].T)

    return {
        "NTXentLoss": nt_xent,
        "DCLLoss": lambda settings, inputs: DCLLoss(settings["temperature"])(inputs["z1"], inputs["z2"]),
        "DCLLoss of a layer": of_layer,
    }


def metric_learning() -> dict[str, Run]:
    """The losses of pytorch-metric-learning."""
    from pytorch_metric_learning import losses
    from pytorch_metric_learning.distances import DotProductSimilarity
    from pytorch_metric_learning.miners import MultiSimilarityMiner
    from pytorch_metric_learning.reducers import AvgNonZeroReducer, PerAnchorReducer
    from pytorch_metric_learning.utils.loss_and_miner_utils import get_all_pairs_indices

    def labelled(make: Callable[..., Any], **fixed: Any) -> Run:
        def run(settings: dict[str, Any], inputs: Inputs) -> Tensor:
            reference = {"ref_emb": inputs.get("reference"), "ref_labels": inputs.get("reference_labels")}
            return make(**settings, **fixed)(inputs["z"], inputs["labels"], **reference)

        return run

    def in_memory(settings: dict[str, Any], inputs: Inputs) -> Tensor:
        rows, dim = inputs["z"].shape
        memory = losses.CrossBatchMemory(losses.NTXentLoss(**settings), dim, memory_size=rows)
        value: Tensor = memory(inputs["z"], inputs["labels"])
        return value

    def with_memory(make: Callable[..., Any]) -> Run:
        def run(settings: dict[str, Any], inputs: Inputs) -> Tensor:
            memory = losses.CrossBatchMemory(make(), inputs["z"].shape[1], memory_size=321)
            for z, labels in zip(
                inputs["z"].split(settings["batch"]), inputs["labels"].split(settings["batch"]), strict=True
            ):
                value: Tensor = memory(z, labels)
            return value

        return run

    def of_pairs(make: Callable[..., Any]) -> Run:
        def run(settings: dict[str, Any], inputs: Inputs) -> Tensor:
            z, labels = inputs["z"], inputs["labels"]
            pairs = get_all_pairs_indices(labels) if settings["pairs"] == "all" else MultiSimilarityMiner()(z, labels)
            value: Tensor = make()(z, indices_tuple=pairs)
            return value

        return run

    def self_supervised(make: Callable[..., Any]) -> Run:
        return lambda settings, inputs: losses.SelfSupervisedLoss(make(), **settings)(inputs["z1"], inputs["z2"])

    def by_proxies(settings: dict[str, Any], inputs: Inputs, name: str) -> Tensor:
        classes, dim = inputs["proxies"].shape
        more = {"distance": DotProductSimilarity(normalize_embeddings=False)} if name == "W" else {}
        loss = (losses.NormalizedSoftmaxLoss if name == "W" else losses.ProxyNCALoss)(classes, dim, **settings, **more)
        loss.cast_types = lambda *_: None  # it would detach the parameter that replaces its own
        del loss._parameters[name]
        setattr(loss, name, inputs["proxies"].T if name == "W" else inputs["proxies"])
        value: Tensor = loss(inputs["z"], inputs["labels"])
        return value

    return {
        "NTXentLoss": labelled(losses.NTXentLoss),
        "NTXentLoss per anchor": labelled(losses.NTXentLoss, reducer=PerAnchorReducer(AvgNonZeroReducer())),
        "SupConLoss": labelled(losses.SupConLoss),
        "NCALoss": labelled(losses.NCALoss),
        "NPairsLoss": labelled(losses.NPairsLoss),
        "SelfSupervisedLoss(NTXentLoss)": self_supervised(losses.NTXentLoss),
        "SelfSupervisedLoss(SupConLoss)": self_supervised(losses.SupConLoss),
        "SelfSupervisedLoss(NCALoss)": self_supervised(losses.NCALoss),
        "NTXentLoss in a memory": in_memory,
        "NTXentLoss with memory": with_memory(losses.NTXentLoss),
        "SupConLoss with memory": with_memory(losses.SupConLoss),
        "NTXentLoss of pairs": of_pairs(losses.NTXentLoss),
        "SupConLoss of pairs": of_pairs(losses.SupConLoss),
        "NormalizedSoftmaxLoss": lambda settings, inputs: by_proxies(settings, inputs, "W"),
        "ProxyNCALoss": lambda settings, inputs: by_proxies(settings, inputs, "proxies"),
    }


def sentence_transformers() -> dict[str, Run]:
    """The losses of sentence-transformers, computed from embeddings."""
    from sentence_transformers.sentence_transformer.losses import CachedGISTEmbedLoss, MultipleNegativesRankingLoss

    def columns(inputs: Inputs) -> list[Tensor]:
        return [inputs[name] for name in ("z1", "z2", "negatives") if name in inputs]

    def ranking(settings: dict[str, Any], inputs: Inputs) -> Tensor:
        more = {}
        if settings.get("symmetric"):
            more = {"directions": ("query_to_doc", "doc_to_query"), "partition_mode": "per_direction"}
        loss = MultipleNegativesRankingLoss(torch.nn.Identity(), scale=settings["scale"], **more)
        value: Tensor = loss.compute_loss_from_embeddings(columns(inputs), None)
        return value * settings.get("scaler", 1.0)

    def gist(settings: dict[str, Any], inputs: Inputs) -> Tensor:
        loss = CachedGISTEmbedLoss.__new__(CachedGISTEmbedLoss)  # its constructor needs models with tokenizers
        torch.nn.Module.__init__(loss)
        loss.similarity_fct = torch.nn.CosineSimilarity(dim=-1)
        loss.cross_entropy_loss = torch.nn.CrossEntropyLoss()
        loss.mini_batch_size, loss.show_progress_bar, loss.gather_across_devices = 32, False, False
        loss.contrast_positives = False
        for name, value in settings.items():
            setattr(loss, name, value)
        found: Tensor = loss.calculate_loss(
            [[column] for column in columns(inputs)], [[column.detach()] for column in columns(inputs)]
        )
        return found

    return {"MultipleNegativesRankingLoss": ranking, "GISTEmbedLoss": gist}


def solo_learn() -> dict[str, Run]:
    """The losses of solo-learn."""

    def load(name: str) -> Any:
        (path,) = (f for f in importlib.metadata.files("solo-learn") or [] if str(f) == f"solo/losses/{name}.py")
        spec = importlib.util.spec_from_file_location(name, str(path.locate()))
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    simclr, moco, nnclr = (load(name) for name in ("simclr", "moco", "nnclr"))

    def moco_v3(settings: dict[str, Any], inputs: Inputs) -> Tensor:
        t, queries, keys = settings["temperature"], normalize(inputs["z1"], dim=1), normalize(inputs["z2"], dim=1)
        return 2 * t * cross_entropy(queries @ keys.T / t, torch.arange(len(queries)))

    return {
        "simclr_loss_func": lambda settings, inputs: simclr.simclr_loss_func(inputs["z1"], inputs["z2"], **settings),
        "mocov2plus_loss_func": lambda settings, inputs: moco.moco_loss_func(
            inputs["z1"], inputs["z2"], inputs["queue"], **settings
        ),
        "mocov3_loss_func": moco_v3,
        "nnclr_loss_func": lambda settings, inputs: nnclr.nnclr_loss_func(inputs["z1"], inputs["z2"], **settings),
    }


def expected(case: Case, run: Run) -> dict[str, Any]:
    """The loss, or the losses of several optimizer steps, and the first gradient with respect to each input."""
    inputs = case.tensors()
    leaves = {name: tensor for name, tensor in inputs.items() if tensor.requires_grad}
    found: dict[str, Any] = {"values": [], "gradients": {}}
    for step in range(case.steps + 1):
        value = run(case.settings, inputs)
        found["values"].append(float(value.detach()))
        if not leaves:
            return found
        gradients = torch.autograd.grad(value, list(leaves.values()), allow_unused=True)
        gradients = tuple(
            torch.zeros_like(leaf) if gradient is None else gradient
            for leaf, gradient in zip(leaves.values(), gradients, strict=True)
        )
        if step == 0:
            found["gradients"] = dict(zip(leaves, map(summary, gradients), strict=True))
        with torch.no_grad():
            for leaf, gradient in zip(leaves.values(), gradients, strict=True):
                leaf -= 0.5 * gradient
    return found


def main(path: str) -> None:
    """Write all values to ``path``."""
    runs = {
        name: make()
        for name, make in zip(PEERS, (lightly, metric_learning, sentence_transformers, solo_learn), strict=True)
    }
    versions = {name: importlib.metadata.version(name) for name in ("torch", "numpy", *PEERS)}
    about = {"made by": "scripts/peer_values.py", "float64 on": versions, "note": CLOSED_FORM}
    values = {}
    for case in cases():
        if case.key not in values:
            values[case.key] = expected(case, runs[case.peer][case.loss])
    lines = [f" {json.dumps(key)}: {json.dumps(value)}" for key, value in values.items()]
    text = '{"about": ' + json.dumps(about) + ',\n"values": {\n' + ",\n".join(lines) + "\n}}\n"
    Path(path).write_text(text, encoding="utf-8")
    print(f"{len(values)} values of {len(cases())} cases, {len(text) / 1024:.0f} KiB")


if __name__ == "__main__":
    main(sys.argv[1])
