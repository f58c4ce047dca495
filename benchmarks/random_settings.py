"""The fused kernel with random settings and inputs, compared with the reference kernel in float64.

    python benchmarks/random_settings.py [--cases 150] [--seed 0] [--device cuda] [--workers 1]

The seed is that of the day unless given. Most of the time is spent compiling kernels, so several processes share it.

Half of the cases have vectors of entries 0, ±1 (times a power of two) whose lengths are powers of two: unit vectors and
cosines are then exact in every precision, many cosines are equal, and bands keep the same candidates in float64. The
others have Gaussian vectors, without bands.
"""

import argparse
import copy
import math
import random
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from multiprocessing import get_context
from typing import Any

import torch
from torch import Tensor

import hardneg as hn

# What a sample of cases must contain; `Tally.reached` counts them.
KINDS = (
    "float32", "bfloat16", "float16", "β", "τ⁺", "labels", "threshold", "below", "ring", "queue", "exclude", "mask",
    "one gradient", "not contiguous", "learned", "wide", "one view", "symmetric", "unnormalized",
)  # fmt: skip


@dataclass(frozen=True)
class Case:
    """Settings of `InfoNCE`, the arguments of a call, which of them need gradients, and what the case contains.

    exact: unit vectors and cosines are exact in the dtype of the embeddings
    """

    options: dict[str, Any]
    arguments: dict[str, Tensor]
    wanted: list[str]
    exact: bool
    kinds: set[str]

    @property
    def temperature(self) -> float:
        given = self.options["temperature"]
        return float(given().detach()) if isinstance(given, hn.Learnable) else float(given)

    @property
    def beta(self) -> float:
        return max(float(getattr(part, "beta", 0.0)) for part in self.options["hardening"])


@dataclass
class Tally:
    """Number of cases, of wrong ones, and the largest error as a share of what is allowed.

    reached: cases with a loss and a gradient that are not 0, by what they contain · failures: descriptions
    """

    tried: int = 0
    wrong: int = 0
    worst: float = 0.0
    reached: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Limits:
    """Where cases run, their dtypes, their largest sizes, and the kernel that is compared with the reference."""

    device: str = "cuda"
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16, torch.float16)
    rows: int = 400
    keys: int = 3000
    dim: int = 1024
    backend: str = "fused"


DEFAULT_LIMITS = Limits()


class Draw:
    """Random numbers and vectors of one case."""

    def __init__(self, seed: int, limits: Limits) -> None:
        self.random = random.Random(seed)
        self.generator = torch.Generator().manual_seed(seed)
        self.limits = limits

    def maybe(self, share: float) -> bool:
        return self.random.random() < share

    def size(self, least: int, most: int) -> int:
        """An integer, uniform in its logarithm."""
        return round(math.exp(self.random.uniform(math.log(least), math.log(most))))

    def rand(self, *shape: int) -> Tensor:
        return torch.rand(*shape, generator=self.generator)

    def integers(self, low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=self.generator)

    def signs(self, rows: int, dim: int, entries: int) -> Tensor:
        """Rows with this number of entries ±1, the others 0."""
        chosen = self.rand(rows, dim).argsort(dim=1)[:, :entries]
        return torch.zeros(rows, dim).scatter(1, chosen, (self.rand(rows, entries) < 0.5).float() * 2 - 1)

    def gaussian(self, rows: int, dim: int) -> Tensor:
        return torch.randn(rows, dim, generator=self.generator)

    def scattered(self, matrix: Tensor, layout: str) -> Tensor:
        """The same matrix in another layout of memory."""
        rows, dim = matrix.shape
        if layout == "transposed":
            return matrix.T.contiguous().T
        if layout == "columns":
            wide = matrix.new_zeros(rows, dim + 3)
            wide[:, 1 : dim + 1] = matrix
            return wide[:, 1 : dim + 1]
        if layout == "rows":
            long = matrix.new_zeros(2 * rows, dim)
            long[::2] = matrix
            return long[::2]
        return matrix


