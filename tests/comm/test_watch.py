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

from shardwright.comm import rendezvous, watch
from shardwright.comm.beacon import Beacon, Reply, State, ask
from shardwright.comm.watch import Watch


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


def test_a_rank_that_was_out_of_reach_long_ago_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDWRIGHT_TIMEOUT", "300")
    now = 1000.0
    monkeypatch.setattr(watch.time, "monotonic", lambda: now)
    seeing: Any = object.__new__(Watch)
    seeing._unreachable = {}
    unreachable, here = Reply(State.UNREACHABLE, {}), Reply(State.HERE, {})
    assert seeing._lost_for_long({1: unreachable}) == ()
    now += 1000  # nobody has asked rank 1 since
    assert seeing._lost_for_long({2: here}) == ()
    assert seeing._lost_for_long({1: unreachable}) == ()
    for _ in range(29):
        now += 10
        assert seeing._lost_for_long({1: unreachable}) == ()
    now += 10
    assert seeing._lost_for_long({1: unreachable}) == (1,)


def test_a_rank_that_has_done_its_part_and_ended_is_lost_only_to_those_who_wait_for_it() -> None:
    seeing: Any = object.__new__(Watch)
    seeing._places = {1: {"ended": True}, 2: {"port": 1}}
    found = dict.fromkeys((1, 2), Reply(State.ENDED, {})) | {3: Reply(State.HERE, {})}
    assert seeing._ended(found, finished=()) == (2,)
    assert seeing._ended(found, finished=(1,)) == (1, 2)


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
