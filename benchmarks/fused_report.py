"""The results of `fused.py` as Markdown tables, and the measured value of each claim."""

import math
from collections.abc import Callable, Iterable
from typing import Any

Row = dict[str, Any]

LIMIT = (
    "case", "rows", "candidates", "dim", "peer", "ms", "limit_share", "fixed_share", "times_hardneg", "extra_mib",
    "bound_mib",
)  # fmt: skip
COLUMNS = {
    "first": ("cache", "batch", "dim", "peer", "first_s"),
    "compiled": ("batch", "dim", "peer", "ms", "ratio", "extra_mib", "memory_ratio", "right", "replays"),
    "supervised": ("batch", "dim", "dtype", "peer", "ms", "ratio"),
    "ring": ("task", "dtype", "rows", "candidates", "peer", "ms", "ratio"),
    "nan": ("case", "argument", "value", "is_nan", "right_after", "raised"),
    "random": ("seed", "tried", "wrong", "worst"),
    "limit": LIMIT,
    "generality": ("peer", "rows", "dim", "ms", "difference_ms"),
    "small": ("batch", "dim", "peer", "ms", "ratio"),
    "grid": LIMIT,
    "accuracy": ("rows", "dim", "dtype", "peer", "error_of_gradient", "bitwise_twice"),
}
TITLES = {
    "limit_share": "T*/T",
    "fixed_share": "at 790 TFLOP/s",
    "times_hardneg": "× hardneg",
    "extra_mib": "extra MiB",
    "bound_mib": "bound MiB",
    "memory_ratio": "memory / eager",
    "ratio": "× first",
    "difference_ms": "ms more than HCL",
    "first_s": "s",
    "right": "right loss",
    "replays": "CUDA graphs used",
    "is_nan": "loss is NaN",
    "right_after": "next loss right",
    "worst": "largest error / allowed",
    "error_of_gradient": "relative error",
    "bitwise_twice": "the same twice",
    "dim": "d",
    "peer": "",
    "case": "",
    "task": "",
    "cache": "",
}
# Columns that have the reason if a row failed or was left out.
MEASURED = ("ms", "error_of_gradient", "first_s", "is_nan", "tried")
FASTEST = ((128, 5.3), (256, 9.5), (768, 24.5))  # d and ms of HCL with debiasing at 65,536 rows
DEARER = {"labels": 1, "threshold": 1, "β = 0.5": 1, "β = 2": 1, "β = 1.5": 2, "learnt temperature": 2}  # ms
PRECISIONS = ("bfloat16", "float16", "float32")


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
        return reason[:60] if column in MEASURED else ""
    if column == "ms":
        low, high = row["ms_quartiles"]
        return f"{given:,.3f} ({low:,.3f}–{high:,.3f})"
    if column == "error_of_gradient":
        return f"{given:.2e}"
    if isinstance(given, bool):
        return "yes" if given else "NO"
    if isinstance(given, int) and column != "seed":
        return f"{given:,}"
    return f"{given:,.2f}" if isinstance(given, float) else str(given)


def claims(sections: dict[str, Any]) -> list[tuple[str, str]]:
    """Every claim about the kernel with its measured value."""

    def rows(name: str, **wanted: Any) -> list[Row]:
        section = sections.get(name, {"rows": []})["rows"]
        return [row for row in section if all(row.get(key) == given for key, given in wanted.items())]

    tower: Row = {"case": "one tower", "rows": 65_536}
    answers = [*claims_of_calls(rows)]
    for dim, most in FASTEST:
        times = values(rows("limit", **tower, dim=dim, peer="hardneg"), "ms")
        answers.append((f"HCL with debiasing, 65,536 rows, d = {dim}: at most {most} ms", at_most(times, most)))
    for name, more in DEARER.items():
        found = values(rows("generality", **tower, dim=128, peer=name), "difference_ms")
        answers.append((f"{name} within {more} ms of HCL, 65,536 rows, d = 128", at_most(found, more)))
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
    return answers


def claims_of_calls(rows: Callable[..., list[Row]]) -> list[tuple[str, str]]:
    """Claims about first calls, compiled ones, labels, rings, invalid values and random settings."""
    answers = []
    disk = values(rows("first", cache="on disk"), "first_s")
    answers.append(("first call from the disk cache at most 1 s, all presets", at_most(disk, 1)))
    cold = values([row for row in rows("first", cache="cold") if row["peer"] != "compiled"], "first_s")
    peer = values(rows("first", peer="compiled"), "first_s")
    claim, compared = "first call without a cache no longer than that of torch.compile", "not measured"
    if peer:
        claim, compared = f"{claim}, {peer[0]:.3g} s", at_most(cold, peer[0])
    answers.append((claim + ", all presets", compared))
    answers.append(("first call without a cache: goal 3 s", at_most(cold, 3)))
    for preset in ("hscl", "scl", "supcon"):
        slower = values(rows("supervised", batch=256, peer=f"hardneg {preset}"), "ratio")
        answers.append((f"hn.{preset} not slower than plain SupCon, B = 256", at_most(slower, 1)))
    memory = values(rows("compiled", peer="compiled"), "memory_ratio")
    answers.append(("compiled memory at most 1.2 of eager memory", at_most(memory, 1.2)))
    answers.append(("eager memory at most 1.2 of compiled memory", at_most([1 / one for one in memory], 1.2)))
    graph = rows("compiled", peer="CUDA graph, new values")
    good = [float(row["right"] and row["replays"]) for row in graph if "right" in row]
    answers.append(("a CUDA graph computes the loss of its present input", at_least(good, 1)))
    for size in (256, 1024):
        for dtype in PRECISIONS:
            wanted: Row = {"task": "find", "rows": size, "dtype": dtype}
            for name, least, words in (("sort", 3.0, "at least 3 times faster"), ("topk", 1.0, "faster")):
                faster = values(rows("ring", **wanted, peer=f"product and {name}"), "ratio")
                claim = f"ring, {size:,} rows, {dtype}: {words} than product and {name}"
                answers.append((claim, at_least(faster, least)))
    bad = rows("nan")
    right = [float(row.get("is_nan", False) and row.get("right_after", False)) for row in bad]
    answers.append(
        (f"invalid values give NaN, without waiting, then a right loss: {len(right)} cases", at_least(right, 1))
    )
    tries = rows("random")
    wrong = [float(row["wrong"]) if row.get("tried", 0) >= 150 else math.nan for row in tries]
    answers.append(("150 random settings, none wrong", at_most(wrong, 0)))
    return answers


def values(found: Iterable[Row], field: str) -> list[float]:
    """A field of all rows that have it, NaN for those that failed, so that no claim is met without them."""
    given = [row.get(field, math.nan if "error" in row else None) for row in found]
    return [one for one in given if one is not None]


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