def draw_case(draw: Draw) -> Case:
    """A random case; its settings may contradict each other."""
    pick = draw.random.choice
    dtype = pick(draw.limits.dtypes)
    rows, dim = draw.size(2, draw.limits.rows), draw.size(1, draw.limits.dim)
    exact, normalize = draw.maybe(0.5), draw.maybe(0.85)
    entries = 4 ** draw.random.randint(0, int(math.log(dim, 4) + 1e-9))
    kinds = {str(dtype).removeprefix("torch.")} | ({"wide"} if dim > 256 else set())
    if not normalize:
        kinds.add("unnormalized")

    def vectors(number: int, like: Tensor | None = None) -> Tensor:
        if exact:
            found = draw.signs(number, dim, entries)
            if like is not None:  # a view: some entries change sign
                found = like * torch.where(draw.rand(number, dim) < 0.2, -1.0, 1.0)
            return found
        found = draw.gaussian(number, dim) if like is None else like + 0.7 * draw.gaussian(number, dim)
        return found if normalize else torch.nn.functional.normalize(found, dim=1)

    temperature: Any = pick((0.05, 0.1, 0.3, 0.5, 1.0))
    if draw.maybe(0.2):
        temperature = hn.Learnable(temperature, minimum=pick((0.01, 0.05)))
        kinds.add("learned")
    number = float(temperature().detach()) if isinstance(temperature, hn.Learnable) else temperature
    size = 1.0 if normalize or not exact else float(entries)  # squared length of a vector
    hardening: list[hn.Hardening] = []
    if draw.maybe(0.7):
        hardening.append(hn.Exponential(pick((0.5, 1.0, 2.0, round(draw.random.uniform(0.1, 2.5), 2)))))
        kinds.add("β")
    if exact:
        # Halfway between two scores, which are multiples of size/entries/temperature.
        between = (draw.random.randint(-entries, 0) + 0.5) * size / entries / number
        if draw.maybe(0.3):
            hardening.append(hn.Threshold(score=between))
            kinds.add("threshold")
        if draw.maybe(0.3):
            hardening.append(hn.BelowPositive(between))
            kinds.add("below")
        if draw.maybe(0.5):
            lower = round(draw.random.uniform(0.0, 0.9), 2)
            hardening.append(hn.Ring(lower, min(1.0, round(lower + draw.random.uniform(0.05, 0.6), 2))))
            kinds.add("ring")
    options: dict[str, Any] = {
        "temperature": temperature, "hardening": tuple(hardening) or (hn.Uniform(),), "normalize": normalize,
        "in_batch": pick(("both", "both", "other", None)), "reduction": pick(("mean", "sum", "none")),
        "negative_count": pick(("support", "support", "batch", 12.5)),
        "positive_in_denominator": not draw.maybe(0.2), "grad_through_weights": not draw.maybe(0.2),
        "supervision": pick(("none", "none", "none", "positives", "negatives", "full", "full")),
        "combine_positives": pick(("mean_of_logs", "mean_of_logs", "in_denominator", "log_of_mean")),
        "average": pick(("anchors", "anchors", "pairs")),
    }  # fmt: skip
    if draw.maybe(0.4):
        options["class_prior"] = round(draw.random.uniform(0.005, 0.05), 3)
        kinds.add("τ⁺")
    if options["in_batch"] == "other" and draw.maybe(0.5):
        options["symmetric"] = True
        kinds.add("symmetric")
    z1 = vectors(rows)
    arguments = {"z1": z1, "z2": vectors(rows, z1)}
    if options["supervision"] != "none":
        arguments["labels"] = draw.integers(-1, pick((2, 5, max(2, rows))), rows)
        kinds.add("labels")
        if options["supervision"] != "negatives" and options["in_batch"] == "both" and draw.maybe(0.3):
            del arguments["z2"]
            kinds.add("one view")
    if options["in_batch"] is None or draw.maybe(0.25):
        keys = draw.size(1, draw.limits.keys)
        arguments["negatives"] = vectors(keys)
        kinds.add("queue")
        if draw.maybe(0.4):
            arguments["exclude"] = draw.integers(0, keys, rows, pick((1, 3)))
            kinds.add("exclude")
        if draw.maybe(0.3):
            arguments["negative_mask"] = draw.rand(rows, keys) < 0.7
            kinds.add("mask")
        if options["supervision"] in ("negatives", "full"):
            arguments["negative_labels"] = draw.integers(-1, 5, keys)
    factor = 2.0 ** draw.random.randint(-3, 3) if normalize else 1.0
    layout = pick(("contiguous", "transposed", "columns", "rows"))
    kinds |= set() if layout == "contiguous" else {"not contiguous"}
    for name, tensor in arguments.items():
        if tensor.is_floating_point():
            tensor = draw.scattered((tensor * factor).to(draw.limits.device, dtype), layout)
        arguments[name] = tensor.to(draw.limits.device)
    possible: list[str] = [name for name in ("z1", "z2", "negatives") if name in arguments]
    wanted = [name for name in possible if draw.maybe(0.7)] or [pick(possible)]
    kinds |= {"one gradient"} if len(wanted) == 1 < len(possible) else set()
    return Case(options, arguments, wanted, exact, kinds)


