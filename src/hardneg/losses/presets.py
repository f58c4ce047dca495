"""Presets: the loss of each paper in one line. Every preset takes any further argument of `InfoNCE`.

A given argument replaces the preset's default. A hardening is added to the preset's own: bands intersect, a second
tilt raises; a hardening by source is for presets without one of their own. An argument that a preset renames
(``class_prior`` to ``tau_plus``) raises under its original name.
"""

import inspect
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any, Literal, ParamSpec, TypeVar

from hardneg import checks, spelling
from hardneg.losses.effective_share import EffectiveShare
from hardneg.losses.hardening import BelowPositive, Exponential, Guided, Hardening, Ring, Threshold
from hardneg.losses.infonce import InfoNCE
from hardneg.losses.jsd import JSD
from hardneg.losses.schedules import Adaptive, Linear, RingAnneal, Setting, Steps
from hardneg.losses.temperature import Learnable, check_no_gradient

Temperature = Setting | Learnable
_DETACHED = {"normalize_weights": False, "grad_through_weights": False}  # weights that are constants, not shares
_Arguments = ParamSpec("_Arguments")
_Loss = TypeVar("_Loss", InfoNCE, JSD)


def _checked(preset: Callable[_Arguments, _Loss]) -> Callable[_Arguments, _Loss]:
    """The preset, which raises a TypeError with the nearest name for an argument that it does not have."""
    own: list[str] = [name for name in inspect.signature(preset).parameters if name != "options"]
    loss: type = preset.__annotations__["return"]
    names = [*own, *inspect.signature(loss).parameters]

    @wraps(preset)
    def checked(*given: _Arguments.args, **named: _Arguments.kwargs) -> _Loss:
        for name in named:
            if name not in names:
                near = spelling.nearest(name, names)
                hint = f"did you mean {near}?" if near else f"it has {', '.join(own)} and those of {loss.__name__}"
                raise TypeError(f"{preset.__name__}() has no argument {name!r}: {hint}")
        return preset(*given, **named)

    return checked


@_checked
def simclr(temperature: Temperature = 0.5, **options: Any) -> InfoNCE:
    """SimCLR's NT-Xent (Chen et al. 2020, eq. 1): uniform negatives from both views.

    Examples:
        >>> import torch, hardneg as hn
        >>> float(hn.simclr()(torch.eye(2), torch.eye(2)))  # log(1 + 2·e⁰/e²)
        0.2395...
    """
    return InfoNCE(**{"temperature": temperature, **options})


@_checked
def debiased(tau_plus: Setting = 0.1, temperature: Temperature = 0.5, **options: Any) -> InfoNCE:
    """Debiased contrastive learning (Chuang et al. 2020, eq. 8): the negatives are corrected for the class prior."""
    tau_plus = _class_prior("debiased", tau_plus, options)
    return InfoNCE(**{"temperature": temperature, "class_prior": tau_plus, **options})


@_checked
def hcl(
    beta: Setting | EffectiveShare = 1.0, tau_plus: Setting = 0.1, temperature: Temperature = 0.5, **options: Any
) -> InfoNCE:
    """Contrastive learning with hard negatives (Robinson et al. 2021, eq. 4): debiased and tilted by e^{βs}."""
    tau_plus = _class_prior("hcl", tau_plus, options)
    hardening = _with(Exponential(beta), options)
    return InfoNCE(**{"temperature": temperature, "class_prior": tau_plus, **options, "hardening": hardening})


@_checked
def auto(temperature: Temperature = 0.5, share: float = 0.8, **options: Any) -> InfoNCE:
    """Hard negatives without a β to choose: HCL's tilt with an effective share of negatives, not debiased.

    share: see `EffectiveShare`; its default was chosen once, on a part of the training set of digits

    Examples:
        >>> import torch, hardneg as hn
        >>> hn.auto(temperature=0.1)(torch.randn(32, 16, requires_grad=True), torch.randn(32, 16)).shape
        torch.Size([])
    """
    hardening = _with(Exponential(EffectiveShare(share)), options)
    return InfoNCE(**{"temperature": temperature, **options, "hardening": hardening})


@_checked
def scl(temperature: Temperature = 0.5, **options: Any) -> InfoNCE:
    """Supervised contrastive learning as in H-SCL (Jiang et al. 2022, eq. 3): labels choose positives and negatives."""
    return InfoNCE(**{"temperature": temperature, "supervision": "full", "negative_count": "batch", **options})


