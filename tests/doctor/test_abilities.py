"""What doctor says about what it found, as values."""

import pytest

from berth.doctor.abilities import DOES_NOT, LESS, WORKS, Ability, Level, combine, excuse_user_namespaces, summary


def made(level: Level, why: str = "it was tried", mend: str = "") -> Ability:
    return Ability(name="thing", level=level, why=why, mend=mend)


def test_the_same_for_every_user_is_said_once() -> None:
    found = combine({"root": made(WORKS), "uid 7": made(WORKS)})
    assert found == made(WORKS, "it was tried, as root and as uid 7")


def test_what_works_for_some_users_only_works_with_less() -> None:
    found = combine({"root": made(WORKS), "uid 7": made(DOES_NOT, "it was refused", "do this")})
    assert found == made(LESS, "as root: it was tried; as uid 7: it was refused", "do this")


def test_refused_for_everybody_in_two_ways_does_not_work() -> None:
    found = combine({"root": made(DOES_NOT, "no", "first"), "uid 7": made(DOES_NOT, "never", "second")})
    assert (found.level, found.mend) == (DOES_NOT, "first")


def test_refused_user_namespaces_are_excused_where_bubblewrap_may_make_them() -> None:
    refused = made(DOES_NOT, "refused", "allow bubblewrap")
    assert excuse_user_namespaces(refused, made(DOES_NOT)) == refused
    assert excuse_user_namespaces(made(WORKS), made(WORKS)) == made(WORKS)
    excused = excuse_user_namespaces(refused, made(WORKS))
    assert (excused.level, excused.mend) == (LESS, "")


@pytest.mark.parametrize(
    ("levels", "text"),
    [
        ([WORKS], "1 works"),
        ([WORKS, WORKS, LESS], "2 work, 1 works with less"),
        ([DOES_NOT, LESS, LESS], "2 work with less, 1 does not"),
        ([DOES_NOT, DOES_NOT], "2 do not"),
    ],
)
def test_the_summary_counts(levels: list[Level], text: str) -> None:
    assert summary([made(level) for level in levels]) == text
