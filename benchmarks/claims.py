"""The claims of the papers, what was measured of them here, and the verdict, as tables in Markdown.

    python benchmarks/claims.py                # print them
    python benchmarks/claims.py --write        # into docs/results.md, with all tables and plots of recorded runs

`benchmarks/claims.yaml` lists the claims: where the paper makes them, and which recorded rows they compare.
Differences, their significance (Welch's t-test over seeds) and verdicts are computed from `results/`; a row without
runs gives "not run yet" and the name of the table that has it.
"""

import argparse
import json
import re
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import evidence_tables
import yaml
from evidence_plots import plots
from evidence_tables import (
    HERE,
    RESULTS,
    Reading,
    accuracies,
    batch_statistics,
    columns_of,
    compared,
    final_columns,
    rows_of,
    signed,
    spread,
)

from hardneg.insight.significance import Difference

# What a claim was tested on, and where the page shows it.
TABLES = {
    "digits": ("digits", "#digits"),
    "digits-batches": ("digits", "#batches-of-similar-digits"),
    "graphs": ("graphs", "#graphs"),
    "graphs.json": ("graphs", "graphs.md#measured"),
    "ksweep_digits.json": ("digits", "#do-more-negatives-hurt"),
    "cifar10.json": ("CIFAR-10, 60 epochs", "training.md#measured"),
    "proximity": ("CIFAR-10, 30 epochs", "proximity-batches.md#measured-runs"),
    "images": ("CIFAR-10", ""),
    "images-cpu": ("CIFAR-10, 5 epochs", "#cifar-10-on-a-cpu"),
    "memory-cpu": ("CIFAR-10, 10 epochs", "#moco-and-memory-banks-on-a-cpu"),
    "tinyimagenet": ("tinyimagenet100_32", ""),
    "tinyimagenet-cpu": ("tinyimagenet100_32, 5 epochs", "#a-hundred-classes-on-a-cpu"),
    "quickthoughts": ("sentences", "#sentences"),
    "simcse": ("sentences", ""),
    "simcse-cpu": ("6,400 sentences", "#simcse-on-a-cpu"),
}
THEORY = {
    "holds": "confirmed (theory)",
    "holds with a correction": "confirmed with a correction (theory)",
    "does not hold as printed": "refuted",
    "not refuted": "not refuted (a conjecture)",
}
NAMES = {  # of columns that are paths into a record
    "pairs.same": "cosine of pairs of a class",
    "pairs.different": "cosine of pairs of different classes",
    "pairs.overlap": "overlap of the histograms",
    "false_negatives.last": "false negatives",
    "svm": "SVM",
}
Runs = list[dict[str, Any]]
load_table = cache(evidence_tables.load_table)
DOCS = HERE.parent / "docs"
PAGES = [DOCS / "results.md", DOCS / "proximity-batches.md", HERE.parent / "README.md"]
BATCHES = "batches-of-"


# The table of the README: its rows by the names they have in the tables of its columns.
HEADLINE = {
    "proximity": "CIFAR-10, 30 epochs",
    "images-cpu": "CIFAR-10, 5 epochs",
    "tinyimagenet-cpu": "100 classes, 5 epochs",
    "digits": "digits, 30 epochs",
}
HEADLINE_ROWS = {
    "SimCLR": ("SimCLR", "t = 0.5: SimCLR", "SimCLR", "SimCLR"),
    "debiased": (None, "t = 0.5: Debiased, τ⁺ = 0.1", None, "Debiased"),
    "HCL, β = 1": ("HCL", "t = 0.5: HCL, β = 1, τ⁺ = 0.1 (paper)", "HCL, β = 1, τ⁺ = 0.01", "HCL, β = 1"),
    "HCL, β = 2": (None, "t = 0.5: HCL, β = 2, τ⁺ = 0.1 (best of the grid)", None, "HCL, β = 2"),
    "auto": (None, "t = 0.5: auto", None, None),
    "SimCLR, proximity batches": ("SimCLR + proximity", "t = 0.5: SimCLR + proximity", None, None),
    "with labels: SCL": (None, "t = 0.5: SCL", "SCL", "SCL"),
    "with labels: H-SCL(β = 1)": (None, "t = 0.5: H-SCL(β = 1)", "H-SCL(β = 1)", "H-SCL(β = 1)"),
}


@dataclass(frozen=True)
class Outcome:
    """What one comparison found.

    label: of the data · column: what was compared · holds: whether the claim does, None without runs · text: shown ·
    difference: of two rows · weak: whether the claim is that there is no difference in one direction, which no test
    can show
    """

    label: str
    column: str
    holds: bool | None
    text: str = ""
    difference: Difference | None = None
    weak: bool = False


