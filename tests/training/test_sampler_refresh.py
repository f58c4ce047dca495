"""The callback that refreshes a batch sampler, in any Lightning training."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close
from torch.utils.data import DataLoader, TensorDataset
from training import shared_refresh

import hardneg as hn
from hardneg.methods.simclr import SimCLR
from hardneg.training import recipe, run
from hardneg.training.callbacks.sampler_refresh import Refresh

SCRIPT = """
import sys, json
sys.path.insert(0, sys.argv[2])
from training.test_sampler_refresh import Plain, fit
module, sampler = fit(int(sys.argv[1]), own=json.loads(sys.argv[3]))
open(f"{sys.argv[4]}/{module.global_rank}.json", "w").write(json.dumps(module.seen))
"""


class Plain(L.LightningModule):
    """A module of a user, without code for samplers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 3)
        self.loss = hn.simclr(gather=True)
        self.seen: list[list[int]] = []

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        index, x = batch
        self.seen.append(index.tolist())
        loss: Tensor = self.loss(self.layer(x), self.layer(x + 0.1))
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(devices: int = 1, own: bool = True) -> tuple[Plain, hn.ProximityBatchSampler]:
    data = torch.randn(60, 4, generator=torch.Generator().manual_seed(1))
    module = Plain()
    trainer = L.Trainer(
        max_epochs=2, accelerator="cpu", devices=devices, strategy="ddp" if devices > 1 else "auto", logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        use_distributed_sampler=not own,
    )  # fmt: skip
    sampler = hn.ProximityBatchSampler(
        60, 12, candidates=40, neighbors=8, restart=hn.Linear(0.4, 0.2), refresh_every=3,
        rank=trainer.global_rank, processes=trainer.world_size,
    )  # fmt: skip
    # The processes do not agree on the rows, as where each has running statistics of its own.
    trainer.callbacks.append(Refresh(sampler, lambda: data + trainer.global_rank))  # type: ignore[attr-defined]
    trainer.fit(module, DataLoader(TensorDataset(torch.arange(60), data), batch_sampler=sampler))
    return module, sampler


def test_the_sampler_is_refreshed_on_time_and_its_schedule_moves() -> None:
    module, sampler = fit()
    assert len(module.seen) == 10
    assert sampler.refreshes == 3  # after steps 3, 6 and 9
    assert sampler.progress == 1.0
    uniform = list(hn.UniformBatchSampler(60, 12))
    assert module.seen[:3] == uniform[:3]
    assert module.seen[3:5] != uniform[3:]


