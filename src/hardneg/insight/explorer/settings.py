"""The explorer's setting of a loss: what its sliders show, and the weights of negatives under it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hardneg.losses.hardening import BelowPositive, Exponential, Hardening, Ring, Threshold, Uniform
from hardneg.losses.infonce import InfoNCE
from hardneg.losses.inputs import normalized
from hardneg.losses.kernels import percentiles
from hardneg.losses.kernels.interface import Rule
from hardneg.losses.schedules import value
from hardneg.losses.temperature import Learnable

# Arguments of a loss that the page has no slider for: an anchor has one positive, and is compared with every sample.
_UNMODELED = (
    "in_batch", "symmetric", "combine_positives", "negative_count", "positive_in_denominator",
    "num_negatives", "weight_range", "grad_through_weights", "normalize_weights", "normalize",
)  # fmt: skip


@dataclass(frozen=True)
class Shown:
    """The setting of a loss on the page, by the names of `UNIFORM` in negatives.js, and what it cannot show."""

    setting: dict[str, Any]
    left_out: list[str]


def shown_setting(loss: InfoNCE) -> Shown:
    """The sliders of a loss; schedules at their end, a learnable temperature at the loss's own value.

    What changes the numbers of an anchor and has no slider is named in ``left_out``.

    Examples:
        >>> import hardneg as hn
        >>> shown_setting(hn.hcl(beta=2.0, tau_plus=0.1, temperature=0.25)).setting
        {'temperature': 0.25, 'beta': 2.0, 'prior': 0.1, 'labels': False}
        >>> shown_setting(hn.InfoNCE(hardening=hn.Custom(torch.exp))).left_out
        ['Custom']
    """
    given = loss.temperature
    temperature = float(given().detach()) if isinstance(given, Learnable) else float(value(given, 1.0))
    setting: dict[str, Any] = {"temperature": temperature, "beta": 0.0, "prior": float(value(loss.class_prior, 1.0))}
    left_out: list[str] = []
    parts = loss.hardening
    if isinstance(parts, Mapping):
        left_out.append("hardening by source")
        parts = dict(parts).get("batch", ())
    for part in parts:
        if not _show(part.at(1.0), setting, temperature):
            left_out.append(type(part).__name__)
    if loss.debias != "hcl" and setting["prior"] > 0:
        left_out.append(f"debias={loss.debias!r}")
    if loss.supervision in ("positives", "full"):
        left_out.append(f"the positives by label of supervision={loss.supervision!r}")
    plain = InfoNCE()
    changed = [f"{name}={given!r}" for name in _UNMODELED if (given := getattr(loss, name)) != getattr(plain, name)]
    left_out += [f"{each} (negatives of a queue or a bank)" if each == "in_batch=None" else each for each in changed]
    setting["labels"] = loss.supervision in ("negatives", "full")
    return Shown(setting, left_out)


def _show(part: Hardening, setting: dict[str, Any], temperature: float) -> bool:
    """Add a hardening to the setting; False if the page has no slider for it."""
    if type(part) is Uniform:
        return True
    if type(part) is Exponential:
        setting["beta"] = part.tilt()
    elif type(part) is Ring and "lower" not in setting:
        setting["lower"], setting["upper"] = part.percentiles()
    elif type(part) is Threshold and "threshold" not in setting:
        cosine = part.cosine if part.cosine is not None else part.bounds(None)[0] * temperature  # type: ignore[operator]
        setting["threshold"] = max(-1.0, min(1.0, float(value(cosine, 1.0))))  # type: ignore[arg-type]
    elif type(part) is BelowPositive and "limit" not in setting:
        if part.relative is None:
            setting |= {"limit": "margin", "margin": float(value(part.margin, 1.0)) * temperature}
        else:
            setting |= {"limit": "relative", "relative": float(value(part.relative, 1.0))}
    else:
        return False
    return True


def loss_of(setting: dict[str, Any]) -> InfoNCE:
    """The loss that a setting shows, as the page's line of Python makes it.

    Examples:
        >>> loss_of({"temperature": 0.5, "beta": 1.0, "lower": 0.5, "upper": 1.0}).hardening
        (Ring(lower=0.5, upper=1.0), Exponential(beta=1.0))
    """
    temperature = setting["temperature"]
    parts: list[Hardening] = []
    if "lower" in setting:
        parts.append(Ring(setting["lower"], setting["upper"]))
    if setting.get("threshold", -1.0) > -1:
        parts.append(Threshold(cosine=setting["threshold"]))
    if setting.get("limit") == "margin":
        parts.append(BelowPositive(margin=setting["margin"] / temperature))
    if setting.get("limit") == "relative":
        parts.append(BelowPositive(relative=setting["relative"]))
    if setting.get("beta", 0.0) > 0:
        parts.append(Exponential(setting["beta"]))
    return InfoNCE(
        temperature,
        tuple(parts) or Uniform(),
        class_prior=setting.get("prior", 0.0),
        supervision="negatives" if setting.get("labels") else "none",
    )


def neighbor_weights(
    features: Tensor, neighbors: Tensor, positives: Tensor, labels: Tensor | None, setting: dict[str, Any]
) -> Tensor:
    """Weights (N, k) of each sample's neighbors under q, with all other samples as candidates; 0 where left out.

    features: (N, d) · neighbors: (N, k) rows · positives: (N,) cosine of each sample's positive · labels: (N,) or None
    """
    unit = normalized(features.double())
    scale = 1 / setting["temperature"]
    rings = ((setting["lower"], setting["upper"]),) if "lower" in setting else ()
    lowest = setting["threshold"] * scale if setting.get("threshold", -1.0) > -1 else -torch.inf
    found = torch.empty(neighbors.shape, dtype=torch.float64)
    rows = torch.arange(len(unit))
    for block in torch.split(rows, max(1, (1 << 22) // len(unit))):
        scores = (unit[block] @ unit.T) * scale  # (R, N)
        left_out = rows == block[:, None]
        if labels is not None and setting.get("labels"):
            left_out = left_out | ((labels[block, None] == labels) & (labels[block, None] >= 0))
        if rings:
            band = percentiles.edges(scores.masked_fill(left_out, -torch.inf), Rule(rings=rings))
            left_out = left_out | band.outside(scores)
        left_out = left_out | (scores < lowest)
        limit = setting.get("limit", "off")
        if limit != "off":
            best = positives[block].double() * scale  # (R,)
            highest = best - (
                setting["margin"] * scale if limit == "margin" else (1 - setting["relative"]) * best.abs()
            )
            left_out = left_out | (scores > highest[:, None] + 8 * torch.finfo(torch.float64).eps * scale)
        logits = (setting.get("beta", 0.0) * scores).masked_fill(left_out, -torch.inf)
        weights = logits.softmax(dim=1).nan_to_num(0.0)  # a row without negatives has no weights
        found[block] = weights.gather(1, neighbors[block])
    return found
