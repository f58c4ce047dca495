"""Sentences of the documentation that comes with Python, labeled by topic: text that needs no download."""

import re
from importlib import import_module

import torch

from hardneg.text.text_set import TextSet, sentences

WORDS = 4  # in a sentence, at least
LABELED = 30  # sentences of a topic that gets a label, at least
_RULE = re.compile(r"^\s*([*=\-~^])\1+\s*$", re.MULTILINE)  # under a heading
_PROSE = re.compile(r"[A-Z].*[.!?:]$")


def python_docs() -> TextSet:
    """The sentences of the topics of ``help()``, in reading order; each topic is a document.

    Topics with fewer than 30 sentences are trained on without a label. Some topics contain others: a sentence belongs
    to the shortest topic that has it.

    Examples:
        >>> docs = python_docs()
        >>> len(docs) > 2000, "comparisons" in docs.classes
        (True, True)
    """
    try:
        topics: dict[str, str] = import_module("pydoc_data.topics").topics
    except ImportError as error:  # some distributions leave it out
        raise ValueError("data.source=python-docs: this Python comes without pydoc_data: give other texts") from error
    by_topic: dict[str, list[str]] = {}
    seen: set[str] = set()
    for topic in sorted(topics, key=lambda name: (len(topics[name]), name)):
        new = [text for text in dict.fromkeys(_sentences(topics[topic])) if text not in seen]
        seen.update(new)
        if new:
            by_topic[topic] = new
    classes = tuple(topic for topic, texts in by_topic.items() if len(texts) >= LABELED)
    texts: list[str] = []
    labels: list[int] = []
    starts: list[int] = []
    for topic, found in by_topic.items():
        starts.append(len(texts))
        texts += found
        labels += [classes.index(topic) if topic in classes else -1] * len(found)
    return TextSet(texts, torch.tensor(labels), classes, "python-docs", torch.tensor(starts))


def _sentences(document: str) -> list[str]:
    """The sentences of a document's paragraphs; headings, code and tables are left out."""
    paragraphs = [part for part in re.split(r"\n\s*\n", document) if not _RULE.search(part)]
    found = [text.removeprefix("* ") for part in paragraphs for text in sentences(part)]
    return [text for text in found if _PROSE.match(text) and len(text.split()) >= WORDS]
