"""Replicas of a node find each other by the membership actor, which gives them numbers."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from outrider.cluster.serving.membership import FORGET_S, NodeAddress, NodeMembership

A, B, C = (("127.0.0.1", port) for port in (1001, 1002, 1003))


def test_numbers_are_the_lowest_free_ones_and_stay() -> None:
    membership = NodeMembership()
    assert membership.join("n1", A, None, 0.0) == NodeAddress(0, {})
    assert membership.join("n1", B, None, 0.0) == NodeAddress(1, {0: A})
    assert membership.join("n1", C, None, 0.0) == NodeAddress(2, {0: A, 1: B})
    assert membership.join("n1", A, 0, 1.0) == NodeAddress(0, {1: B, 2: C})
    assert membership.join("n2", A, None, 1.0) == NodeAddress(0, {}), "another node"


def test_the_silent_are_forgotten_and_their_number_is_free() -> None:
    membership = NodeMembership()
    for address in (A, B):
        membership.join("n1", address, None, 0.0)
    assert membership.join("n1", B, 1, FORGET_S) == NodeAddress(1, {0: A})
    assert membership.join("n1", B, 1, FORGET_S + 0.1) == NodeAddress(1, {})
    assert membership.join("n1", C, None, FORGET_S + 0.2) == NodeAddress(0, {1: B})
    assert membership.join("n1", A, 0, FORGET_S + 0.3) == NodeAddress(2, {0: C, 1: B}), "its number has another owner"


def test_a_lobby_started_anew_leaves_the_numbers_as_they_were() -> None:
    membership = NodeMembership()
    assert membership.join("n1", C, 2, 0.0) == NodeAddress(2, {})
    assert membership.join("n1", B, None, 0.0) == NodeAddress(0, {2: C})
    assert membership.join("n1", A, 0, 0.0) == NodeAddress(1, {0: B, 2: C})


@given(st.lists(st.tuples(st.integers(0, 6), st.one_of(st.none(), st.integers(0, 8)), st.floats(0, 4)), max_size=40))
def test_no_number_has_two_owners(joins: list[tuple[int, int | None, float]]) -> None:
    membership, now_s = NodeMembership(), 0.0
    for port, rank, wait_s in joins:
        now_s += wait_s
        place = membership.join("n1", ("127.0.0.1", port), rank, now_s)
        assert place.rank not in place.peers and ("127.0.0.1", port) not in place.peers.values()
        assert len(set(place.peers.values())) == len(place.peers)
