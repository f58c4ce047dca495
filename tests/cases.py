"""Random settings and inputs of the objective, drawn by hypothesis, with the oracle's results."""

import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import oracle
import torch
from hypothesis import assume
from hypothesis import strategies as st
from torch import Tensor

import hardneg as hn

ORACLE_OPTIONS = {
    "class_prior", "debias", "in_batch", "symmetric", "supervision", "combine_positives", "average", "negative_count",
    "positive_in_denominator", "weight_range", "normalize", "temperature", "grad_through_weights", "normalize_weights",
}  # fmt: skip
SEED = 7  # of the draws
# What a setting, an argument or a part of the hardening is replaced with, to see whether it matters.
WITHOUT_OPTION: dict[str, Any] = {
    "class_prior": 0.0, "weight_range": None, "symmetric": False, "negative_count": "support", "average": "anchors",
    "positive_in_denominator": True, "num_negatives": None, "debias": "hcl", "normalize": True,
    "normalize_weights": True,
}  # fmt: skip
WITHOUT_HARDENING: dict[str, Any] = {
    "beta": 0.0, "eta": None, "tau_threshold": None, "rings": (), "below": None, "by_source": None,
}  # fmt: skip
Argument = Tensor | dict[str, Tensor]  # of a call; by source
# Views of a batch: candidates in the batch, whether both towers are anchors, and the shape of z2.
LAYOUTS = [
    ("both", False, "two"), ("other", True, "two"), (None, False, "two"), ("other", False, "two"),
    ("both", False, "several"), ("other", False, "several"), (None, False, "several"),
    ("both", False, "one"), (None, False, "one"),
]  # fmt: skip
BANDS = [
    (), ("ring",), ("threshold",), ("below",), ("ring", "threshold"), ("ring", "below"), ("threshold", "below"),
    ("ring", "ring"), ("ring", "ring", "threshold", "below"),
]  # fmt: skip


@dataclass(frozen=True)
class Case:
    """Settings of `InfoNCE`, the tensors of a call, and the hardening as arguments of the oracle."""

    options: dict[str, Any]
    arguments: dict[str, Argument]
    oracle_options: dict[str, Any]

    def loss(self, **more: Any) -> hn.InfoNCE:
        """The library's objective."""
        options = {**self.options, **more}
        if options.get("num_negatives") is not None:
            options["generator"] = torch.Generator().manual_seed(SEED)
        return hn.InfoNCE(**options)

    def truth(self, constants: oracle.Result | None = None) -> oracle.Result:
        """The oracle's result. constants: as in `oracle.info_nce`."""
        known: dict[str, Any] = {"constants": constants}
        known |= {name: value for name, value in self.options.items() if name in ORACLE_OPTIONS}
        arrays: dict[str, Any] = {name: converted(to_array, argument) for name, argument in self.arguments.items()}
        draws = None
        if (k := self.options.get("num_negatives")) is not None:
            z2, in_batch, symmetric = arrays.get("z2"), self.options["in_batch"], self.options["symmetric"]
            paired = z2 is not None and z2.ndim == 2 and in_batch == "both"
            anchors = len(arrays["z1"]) * (2 if paired or symmetric else 1)
            seed = int(torch.randint(1 << 48, (), generator=torch.Generator().manual_seed(SEED)))
            draws = oracle.drawn(seed, 0, anchors, k)
        return oracle.info_nce(**arrays, **known, **self.oracle_options, draws=draws)

    def matters(self, truth: oracle.Result) -> set[str]:
        """What this case tests: the settings and arguments without which the oracle's result differs.

        Also "valid" (an anchor has candidates and positives), "zero" (no anchor has), "floored", "unfloored" (debiased
        anchors) and the form of several positives.
        """
        found = {"valid" if any(truth.valid) else "zero"}
        for name, other in self._others():
            without = other.truth()
            if (without.losses, without.mean) != (truth.losses, truth.mean):
                found.add(name)
        if self.options["class_prior"] > 0 and any(truth.valid):
            found |= {"floored" if floored else "unfloored" for floored in truth.floored}
        if any(ok and len(scores) > 1 for ok, scores in zip(truth.valid, truth.positives, strict=True)):
            found.add(self.options["combine_positives"])
        return found

    def _others(self) -> "Iterator[tuple[str, Case]]":
        """This case without each of its settings and arguments."""
        for name, value in WITHOUT_OPTION.items():
            if self.options[name] != value:
                yield name, replace(self, options=self.options | {name: value})
        for name, value in WITHOUT_HARDENING.items():
            if self.oracle_options.get(name, value) != value:
                yield name, replace(self, oracle_options=self.oracle_options | {name: value})
        for name in ("exclude", "negative_mask", "negative_labels", "ids", "negative_ids", "not_negatives"):
            if name in self.arguments:
                given_positives = name == "negative_labels" and self.options["supervision"] == "positives"
                yield (
                    "given positives" if given_positives else name,
                    replace(self, arguments={k: v for k, v in self.arguments.items() if k != name}),
                )
        if "negatives" in self.arguments:
            kept = {k: v for k, v in self.arguments.items() if k in ("z1", "z2", "labels", "ids", "not_negatives")}
            yield "negatives", replace(self, arguments=kept)
        if (labels := self.arguments.get("labels")) is not None:
            assert isinstance(labels, Tensor)
            unknown = torch.full_like(labels, oracle.UNKNOWN)
            yield "labels", replace(self, arguments=self.arguments | {"labels": unknown})


