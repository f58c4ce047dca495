"""Loss tests of other libraries as data: inputs, settings, and which tests cannot be expressed and why.

A case is one call of a peer's loss. `scripts/peer_values.py` runs the peers and writes `values.json`; `test_peers.py`
compares with the results of `adapters.py` for the same case. This file imports neither hardneg nor a peer.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

DIRECTIONS = 3  # a gradient is stored as its norm and its inner products with this number of directions


@dataclass(frozen=True)
class Case:
    """One call of a peer's loss.

    test: the peer's test, with its parameters; a test may have several cases · loss: the peer's name for it ·
    inputs: the recipe of each argument, see `make` · fixed: inputs without gradient · dtype: in which hardneg runs; the
    peer runs in float64 · steps: of gradient descent with rate 1/2, after each of which the loss is recorded ·
    ours: settings of hardneg alone, which change no value
    """

    peer: str
    test: str
    loss: str
    settings: dict[str, Any]
    inputs: dict[str, tuple[Any, ...]]
    fixed: tuple[str, ...] = ()
    dtype: str = "float64"
    steps: int = 0
    ours: dict[str, Any] = field(default_factory=dict)

    @property
    def key(self) -> str:
        """The name of the expected value; cases that differ only in settings of hardneg share it."""
        settings = ",".join(f"{name}={value}" for name, value in self.settings.items())
        inputs = ",".join("{}={}".format(name, "/".join(map(str, recipe))) for name, recipe in self.inputs.items())
        return f"{self.peer}.{self.loss}({settings};{inputs}{f';steps={self.steps}' if self.steps else ''})"

    def tensors(self, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
        """The inputs; leaves with a gradient, unless integers or fixed."""
        made = {}
        for name, recipe in self.inputs.items():
            tensor = make(*recipe)
            if tensor.is_floating_point():
                tensor = tensor.to(dtype).requires_grad_(name not in self.fixed)
            made[name] = tensor
        return made


def make(kind: str, *details: Any) -> Tensor:
    """An input from its recipe. NumPy's legacy generator never changes its numbers."""
    if kind == "normal":  # seed, shape
        return torch.from_numpy(np.random.RandomState(details[0]).standard_normal(details[1]))
    if kind == "uniform":
        return torch.from_numpy(np.random.RandomState(details[0]).random_sample(details[1]))
    if kind == "labels":  # seed, number of classes, shape
        return torch.from_numpy(np.random.RandomState(details[0]).randint(0, details[1], details[2]))
    if kind == "parallel":  # positive multiples of one direction
        lengths = np.random.RandomState(details[0]).random_sample((details[1], 1)) + 0.1
        return torch.from_numpy(np.concatenate([lengths, 2 * lengths], axis=1))
    if kind == "angles":  # degrees; unit vectors, or points of an ellipse
        radians, (x, y) = np.radians(details[0]), (1.0, 1.0) if details[1] == "circle" else (2.0, 0.5)
        return torch.from_numpy(np.stack([x * np.cos(radians), y * np.sin(radians)], axis=1))
    if kind == "values":
        return torch.tensor(details[0], dtype=torch.float64)
    if kind == "integers":
        return torch.tensor(details[0])
    raise ValueError(f"kind={kind!r}")


def summary(gradient: Tensor) -> list[float]:
    """The norm of a gradient, and its inner products with some fixed directions."""
    numbers = gradient.detach().double().cpu()
    directions = [make("normal", 90 + i, tuple(numbers.shape)) for i in range(DIRECTIONS)]
    return [float(numbers.norm()), *(float((numbers * direction).sum()) for direction in directions)]


def cases() -> list[Case]:
    """All cases of all peers."""
    return [*_lightly(), *_metric_learning(), *_sentence_transformers(), *_solo_learn()]


