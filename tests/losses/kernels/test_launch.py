"""Cached compiled kernels are those that Triton itself would look up."""

import math
from collections.abc import Callable
from importlib.util import find_spec
from itertools import combinations_with_replacement, product
from types import SimpleNamespace
from typing import Any

import pytest
import torch

if find_spec("triton") is None:
    pytest.skip("Triton is for Linux only", allow_module_level=True)

from hardneg.losses.kernels.triton import (
    backward,
    forward,
    launch,
    paired_loss,
    percentile_bisection,
    percentile_edges,
    percentile_lists,
    rowwise,
)
from hardneg.losses.kernels.triton.launch import Compiled

LAUNCHED = (
    forward.sums, forward.scores, backward.gradient, percentile_lists.sample, percentile_lists.bracket,
    percentile_edges.select, percentile_bisection.bisect, paired_loss.finish_loss,
    rowwise.normalize, rowwise.normalize_backward,
)  # fmt: skip


class Program:
    """A fake Triton kernel that counts how often it is looked up."""

    arg_names = ("x", "y", "size", "factor", "SHAPE")
    constexprs = (4,)

    def __init__(self) -> None:
        self.lookups = 0
        self.launches: list[Any] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
        def run(**arguments: Any) -> dict[tuple[int, ...], Callable[..., None]]:
            self.lookups += 1
            return Handle(self.launches)

        return run


class Handle(dict[tuple[int, ...], Callable[..., None]]):
    """A fake compiled kernel that records its launches."""

    def __init__(self, launches: list[Any]) -> None:
        self.launches = launches

    def __missing__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *values, stream: self.launches.append((grid, values, stream))


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A fake current device."""
    current = SimpleNamespace(number=0)
    active = SimpleNamespace(
        get_current_device=lambda: current.number, get_current_stream=lambda device: f"of {device}"
    )
    monkeypatch.setattr(launch, "driver", SimpleNamespace(active=active))
    return current


def plain() -> dict[str, Any]:
    return {"x": torch.zeros(64), "y": None, "size": 48, "factor": 0.5, "SHAPE": 8}


def test_a_cached_kernel_is_launched_with_the_present_arguments(device: SimpleNamespace) -> None:
    program = Program()
    compiled = Compiled(program)
    compiled.launch((3, 2), plain(), 4, 3)
    second = plain() | {"factor": 2.5}
    compiled.launch((5,), second, 4, 3)
    assert program.lookups == 1
    assert program.launches == [((5, 1, 1), (second["x"].data_ptr(), None, 48, 2.5, 8), "of 0")]


@pytest.mark.parametrize(
    "other",
    [
        {"x": torch.zeros(65)[1:]},
        {"x": torch.zeros(64, dtype=torch.bfloat16)},
        {"x": None},
        {"y": torch.zeros(64)},
        {"size": 1},
        {"size": 47},
        {"size": 1 << 40},
        {"SHAPE": 16},
        {"warps": 8},
        {"stages": 1},
        {"device": 1},
    ],
    ids=str,
)
def test_a_different_signature_is_looked_up_again(device: SimpleNamespace, other: dict[str, Any]) -> None:
    program = Program()
    compiled = Compiled(program)
    compiled.launch((1,), plain(), 4, 3)
    changed = plain() | other
    device.number = changed.pop("device", 0)
    warps, stages = changed.pop("warps", 4), changed.pop("stages", 3)
    compiled.launch((1,), changed, warps, stages)
    assert program.lookups == 2
    compiled.launch((1,), changed, warps, stages)
    assert (program.lookups, len(program.launches)) == (2, 1)


@pytest.mark.parametrize("value", [True, (1, 2), "text", object()])
def test_unknown_types_of_arguments_are_looked_up_by_triton(device: SimpleNamespace, value: Any) -> None:
    program = Program()
    compiled = Compiled(program)
    for _ in range(2):
        compiled.launch((1,), plain() | {"size": value}, 4, 3)
    assert (program.lookups, program.launches) == (2, [])


def test_the_cache_is_bounded(device: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "MAX_CACHED", 10)
    compiled = Compiled(Program())
    for size in range(35):
        compiled.launch((1,), plain() | {"size": size}, 4, 3)
        assert 1 <= len(compiled.cache) <= 10


def test_values_of_equal_signature_are_equal_to_triton() -> None:
    native = pytest.importorskip("triton._C.libtriton").native_specialize_impl
    from triton.backends.compiler import GPUTarget
    from triton.compiler import make_backend
    from triton.tools.tensor_descriptor import TensorDescriptor

    backend, compiled = make_backend(GPUTarget("cuda", 90, 32)), Compiled(Program())
    dtypes = (torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int8, torch.uint8)
    bases = [torch.zeros(64, dtype=dtype) for dtype in dtypes]
    edges = [sign * (1 << power) + step for sign in (1, -1) for power in (0, 4, 5, 31, 32, 62) for step in (-1, 0, 1)]
    described = [
        TensorDescriptor.from_tensor(torch.zeros(rows, width, dtype=dtype), [block, 32])
        for rows, width, block, dtype in product((64, 256), (64, 96), (32, 64), (torch.bfloat16, torch.float16))
    ]
    values = [
        None,
        *described,
        0.0,
        1.0,
        16.0,
        0.1,
        math.inf,
        math.nan,
        *edges,
        *(base[k:] for base in bases for k in range(17)),
    ]

    def signature(value: Any) -> Any:
        kinds = compiled.signature([value, None, 0, 0.0, 8])
        assert kinds is not None
        return kinds[0]

    alike = 0
    for one, other in combinations_with_replacement(values, 2):
        if signature(one) == signature(other):
            assert native(backend, one, False, True, True) == native(backend, other, False, True, True)
            alike += one is not other
    assert alike > 100


@pytest.mark.parametrize("program", LAUNCHED, ids=lambda program: program.__name__)
def test_constants_are_the_last_arguments_of_every_kernel(program: Any) -> None:
    names = program.arg_names
    assert [name.isupper() for name in names] == [place >= Compiled(program).constants for place in range(len(names))]
