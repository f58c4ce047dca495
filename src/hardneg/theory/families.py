"""The registry of the checks, by paper. It imports nothing until a check is run, so that listing them is fast."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

from hardneg.theory.result import Finding


@dataclass(frozen=True)
class Check:
    """One function of a family; quick: arguments of its short form."""

    function: str
    quick: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Family:
    """The checks of one paper. module: of `hardneg.theory`

    Examples:
        >>> [finding.verdict for finding in FAMILIES["hscl"].run(quick=True)]
        ['holds', 'holds', 'holds']
    """

    title: str
    module: str
    checks: tuple[Check, ...]

    def run(self, quick: bool = False, seed: int = 0) -> Iterator[Finding]:
        """Yield the finding of each check. quick: the short form, of seconds · seed: of all random examples"""
        for number in range(len(self.checks)):
            yield self.run_check(number, quick, seed)

    def run_check(self, number: int, quick: bool = False, seed: int = 0) -> Finding:
        """The finding of one check."""
        check = self.checks[number]
        function = getattr(import_module(f"hardneg.theory.{self.module}"), check.function)
        found: Finding = function(seed=seed, **(check.quick if quick else {}))
        return found


FAMILIES: dict[str, Family] = {
    "cnce": Family(
        "CNCE (Ring): bounds on mutual information and variance",
        "cnce",
        (
            Check("theorem_3_1", {"trials": 200}),
            Check("table_5", {"lower": (0.1, 0.5), "atoms": 40, "degree": 2}),
            Check("ring_from_zero", {"upper": (1.0, 0.9), "atoms": 40}),
            Check("theorem_3_2", {"trials": 400}),
        ),
    ),
    "hcl": Family(
        "HCL: the limit β → ∞, packings of class vectors, classification error",
        "hcl",
        (
            Check("proposition_3", {"betas": (0, 2, 20, 200, 1000), "points": 2000}),
            Check("theorem_4", {"pairs": ((4, 3), (5, 3)), "starts": 4}),
            Check("theorem_5", {"dims": (5,), "starts": 2}),
        ),
    ),
    "hscl": Family(
        "H-SCL: supervised against unsupervised hard negatives",
        "hscl",
        (
            Check("proposition_2", {"trials": 50}),
            Check("lemma_1", {"trials": 8}),
            Check("assumption_1_is_needed", {"attempts": 4000}),
        ),
    ),
    "prosampler": Family(
        "ProSampler: similar neighbors, and walks with restarts",
        "prosampler",
        (
            Check("proposition_1", {"seeds": 5}),
            Check("proposition_2", {"graphs": 4, "nodes": 6, "restarts": (0.1, 0.5)}),
            Check("locality_of_walks", {"restarts": (0.1, 0.9), "moves": 300, "batches": 60}),
        ),
    ),
    "class-vectors": Family(
        "Number of negatives: minimizers of the population loss",
        "class_vectors",
        (
            Check("lemma_1", {"trials": 10, "ks": (1, 2)}),
            Check("balanced_classes", {"cases": ((3, 2),), "ks": (1, 4, 16)}),
            Check("unbalanced_classes", {"priors": ((0.8, 0.1, 0.1),), "random": 1, "ks": (1, 8)}),
        ),
    ),
}
