"""The code that a user of hardneg writes for each loss of the peers."""

from collections.abc import Callable
from typing import Any

import torch
from peers.peer_cases import Case
from torch import Tensor
from torch.nn.functional import normalize

import hardneg as hn

Inputs = dict[str, Tensor]
Adapter = Callable[[Case, Inputs], Tensor]


def nt_xent(case: Case, inputs: Inputs) -> Tensor:
    z1, z2, t = inputs["z1"], inputs["z2"], case.settings["temperature"]
    if (size := case.settings.get("filled_bank")) is not None:
        queue = hn.Queue(size, z1.shape[1], dtype=z1.dtype)
        while len(queue) < size:
            queue.enqueue(z2)
        return hn.moco(t, **case.ours)(z1, z2, negatives=queue.keys)  # type: ignore[no-any-return]
    if "negatives" in inputs:
        return hn.moco(t)(z1, z2, negatives=inputs["negatives"])  # type: ignore[no-any-return]
    return hn.simclr(t, **case.ours)(z1, z2)  # type: ignore[no-any-return]


def decoupled(case: Case, inputs: Inputs) -> Tensor:
    return hn.decoupled(case.settings["temperature"], **case.ours)(inputs["z1"], inputs["z2"])  # type: ignore[no-any-return]


def decoupled_of_layer(case: Case, inputs: Inputs) -> Tensor:
    z1, z2 = (inputs[name] @ inputs["layer"].T for name in ("x1", "x2"))
    return hn.decoupled(case.settings["temperature"])(z1, z2)  # type: ignore[no-any-return]


def labelled(**options: Any) -> Adapter:
    """Positives by label in one view, or in reference embeddings with one positive for each anchor."""

    def run(case: Case, inputs: Inputs) -> Tensor:
        temperature = case.settings["temperature"]
        z, labels = inputs["z"], inputs["labels"]
        if "reference" not in inputs:
            return hn.InfoNCE(temperature, supervision="full", **options)(z, labels=labels)  # type: ignore[no-any-return]
        reference, reference_labels = inputs["reference"], inputs["reference_labels"]
        own = (labels[:, None] == reference_labels).int().argmax(dim=1)
        loss = hn.InfoNCE(temperature, in_batch=None, supervision="negatives", **options)
        return loss(  # type: ignore[no-any-return]
            z, reference[own], labels=labels, negatives=reference, negative_labels=reference_labels
        )

    return run


def nca(case: Case, inputs: Inputs) -> Tensor:
    # Of unit vectors −‖a − b‖² = 2⟨a, b⟩ − 2, and the constant does not change a softmax.
    temperature = 1 / (2 * case.settings["softmax_scale"])
    return hn.InfoNCE(temperature, supervision="full")(inputs["z"], labels=inputs["labels"])  # type: ignore[no-any-return]


def n_pairs(case: Case, inputs: Inputs) -> Tensor:
    """One pair of each class that has two rows."""
    pairs = [(labels == label).nonzero()[:2, 0] for labels in [inputs["labels"]] for label in labels.unique()]
    rows = torch.stack([pair for pair in pairs if len(pair) == 2])
    return hn.simcse(temperature=1.0)(inputs["z"][rows[:, 0]], inputs["z"][rows[:, 1]])  # type: ignore[no-any-return]


def self_supervised(temperature: float) -> Adapter:
    def run(case: Case, inputs: Inputs) -> Tensor:
        loss = hn.simclr(temperature) if case.settings["symmetric"] else hn.simcse(temperature)
        return loss(inputs["z1"], inputs["z2"])  # type: ignore[no-any-return]

    return run


def of_pairs(z: Tensor, others: Tensor, positive: Tensor, negative: Tensor, temperature: float, supcon: bool) -> Tensor:
    """Positives and negatives among ``others`` (N, d) given by masks (B, N)."""
    most = int(positive.sum(dim=1).max())
    # The positives of each anchor come first; the rest is padding.
    order = positive.int().argsort(dim=1, descending=True, stable=True)[:, :most]  # (B, M)
    options: dict[str, Any] = {"combine_positives": "in_denominator"} if supcon else {"average": "pairs"}
    loss = hn.InfoNCE(temperature, in_batch=None, reduction="sum", **options)
    total = loss(z, others[order], positive_mask=positive.gather(1, order), negatives=others, negative_mask=negative)
    # The peers average over all pairs, or anchors with a loss, also over those without a negative.
    return total / (positive.any(dim=1) & negative.any(dim=1)).sum() if supcon else total / positive.sum()


def with_memory(temperature: float, supcon: bool) -> Adapter:
    """The last batch against all rows, which are its positives and negatives by label, without gradient."""

    def run(case: Case, inputs: Inputs) -> Tensor:
        z, labels = inputs["z"], inputs["labels"]
        batch = case.settings.get("batch", len(z))
        same = labels[-batch:, None] == labels
        itself = torch.arange(len(z)) == torch.arange(len(z) - batch, len(z))[:, None]
        return of_pairs(z[-batch:], z.detach(), same & ~itself, ~same, temperature, supcon)

    return run


def chosen_pairs(temperature: float, supcon: bool) -> Adapter:
    """All pairs by label, or those that lie within .1 of the other kind's hardest."""

    def run(case: Case, inputs: Inputs) -> Tensor:
        z, labels = inputs["z"], inputs["labels"]
        same = labels[:, None] == labels
        positive, negative = same & ~torch.eye(len(z), dtype=torch.bool), ~same
        if case.settings["pairs"] != "all":
            scores = normalize(z.detach(), dim=1) @ normalize(z.detach(), dim=1).T
            easiest = scores.masked_fill(~positive, torch.inf).amin(dim=1, keepdim=True)
            hardest = scores.masked_fill(~negative, -torch.inf).amax(dim=1, keepdim=True)
            positive, negative = positive & (scores - 0.1 < hardest), negative & (scores + 0.1 > easiest)
        return of_pairs(z, z, positive, negative, temperature, supcon)

    return run


