from berth.binding.shares import Claim, deal
from berth.host.topology import Core
from binding.builder import cpus


def cores(*nodes: list[str]) -> list[Core]:
    """Return cores by their CPU lists, one list for each node."""
    return [
        Core(key=cpus(text).min(), package=None, node=number, cpus=cpus(text))
        for number, node in enumerate(nodes)
        for text in node
    ]


def claim(key: str, pool: str, *, held: str | None = "", cost: int = 1) -> Claim:
    return Claim(key=key, pool=cpus(pool), held=None if held is None else cpus(held), cost=cost)


def dealt(machine: list[Core], *claims: Claim, spread: bool = False, whole_only: bool = False) -> dict[str, str]:
    return {
        str(key): str(share.cpus) for key, share in deal(machine, claims, spread=spread, whole_only=whole_only).items()
    }


FOUR = cores(["0,4", "1,5", "2,6", "3,7"])
TWO_NODES = cores(["0,4", "1,5"], ["2,6", "3,7"])


def test_one_core_each_comes_before_an_even_deal() -> None:
    """Served in order and without looking ahead, `a` would take the only core of `c`."""
    machine = cores(["0", "1", "2"])
    assert dealt(machine, claim("a", "0-1"), claim("b", "1-2"), claim("c", "0")) == {"a": "1", "b": "2", "c": "0"}


def test_small_pools_are_served_before_large_ones_level_out() -> None:
    machine = cores([str(cpu) for cpu in range(12)])
    assert dealt(machine, claim("a", "0-11"), claim("b", "0-5")) == {"a": "6-11", "b": "0-5"}
    assert dealt(machine, claim("a", "0-11"), claim("b", "0-2")) == {"a": "3-11", "b": "0-2"}


def test_cost_sets_the_proportion() -> None:
    machine = cores([str(cpu) for cpu in range(12)])
    shares = dealt(machine, claim("a", "0-11"), claim("b", "0-11", cost=2), claim("c", "0-11", cost=2))
    assert shares == {"a": "0-5", "b": "6-8", "c": "9-11"}


def test_neighbours_stay_on_one_node_unless_spread() -> None:
    both = [claim("a", "0-7"), claim("b", "0-7")]
    assert dealt(TWO_NODES, *both) == {"a": "0-1,4-5", "b": "2-3,6-7"}
    assert dealt(TWO_NODES, *both, spread=True) == {"a": "0,2,4,6", "b": "1,3,5,7"}


def test_even_deal_that_is_held_already_stays() -> None:
    assert dealt(FOUR, claim("a", "0-7", held="2-3,6-7"), claim("b", "0-7", held="0-1,4-5")) == {
        "a": "2-3,6-7",
        "b": "0-1,4-5",
    }
    odd = [claim("a", "0-7", held="0,2,4,6"), claim("b", "0-7", held="1,3,5,7")]
    assert dealt(FOUR, *odd) == {"a": "0,2,4,6", "b": "1,3,5,7"}


def test_what_is_held_does_not_stay_where_it_is_no_even_deal() -> None:
    fresh = {"a": "0-1,4-5", "b": "2-3,6-7"}
    for held_a, held_b in [
        ("0-3", "4-7"),  # every core is shared
        ("0-1,4-5", "0-1,4-5"),  # the same CPUs
        ("0,4,1,6", "5,2,3,7"),  # one core is shared
        ("0,4", "1-3,5-7"),  # uneven
        ("0-1,4", "2-3,6-7"),  # a part of a core
        ("0-1,4-5", "2-3,6-8"),  # beyond the pool
        ("0-1,4-5", ""),  # nothing
    ]:
        assert dealt(FOUR, claim("a", "0-7", held=held_a), claim("b", "0-7", held=held_b)) == fresh, (held_a, held_b)


def test_what_is_held_does_not_stay_where_pools_cut_cores() -> None:
    shared = [claim("a", "0-3", held="0-1"), claim("b", "4-7", held="4-5")]
    assert dealt(FOUR, *shared) == {"a": "0-1", "b": "6-7"}
    part = [claim("a", "0-5", held="2-5"), claim("b", "0-2,4", held="0")]
    assert dealt(cores(["0,1", "2,3", "4,5"]), *part) == {"a": "0-3", "b": "4"}


def test_same_sizes_on_other_nodes_do_not_stay() -> None:
    odd = [claim("a", "0-7", held="0,2,4,6"), claim("b", "0-7", held="1,3,5,7")]
    assert dealt(TWO_NODES, *odd) == {"a": "0-1,4-5", "b": "2-3,6-7"}


def test_claim_that_keeps_others_away_takes_part_and_gets_nothing() -> None:
    assert dealt(FOUR, claim("a", "0-7"), claim("idle", "0-7", held=None)) == {"a": "0-1,4-5"}
    assert dealt(FOUR, claim("idle", "0-7", held=None), claim("a", "0-7", held="0-1,4-5")) == {"a": "2-3,6-7"}


def test_claims_that_keep_others_away_give_way_before_cores_are_split() -> None:
    machine = cores(["0,2", "1,3"])
    shares = deal(
        machine,
        [claim("a", "0-3"), claim("idle", "0-3", held=None), claim("b", "0-3")],
        spread=False,
        whole_only=False,
    )
    assert {key: (str(share.cpus), share.splits_cores) for key, share in shares.items()} == {
        "a": ("0,2", False),
        "b": ("1,3", False),
    }


def test_whole_cores_only_where_asked() -> None:
    machine = cores(["0,2", "1,3"])
    both = [claim("a", "0-2"), claim("b", "0-2")]
    assert dealt(machine, *both) == {"a": "0,2", "b": "1"}
    assert dealt(machine, *both, whole_only=True) == {}
    assert dealt(machine, both[0], whole_only=True) == {"a": "0,2"}


def test_pools_that_meet_in_a_core_do_not_share_it() -> None:
    machine = cores(["0,2", "1,3"])
    assert dealt(machine, claim("a", "0-1"), claim("b", "2-3")) == {"a": "0", "b": "3"}
