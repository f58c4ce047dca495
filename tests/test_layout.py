"""The layout of the package: directions of import, no cycles, no private names, and tests that mirror the source."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import hardneg

SOURCE, TESTS = Path(hardneg.__file__).parent, Path(__file__).parent

LEAVES = {"callables", "checks", "chunks", "distributed", "division", "downloads", "export_inputs", "extras", "heads",
          "matmul", "not_negatives", "printable", "progress", "randomness", "recipe_section", "spelling"}  # fmt: skip
# What each file or folder of the package may import, in the order of the data: losses first, the command line last.
ALLOWED: dict[str, set[str]] = {
    **dict.fromkeys(LEAVES, LEAVES),
    "losses": LEAVES,
    "cached": LEAVES,
    "memory": LEAVES | {"losses"},
    "samplers": LEAVES | {"losses"},
    "evaluation": LEAVES | {"losses"},
    "diagnostics": LEAVES | {"losses", "evaluation"},
    "modality": LEAVES | {"evaluation"},
    "images": LEAVES | {"losses", "evaluation", "modality"},
    "graphs": LEAVES | {"losses", "evaluation", "modality"},
    "text": LEAVES | {"losses", "evaluation", "modality"},
    "methods": LEAVES | {"losses", "memory", "modality"},
    "training": LEAVES
    | {"losses", "memory", "samplers", "evaluation", "diagnostics", "modality", "methods", "version"},
    "insight": LEAVES | {"losses", "evaluation", "diagnostics", "modality", "training"},
    "mining": LEAVES | {"losses", "insight", "version"},
    "public": LEAVES | {"cached", "losses", "memory", "samplers", "evaluation", "insight", "mining", "training"},
    "integrations": LEAVES | {"losses", "samplers"},
    "theory": LEAVES | {"losses", "samplers"},
    "terminal": LEAVES | {"evaluation", "insight"},
    "demo": LEAVES | {"evaluation", "training"},
    "doctor": LEAVES | {"version"},
    "published_data": LEAVES | {"images", "graphs"},
    "warm_up": LEAVES | {"losses"},
    "export": LEAVES | {"training", "version"},
    "cli": LEAVES
    | {
        "training",
        "insight",
        "losses",
        "mining",
        "terminal",
        "demo",
        "doctor",
        "export",
        "published_data",
        "theory",
        "warm_up",
        "version",
    },
    "__main__": {"cli"},
    "__init__": {"public"},
}
# Single imports beyond the table: a number may be a schedule, whose module imports nothing when it is loaded, and a
# method for one kind of data uses the networks of that kind.
EXCEPTIONS = {
    ("checks", "losses.schedules"),
    ("methods.cmc", "images.two_views"),
    ("methods.infograph", "graphs.gin"),
    ("methods.quick_thoughts", "text.encoders"),
    ("methods.quick_thoughts", "text.tokens"),
    ("methods.simcse", "text.encoders"),
    ("methods.simcse", "text.text_set"),
}
# The parts that may import Lightning; the rest works in any training loop.
LIGHTNING = {"methods", "training"}

# Tests of more than one module, by folder.
CROSS_CUTTING = {
    ".": {"children", "class_prior", "claims", "cli", "evidence", "fused_benchmark", "layout", "locale", "package",
          "torchrun", "translations", "trust", "tutorials", "unpack_data", "without_float64"},
    "insight": {"page", "parts"},
    "insight/explorer": {"loop"},
    "losses": {"accelerator_values", "degenerate", "directions", "errors", "imports", "limits", "numbers",
               "padded_positives", "second_derivatives"},
    "losses/kernels": {"compiling", "fused", "fused_gpu", "kernels"},
    "memory": {"averaging", "processes"},
    "methods": {"graphs", "methods", "mistakes", "runs", "settings"},
    "peers": {"peers"},
    "samplers": {"loaders"},
    "training": {"concurrency", "divisions", "failed_runs", "graphs", "large_batches", "lightning", "more_epochs",
                 "not_negatives", "notes", "parts"},
}  # fmt: skip


def module_name(file: Path) -> str:
    """The name of a module within the package; that of a folder for its ``__init__``."""
    parts = file.relative_to(SOURCE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)


MODULES = {module_name(file): ast.parse(file.read_text(encoding="utf-8")) for file in sorted(SOURCE.rglob("*.py"))}


def part(module: str) -> str:
    """The file or folder at the top of the package that holds a module."""
    return module.partition(".")[0]


def imported(node: ast.AST) -> Iterator[tuple[str, str]]:
    """Modules of the package that an import statement names, with the imported name; ``version`` is the package's."""
    if isinstance(node, ast.ImportFrom) and node.level == 0 and node.module is not None:
        top, _, below = node.module.partition(".")
        for alias in node.names if top == "hardneg" else ():
            inner = f"{below}.{alias.name}" if below else alias.name
            yield (inner if inner in MODULES else below or "version"), alias.name
    elif isinstance(node, ast.Import):
        for alias in node.names:
            top, _, below = alias.name.partition(".")
            if top == "hardneg":
                yield below or "version", alias.name


