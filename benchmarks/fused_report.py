"""The results of `fused.py` as Markdown tables, and the measured value of each claim."""

import math
from collections.abc import Callable, Iterable
from typing import Any

Row = dict[str, Any]

LIMIT = ("case", "rows", "candidates", "dim", "peer", "ms", "limit_share", "times_hardneg", "extra_mib", "bound_mib")
COLUMNS = {
    "limit": LIMIT,
    "generality": ("peer", "rows", "dim", "ms", "ratio"),
    "small": ("batch", "dim", "peer", "ms", "ratio"),
    "ring": ("task", "rows", "candidates", "peer", "ms", "ratio"),
    "grid": LIMIT,
    "accuracy": ("rows", "dim", "dtype", "peer", "error_of_gradient", "bitwise_twice"),
}
TITLES = {
    "limit_share": "T*/T",
    "times_hardneg": "× hardneg",
    "extra_mib": "extra MiB",
    "bound_mib": "bound MiB",
    "ratio": "× first",
    "error_of_gradient": "relative error",
    "bitwise_twice": "the same twice",
    "dim": "d",
    "peer": "",
    "case": "",
    "task": "",
}


def text(found: dict[str, Any]) -> str:
    """Tables of all sections and the list of claims."""
    parts = [f"{found['machine']}\n{found['versions']}"]
    for name, section in found["sections"].items():
        rate, seconds = section["product_tflops"], section.get("seconds", math.nan)
        parts.append(f"\n### {name} ({rate:.0f} TFLOP/s, {seconds:.0f} s)\n\n{table(name, section['rows'])}")
    parts.append("\n### claims\n")
    parts += [f"- {verdict}: {claim}" for claim, verdict in claims(found["sections"])]
    return "\n".join(parts)


def table(name: str, rows: list[Row]) -> str:
    """The rows of a section; a row that failed or was left out has the reason instead of a time."""
    columns = COLUMNS[name]
    lines = [
        "| " + " | ".join(TITLES.get(column, column) for column in columns) + " |",
        "|" + "|".join("---" if TITLES.get(column) == "" else "---:" for column in columns) + "|",
    ]
    lines += ["| " + " | ".join(shown(row, column) for column in columns) + " |" for row in rows]
    return "\n".join(lines)


def shown(row: Row, column: str) -> str:
    """One field."""
    given = row.get(column)
    if given is None:
        reason = str(row.get("skipped") or row.get("error") or "").replace("\n", " ").replace("|", "/")
        return reason[:60] if column in ("ms", "error_of_gradient") else ""
    if column == "ms":
        low, high = row["ms_quartiles"]
        return f"{given:,.3f} ({low:,.3f}–{high:,.3f})"
    if column == "error_of_gradient":
        return f"{given:.2e}"
    if isinstance(given, bool):
        return "yes" if given else "NO"
    if isinstance(given, int):
        return f"{given:,}"
    return f"{given:,.2f}" if isinstance(given, float) else str(given)


