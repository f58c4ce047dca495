"""``hardneg`` and ``python -m hardneg``: the command line, if what it needs is installed."""

import sys


def main() -> None:
    """Start the command line."""
    try:
        from hardneg import cli
    except ImportError as error:
        sys.exit(_explained(error))
    cli.main()


def _explained(error: ImportError) -> int:
    print(f'error: the command line cannot start ({error}): pip install "hardneg[train]"', file=sys.stderr)
    return 2


if __name__ == "__main__":
    main()
