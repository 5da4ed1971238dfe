"""Publishers and subscribers over real sockets: loss, restarts, rubbish and slow readers."""

import os
import resource
import socket
import stat
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from random import Random

import pytest
import zmq

import serving.kv_events.publisher
import serving.kv_events.subscriber
from engine.errors import ConfigError
from serving.config import KVEventsConfig, decode_config
from serving.kv_events.follower import EventSource
from serving.kv_events.publisher import MAX_ANSWERS, EventPublisher
from serving.kv_events.subscriber import MAX_MESSAGE_BYTES, EventSubscriber
from serving.kv_events.wire import (
    END_SEQUENCE,
    SNAPSHOT,
    AllBlocksCleared,
    BlockStored,
    EventBatch,
    decode,
    encode,
)
from tests.support.cache.announced_cache import AnnouncedCache, HeardBlocks
from tests.support.network.reads import until
from tests.support.nodes.leaks import excess, held_here

DEADLINE_S = 30.0
END = END_SEQUENCE.to_bytes(8, "big", signed=True)
Socket = zmq.Socket[bytes]


class Node:
    """A cache and its publisher, which may end and come back at the same addresses."""

    def __init__(self, config: KVEventsConfig | None = None) -> None:
        self.config = config or KVEventsConfig()
        self.num_lives = 0
        self.start()
        self.source = EventSource(
            self.publisher.endpoint or "", self.publisher.replay_endpoint, self.config.topic
        )

    def start(self) -> None:
        self.num_lives += 1
        self.cache = AnnouncedCache()
        self.publisher = EventPublisher(self.config, f"life-{self.num_lives}")

    def restart(self) -> None:
        self.publisher.close()
        fields = {"endpoint": self.source.endpoint, "replay_endpoint": self.source.replay_endpoint}
        self.config = decode_config(fields, KVEventsConfig, "test")
        deadline = time.monotonic() + DEADLINE_S
        while True:  # until the kernel has given the ports back
            try:
                return self.start()
            except ConfigError:
                assert time.monotonic() < deadline
                time.sleep(0.01)

    def work(self, random: Random, steps: int) -> None:
        for _ in range(steps):
            if events := self.cache.change(random):
                self.publisher.publish(events)

    def agrees_with(self, subscriber: EventSubscriber, sink: HeardBlocks, name: str) -> bool:
        return sink.held[name] == self.cache.held and subscriber.stats(name).is_synced


@contextmanager
def running(*nodes: Node) -> Iterator[tuple[EventSubscriber, HeardBlocks]]:
    """A subscriber; all are closed in the end."""
    sink = HeardBlocks()
    subscriber = EventSubscriber(sink)
    try:
        yield subscriber, sink
    finally:
        subscriber.close()
        for node in nodes:
            node.publisher.close()


def agree(node: Node, sink: HeardBlocks, name: str = "node") -> bool:
    return sink.held[name] == node.cache.held


@pytest.mark.parametrize("encoding", ["map", "array"])
def test_who_comes_early_and_who_comes_late_know_the_same(encoding: str) -> None:
    config = decode_config({"encoding": encoding, "topic": "kv@p@m"}, KVEventsConfig, "test")
    random, node = Random(1), Node(config)
    with running(node) as (subscriber, sink):
        subscriber.add("early", node.source)
        node.work(random, 200)
        subscriber.add("late", node.source)
        node.work(random, 200)
        for name in ("early", "late"):
            until(partial(node.agrees_with, subscriber, sink, name))
        assert subscriber.stats("early").num_garbage == 0


def test_a_restarted_publisher_begins_with_nothing() -> None:
    random, node = Random(5), Node()
    with running(node) as (subscriber, sink):
        subscriber.add("node", node.source)
        node.work(random, 100)
        until(lambda: agree(node, sink) and subscriber.stats("node").is_synced)
        for _ in range(2):
            node.restart()
            node.work(random, 3)
            until(lambda: agree(node, sink) and subscriber.stats("node").is_synced)


