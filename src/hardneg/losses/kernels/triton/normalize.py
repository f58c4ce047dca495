"""Unit vectors of embeddings and their gradient, in one launch each: small batches are bound by the host."""

# Arguments of Triton kernels have no types that mypy knows.
# mypy: disallow-untyped-decorators=False, disallow-untyped-defs=False, disallow-incomplete-defs=False

import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from hardneg import checks
from hardneg.losses.kernels.interface import first_order, saveable
from hardneg.losses.kernels.triton.launch import launch

NUMBERS = 1024  # elements of each matrix per program

ROUNDINGS: dict[torch.dtype | None, int] = {torch.bfloat16: 1, torch.float16: 2}


@triton.jit
def rounded(x, ROUNDING: tl.constexpr):
    """x rounded to the precision of the matrix products, as float32."""
    if ROUNDING == 1:
        return x.to(tl.bfloat16).to(tl.float32)
    elif ROUNDING == 2:
        return x.to(tl.float16).to(tl.float32)
    else:
        return x


@triton.jit
def unit_rows(pointer, i, rows, width, stride, smallest, WIDTH: tl.constexpr):
    """Unit vectors of rows i and their inverse norms, both 0 if no entry reaches ``smallest``; NaN if not finite."""
    k = tl.arange(0, WIDTH)[None, :]
    inside = (i < rows)[:, None] & (k < width)
    x = tl.load(pointer + i.to(tl.int64)[:, None] * stride + k, mask=inside, other=0.0).to(tl.float32)
    # Scaling by a power of two near the largest entry is exact and keeps the squares from overflowing or underflowing.
    # div_rn and sqrt_rn are correctly rounded; Triton's default is a digit less accurate.
    largest = tl.max(tl.abs(x), axis=1)
    not_finite = tl.sum(x * 0.0, axis=1)  # 0, or NaN
    zero = largest < smallest
    exponent = largest.to(tl.int32, bitcast=True) >> 23
    factor = tl.where(zero, 1.0, ((255 - exponent) << 23).to(tl.float32, bitcast=True))
    x = x * factor[:, None]
    length = tl.where(zero, 1.0, tl.sqrt_rn(tl.sum(x * x, axis=1)))
    inverse_norm = tl.where(zero, 0.0, tl.div_rn(factor, length))
    return tl.where(zero[:, None], 0.0, tl.div_rn(x, length[:, None])) + not_finite[:, None], inverse_norm


@triton.jit
def normalize(
    z1, z2, out, similarity, rows, width, stride1, stride2, smallest,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, PAIRED: tl.constexpr, ROUNDING: tl.constexpr,
):  # fmt: skip
    """Unit vectors of rows of z1 and z2, rounded, into rows i and i + rows of out; and their inner products.

    similarity: (rows,) inner products of z1 and z2; of one matrix 0, or NaN for a row that is not finite
    """
    i, k = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, WIDTH)[None, :]
    inside = (i < rows)[:, None] & (k < width)
    pointer = out + i.to(tl.int64)[:, None] * width + k
    first, _ = unit_rows(z1, i, rows, width, stride1, smallest, WIDTH)
    first = rounded(first, ROUNDING)
    tl.store(pointer, first.to(out.dtype.element_ty), mask=inside)
    if PAIRED:
        second, _ = unit_rows(z2, i, rows, width, stride2, smallest, WIDTH)
        second = rounded(second, ROUNDING)
        tl.store(pointer + (tl.full((), 0, tl.int64) + rows) * width, second.to(out.dtype.element_ty), mask=inside)
        tl.store(similarity + i, tl.sum(first * second, axis=1), mask=i < rows)
    else:
        tl.store(similarity + i, tl.sum(first * 0.0, axis=1), mask=i < rows)


@triton.jit
def normalize_backward(
    z1, z2, for_out, second_, for_similarity, grad_, number_, d1, d2, rows, width, stride1, stride2, smallest,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, PAIRED: tl.constexpr, ROUNDING: tl.constexpr, VIEWS: tl.constexpr,
    SECOND: tl.constexpr, TIMES: tl.constexpr, OVER: tl.constexpr,
):  # fmt: skip
    """Gradients of z1 and z2 from those of their unit vectors (z1's only, if not SECOND) and of the inner products.

    for_out, second_: gradients of the unit vectors of z1 and z2 · for_similarity: (VIEWS, rows), to be added · TIMES,
    OVER: multiply with ``grad_``, divide by ``number_``
    """
    i, k = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, WIDTH)[None, :]
    inside = (i < rows)[:, None] & (k < width)
    index = i.to(tl.int64)[:, None] * width + k
    gradient_scale = 1.0
    if TIMES:
        gradient_scale = tl.load(grad_)
    if OVER:
        gradient_scale = tl.div_rn(gradient_scale, tl.maximum(tl.load(number_), 1.0))
    first, inverse_norm = unit_rows(z1, i, rows, width, stride1, smallest, WIDTH)
    grad = tl.load(for_out + index, mask=inside, other=0.0)
    if PAIRED:
        second, inverse_norm2 = unit_rows(z2, i, rows, width, stride2, smallest, WIDTH)
        grad2 = tl.zeros((ROWS, WIDTH), tl.float32)
        if SECOND:
            grad2 += tl.load(second_ + index, mask=inside, other=0.0)
        if VIEWS > 0:
            coefficient = tl.load(for_similarity + i, mask=i < rows, other=0.0)
            if VIEWS == 2:
                coefficient += tl.load(for_similarity + rows + i, mask=i < rows, other=0.0)
            grad += coefficient[:, None] * rounded(second, ROUNDING)
            grad2 += coefficient[:, None] * rounded(first, ROUNDING)
        grad2 = (grad2 - second * tl.sum(second * grad2, axis=1)[:, None]) * (inverse_norm2 * gradient_scale)[:, None]
        tl.store(d2 + index, grad2.to(d2.dtype.element_ty), mask=inside)
    grad = (grad - first * tl.sum(first * grad, axis=1)[:, None]) * (inverse_norm * gradient_scale)[:, None]
    tl.store(d1 + index, grad.to(d1.dtype.element_ty), mask=inside)


