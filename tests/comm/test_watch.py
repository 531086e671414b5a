"""A rank that may still be running is never reported as lost."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
from typing import Any

import pytest
from torch._C._distributed_c10d import HashStore

from shardwright.comm import peers, rendezvous
from shardwright.comm.beacon import Beacon, Reply, State, ask
from shardwright.comm.group import Group
from shardwright.comm.peers import Peers


def test_a_beacon_bound_to_one_interface_answers_its_own_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "_interface_address", lambda: "127.0.0.2")  # as GLOO_SOCKET_IFNAME may set it
    store = HashStore()
    beacon = Beacon(store, "place", lambda asker: {"asker": asker})
    try:
        assert ask({3: json.loads(store.get("place"))}, 5, 3.0) == {3: Reply(State.ANSWERED, {"asker": 5})}
    finally:
        beacon.close()
    assert ask({3: json.loads(store.get("place"))}, 5, 3.0)[3].state is State.ENDED


def test_a_refusal_at_one_address_does_not_count_if_another_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardwright.comm.beacon.ipaddress.ip_address", lambda _: _NotLoopback())
    monkeypatch.setattr(rendezvous, "_interface_address", lambda: "127.0.0.2")
    store = HashStore()
    beacon = Beacon(store, "place", lambda asker: {})
    try:
        place = json.loads(store.get("place")) | {"machine": "another", "addresses": ["127.0.0.3", "127.0.0.2"]}
        assert ask({0: place}, 1, 3.0)[0].state is State.ANSWERED
    finally:
        beacon.close()


class _NotLoopback:
    is_loopback = False


def test_an_incomplete_answer_counts_as_silence() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(64)
                connection.sendall(b'{"line": ')

        thread = threading.Thread(target=answer)
        thread.start()
        place = {"machine": rendezvous.machine(), "port": server.getsockname()[1], "token": "00" * 16}
        assert ask({0: place}, 1, 3.0)[0].state is State.SILENT
        thread.join()


OTHER_HOST = {"machine": "another", "port": 1, "token": "00" * 16, "addresses": []}


def peers_of(monkeypatch: pytest.MonkeyPatch, replies: dict[int, Reply], **places: dict[str, Any]) -> Peers:
    """Return the Peers of rank 0, with these addresses in the store and these replies to queries."""
    store = HashStore()
    for name, place in places.items():
        store.set(f"shardwright/beacon/{name.removeprefix('rank')}", json.dumps(place))
    monkeypatch.setattr(peers, "ask", lambda asked, asker, timeout: {rank: replies[rank] for rank in asked})
    return Peers(store, 0)


def test_an_old_failure_to_reach_a_rank_expires(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDWRIGHT_TIMEOUT", "300")
    now = 1000.0
    monkeypatch.setattr(peers.time, "monotonic", lambda: now)
    unreachable, here = Reply(State.UNREACHABLE, {}), Reply(State.ANSWERED, {})
    replies = {1: here, 2: here}
    view = peers_of(monkeypatch, replies, rank1=OTHER_HOST, rank2=OTHER_HOST)
    assert view.lost_for_long(view.ask([1, 2])) == ()
    replies[1] = unreachable
    assert view.lost_for_long(view.ask([1])) == ()
    now += 1000  # rank 1 has not been queried since
    assert view.lost_for_long(view.ask([2])) == ()
    assert view.lost_for_long(view.ask([1])) == ()
    for _ in range(29):
        now += 10
        assert view.lost_for_long(view.ask([1])) == ()
    now += 10
    assert view.lost_for_long(view.ask([1])) == (1,)


@pytest.mark.parametrize("state", [State.UNREACHABLE, State.ENDED])
def test_a_host_that_was_never_reached_is_not_reported_lost(monkeypatch: pytest.MonkeyPatch, state: State) -> None:
    """A firewall drops or refuses connections to the beacon; the ranks communicate over another network."""
    now = 1000.0
    monkeypatch.setattr(peers.time, "monotonic", lambda: now)
    replies = dict.fromkeys((1, 2), Reply(state, {}))
    view = peers_of(monkeypatch, replies, rank1=OTHER_HOST, rank2=OTHER_HOST)
    for _ in range(1000):
        now += 1
        found = view.ask([1])
        assert view.lost_for_long(found) == ()
        assert view.ended(found, finished=(1,)) == ()
    replies[2] = Reply(State.SILENT, {})  # a connection was made to another rank of that host
    view.ask([2])
    for _ in range(400):
        now += 1
        found = view.ask([1])
        lost = view.lost_for_long(found)
    assert lost == ((1,) if state is State.UNREACHABLE else ())
    assert view.ended(found, finished=()) == ((1,) if state is State.ENDED else ())


def test_hosts_are_probed_early_to_learn_which_are_reachable(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(peers.time, "monotonic", lambda: now)
    replies = {1: Reply(State.ANSWERED, {})}
    view = peers_of(monkeypatch, replies, rank1=OTHER_HOST)
    view.probe_neighbours([Group((0, 1, 2), 0, None)])  # rank 2 has not published its address
    replies[1] = Reply(State.ENDED, {})
    assert view.ended(view.ask([1]), finished=()) == (1,)


def test_a_rank_that_returns_is_queried_at_its_new_address() -> None:
    store = HashStore()
    view = Peers(store, 0)
    store.set("shardwright/beacon/1", json.dumps({"ended": False, "token": ""}))
    assert view.ask([1])[1].state is State.UNKNOWN
    beacon = Beacon(store, "shardwright/beacon/1", lambda asker: {})
    try:
        assert view.ask([1])[1].state is State.ANSWERED
    finally:
        beacon.close()


def test_a_rank_that_exited_regularly_is_lost_only_to_ranks_that_wait_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    killed = {"machine": rendezvous.machine(), "port": 1, "token": ""}
    replies = {2: Reply(State.ENDED, {})}
    view = peers_of(monkeypatch, replies, rank1={"ended": True}, rank2=killed)
    found = view.ask([1, 2])
    assert view.ended(found, finished=()) == (2,)
    assert view.ended(found, finished=(1,)) == (1, 2)


def test_a_world_with_a_store_that_cannot_be_cloned_works() -> None:
    """In a new process: this one may be in a world already."""
    program = """
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from shardwright import comm
dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
print(comm.world().size)
"""
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert (ran.returncode, ran.stdout.strip()) == (0, "4"), ran.stderr
