"""A cable between a publisher of KV events and its subscribers that can be made to lose some."""

import threading
from random import Random

import zmq

from serving.kv_events.follower import EventSource

CLOSE_S = 30.0


class LossyCable:
    """Passes live messages on: some are lost, repeated or damaged, and some wait for the next."""

    def __init__(self, source: EventSource, seed: int) -> None:
        self._random = Random(seed)
        self._context = zmq.Context()
        self._heard = self._context.socket(zmq.SUB)
        self._heard.subscribe(b"")
        self._heard.connect(source.endpoint)
        self._told = self._context.socket(zmq.PUB)
        port = self._told.bind_to_random_port("tcp://127.0.0.1")
        self.source = EventSource(f"tcp://127.0.0.1:{port}", source.replay_endpoint)
        self._is_whole = threading.Event()
        self._is_closing = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def heal(self) -> None:
        self._is_whole.set()

    def close(self) -> None:
        self._is_closing.set()
        self._thread.join(CLOSE_S)
        self._context.destroy(linger=0)

    def _run(self) -> None:
        late: list[list[bytes]] = []
        while not self._is_closing.is_set():
            if not self._heard.poll(10):
                continue
            frames = self._heard.recv_multipart()
            fate = 1.0 if self._is_whole.is_set() else self._random.random()
            if fate < 0.15:
                continue
            if fate < 0.2:
                late.append(frames)
                continue
            if fate < 0.25:
                frames[2] = b"\xc1"
            for each in (frames, frames) if fate < 0.35 else (frames,):
                self._told.send_multipart(each)
            while late:
                self._told.send_multipart(late.pop())
