"""Exact search on a GPU: half-precision products find the candidates, and float32 ranks them.

Rounding unit vectors to float16 changes an inner product by at most ε, which follows from the rounding errors of the
rows. A document whose half-precision score is more than ε below the score that is needed is not among the best. One
program computes tiles of half-precision scores and collects all other documents; the scores never reach memory. Those
collected are scored again in float32. The search returns the queries for which this does not prove that nothing was
missed, for example because too many documents have nearly the same score: they are searched in float32.
"""

# Arguments of Triton kernels have no types that mypy knows.
# mypy: disallow-untyped-decorators=False, disallow-untyped-defs=False, disallow-incomplete-defs=False

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from hardneg.losses.kernels.triton import score_tile
from hardneg.losses.kernels.triton.launch import launch, launch_tiled, split_inner_rows
from hardneg.losses.kernels.triton.score_tile import Sizes, load_rows
from hardneg.matmul import row_blocks
from hardneg.mining.keys import EMPTY, packed, unpacked

SAMPLE = 1 << 14  # documents from which the first score that is needed is estimated
GROUPS = 1 << 10  # of the sample: the maximum of each is a document of its own
MIN_CAPACITY = 1 << 10  # collected documents of a query
MOST_COLLECTED = 1 << 26  # of the queries that are searched at a time
MAX_DEPTH = 1 << 10
SPAN = 1 << 14  # documents per program, so that the programs that run at a time read the same ones, from the L2 cache
INTERPRETED = tl.constexpr(score_tile.INTERPRETED)
# Appends a score and its document to the lists of its query if it reaches the threshold. In PTX, because a thread then
# branches over all of it: masked operations on tiles made the search five times slower on an H200.
APPEND = tl.constexpr(
    """{
    .reg .pred done; .reg .u32 place; .reg .u64 target;
    mov.u32 $0, 0;
    setp.lt.f32 done, $1, $2;
    @done bra END;
    atom.global.relaxed.gpu.add.u32 place, [$3], 1;
    setp.ge.u32 done, place, $6;
    @done bra END;
    mad.wide.u32 target, place, 4, $4;
    st.global.f32 [target], $1;
    mad.wide.u32 target, place, 4, $5;
    st.global.u32 [target], $7;
    END: }"""
)


@dataclass(frozen=True)
class Halves:
    """Unit vectors (N, d) in float32 and float16. error: (N,) lengths of their differences"""

    rows: Tensor
    half: Tensor
    error: Tensor

    @staticmethod
    def of(rows: Tensor) -> "Halves":
        half, error = rows.half(), rows.new_empty(len(rows))
        for block in row_blocks(*rows.shape):
            error[block] = torch.linalg.vector_norm(rows[block] - half[block], dim=1)
        return Halves(rows, half, error)

    def part(self, rows: slice) -> "Halves":
        return Halves(self.rows[rows], self.half[rows], self.error[rows])


def suits(documents: int, depth: int) -> bool:
    """Whether the search is faster than one that selects from all scores."""
    return depth <= MAX_DEPTH and documents >= max(4 * SAMPLE, 32 * depth)


