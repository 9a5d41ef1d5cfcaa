"""About two hundred processes of mixed kinds, forked from one interpreter, so that starting them costs little.

Each tells about itself, one line of JSON, what the kernel answers to system calls: /proc has to agree with it. They end
with this process.
"""

import ctypes
import json
import os
import signal
import sys
import threading

#: Kinds and how many of each.
kinds = {
    "plain": 60, "pinned": 25, "threads": 25, "zombie": 25, "renamed": 20, "namespace": 10, "batch": 10, "idle": 5,
    "fifo": 5, "capable": 10, "user": 10,
}  # fmt: skip
#: A name that looks like the fields that follow it in the stat file.
trap = b"a) R 1 (b"
#: CAP_KILL and CAP_SYS_NICE of linux/capability.h.
capabilities = 1 << 5 | 1 << 23
user = 65534

libc = ctypes.CDLL(None, use_errno=True)
parent = os.getpid()
cpus = sorted(os.sched_getaffinity(0))


def rename(name):
    libc.prctl(15, name, 0, 0, 0)  # PR_SET_NAME


def name():
    buffer = ctypes.create_string_buffer(16)
    libc.prctl(16, buffer, 0, 0, 0)  # PR_GET_NAME
    return buffer.value.decode()


def say(kind, **more):
    os.write(
        1,
        json.dumps(
            {
                "kind": kind,
                "pid": os.getpid(),
                "ppid": os.getppid(),
                "uid": os.getuid(),
                "name": name(),
                "cpus": sorted(os.sched_getaffinity(0)),
                "policy": os.sched_getscheduler(0),
                **more,
            }
        ).encode()
        + b"\n",
    )


def end_with_parent():
    libc.prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG; a change of user undoes it


def wait():
    end_with_parent()
    while True:
        signal.pause()


def thread(number, said, all_said):
    rename(f"worker {number})".encode())
    os.sched_setaffinity(0, {cpus[number % len(cpus)]})
    said.append({"tid": threading.get_native_id(), "name": name(), "cpus": sorted(os.sched_getaffinity(0))})
    all_said.wait()
    signal.pause()


def act(kind, number):
    more = {}
    if kind == "pinned":
        os.sched_setaffinity(0, {cpus[number % len(cpus)]})
    elif kind == "threads":
        said, all_said = [], threading.Barrier(4)
        for which in range(3):
            threading.Thread(target=thread, args=(which, said, all_said), daemon=True).start()
        all_said.wait()
        more["threads"] = said
    elif kind == "renamed":
        rename(trap)
    elif kind in ("batch", "idle", "fifo"):
        policy = {"batch": os.SCHED_BATCH, "idle": os.SCHED_IDLE, "fifo": os.SCHED_FIFO}[kind]
        try:
            os.sched_setscheduler(0, policy, os.sched_param(1 if kind == "fifo" else 0))
        except PermissionError:
            more["refused"] = True
    elif kind == "capable":
        header = (ctypes.c_uint32 * 2)(0x20080522, 0)  # _LINUX_CAPABILITY_VERSION_3
        data = (ctypes.c_uint32 * 6)(capabilities, capabilities, 0, 0, 0, 0)
        more["refused"] = libc.capset(header, data) != 0
    elif kind == "user":
        try:
            os.setresuid(user, user, user)
        except PermissionError:
            more["refused"] = True
    elif kind == "namespace":
        more["refused"] = libc.unshare(0x20000000) != 0  # CLONE_NEWPID
        inside, outside = os.pipe(), os.fork()
        if outside == 0:
            end_with_parent()
            os.write(inside[1], b"%d" % os.getpid())
            wait()
        more["inner"], more["inner_number"] = outside, int(os.read(inside[0], 20))
    say(kind, **more)
    wait()


print(sum(kinds.values()), flush=True)
for kind, count in kinds.items():
    for number in range(count):
        child = os.fork()
        if child == 0:
            try:
                end_with_parent()
                if kind != "zombie" and os.getppid() == parent:
                    act(kind, number)
            finally:
                os._exit(0)
        if kind == "zombie":
            os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
            os.write(1, json.dumps({"kind": kind, "pid": child, "ppid": parent}).encode() + b"\n")
sys.stdin.read()
