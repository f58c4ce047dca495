"""The Triton kernels of every setting compile for a GPU; compiling needs none."""

from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import Tensor

import hardneg as hn

pytestmark = [
    pytest.mark.skipif(find_spec("triton") is None, reason="Triton is for Linux only"),
    pytest.mark.filterwarnings("ignore"),  # the losses are not computed
]

TYPES = {torch.bfloat16: "bf16", torch.float32: "fp32", torch.int32: "i32", torch.int64: "i64", torch.uint8: "u8",
         torch.float16: "fp16", torch.int8: "i8"}  # fmt: skip
ROWS, KEYS = 64, 8192  # beyond `percentile_bands.SHORTEST_ROW`, so that rows are sampled


class Recorder:
    """Replaces a kernel that is called directly, and records its arguments."""

    def __init__(self, program: Any, notes: list[tuple[Any, dict[str, Any], int, int]]) -> None:
        self.program, self.notes, self.arg_names = program, notes, program.arg_names

    def __getitem__(self, grid: Any) -> Any:
        def note(
            *given: Any, num_warps: int = 4, num_stages: int = 3, maxnreg: int | None = None, **named: Any
        ) -> None:
            arguments = dict(zip(self.arg_names, given, strict=False)) | named
            self.notes.append((self.program, arguments, num_warps, num_stages))

        return note


def launches(loss: hn.InfoNCE, given: dict[str, Any]) -> list[tuple[Any, dict[str, Any], int, int]]:
    """Kernels that a forward and backward pass would launch on a GPU, with their arguments.

    With the first tile of each; `list_candidates` with all of its tiles, because its products depend on both sizes.
    """
    from hardneg.losses.kernels.triton import (
        backward,
        forward,
        operators,
        paired_loss,
        percentile_bands,
        rowwise,
        tile_sizes,
    )

    notes: list[tuple[Any, dict[str, Any], int, int]] = []

    def launch(
        program: Any,
        grid: Any,
        arguments: dict[str, Any],
        warps: int = 4,
        stages: int = 3,
        registers: int | None = None,
    ) -> None:
        notes.append((program, arguments, warps, stages))

    def in_tile(
        program: Any, arguments: dict[str, Any], rows: int, parts: int, width: int, whole: bool, name: str, **_: Any
    ) -> None:
        matrix = arguments["anchors_" if "anchors_" in arguments else "outer"]
        tiles = tile_sizes.tile_options(name, width, matrix.element_size(), whole)
        program = getattr(program, "program", program)
        for tile in tiles if name == "list_candidates" else tiles[:1]:
            sizes = {"OUTER_BLOCK": tile.outer, "INNER_BLOCK": tile.inner, "WHOLE": tile.chunk is None,
                     "DESCRIPTOR": False, "WIDTH": tile.chunk or max(16, 1 << (width - 1).bit_length())}  # fmt: skip
            notes.append((program, {**arguments, **sizes}, tile.warps, tile.stages))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(operators, "available", lambda device: True)
        patch.setattr(tile_sizes, "launch", in_tile)
        for module in (paired_loss, rowwise, percentile_bands):
            patch.setattr(module, "launch", launch)
        for module, name in ((forward, "finish"), (backward, "score_coefficients")):
            patch.setattr(module, name, Recorder(getattr(module, name), notes))
        loss(**given).sum().backward()
    return notes


