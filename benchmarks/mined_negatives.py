"""Do mined negatives help? nDCG@10 of a small bi-encoder trained with random, top-k, 95 % and ring negatives.

    python benchmarks/mined_negatives.py --data PATH/sts.tsv.xz [--seeds 3]

Data: pairs of STS12 to STS16, STS-B and SICK-R with a score of 4 or more are a query and its positive. The pairs of the
test and validation parts of STS-B and SICK-R are held out, and no training pair shares a sentence with them. The
held-out corpus is all sentences of the held-out pairs of any score; relevant to a query are the sentences that form a
pair of score 4 or more with it. These judgements are built from STS and SICK, and are not those of a retrieval set.

Encoder: the mean of word vectors learned from nothing, and a linear layer, 128 dimensions. All rows start from the same
encoder, trained with negatives in the batch; it mines the negatives, and training goes on with them beside those of the
batch. "in batch" goes on without any.
"""

import argparse
import lzma
import platform
import re
import statistics
from collections import Counter
from pathlib import Path
from typing import Any

import record
import torch
from torch import Tensor, nn

import hardneg as hn
from hardneg.randomness import generator

RESULTS = Path(__file__).parents[1] / "results"
DIM, BATCH, NEGATIVES, EPOCHS = 128, 128, 5, 10
Pair = tuple[str, str]
MINING: dict[str, dict[str, Any]] = {
    "top-k": {"hardening": hn.Uniform()},
    "95 % of the positive": {"hardening": hn.BelowPositive(relative=0.95)},
    "ring 90–99 %": {"hardening": hn.Ring(0.90, 0.99), "sample": True, "rank_range": (0, 4000)},
}


def read(path: Path) -> tuple[list[Pair], list[Pair], list[str]]:
    """Training pairs, held-out pairs, and the held-out corpus."""
    with lzma.open(path, "rt", encoding="utf-8") as file:
        rows = [line.rstrip("\n").split("\t") for line in file][1:]
    held_out = [row for row in rows if row[0] in ("STSB", "SICKR") and row[1] in ("dev", "test")]
    corpus = list(dict.fromkeys(text for row in held_out for text in row[4:6]))
    known = set(corpus)
    train = [row for row in rows if not known & {*row[4:6]}]
    return _similar(train), _similar(held_out), corpus


def _similar(rows: list[list[str]]) -> list[Pair]:
    return list(dict.fromkeys((row[4], row[5]) for row in rows if float(row[3]) >= 4 and row[4] != row[5]))


class Encoder(nn.Module):
    """The mean of word vectors, then a linear layer; words that occur once in training are one unknown word."""

    def __init__(self, texts: list[str]) -> None:
        super().__init__()
        counts = Counter(word for text in texts for word in words(text))
        self.numbers = {word: n for n, word in enumerate((w for w, c in counts.items() if c > 1), 1)}
        self.vectors = nn.EmbeddingBag(len(self.numbers) + 1, DIM, mode="mean")
        self.linear = nn.Linear(DIM, DIM)

    def forward(self, texts: list[str]) -> Tensor:
        found = [[self.numbers.get(word, 0) for word in words(text)] or [0] for text in texts]
        starts = torch.tensor([0, *map(len, found[:-1])]).cumsum(0)
        pooled: Tensor = self.vectors(torch.tensor([number for some in found for number in some]), starts)
        out: Tensor = pooled + self.linear(pooled)
        return out


def words(text: str) -> list[str]:
    return re.findall(r"[a-z0-9]+", text.lower())


def train(encoder: Encoder, pairs: list[Pair], negatives: list[list[str]] | None, seed: int) -> None:
    """Some epochs of InfoNCE; negatives: texts for each pair beside those of the batch."""
    loss = hn.InfoNCE(temperature=0.05, in_batch="other")
    optimizer = torch.optim.Adam(encoder.parameters(), lr=2e-3)
    for epoch in range(EPOCHS):
        order = torch.randperm(len(pairs), generator=generator("cpu", seed, epoch)).tolist()
        for start in range(0, len(order) - BATCH + 1, BATCH):
            batch = order[start : start + BATCH]
            z1, z2 = (encoder([pairs[index][side] for index in batch]) for side in (0, 1))
            given = {}
            if negatives is not None:
                flat = encoder([text for index in batch for text in negatives[index]])
                given["negatives"] = flat.view(BATCH, NEGATIVES, DIM)
            optimizer.zero_grad()
            loss(z1, z2, **given).backward()
            optimizer.step()