def test_a_full_queue_is_repaired_by_a_snapshot() -> None:
    config = decode_config({"max_queue_size": 2}, KVEventsConfig, "test")
    random, node = Random(6), Node(config)
    with running(node) as (subscriber, sink):
        subscriber.add("node", node.source)
        until(lambda: subscriber.stats("node").is_synced)
        while not node.publisher.num_dropped:
            node.work(random, 50)
        node.work(random, 1)
        until(lambda: agree(node, sink) and subscriber.stats("node").is_synced)
        assert subscriber.stats("node").num_gaps_lost == 0


def test_many_publishers_have_one_thread_and_removed_ones_are_silent() -> None:
    random, nodes = Random(8), [Node() for _ in range(5)]
    with running(*nodes) as (subscriber, sink):
        before = threading.active_count()
        for number, node in enumerate(nodes):
            subscriber.add(str(number), node.source)
            node.work(random, 50)
        assert threading.active_count() == before
        for number, node in enumerate(nodes):
            until(partial(node.agrees_with, subscriber, sink, str(number)))
        subscriber.remove("3")
        subscriber.remove("3")
        known = sink.held["3"].copy()
        for node in nodes:
            node.work(random, 50)
        until(lambda: all(agree(node, sink, str(n)) for n, node in enumerate(nodes) if n != 3))
        assert sink.held["3"] == known
        with pytest.raises(KeyError):
            subscriber.stats("3")


@contextmanager
def raw(kind: int) -> Iterator[Socket]:
    context = zmq.Context()
    opened = context.socket(kind)
    opened.rcvtimeo = int(1000 * DEADLINE_S)
    try:
        yield opened
    finally:
        context.destroy(linger=0)


def ask(asking: Socket, word: bytes) -> list[list[bytes]]:
    asking.send_multipart([b"", word])
    answer = [asking.recv_multipart()]
    while answer[-1][-2] != END:
        answer.append(asking.recv_multipart())
    return answer


def test_frames_are_those_of_vllm() -> None:
    node = Node(decode_config({"topic": "kv@pod@model"}, KVEventsConfig, "test"))
    with running(node), raw(zmq.SUB) as heard, raw(zmq.DEALER) as asking:
        heard.subscribe(b"kv@")
        heard.connect(node.source.endpoint)
        asking.connect(node.source.replay_endpoint or "")
        (first, end) = ask(asking, bytes(8))
        assert first[:3] == [b"", b"kv@pod@model", bytes(8)]
        assert decode(first[3]).events == (AllBlocksCleared(),)
        assert end == [b"", b"", END, b""]
        stop = threading.Event()

        def publish() -> None:
            while not stop.wait(0.005):
                node.cache.store((1, 2), 0)
                node.publisher.publish(node.cache.recorder.take())

        worker = threading.Thread(target=publish)
        worker.start()
        topic, sequence, payload = heard.recv_multipart()
        stop.set()
        worker.join()
        assert (topic, len(sequence)) == (b"kv@pod@model", 8)
        batch = decode(payload)
        assert (batch.incarnation, len(batch.events)) == ("life-1", 1)
        repeated = ask(asking, sequence)
        assert repeated[0] == [b"", topic, sequence, payload]
        numbers = [int.from_bytes(each[2], "big") for each in repeated[:-1]]
        start = int.from_bytes(sequence, "big")
        assert numbers == list(range(start, start + len(numbers)))
        snapshot = ask(asking, SNAPSHOT)
        assert [decode(each[3]).incarnation for each in snapshot[:-1]] == ["life-1"]
        assert snapshot[0][2] == repeated[-2][2]


def test_requests_that_are_none_get_no_answer() -> None:
    node = Node()
    with running(node), raw(zmq.DEALER) as asking:
        asking.connect(node.source.replay_endpoint or "")
        for frames in ([b""], [b"", b"123"], [b"x", bytes(8)], [b"", bytes(8), b""], [bytes(8)]):
            asking.send_multipart(frames)
        assert [each[-1] for each in ask(asking, (1).to_bytes(8, "big"))] == [b""]


