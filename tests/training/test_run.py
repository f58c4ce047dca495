"""Runs learn, resume exactly after a kill at any moment, and train to the same weights in two processes."""

import functools
import io
import json
import os
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path

import lightning as L
import pytest
import torch
from torch import Tensor

from hardneg.training import build, recipe, run

SETTINGS = Path(run.__file__).parents[1] / "recipes" / "digits-simclr.yaml"
PATHS = os.pathsep.join([str(Path(__file__).parents[1]), str(Path(run.__file__).parents[2])])  # tests and package
SHORT = ["trainer.epochs=3", "trainer.save_every=2", "trainer.knn_every=0", "optimizer.schedule=cosine",
         "objective.preset=hcl", "objective.beta={schedule: linear, start: 2, end: 0}"]  # fmt: skip


def weights(folder: Path) -> dict[str, Tensor]:
    return torch.load(folder / "last.ckpt", weights_only=True)["state_dict"]  # type: ignore[no-any-return]


def child(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


def test_an_epoch_is_described_by_its_last_full_batch(tmp_path: Path) -> None:
    changes = ["trainer.epochs=1", "trainer.knn_every=0", "trainer.batch_size=512", "batches.drop_last=false"]
    result = run.train(recipe.load(SETTINGS, changes), tmp_path / "run")  # 512 + 512 + 273 of 1297 samples
    assert result.metrics["step"] == 3
    assert result.metrics["objective"]["anchors"] == 1024
    assert result.metrics["objective"]["support"] == 1022


WALKS = ["batches.sampler=proximity", "batches.candidates=200", "batches.neighbors=20", "batches.refresh_every=4",
         "batches.restart={schedule: linear, start: 0.2, end: 0.05}"]  # fmt: skip
SAMPLING = {
    "uniform": SHORT,
    "proximity": [*SHORT, *WALKS],
    "each once, from the bank": [*SHORT, *WALKS, "batches.coverage=once", "batches.embeddings=bank"],
    "knn": [*SHORT, "batches.sampler=knn", "batches.refresh_every=4"],
    "accumulated": [*SHORT, *WALKS, "trainer.accumulate=2"],  # steps of 2, 2 and 1 batches in every epoch
}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of an uninterrupted run, by how its batches are drawn."""

    @functools.cache
    def of(sampling: str) -> Path:
        folder: Path = tmp_path_factory.mktemp("whole") / "run"
        run.train(recipe.load(SETTINGS, SAMPLING[sampling]), folder)
        return folder

    return of


@pytest.fixture(scope="module")
def uninterrupted(finished: Callable[[str], Path]) -> Path:
    return finished("uniform")


def test_a_run_writes_its_recipe_environment_and_metrics(uninterrupted: Path) -> None:
    assert recipe.load(uninterrupted / "recipe.yaml") == recipe.load(SETTINGS, SHORT)
    assert json.loads((uninterrupted / "environment.json").read_text())["torch"] == torch.__version__
    lines = [json.loads(text) for text in (uninterrupted / "metrics.jsonl").read_text().splitlines()]
    assert [line["epoch"] for line in lines] == [1, 2, 3]
    assert [line["step"] for line in lines] == [5, 10, 15]
    assert {"data", "augmentation", "network"} <= set(lines[0]["seconds"])
    assert lines[0]["objective"]["support"] == 510


KILLED = """
import os, signal, sys
from hardneg.training import recipe, run
from hardneg.training.callbacks import checkpoints
folder, moment, settings, *overrides = sys.argv[1:]
def kill_after(hook, unit, number):
    called = getattr(checkpoints.Checkpoints, hook)
    def then_kill(self, trainer, *rest):
        called(self, trainer, *rest)
        if moment == f"after {unit} {number(trainer)}":
            os.kill(os.getpid(), signal.SIGKILL)
    setattr(checkpoints.Checkpoints, hook, then_kill)
kill_after("on_train_batch_end", "step", lambda trainer: trainer.global_step)
kill_after("on_train_batch_end", "batch", lambda trainer: trainer.fit_loop.total_batch_idx + 1)
kill_after("on_train_epoch_end", "epoch", lambda trainer: trainer.current_epoch + 1)
replace = checkpoints.os.replace
def interrupted(source, target):
    if moment == "while saving" and str(target).endswith("last.ckpt") and os.path.exists(target):
        os.truncate(source, 1000)
        os.kill(os.getpid(), signal.SIGKILL)
    replace(source, target)
checkpoints.os.replace = interrupted
run.train(recipe.load(settings, overrides), folder)
"""


QUICK = [
    ("uniform", "after step 3"),
    ("proximity", "after step 7"),
]
MORE = [
    ("uniform", "after epoch 1"),
    ("uniform", "while saving"),
    ("accumulated", "after batch 6"),
    ("uniform", "after step 1"),
    ("uniform", "after step 5"),
    ("uniform", "after step 9"),
    ("uniform", "after epoch 3"),
    ("proximity", "after step 10"),
    ("proximity", "after epoch 2"),
    ("each once, from the bank", "after step 7"),
    ("knn", "after step 9"),
    ("accumulated", "after batch 8"),
]


@pytest.mark.parametrize(
    ("sampling", "moment"), [*QUICK, *(pytest.param(*case, marks=pytest.mark.slow) for case in MORE)]
)
def test_a_killed_run_resumes_bit_by_bit(
    finished: Callable[[str], Path], tmp_path: Path, sampling: str, moment: str
) -> None:
    uninterrupted, folder = finished(sampling), tmp_path / "run"
    killed = child(KILLED, str(folder), moment, str(SETTINGS), *SAMPLING[sampling])
    assert killed.returncode == -9, killed.stderr
    run.train(recipe.load(SETTINGS), folder, resume=True)
    for name, weight in weights(uninterrupted).items():
        assert torch.equal(weight, weights(folder)[name]), name
    curves = [
        [
            (line["step"], line["loss"], pytest.approx(line["batches"]["false_negatives"]))
            for line in map(json.loads, (f / "metrics.jsonl").read_text().splitlines())
        ]
        for f in (uninterrupted, folder)
    ]
    assert curves[0] == curves[1]


def test_batches_of_near_neighbours_are_harder_and_hold_more_false_negatives(finished: Callable[[str], Path]) -> None:
    def last(sampling: str) -> dict[str, float]:
        lines = (finished(sampling) / "metrics.jsonl").read_text().splitlines()
        return json.loads(lines[-1])["batches"]  # type: ignore[no-any-return]

    uniform, walks, nearest = (last(sampling) for sampling in ("uniform", "proximity", "knn"))
    assert 0.08 < uniform["false_negatives"] < 0.12  # ten classes
    assert uniform["false_negatives"] + 0.03 < walks["false_negatives"]
    assert uniform["mean_cosine"] < walks["mean_cosine"] < nearest["mean_cosine"]
    assert sum(walks["cosines"]) == 256 * 255 / 2
    assert walks["graph_seconds"] > 0 <= walks["sampling_seconds"]


def test_an_unknown_sampler_is_refused() -> None:
    for wrong, message in (("sampler=proximty", "'proximty' is not known"), ("embeddings=bnk", "did you mean bank")):
        with pytest.raises(ValueError, match=message):
            recipe.load(SETTINGS, [*SHORT, *WALKS, f"batches.{wrong}"])


def test_a_step_leaks_no_memory(tmp_path: Path) -> None:
    # torch.manual_seed stores a stack trace for every kind of device that was never used.
    kept = [torch.cuda._queued_calls, torch.xpu._queued_calls, torch.mtia._queued_calls]
    found = []
    for epochs in (1, 3):
        before = [len(calls) for calls in kept]
        run.train(recipe.load(SETTINGS, [*SHORT, f"trainer.epochs={epochs}"]), tmp_path / str(epochs))
        found.append([len(calls) - number for calls, number in zip(kept, before, strict=True)])
    assert found[0] == found[1]


def test_dropout_is_a_function_of_seed_and_batch(tmp_path: Path) -> None:
    draws: list[list[float]] = []

    class Draws(L.Callback):
        def on_before_zero_grad(self, *given: object) -> None:
            draws.append([float(torch.rand(())), float(torch.rand(()))])

    for name in ("one", "other"):
        torch.rand(len(name))  # earlier draws must not matter
        run.train(recipe.load(SETTINGS, [*SHORT, "trainer.epochs=1"]), tmp_path / name, callbacks=[Draws()])
    assert draws[:5] == draws[5:]
    assert len({tuple(pair) for pair in draws[:5]}) == 5


def test_clipping_limits_the_length_of_a_step(tmp_path: Path) -> None:
    plain = [*SHORT, "trainer.epochs=1", "optimizer.name=sgd", "optimizer.lr=1", "optimizer.momentum=0",
             "optimizer.schedule=constant", "optimizer.weight_decay=0"]  # fmt: skip

    def distance(*overrides: str) -> float:
        settings = recipe.load(SETTINGS, [*plain, *overrides])
        before = build.method(settings, build.data(settings)).encoder.parameters()
        after = run.train(settings, tmp_path / str(len(overrides))).encoder.parameters()
        return sum(float((b - a).detach().square().sum()) for a, b in zip(before, after, strict=True)) ** 0.5

    assert 0 < distance("optimizer.clip=0.001") <= 5 * 0.001 + 1e-6  # five steps
    assert distance() > 0.05


def test_resuming_a_finished_run_changes_nothing(uninterrupted: Path) -> None:
    before = (uninterrupted / "metrics.jsonl").read_text()
    run.train(recipe.load(SETTINGS), uninterrupted, resume=True)
    assert (uninterrupted / "metrics.jsonl").read_text() == before


def test_an_existing_run_is_not_overwritten_and_a_missing_one_not_resumed(uninterrupted: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds a run already"):
        run.train(recipe.load(SETTINGS, SHORT), uninterrupted)
    with pytest.raises(ValueError, match="holds no run to resume"):
        run.train(recipe.load(SETTINGS, SHORT), tmp_path / "nothing", resume=True)


TWO = """
import sys
from hardneg.training import recipe, run
folder, settings, *overrides = sys.argv[1:]
run.train(recipe.load(settings, overrides), folder)
"""


@pytest.mark.slow
def test_two_processes_train_to_the_weights_of_one(tmp_path: Path) -> None:
    script = tmp_path / "two.py"
    script.write_text(TWO)
    plain = [*SHORT, "encoder.name=processes:plain_encoder", "encoder.options={}", "encoder.norm=false"]
    for devices in (1, 2):
        command = [sys.executable, str(script), str(tmp_path / str(devices)), str(SETTINGS), *plain,
                   f"trainer.devices={devices}"]  # fmt: skip
        environment = {"PYTHONPATH": PATHS, "PATH": "", "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
        assert done.returncode == 0, done.stderr
    one, two = weights(tmp_path / "1"), weights(tmp_path / "2")
    for name, weight in one.items():
        # One process takes the short path of the loss, two the general one: sums are added in another order.
        torch.testing.assert_close(two[name], weight, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "preset", ["hcl", *(pytest.param(name, marks=pytest.mark.slow) for name in ("simclr", "hscl"))]
)
def test_training_beats_the_untrained_encoder(tmp_path: Path, preset: str) -> None:
    from hardneg.evaluation import extract, few_label_accuracy
    from hardneg.images import load_images

    settings = recipe.load(SETTINGS, [f"objective.preset={preset}", "trainer.epochs=30", "trainer.knn_every=0"])
    sets = [load_images("digits", split, labels=True) for split in ("train", "test")]

    def accuracy(encoder: torch.nn.Module) -> float:
        train, test = (extract(encoder, part.images) for part in sets)  # type: ignore[union-attr]
        return few_label_accuracy(train, sets[0].labels, test, sets[1].labels, per_class=5)[0]  # type: ignore[arg-type]

    untrained = accuracy(build.method(settings, sets[0]).encoder)
    trained = accuracy(run.train(settings, tmp_path / "run").encoder)
    assert trained > untrained + 0.02


class Interrupt(L.Callback):
    """Ctrl-C before the 11th batch."""

    def on_train_batch_start(self, trainer: L.Trainer, *rest: object) -> None:
        if trainer.global_step == 10:
            raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("sampling", "kind"), [("uniform", "folder"), ("proximity", "folder"), ("uniform", "tar"), ("uniform", "parquet")]
)
def test_a_run_on_streamed_images_resumes_bit_by_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sampling: str, kind: str
) -> None:
    from PIL import Image

    from hardneg.images import data

    pixels = torch.randint(0, 256, (60, 8, 8), generator=torch.Generator().manual_seed(3), dtype=torch.uint8)
    for number, image in enumerate(pixels):
        place = tmp_path / "images" / str(number % 2)
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image.numpy()).save(place / f"{number}.png")
    if kind != "folder":
        (tmp_path / "shards").mkdir()
    if kind == "parquet":
        pytest.importorskip("datasets")
        import pyarrow.parquet

        monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))
        for shard in range(3):
            files = [tmp_path / "images" / str(number % 2) / f"{number}.png" for number in range(shard, 60, 3)]
            columns = {
                "image": [file.read_bytes() for file in files],
                "label": [int(file.parent.name) for file in files],
            }
            pyarrow.parquet.write_table(pyarrow.table(columns), tmp_path / "shards" / f"{shard}.parquet")
    if kind == "tar":
        for shard in range(3):
            with tarfile.open(tmp_path / "shards" / f"{shard}.tar", "w") as archive:
                for number in range(20 * shard, 20 * shard + 20):
                    archive.add(tmp_path / "images" / str(number % 2) / f"{number}.png", f"{number}.png")
                    label = tarfile.TarInfo(f"{number}.cls")
                    label.size = 1
                    archive.addfile(label, io.BytesIO(str(number % 2).encode()))
    source = tmp_path / ("images" if kind == "folder" else "shards")
    settings = recipe.load(
        SETTINGS,
        [*SAMPLING[sampling], f"data.source={source}", "trainer.batch_size=8", "batches.candidates=20",
         "batches.neighbors=5"],
    )  # fmt: skip
    load = data._load
    monkeypatch.setattr(data, "_load", lambda source, split, size, in_memory: load(source, split, size, 0))
    assert not hasattr(build.data(settings), "images")  # streamed
    run.train(settings, tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        run.train(settings, tmp_path / "part", callbacks=[Interrupt()])
    run.train(None, tmp_path / "part", resume=True)
    for name, weight in weights(tmp_path / "whole").items():
        assert torch.equal(weight, weights(tmp_path / "part")[name]), name
    shares = [
        [json.loads(line)["batches"]["false_negatives"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
        for folder in (tmp_path / "whole", tmp_path / "part")
    ]
    assert shares[0] == pytest.approx(shares[1])
