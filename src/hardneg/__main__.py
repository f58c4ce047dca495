"""``hardneg`` and ``python -m hardneg``: the command line, if its dependencies are installed."""

import os
import signal
import sys
from types import FrameType


def interrupted(number: int, frame: FrameType | None) -> None:
    """Ctrl-C raises KeyboardInterrupt, but while torch is imported it ends the process.

    An exception in PyTorch's initialization, which calls Python from C++, would abort the process with a message.
    """
    spec = getattr(sys.modules.get("torch"), "__spec__", None)
    if getattr(spec, "_initializing", False):
        os._exit(130)
    signal.default_int_handler(number, frame)


def main() -> None:
    """Start the command line."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, interrupted)
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
