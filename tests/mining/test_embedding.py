"""Texts with a model: prompts, the cache on disk, and what it depends on."""

import os
import sys
from pathlib import Path

import children
import pytest
import torch
from torch import Tensor, nn

import hardneg as hn
from hardneg.mining import resumable
from hardneg.mining.rules import checked_rules

CORPUS = ["red apple", "green apple", "blue sky", "a grey cloud", "red apple", "night"]
QUERIES = ["apple that is red", "sky"]
POSITIVES = ["red apple", ["blue sky", "a grey cloud"]]


class Noisy(nn.Module):
    """Equal texts get embeddings that differ by more than rounding errors, as in batches of half precision."""

    def forward(self, texts: list[str]) -> Tensor:
        draw = torch.Generator().manual_seed(0)
        return torch.cat([Letters()(texts), torch.rand(len(texts), 1, generator=draw)], dim=1)


class Letters(nn.Module):
    """Counts of letters, times a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(26))
        self.seen: list[str] = []

    def forward(self, texts: list[str]) -> Tensor:
        self.seen += texts
        counts = torch.tensor([[text.lower().count(chr(97 + letter)) for letter in range(26)] for text in texts])
        return counts * self.weight


def mine(model: object, **options: object) -> hn.Mined:
    return hn.mine(QUERIES, CORPUS, POSITIVES, num_negatives=2, hardening=hn.Uniform(), model=model, **options)


def test_positives_are_found_by_text_and_their_copies_removed() -> None:
    found = mine(Letters())
    assert found.positives.items.tolist() == [0, 2, 3]
    assert found.dropped == {"duplicate": 1}
    assert not {0, 4} & set(found.indices[0].tolist())


@pytest.mark.parametrize("positive", [0, 4])
def test_copies_are_found_by_text_whichever_of_them_is_the_positive(positive: int) -> None:
    found = hn.mine(QUERIES[:1], CORPUS, [positive], num_negatives=3, hardening=hn.Uniform(), model=Noisy())
    assert found.dropped == {"duplicate": 1}
    assert not {0, 4} & set(found.indices[0].tolist())


def test_a_prompt_is_put_before_each_text() -> None:
    model = Letters()
    mine(model, prompts={"queries": "query: "})
    assert model.seen == [f"query: {text}" for text in QUERIES] + CORPUS


def test_the_cache_depends_on_texts_prompts_and_weights(tmp_path: Path) -> None:
    model = Letters()
    first = mine(model, cache=tmp_path)
    seen = len(model.seen)
    again = mine(model, cache=tmp_path)
    assert len(model.seen) == seen
    assert torch.equal(first.scores, again.scores)
    mine(model, cache=tmp_path, prompts={"queries": "q "})
    assert len(model.seen) == seen + len(QUERIES)
    with torch.no_grad():
        model.weight[0] = 3.0
    trained = mine(model, cache=tmp_path)
    assert not torch.equal(first.scores, trained.scores)
    assert torch.equal(trained.scores, mine(model).scores)


@pytest.mark.parametrize("setting", ["max_seq_length", "truncate_dim", "default_prompt_name"])
def test_the_cache_depends_on_settings_of_the_model(setting: str, tmp_path: Path) -> None:
    model = Letters()
    mine(model, cache=tmp_path)
    seen = len(model.seen)
    setattr(model, setting, 3)
    mine(model, cache=tmp_path)
    assert len(model.seen) == 2 * seen


def test_a_full_disk_is_named(tmp_path: Path) -> None:
    """Texts enough that their embeddings do not fit into a file."""
    script = f"""
import resource, signal, hardneg as hn
from mining.test_embedding import Letters
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
texts = [str(number) for number in range(500)]
try:
    hn.mine(texts, texts, texts, model=Letters(), cache={str(tmp_path)!r})
except OSError as error:
    print(error)
"""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = children.run([sys.executable, "-c", script], env=environment, check=True)
    assert str(tmp_path) in done.stdout
    assert "too large" in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_a_cache_without_weights_to_recognize_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="recognizes a model by its weights"):
        mine(lambda texts: Letters()(texts), cache=tmp_path)


@pytest.mark.parametrize(
    ("queries", "positives", "message"),
    [(["", "b"], POSITIVES, r"queries\[0\] is empty"), (["a", 3], POSITIVES, r"queries\[1\] must be a text"),
     (QUERIES, ["red apple", "pear"], "a positive of query 1 is not in the corpus: 'pear'")],
)  # fmt: skip
def test_texts_are_checked(queries: list[str], positives: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        hn.mine(queries, CORPUS, positives, num_negatives=1, model=Letters())


def test_a_function_of_pairs_is_a_guide() -> None:
    asked: list[tuple[str, str]] = []

    def guide(pairs: list[tuple[str, str]]) -> list[float]:
        asked.extend(pairs)
        return [float(document in ("green apple", "red apple")) for _, document in pairs]

    found = hn.mine(
        QUERIES,
        CORPUS,
        ["red apple", "blue sky"],
        num_negatives=3,
        hardening=hn.Uniform(),
        model=Letters(),
        guide=guide,
    )
    assert 1 in found.indices[0]  # scored as the positive, not above it
    assert not {1, 0, 4} & set(found.indices[1].tolist())
    assert found.dropped["guide"] == 3


class Favourite(nn.Module):
    """A guide that scores one text highest."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = nn.Parameter(torch.tensor(float(number)))

    def predict(self, pairs: list[tuple[str, str]]) -> list[float]:
        return [float(document == CORPUS[int(self.number)]) for _, document in pairs]


def test_finished_blocks_of_another_guide_are_not_used_again(tmp_path: Path) -> None:
    rules = checked_rules(2, hn.Uniform(), (0, None), None, False, 0)
    for number in (1, 5):
        given = resumable.Input(QUERIES, CORPUS, POSITIVES, Letters(), guide=Favourite(number))
        found = resumable.mine_to(tmp_path / "mined.jsonl", given, rules, 1 << 30, "local")
        assert torch.equal(found.indices, mine(Letters(), guide=Favourite(number)).indices)
        assert number not in found.indices


@pytest.mark.parametrize("wrong", [lambda texts: torch.ones(1, 3), lambda texts: [[1] * 3] * len(texts), 3])
def test_a_model_that_returns_something_else_is_an_error(wrong: object) -> None:
    with pytest.raises(ValueError, match="model must"):
        mine(wrong)
