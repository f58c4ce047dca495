"""YAML from files and command lines: plain data, limited in size and depth, without duplicate keys.

PyYAML keeps the last of two equal keys, expands aliases without limit, and recurses as deep as the text nests.
"""

import re
from pathlib import Path
from typing import Any

import yaml

LARGEST = 64 * 1024  # bytes of a file; recipes have about 2,000
DEEPEST = 32  # levels of nesting; recipes have 4


def text_of(file: str | Path) -> str:
    """The text of a UTF-8 file of at most `LARGEST` bytes."""
    file = Path(file)
    if file.is_dir():
        raise ValueError(f"{file} is a folder: give a YAML file")
    if not file.is_file():
        raise ValueError(f"there is no file {str(file)!r}: give the path of a YAML file")
    with file.open("rb") as opened:
        content = opened.read(LARGEST + 1)
    if len(content) > LARGEST:
        raise ValueError(f"{file} is larger than {LARGEST:,} bytes: it is not a recipe")
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} is not UTF-8 text (byte {error.start}): save it as UTF-8") from error


def read_mapping(file: str | Path) -> dict[Any, Any]:
    """The keys and values of a file, at least one."""
    tree = parse(text_of(file), str(file))
    if tree is None or tree == {}:
        raise ValueError(f"{file} is empty: write at least one key, such as data: {{source: digits}}")
    if not isinstance(tree, dict):
        raise ValueError(f"{file} must hold keys and values, got {type(tree).__name__}")
    return tree


def parse(text: str, where: str) -> Any:
    """The value of a YAML text; errors are one line that names ``where``, the file or setting."""
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = "" if mark is None else f", line {mark.line + 1}"
        problem = ", ".join(part for part in (error.context, error.problem) if part)
        raise ValueError(f"{where} is not readable YAML: {problem}{line}") from error
    except Exception as error:  # values such as 2001-99-99 raise the error of their conversion
        reason = " ".join(str(error).split())
        raise ValueError(f"{where} is not readable YAML: {reason}") from error


class _Loader(yaml.SafeLoader):  # type: ignore[misc]  # PyYAML has no types
    """A safe loader that rejects aliases, merge keys, deep nesting and duplicate keys."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.depth = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        event = self.peek_event()
        if isinstance(event, yaml.AliasEvent):
            # Nine lists of nine aliases each, nine levels deep, expand to 400 million values.
            raise _refused(f"aliases (*{event.anchor}) are not allowed, write the value out", event)
        self.depth += 1
        if self.depth > DEEPEST:
            raise _refused(f"nested deeper than {DEEPEST} levels", event)
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        seen = set()
        for key_node, _ in node.value:
            if key_node.tag == "tag:yaml.org,2002:merge":
                raise _refused("the key '<<' is not allowed, write the keys out", key_node)
            if isinstance(key_node, yaml.ScalarNode):
                key = self.construct_object(key_node)
                if key in seen:
                    raise _refused(f"the key {key!r} occurs twice, leave one out", key_node)
                seen.add(key)
        return super().construct_mapping(node, deep)


# PyYAML implements YAML 1.1, where a number such as 1e-3 needs a dot; in YAML 1.2 it does not.
_Loader.add_implicit_resolver("tag:yaml.org,2002:float", re.compile(r"[+-]?\d+(\.\d*)?[eE][+-]?\d+"), "+-0123456789")


def _refused(problem: str, at: Any) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(problem=problem, problem_mark=at.start_mark)
