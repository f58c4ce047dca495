"""Runs with ``data.not_negatives``: ids of each kind of data, exact resumption, and refusal of a changed file."""

import io
import json
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from commands import hardneg
from torch import Tensor

from hardneg.images import load_images
from hardneg.text.data import load_texts
from hardneg.training import build, recipe, run, validation_split

SHORT = ["trainer.epochs=2", "trainer.knn_every=0", "trainer.batch_size=64"]


def pairs_file(folder: Path, pairs: list[tuple[Any, Any]], name: str = "pairs.jsonl") -> str:
    (folder / name).write_text("".join(json.dumps({"a": a, "b": b}) + "\n" for a, b in pairs))
    return f"data.not_negatives={folder / name}"


def weights(folder: Path) -> dict[str, Tensor]:
    return torch.load(folder / "last.ckpt", weights_only=True)["state_dict"]  # type: ignore[no-any-return]


def many(count: int, samples: int) -> list[tuple[int, int]]:
    draw = np.random.default_rng(0)
    return [(int(a), int(b)) for a, b in draw.choice(samples, (count, 2)) if a != b]


class Stop(L.Callback):
    """Ends the run with an error in the second epoch."""

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.current_epoch == 1:
            raise RuntimeError("stopped")


@pytest.mark.parametrize("name", ["simclr", pytest.param("moco", marks=pytest.mark.slow)])
def test_a_stopped_run_resumes_exactly_and_refuses_a_changed_file(name: str, tmp_path: Path) -> None:
    large = [*SHORT[:2], "trainer.batch_size=256"]
    changes = [*large, pairs_file(tmp_path, many(5000, 1297))]
    settings = recipe.load(recipe.find(f"digits-{name}"), changes)
    run.train(settings, tmp_path / "whole")
    with pytest.raises(RuntimeError, match="stopped"):
        run.train(settings, tmp_path / "run", callbacks=[Stop()])
    stated = json.loads((tmp_path / "run" / "environment.json").read_text())["not_negatives"]
    assert stated["pairs"] == len(build.not_negatives(settings, build.data(settings)))  # type: ignore[arg-type]

    pairs = (tmp_path / "pairs.jsonl").read_text().splitlines(keepends=True)
    for changed, message in (
        (pairs[1:], r"data\.not_negatives has changed since .* was begun"),
        (['{"a": 3, "b": 5000}\n'], "line 1: there is no sample 5000"),
    ):
        (tmp_path / "pairs.jsonl").write_text("".join(changed))
        with pytest.raises(ValueError, match=message):
            run.train(None, tmp_path / "run", resume=True)
    (tmp_path / "pairs.jsonl").unlink()
    with pytest.raises(FileNotFoundError, match=r"data\.not_negatives=.* does not exist"):
        run.train(None, tmp_path / "run", resume=True)

    # The same pairs in another order are the same pairs.
    (tmp_path / "pairs.jsonl").write_text("".join(reversed(pairs)))
    run.train(None, tmp_path / "run", resume=True)
    whole, resumed = weights(tmp_path / "whole"), weights(tmp_path / "run")
    assert all(torch.equal(tensor, resumed[key]) for key, tensor in whole.items())
    plain = run.train(recipe.load(recipe.find(f"digits-{name}"), SHORT), tmp_path / "plain")
    assert (
        plain.metrics["loss"] != json.loads((tmp_path / "whole" / "metrics.jsonl").read_text().splitlines()[-1])["loss"]
    )


def test_a_run_cannot_lose_its_pairs_or_gain_some(tmp_path: Path) -> None:
    settings = recipe.load(recipe.find("digits-simclr"), [*SHORT, pairs_file(tmp_path, [(0, 1)])])
    with pytest.raises(RuntimeError, match="stopped"):
        run.train(settings, tmp_path / "run", callbacks=[Stop()])
    file = tmp_path / "run" / "recipe.yaml"
    file.write_text(file.read_text().replace(f"not_negatives: {tmp_path / 'pairs.jsonl'}", "not_negatives: null"))
    with pytest.raises(ValueError, match=r"data\.not_negatives has changed since .* \(1 pairs then, 0 now\)"):
        run.train(None, tmp_path / "run", resume=True)


