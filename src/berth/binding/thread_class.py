"""What the name of a thread says it does.

Names are those that CANN, HCCL, NCCL, PyTorch and the BLAS libraries give their threads; the kernel cuts them at
fifteen bytes (TASK_COMM_LEN, linux/sched.h). A name is a hint: every program may call its threads anything.
"""

import re
from dataclasses import dataclass
from typing import Final

from berth.binding.snapshot import ThreadClass


@dataclass(frozen=True, slots=True)
class Role:
    """A class and how sure it is, from 0 to 100 (the scores of the binding design)."""

    name: ThreadClass
    score: int
    hint: str = ""


_RULES: Final = (
    (re.compile(r"dev\d+_sq(_.*)?", re.I), Role("sq", 95, "submits work to the NPU")),
    (re.compile(r"(hccl|nccl|hcom).*", re.I), Role("communication", 85, "collective communication")),
    (re.compile(r"release_thread.*", re.I), Role("release", 80, "frees NPU resources")),
    (re.compile(r"(acl_thread|pt_autograd_\d+).*", re.I), Role("acl", 80, "drives the NPU")),
    (re.compile(r"(pt_data_worker|dataloader).*", re.I), Role("dataloader", 70, "prepares batches")),
    (re.compile(r".*tokenizer.*", re.I), Role("tokenizer", 60, "turns text into tokens")),
    (re.compile(r".*(engine|vllm).*", re.I), Role("engine", 50, "serving engine")),
    (re.compile(r"(omp|gomp|kmp|libgomp|iomp).*", re.I), Role("openmp", 50, "OpenMP pool")),
    (re.compile(r"(openblas|blas|mkl).*", re.I), Role("blas", 50, "BLAS pool")),
)
_MAIN: Final = Role("main", 100, "main thread")
_OTHER: Final = Role("other", 0)


def role_of(name: str, *, is_main: bool) -> Role:
    """Return what a thread called `name` does; `is_main` where its tid is the pid."""
    if is_main:
        return _MAIN
    return next((role for pattern, role in _RULES if pattern.fullmatch(name)), _OTHER)
