"""Which negatives? Five losses side by side on scikit-learn's digits, on a CPU, over three seeds.

Each trains the same small network on 1,297 digits and is judged on 500 others by what few labels can do with its
features: 1-nearest-neighbour accuracy from 1 and 5 labels per class (mean over 20 draws of the labels) and from all
of them. Raw pixels and the untrained network show what is there to begin with.
"""

import statistics
import sys
import time
from collections.abc import Callable

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import affine_grid, grid_sample, normalize

import hardneg as hn

EPOCHS, BATCH, SEEDS = 60, 256, (0, 1, 2)
LOSSES: dict[str, Callable[[], hn.InfoNCE]] = {
    "SimCLR": hn.simclr,
    "debiased": hn.debiased,
    "HCL": hn.hcl,
    "SCL (labels)": hn.scl,
    "H-SCL (labels)": hn.hscl,
}


def view(images: Tensor, generator: torch.Generator) -> Tensor:
    """Each picture turned, scaled and shifted a little at random, with noise: (N, 1, 8, 8)."""
    count = len(images)
    angle = 0.35 * torch.randn(count, generator=generator)
    size = 1 + 0.15 * torch.randn(count, generator=generator)
    shift = 0.2 * torch.randn(count, 2, generator=generator)
    turn = torch.stack([angle.cos(), -angle.sin(), angle.sin(), angle.cos()], dim=1).reshape(count, 2, 2)
    matrix = torch.cat([turn * size[:, None, None], shift[:, :, None]], dim=2)  # (N, 2, 3)
    moved = grid_sample(images, affine_grid(matrix, list(images.shape), align_corners=False), align_corners=False)
    return moved + 0.1 * torch.randn(moved.shape, generator=generator)


def network() -> tuple[nn.Module, nn.Module]:
    """Encoder and projection head."""
    encoder = nn.Sequential(
        nn.Flatten(), nn.Linear(64, 512), nn.BatchNorm1d(512), nn.ReLU(),
        nn.Linear(512, 512), nn.BatchNorm1d(512), nn.ReLU(), nn.Linear(512, 128),
    )  # fmt: skip
    return encoder, nn.Sequential(nn.ReLU(), nn.Linear(128, 64))


def train(loss: hn.InfoNCE, images: Tensor, labels: Tensor, seed: int) -> nn.Module:
    """The encoder after training with this loss."""
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    encoder, head = network()
    optimizer = torch.optim.Adam([*encoder.parameters(), *head.parameters()], lr=1e-3)
    for _ in range(EPOCHS):
        for rows in torch.randperm(len(images), generator=generator).split(BATCH)[:-1]:
            batch = images[rows]
            both = head(encoder(torch.cat([view(batch, generator), view(batch, generator)])))
            extra = {} if loss.supervision == "none" else {"labels": labels[rows]}
            value = loss(both[: len(rows)], both[len(rows) :], **extra)
            optimizer.zero_grad()
            value.backward()
            optimizer.step()
    return encoder.eval()


@torch.no_grad()
def judge(
    features: Callable[[Tensor], Tensor], known: tuple[Tensor, Tensor], asked: tuple[Tensor, Tensor]
) -> list[float]:
    """Accuracy in percent from 1 label per class, from 5, and from all."""
    known_z, asked_z = (normalize(features(images).flatten(1), dim=1) for images in (known[0], asked[0]))
    similarity = asked_z @ known_z.T  # (asked, known)
    results = []
    for per_class, draws in ((1, 20), (5, 20), (None, 1)):
        accuracies = []
        for draw in range(draws):
            order = torch.randperm(len(known_z), generator=torch.Generator().manual_seed(draw))
            if per_class is not None:
                order = torch.cat([order[known[1][order] == digit][:per_class] for digit in range(10)])
            nearest = order[similarity[:, order].argmax(dim=1)]
            accuracies.append(100 * (known[1][nearest] == asked[1]).float().mean().item())
        results.append(statistics.mean(accuracies))
    return results


def main() -> None:
    """Train, judge and print the table."""
    began = time.perf_counter()
    data = load_digits()
    images, labels = torch.tensor(data.images, dtype=torch.float32)[:, None] / 16, torch.tensor(data.target)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    known, asked = ((images[part], labels[part]) for part in (order[500:], order[:500]))

    rows: dict[str, list[list[float]]] = {"raw pixels": [judge(lambda x: x, known, asked)], "untrained": []}
    for seed in SEEDS:
        torch.manual_seed(seed)
        rows["untrained"].append(judge(network()[0].eval(), known, asked))
    for name, loss in LOSSES.items():
        rows[name] = []
        for seed in SEEDS:
            print(
                f"\rtraining {name}, seed {seed + 1} of {len(SEEDS)} …".ljust(60), end="", file=sys.stderr, flush=True
            )
            rows[name].append(judge(train(loss(), *known, seed), known, asked))
    print("\r".ljust(60) + "\r", end="", file=sys.stderr)

    print(f"1-NN accuracy on 500 digits, % (mean ± std over {len(SEEDS)} seeds, {EPOCHS} epochs)\n")
    print(f"{'negatives':<16}{'1 label/class':>16}{'5 labels/class':>16}{'all 1,297':>16}")
    for name, runs in rows.items():
        cells = []
        for column in zip(*runs, strict=True):
            spread = f" ± {statistics.stdev(column):.1f}" if len(column) > 1 else ""
            cells.append(f"{statistics.mean(column):.1f}{spread}".rjust(16))
        print(name.ljust(16) + "".join(cells))
    print(f"\n{time.perf_counter() - began:.0f} s on {torch.get_num_threads()} threads, torch {torch.__version__}")


if __name__ == "__main__":
    main()