@torch.no_grad()
def best(queries: Tensor, tiles: Iterable[tuple[int, Tensor]], depth: int) -> tuple[Tensor, Tensor]:
    """Keys (B, depth) of the best documents, the best first, and whether a better one may be missing, bool (B,).

    queries: (B, d) unit vectors · tiles: the first document of each tile, and its documents, likewise
    """
    halves = Halves.of(queries)
    keys = torch.full((len(queries), depth), EMPTY, device=queries.device)
    missed = queries.new_full((len(keys),), -torch.inf)  # all documents left out score less
    rank = capacity = 0
    for first, rows in tiles:
        documents = Halves.of(rows)
        if first == 0:
            rank, capacity = _sizes(len(rows), depth)
        for block in row_blocks(len(keys), 1, max(1, MOST_COLLECTED // capacity)):
            some, last = halves.part(block), unpacked(keys[block, -1:])[0][:, 0]
            # A query that lacks documents is searched again anyway.
            needed = _estimated(some.half, documents.half, rank) if first == 0 else last.nan_to_num(neginf=torch.inf)
            scores, chosen, bound = _candidates(some, documents, needed, depth, capacity)
            more = packed(scores, chosen + first).masked_fill(scores == -torch.inf, EMPTY)
            keys[block] = torch.cat([keys[block], more], dim=1).topk(depth, dim=1).values
            missed[block] = torch.maximum(missed[block], bound)
    return keys, ~(unpacked(keys[:, -1:])[0][:, 0] >= missed)


def _sizes(documents: int, depth: int) -> tuple[int, int]:
    """The rank in the sample that lets about twice as many documents pass as are wanted, and room for those."""
    rank = math.ceil(2 * depth * SAMPLE / documents) + 8
    passing = rank * documents / SAMPLE
    return rank, max(MIN_CAPACITY, 1 << math.ceil(math.log2(2.5 * passing)))


def _estimated(queries: Tensor, documents: Tensor, rank: int) -> Tensor:
    """The score of this rank in a sample of the documents, (B,)."""
    sample = documents[:: len(documents) // SAMPLE][:SAMPLE]
    found = queries.new_empty(len(queries), dtype=torch.float32)
    for block in row_blocks(len(queries), SAMPLE):
        scores = queries[block] @ sample.T  # (R, S)
        if 8 * rank <= GROUPS:  # faster, and seldom lower
            scores = scores.view(len(scores), -1, GROUPS).amax(dim=1)
        found[block] = scores.topk(rank, dim=1).values[:, -1].float()
    return found


def _candidates(
    queries: Halves, documents: Halves, needed: Tensor, depth: int, capacity: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Scores and documents (B, W) in float32, −inf where there are fewer, and a bound of all other scores, (B,)."""
    rows, dim = queries.half.shape
    room = 1.01 * (queries.error + documents.error.amax() * (1 + queries.error)) + dim * 2.0**-22  # ε and rounding
    counts = torch.zeros(rows, dtype=torch.int32, device=needed.device)
    collected = needed.new_full((rows, capacity), -torch.inf)
    numbers = counts.new_zeros(rows, capacity)
    span = min(SPAN, split_inner_rows(rows, len(documents.half), needed.device)[1])
    parts = math.ceil(len(documents.half) / span)
    sizes = Sizes(rows, len(documents.half), dim, queries.half.stride(0), documents.half.stride(0))
    arguments = {
        "outer": queries.half, "inner": documents.half, "thresholds": needed - room, "counts": counts,
        "scores_": collected, "documents_": numbers, "sizes": sizes, "span": span, "capacity": capacity,
    }  # fmt: skip
    launch_tiled(collect, arguments, rows, parts, False, "symmetric")
    width = min(capacity - 1, 32 * math.ceil((1.125 * depth + 24) / 32))
    values, places = collected.topk(width + 1, dim=1)
    chosen = numbers.gather(1, places[:, :width])
    scores = torch.empty_like(values[:, :width])
    arguments = {
        "queries": queries.rows, "documents": documents.rows, "chosen": chosen, "result": scores, "columns": width,
        "width": dim, "COLUMNS": 16, "WIDTH": min(512, triton.next_power_of_2(dim)),
    }  # fmt: skip
    launch(score, (rows, math.ceil(width / 16)), arguments)
    bound = torch.maximum(needed, values[:, width] + room).masked_fill(counts > capacity, torch.inf)
    return scores.masked_fill(values[:, :width] == -torch.inf, -torch.inf), chosen.long(), bound


@triton.jit
def collect(
    outer, inner, thresholds, counts, scores_, documents_, sizes, span, capacity, OUTER_BLOCK: tl.constexpr,
    INNER_BLOCK: tl.constexpr, WIDTH: tl.constexpr, WHOLE: tl.constexpr, DESCRIPTOR: tl.constexpr,
):  # fmt: skip
    """Stores the scores and numbers of documents (inner rows) that reach the threshold of a query (outer row).

    scores_, documents_: (B, capacity), in any order · counts: (B,), which also counts what did not fit
    """
    row = tl.program_id(0) * OUTER_BLOCK
    i = row + tl.arange(0, OUTER_BLOCK)
    threshold = tl.load(thresholds + i, mask=i < sizes.outer, other=float("inf"))[:, None]
    count, target = counts + i[:, None], i.to(tl.int64)[:, None] * capacity
    begin = tl.program_id(1) * span
    end = min(begin + span, sizes.inner)
    # Flattened: the loads of the next tile begin before this one is compared.
    for start in tl.range(begin, end, INNER_BLOCK, flatten=True):
        found = tl.zeros((OUTER_BLOCK, INNER_BLOCK), tl.float32)
        for first in range(0, sizes.width, WIDTH):
            left = load_rows(
                outer, row, sizes.outer, sizes.width, sizes.outer_stride, first, OUTER_BLOCK, WIDTH, DESCRIPTOR
            )
            right = load_rows(inner, start, end, sizes.width, sizes.inner_stride, first, INNER_BLOCK, WIDTH, DESCRIPTOR)
            found = tl.dot(left, tl.trans(right), found)
        j = start + tl.arange(0, INNER_BLOCK)[None, :] + 0 * i[:, None]
        needed = tl.where(j < end, threshold, float("inf"))
        if INTERPRETED:
            reached = found >= needed
            place = tl.atomic_add(count + 0 * j, 1, mask=reached)
            stored = reached & (place < capacity)
            tl.store(scores_ + target + place, found, mask=stored)
            tl.store(documents_ + target + place, j, mask=stored)
        else:
            tl.inline_asm_elementwise(
                APPEND, "=r,f,f,l,l,l,r,r",
                [found, needed, count.to(tl.int64), (scores_ + target).to(tl.int64),
                 (documents_ + target).to(tl.int64), capacity, j],
                dtype=tl.int32, is_pure=False, pack=1,
            )  # fmt: skip


@triton.jit
def score(queries, documents, chosen, result, columns, width, COLUMNS: tl.constexpr, WIDTH: tl.constexpr):
    """Inner products of one query with some of its chosen documents (B, columns)."""
    row, j = tl.program_id(0).to(tl.int64), tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    document = tl.load(chosen + row * columns + j, mask=j < columns, other=0).to(tl.int64)
    total = tl.zeros((COLUMNS,), tl.float32)
    for first in range(0, width, WIDTH):
        k = first + tl.arange(0, WIDTH)
        query = tl.load(queries + row * width + k, mask=k < width, other=0.0)[None, :]
        rows = tl.load(documents + document[:, None] * width + k[None, :], mask=(k < width)[None, :], other=0.0)
        total += tl.sum(rows * query, axis=1)
    tl.store(result + row * columns + j, total, mask=j < columns)
