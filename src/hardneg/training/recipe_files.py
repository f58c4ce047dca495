"""The files of recipes, found by name or path. Does not import torch, so that listing them is fast."""

from pathlib import Path

from hardneg.training import yaml_files
from hardneg.training.recipe_errors import hint

RECIPES = Path(__file__).parents[1] / "recipes"


def known() -> dict[str, Path]:
    """The recipes that come with the library, by name."""
    return {file.stem: file for file in sorted(RECIPES.glob("*.yaml"))}


def find(name: str | Path) -> Path:
    """The file of a recipe: a path, or the name of one that comes with the library.

    Examples:
        >>> find("digits-simclr").name
        'digits-simclr.yaml'
        >>> find("digit-simclr")
        Traceback (most recent call last):
        ValueError: there is no recipe 'digit-simclr': did you mean digits-simclr?
    """
    built_in = known()
    if str(name) in built_in:
        return built_in[str(name)]
    if Path(name).is_file():
        return Path(name)
    if Path(name).is_dir():
        if (Path(name) / "recipe.yaml").is_file():
            raise ValueError(f"{name} is a run: give --resume {name}, or its recipe.yaml to begin another run")
        raise ValueError(
            f"{name} is a folder: give a YAML file, or the name of a built-in recipe; for the images in it, "
            f"my-images data.source={name}"
        )
    if Path(name).suffix in (".yaml", ".yml"):
        raise ValueError(f"there is no file {str(name)!r}: give the path of a recipe, or the name of a built-in one")
    raise ValueError(f"there is no recipe {str(name)!r}: {hint(str(name), list(built_in))}")


def about(file: Path) -> str:
    """The key ``about`` of a recipe file: what it is for. The rest of the file is not checked."""
    return str(yaml_files.read_mapping(file).get("about", ""))