@_checked
def hscl(beta: Setting | EffectiveShare = 1.0, temperature: Temperature = 0.5, **options: Any) -> InfoNCE:
    """Hard supervised contrastive learning, H-SCL(β) (Jiang et al. 2022, eq. 3 with η_exp)."""
    return scl(**{"temperature": temperature, **options, "hardening": _with(Exponential(beta), options)})


@_checked
def hscl_threshold(start: float = -0.3, end: float = 0.0, temperature: Setting = 0.5, **options: Any) -> InfoNCE:
    """H-SCL(τ) (Jiang et al. 2022, eq. 3 and 4): negatives above a cosine that moves from ``start`` to ``end``."""
    check_no_gradient("temperature", temperature)
    checks.number("temperature", temperature, above=0)
    for name, cosine in (("start", start), ("end", end)):
        checks.number(name, cosine, at_least=-1, at_most=1)
    threshold = Threshold(cosine=Linear(start, end))
    return scl(**{"temperature": temperature, **options, "hardening": _with(threshold, options)})


@_checked
def supcon(temperature: Temperature = 0.07, **options: Any) -> InfoNCE:
    """SupCon (Khosla et al. 2020, eq. 2): each positive's denominator holds the other positives too."""
    return InfoNCE(
        **{"temperature": temperature, "supervision": "full", "combine_positives": "in_denominator", **options}
    )


@_checked
def decoupled(temperature: Temperature = 0.1, **options: Any) -> InfoNCE:
    """Decoupled contrastive learning (Yeh et al. 2022, eq. 6): the positive is left out of the denominator."""
    return InfoNCE(**{"temperature": temperature, "positive_in_denominator": False, **options})


@_checked
def simcse(temperature: Temperature = 0.05, **options: Any) -> InfoNCE:
    """SimCSE (Gao et al. 2021, eq. 4): negatives from the other view. Also MultipleNegativesRankingLoss."""
    return InfoNCE(**{"temperature": temperature, "in_batch": "other", **options})


@_checked
def gte(temperature: Temperature = 0.01, **options: Any) -> InfoNCE:
    """GTE (Li et al. 2023): queries and documents against both queries and documents, in one sum.

    Examples:
        >>> import torch, hardneg as hn
        >>> hn.gte()(torch.randn(8, 16), torch.randn(8, 16)).shape    # queries, documents
        torch.Size([])
    """
    directions = ("query_to_doc", "query_to_query", "doc_to_query", "doc_to_doc")
    return InfoNCE(**{"temperature": temperature, "in_batch": directions, **options})


@_checked
def qwen3_embedding(temperature: Setting = 0.01, margin: float = 0.1, **options: Any) -> InfoNCE:
    """Qwen3-Embedding (Zhang et al. 2025): likely false negatives are dropped from queries and documents.

    margin: candidates with a cosine above that of the positive plus this margin are dropped, each by its own cosine.
    Pass ids to drop equal documents too.

    Examples:
        >>> import torch, hardneg as hn
        >>> hn.qwen3_embedding()(torch.randn(8, 16), torch.randn(8, 16), ids=torch.arange(8)).shape
        torch.Size([])
    """
    limit = BelowPositive(margin=-margin / _number("qwen3_embedding", temperature))
    directions = ("query_to_doc", "query_to_query", "doc_to_doc")
    settings = {"temperature": temperature, "in_batch": directions}
    return InfoNCE(**{**settings, **options, "hardening": _with(limit, options)})


@_checked
def gist(
    temperature: Temperature = 0.01, margin: Setting = 0.0, relative: Setting | None = None, **options: Any
) -> InfoNCE:
    """GISTEmbed (Solatorio 2024): a guide model decides which candidates are false negatives; see `Guided`.

    Examples:
        >>> import torch, hardneg as hn
        >>> z1, z2, g1, g2 = torch.randn(4, 8, 16).unbind()
        >>> hn.gist()(z1, z2, guide=(g1, g2)).shape
        torch.Size([])
    """
    guided = Guided(margin, relative)
    settings = {"temperature": temperature, "in_batch": ("query_to_doc", "query_to_query", "doc_to_doc")}
    return InfoNCE(**{**settings, **options, "hardening": _with(guided, options)})


