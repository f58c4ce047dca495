"""Import of optional dependencies, with an error that gives the command to install a missing one."""

from importlib import import_module
from types import ModuleType


def required(module: str, extra: str) -> ModuleType:
    """Import a module of an optional dependency; if that fails, raise an ImportError with the command to install it.

    module: dotted name · extra: the extra of hardneg that installs it

    Examples:
        >>> required("json", "train").dumps([1])
        '[1]'
        >>> required("no_such_package.part", "graph")
        Traceback (most recent call last):
        ImportError: no_such_package is required and cannot be imported (No module named 'no_such_package'): pip ...
    """
    try:
        return import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise ImportError(
            f'{package} is required and cannot be imported ({error}): pip install "hardneg[{extra}]"'
        ) from error