def by_proxies(case: Case, inputs: Inputs) -> Tensor:
    """Proxies of the classes are positives and negatives."""
    proxies, labels = inputs["proxies"], inputs["labels"]
    if "softmax_scale" in case.settings:
        loss = hn.InfoNCE(1 / (2 * case.settings["softmax_scale"]), in_batch=None)
    else:
        loss, proxies = (
            hn.InfoNCE(case.settings["temperature"], in_batch=None, normalize=False),
            normalize(proxies, dim=1),
        )
    return loss(inputs["z"], proxies[labels], negatives=proxies, exclude=labels)  # type: ignore[no-any-return]


def ranking(case: Case, inputs: Inputs) -> Tensor:
    negatives = {"negatives": inputs["negatives"]} if "negatives" in inputs else {}
    loss = hn.simcse(1 / case.settings["scale"], symmetric=case.settings.get("symmetric", False))
    return loss(inputs["z1"], inputs["z2"], **negatives) * case.settings.get("scaler", 1.0)  # type: ignore[no-any-return]


def gist(case: Case, inputs: Inputs) -> Tensor:
    """The candidates that a guide finds closer than the positive are masked; here the guide is the model itself."""
    z1, z2, settings = inputs["z1"], inputs["z2"], case.settings
    if not case.ours["guided"]:
        band = hn.BelowPositive(relative=1 - settings["margin"])
        loss = hn.simcse(settings["temperature"], hardening=band, reduction="sum")
        return loss(z1, z2) / len(z1)  # type: ignore[no-any-return]
    candidates = [z2] + ([z1] if settings["contrast_anchors"] else [])
    candidates += [inputs["negatives"]] if "negatives" in inputs else []
    guide = normalize(z1.detach(), dim=1)
    scores = guide @ normalize(torch.cat(candidates).detach(), dim=1).T  # (B, N)
    positive = scores.diagonal()[:, None]
    margin = settings["margin"] * (positive.abs() if settings["margin_strategy"] == "relative" else 1)
    own = torch.arange(len(z1))[:, None]
    own = torch.cat([own, own + len(z1)], dim=1) if settings["contrast_anchors"] else own
    loss = hn.InfoNCE(settings["temperature"], in_batch=None, reduction="sum")  # without negatives an anchor adds 0
    total = loss(z1, z2, negatives=torch.cat(candidates), exclude=own, negative_mask=scores <= positive - margin)
    return total / len(z1)  # type: ignore[no-any-return]


def moco(case: Case, inputs: Inputs) -> Tensor:
    loss = hn.moco(case.settings["temperature"], normalize=False)
    return loss(inputs["z1"], inputs["z2"], negatives=inputs["queue"].T)  # type: ignore[no-any-return]


def moco_v3(case: Case, inputs: Inputs) -> Tensor:
    temperature = case.settings["temperature"]
    return 2 * temperature * hn.simcse(temperature)(inputs["z1"], inputs["z2"])  # type: ignore[no-any-return]


def nnclr(case: Case, inputs: Inputs) -> Tensor:
    return hn.simcse(case.settings["temperature"])(inputs["z1"], inputs["z2"])  # type: ignore[no-any-return]


ADAPTERS: dict[tuple[str, str], Adapter] = {
    ("lightly", "NTXentLoss"): nt_xent,
    ("lightly", "DCLLoss"): decoupled,
    ("lightly", "DCLLoss of a layer"): decoupled_of_layer,
    ("pytorch-metric-learning", "NTXentLoss"): labelled(average="pairs"),
    ("pytorch-metric-learning", "NTXentLoss per anchor"): labelled(),
    ("pytorch-metric-learning", "SupConLoss"): labelled(combine_positives="in_denominator"),
    ("pytorch-metric-learning", "NCALoss"): nca,
    ("pytorch-metric-learning", "NPairsLoss"): n_pairs,
    ("pytorch-metric-learning", "SelfSupervisedLoss(NTXentLoss)"): self_supervised(0.07),
    ("pytorch-metric-learning", "SelfSupervisedLoss(SupConLoss)"): self_supervised(0.1),
    ("pytorch-metric-learning", "SelfSupervisedLoss(NCALoss)"): self_supervised(0.5),
    ("pytorch-metric-learning", "NTXentLoss in a memory"): with_memory(0.1, supcon=False),
    ("pytorch-metric-learning", "NTXentLoss with memory"): with_memory(0.07, supcon=False),
    ("pytorch-metric-learning", "SupConLoss with memory"): with_memory(0.1, supcon=True),
    ("pytorch-metric-learning", "NTXentLoss of pairs"): chosen_pairs(0.07, supcon=False),
    ("pytorch-metric-learning", "SupConLoss of pairs"): chosen_pairs(0.1, supcon=True),
    ("pytorch-metric-learning", "NormalizedSoftmaxLoss"): by_proxies,
    ("pytorch-metric-learning", "ProxyNCALoss"): by_proxies,
    ("sentence-transformers", "MultipleNegativesRankingLoss"): ranking,
    ("sentence-transformers", "GISTEmbedLoss"): gist,
    ("solo-learn", "simclr_loss_func"): nt_xent,
    ("solo-learn", "mocov2plus_loss_func"): moco,
    ("solo-learn", "mocov3_loss_func"): moco_v3,
    ("solo-learn", "nnclr_loss_func"): nnclr,
}
