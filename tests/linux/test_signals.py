import signal

import pytest

# Collects signals until SIGTERM has come, then prints what was taken.
COLLECT = """
import select, signal
ignored = int(sys.argv[1])
if ignored: signal.signal(ignored, signal.SIG_IGN)
from berth.linux.signals import SignalInbox
taken = []
with SignalInbox() as inbox:
    print("ready", flush=True)
    while signal.SIGTERM not in taken:
        select.select([inbox], [], [])
        taken += inbox.take()
        print(*taken[-1:], flush=True)
    print("all", *taken, flush=True)
"""


def test_signals_arrive_as_messages(children) -> None:
    child = children.start(COLLECT, 0)
    assert child.stdout.readline() == "ready\n"
    numbers = [signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGCONT, signal.SIGINT, signal.SIGTERM]
    for number in numbers:
        child.send_signal(number)
        assert child.stdout.readline() == f"{number:d}\n"
    assert child.stdout.readline() == "all " + " ".join(f"{number:d}" for number in numbers) + "\n"
    assert child.wait() == 0


def test_ignored_signal_stays_ignored(children) -> None:
    child = children.start(COLLECT, int(signal.SIGHUP))
    assert child.stdout.readline() == "ready\n"
    child.send_signal(signal.SIGHUP)
    child.send_signal(signal.SIGTERM)
    assert child.communicate()[0] == f"{signal.SIGTERM:d}\nall {signal.SIGTERM:d}\n"


def test_handlers_come_back(children) -> None:
    """Behind the inbox Ctrl-C is an exception again, and a wakeup descriptor of the caller is restored."""
    child = children.start(
        "import os, signal, socket, time\n"
        "from berth.linux.signals import SignalInbox\n"
        "reader, writer = socket.socketpair()\n"
        "writer.setblocking(False)\n"
        "signal.set_wakeup_fd(writer.fileno())\n"
        "with SignalInbox() as inbox:\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "    assert inbox.take() == [signal.SIGINT]\n"
        "    assert inbox.take() == []\n"
        "assert signal.set_wakeup_fd(writer.fileno()) == writer.fileno()\n"
        "try:\n"
        "    print('ready', flush=True)\n"
        "    time.sleep(60)\n"
        "except KeyboardInterrupt:\n"
        "    print('interrupted', reader.recv(9))\n"
    )
    assert child.stdout.readline() == "ready\n"
    child.send_signal(signal.SIGINT)
    assert child.communicate()[0] == "interrupted b'\\x02'\n"


@pytest.mark.parametrize("burst", [1, 500])
def test_burst_of_signals_loses_no_kind_and_never_blocks(children, burst: int) -> None:
    printed = children.run(
        "import os, signal, select\n"
        "from berth.linux.signals import SignalInbox\n"
        "with SignalInbox() as inbox:\n"
        "    for _ in range(int(sys.argv[1])):\n"
        "        for number in (signal.SIGINT, signal.SIGTERM): os.kill(os.getpid(), number)\n"
        "    assert select.select([inbox], [], [], 0)[0] == [inbox]\n"
        "    taken = inbox.take()\n"
        "    assert select.select([inbox], [], [], 0)[0] == []\n"
        "print(*sorted(set(taken)), len(taken), end='')\n",
        burst,
    )
    assert printed == f"2 15 {2 * burst}"
