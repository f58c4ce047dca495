"""The half-precision search against a sort of all scores in float64."""

from collections import Counter
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from interpreter import compiled, process
from mining import interpreted_search
from torch import Tensor

from hardneg.mining.keys import unpacked
from hardneg.mining.search import Searcher
from hardneg.mining.vectors import Vectors

Call = Callable[..., Any]
MODULE = "hardneg.mining.half_precision"
SMALL = {"SAMPLE": 64, "GROUPS": 16, "MIN_CAPACITY": 32, "MOST_COLLECTED": 1 << 9, "SPAN": 256}
pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is for Linux only")


@pytest.fixture(scope="module")
def interpreted() -> Iterator[Call]:
    with process(interpret=True) as call:
        yield call


def unit(rows: Tensor) -> Tensor:
    return torch.nn.functional.normalize(rows.double(), dim=1).float()


def draws(kind: str, seed: int, queries: int, documents: int, dim: int) -> tuple[Tensor, Tensor]:
    """Queries and documents: independent, in clusters, all nearly equal, or many of them bitwise equal."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    if kind == "independent":
        return unit(normal(queries, dim)), unit(normal(documents, dim))
    if kind == "clusters":
        centers = normal(10, dim)
        of_queries, of_documents = (torch.randint(10, (n,), generator=generator) for n in (queries, documents))
        return unit(centers[of_queries] + 0.3 * normal(queries, dim)), unit(
            centers[of_documents] + 0.3 * normal(documents, dim)
        )
    if kind == "nearly equal":
        center = normal(1, dim)
        return unit(center + 1e-4 * normal(queries, dim)), unit(center + 1e-4 * normal(documents, dim))
    few = unit(normal(documents // 150, dim))
    return unit(normal(queries, dim)), few[torch.randint(len(few), (documents,), generator=generator)]


@pytest.mark.parametrize("kind", ["independent", "clusters", "nearly equal", "bitwise equal"])
def test_what_is_proven_is_the_best_of_a_sort_in_float64(interpreted: Call, kind: str) -> None:
    reached: Counter[str] = Counter()
    for seed, (dim, depth, tile) in enumerate([(16, 3, 400), (70, 1, 150), (33, 12, 600)]):
        queries, corpus = draws(kind, seed, 21, 600, dim)
        keys, unproven, counts = interpreted(interpreted_search.searched, queries, corpus, depth, tile, SMALL)
        scores, found = unpacked(keys)
        exact = queries.double() @ corpus.double().T
        rounding = dim * 2.0**-23
        for row in range(len(queries)):
            if unproven[row]:
                reached["unproven"] += 1
                continue
            reached["proven"] += 1
            left_out = torch.ones(len(corpus), dtype=torch.bool)
            left_out[found[row]] = False
            assert len(set(found[row].tolist())) == depth
            assert torch.allclose(scores[row].double(), exact[row, found[row]], rtol=0, atol=rounding)
            assert exact[row, left_out].max() <= exact[row, found[row]].min() + 2 * rounding
        reached["collected"] += sum(counts)
        reached["pairs"] += 21 * 600
    assert reached["collected"] < reached["pairs"] / 2 or kind == "nearly equal"
    if kind in ("independent", "clusters"):
        assert reached["proven"] > 3 * reached["unproven"]
    else:
        assert reached["unproven"] > 0  # more candidates within the rounding errors than there is room for


def test_of_equal_scores_the_lower_index_comes_first(interpreted: Call) -> None:
    corpus = unit(torch.randn(500, 16))
    corpus[[40, 7, 399]] = corpus[123].clone()
    keys, unproven, _ = interpreted(interpreted_search.searched, corpus[123:124], corpus, 4, 250, SMALL)
    assert not bool(unproven[0])
    assert unpacked(keys)[1][0].tolist() == [7, 40, 123, 399]


def test_a_zero_vector_is_unproven_or_right(interpreted: Call) -> None:
    corpus = unit(torch.randn(500, 16))
    queries = torch.zeros(2, 16)
    queries[1] = corpus[3]
    keys, unproven, _ = interpreted(interpreted_search.searched, queries, corpus, 3, 500, SMALL)
    assert unproven.tolist() == [True, False]  # all scores of the first are equal
    assert unpacked(keys)[1][1, 0] == 3


@pytest.mark.parametrize("descriptor", [False, True])
def test_the_programs_compile_for_a_gpu(descriptor: bool) -> None:
    from hardneg.losses.kernels.triton.score_tile import Sizes

    matrix = "tensordesc<fp16[128,64]>" if descriptor else "*fp16"
    other = "tensordesc<fp16[256,64]>" if descriptor else "*fp16"
    types = {
        "outer": matrix, "inner": other, "thresholds": "*fp32", "counts": "*i32", "scores_": "*fp32",
        "documents_": "*i32", "sizes": Sizes(*("i32",) * 5), "span": "i32", "capacity": "i32",
    }  # fmt: skip
    constants = {"OUTER_BLOCK": 128, "INNER_BLOCK": 256, "WIDTH": 64, "WHOLE": False, "DESCRIPTOR": descriptor}
    with process(interpret=False) as call:
        assert "wgmma" in call(compiled, MODULE, "collect", types, constants)
        types = {"queries": "*fp32", "documents": "*fp32", "chosen": "*i32", "result": "*fp32"}
        types |= {"columns": "i32", "width": "i32"}
        assert "st.global" in call(compiled, MODULE, "score", types, {"COLUMNS": 16, "WIDTH": 512})


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["independent", "clusters", "nearly equal", "bitwise equal"])
@pytest.mark.parametrize(("dim", "depth"), [(384, 100), (65, 10), (768, 300)])
def test_a_search_on_a_gpu_finds_the_best_of_a_sort_in_float64(kind: str, dim: int, depth: int) -> None:
    queries, corpus = draws(kind, dim, 300, 200_000, dim)
    whole = torch.cuda.get_device_properties("cuda").total_memory
    exact = queries.cuda().double() @ corpus.cuda().double().T
    rounding = dim * 2.0**-23
    best = exact.topk(depth, dim=1).values
    for tile in (1 << 20, 70_000):
        searcher = Searcher(Vectors("corpus", corpus), tile, whole // 64 // tile, "cuda", keeps=True)
        for _ in range(2):  # the second time from tiles that were kept
            scores, found = unpacked(searcher.best(queries, depth))
            assert (found.sort(dim=1).values.diff(dim=1) > 0).all()
            of_found = exact.gather(1, found.cuda())
            assert (scores.cuda() - of_found).abs().max() <= rounding
            assert (best - of_found.sort(dim=1, descending=True).values).abs().max() <= 2 * rounding