def test_rubbish_is_counted_and_passed_over() -> None:
    with running() as (subscriber, sink), raw(zmq.PUB) as told:
        port = told.bind_to_random_port("tcp://127.0.0.1")
        subscriber.add("node", EventSource(f"tcp://127.0.0.1:{port}"))
        good = encode(EventBatch(1.0, (AllBlocksCleared(),)))
        stats = subscriber.stats
        until(lambda: told.send_multipart([b"", bytes(8), good]) or stats("node").is_synced)
        for frames in (
            [b""], [b"", b"1", good], [b"", END, good], [b"", (1).to_bytes(8, "big"), b"\xc1"],
            [b"", b"", b"", b"", b""], [b"", (2).to_bytes(8, "big"), bytes(1 << 20)],
        ):  # fmt: skip
            told.send_multipart(frames)
        stored = BlockStored((b"a",), None, (1,), 1)
        told.send_multipart([b"", (3).to_bytes(8, "big"), encode(EventBatch(2.0, (stored,)))])
        until(lambda: sink.held["node"].total() == 1)
        assert subscriber.stats("node").num_garbage == 6


def test_a_message_that_is_too_long_ends_its_connection_and_a_new_one_comes() -> None:
    with running() as (subscriber, sink), raw(zmq.PUB) as told:
        port = told.bind_to_random_port("tcp://127.0.0.1")
        subscriber.add("node", EventSource(f"tcp://127.0.0.1:{port}"))
        number = 0

        def tell() -> bool:
            nonlocal number
            number += 1
            stored = BlockStored((b"%d" % number,), None, (1,), 1)
            payload = encode(EventBatch(float(number), (stored,)))
            told.send_multipart([b"", number.to_bytes(8, "big"), payload])
            return True

        until(lambda: tell() and sink.held["node"].total())
        told.send_multipart([b"", bytes(8), bytes(MAX_MESSAGE_BYTES)])
        heard = subscriber.stats("node").num_events + 3
        until(lambda: tell() and subscriber.stats("node").num_events > heard)
        assert subscriber.stats("node").num_garbage == 1


def test_old_answers_without_a_topic_are_read() -> None:
    with running() as (subscriber, sink), raw(zmq.ROUTER) as asked, raw(zmq.PUB) as told:
        ports = [each.bind_to_random_port("tcp://127.0.0.1") for each in (told, asked)]
        addresses = [f"tcp://127.0.0.1:{port}" for port in ports]
        subscriber.add("node", EventSource(addresses[0], addresses[1]))
        stored = encode(EventBatch(1.0, (BlockStored((b"a",), None, (1,), 1),)))
        for batches in ([], [[bytes(8), stored]]):
            asker, _, _ = asked.recv_multipart()
            for each in (*batches, [END, b""]):
                asked.send_multipart([asker, b"", *each])
        until(lambda: subscriber.stats("node").is_synced)
        assert sink.held["node"].total() == 1


def test_slow_readers_delay_neither_the_engine_nor_others() -> None:
    random, node = Random(9), Node(decode_config({"hwm": 10}, KVEventsConfig, "test"))
    node.work(random, 300)
    with running(node) as (subscriber, sink), raw(zmq.SUB) as slow, raw(zmq.DEALER) as asking:
        slow.rcvhwm = asking.rcvhwm = 1
        slow.subscribe(b"")
        slow.connect(node.source.endpoint)
        asking.connect(node.source.replay_endpoint or "")
        for _ in range(2 * MAX_ANSWERS):  # and reads none of the answers
            asking.send_multipart([b"", bytes(8)])
        subscriber.add("node", node.source)
        node.work(random, 5_000)
        until(lambda: agree(node, sink))