def _lightly() -> Iterator[Case]:
    file = "tests/loss/test_ntx_ent_loss.py"
    for n, dim, t, gather in itertools.product([1, 2, 4], [1, 2, 16, 64], [0.1, 1, 10], [False, True]):
        test = f"{file}::test_with_values[{gather}-{t}-{dim}-{n}]"
        views = {"z1": ("normal", n + dim, (n, dim)), "z2": ("normal", n + dim + 100, (n, dim))}
        for inputs in (views, {"z1": views["z2"], "z2": views["z1"]}):  # both ways round
            yield Case("lightly", test, "NTXentLoss", {"temperature": t}, inputs, ours={"gather": gather})
    grid = itertools.product([1, 2, 8, 16], [0, 1, 2, 8, 15, 16, 17], [0.1, 1, 7], [False, True])
    for n, bank, t, gather in grid:
        test = f"{file}::test_with_correlated_embedding[{gather}-{t}-{bank}-{n}]"
        inputs = {"z1": ("parallel", n, n), "z2": ("parallel", n + 50, n)}
        settings = {"temperature": t, **({"filled_bank": bank} if bank else {})}
        yield Case("lightly", test, "NTXentLoss", settings, inputs, ours={"gather": gather})
    for size in range(1, 20):
        for name, dim in (("", 32), ("_1d", 1)):
            views = {"z1": ("normal", size, (size, dim)), "z2": ("normal", size + 20, (size, dim))}
            for inputs in (views, {"z1": views["z2"], "z2": views["z1"]}):
                yield Case("lightly", f"{file}::test_forward_pass{name}", "NTXentLoss", {"temperature": 0.5}, inputs)
        inputs = {
            "z1": ("normal", size, (size, 32)),
            "z2": ("normal", size + 20, (size, 32)),
            "negatives": ("normal", 60, (64, 32)),
        }
        yield Case(
            "lightly", f"{file}::test_forward_pass_memory_bank", "NTXentLoss", {"temperature": 0.5}, inputs,
            fixed=("negatives",),
        )  # fmt: skip
    file = "tests/loss/test_dcl_loss.py"
    for n, dim, t, gather in itertools.product([2, 3], [1, 3], [0.1, 0.5, 1.0], [False, True]):
        test = f"{file}::test_dclloss_forward__no_weight_fn[{gather}-{t}-{dim}-{n}]"
        views = {"z1": ("uniform", n + dim, (n, dim)), "z2": ("uniform", n + dim + 100, (n, dim))}
        for inputs in (views, {"z1": views["z2"], "z2": views["z1"]}):
            yield Case("lightly", test, "DCLLoss", {"temperature": t}, inputs, ours={"gather": gather})
    for n, dim, t in itertools.product([3, 4], [5, 7], [0.1, 0.5]):
        inputs = {"z1": ("normal", n + dim, (n, dim)), "z2": ("normal", n + dim + 100, (n, dim))}
        yield Case(
            "lightly", f"{file}::test_dclloss_matches_reference[{t}-{dim}-{n}]", "DCLLoss", {"temperature": t}, inputs
        )
    inputs = {"x1": ("uniform", 1, (3, 5)), "x2": ("uniform", 2, (3, 5)), "layer": ("normal", 3, (5, 5))}
    yield Case(
        "lightly", f"{file}::test_dclloss_backprop", "DCLLoss of a layer", {"temperature": 0.1}, inputs,
        fixed=("x1", "x2"),
    )  # fmt: skip