def in_two_processes(folder: Path, own: bool) -> subprocess.CompletedProcess[str]:
    script = folder / "two.py"
    script.write_text(SCRIPT)
    command = [sys.executable, str(script), "2", str(Path(__file__).parents[1]), json.dumps(own), str(folder)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


@pytest.mark.slow
def test_two_processes_share_the_batches_of_one(tmp_path: Path) -> None:
    done = in_two_processes(tmp_path, own=True)
    assert done.returncode == 0, done.stderr
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
    assert [one + other for one, other in zip(first, second, strict=True)] == fit()[0].seen


@pytest.mark.slow
def test_each_process_embeds_its_share_with_the_statistics_of_the_first(tmp_path: Path) -> None:
    found = shared_refresh.launch(tmp_path)
    assert [len(part["indices"]) for part in found] == [12, 11]
    assert torch.cat([part["indices"] for part in found]).tolist() == list(range(shared_refresh.SIZE))
    alone = shared_refresh.network(0)(shared_refresh.samples())
    for rank, part in enumerate(found):
        assert_close(part["rows"], alone.detach(), rtol=1e-12, atol=1e-12)
        for name, buffer in shared_refresh.network(rank).named_buffers():  # each gets its own back
            assert torch.equal(part["buffers"][name], buffer)


@pytest.mark.slow
def test_two_processes_build_the_graph_of_one_and_embed_half_the_samples_each(tmp_path: Path) -> None:
    overrides = ["trainer.epochs=1", "trainer.knn_every=0", "trainer.insight_every=0", "batches.sampler=proximity",
                 "batches.candidates=60", "batches.neighbors=10", "batches.refresh_every=4",
                 "encoder.name=processes:plain_encoder", "encoder.options={}", "encoder.norm=false"]  # fmt: skip
    for devices in (1, 2):
        command = [sys.executable, shared_refresh.__file__, str(tmp_path / str(devices)), *overrides,
                   f"trainer.devices={devices}"]  # fmt: skip
        paths = [str(Path(__file__).parents[1]), str(Path(run.__file__).parents[2])]
        environment = {"PYTHONPATH": os.pathsep.join(paths), "PATH": "", "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
        assert done.returncode == 0, done.stderr
    alone, first, second = (torch.load(tmp_path / part, weights_only=True) for part in ("1.0", "2.0", "2.1"))
    assert torch.equal(first["neighbors"], second["neighbors"])
    same = (first["neighbors"] == alone["neighbors"]).double().mean()
    assert same > 0.99  # sums in another order may swap two neighbors at nearly the same distance
    assert (first["embedded"], second["embedded"]) == (649, 648)  # of 1297, at one refresh


@pytest.mark.slow
def test_the_sampler_refuses_to_be_replaced_by_lightning_and_says_what_to_do(tmp_path: Path) -> None:
    done = in_two_processes(tmp_path, own=False)
    assert done.returncode != 0
    assert "use_distributed_sampler=False" in done.stderr


def test_a_run_builds_its_graphs_from_the_cosines_that_its_loss_scores(tmp_path: Path) -> None:
    settings = recipe.load(
        recipe.find("digits-simclr"),
        ["trainer.epochs=1", "trainer.knn_every=0", "batches.sampler=proximity", "batches.candidates=60",
         "batches.neighbors=10", "batches.refresh_every=4"],
    )  # fmt: skip
    found: list[Tensor] = []

    class Look(L.Callback):
        def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
            assert isinstance(pl_module, SimCLR)
            refresh = next(one for one in trainer.callbacks if isinstance(one, Refresh))  # type: ignore[attr-defined]
            pl_module.eval()
            assert pl_module.views is not None
            images: Tensor = pl_module.resident().images  # type: ignore[attr-defined]
            with torch.no_grad():
                raw = pl_module.head(pl_module.encoder(pl_module.views.plain(images)))  # type: ignore[attr-defined]
            found.extend([refresh.embeddings(), raw])

    run.train(settings, tmp_path / "run", callbacks=[Look()])
    given, raw = found
    norms = raw.norm(dim=1)
    assert norms.max() > 1.5 * norms.min()  # else inner products would rank as cosines do
    torch.testing.assert_close(given, raw / norms[:, None])


def test_a_graph_from_the_bank_waits_for_the_first_epoch_so_that_every_sample_is_reached(tmp_path: Path) -> None:
    chosen = ["trainer.knn_every=0", "trainer.insight_every=0", "trainer.batch_size=64", "batches.sampler=proximity",
              "batches.candidates=500", "batches.neighbors=100", "batches.refresh_every=5",
              "batches.embeddings=bank"]  # fmt: skip
    seen: list[set[int]] = []
    refreshed: list[int] = []

    class Look(L.Callback):
        def on_train_batch_start(
            self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
        ) -> None:
            if batch_idx == 0:
                seen.append(set())
            seen[-1] |= set((batch if isinstance(batch, Tensor) else batch[0]).tolist())

        def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
            refresh = next(one for one in trainer.callbacks if isinstance(one, Refresh))  # type: ignore[attr-defined]
            refreshed.append(refresh.sampler.refreshes)

    settings = recipe.load(recipe.find("digits-simclr"), [*chosen, "trainer.epochs=3"])
    run.train(settings, tmp_path / "run", callbacks=[Look()])
    assert len(seen[0]) == 1297 // 64 * 64  # uniform: each sample once, but for those that do not fill a batch
    assert refreshed[0] <= 1
    assert refreshed[2] >= 8
    assert len(seen[2]) < 1000  # walks repeat samples
    with pytest.raises(
        ValueError, match=r"batches\.embeddings=bank .*trainer\.epochs is 1: set batches\.embeddings=encode"
    ):
        run.train(recipe.load(recipe.find("digits-simclr"), [*chosen, "trainer.epochs=1"]), tmp_path / "one")