def claims(sections: dict[str, Any]) -> list[tuple[str, str]]:
    """Every claim about the kernel with its measured value."""

    def rows(name: str, **wanted: Any) -> list[Row]:
        section = sections.get(name, {"rows": []})["rows"]
        return [row for row in section if all(row.get(key) == given for key, given in wanted.items())]

    def values(found: Iterable[Row], field: str) -> list[float]:
        return [row[field] for row in found if row.get(field) is not None]

    tower: Row = {"case": "one tower", "rows": 65_536}
    answers = []
    for dim, least in ((128, 0.40), (256, 0.45), (768, 0.55)):
        share = values(rows("limit", **tower, dim=dim, peer="hardneg"), "limit_share")
        answers.append((f"65,536 rows, d = {dim}: T*/T ≥ {least:.2f}", at_least(share, least)))
    for peer, least in (("published HCL", 40), ("published HCL compiled", 25)):
        times = values(rows("limit", **tower, dim=128, peer=peer), "times_hardneg")
        answers.append((f"65,536 rows, d = 128: at least {least} times faster than {peer}", at_least(times, least)))
    memory = [
        row["extra_mib"] / row["bound_mib"]
        for name in ("limit", "grid")
        for row in rows(name, peer="hardneg", case="one tower")
        if row.get("extra_mib") is not None
    ]
    answers.append(("extra memory at most 8·rows·d + 64·rows + 64 MiB, one tower, all sizes", at_most(memory, 1)))
    million = rows("limit", peer="hardneg", case="one tower", rows=1_048_576, dim=128)
    answers.append(("1,048,576 rows at d = 128 run: seconds", at_most([ms / 1000 for ms in values(million, "ms")], 60)))
    quarter = values(rows("limit", peer="hardneg", case="one tower", rows=262_144, dim=128), "extra_mib")
    growth = [more / less for more, less in zip(values(million, "extra_mib"), quarter, strict=False)]
    answers.append(("memory from 262,144 to 1,048,576 rows grows at most 4-fold", at_most(growth, 4.05)))
    for limit, names in (
        (1.10, ("β = 0.5", "β = 1", "β = 2")),
        (1.5, ("β = 1.5",)),
        (1.15, ("labels", "threshold")),
    ):
        for name in names:
            price = values(rows("generality", peer=name), "ratio")
            answers.append((f"price of {name} over plain InfoNCE ≤ {limit}", at_most(price, limit)))
    for peer in ("published HCL", "published HCL autocast"):
        answers.append((f"gradients within 1.2 times the error of {peer}", at_most(errors(rows, peer), 1.2)))
    exact = errors(rows, "hardneg reference")
    beside = f"for comparison ({max(exact):.3g})" if exact else "not measured"
    answers.append(("error of gradients over that of hardneg reference, which multiplies in float32", beside))
    same = [float(row["bitwise_twice"]) for row in rows("accuracy", peer="hardneg") if "bitwise_twice" in row]
    answers.append(("gradients bitwise the same twice", at_least(same, 1)))
    for kind, peer in (("bfloat16", "published HCL autocast"), ("float32", "published HCL float32")):
        mine = values(rows("small", batch=256, peer=f"hardneg {kind}"), "ms")
        theirs = values(rows("small", batch=256, peer=peer), "ms")
        ratio = [one / other for one, other in zip(mine, theirs, strict=False)]
        answers.append((f"B = 256: {kind} at most 0.6 of {peer}", at_most(ratio, 0.6)))
    band = values(rows("ring", task="loss", rows=1024, peer="ring"), "ratio")
    answers.append(("a ring costs at most 2.2 times the loss without, B = 1,024", at_most(band, 2.2)))
    sort = values(rows("ring", task="find", rows=256, peer="product and sort"), "ratio")
    answers.append(("finding the ring at least 3 times faster than product and sort, B = 256", at_least(sort, 3)))
    return answers


def errors(rows: Callable[..., list[Row]], peer: str) -> list[float]:
    """Ratios of our error to that of an eager peer with the same inputs, each dtype and size."""
    return [
        ours["error_of_gradient"] / other["error_of_gradient"]
        for ours in rows("accuracy", peer="hardneg")
        for other in rows("accuracy", peer=peer, rows=ours["rows"], dtype=ours["dtype"])
        if ours.get("error_of_gradient") is not None and other.get("error_of_gradient") is not None
    ]


def at_least(found: list[float], limit: float) -> str:
    """Whether the smallest value is large enough; NaN is not."""
    if not found:
        return "not measured"
    return f"{'met' if all(one >= limit for one in found) else 'NOT MET'} ({min(found):.3g})"


def at_most(found: list[float], limit: float) -> str:
    """Whether the largest value is small enough."""
    if not found:
        return "not measured"
    return f"{'met' if all(one <= limit for one in found) else 'NOT MET'} ({max(found):.3g})"