def _metric_learning() -> Iterator[Case]:
    peer, file = "pytorch-metric-learning", "tests/losses/test_ntxent_loss.py"
    six = {"z": ("angles", (0, 10, 20, 50, 60, 80), "circle"), "labels": ("integers", (0, 0, 0, 1, 1, 2))}
    five = {"z": ("angles", (0, 20, 40, 60, 80), "ellipse"), "labels": ("integers", (0, 0, 1, 1, 2))}
    references = {
        "z": ("normal", 1, (4, 32)), "labels": ("integers", (0, 0, 1, 1)),
        "reference": ("normal", 2, (3, 32)), "reference_labels": ("integers", (0, 1, 2)),
    }  # fmt: skip
    empty = [
        {"z": ("angles", angles, "ellipse"), "labels": ("integers", labels)}
        for angles, labels in (((0,), (0,)), ((0, 10, 20), (0, 0, 0)), ((0, 40, 60), (1, 2, 3)))
    ]
    for dtype, loss in itertools.product(
        ["float16", "float32", "float64"], ["NTXentLoss", "NTXentLoss per anchor", "SupConLoss"]
    ):
        settings = {"temperature": 0.1}
        yield Case(peer, f"{file}::test_ntxent_loss[{loss}-{dtype}]", loss, settings, six, dtype=dtype)
        yield Case(peer, f"{file}::test_ntxent_loss_with_ref[{loss}-{dtype}]", loss, settings, references, dtype=dtype)
        if loss != "NTXentLoss per anchor":
            for number, inputs in enumerate(empty):
                test = f"{file}::test_with_no_valid_pairs[{loss}-{dtype}-{number}]"
                yield Case(peer, test, loss, settings, inputs, dtype=dtype)
            yield Case(peer, f"{file}::test_backward[{loss}-{dtype}]", loss, settings, five, dtype=dtype)
    for dtype in ["float16", "float32", "float64"]:
        file = "tests/losses/test_nca_loss.py"
        yield Case(peer, f"{file}::test_nca_loss[{dtype}]", "NCALoss", {"softmax_scale": 10}, five, dtype=dtype)
        for angles in ((0, 20), (0,)):
            inputs = {"z": ("angles", angles, "ellipse"), "labels": ("integers", (0,) * len(angles))}
            test = f"{file}::test_zero_loss[{len(angles)}-{dtype}]"
            yield Case(peer, test, "NCALoss", {"softmax_scale": 10}, inputs, dtype=dtype)
        seven = {
            "z": ("angles", tuple(range(0, 140, 20)), "ellipse"),
            "labels": ("integers", (0, 0, 1, 1, 1, 2, 3)),
        }
        for name in ("test_npairs_loss", "test_backward"):
            test = f"tests/losses/test_npairs_loss.py::{name}[{dtype}]"
            yield Case(peer, test, "NPairsLoss", {}, seven, dtype=dtype)
        views = {"z1": ("normal", 5, (100, 256)), "z2": ("normal", 6, (100, 256))}
        for loss, symmetric in itertools.product(["NTXentLoss", "SupConLoss", "NCALoss"], [True, False]):
            test = f"tests/losses/test_self_supervised_loss.py::test_ssl_wrapper_all[{loss}-{symmetric}-{dtype}]"
            yield Case(peer, test, f"SelfSupervisedLoss({loss})", {"symmetric": symmetric}, views, dtype=dtype)
        file = "tests/losses/test_cross_batch_memory.py"
        for size in range(20, 40, 5):  # a memory of one batch is the loss of that batch
            inputs = {"z": ("normal", size, (size, 128)), "labels": ("labels", size, 4, size)}
            test = f"{file}::test_sanity_check[without miner or mask-{size}-{dtype}]"
            yield Case(peer, test, "NTXentLoss in a memory", {"temperature": 0.1}, inputs, dtype=dtype)
        for loss, batches in itertools.product(["NTXentLoss", "SupConLoss"], [1, 2, 5, 10]):
            inputs = {"z": ("normal", 8, (32 * batches, 128)), "labels": ("labels", 9, 10, 32 * batches)}
            test = f"{file}::test_all_losses[{loss}-{dtype}]"
            yield Case(peer, test, f"{loss} with memory", {"batch": 32}, inputs, dtype=dtype)
    inputs = {"z": ("normal", 3, (64, 32)), "labels": ("labels", 4, 10, 64)}
    for loss, pairs in itertools.product(["NTXentLoss", "SupConLoss"], ["all", "MultiSimilarityMiner"]):
        test = f"tests/losses/test_losses_without_labels.py::test[{loss}-{pairs}]"
        yield Case(peer, test, f"{loss} of pairs", {"pairs": pairs}, inputs)
    half_circle = {
        "z": ("angles", tuple(range(180)), "ellipse"), "labels": ("labels", 12, 10, 180),
        "proxies": ("normal", 13, (10, 2)),
    }  # fmt: skip
    for dtype in ["float16", "float32", "float64"]:
        test = f"tests/losses/test_normalized_softmax_loss.py::test_normalized_softmax_loss[{dtype}]"
        yield Case(peer, test, "NormalizedSoftmaxLoss", {"temperature": 0.1}, half_circle, dtype=dtype)
        test = f"tests/losses/test_proxy_nca_loss.py::test_proxy_nca_loss[{dtype}]"
        settings = {"softmax_scale": 1 if dtype == "float16" else 10}
        yield Case(peer, test, "ProxyNCALoss", settings, half_circle, dtype=dtype)