@_checked
def llave(alpha: float = 9.0, temperature: Setting = 0.02, **options: Any) -> InfoNCE:
    """LLaVE (Lan et al. 2025, eq. 5): negatives weighted by e^{α·cos}, without gradient and not normalized."""
    tilt = Exponential(_number("llave", temperature) * alpha)
    return simcse(**{"temperature": temperature, **_DETACHED, **options, "hardening": _with(tilt, options)})


@_checked
def embedding_gemma(alpha: float = 5.0, temperature: Setting = 0.05, **options: Any) -> InfoNCE:
    """EmbeddingGemma (Schechter Vera et al. 2025): an anchor's own hard negatives are weighted by e^{α·cos}.

    Weights have no gradient. The negatives are passed as the source ``"own"``.

    Examples:
        >>> import torch, hardneg as hn
        >>> z1, z2, hard = torch.randn(8, 16), torch.randn(8, 16), torch.randn(8, 3, 16)
        >>> hn.embedding_gemma()(z1, z2, negatives={"own": hard}).shape
        torch.Size([])
    """
    return hardness("hard_negatives", alpha, temperature, **options)


@_checked
def hardness(
    mode: Literal["in_batch_negatives", "hard_negatives", "all_negatives"] = "in_batch_negatives",
    strength: float = 9.0,
    temperature: Setting = 0.05,
    **options: Any,
) -> InfoNCE:
    """The hardness modes of sentence-transformers' MultipleNegativesRankingLoss, for its plug-in.

    mode: which negatives are weighted by e^{strength·cos}, without gradient: ``"in_batch_negatives"``, those of other
    rows (the sources ``"batch"`` and ``"others"``); ``"hard_negatives"``, the anchor's own (``"own"``);
    ``"all_negatives"``

    Examples:
        >>> import hardneg as hn
        >>> hn.hardness("hard_negatives", strength=5.0, temperature=0.1).hardening
        {'own': (Exponential(beta=0.5),)}
    """
    tilt = Exponential(_number("hardness", temperature) * strength)
    by_mode: dict[str, Any] = {
        "in_batch_negatives": {"batch": tilt, "others": tilt},
        "hard_negatives": {"own": tilt},
        "all_negatives": tilt,
    }
    checks.choice("mode", mode, tuple(by_mode))
    if "hardening" in options:
        raise ValueError(f"mode={mode!r} sets the hardening: leave it out, or pass all of it to hn.InfoNCE")
    return simcse(**{"temperature": temperature, **_DETACHED, **options, "hardening": by_mode[mode]})


@_checked
def clip(temperature: float | Learnable = 0.07, **options: Any) -> InfoNCE:
    """CLIP (Radford et al. 2021, fig. 3): both directions between two towers, learnable temperature.

    temperature: a `Learnable`, or the initial value of one

    Examples:
        >>> import hardneg as hn
        >>> hn.clip(temperature=hn.Learnable(0.07, minimum=0.02)).temperature
        Learnable(0.07, minimum=0.02)
    """
    check_no_gradient("temperature", temperature)
    learnable = temperature if isinstance(temperature, Learnable) else Learnable(temperature)
    return InfoNCE(**{"temperature": learnable, "in_batch": "other", "symmetric": True, **options})


@_checked
def graphcl(temperature: Temperature = 0.2, **options: Any) -> InfoNCE:
    """GraphCL (You et al. 2020, eq. 3, as its authors code it): one direction, positive left out of the denominator."""
    return InfoNCE(**{"temperature": temperature, "in_batch": "other", "positive_in_denominator": False, **options})


@_checked
def infograph(beta: Setting = 0.0, tau_plus: Setting = 0.0, **options: Any) -> JSD:
    """InfoGraph (Sun et al. 2020, eq. 4) with HCL's hard negatives (appendix B): the `JSD` of nodes and graphs."""
    tau_plus = _class_prior("infograph", tau_plus, options)
    return JSD(**{"beta": beta, "class_prior": tau_plus, **options})


@_checked
def moco(temperature: Temperature = 0.07, **options: Any) -> InfoNCE:
    """MoCo (He et al. 2020, eq. 1): negatives from a queue, passed as ``negatives=``.

    Examples:
        >>> import torch, hardneg as hn
        >>> queries, keys, queue = torch.randn(8, 16), torch.randn(8, 16), torch.randn(256, 16)
        >>> hn.moco()(queries, keys, negatives=queue).shape
        torch.Size([])
    """
    return InfoNCE(**{"temperature": temperature, "in_batch": None, **options})


