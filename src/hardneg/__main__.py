"""``hardneg`` and ``python -m hardneg``: the command line, if its dependencies are installed."""

import sys


def main() -> None:
    """Start the command line."""
    try:
        import hardneg.cli as cli

        cli.main()
    except ImportError as error:
        print(f'error: the command line cannot start ({error}): pip install "hardneg[train]"', file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:  # during the import, or a second one during the exit
        sys.exit(130)


if __name__ == "__main__":
    main()