def _sentence_transformers() -> Iterator[Case]:
    peer, folder = "sentence-transformers", "tests/sentence_transformer/losses"

    def columns(number: int, rows: int, dim: int = 24) -> dict[str, tuple[Any, ...]]:
        return {name: ("normal", rows + i, (rows, dim)) for i, name in enumerate(["z1", "z2", "negatives"][:number])}

    ranking = "MultipleNegativesRankingLoss"
    for scaler in (1.0, 1000.0):
        for cached in (False, True):
            yield Case(
                peer, f"{folder}/test_cmnrl.py::test_cmnrl_same_grad[{scaler}]", ranking,
                {"scale": 20.0, "scaler": scaler}, columns(3, 5), ours={"cached": 2 if cached else None},
            )  # fmt: skip
    different = f"{folder}/test_cmnrl.py::test_cmnrl_same_grad[other texts]"
    yield Case(peer, different, ranking, {"scale": 20.0}, columns(3, 3), ours={"cached": 2})
    yield Case(peer, different, ranking, {"scale": 20.0}, columns(3, 5), ours={"cached": 2})
    file = f"{folder}/test_gradcache.py"
    for chunk in (2, 3, 5, 50):
        test = f"{file}::test_gradcache_matches_the_wrapped_loss[mnrl-{chunk}]"
        yield Case(peer, test, ranking, {"scale": 20.0}, columns(2, 7), ours={"cached": chunk})
    for number, settings in enumerate([{"scale": 20.0}, {"scale": 50.0, "symmetric": True}]):
        test = f"{file}::test_gradcache_matches_cached_mnrl[config{number}]"
        yield Case(peer, test, ranking, settings, columns(2, 7), ours={"cached": 3})
    for steps in (2, 4):
        test = f"{file}::test_gradcache_scales_with_the_outer_backward[{steps}]"
        settings = {"scale": 20.0, "scaler": 1 / steps}
        yield Case(peer, test, ranking, settings, columns(2, 6), ours={"cached": 2})
    for training in (True, False):
        test = f"{file}::test_gradcache_under_no_grad[{training}]"
        yield Case(peer, test, ranking, {"scale": 20.0}, columns(2, 6), fixed=("z1", "z2"))
    # A candidate lies closer to the first anchor (−.49) than its positive (−.50), and the positive's score is negative.
    first, positive, other = [1.0, 0.0, 0.0], [-0.5, 0.75**0.5, 0.0], [-0.49, 0.0, (1 - 0.49**2) ** 0.5]
    inputs = {"z1": ("values", (first, other)), "z2": ("values", (positive, other))}
    test = (
        f"{folder}/test_cached_gist_embed.py::test_relative_margin_negative_positive_score_suppresses_closer_negative"
    )
    settings = {"temperature": 0.01, "margin_strategy": "relative", "margin": 0.05, "contrast_anchors": False}
    for guided in (True, False):
        yield Case(peer, test, "GISTEmbedLoss", settings, inputs, ours={"guided": guided})
    # Not a test of the peer: the loss without scores between positives, which hardneg has.
    for number, strategy, margin, anchors in itertools.product(
        [2, 3], ["absolute", "relative"], [0.0, 0.1], [True, False]
    ):
        settings = {
            "temperature": 0.05, "margin_strategy": strategy, "margin": margin, "contrast_anchors": anchors,
        }  # fmt: skip
        test = f"beyond their tests::gist[{number}-{strategy}-{margin}-{anchors}]"
        yield Case(peer, test, "GISTEmbedLoss", settings, columns(number, 8, dim=6), ours={"guided": True})


