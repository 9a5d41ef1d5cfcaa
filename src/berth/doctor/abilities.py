"""What doctor found: one ability of this host each, and the document that holds all of them."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Final, Literal

Level = Literal["works", "works with less", "does not"]

WORKS: Final[Level] = "works"
LESS: Final[Level] = "works with less"
DOES_NOT: Final[Level] = "does not"

#: Version of the JSON document.
SCHEMA_VERSION: Final = "0.2.0"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ability:
    """One thing that berth can use where the host has it.

    Attributes:
        name: What it is; programs may match it.
        level: How much of it there is.
        why: One sentence: what was tried and what the system answered.
        mend: The exact command or text that mends it; empty where nothing is to be mended.
    """

    name: str
    level: Level
    why: str
    mend: str = ""


def document(abilities: Sequence[Ability], *, berth: str, kernel: str) -> dict[str, object]:
    """Return the JSON document of one look at this host.

    Args:
        abilities: What was found.
        berth: Version of berth.
        kernel: Release of the running kernel.
    """
    return {
        "schema_version": SCHEMA_VERSION,
        "berth": berth,
        "kernel": kernel,
        "abilities": [asdict(ability) for ability in abilities],
    }


def summary(abilities: Sequence[Ability]) -> str:
    """Return how many abilities there are of each level, in one phrase."""
    levels = [ability.level for ability in abilities]
    counts = {level: levels.count(level) for level in (WORKS, LESS, DOES_NOT)}
    plural: dict[Level, str] = {WORKS: "work", LESS: "work with less", DOES_NOT: "do not"}
    return ", ".join(f"{n} {level if n == 1 else plural[level]}" for level, n in counts.items() if n)


def combine(found: Mapping[str, Ability]) -> Ability:
    """Return one ability for what was tried as several users: where they differ it works with less.

    Args:
        found: What was found, by the words that name each user; at least one.
    """
    abilities = list(found.values())
    first = abilities[0]
    whys = {ability.why for ability in abilities}
    why = f"{first.why}, as {' and as '.join(found)}"
    if len(whys) > 1:
        why = "; ".join(f"as {who}: {ability.why}" for who, ability in found.items())
    mend = next((ability.mend for ability in abilities if ability.mend), "")
    level = first.level if len({ability.level for ability in abilities}) == 1 else LESS
    return Ability(name=first.name, level=level, why=why, mend=mend)


def excuse_user_namespaces(user_namespaces: Ability, bubblewrap: Ability) -> Ability:
    """Return what the refusal of user namespaces amounts to where bubblewrap is exempt, as by an AppArmor profile.

    berth makes them through bubblewrap only, so then nothing is missing but the way for everybody else.
    """
    if user_namespaces.level == WORKS or bubblewrap.level == DOES_NOT:
        return user_namespaces
    why = f"{user_namespaces.why}; bubblewrap may make them all the same, and berth makes them through it only"
    return replace(user_namespaces, level=LESS, why=why, mend="")
