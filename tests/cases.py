"""Random settings and inputs of the objective, drawn by hypothesis, with the oracle's answer to each."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import oracle
import torch
from hypothesis import strategies as st
from torch import Tensor

import hardneg as hn

KNOWN_BY_ORACLE = {
    "class_prior", "debias", "in_batch", "symmetric", "supervision", "combine_positives", "average", "negative_count",
    "positive_in_denominator", "weight_range", "normalize", "temperature",
}  # fmt: skip
SEED = 7  # of the draws


@dataclass(frozen=True)
class Case:
    """Settings of `InfoNCE`, the tensors of a call, and what the oracle calls them."""

    options: dict[str, Any]
    arguments: dict[str, Tensor]
    oracle_options: dict[str, Any]

    def loss(self, **more: Any) -> hn.InfoNCE:
        """The library's objective."""
        options = {**self.options, **more}
        if options.get("num_negatives") is not None:
            options["generator"] = torch.Generator().manual_seed(SEED)
        return hn.InfoNCE(**options)

    def truth(self) -> oracle.Result:
        """The oracle's answer."""
        known = {name: value for name, value in self.options.items() if name in KNOWN_BY_ORACLE}
        arrays = {name: tensor.detach().double().numpy() if tensor.is_floating_point() else tensor.numpy()
                  for name, tensor in self.arguments.items()}  # fmt: skip
        draws = None
        if (k := self.options.get("num_negatives")) is not None:
            z2, in_batch, symmetric = arrays.get("z2"), self.options["in_batch"], self.options["symmetric"]
            paired = z2 is not None and z2.ndim == 2 and in_batch == "both"
            anchors = len(arrays["z1"]) * (2 if paired or symmetric else 1)
            seed = int(torch.randint(1 << 48, (), generator=torch.Generator().manual_seed(SEED)))
            draws = oracle.drawn(seed, 0, anchors, k)
        return oracle.info_nce(**arrays, **known, **self.oracle_options, draws=draws)


def _softplus_weight(score: float) -> float:
    return float(np.logaddexp(0.0, score))


def _ramp_weight(score: float) -> float:
    return max(score, 0.0)


@st.composite
def cases(draw: st.DrawFn, custom: bool = True, integer: bool = False) -> Case:
    """Any settings that go together. ``integer``: embeddings of small integers, with exact scores that often tie."""
    batch, dim = draw(st.integers(1, 5)), draw(st.integers(1, 4))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 10_000)))

    def embeddings(*shape: int) -> Tensor:
        if integer:
            return torch.randint(-1, 2, shape, generator=generator).double()
        z = torch.randn(*shape, generator=generator, dtype=torch.float64)
        if draw(st.booleans()):
            z.view(-1, shape[-1])[0] = 0
        return z

    in_batch = draw(st.sampled_from(["both", "other", None]))
    supervision = draw(st.sampled_from(["none", "positives", "negatives", "full"]))
    kinds = ["two", "several"] + (["one"] if supervision in ("positives", "full") and in_batch != "other" else [])
    kind = draw(st.sampled_from(kinds))
    arguments = {"z1": embeddings(batch, dim)}
    if kind == "two":
        arguments["z2"] = embeddings(batch, dim)
    elif kind == "several":
        arguments["z2"] = embeddings(batch, draw(st.integers(1, 3)), dim)
    labels = st.lists(st.integers(-1, 2), min_size=batch, max_size=batch)
    if supervision != "none":
        arguments["labels"] = torch.tensor(draw(labels))
    if in_batch is None or draw(st.booleans()):
        per_anchor, count = draw(st.booleans()), draw(st.integers(1, 6))
        arguments["negatives"] = embeddings(batch, count, dim) if per_anchor else embeddings(count, dim)
        if draw(st.booleans()):
            shape = draw(st.sampled_from([(batch,), (batch, 0), (batch, 1), (batch, 3)]))
            arguments["exclude"] = torch.randint(count, shape, generator=generator)
        if draw(st.booleans()):
            arguments["negative_mask"] = torch.rand(batch, count, generator=generator) < 0.7
        if supervision in ("negatives", "full"):
            shape = (batch, count) if per_anchor else (count,)
            arguments["negative_labels"] = torch.randint(-1, 3, shape, generator=generator)

    # With exact scores the bands fall between them, so that no rounding decides.
    temperature = 1.0 if integer else draw(st.sampled_from([0.05, 0.2, 0.5, 2.0]))
    hardening: list[hn.Hardening] = []
    known: dict[str, Any] = {}
    tilt = draw(st.sampled_from(["none", "exponential"] + (["custom"] if custom else [])))
    if tilt == "exponential":
        known["beta"] = draw(st.sampled_from([0.0, 0.5, 1.0, 2.0, 3.7]))
        hardening.append(hn.Exponential(known["beta"]))
    elif tilt == "custom":
        if draw(st.booleans()):
            known["eta"] = _softplus_weight
            hardening.append(hn.Custom(lambda s: torch.logaddexp(s, torch.zeros_like(s))))
        else:
            known["eta"] = _ramp_weight
            hardening.append(hn.Custom(lambda s: s.relu()))
    if draw(st.booleans()):
        tau = float(np.exp(draw(st.sampled_from([-0.55, -0.15, 0.05])) / temperature))
        known["tau_threshold"] = tau
        hardening.append(hn.Threshold(tau))
    rings = draw(st.lists(st.sampled_from([(0.0, 0.5), (0.3, 1.0), (0.5, 0.8), (0.9, 0.99)]), max_size=2))
    known["rings"] = tuple(rings)
    hardening += [hn.Ring(*ring) for ring in rings]
    if draw(st.booleans()):
        # Never exactly the positive's score: with labels a candidate may be that positive.
        known["below"] = draw(st.sampled_from([("margin", 0.35), ("margin", -0.35), ("relative", 0.95)]))
        kind_of_limit, amount = known["below"]
        hardening.append(hn.BelowPositive(**{kind_of_limit: amount}))

    combine = draw(st.sampled_from(["mean_of_logs", "log_of_mean", "in_denominator"]))
    options = {
        "temperature": temperature,
        "hardening": tuple(draw(st.permutations(hardening))),
        "class_prior": draw(st.sampled_from([0.0, 0.1, 0.4])),
        "debias": draw(st.sampled_from(["hcl", "exact"])),
        "in_batch": in_batch,
        "symmetric": in_batch == "other" and kind == "two" and draw(st.booleans()),
        "supervision": supervision,
        "combine_positives": combine,
        "average": draw(st.sampled_from(["anchors", "pairs"])),
        "negative_count": draw(st.sampled_from(["support", "batch", 37.5])),
        "positive_in_denominator": combine == "in_denominator" or draw(st.booleans()),
        "num_negatives": draw(st.sampled_from([None, None, 4])),
        "weight_range": draw(st.sampled_from([None, 2.0])),
        "normalize": not integer and draw(st.booleans()),
    }
    return Case(options, arguments, known)