@_checked
def instance_discrimination(temperature: Temperature = 0.07, **options: Any) -> InfoNCE:
    """Instance discrimination (Wu et al. 2018, eq. 2): the bank's own row is the positive, the others negatives.

    Examples:
        >>> import torch, hardneg as hn
        >>> z, bank, idx = torch.randn(4, 16), torch.randn(100, 16), torch.tensor([3, 14, 15, 92])
        >>> hn.instance_discrimination()(z, bank[idx], negatives=bank, exclude=idx).shape
        torch.Size([])
    """
    return InfoNCE(**{"temperature": temperature, "in_batch": None, **options})


@_checked
def ring_nce(
    lower: float = 0.9,
    upper: float = 0.99,
    anneal: Literal["linear", "step", "accuracy", "loss", "none"] = "linear",
    until: float = 1 / 3,
    temperature: Temperature = 0.07,
    **options: Any,
) -> InfoNCE:
    """Ring discrimination (Wu et al. 2021, CNCE, eq. 4): negatives from a ring of ranks that narrows over training.

    The ring starts with all candidates except the closest and ends at [lower, upper]; move it with ``set_progress``.
    Negatives are passed as ``negatives=`` (queue or bank), as for `moco`.

    anneal: how it narrows (Ring, appendix E): ``"linear"`` over the first ``until`` of training; ``"step"``, the same
    in three steps; ``"accuracy"`` or ``"loss"``, while validation accuracy or the training loss improves, which
    ``observe`` passes in; ``"none"``, [lower, upper] from the start, one ablation of its Table 2 (``upper=1`` is the
    other)

    Examples:
        >>> import hardneg as hn
        >>> loss = hn.ring_nce()
        >>> loss.set_progress(1.0)
        >>> [round(p, 2) for p in loss.hardening[0].at(loss.progress).percentiles()]
        [0.9, 0.99]
    """
    lower = checks.number("lower", lower, at_least=0, below=1)
    upper = checks.number("upper", upper, above=lower, at_most=1)
    until = checks.number("until", until, above=0, at_most=1)
    checks.choice("anneal", anneal, ("linear", "step", "accuracy", "loss", "none"))
    final = 1 - lower  # share of the closest candidates after annealing
    share: Setting = final
    if anneal == "linear":
        share = RingAnneal(end=final, until=until)
    elif anneal == "step":
        boundaries = [until * third / 3 for third in (1, 2, 3)]
        share = Steps([1.0, 1 - (1 - final) / 3, 1 - (1 - final) * 2 / 3, final], boundaries)
    elif anneal == "accuracy":
        share = Adaptive(step=0.05, window=5, minimum=final)
    elif anneal == "loss":
        share = Adaptive(step=0.01, window=10, minimum=final, better="lower")
    ring = Ring(1 - share, 1 - (1 - upper) / (1 - lower) * share)
    return moco(**{"temperature": temperature, **options, "hardening": _with(ring, options)})


def _with(own: Hardening, options: dict[str, Any]) -> tuple[Hardening, ...]:
    """The preset's own hardening, then those in its options."""
    given = options.get("hardening", ())
    if isinstance(given, Mapping):
        raise ValueError(
            f"this preset has the hardening {own!r}, so it takes no hardening by source: pass all of them to "
            f"hn.InfoNCE(hardening={{'batch': {own!r}, …}})"
        )
    return (own, *(given if isinstance(given, tuple) else (given,)))


def _class_prior(preset: str, tau_plus: Setting, options: dict[str, Any]) -> Setting:
    """The class prior, checked under the preset's name for it; raise if it is given as ``class_prior``."""
    if "class_prior" in options:
        prior = options["class_prior"]
        raise ValueError(f"class_prior is called tau_plus in {preset}: pass tau_plus={prior!r} instead")
    return checks.number("tau_plus", tau_plus, at_least=0, below=1)


def _number(preset: str, temperature: Any) -> Any:
    """A temperature that is a number or a schedule, by which a setting in cosines becomes one in scores."""
    if isinstance(temperature, Learnable):
        raise ValueError(f"{preset}() has a setting in cosines and needs a temperature that is known: pass a number")
    return temperature
