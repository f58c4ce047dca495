"""Seconds of a step of SimCLR on CIFAR-10's shapes, and of a batch sampler. For `batches.py`."""

import time

import torch
from stopwatch import Run, Stopwatch
from torch import Tensor, nn

import hardneg as hn
from hardneg.evaluation import extract
from hardneg.images.resnet import resnet18
from hardneg.randomness import generator
from hardneg.samplers import ProximityBatchSampler


def seconds(sampler: ProximityBatchSampler, embeddings: Tensor, batch: int) -> dict[str, list[float]]:
    """Repetitions of: drawing a batch, encoding all samples, a refresh from ``embeddings``, a step, its device part."""
    watch = Stopwatch(embeddings.device)
    refreshes = [watch.wall(lambda: sampler.refresh(embeddings)) for _ in range(6)][1:]
    drawn = []
    for _ in range(3):
        begin = time.perf_counter()
        for _ in sampler:
            pass
        drawn.append(1000 * (time.perf_counter() - begin) / len(sampler))
    few = embeddings.device.type == "cpu"
    encoder, run = simclr(embeddings.device, batch)
    # On a CPU a pass over the whole set would take minutes: one batch of it, times their number.
    number = min(len(embeddings), 64) if few else len(embeddings)
    images = torch.zeros(number, 3, 32, 32, dtype=torch.uint8, device=embeddings.device)

    def encode() -> None:
        with torch.autocast(embeddings.device.type, torch.bfloat16):
            extract(encoder, images)

    encoded = [watch.wall(encode) * len(embeddings) / number for _ in range(2 if few else 6)][1:]
    watch.loop(run, 1 if few else 10)  # warms up
    whole = [watch.loop(run, 1 if few else 20) for _ in range(5)]
    # One step at a time: more would overflow the queue of the device, and the host would be measured too.
    alone = [watch.queued(run, 1) for _ in range(3 if few else 9)]
    found = {"sampling": drawn, "encoding": encoded, "refresh": refreshes, "step": whole, "step, device alone": alone}
    return {name: [ms / 1000 for ms in taken] for name, taken in found.items()}


def simclr(device: torch.device, batch: int) -> tuple[nn.Module, Run]:
    """ResNet-18 with its head, and its forward, backward and optimizer on two views (B, 3, 32, 32) on the device."""
    torch.manual_seed(0)
    encoder = nn.Sequential(resnet18(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 128)).to(device)
    encoder.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    optimizer = torch.optim.Adam(encoder.parameters(), fused=device.type == "cuda")
    views = torch.rand(2 * batch, 3, 32, 32, generator=generator(device, 4), device=device)
    views, loss = views.to(memory_format=torch.channels_last), hn.simclr()

    def run() -> None:
        with torch.autocast(device.type, torch.bfloat16):
            z1, z2 = encoder(views).chunk(2)
        optimizer.zero_grad()
        torch.autograd.backward(loss(z1, z2))
        optimizer.step()

    return encoder, run