def run(case: Case, backend: str, double: bool = False) -> list[Tensor]:
    """The losses, and the gradients of the weighted sum of losses: of the arguments wanted and of the temperature."""
    loss = hn.InfoNCE(**copy.deepcopy(case.options), backend=backend)  # type: ignore[arg-type]
    loss = loss.to(case.arguments["z1"].device)
    given = dict(case.arguments)
    for name, tensor in given.items():
        if tensor.is_floating_point():
            given[name] = tensor.double() if double else tensor.detach()
            given[name].requires_grad_(name in case.wanted)
    value = loss(**given)
    anchors = len(given["z1"]) if case.options["reduction"] == "mean" else 1  # float16 could not hold those of a mean
    weights = torch.linspace(0.5, 1.5, value.numel(), device=value.device, dtype=value.dtype).view(value.shape)
    leaves = [given[name] for name in case.wanted] + list(loss.parameters())
    grads = torch.autograd.grad((anchors * weights * value).sum(), leaves, allow_unused=True, materialize_grads=True)
    return [value.detach(), *(grad.detach() for grad in grads)]


def sizes(case: Case, truth: list[Tensor]) -> list[float]:
    """What the errors are relative to: the norms of the truth, or typical ones where those are nearly 0."""
    anchors, steep = len(case.arguments["z1"]), (1 + case.beta) / case.temperature
    length = float(case.arguments["z1"].double().norm(dim=1).mean())
    typical = [anchors**0.5 if truth[0].dim() or case.options["reduction"] == "sum" else 1.0]
    typical += [0.1 * steep * anchors**0.5 / (length if case.options["normalize"] else 1 / length)] * len(case.wanted)
    typical += [anchors**0.5 * steep] * (len(truth) - len(typical))
    return [max(float(exact.norm()), size) for exact, size in zip(truth, typical, strict=True)]


def peers(case: Case, seed: int) -> list[list[Tensor]]:
    """Results of other kernels in float32, and in float64 of inputs that differ by a rounding: how exact one can be."""
    single = {name: t.float() if t.is_floating_point() else t for name, t in case.arguments.items()}
    found = [run(replace(case, arguments=single), backend) for backend in ("tiled", "reference")]
    generator = torch.Generator().manual_seed(seed)
    for _ in range(0 if case.exact else 2):  # a change would move candidates out of a band
        rounded = {
            name: t * (1 + 2**-24 * torch.randn(t.shape, generator=generator, dtype=torch.float64).to(t.device))
            if t.is_floating_point()
            else t
            for name, t in case.arguments.items()
        }
        found.append(run(replace(case, arguments=rounded), "reference", double=True))
    return found