def at_import_time(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements that run when a module is imported: not those of functions and of TYPE_CHECKING blocks."""
    for node in body:
        yield node
        if isinstance(node, ast.If):
            checking = isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
            yield from at_import_time([] if checking else node.body)
            yield from at_import_time(node.orelse)
        elif isinstance(node, ast.ClassDef | ast.With):
            yield from at_import_time(node.body)
        elif isinstance(node, ast.Try):
            yield from at_import_time([*node.body, *(line for each in node.handlers for line in each.body)])


def test_every_part_of_the_package_is_in_the_table() -> None:
    assert {part(module) for module in MODULES} == set(ALLOWED)


@pytest.mark.parametrize("name", sorted(ALLOWED))
def test_a_part_imports_only_what_its_direction_allows(name: str) -> None:
    found = {
        (module, target)
        for module, tree in MODULES.items()
        if part(module) == name
        for node in ast.walk(tree)
        for target, _ in imported(node)
        if part(target) not in ALLOWED[name] | {name}
    }
    expected = {(module, target) for module, target in EXCEPTIONS if part(module) == name}
    assert found - expected == set(), "imports against the direction: move the code, or the import"
    assert expected - found == set(), "exceptions that are no longer needed: remove them"


def test_the_directions_have_no_cycle() -> None:
    placed: set[str] = set(LEAVES) | {"version"}
    rest = {name: targets for name, targets in ALLOWED.items() if name not in LEAVES}
    while ready := {name for name, targets in rest.items() if targets <= placed}:
        placed |= ready
        rest = {name: targets for name, targets in rest.items() if name not in ready}
    assert rest == {}


def test_modules_do_not_import_each_other_in_a_cycle() -> None:
    targets = {
        module: {target for node in at_import_time(tree.body) for target, _ in imported(node) if target in MODULES}
        for module, tree in MODULES.items()
    }
    finished: set[str] = set()

    def visit(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, f"imported in a cycle: {' → '.join((*path[path.index(module) :], module))}"
        if module not in finished:
            for target in sorted(targets[module] - {module}):
                visit(target, (*path, module))
            finished.add(module)

    for module in MODULES:
        visit(module, ())
    assert sum(map(len, targets.values())) > 300  # the imports were found


def test_no_private_name_is_imported_from_another_folder() -> None:
    found = [
        f"{module}: {target}.{name}"
        for module, tree in MODULES.items()
        for node in ast.walk(tree)
        for target, name in imported(node)
        if name.startswith("_") and not name.startswith("__") and module.rpartition(".")[0] != target.rpartition(".")[0]
    ]
    assert found == []


def test_only_methods_and_training_import_lightning() -> None:
    found = {
        part(module)
        for module, tree in MODULES.items()
        for node in ast.walk(tree)
        if (isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "lightning")
        or (isinstance(node, ast.Import) and any(alias.name.partition(".")[0] == "lightning" for alias in node.names))
    }
    assert found == LIGHTNING


def test_every_folder_of_the_package_has_a_folder_of_tests() -> None:
    folders = {file.parent.relative_to(SOURCE).parts[0] for file in SOURCE.glob("*/**/*.py")}
    assert {folder for folder in folders if not any((TESTS / folder).glob("test_*.py"))} == set()


@pytest.mark.parametrize("file", sorted(TESTS.rglob("test_*.py")), ids=lambda file: file.relative_to(TESTS).as_posix())
def test_a_test_file_is_named_after_a_module_or_tests_several(file: Path) -> None:
    folder, name = file.parent.relative_to(TESTS), file.stem.removeprefix("test_")
    below = (SOURCE / folder).glob("*.py") if folder == Path() else (SOURCE / folder).rglob("*.py")
    assert name in {module.stem for module in below} | CROSS_CUTTING.get(folder.as_posix(), set())
