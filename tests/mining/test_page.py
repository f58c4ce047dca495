"""The page of a mining: what it shows, and texts that are HTML or control characters."""

import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
import torch

import hardneg as hn

HOSTILE = [
    '<script>alert("x")</script>',
    "<img src=x onerror=alert(1)>",
    "a\u202egnp.exe \x1b[31m",
    "plain",
    "</bdi></td>",
]


def embedded(texts: list[str]) -> np.ndarray:
    return np.random.default_rng(len(texts)).standard_normal((len(texts), 6)).astype(np.float32) + 1


class Elements(HTMLParser):
    """Names of all elements, and the texts of table cells."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attributes: object) -> None:
        self.names.append(tag)

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.mark.filterwarnings("ignore:.*fewer than")
def test_texts_are_shown_as_text(tmp_path: Path) -> None:
    mined = hn.mine([*HOSTILE[:3]], [*HOSTILE], HOSTILE[:3], model=embedded, num_negatives=2)
    page = mined.write_page(tmp_path / "mined.html").read_text(encoding="utf-8")
    found = Elements()
    found.feed(page)
    assert found.names.count("script") == 2  # the values of the chart, and the page's own
    assert "img" not in found.names
    assert found.names.count("thead") == found.names.count("details") + 1  # one for each query, and one for the hubs
    for text in HOSTILE[:2]:
        assert text in found.text
    assert "default-src 'none'" in page
    assert not re.search(r"\son\w+=", re.sub(r"<script.*?</script>|&lt;.*?&gt;", "", page, flags=re.S))


def test_numbers_and_hubs_are_those_of_the_result(tmp_path: Path) -> None:
    corpus = np.random.default_rng(3).standard_normal((50, 8))
    mined = hn.mine(corpus[:20] + 0.1, corpus, range(20), num_negatives=4)
    page = mined.write_page(tmp_path / "mined.html", queries=7).read_text(encoding="utf-8")
    assert "20 queries, 80 negatives" in page
    assert "7 of 20 queries" in page
    document, number = mined.hubs(1)[0]
    assert f'#{document}</th><td class="number">{number}<' in page
    assert int((mined.indices == document).sum()) == number


@pytest.mark.filterwarnings("ignore:.*fewer than")
def test_a_page_without_negatives_says_so(tmp_path: Path) -> None:
    mined = hn.mine(np.eye(3), np.eye(3), [0, 1, 2], num_negatives=1, hardening=hn.Threshold(cosine=0.5))
    assert torch.equal(mined.indices, torch.full((3, 1), -1))
    page = mined.write_page(tmp_path / "mined.html").read_text(encoding="utf-8")
    assert "3 queries, 0 negatives" in page