@torch.no_grad()
def ndcg(encoder: Encoder, pairs: list[Pair], corpus: list[str], k: int = 10) -> float:
    """nDCG@k over the held-out queries; a query itself is not ranked."""
    place = {text: number for number, text in enumerate(corpus)}
    relevant: dict[int, set[int]] = {}
    for one, other in pairs:
        relevant.setdefault(place[one], set()).add(place[other])
        relevant.setdefault(place[other], set()).add(place[one])
    rows = torch.nn.functional.normalize(encoder(corpus))
    queries = list(relevant)
    scores = rows[queries] @ rows.T
    scores[torch.arange(len(queries)), queries] = -torch.inf
    nearest = scores.topk(k, dim=1).indices.tolist()
    discount = [1 / torch.tensor(rank + 2.0).log2().item() for rank in range(k)]
    gains = [
        sum(discount[rank] for rank, document in enumerate(found) if document in relevant[query])
        / sum(discount[: len(relevant[query])])
        for query, found in zip(queries, nearest, strict=True)
    ]
    return statistics.fmean(gains)


def mined_texts(
    encoder: Encoder, pairs: list[Pair], corpus: list[str], seed: int, rules: dict[str, Any]
) -> list[list[str]]:
    """Negatives of each pair's query; where too few are left, others of the corpus are drawn."""
    positives: dict[str, list[str]] = {}
    for one, other in pairs:
        positives.setdefault(one, []).extend((other, one))  # the query itself is in the corpus, too
    queries = list(positives)
    mined = hn.mine(
        queries, corpus, list(positives.values()), model=encoder, num_negatives=NEGATIVES, seed=seed, **rules
    )
    random = torch.randint(len(corpus), mined.indices.shape, generator=generator("cpu", seed, 99))
    chosen = torch.where(mined.indices >= 0, mined.indices, random).tolist()
    by_query = {query: [corpus[index] for index in row] for query, row in zip(queries, chosen, strict=True)}
    return [by_query[one] for one, _ in pairs]


def spreads(found: dict[str, list[float]]) -> list[dict[str, Any]]:
    """Print and return mean and standard deviation of the nDCG@10 of each row."""
    rows = [
        {"row": name, "ndcg_10": values, "mean": statistics.fmean(values),
         "std": statistics.stdev(values) if len(values) > 1 else None}
        for name, values in found.items()
    ]  # fmt: skip
    for row in rows:
        print(f"{row['row']:24} {row['mean']:.4f} ± {row['std'] or 0:.4f}")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--to", type=Path, default=RESULTS / "mined_negatives.json")
    given = parser.parse_args()
    pairs, held_out, held_out_corpus = read(given.data)
    corpus = list(dict.fromkeys(text for pair in pairs for text in pair))
    print(f"{len(pairs)} training pairs, {len(corpus)} sentences; held out {len(held_out)}, {len(held_out_corpus)}")
    found: dict[str, list[float]] = {}
    for seed in range(given.seeds):
        torch.manual_seed(seed)
        start = Encoder(corpus)
        train(start, pairs, None, seed)
        found.setdefault("before", []).append(ndcg(start, held_out, held_out_corpus))
        for name in ("in batch", "random", *MINING):
            negatives = None
            if name == "random":
                drawn = torch.randint(
                    len(corpus), (len(pairs), NEGATIVES), generator=generator("cpu", seed, 7)
                ).tolist()
                negatives = [[corpus[index] for index in row] for row in drawn]
            elif name in MINING:
                negatives = mined_texts(start, pairs, corpus, seed, MINING[name])
            encoder = Encoder(corpus)
            encoder.load_state_dict(start.state_dict())
            train(encoder, pairs, negatives, seed + 1000)
            found.setdefault(name, []).append(ndcg(encoder, held_out, held_out_corpus))
        print({name: f"{values[-1]:.4f}" for name, values in found.items()})
    rows = spreads(found)
    made = {"command": f"python benchmarks/mined_negatives.py --data sts.tsv.xz --seeds {given.seeds}", "rows": rows,
            "commit": record.commit(), "processor": record.processor(), "torch": torch.__version__,
            "python": platform.python_version(), "hardneg": hn.__version__, "pairs": len(pairs),
            "held_out_pairs": len(held_out)}  # fmt: skip
    record.write(given.to, made)


if __name__ == "__main__":
    main()
