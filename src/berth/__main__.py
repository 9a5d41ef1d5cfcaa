"""The command `berth`, also as `python -m berth`.

Until the command line is there, Ctrl-C ends the process the way the kernel does it, without a traceback.
"""

import signal
import sys


def main() -> int:
    """Run the command line and return its exit code."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    if signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # or no child could be waited for
    from berth.cli.main import main as command_line

    return command_line()


if __name__ == "__main__":
    sys.exit(main())