@cache
def rows(source: str) -> dict[str, Runs]:
    """The recorded runs of a table or of a file in results/, by the name of their row."""
    if not source.endswith(".json"):
        return rows_of(load_table(source), RESULTS)
    content = json.loads((RESULTS.parent / source).read_text(encoding="utf-8"))
    found: dict[str, Runs] = {}
    for row in content["rows"]:
        if source == "graphs.json":
            if row["kind"] == "accuracy" and row.get("lr") in (0.001, 0.01) and "layers" not in row:
                found[_graph_row(row)] = [{"svm": seed["accuracy"] / 100} for seed in row["seeds"]]
        elif source == "ksweep_digits.json":
            pairs = zip(row["knn"]["values"], row["linear"]["values"], strict=True)
            found[f"k = {row['num_negatives']}"] = [{"kNN": knn, "linear probe": linear} for knn, linear in pairs]
        else:
            found.setdefault(row["objective"], []).append({"kNN": row["knn"], "linear probe": row["linear"]})
    return found


def _graph_row(row: dict[str, Any]) -> str:
    if row["method"] == "graphcl":
        return f"{row['set']}: GraphCL" + (" + proximity" if row["sampler"] == "proximity" else "")
    return f"{row['set']}: {row['method']}, rate {row['lr']}, β = {row['beta']:g}"


def columns(source: str, names: list[str] | None) -> dict[str, Reading]:
    """How to read what a claim is about; a name with a dot is a path into the record."""
    if names is None and not source.endswith(".json"):
        return final_columns(load_table(source))
    if names is None:
        first = next(iter(rows(source).values()))[0]
        return {name: _path(name) for name in first}
    known = {} if source.endswith(".json") else columns_of(load_table(source))
    return {name: known.get(name) or _path(name) for name in names}


def _path(name: str) -> Reading:
    def read(line: dict[str, Any]) -> float | None:
        value: Any = line
        for part in name.split("."):
            value = value.get(part) if part != "last" else value[max(value, key=int)]
            if value is None:
                return None
        return float(value)

    return read


def compare(check: dict[str, Any]) -> Iterator[Outcome]:
    """One row against another, in each of its columns."""
    source, row, base = check["table"], check["row"], check["against"]
    label = TABLES[source][0]
    for name in (row, base):
        if name not in rows(source):
            raise ValueError(f"claims.yaml names the row {name!r}, which {source} does not have")
    other = columns(source, [check["other"]]) if "other" in check else None
    for heading, read in columns(source, check.get("columns")).items():
        column = NAMES.get(heading, heading.partition(",")[0])
        if other is not None:
            column = f"{heading} against {next(iter(other)).partition(', ')[2]}"
        baseline = rows(source)[base]
        if other is not None:  # another epoch of the baseline, read as if it were the same column
            found = _compared_epochs(rows(source)[row], baseline, read, next(iter(other.values())))
        else:
            found = compared(rows(source)[row], baseline, read)
        if found is None:
            yield Outcome(label, column, None)
            continue
        change, seeds = found
        up, down = change.significant and change.mean > 0, change.significant and change.mean < 0
        expected = check.get("expect", "above")
        holds = {"above": up, "below": down, "not above": not up, "not below": not down}[expected]
        weak = expected.startswith("not ")
        yield Outcome(label, column, holds and seeds > 1, signed(change), change, weak)


def _compared_epochs(runs: Runs, baseline: Runs, read: Reading, other: Reading) -> Any:
    values = [{"value": read(line)} for line in runs]
    others = [{"value": other(line)} for line in baseline]
    return compared(values, others, _path("value"))


def bounded(check: dict[str, Any]) -> Outcome:
    """The least value of Assumption 1, or of H-UCL − H-SCL, over epochs, hardenings and seeds."""
    source, part = check["table"], check["ordering"]
    values: list[float] = []
    last: list[float] = []
    for name in check["rows"]:
        for line in rows(source)[name]:
            for epoch, found in line["orderings"].items():
                numbers = [each["h_ucl"] - each["h_scl"] if part == "gap" else each[part] for each in found.values()]
                values += numbers
                last += numbers if int(epoch) == line["epochs"] else []
    label = TABLES[source][0]
    if not values:
        return Outcome(label, part, None)
    text = f"least {min(values):.3f}, mean {statistics.fmean(values):.3f}, least after the last epoch {min(last):.3f}"
    return Outcome(label, part, min(values) >= check["at_least"], text)


def finding(family: str, name: str) -> dict[str, Any]:
    """A finding of `hardneg theory`."""
    content = json.loads((RESULTS.parent / "theory.json").read_text(encoding="utf-8"))
    found: dict[str, Any] = next(each for each in content["families"][family]["findings"] if each["name"] == name)
    return found