def error_ratio(case: Case, found: list[Tensor], others: list[list[Tensor]], truth: list[Tensor]) -> float:
    """The largest error as a share of what is allowed; inf for one that is not finite. others: of `peers`"""
    steep = (1 + case.beta) / case.temperature
    eps = torch.finfo(case.arguments["z1"].dtype).eps
    largest = 0.0
    for place, (size, one, exact) in enumerate(zip(sizes(case, truth), found, truth, strict=True)):
        error = float((one.double() - exact).norm()) / size
        known = max(float((other[place].double() - exact).norm()) / size for other in others)
        if not math.isfinite(error):
            return math.inf
        allowed = 2 * known + 3e-6 + 3e-7 * steep
        if eps > 1e-6 and (case.exact or not case.options["normalize"]):  # ∂L/∂s and gradients are rounded
            allowed += 4 * eps if place > 0 else 0.0
        elif eps > 1e-6:  # unit vectors are rounded, too
            allowed += 3 * eps * max(1.0, steep)
        largest = max(largest, error / allowed)
    return largest


def run_cases(cases: int, seed: int, limits: Limits = DEFAULT_LIMITS) -> Tally:
    """Compare random cases; those that `InfoNCE` refuses are drawn again."""
    tally, number = Tally(), 0
    while tally.tried < cases:
        number += 1
        case = draw_case(Draw(seed * 1_000_003 + number, limits))
        try:
            truth = run(case, "reference", double=True)
        except ValueError:  # contradictory settings
            if number > 20 * cases:
                raise
            continue
        tally.tried += 1
        try:
            with as_many_rows(limits.backend == "fused" and number % 2 == 1):
                found = run(case, limits.backend)
            ratio = error_ratio(case, found, peers(case, number), truth)
        except Exception as error:  # any failure is a wrong case
            ratio = math.inf
            tally.failures.append(f"{type(error).__name__}: {error}")
        if float(truth[0].abs().sum()) > 0 and float(truth[1].abs().sum()) > 0:
            tally.reached.update(case.kinds)
            tally.reached["any"] += 1
        tally.worst = max(tally.worst, ratio)
        if not ratio <= 1:
            tally.wrong += 1
            shapes = {name: tuple(tensor.shape) for name, tensor in case.arguments.items()}
            tally.failures.append(
                f"seed {seed}, case {number}: {ratio:.3g}, {sorted(case.kinds)}, {case.options}, {shapes}"
            )
    return tally


@contextmanager
def as_many_rows(enabled: bool) -> Iterator[None]:
    """Let few rows take the code for many, which computes each score once."""
    if not enabled:
        yield
        return
    from hardneg.losses.kernels.triton import passes

    before = passes.MIN_SYMMETRIC_ROWS
    passes.MIN_SYMMETRIC_ROWS = 1
    try:
        yield
    finally:
        passes.MIN_SYMMETRIC_ROWS = before


def run_in_processes(cases: int, seed: int, limits: Limits, workers: int) -> Tally:
    """`run_cases` shared by new processes; each has its own seed."""
    shares = [cases * (worker + 1) // workers - cases * worker // workers for worker in range(workers)]
    seeds = [1000 * seed + worker for worker in range(workers)]
    total = Tally()
    with ProcessPoolExecutor(workers, get_context("spawn")) as pool:  # CUDA does not survive a fork
        for tally in pool.map(run_cases, shares, seeds, [limits] * workers):
            total.tried += tally.tried
            total.wrong += tally.wrong
            total.worst = max(total.worst, tally.worst)
            total.reached += tally.reached
            total.failures += tally.failures
    return total


def seed_of_the_day() -> int:
    """A seed that changes every day, so that repeated runs try other cases."""
    return datetime.now(UTC).toordinal()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--cases", type=int, default=150)
    parser.add_argument("--seed", type=int, default=seed_of_the_day(), help="default: that of the day")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--workers", type=int, default=1, help="processes (default: 1)")
    options = parser.parse_args()
    limits = Limits(device=options.device)
    if options.workers > 1:
        tally = run_in_processes(options.cases, options.seed, limits, options.workers)
    else:
        tally = run_cases(options.cases, options.seed, limits)
    counts = f"{tally.tried} cases, {tally.wrong} wrong"
    print(f"seed {options.seed}: {counts}, largest error {tally.worst:.2f} of what is allowed")
    print(", ".join(f"{kind} {number}" for kind, number in tally.reached.most_common()))
    print("\n".join(tally.failures))


if __name__ == "__main__":
    main()