def normalized(
    z1: Tensor, z2: Tensor | None, smallest: float, precision: torch.dtype | None, dtype: torch.dtype, names: str
) -> tuple[Tensor, Tensor]:
    """The same as `UnitVectors` without gradients, with the unit vectors in this dtype."""
    rows, width = z1.shape
    z1, z2 = row_contiguous(z1), None if z2 is None else row_contiguous(z2)
    out = z1.new_empty(rows if z2 is None else 2 * rows, width, dtype=dtype)
    similarity = z1.new_empty(rows, dtype=torch.float32)
    block = _block(width)
    if z1.device.type == "cpu":  # on a GPU the loss becomes NaN
        for z in (z1,) if z2 is None else (z1, z2):
            checks.finite(names, z)
    arguments = {
        "z1": z1, "z2": z2, "out": out, "similarity": similarity, "rows": rows, "width": width,
        "stride1": z1.stride(0), "stride2": 0 if z2 is None else z2.stride(0), "smallest": smallest,
        "PAIRED": z2 is not None, "ROUNDING": ROUNDINGS.get(precision, 0), **block,
    }  # fmt: skip
    launch(normalize, (math.ceil(rows / block["ROWS"]),), arguments)
    return out, similarity


class GradientScale(NamedTuple):
    """The factor of all gradients: the gradient of the loss, (), divided by the number of anchors, (), if given."""

    grad: Tensor
    number: Tensor | None

    def value(self) -> Tensor:
        """The factor, ()."""
        return self.grad if self.number is None else self.grad / self.number.clamp(min=1)


def normalized_backward(
    z1: Tensor,
    z2: Tensor | None,
    for_out: Tensor,
    for_similarity: Tensor | None,
    smallest: float,
    precision: torch.dtype | None,
    gradient_scale: GradientScale | None = None,
    second: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Gradients of z1 and z2 from those of the results of `normalized`, or of the unit vectors of z1 alone.

    for_similarity: (B,), or (2B,) if two parts are to be added · second: gradient of the unit vectors of z2, if
    ``for_out`` does not hold it
    """
    rows, width = z1.shape
    z1, z2 = row_contiguous(z1), None if z2 is None else row_contiguous(z2)
    d1, d2 = z1.new_empty(rows, width), None if z2 is None else z2.new_empty(rows, width)
    grad, number = gradient_scale or (None, None)
    second = for_out[rows:] if for_out.shape[0] > rows else second
    block = _block(width)
    arguments = {
        "z1": z1, "z2": z2, "for_out": for_out, "second_": second, "for_similarity": for_similarity, "grad_": grad,
        "number_": number, "d1": d1, "d2": d2, "rows": rows, "width": width,
        "stride1": z1.stride(0), "stride2": 0 if z2 is None else z2.stride(0), "smallest": smallest,
        "PAIRED": z2 is not None, "ROUNDING": ROUNDINGS.get(precision, 0), **block,
        "VIEWS": 0 if for_similarity is None else for_similarity.shape[0] // rows, "SECOND": second is not None,
        "TIMES": grad is not None, "OVER": number is not None,
    }  # fmt: skip
    launch(normalize_backward, (math.ceil(rows / block["ROWS"]),), arguments)
    return d1, d2


class UnitVectors(torch.autograd.Function):
    """Unit vectors (B, d) of z1, or (2B, d) of z1 and z2 with the inner products (B,) of their pairs; float32.

    smallest: rows without an entry of this size become zero, with zero gradient · precision: dtype that the unit
    vectors are rounded to · names: of the embeddings, for the error if they are not finite
    """

    @staticmethod
    def forward(
        ctx: Any, z1: Tensor, z2: Tensor | None, smallest: float, precision: torch.dtype | None, names: str
    ) -> tuple[Tensor, Tensor]:
        out, similarity = normalized(z1, z2, smallest, precision, torch.float32, names)
        ctx.save_for_backward(*saveable(z1, z2))
        ctx.smallest, ctx.precision = smallest, precision
        ctx.set_materialize_grads(False)
        return out, similarity

    @staticmethod
    @first_order
    def backward(ctx: Any, for_out: Tensor | None, for_similarity: Tensor | None) -> tuple[Tensor | None, ...]:
        z1, z2 = ctx.saved_tensors
        if for_out is None:
            for_out = z1.new_zeros((2 if z2 is not None else 1) * len(z1), z1.shape[1], dtype=torch.float32)
        pairs = None if for_similarity is None else for_similarity.contiguous()
        d1, d2 = normalized_backward(z1, z2, for_out.contiguous(), pairs, ctx.smallest, ctx.precision)
        return d1, d2, None, None, None


def row_contiguous(z: Tensor) -> Tensor:
    """z with contiguous rows."""
    return z if z.stride(1) == 1 else z.contiguous()


def _block(width: int) -> dict[str, int]:
    """Rows per program, and the power of two that holds the width of a row."""
    wide = max(16, 1 << (width - 1).bit_length())
    return {"ROWS": max(1, NUMBERS // wide), "WIDTH": wide}
