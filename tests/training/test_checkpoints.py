"""Missing or broken checkpoints give one line with the fix and exit code 2, and change nothing."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import lightning as L
import pytest
import torch
from test_cli import hardneg, tree

from hardneg.training import recipe, run

SHORT = ["trainer.epochs=3", "trainer.knn_every=0"]  # five steps each


pytestmark = pytest.mark.usefixtures("empty_folder")


class Interrupt(L.Callback):
    """Ctrl-C after ``step`` steps."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_start(self, trainer: L.Trainer, *rest: object) -> None:
        if trainer.global_step == self.step:
            raise KeyboardInterrupt


def interrupted(folder: Path, *overrides: str, step: int = 7) -> Path:
    with pytest.raises(KeyboardInterrupt):
        run.train(recipe.load(recipe.find("digits-simclr"), [*SHORT, *overrides]), folder, callbacks=[Interrupt(step)])
    return folder


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was stopped in its second epoch."""
    return interrupted(tmp_path_factory.mktemp("begun") / "run")


@pytest.fixture(scope="module")
def others(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Checkpoints of runs of other recipes: one that fits in shape, and some that do not."""
    root = tmp_path_factory.mktemp("others")
    changes = {
        "seed": "seed=7",
        "encoder": "encoder.options={width: 64}",
        "optimizer": "optimizer.name=sgd",
        "sampler": "batches.sampler=knn",
        "method": "method=moco_v3",
    }
    return {name: interrupted(root / name, change) / "last.ckpt" for name, change in changes.items()}


def empty(file: Path) -> None:
    file.write_bytes(b"")


