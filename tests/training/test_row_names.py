"""Rows are named by the settings in which they differ, shortly and without two rows of one name."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hardneg.training.row_names import flat, heading, row_names

FOLDERS = ["first", "second", "third"]


def named(*trees: dict[str, object]) -> list[str]:
    return row_names([flat(tree) for tree in trees], FOLDERS[: len(trees)])


@pytest.mark.parametrize(
    ("trees", "names", "title"),
    [
        (
            [{"objective": {"temperature": 0.1}}, {"objective": {"temperature": 0.2}}],
            ["temperature 0.1", "temperature 0.2"],
            "temperature",
        ),
        (
            [{"objective": {"preset": "simclr"}}, {"objective": {"preset": "hcl", "beta": 1.0, "tau_plus": 0.1}}],
            ["simclr", "hcl (beta 1, tau_plus 0.1)"],
            "loss",
        ),
        (
            [{"method": "moco", "objective": {"preset": "moco"}}, {"method": "simclr", "objective": {"preset": "hcl"}}],
            ["moco, moco", "simclr, hcl"],
            "method",
        ),
        (
            [{"data": {"source": "/data/a.npz"}}, {"data": {"source": "/data/b.npz"}}],
            ["a.npz", "b.npz"],
            "data",
        ),
        # What only one of the encoders has is not named, and neither is an empty section.
        (
            [
                {"encoder": {"name": "tiny", "options": {}}, "trainer": {"epochs": 35}},
                {"encoder": {"name": "resnet18", "options": {"stem": "small"}}, "trainer": {"epochs": 9}},
            ],
            ["tiny (epochs 35)", "resnet18 (epochs 9)"],
            "encoder, epochs",
        ),
        (
            [{"encoder": {"name": "resnet18", "options": {"stem": stem}}} for stem in ("small", "imagenet")],
            ["stem small", "stem imagenet"],
            "stem",
        ),
        # Methods differ in too many settings for a name: the method is the name.
        (
            [
                {"method": "graphcl", "optimizer": dict.fromkeys("abcde", 1)},
                {"method": "infograph", "optimizer": dict.fromkeys("abcde", 2)},
            ],
            ["graphcl", "infograph"],
            "method",
        ),
        # Two settings of one name are told apart by their whole keys.
        (
            [{"batches": {"restart": 1, "x": {"restart": 2}}}, {"batches": {"restart": 3, "x": {"restart": 4}}}],
            ["batches.restart 1, batches.x.restart 2", "batches.restart 3, batches.x.restart 4"],
            "batches.restart, batches.x.restart",
        ),
        (
            [{"trainer": {"sync": True, "clip": None}}, {"trainer": {"sync": False, "clip": 2.0}}],
            ["sync on, clip none", "sync off, clip 2"],
            "sync, clip",
        ),
        # Equal recipes, and paths that end alike.
        ([{"seed": 0, "about": "a"}, {"seed": 1, "about": "b"}], ["first", "second"], "run"),
        ([{"data": {"source": "a/x.npz"}}, {"data": {"source": "b/x.npz"}}], ["first", "second"], "data"),
        ([{"objective": {"preset": "simclr"}}], ["first"], "run"),
        # Too many settings for a name.
        (
            [{"optimizer": dict.fromkeys("abcde", 1)}, {"optimizer": dict.fromkeys("abcde", 2)}],
            ["first", "second"],
            "settings",
        ),
    ],
)
def test_names_and_heading(trees: list[dict[str, object]], names: list[str], title: str) -> None:
    assert named(*trees) == names
    assert heading([flat(tree) for tree in trees]) == title


def test_names_of_folders_that_are_equal_are_not_used() -> None:
    rows = [{"data.source": "a/x.npz"}, {"data.source": "b/x.npz"}]
    assert row_names(rows, ["run", "run"]) == ['data.source="a/x.npz"', 'data.source="b/x.npz"']


values = st.none() | st.booleans() | st.integers(-3, 3) | st.sampled_from(["", "1", "none", "on", "a, b 1"])


@given(
    st.lists(st.dictionaries(st.sampled_from(["objective.preset", "a.b", "c.b", "d"]), values), min_size=2, max_size=5)
)
def test_rows_that_differ_have_different_names(rows: list[dict[str, object]]) -> None:
    distinct = [row for number, row in enumerate(rows) if row not in rows[:number]]
    names = row_names(distinct, ["same"] * len(distinct))
    assert len({*names}) == len(distinct) or len(distinct) == 1