def compiled(program: Any, arguments: dict[str, Any], warps: int, stages: int) -> Any:
    """A kernel compiled for the types of the given arguments, specialized as by Triton."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature: dict[str, str] = {}
    constants: dict[tuple[int], Any] = {}
    attributes: dict[tuple[int], Any] = {}
    for place, name in enumerate(program.arg_names):
        value = arguments[name]
        if place in program.constexprs or value is None or (type(value) is int and value == 1):
            signature[name], constants[(place,)] = "constexpr", value
        elif isinstance(value, Tensor):
            signature[name], attributes[(place,)] = "*" + TYPES[value.dtype], [["tt.divisibility", 16]]
        elif isinstance(value, float):
            signature[name] = "fp32"
        else:
            signature[name] = "i32"
            if value % 16 == 0:
                attributes[(place,)] = [["tt.divisibility", 16]]
    source = ASTSource(program, signature, constants, attributes)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps, "num_stages": stages})


CASES: dict[str, tuple[dict[str, Any], list[str]]] = {
    "pairs": ({"hardening": hn.Exponential(1.0), "class_prior": 0.1}, []),
    "cold": ({"temperature": 0.02, "hardening": hn.Exponential(1.3)}, []),
    "labels": ({"supervision": "full", "hardening": hn.Exponential(0.5)}, ["labels"]),
    "towers": ({"in_batch": "other", "symmetric": True, "hardening": hn.BelowPositive(0.1)}, []),
    "towers, whole loss": ({"in_batch": "other", "symmetric": True, "hardening": hn.Exponential(1.0)}, []),
    "towers, cold": ({"in_batch": "other", "symmetric": True, "temperature": 0.01}, []),
    "one direction": ({"in_batch": "other"}, []),
    "queue": ({"in_batch": None}, ["negatives"]),
    "queue, some excluded": ({"in_batch": None}, ["negatives", "exclude"]),
    "queue, masked": ({"in_batch": None, "hardening": hn.Threshold(0.5)}, ["negatives", "negative_mask"]),
    "ring": ({"in_batch": None, "hardening": hn.Ring(0.9, 0.99)}, ["negatives"]),
    "ring, some excluded": ({"in_batch": None, "hardening": hn.Ring(0.9, 0.99)}, ["negatives", "exclude"]),
    "ring, masked": ({"in_batch": None, "hardening": hn.Ring(0.9, 0.99)}, ["negatives", "negative_mask"]),
    "ring of batch and queue": ({"hardening": hn.Ring(0.9, 0.99)}, ["negatives"]),
    "batch and queue, masked": ({"hardening": hn.Exponential(2.0)}, ["negatives", "negative_mask"]),
}


NARROW, FLOAT32, WIDE = (torch.bfloat16, 128), (torch.float32, 64), (torch.bfloat16, 384)
# In the quick run every mask and layout is compiled once, in one of the three forms; rings, the slowest, are not.
QUICK = {
    ("pairs", NARROW), ("cold", FLOAT32), ("labels", WIDE), ("towers, whole loss", NARROW), ("towers", FLOAT32),
    ("queue, some excluded", WIDE), ("queue, masked", FLOAT32),
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "dtype", "dim"),
    [
        pytest.param(name, *form, marks=[] if (name, form) in QUICK else [pytest.mark.slow])
        for form in (NARROW, FLOAT32, WIDE)
        for name in CASES
    ],
    ids=str,
)
def test_kernels_compile_for_a_gpu(name: str, dtype: torch.dtype, dim: int) -> None:
    check(*CASES[name], dtype, dim)


TILTED = hn.Exponential(1.3)


@pytest.mark.parametrize(
    ("hardening", "dtype"),
    [
        pytest.param(
            hardening, dtype, marks=[] if (hardening, dtype) == (TILTED, torch.bfloat16) else [pytest.mark.slow]
        )
        for hardening in (TILTED, (hn.Exponential(1.0), hn.Threshold(0.5)))
        for dtype in (torch.bfloat16, torch.float32)
    ],
    ids=str,
)
def test_kernels_that_use_the_symmetry_of_scores_compile(
    hardening: Any, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hardneg.losses.kernels.triton import wide_rows

    monkeypatch.setattr(wide_rows, "SYMMETRIC_STRIP", 32)
    monkeypatch.setattr(wide_rows, "MIN_SYMMETRIC_STRIPS", 2)
    notes = check({"supervision": "negatives", "hardening": hardening}, ["labels"], dtype, 384)
    assert sum(arguments.get("SYMMETRIC", False) for _, arguments, _, _ in notes) == 2 * ROWS / 32


def check(options: dict[str, Any], names: list[str], dtype: torch.dtype, dim: int) -> list[Any]:
    """Compile all kernels that a loss would launch, and return them."""
    everything = {
        "negatives": torch.randn(KEYS, dim).to(dtype).requires_grad_(),
        "exclude": torch.arange(ROWS) % KEYS,
        "negative_mask": torch.ones(ROWS, KEYS, dtype=torch.bool),
        "labels": torch.arange(ROWS) % 7,
    }
    views = {view: torch.randn(ROWS, dim).to(dtype).requires_grad_() for view in ("z1", "z2")}
    given = views | {key: everything[key] for key in names}
    notes = launches(hn.InfoNCE(**options, backend="fused"), given)
    assert len(notes) >= 4
    for program, arguments, warps, stages in notes:
        made = compiled(program, arguments, warps, stages)
        assert made.metadata.shared <= 227 * 1024, f"{program.__name__} does not fit"
    return notes


def test_the_fastest_tile_that_triton_can_compile_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    from hardneg.losses.kernels.triton import tile_sizes

    slow, fast, failing = (tile_sizes.Tile(64, 64, 4, stages) for stages in (1, 2, 3))
    monkeypatch.setattr(tile_sizes, "_milliseconds", lambda attempt, tile: float(tile is slow))

    def attempt(tile: tile_sizes.Tile) -> None:
        if tile is failing:
            raise RuntimeError("PassManager::run failed")

    assert tile_sizes._fastest(attempt, [failing, slow, fast]) is fast
    assert tile_sizes._fastest(attempt, [failing]) is failing  # its launch then raises the error

    def broken(tile: tile_sizes.Tile) -> None:
        raise RuntimeError("CUDA error: an illegal memory access")

    with pytest.raises(RuntimeError, match="illegal memory access"):
        tile_sizes._fastest(broken, [slow, fast])
