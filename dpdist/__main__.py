"""Entry point of `dpdist` and of `python -m dpdist`; it imports nothing before it is called."""

import signal
import sys


def start() -> None:
    """The command line; Ctrl-C while Python still imports ends it quietly too, and SIGTERM, by
    which schedulers and `dpdist cluster stop` end a command, does what Ctrl-C does."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        from dpdist.cli import main

        main.main()
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    start()