def truncated(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def overwritten(file: Path) -> None:
    file.write_bytes(torch.randint(0, 256, (20_000,), dtype=torch.uint8).numpy().tobytes())


def text(file: Path) -> None:
    file.write_text("this is no checkpoint\n")


def folder(file: Path) -> None:
    file.unlink()
    file.mkdir()


def fifo(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


def a_tensor(file: Path) -> None:
    torch.save(torch.zeros(3), file)


def plain_weights(file: Path) -> None:
    torch.save({"state_dict": {"weight": torch.zeros(3)}}, file)


class Code:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return Path.touch, (Path("executed"),)  # type: ignore[return-value]


def code(file: Path) -> None:
    torch.save({"state_dict": Code()}, file)


def changed(**more: object) -> Callable[[Path], None]:
    def change(file: Path) -> None:
        torch.save({**torch.load(file, weights_only=True), **more}, file)

    return change


def without(key: str) -> Callable[[Path], None]:
    def change(file: Path) -> None:
        saved = torch.load(file, weights_only=True)
        del saved[key]
        torch.save(saved, file)

    return change


BROKEN: dict[str, Callable[[Path], None]] = {
    "missing": Path.unlink,
    "empty": empty,
    "truncated": truncated,
    "random bytes": overwritten,
    "text": text,
    "a folder": folder,
    "a tensor": a_tensor,
    "weights of something else": plain_weights,
    "code": code,
    "no optimizer": without("optimizer_states"),
    "an empty optimizer": changed(optimizer_states=[]),
    "no loops": without("loops"),
    "no callbacks": changed(callbacks={}),
    "wrong loops": changed(loops=3),
    "no learning rate": changed(lr_schedulers=[]),
    "a step beyond the end": changed(batches={"step": 99, "sampler": {}}),
}


def resumed_in_one_line(capsys: pytest.CaptureFixture[str], place: Path) -> str:
    before = tree(place)
    code, out, err = hardneg(capsys, "train", "--resume", str(place))
    assert (code, out, len(err.strip().splitlines())) == (2, "", 1), err
    assert err.startswith("error: ")
    assert str(place / "last.ckpt") in err
    assert f"hardneg train {place / 'recipe.yaml'} --run" in err  # the fix
    assert tree(place) == before
    return err


@pytest.mark.parametrize("fault", BROKEN)
def test_a_broken_checkpoint_gives_one_line_and_changes_nothing(
    capsys: pytest.CaptureFixture[str], begun: Path, tmp_path: Path, fault: str
) -> None:
    place = tmp_path / "run"
    shutil.copytree(begun, place)
    BROKEN[fault](place / "last.ckpt")
    err = resumed_in_one_line(capsys, place)
    assert "is missing" in err if fault == "missing" else "is missing" not in err
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize("other", ["seed", "encoder", "optimizer", "sampler", "method"])
def test_the_checkpoint_of_another_run_is_refused(
    capsys: pytest.CaptureFixture[str], begun: Path, others: dict[str, Path], tmp_path: Path, other: str
) -> None:
    place = tmp_path / "run"
    shutil.copytree(begun, place)
    shutil.copy(others[other], place / "last.ckpt")
    assert "another run" in resumed_in_one_line(capsys, place)


@pytest.mark.parametrize("change", ["width: 256", "name: adam", "epochs: 3", "batch_size: 256"])
def test_a_recipe_that_no_longer_fits_its_checkpoint_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, change: str
) -> None:
    place = interrupted(tmp_path / "run", "encoder.options={width: 256}")
    file = place / "recipe.yaml"
    key, _, _ = change.partition(": ")
    other = {"width": "width: 64", "name": "name: sgd", "epochs": "epochs: 1", "batch_size": "batch_size: 128"}[key]
    assert change in file.read_text()
    file.write_text(file.read_text().replace(change, other))
    resumed_in_one_line(capsys, place)


def test_a_run_may_be_resumed_with_other_workers_but_not_with_another_learning_rate(
    capsys: pytest.CaptureFixture[str], begun: Path, tmp_path: Path
) -> None:
    place = tmp_path / "run"
    shutil.copytree(begun, place)
    file = place / "recipe.yaml"
    first = file.read_text()
    file.write_text(first.replace("lr: 0.001", "lr: 0.002"))
    assert "changed in optimizer.lr" in resumed_in_one_line(capsys, place)
    file.write_text(first.replace("workers: 2", "workers: 0"))
    code, _, err = hardneg(capsys, "train", "--resume", "run", "--no-evaluate")
    assert code == 0, err


def test_an_untouched_run_resumes(capsys: pytest.CaptureFixture[str], begun: Path, tmp_path: Path) -> None:
    shutil.copytree(begun, tmp_path / "run")
    code, _, err = hardneg(capsys, "train", "--resume", "run", "--no-evaluate")
    assert code == 0, err
    lines = [json.loads(text)["epoch"] for text in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert lines == [1, 2, 3]


def test_a_checkpoint_lost_within_the_first_epoch_is_an_error(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    place = interrupted(tmp_path / "run", "trainer.save_every=2", step=3)
    (place / "last.ckpt").unlink()
    assert "is missing" in resumed_in_one_line(capsys, place)


def test_a_run_without_a_checkpoint_starts_again_with_a_note(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    place = interrupted(tmp_path / "run", step=3)
    assert not (place / "last.ckpt").exists()
    code, _, err = hardneg(capsys, "train", "--resume", "run", "--no-evaluate")
    assert code == 0
    assert "note: run holds no checkpoint yet: it begins with epoch 1" in err
    assert (place / "encoder.safetensors").exists()


@pytest.mark.parametrize("fault", ["empty", "truncated", "random bytes", "weights of something else", "a tensor"])
def test_evaluate_and_export_refuse_a_broken_checkpoint(
    capsys: pytest.CaptureFixture[str], begun: Path, tmp_path: Path, fault: str
) -> None:
    place = tmp_path / "run"
    shutil.copytree(begun, place)
    BROKEN[fault](place / "last.ckpt")
    before = tree(place)
    for command in ("evaluate", "export"):
        code, _, err = hardneg(capsys, command, str(place))
        assert (code, len(err.strip().splitlines())) == (2, 1), err
        assert "last.ckpt" in err
    assert tree(place) == before


@pytest.mark.parametrize("fault", ["empty", "truncated", "random bytes", "text", "weights of something else"])
def test_a_broken_encoder_gives_one_line(
    capsys: pytest.CaptureFixture[str], begun: Path, tmp_path: Path, fault: str
) -> None:
    place = tmp_path / "run"
    shutil.copytree(begun, place)
    run.train(recipe.load({}), place, resume=True)
    if fault == "weights of something else":
        from safetensors.torch import save_file

        save_file({"weight": torch.zeros(3)}, place / "encoder.safetensors")
    else:
        BROKEN[fault](place / "encoder.safetensors")
    before = tree(place)
    for command in ("evaluate", "export"):
        code, _, err = hardneg(capsys, command, str(place))
        assert (code, len(err.strip().splitlines())) == (2, 1), err
        assert "encoder.safetensors" in err
    assert tree(place) == before


DEEP = "[" * 200_000
BROKEN_FILES: dict[str, tuple[str, bytes]] = {
    "metrics {}": ("metrics.jsonl", b"{}\n"),
    "metrics [1]": ("metrics.jsonl", b"[1]\n"),
    "metrics step": ("metrics.jsonl", b'{"step": "x"}\n'),
    "metrics bytes": ("metrics.jsonl", b"\xff\xfe\n"),
    "metrics deep": ("metrics.jsonl", DEEP.encode() + b"\n"),
    "threads x": ("environment.json", b'"threads": "x"'),
    "threads 0": ("environment.json", b'"threads": 0'),
    "threads huge": ("environment.json", b'"threads": 100000000000000000000'),
    "resumed x": ("environment.json", b'"resumed": "x", "threads": 1'),
    "environment deep": ("environment.json", DEEP.encode()),
    "environment bytes": ("environment.json", b"\xff\xfe"),
}


@pytest.mark.parametrize("fault", BROKEN_FILES)
def test_broken_metrics_or_environment_give_one_line_and_change_nothing(
    capsys: pytest.CaptureFixture[str], begun: Path, tmp_path: Path, fault: str
) -> None:
    place = tmp_path / "run"
    shutil.copytree(begun, place)
    name, content = BROKEN_FILES[fault]
    whole = (place / name).read_bytes()
    if content.startswith(b'"'):  # one entry of the object
        content = re.sub(rb'"threads": \d+', content, whole)
        assert content != whole
    (place / name).write_bytes(content)
    before = tree(place)
    code, out, err = hardneg(capsys, "train", "--resume", str(place), "--no-evaluate")
    assert (code, out, len(err.strip().splitlines())) == (2, "", 1), err
    assert err.startswith("error: ")
    assert name in err
    assert tree(place) == before


def test_a_metrics_line_cut_off_by_a_kill_is_no_error(
    capsys: pytest.CaptureFixture[str], begun: Path, tmp_path: Path
) -> None:
    shutil.copytree(begun, tmp_path / "run")
    with (tmp_path / "run" / "metrics.jsonl").open("ab") as file:
        file.write(b'{"epoch": 2, "st')
    code, _, err = hardneg(capsys, "train", "--resume", "run", "--no-evaluate")
    assert code == 0, err
    lines = [json.loads(text)["epoch"] for text in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert lines == [1, 2, 3]


@pytest.mark.parametrize("shape", ["-1,8,8", "1,8,1000000", "1,8,0", "1,8", "", "1,8,99999999999999999999"])
def test_an_encoder_of_an_impossible_shape_gives_one_line(
    capsys: pytest.CaptureFixture[str], begun: Path, tmp_path: Path, shape: str
) -> None:
    from safetensors.torch import load_file, save_file

    place = tmp_path / "run"
    shutil.copytree(begun, place)
    run.train(recipe.load({}), place, resume=True)
    file = place / "encoder.safetensors"
    save_file(load_file(file), file, {"shape": shape})
    before = tree(place)
    code, _, err = hardneg(capsys, "evaluate", str(place))
    assert (code, len(err.strip().splitlines())) == (2, 1), err
    assert "encoder.safetensors" in err
    assert tree(place) == before


def test_a_transfer_file_of_deep_brackets_gives_one_line(
    capsys: pytest.CaptureFixture[str], begun: Path, tmp_path: Path
) -> None:
    place = tmp_path / "run"
    shutil.copytree(begun, place)
    run.train(recipe.load({}), place, resume=True)
    (place / "transfer.json").write_text(DEEP)
    code, _, err = hardneg(capsys, "evaluate", str(place), "--data", "digits")
    assert (code, len(err.strip().splitlines())) == (2, 1), err
    assert "transfer.json" in err
    assert (place / "transfer.json").read_text() == DEEP


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
@pytest.mark.parametrize(
    ("command", "name"),
    [
        ("train --resume", "last.ckpt"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                ("evaluate", "encoder.safetensors"),
                ("evaluate", "last.ckpt"),
                ("export", "last.ckpt"),
                ("train --resume", "encoder.safetensors"),
                ("train --resume", "metrics.jsonl"),
            )
        ),
    ],
)
def test_a_named_pipe_in_place_of_a_file_is_refused_at_once(
    begun: Path, tmp_path: Path, command: str, name: str
) -> None:
    place = tmp_path / "run"
    shutil.copytree(begun, place)
    (place / name).touch()
    fifo(place / name)
    done = subprocess.run(
        [sys.executable, "-m", "hardneg", *command.split(), str(place)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, len(done.stderr.strip().splitlines())) == (2, 1), done.stderr
    assert name in done.stderr


def test_a_finished_run_is_compared_without_its_checkpoint(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    compare = ["compare", "digits-simclr", "trainer.epochs=1", "--seeds", "1", "--run", "all", "--json"]
    code, first, err = hardneg(capsys, *compare)
    assert code == 0, err
    place = tmp_path / "all" / "digits-simclr" / "seed-0"
    for name in ("last.ckpt", "evaluation.json"):  # the first is often deleted to save space
        (place / name).unlink()
    code, second, err = hardneg(capsys, *compare)
    assert code == 0, err
    assert second == first
    assert not (place / "last.ckpt").exists()
