"""What a rank concludes of others from their answers: nobody is taken for dead who may be there."""

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


def test_a_rank_that_listens_on_one_interface_only_answers_its_own_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "_interface_address", lambda: "127.0.0.2")  # as GLOO_SOCKET_IFNAME may say
    store = HashStore()
    beacon = Beacon(store, "place", lambda asker: {"asker": asker})
    try:
        assert ask({3: json.loads(store.get("place"))}, 5, 3.0) == {3: Reply(State.HERE, {"asker": 5})}
    finally:
        beacon.close()
    assert ask({3: json.loads(store.get("place"))}, 5, 3.0)[3].state is State.ENDED


def test_an_address_of_another_host_that_refuses_does_not_make_a_rank_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardwright.comm.beacon.ipaddress.ip_address", lambda _: _NotLoopback())
    monkeypatch.setattr(rendezvous, "_interface_address", lambda: "127.0.0.2")
    store = HashStore()
    beacon = Beacon(store, "place", lambda asker: {})
    try:
        place = json.loads(store.get("place")) | {"machine": "another", "addresses": ["127.0.0.3", "127.0.0.2"]}
        assert ask({0: place}, 1, 3.0)[0].state is State.HERE
    finally:
        beacon.close()


class _NotLoopback:
    is_loopback = False


def test_half_an_answer_is_none() -> None:
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


ELSEWHERE = {"machine": "another", "port": 1, "token": "00" * 16, "addresses": []}


def peers_of(monkeypatch: pytest.MonkeyPatch, replies: dict[int, Reply], **places: dict[str, Any]) -> Peers:
    """Return the view of rank 0 on ranks with these places in the store, which answer as `replies` says when asked."""
    store = HashStore()
    for name, place in places.items():
        store.set(f"shardwright/beacon/{name.removeprefix('rank')}", json.dumps(place))
    monkeypatch.setattr(peers, "ask", lambda asked, asker, timeout: {rank: replies[rank] for rank in asked})
    return Peers(store, 0)


def test_a_rank_that_was_out_of_reach_long_ago_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDWRIGHT_TIMEOUT", "300")
    now = 1000.0
    monkeypatch.setattr(peers.time, "monotonic", lambda: now)
    unreachable, here = Reply(State.UNREACHABLE, {}), Reply(State.HERE, {})
    replies = {1: here, 2: here}
    seeing = peers_of(monkeypatch, replies, rank1=ELSEWHERE, rank2=ELSEWHERE)
    assert seeing.lost_for_long(seeing.ask([1, 2])) == ()
    replies[1] = unreachable
    assert seeing.lost_for_long(seeing.ask([1])) == ()
    now += 1000  # nobody has asked rank 1 since
    assert seeing.lost_for_long(seeing.ask([2])) == ()
    assert seeing.lost_for_long(seeing.ask([1])) == ()
    for _ in range(29):
        now += 10
        assert seeing.lost_for_long(seeing.ask([1])) == ()
    now += 10
    assert seeing.lost_for_long(seeing.ask([1])) == (1,)


@pytest.mark.parametrize("state", [State.UNREACHABLE, State.ENDED])
def test_a_host_that_could_never_be_asked_is_not_taken_for_lost(monkeypatch: pytest.MonkeyPatch, state: State) -> None:
    """A firewall drops or refuses connections to the beacon; the ranks communicate over another network."""
    now = 1000.0
    monkeypatch.setattr(peers.time, "monotonic", lambda: now)
    replies = dict.fromkeys((1, 2), Reply(state, {}))
    seeing = peers_of(monkeypatch, replies, rank1=ELSEWHERE, rank2=ELSEWHERE)
    for _ in range(1000):
        now += 1
        found = seeing.ask([1])
        assert seeing.lost_for_long(found) == ()
        assert seeing.ended(found, finished=(1,)) == ()
    replies[2] = Reply(State.SILENT, {})  # a connection was made to another rank of that host
    seeing.ask([2])
    for _ in range(400):
        now += 1
        found = seeing.ask([1])
        lost = seeing.lost_for_long(found)
    assert lost == ((1,) if state is State.UNREACHABLE else ())
    assert seeing.ended(found, finished=()) == ((1,) if state is State.ENDED else ())


def test_hosts_are_asked_early_so_that_it_is_known_whether_they_can_be(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(peers.time, "monotonic", lambda: now)
    replies = {1: Reply(State.HERE, {})}
    seeing = peers_of(monkeypatch, replies, rank1=ELSEWHERE)
    seeing.meet([Group((0, 1, 2), 0, None)])  # rank 2 has not told where to ask
    replies[1] = Reply(State.ENDED, {})
    assert seeing.ended(seeing.ask([1]), finished=()) == (1,)


def test_a_rank_that_has_left_and_come_back_is_asked_again() -> None:
    store = HashStore()
    seeing = Peers(store, 0)
    store.set("shardwright/beacon/1", json.dumps({"ended": False, "token": ""}))
    assert seeing.ask([1])[1].state is State.UNKNOWN
    beacon = Beacon(store, "shardwright/beacon/1", lambda asker: {})
    try:
        assert seeing.ask([1])[1].state is State.HERE
    finally:
        beacon.close()


def test_a_rank_that_has_done_its_part_and_ended_is_lost_only_to_those_who_wait_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    killed = {"machine": rendezvous.machine(), "port": 1, "token": ""}
    replies = {2: Reply(State.ENDED, {})}
    seeing = peers_of(monkeypatch, replies, rank1={"ended": True}, rank2=killed)
    found = seeing.ask([1, 2])
    assert seeing.ended(found, finished=()) == (2,)
    assert seeing.ended(found, finished=(1,)) == (1, 2)


def test_a_world_whose_store_cannot_be_shared_can_be_used() -> None:
    """In a process of its own: this one may have a world already."""
    program = """
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from shardwright import comm
dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
print(comm.world().size)
"""
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert (ran.returncode, ran.stdout.strip()) == (0, "4"), ran.stderr
