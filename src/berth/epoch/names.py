"""The names of epochs: which directory entries berth reserves, and what each says.

Every name is the interface of the epoch design (seed, sections 5 and 6) and is matched whole: what only resembles a
reserved name is not one.
"""

import re
from typing import Final

#: An active epoch: work-state that a run holds or has left behind.
ACTIVE_PREFIX: Final = ".standalone-work-"
#: A retired epoch: finished, never resumed, waiting to be reclaimed.
RETIRED_PREFIX: Final = ".retired-standalone-work-"
#: A capability probe's private directory.
PROBE_PREFIX: Final = ".berth-probe-"

_EPOCH = re.compile(r"[0-9a-f]{64}")
_ACTIVE = re.compile(r"\.standalone-work-([0-9a-f]{64})")
_RETIRED = re.compile(r"\.retired-standalone-work-([0-9a-f]{64})-([0-9a-f]{32})")
_PROBE = re.compile(r"\.berth-probe-[0-9]{1,10}-[0-9]{1,20}-[0-9a-f]{32}")

_RETIREMENT_TIME_BITS: Final = 48
_RETIREMENT_RANDOM_BITS: Final = 80


def is_epoch_id(text: str) -> bool:
    """Say whether `text` is an epoch id: exactly 64 lower-case hexadecimal digits."""
    return _EPOCH.fullmatch(text) is not None


def active_name(epoch: str) -> str:
    """Return the directory name of the active epoch `epoch`.

    Raises:
        ValueError: `epoch` is not an epoch id.
    """
    if not is_epoch_id(epoch):
        raise ValueError(f"not an epoch id: {epoch!r}")
    return ACTIVE_PREFIX + epoch


def retirement_id(milliseconds: int, random_bits: int) -> str:
    """Return the 32 hexadecimal digits of a retirement: 48 bits of time first, so that names sort by age.

    Args:
        milliseconds: Time since 1970-01-01 UTC.
        random_bits: A random number below 2**80.

    Raises:
        ValueError: A number does not fit.
    """
    if not 0 <= milliseconds < 1 << _RETIREMENT_TIME_BITS or not 0 <= random_bits < 1 << _RETIREMENT_RANDOM_BITS:
        raise ValueError("a retirement id is 48 bits of milliseconds and 80 random bits")
    return f"{milliseconds:012x}{random_bits:020x}"


def retired_name(epoch: str, retirement: str) -> str:
    """Return the directory name of `epoch` once it is retired as `retirement`.

    Raises:
        ValueError: One of the ids is not of its form.
    """
    name = f"{RETIRED_PREFIX}{epoch}-{retirement}"
    if parse_retired(name) is None:
        raise ValueError(f"not an epoch id and a retirement id: {epoch!r}, {retirement!r}")
    return name


def parse_active(name: str) -> str | None:
    """Return the epoch id in the name of an active epoch, or None for any other name."""
    match = _ACTIVE.fullmatch(name)
    return match[1] if match else None


def parse_retired(name: str) -> tuple[str, str] | None:
    """Return (epoch id, retirement id) of the name of a retired epoch, or None for any other name."""
    match = _RETIRED.fullmatch(name)
    return (match[1], match[2]) if match else None


def is_probe(name: str) -> bool:
    """Say whether `name` is the directory of a capability probe."""
    return _PROBE.fullmatch(name) is not None


def is_reserved(name: str) -> bool:
    """Say whether `name` lies in what is reserved for epochs, whether it is well formed or not."""
    return name.startswith((ACTIVE_PREFIX, RETIRED_PREFIX))


def retired_at_ms(retirement: str) -> int:
    """Return when a retirement took place, in milliseconds since 1970-01-01 UTC."""
    return int(retirement[: _RETIREMENT_TIME_BITS // 4], 16)
