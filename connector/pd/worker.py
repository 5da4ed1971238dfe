"""The worker side of the PdConnector: pulls that peers are read for, and leases that ended."""

from typing import Any

from connector.pd.decode.puller import Puller
from connector.pd.prefill.lease_table import LeaseTable
from engine.kv_connector import WorkerConnector
from engine.step import ConnectorOutput


class PdWorker(WorkerConnector):
    """Moves what this node pulls; what it holds, peers read one-sidedly."""

    def __init__(self, puller: Puller, leases: LeaseTable) -> None:
        self._puller = puller
        self._leases = leases

    def start_load(self, message: Any) -> None:
        self._puller.start(message)

    def get_finished(self) -> ConnectorOutput:
        """Pulls that ended, and requests whose lease was released or ran out."""
        loaded, failed = self._puller.take_ended()
        return ConnectorOutput(loaded, failed, released=self._leases.take_ended())

    def next_deadline(self) -> float | None:
        """When the earliest lease runs out; a finished pull wakes the engine by itself."""
        return self._leases.next_deadline()

    def close(self) -> None:
        self._puller.close()