def encoded(number: int) -> bytes:
    from PIL import Image

    Image.fromarray(np.random.default_rng(number).integers(0, 255, (8, 8), dtype=np.uint8)).save(
        file := io.BytesIO(), "PNG"
    )
    return file.getvalue()


@pytest.mark.parametrize("in_memory", [1 << 30, 0])
@pytest.mark.parametrize("kind", [pa.string(), pa.int64()])
def test_images_of_a_table_are_named_by_its_column_id(tmp_path: Path, kind: Any, in_memory: int) -> None:
    images = [encoded(number) for number in range(120)]
    images[7] = b"broken"  # left out of the set in memory, so that row numbers are shifted
    ids = pa.array([str(1000 - number) for number in range(120)]).cast(kind)
    pq.write_table(pa.table({"id": ids, "image": images, "label": [0, 1] * 60}), tmp_path / "train.parquet")
    with pytest.warns(UserWarning, match="skipped 1 of 120"):
        found = load_images(tmp_path / "train.parquet", in_memory=in_memory)
    assert found.sample_ids is not None
    assert len(found.sample_ids) == len(found)
    part = found.subset([0, 9])
    assert part.sample_ids is not None
    assert [str(name) for name in part.sample_ids] == ["1000", "990" if in_memory else "991"]


def test_a_run_on_a_table_uses_ids_and_one_on_arrays_rows_of_the_training_split(tmp_path: Path) -> None:
    images = [encoded(number) for number in range(100)]
    table = {"id": [f"x{number}" for number in range(100)], "image": images, "label": [0, 1] * 50}
    pq.write_table(pa.table(table), tmp_path / "images.parquet")
    named = pairs_file(tmp_path, [("x3", "x5"), ("x11", "x3")])
    settings = recipe.load(recipe.find("digits-simclr"), [*SHORT, f"data.source={tmp_path / 'images.parquet'}", named])
    whole = build.data(settings)  # a fifth of the images is held out, by their content
    if any(name not in whole.sample_ids for name in ("x3", "x5", "x11")):
        pytest.fail("the chosen ids are held out: choose others")
    expected = {frozenset(map(whole.sample_ids.index, pair)) for pair in (("x3", "x5"), ("x11", "x3"))}
    found = build.not_negatives(settings, whole)
    assert found is not None
    assert {frozenset(pair) for pair in found.tolist()} == expected
    held_out = next(name for name in table["id"] if name not in whole.sample_ids)
    other = recipe.load(
        recipe.find("digits-simclr"),
        [*SHORT, f"data.source={tmp_path / 'images.parquet'}", pairs_file(tmp_path, [("x3", held_out)])],
    )
    with pytest.raises(ValueError, match=f"'{held_out}' is not an id of the {len(whole)} samples"):
        build.not_negatives(other, whole)


@pytest.mark.parametrize("form", ["jsonl", "csv", "parquet", "large jsonl"])
def test_texts_are_named_by_their_column_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str) -> None:
    rows = [{"id": 100 + n, "text": f"sentence {n}" if n != 2 else " ", "label": "ab"[n % 2]} for n in range(6)]
    file = tmp_path / f"texts.{form.split()[-1]}"
    if form == "csv":
        file.write_text("id,text,label\n" + "".join(f"{r['id']},{r['text']},{r['label']}\n" for r in rows))
    elif form == "parquet":
        pq.write_table(pa.Table.from_pylist(rows), file)
    else:
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    if form == "large jsonl":
        monkeypatch.setattr("hardneg.text.files.IN_MEMORY", 10)
        texts = load_texts(file)
        assert not texts.in_memory
        assert list(texts.sample_ids or ()) == [100, 101, 102, 103, 104, 105]
        return
    with pytest.warns(UserWarning, match="left out 1 empty"):
        texts = load_texts(file)
    assert [str(name) for name in texts.sample_ids or ()] == ["100", "101", "103", "104", "105"]
    assert [str(name) for name in texts.subset([2, 0]).sample_ids or ()] == ["103", "100"]