def measured(claim: dict[str, Any]) -> tuple[str, str]:
    """What was measured of a claim, and the verdict."""
    texts: dict[str, list[str]] = {}  # by where they come from
    outcomes: list[tuple[str, Outcome]] = []  # with the table
    for check in claim.get("checks", []):
        source = check["table"]
        if "ordering" in check:
            found = [bounded(check)]
        elif "all" in check:
            found = [each for row, base in check["all"] for each in compare({**check, "row": row, "against": base})]
        else:
            found = list(compare(check))
        outcomes += [(source, each) for each in found]
        done = [each for each in found if each.holds is not None]
        if done:
            texts.setdefault("[{}]({})".format(*TABLES[source]), []).append(_shown(check, done))
    verdicts = _verdicts(outcomes)
    for family, name in claim.get("findings", []):
        texts.setdefault("[theory](theory.md)", []).append(name)
        verdicts.append(THEORY[finding(family, name)["verdict"]])
    verdicts += [claim["verdict"]] if "verdict" in claim else []
    shown = [f"{where}: {', '.join(parts)}" for where, parts in texts.items()]
    shown += [claim["measured"]] if "measured" in claim else []
    return ". ".join(shown) or "–", "; ".join(dict.fromkeys(verdicts))


def _shown(check: dict[str, Any], done: list[Outcome]) -> str:
    if "ordering" in check:
        return done[0].text
    if "all" in check:
        changes = [each.difference for each in done if each.difference is not None]
        level = sum(change.mean >= 0 for change in changes)
        up, down = (sum(change.significant and sign * change.mean > 0 for change in changes) for sign in (1, -1))
        return f"{level} of {len(changes)} differences at or above 0; {up} significant above 0, {down} below"
    name = check.get("name") or f"{check['row']} against {check['against']}"
    return f"{name} " + " and ".join(f"{each.text} ({each.column})" for each in done)


def _verdicts(outcomes: list[tuple[str, Outcome]]) -> list[str]:
    """A verdict for each kind of data: a column is confirmed if the claim holds in all comparisons of it."""
    verdicts = []
    for label in dict.fromkeys(each.label for _, each in outcomes):
        of_label = [(source, each) for source, each in outcomes if each.label == label]
        done = [each for _, each in of_label if each.holds is not None]
        names = dict.fromkeys(each.column for each in done)
        kept = [name for name in names if all(each.holds for each in done if each.column == name)]
        word = "not contradicted" if all(each.weak for each in done) else "confirmed"
        if done and len(kept) == len(names):
            verdicts.append(f"{word} ({label})")
        elif kept:
            verdicts.append(f"{word} for {', '.join(kept)} only ({label})")
        elif done:
            verdicts.append(f"not confirmed ({label})")
        missing = dict.fromkeys(source for source, each in of_label if each.holds is None)
        if missing:
            tables = ", ".join(f"`{source}`" for source in missing)
            verdicts.append(f"not run yet ({label}, {tables})" if not done else f"partly not run yet ({tables})")
    return verdicts


def load(file: Path = HERE / "claims.yaml") -> dict[str, list[dict[str, Any]]]:
    """The claims by paper."""
    content: dict[str, list[dict[str, Any]]] = yaml.safe_load(file.read_text(encoding="utf-8"))
    return content


def table(claims: list[dict[str, Any]]) -> str:
    """The claims of one paper in Markdown."""
    lines = [["claim", "in the paper", "measured here", "verdict"], ["---"] * 4]
    lines += [[claim["claim"], claim["where"], *measured(claim)] for claim in claims]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def markdown() -> str:
    """All claims, a heading and a table for each paper."""
    return "\n\n".join(f"### {paper}\n\n{table(claims)}" for paper, claims in load().items())


def headline() -> str:
    """The table of the README: kNN after the last epoch."""
    lines = [["negatives", *HEADLINE.values()], ["---", *["---:"] * len(HEADLINE)]]
    for title, names in HEADLINE_ROWS.items():
        cells = []
        for source, name in zip(HEADLINE, names, strict=True):
            runs = [] if name is None else rows(source)[name]
            read = next(iter(final_columns(load_table(source)).values()))
            values = [value for line in runs if (value := read(line)) is not None]
            cells.append(spread(values) if values else "–")
        lines.append([title, *cells])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def filled(page: str) -> str:
    """A page with the current text between ``<!-- NAME -->`` and ``<!-- end -->``.

    NAME is ``claims``, ``headline``, the name of a table (its accuracies), or that with ``batches-of-`` before it (its
    batches).
    """

    def part(found: re.Match[str]) -> str:
        name = found[1]
        if name == "claims":
            text = markdown()
        elif name == "headline":
            text = headline()
        elif name.startswith(BATCHES):
            text = batch_statistics(load_table(name.removeprefix(BATCHES)), RESULTS)
        else:
            text = accuracies(load_table(name), RESULTS)
        return f"<!-- {name} -->\n\n{text}\n\n<!-- end -->"

    return re.sub(r"<!-- ([\w-]+) -->\n.*?<!-- end -->", part, page, flags=re.DOTALL)


def drawings() -> dict[str, str]:
    """The plots of all recorded tables, by the name of their file in docs/."""
    found: dict[str, str] = {}
    for name in sorted(file.stem for file in RESULTS.glob("*.jsonl")):
        found |= plots(load_table(name), RESULTS)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="write the tables into the pages instead of printing them")
    if not parser.parse_args().write:
        print(markdown())
        return
    for page in PAGES:
        page.write_text(filled(page.read_text(encoding="utf-8")), encoding="utf-8")
    for name, text in drawings().items():
        (DOCS / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