def _solo_learn() -> Iterator[Case]:
    views = {"z1": ("normal", 21, (32, 128)), "z2": ("normal", 22, (32, 128))}
    queue = {**views, "queue": ("normal", 23, (128, 15000))}
    for name, inputs, fixed in (
        ("simclr", views, ()),
        ("mocov2plus", queue, ("queue",)),
        ("mocov3", views, ()),
        ("nnclr", views, ("z1",)),
    ):
        test = f"tests/losses/test_{name}.py::test_{name}_loss"
        settings = {"temperature": 0.1}
        yield Case("solo-learn", test, f"{name}_loss_func", settings, inputs, fixed=fixed, steps=20)


# Tests of losses of this kind that are not expressed: peer, test, how many with their parameters, why not.
NOT_EXPRESSED: list[tuple[str, str, int, str]] = [
    ("lightly", "test_ntx_ent_loss.py::test__gather_distributed*", 2, "check a mock in their constructor"),
    ("lightly", "test_ntx_ent_loss.py::test_forward_pass_neg_temp", 1, "a temperature ≤ 0 is refused"),
    ("lightly", "test_ntx_ent_loss.py::test_forward_pass*_cuda", 2, "the same calls on a GPU; skipped without a GPU"),
    ("lightly", "test_dcl_loss.py::test__gather_distributed*", 2, "check a mock in their constructor"),
    ("lightly", "test_dcl_loss.py::test_negative_mises_fisher_weights", 3, "no weight on the positive's term alone"),
    ("lightly", "test_dcl_loss.py::test_dclloss_forward", 24, "no weight on the positive's term alone"),
    ("lightly", "test_dcl_loss.py::test_dclwloss_forward", 1, "no weight on the positive's term alone"),
    ("lightly", "test_macl_loss.py", 84, "the temperature depends on the batch, and anchors are reweighted"),
    ("pytorch-metric-learning", "test_ntxent_loss.py, with LpDistance", 36, "scores are products, not distances"),
    ("pytorch-metric-learning", "test_npairs_loss.py, with a regularizer", 6, "no regularizer of embeddings"),
    ("pytorch-metric-learning", "test_npairs_loss.py::test_with_no_valid_pairs", 3, "an empty batch is refused"),
    ("pytorch-metric-learning", "test_self_supervised_loss.py, other losses", 60, "triplet and margin losses"),
    ("pytorch-metric-learning", "test_cross_batch_memory.py::test_sanity_check, miner or mask", 36,
     "a miner repeats pairs, which weights them; queries that are not stored"),
    ("pytorch-metric-learning", "test_cross_batch_memory.py, other tests", 61, "indices of their memory; other losses"),
    ("pytorch-metric-learning", "test_losses_without_labels.py, TripletMarginMiner", 2,
     "a miner repeats pairs, which weights them"),
    ("pytorch-metric-learning", "test_instance_loss.py", 3, "rows of the batch serve as class weights"),
    ("sentence-transformers", "test_cmnrl.py::test_rand_context_working", 2, "checks their store of random states"),
    ("sentence-transformers", "test_multiple_negatives_bidirectional_ranking_loss.py", 2,
     "one denominator holds scores of two anchors"),
    ("sentence-transformers", "test_gradcache.py::test_gradcache_matches_cached_mnrl[config2]", 1,
     "hardness weights that are not normalized"),
    ("sentence-transformers", "test_gradcache.py, other tests", 38, "other losses, and errors of their wrapper"),
    ("sentence-transformers", "test_gist_embed.py", 3,
     "adds scores between positives, which are not scores of the anchor"),
    ("sentence-transformers", "test_cached_gist_embed.py, other tests", 17,
     "adds scores between positives, which are not scores of the anchor; tokenizers"),
]  # fmt: skip
# Loss tests of other kinds of objective: peer, number of test files.
OTHER_OBJECTIVES = {"lightly": 27, "pytorch-metric-learning": 26, "sentence-transformers": 19, "solo-learn": 9}
