"""`--kv-events-config`: addresses, and options that make no sense."""

import socket

import pytest
from structlog.testing import capture_logs

from engine.errors import ConfigError
from engine.kv_cache.arena_plan import plan_arena
from engine.kv_cache.spec import FullAttentionSpec, KVCacheGroup
from serving.config import KVEventsConfig, NodeConfig, decode_config
from serving.kv_events.follower import EventSource
from serving.kv_events.publisher import EventPublisher, listens, reachable
from serving.kv_events.subscriber import EventSubscriber
from serving.node.kv_events import NodeEvents
from tests.support.cache.announced_cache import HeardBlocks

GROUP = KVCacheGroup(FullAttentionSpec(1, 4, "float32"), (0,))


@pytest.mark.parametrize(
    ("endpoint", "binds"),
    [
        ("tcp://*:5557", True),
        ("tcp://[::]:5557", True),
        ("tcp://10.0.0.1:0", True),
        ("ipc://run/kv", True),
        ("tcp://10.0.0.1:5557", False),
        ("tcp://collector:5550", False),
    ],
)
def test_vllm_s_rule_says_who_listens(endpoint: str, binds: bool) -> None:
    assert listens(endpoint) is binds


def test_others_are_told_an_address_that_they_can_reach() -> None:
    assert reachable("tcp://0.0.0.0:5557", "node-7") == "tcp://node-7:5557"
    assert reachable("tcp://[::]:5557", "fe80::1") == "tcp://[fe80::1]:5557"
    assert reachable("tcp://127.0.0.1:5557", "node-7") == "tcp://127.0.0.1:5557"
    assert reachable("ipc://run/kv", "node-7") == "ipc://run/kv"


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"endpoint": "tcp://*"}, r"endpoint 'tcp://\*' is no address: write tcp://HOST:PORT"),
        ({"replay_endpoint": "udp://h:1"}, "replay_endpoint 'udp://h:1' is no address"),
        ({"endpoint": "tcp://h:70000"}, "endpoint 'tcp://h:70000' is no address"),
        ({"endpoint": "tcp://*:1", "replay_endpoint": "tcp://*:1"}, "are both"),
        ({"publisher": "kafka"}, "publisher"),
        ({"encoding": "json"}, "encoding"),
        ({"buffer_steps": 0}, "buffer_steps"),
        ({"hwm": 0}, "hwm"),
        ({"max_queue_size": 0}, "max_queue_size"),
        ({"topic": "x" * 300}, "topic"),
        ({"endpoints": "tcp://*:1"}, "endpoints"),
    ],
)
def test_options_that_make_no_sense_are_refused_by_name(fields: object, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        decode_config({"model": "m", "kv_events_config": fields}, NodeConfig, "flags")


def test_events_need_prefix_caching() -> None:
    fields = {"model": "m", "kv_events_config": {"enable_kv_cache_events": True}}
    decode_config(fields, NodeConfig, "flags").check()
    config = decode_config({**fields, "enable_prefix_caching": False}, NodeConfig, "flags")
    with pytest.raises(ConfigError, match="need prefix caching"):
        config.check()


def test_the_null_publisher_publishes_nothing() -> None:
    on = {"enable_kv_cache_events": True}
    assert decode_config(on, KVEventsConfig, "test").is_published
    assert not decode_config({**on, "publisher": "null"}, KVEventsConfig, "test").is_published
    assert not KVEventsConfig().is_published


def test_an_address_that_is_taken_or_none_is_refused_by_name() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        config = decode_config({"replay_endpoint": address}, KVEventsConfig, "test")
        with pytest.raises(ConfigError, match=f"cannot open {address}"):
            EventPublisher(config, "life")
    sink = HeardBlocks()
    subscriber = EventSubscriber(sink)
    for source in (EventSource("nowhere"), EventSource("tcp://127.0.0.1:1", "tcp://x")):
        with pytest.raises(ConfigError, match="cannot subscribe to"):
            subscriber.add("node", source)
    assert sink.held == {}
    subscriber.close()


def test_the_log_says_where_to_subscribe_and_when_only_a_collector_hears() -> None:
    plan = plan_arena((GROUP,), 4, 1 << 20)
    for given in (None, "tcp://127.0.0.1:5557"):
        on = KVEventsConfig(enable_kv_cache_events=True, endpoint=given)
        with capture_logs() as logs:
            events = NodeEvents(NodeConfig(kv_events_config=on), plan, "life", host="127.0.0.1")
        events.close()
        line = next(line for line in logs if "KV events" in line["event"])
        assert line["replay_endpoint"].startswith("tcp://127.0.0.1:")
        if events.info is None:
            assert (line["event"], line["endpoint"]) == ("KV events go to a collector", given)
        else:
            assert line["event"] == "KV events are published"
            assert line["endpoint"] == events.info.endpoint
