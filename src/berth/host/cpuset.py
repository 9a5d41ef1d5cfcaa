"""A set of CPU numbers in the forms the kernel reads and prints.

List form: decimal numbers and ranges, ascending, `0-3,8` (cpuset(7), "List format"). The kernel also accepts, and
never prints, strides `FIRST-LAST:USED/GROUP`: of every GROUP numbers from FIRST on, the first USED ("CPU lists" in the
kernel's admin-guide/kernel-parameters). This is not the `FIRST-LAST:STEP` of taskset(1), which is refused here.
Mask form: hexadecimal words of 32 bits, highest first, separated by commas (cpuset(7), "Mask format").

The kernel's `all` and `N` need the size of the machine, so they are not part of either form here.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Self

from berth.errors import MalformedError

#: Highest CPU number accepted. Kernels are built for at most 8192 CPUs; eight times that leaves room, and a hostile
#: list such as `0-99999999999` is refused before it is expanded into gigabytes of bits.
MAX_CPU = 65535

_LIST_PART = re.compile(r"([0-9]+)(?:-([0-9]+)(?::([0-9]+)/([0-9]+))?)?")
_MASK_WORD = re.compile(r"[0-9a-fA-F]{1,8}")
_WORD_BITS = 32
_SHOWN_CHARACTERS = 80


@dataclass(frozen=True, slots=True)
class CpuSet:
    """An immutable set of CPU numbers, kept as one integer whose bit N stands for CPU N.

    Args:
        mask: The bits; 0 is the empty set.

    Raises:
        MalformedError: `bad-cpu-number` when the mask is negative or holds a CPU above `MAX_CPU`.
    """

    mask: int = 0

    def __post_init__(self) -> None:
        if self.mask < 0:
            raise _bad_number("a negative mask")
        if self.mask.bit_length() > MAX_CPU + 1:
            raise _bad_number(f"CPU {self.mask.bit_length() - 1}")

    @classmethod
    def of(cls, numbers: Iterable[int]) -> Self:
        """Return the set of these CPU numbers.

        Raises:
            MalformedError: `bad-cpu-number` when one is negative or above `MAX_CPU`.
        """
        mask = 0
        for number in numbers:
            if not 0 <= number <= MAX_CPU:
                raise _bad_number(f"CPU {number}")
            mask |= 1 << number
        return cls(mask)

    @classmethod
    def parse_list(cls, text: str, *, source: str = "") -> Self:
        """Return the set a kernel CPU list names; the empty text is the empty set, one trailing newline is ignored.

        Args:
            text: The list form of cpuset(7), with the kernel's strides.
            source: Where the text stood, for the message of the error.

        Raises:
            MalformedError: `bad-cpu-list` when the text is no such list or names a CPU above `MAX_CPU`.
        """
        body = text.removesuffix("\n")
        mask = 0
        for part in body.split(",") if body else ():
            try:
                mask |= _part_mask(part)
            except ValueError as error:
                raise _bad_list(text, source, str(error)) from None
        return cls(mask)

    @classmethod
    def parse_mask(cls, text: str, *, source: str = "") -> Self:
        """Return the set a kernel CPU mask names, of any width; one trailing newline is ignored.

        Args:
            text: The mask form of cpuset(7).
            source: Where the text stood, for the message of the error.

        Raises:
            MalformedError: `bad-cpu-mask` when the text is no such mask or names a CPU above `MAX_CPU`.
        """
        words = text.removesuffix("\n").split(",")
        for word in words:
            if not _MASK_WORD.fullmatch(word):
                raise _bad_mask(text, source, f"{_shown(word)} is not a word of one to eight hexadecimal digits")
        mask = int("".join(word.zfill(_WORD_BITS // 4) for word in words), 16)
        if mask.bit_length() > MAX_CPU + 1:
            raise _bad_mask(text, source, f"CPU {mask.bit_length() - 1} is above the limit {MAX_CPU}")
        return cls(mask)

    def to_list(self) -> str:
        """Return the list form as the kernel prints it: ascending, neighbours joined, `0-3,8`; empty for no CPU."""
        return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in self._runs())

    def to_mask(self, possible: int | None = None) -> str:
        """Return the mask form.

        Args:
            possible: Number of possible CPUs of the machine, which sets the width the kernel prints. Without it the
                mask is as many whole words as the set needs, at least one.

        Raises:
            ValueError: The set holds a CPU at or above `possible`.
        """
        needed = self.mask.bit_length()
        if possible is None:
            digits = max(1, -(-needed // _WORD_BITS)) * (_WORD_BITS // 4)
        elif needed > possible:
            raise ValueError(f"CPU {self.max()} does not fit a mask of {possible} CPUs")
        else:
            digits = max(1, -(-possible // 4))
        text = f"{self.mask:0{digits}x}"
        head = len(text) % 8 or 8
        return ",".join([text[:head], *(text[at : at + 8] for at in range(head, len(text), 8))])

    def min(self) -> int:
        """Return the lowest CPU number; `ValueError` when the set is empty."""
        if not self.mask:
            raise ValueError("an empty CPU set has no lowest CPU")
        return (self.mask & -self.mask).bit_length() - 1

    def max(self) -> int:
        """Return the highest CPU number; `ValueError` when the set is empty."""
        if not self.mask:
            raise ValueError("an empty CPU set has no highest CPU")
        return self.mask.bit_length() - 1

    def isdisjoint(self, other: "CpuSet") -> bool:
        """Return whether the two sets share no CPU."""
        return not self.mask & other.mask

    def __contains__(self, number: object) -> bool:
        return isinstance(number, int) and number >= 0 and bool(self.mask >> number & 1)

    def __iter__(self) -> Iterator[int]:
        return chain.from_iterable(self._runs())

    def __len__(self) -> int:
        return self.mask.bit_count()

    def __bool__(self) -> bool:
        return self.mask != 0

    def __and__(self, other: "CpuSet") -> "CpuSet":
        return CpuSet(self.mask & other.mask)

    def __or__(self, other: "CpuSet") -> "CpuSet":
        return CpuSet(self.mask | other.mask)

    def __sub__(self, other: "CpuSet") -> "CpuSet":
        return CpuSet(self.mask & ~other.mask)

    def __le__(self, other: "CpuSet") -> bool:
        return not self.mask & ~other.mask

    def __str__(self) -> str:
        return self.to_list()

    def __repr__(self) -> str:
        return f"CpuSet.parse_list({self.to_list()!r})"

    def _runs(self) -> Iterator[range]:
        """Yield the members as runs of neighbours, ascending."""
        lowest_bit_first = f"{self.mask:b}"[::-1]
        return (range(*run.span()) for run in re.finditer("1+", lowest_bit_first))


def _part_mask(part: str) -> int:
    """Return the bits of one item of a list; `ValueError` says why there are none."""
    match = _LIST_PART.fullmatch(part)
    if match is None:
        raise ValueError(f"{_shown(part)} is not a number, a range or a stride")
    first, last, used, group = (_number(digits) for digits in match.groups(default=match[1]))
    if last < first:
        raise ValueError(f"the range {part} runs backwards")
    length = last - first + 1
    if match[3] is None:
        return ((1 << length) - 1) << first
    if group == 0 or used > group:
        raise ValueError(f"the stride {part} uses {used} of every {group}")
    pattern = ("0" * (group - used) + "1" * used) * -(-length // group)
    return (int(pattern, 2) & ((1 << length) - 1)) << first


def _number(digits: str) -> int:
    """Return the value, checked by its length first because int() itself refuses thousands of digits."""
    significant = digits.lstrip("0") or "0"
    if len(significant) > len(str(MAX_CPU)) or int(significant) > MAX_CPU:
        raise ValueError(f"{_shown(digits)} is above the limit {MAX_CPU}")
    return int(significant)


def _shown(text: str) -> str:
    cut = text if len(text) <= _SHOWN_CHARACTERS else text[:_SHOWN_CHARACTERS] + "..."
    return ascii(cut)


def _bad_list(text: str, source: str, why: str) -> MalformedError:
    place = f" in {source}" if source else ""
    fix = "Write CPU numbers and ranges like 0-3,8 or a stride like 0-31:1/2 (the first of every two)."
    return MalformedError("bad-cpu-list", f"The CPU list {_shown(text)}{place} cannot be read: {why}.", fix)


def _bad_mask(text: str, source: str, why: str) -> MalformedError:
    place = f" in {source}" if source else ""
    fix = "Write hexadecimal words of 32 bits, highest first, like 00000000,ffffffff."
    return MalformedError("bad-cpu-mask", f"The CPU mask {_shown(text)}{place} cannot be read: {why}.", fix)


def _bad_number(what: str) -> MalformedError:
    return MalformedError("bad-cpu-number", f"{what} is not a CPU number.", f"Use CPU numbers from 0 to {MAX_CPU}.")