def test_simcse_leaves_out_the_copies_of_a_listed_text_too(tmp_path: Path) -> None:
    texts = ["the sea", "a wave", "the sea", "a hill", "a rock", "a tree", "the path", "a deer"]
    (tmp_path / "texts.jsonl").write_text(
        "".join(json.dumps({"id": f"t{n}", "text": t}) + "\n" for n, t in enumerate(texts))
    )
    changes = [f"data.source={tmp_path / 'texts.jsonl'}", "encoder.name=transformer", "trainer.batch_size=8",
               "trainer.epochs=1", "encoder.options={width: 16, layers: 1, heads: 2, words: 500}"]  # fmt: skip
    settings = recipe.load(recipe.find("sentences-simcse"), [*changes, pairs_file(tmp_path, [("t1", "t2")])])
    train_set = build.data(settings)
    module = build.method(settings, train_set)
    found = build.not_negatives(settings, train_set)
    assert found is not None
    module.leave_out(found)
    index = torch.arange(8)
    pairs = module.id_arguments(index)["not_negatives"]
    assert sorted(map(tuple, pairs.tolist())) == [(0, 1), (0, 1), (1, 0)]  # rows 0 and 2 share the id 0
    assert np.isfinite(run.train(settings, tmp_path / "run").metrics["loss"])
    quick = recipe.load(
        recipe.find("sentences-quickthoughts"),
        [*changes[:1], *changes[2:4], "encoder.name=gru", "encoder.options={width: 8, word_dim: 6}",
         pairs_file(tmp_path, [("t1", "t6")])],
    )  # fmt: skip
    assert np.isfinite(run.train(quick, tmp_path / "quick").metrics["loss"])


def test_graphs_are_numbered(tmp_path: Path) -> None:
    pytest.importorskip("torch_geometric", reason="graphs need torch_geometric")
    edges = np.concatenate([[[3 * g, 3 * g + 1], [3 * g + 1, 3 * g + 2]] for g in range(40)]).T
    np.savez(tmp_path / "graphs.npz", edge_index=edges, batch=np.repeat(np.arange(40), 3), y=np.arange(40) % 2)
    changes = ["modality=graphs", f"data.source={tmp_path / 'graphs.npz'}", "data.features=degree", "trainer.epochs=2",
               "trainer.batch_size=16", pairs_file(tmp_path, many(300, 40))]  # fmt: skip
    settings = recipe.load(recipe.find("imdb-binary-graphcl"), changes)
    assert np.isfinite(run.train(settings, tmp_path / "run").metrics["loss"])
    with pytest.raises(ValueError, match=r"no meaning for method=infograph.*use method=graphcl"):
        recipe.load(recipe.find("mutag-infograph"), changes)


def test_methods_that_cannot_leave_pairs_out_refuse_them() -> None:
    with pytest.raises(ValueError, match=r"data\.not_negatives has no meaning for method=local_aggregation.*simclr"):
        recipe.load(recipe.find("digits-la"), ["data.not_negatives=pairs.jsonl"])


def test_rows_count_from_before_a_validation_part_is_taken_out() -> None:
    taken = torch.tensor([False, True, False, False, True])
    pairs = torch.tensor([[0, 1], [0, 2], [2, 3], [3, 4]])
    assert validation_split.of_rest(pairs, taken).tolist() == [[0, 1], [1, 2]]
    assert validation_split.of_rest(pairs, None) is pairs


def test_the_command_says_how_many_pairs_and_refuses_bad_files(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    pairs_file(tmp_path, [(0, 1), (1, 0), (5, 6)])
    command = ["train", "digits-simclr", "trainer.epochs=1", "--run", "run", "--no-evaluate"]
    code, _, err = hardneg(capsys, *command, "data.not_negatives=pairs.jsonl")
    assert code == 0, err
    assert "2 pairs of " in err
    assert "pairs.jsonl: never negatives" in err
    pairs_file(tmp_path, [(0, 1), ("x", 0)], "bad.jsonl")
    for file, message in (("bad.jsonl", "line 2: 'x' is not a row number"), ("none.jsonl", "does not exist")):
        code, _, err = hardneg(capsys, *command[:-3], "--run", "other", f"data.not_negatives={file}")
        assert code == 2
        assert message in err
        assert not (tmp_path / "other").exists()
