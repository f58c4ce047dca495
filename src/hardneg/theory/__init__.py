"""Numerical checks of the theorems about hard negatives: what holds, and where a printed statement does not.

A family is the statements of one paper; `FAMILIES` lists them. ``FAMILIES["cnce"].run()`` yields a `Finding` for each.
"""

from hardneg.theory.families import FAMILIES, Check, Family
from hardneg.theory.result import Chart, Finding, Line

__all__ = ["FAMILIES", "Chart", "Check", "Family", "Finding", "Line"]