def converted(convert: Callable[[Tensor], Any], argument: Argument) -> Any:
    """An argument of a call, or each tensor of a mapping by source, converted."""
    if isinstance(argument, Tensor):
        return convert(argument)
    return {name: convert(tensor) for name, tensor in argument.items()}


def to_array(tensor: Tensor) -> np.ndarray:
    """A tensor as an array, in float64 if it holds embeddings."""
    array: np.ndarray = tensor.detach().double().numpy() if tensor.is_floating_point() else tensor.numpy()
    return array


def check_reached(reached: Counter[str], least: Mapping[str, int]) -> None:
    """Raise if fewer examples than these passed a test with a part that matters for the result."""
    short = {name: (reached[name], number) for name, number in least.items() if reached[name] < number}
    assert not short, f"too few examples, (found, least): {short}; all: {dict(reached)}"


def _softplus_weight(score: float) -> float:
    return float(np.logaddexp(0.0, score))


def _ramp_weight(score: float) -> float:
    return max(score, 0.0)


@st.composite
def cases(
    draw: st.DrawFn, custom: bool = True, integer: bool = False, smooth: bool = False, sources: bool = False
) -> Case:
    """Any settings that are valid together, mostly such that each of them matters for the loss.

    ``integer``: embeddings of small integers, with exact scores that often tie. ``smooth``: no row is zero and no
    weight has a corner, so that the loss has a gradient almost everywhere. ``sources``: with ids and sources of
    negatives, most of which have a hardening of their own.
    """
    # Uniform choices: hypothesis prefers simple and repeated ones, where few settings matter.
    seed = draw(st.integers(0, 2**20))
    choices, generator = random.Random(seed), torch.Generator().manual_seed(seed)

    def some(*values: Any) -> Any:
        return choices.choice(values)

    batch, dim = some(3, 2, 4, 5, 5, 4, *(() if smooth else (1,))), some(3, 2, 4, 5, 4, *(() if smooth else (1,)))

    def embeddings(*shape: int) -> Tensor:
        if integer:
            return torch.randint(-1, 2, shape, generator=generator).double()
        z = torch.randn(*shape, generator=generator, dtype=torch.float64)
        if not smooth and some(*[False] * 7, True):
            z.view(-1, shape[-1])[0] = 0
        return z

    in_batch, symmetric, kind = some(*LAYOUTS)
    supervision = some("positives", "full") if kind == "one" else some("none", "positives", "negatives", "full")
    arguments: dict[str, Any] = {"z1": embeddings(batch, dim)}
    if kind == "two":
        arguments["z2"] = embeddings(batch, dim)
    elif kind == "several":
        arguments["z2"] = embeddings(batch, some(2, 3, 1), dim)
    if supervision != "none":
        arguments["labels"] = torch.randint(-1, 2, (batch,), generator=generator)

    def given_source(name: str) -> None:
        per_anchor, count = some(True, False), some(6, 5, 4, 8, 3, 2)
        found = {"negatives": embeddings(batch, count, dim) if per_anchor else embeddings(count, dim)}
        if some(True, False):
            shape = some((batch, 1), (batch,), (batch, 2), (batch, 0))
            found["exclude"] = torch.randint(count, shape, generator=generator)
        if some(True, False):
            found["negative_mask"] = torch.rand(batch, count, generator=generator) < 0.7
        shape = (batch, count) if per_anchor else (count,)
        if supervision in ("negatives", "full") or (supervision == "positives" and some(True, True, False)):
            found["negative_labels"] = torch.randint(-1, 3, shape, generator=generator)
        if "ids" in arguments and some(True, True, False):
            found["negative_ids"] = torch.randint(-1, 6, shape, generator=generator)
        for key, tensor in found.items():
            if sources:
                arguments.setdefault(key, {})[name] = tensor
            else:
                arguments[key] = tensor

    if sources and some(True, True, False):
        views = 1 if kind == "one" else 2 if kind == "two" else 1 + arguments["z2"].shape[1]
        shape = some((batch,), (batch, views))
        arguments["ids"] = torch.randint(-1, 6, shape, generator=generator)
        if some(True, False):
            arguments["not_negatives"] = torch.randint(6, (some(2, 4, 8, 8, 0), 2), generator=generator)
    if in_batch is None or some(True, False):
        for name in some(("mined",), ("mined", "queue"), ("queue", "mined")) if sources else ("given",):
            given_source(name)

    # With exact scores the bands are between them, so that the result does not depend on rounding.
    temperature = 1.0 if integer else some(0.5, 1.0, 0.2, 2.0, 0.05)

    def some_hardening() -> tuple[tuple[hn.Hardening, ...], dict[str, Any]]:
        hardening: list[hn.Hardening] = []
        known: dict[str, Any] = {}
        tilt = some("exponential", "none", "exponential", *(["custom"] if custom else []))
        if tilt == "exponential":
            known["beta"] = some(1.0, 0.5, 2.0, 3.7, 0.0)
            hardening.append(hn.Exponential(known["beta"]))
        elif tilt == "custom":
            if smooth or some(True, False):
                known["eta"] = _softplus_weight
                hardening.append(hn.Custom(lambda s: torch.logaddexp(s, torch.zeros_like(s))))
            else:
                known["eta"] = _ramp_weight
                hardening.append(hn.Custom(lambda s: s.relu()))
        bands = some(*BANDS)
        known["rings"] = tuple(
            some((0.0, 0.5), (0.3, 1.0), (0.5, 0.8), (0.9, 0.99)) for band in bands if band == "ring"
        )
        hardening += [hn.Ring(*ring) for ring in known["rings"]]
        if "threshold" in bands:
            tau = float(np.exp(some(-0.55, -0.15, 0.05) / temperature))
            known["tau_threshold"] = tau
            hardening.append(hn.Threshold(tau))
        if "below" in bands:
            # Never exactly the positive's score: with labels a candidate may be that positive.
            known["below"] = some(("margin", -0.35), ("margin", 0.35), ("relative", 0.95))
            kind_of_limit, amount = known["below"]
            hardening.append(hn.BelowPositive(**{kind_of_limit: amount}))
        return tuple(choices.sample(hardening, len(hardening))), known

    given_hardening, known = some_hardening()
    by_source = sources and some(True, True, False)
    if by_source:
        named = [name for name in ("batch", *arguments.get("negatives", {})) if name != "batch" or in_batch is not None]
        parts = {name: some_hardening() for name in named if some(True, True, False)} or {named[0]: some_hardening()}
        given_hardening = {name: part for name, (part, _) in parts.items()}  # type: ignore[assignment]
        known = {"by_source": {name: part for name, (_, part) in parts.items()}}
    weighted = by_source or "beta" in known or "eta" in known
    # In one dimension all cosines are ±1, and G may equal the floor up to rounding.
    no_prior = (by_source and in_batch is None) or dim == 1
    class_prior = 0.0 if no_prior else some(0.05, 0.0, 0.15, 0.0, 0.4)

    combine = some("mean_of_logs", "log_of_mean", "in_denominator", "log_of_sum")
    options = {
        "temperature": temperature,
        "hardening": given_hardening,
        "class_prior": class_prior,
        "debias": some("hcl", "exact"),
        "in_batch": in_batch,
        "symmetric": symmetric,
        "supervision": supervision,
        "combine_positives": combine,
        "average": some("anchors", "pairs"),
        "negative_count": some("support", "batch") if by_source else some("support", "batch", 37.5),
        "positive_in_denominator": combine == "in_denominator" or some(True, False, True),
        "num_negatives": None if by_source else some(None, None, 4),
        "weight_range": some(None, 2.0) if weighted else some(None, None, None, 2.0),
        "normalize": not integer and some(True, False, True),
        "normalize_weights": class_prior > 0 or some(True, False),
    }
    case = Case(options, arguments, known)
    # Few cases in which no anchor has both candidates and positives: test_degenerate has its own.
    assume(some(*[False] * 15, True) or any(case.truth().valid))
    return case