def test_a_close_does_not_wait_for_a_long_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its thread ends in time, or it would use sockets that its owner has closed."""
    monkeypatch.setattr(serving.kv_events.publisher, "LAST_BATCHES_S", 0.0)
    monkeypatch.setattr(serving.kv_events.publisher, "_CLOSE_S", 1.0)
    failed: list[object] = []
    monkeypatch.setattr(threading, "excepthook", failed.append)
    publisher = EventPublisher(KVEventsConfig(), "life")
    hashes = tuple(b"%032d" % number for number in range(1024))
    stored = BlockStored(hashes, None, (2**31,) * (16 * 1024), 16)
    with raw(zmq.SUB) as stuck:
        stuck.rcvhwm = 1
        stuck.subscribe(b"")
        stuck.connect(publisher.endpoint or "")
        for _ in range(20_000):  # some seconds of work
            publisher.publish((stored,))
        publisher.close()
    assert not any(each.name == "kv-events-publisher" for each in threading.enumerate())
    assert not failed


def test_a_publisher_may_connect_to_a_collector(tmp_path: Path) -> None:
    with raw(zmq.SUB) as collector:
        port = collector.bind_to_random_port("tcp://127.0.0.1")
        collector.subscribe(b"")
        node = Node(decode_config({"endpoint": f"tcp://127.0.0.1:{port}"}, KVEventsConfig, "test"))
        assert node.publisher.endpoint is None
        with running(node):
            random = Random(1)
            while not collector.poll(5):
                node.work(random, 1)
            assert len(collector.recv_multipart()) == 3


def test_addresses_may_be_files(tmp_path: Path) -> None:
    fields = {"endpoint": f"ipc://{tmp_path}/live", "replay_endpoint": f"ipc://{tmp_path}/replay"}
    before = os.umask(0)
    try:
        random, node = Random(2), Node(decode_config(fields, KVEventsConfig, "test"))
    finally:
        os.umask(before)
    assert {stat.S_IMODE(each.stat().st_mode) for each in tmp_path.iterdir()} == {0o600}
    with running(node) as (subscriber, sink):
        subscriber.add("node", node.source)
        node.work(random, 50)
        until(lambda: agree(node, sink))


async def test_nothing_is_left_of_publishers_and_subscribers() -> None:
    def once(seed: int) -> tuple[Node, EventSubscriber]:
        random, node = Random(seed), Node()
        with running(node) as (subscriber, sink):
            subscriber.add("node", node.source)
            node.work(random, 20)
            until(lambda: agree(node, sink))
            subscriber.add("gone", node.source)
        subscriber.close()
        node.publisher.close()
        return node, subscriber

    once(0)  # ZeroMQ's and Python's own first-time resources
    before = held_here()
    ended = [once(seed) for seed in range(3)]  # kept: nothing is left to the garbage collector
    assert not excess(before, held_here()), ended


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


class EndlessMessage(threading.Thread):
    """Speaks ZMTP by hand: one message whose parts do not end, to everybody who connects."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{self.listener.getsockname()[1]}"
        self.start()

    def run(self) -> None:
        part = b"\3" + (100_000).to_bytes(8, "big") + bytes(100_000)
        with suppress(OSError):
            while True:
                peer, _ = self.listener.accept()
                with peer, suppress(OSError):
                    peer.sendall(b"\xff" + bytes(8) + b"\x7f\3\0" + b"NULL".ljust(52, b"\0"))
                    peer.sendall(b"\4\x1a\5READY\x0bSocket-Type\0\0\0\3PUB")
                    for _ in range(1_000):  # 100 MB, lest a bug fills this machine
                        peer.sendall(part)


def test_a_message_without_end_fills_no_memory() -> None:
    hostile, sink = EndlessMessage(), HeardBlocks()
    subscriber = EventSubscriber(sink)
    random, node = Random(3), Node()
    before, most = resident_bytes(), 0
    try:
        subscriber.add("hostile", EventSource(hostile.address))
        subscriber.add("node", node.source)

        def is_cut_off() -> bool:
            nonlocal most
            most = max(most, resident_bytes())
            return subscriber.stats("hostile").num_garbage >= 2

        until(is_cut_off)
        assert most - before < 32 << 20
        node.work(random, 50)
        until(lambda: agree(node, sink))
    finally:
        hostile.listener.close()
        subscriber.close()
        node.publisher.close()
