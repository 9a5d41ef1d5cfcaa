"""Take secrets out of what a snapshot says about a process: its arguments and its environment.

A snapshot is sent to colleagues and attached to reports. Of the environment only what decides about CPUs and
accelerators is kept at all; of the arguments, everything but the values that look like secrets.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Final

REDACTED: Final = "REDACTED"
#: Variables that are kept: who is which rank, who sizes or pins thread pools, which devices are visible.
KEPT_VARIABLES: Final = re.compile(
    r"RANK|LOCAL_RANK|WORLD_SIZE|LOCAL_WORLD_SIZE|GROUP_RANK|MASTER_ADDR|MASTER_PORT"
    r"|OMP_[A-Z_]+|GOMP_[A-Z_]+|KMP_[A-Z_]+|(MKL|OPENBLAS|GOTO|NUMEXPR|VECLIB_MAXIMUM)_NUM_THREADS"
    r"|MKL_DYNAMIC|TORCH_NUM_[A-Z_]+"
    r"|(ASCEND|ASCEND_RT|CUDA|HIP|ROCR|NVIDIA|NPU)_VISIBLE_DEVICES"
    r"|CPU_AFFINITY_CONF|TASK_QUEUE_ENABLE|SLURM_(PROCID|LOCALID|CPU_BIND|JOB_ID)|OMPI_COMM_WORLD_(LOCAL_)?RANK"
    r"|PMI_RANK|VLLM_[A-Z_]*(CPU|NUMA|BIND)[A-Z_]*"
)
_SECRET_WORD: Final = (
    r"(?:pass(?:word|wd|phrase)?|secret|token|api[-_]?key|access[-_]?key|private[-_]?key|credentials?|auth)"
)
# Each is searched for by its rare part, so that long text takes time in proportion to its length.
_SECRET_NAME: Final = re.compile(rf"{_SECRET_WORD}(?:[-_.][\w.-]*)?\Z", re.IGNORECASE)
_NAME: Final = re.compile(r"[\w.-]+")
_ASSIGNMENT: Final = re.compile(r"[=:]")
_URL_PASSWORD: Final = re.compile(r"(://)[^/@\s]+@")
_KNOWN_TOKEN: Final = re.compile(r"\b(hf_|sk-|ghp_|github_pat_|glpat-|AKIA|xox[abp]-|eyJ)[\w.-]{8,}")


def redact_arguments(arguments: Iterable[str]) -> list[str]:
    """Return `arguments` with the values of secrets replaced: `--token X`, `--token=X`, `key:X`, passwords in URLs."""
    found: list[str] = []
    hide_next = False
    for argument in arguments:
        if hide_next and not argument.startswith("-"):
            found.append(REDACTED)
            hide_next = False
            continue
        hide_next = argument.startswith("-") and _is_secret(argument)
        found.append(redact_text(argument))
    return found


def redact_text(text: str) -> str:
    """Return `text` without the values of secrets in it."""
    assignment = _ASSIGNMENT.search(text)
    if assignment and assignment.end() < len(text) and _is_secret(text[: assignment.start()]):
        return text[: assignment.end()] + REDACTED
    return _KNOWN_TOKEN.sub(REDACTED, _URL_PASSWORD.sub(rf"\1{REDACTED}@", text))


def _is_secret(name: str) -> bool:
    """Say whether `name` is one that secrets have: `--hf-token`, `API_KEY`; not `--tokenizer`, `--max-tokens`."""
    return _NAME.fullmatch(name) is not None and _SECRET_NAME.search(name) is not None


def keep_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that a snapshot keeps, by name, without secrets in their values."""
    return {name: redact_text(value) for name, value in sorted(environment.items()) if KEPT_VARIABLES.fullmatch(name)}
