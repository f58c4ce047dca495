"""Sets of the TU collection are found in their folders, and downloaded only on request."""

import io
import zipfile
from pathlib import Path

import local_site
import pytest

pytest.importorskip("torch_geometric", reason='needs pip install "hardneg[graph]"')

from torch_geometric.datasets import TUDataset

from hardneg import published_data
from hardneg.graphs import tu_files
from hardneg.graphs.data import load_graphs
from hardneg.graphs.modality import Graphs

TEXTS = {"A": "1, 2\n2, 1\n", "graph_indicator": "1\n1\n2\n", "graph_labels": "4\n7\n"}


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HARDNEG_DATA", str(tmp_path / "shared"))


def zipped(name: str = "TOY") -> bytes:
    with zipfile.ZipFile(content := io.BytesIO(), "w") as archive:
        for part, text in TEXTS.items():
            archive.writestr(f"{name}/{name}_{part}.txt", text)
    return content.getvalue()


def test_a_set_is_downloaded_once_and_only_on_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with local_site.serve({"/TOY.zip": zipped()}) as (site, asked):
        monkeypatch.setattr(TUDataset, "url", site)
        with pytest.raises(FileNotFoundError, match=r"put TOY.zip or the folder TOY/ .* into data/tu, or download it "
                           "with hardneg data tu:TOY --download"):  # fmt: skip
            load_graphs("TOY")
        assert asked == []
        for _ in range(2):
            assert load_graphs("TOY", download=True).labels.tolist() == [0, 1]
        assert asked == ["/TOY.zip"]
    assert [file.name for file in (tmp_path / "data" / "tu").iterdir()] == ["TOY.zip"]
    assert load_graphs("TOY").ptr.tolist() == [0, 2, 3]


def test_a_zip_is_read_and_copied_to_where_recipes_find_it(tmp_path: Path) -> None:
    (tmp_path / "downloads").mkdir()
    archive = tmp_path / "downloads" / "TOY.zip"
    archive.write_bytes(zipped("OTHER"))
    with pytest.raises(FileNotFoundError, match=r"has no TOY_A\.txt"):
        published_data.prepare("tu:TOY", Path("data"), str(archive))
    assert not Path("data").exists()
    archive.write_bytes(zipped())
    for source in (archive, archive.parent):
        made = published_data.prepare("tu:TOY", Path("data"), str(source))
        assert (made.source, made.about) == ("tu:TOY", "2 graphs, 2 classes, 2 features of a node, in data/tu")
        assert [file.name for file in Path("data/tu").iterdir()] == ["TOY.zip"]
        with pytest.raises(ValueError, match="has TOY already: remove it"):
            published_data.prepare("tu:TOY", Path("data"), str(source))
        assert load_graphs("TOY").labels.tolist() == [0, 1]
        Path("data/tu/TOY.zip").unlink()


@pytest.mark.parametrize(("given", "meant"), [("mutag", "MUTAG"), ("toy", "TOY"), ("imdb-binary", "IMDB-BINARY")])
def test_a_set_in_other_letters_is_suggested(given: str, meant: str, tmp_path: Path) -> None:
    (tmp_path / "shared" / "tu").mkdir(parents=True)
    (tmp_path / "shared" / "tu" / "TOY.zip").write_bytes(zipped())
    with pytest.raises(FileNotFoundError, match=rf"tu:{given} is not in .*: did you mean tu:{meant}\?"):
        load_graphs(given)


def test_a_missing_set_names_where_it_was_searched_and_what_is_there(tmp_path: Path) -> None:
    (tmp_path / "shared" / "tu").mkdir(parents=True)
    (tmp_path / "shared" / "tu" / "TOY.zip").write_bytes(zipped())
    with pytest.raises(
        FileNotFoundError, match=rf"tu:MUTAG is not in data/tu or {tmp_path}/shared/tu, which have TOY:"
    ):
        load_graphs("MUTAG")


@pytest.mark.parametrize("name", ["../TOY", "a/b", "", "TOY?x=1", "-x"])
def test_a_name_that_is_not_one_is_not_asked_for(name: str) -> None:
    with pytest.raises(ValueError, match="is not the name of a set of the TU collection"):
        tu_files.fetch(name)


def test_the_working_directory_comes_before_the_shared_folder(tmp_path: Path) -> None:
    (tmp_path / "shared" / "tu").mkdir(parents=True)
    (tmp_path / "shared" / "tu" / "TOY.zip").write_bytes(zipped())
    assert Graphs().resolve("tu:TOY") == "tu:TOY"  # by name, wherever HARDNEG_DATA is
    (tmp_path / "data" / "tu").mkdir(parents=True)
    assert Graphs().resolve("tu:TOY") == "tu:TOY"  # a folder without the set does not hide it
    assert len(load_graphs("TOY")) == 2
    (tmp_path / "data" / "tu" / "TOY.zip").write_bytes(zipped())
    assert Graphs().resolve("tu:TOY") == f"tu:{tmp_path}/data/tu/TOY"


def test_a_folder_of_processed_files_does_not_hide_the_zip(tmp_path: Path) -> None:
    (tmp_path / "TOY" / "processed").mkdir(parents=True)
    (tmp_path / "TOY.zip").write_bytes(zipped())
    assert load_graphs("TOY", tmp_path).ptr.tolist() == [0, 2, 3]
