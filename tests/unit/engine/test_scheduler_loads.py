"""Loads that end before the prompt does, and what is held and may be taken back; no model."""

import pytest

from engine.kv_cache.coverage import Coverage
from engine.kv_connector import FinishDecision, Match, SchedulerConnector
from engine.request import Request, RequestStatus
from engine.sched.scheduler import Scheduler
from engine.step import BlockLoad, ConnectorOutput, LoadFailure
from engine.types import KVTransferParams
from tests.support.cache.recount import check_scheduler
from tests.unit.engine.test_scheduler import add, run, scheduler_of, step, tokens

THERE = 70
RETURN = KVTransferParams(do_remote_decode=True, remote_engine_id="decode-1")


class KeptElsewhere(SchedulerConnector):
    """Another node has the first `THERE` tokens of every prompt that names one."""

    def __init__(self, least: int = 1) -> None:
        self.least = least
        self.told: list[BlockLoad | None] = []

    def match(self, request: Request, num_local_tokens: int) -> Match | None:
        if request.kv_transfer_params is None:
            return None
        if request.num_failed_loads or THERE - num_local_tokens < self.least:
            return Match()
        return Match(Coverage.of(THERE, (THERE,)))

    def start_load(self, request: Request, load: BlockLoad | None) -> int:
        self.told.append(load)
        return int(load is not None)


class TwoParts(KeptElsewhere):
    """Loads come in two parts, and are tried again after a failure."""

    def match(self, request: Request, num_local_tokens: int) -> Match | None:
        return Match(Coverage.of(THERE, (THERE,)))

    def start_load(self, request: Request, load: BlockLoad | None) -> int:
        self.told.append(load)
        return 2


def test_behind_a_load_the_prompt_is_computed_in_chunks_with_checkpoints() -> None:
    scheduler = scheduler_of(connector=KeptElsewhere())
    request = add(scheduler, "r", tokens(200), params=RETURN)
    assert step(scheduler).scheduled == ()
    assert request.status is RequestStatus.WAITING_FOR_REMOTE_KVS
    scheduler.update_transfers(ConnectorOutput(loaded=("r",)))
    assert request.num_computed_tokens == THERE
    items = [item for output in run(scheduler) for item in output.scheduled]
    assert [len(item.token_ids) for item in items] == [64, 64, 2]
    assert [kept.num_tokens for item in items for kept in item.saves] == [192]
    assert request.is_finished and request.num_output_tokens == 1
    check_scheduler(scheduler)


def test_a_request_is_given_blocks_for_what_is_loaded_and_no_more() -> None:
    connector = KeptElsewhere()
    scheduler = scheduler_of(connector=connector)
    add(scheduler, "r", tokens(200), params=RETURN)
    step(scheduler)
    (load,) = connector.told
    assert load is not None and load.ranges == ((0, THERE), (0, THERE))
    assert [len(blocks) for blocks in load.tables] == [1, 5]
    scheduler.abort("r")
    scheduler.update_transfers(ConnectorOutput(failed=(LoadFailure("r", "request_ended"),)))
    check_scheduler(scheduler)


def test_a_failed_load_costs_what_was_to_be_loaded() -> None:
    scheduler = scheduler_of(connector=KeptElsewhere())
    request = add(scheduler, "r", tokens(200), params=RETURN)
    step(scheduler)
    scheduler.update_transfers(ConnectorOutput(failed=(LoadFailure("r", "transfer_failed"),)))
    run(scheduler)
    assert request.is_finished
    assert scheduler.stats.recomputed_tokens == {"transfer_failed": THERE}
    assert (scheduler.stats.external_queries, scheduler.stats.external_hits) == (200, THERE)


def test_after_a_failure_the_good_prefix_is_here_and_only_the_rest_is_loaded() -> None:
    """Two parts are reported; the earlier of the bad tokens counts, and a bad state costs none."""
    connector = TwoParts()
    scheduler = scheduler_of(connector=connector)
    request = add(scheduler, "r", tokens(200), params=RETURN)
    step(scheduler)
    scheduler.update_transfers(ConnectorOutput(failed=(LoadFailure("r", "vanished", 1, 48),)))
    assert request.status is RequestStatus.WAITING_FOR_REMOTE_KVS
    scheduler.update_transfers(ConnectorOutput(failed=(LoadFailure("r", "no_state", 0),)))
    step(scheduler)
    assert connector.told[-1] is not None
    assert connector.told[-1].ranges == ((0, THERE), (48, THERE))
    scheduler.update_transfers(ConnectorOutput(loaded=("r", "r")))
    run(scheduler)
    assert request.is_finished
    assert scheduler.stats.recomputed_tokens == {}
    check_scheduler(scheduler)


@pytest.mark.parametrize(("least", "pulled"), [(5, True), (6, False)])
def test_the_connector_is_asked_about_what_the_request_could_go_on_from_alone(
    least: int, pulled: bool
) -> None:
    """Attention is here up to 140, a state only at 65: five tokens are to be saved."""
    connector = KeptElsewhere(least)
    scheduler = scheduler_of(connector=connector)
    prompt = tokens(160)
    add(scheduler, "short", prompt[:65])
    run(scheduler)
    add(scheduler, "long", [*prompt[:150], *tokens(10, 500)])
    run(scheduler)
    request = add(scheduler, "r", [*prompt[:140], *tokens(40, 900)], params=RETURN)
    step(scheduler)
    assert (connector.told[-1] is not None) == pulled
    assert (request.status is RequestStatus.WAITING_FOR_REMOTE_KVS) == pulled
    if pulled:
        assert request.num_computed_tokens == 64
        scheduler.update_transfers(ConnectorOutput(loaded=("r",)))
    run(scheduler)
    assert request.is_finished


class Tier(SchedulerConnector):
    """Has the first 16 tokens of everything that was preempted."""

    def match(self, request: Request, num_local_tokens: int) -> Match | None:
        was_preempted = request.status is RequestStatus.PREEMPTED
        return Match(Coverage.of(16, (16,))) if was_preempted else None

    def start_load(self, request: Request, load: BlockLoad | None) -> int:
        return int(load is not None)


@pytest.mark.parametrize("fails", [False, True])
def test_what_was_preempted_may_load_when_it_starts_again(fails: bool) -> None:
    scheduler = scheduler_of(6, caching=False, connector=Tier())
    requests = [
        add(scheduler, str(number), tokens(40, 100 * number), max_tokens=50) for number in range(6)
    ]
    num_loads = 0
    while scheduler.has_work or scheduler.loads:
        step(scheduler)
        for name in list(scheduler.loads):
            num_loads += 1
            failure = (LoadFailure(name, "transfer_failed"),)
            ended = ConnectorOutput(failed=failure) if fails else ConnectorOutput(loaded=(name,))
            scheduler.update_transfers(ended)
    assert num_loads and scheduler.stats.num_preemptions
    assert [request.num_output_tokens for request in requests] == [50] * 6
    check_scheduler(scheduler)


class Keeper(SchedulerConnector):
    """Holds every request for a next turn."""

    def __init__(self) -> None:
        self.kept: list[str] = []

    def request_finished(self, request: Request) -> FinishDecision:
        self.kept.append(request.request_id)
        return FinishDecision(num_holds=1)

    def end_hold(self, request_id: str | None) -> str | None:
        return self.kept.pop(0) if self.kept else None


def full(units: int) -> tuple[Scheduler, Keeper]:
    keeper = Keeper()
    return scheduler_of(units, caching=False, connector=keeper), keeper


def test_who_waits_is_given_the_room_of_the_oldest_that_is_held() -> None:
    scheduler, keeper = full(10)
    for number in range(6):
        add(scheduler, str(number), tokens(40, 100 * number))
        run(scheduler)
    assert keeper.kept and keeper.kept[-1] == "5"
    assert len(keeper.kept) == scheduler.num_held < 6
    assert scheduler.stats.num_preemptions == 0
    check_scheduler(scheduler)


def test_who_runs_takes_what_is_held_before_anybody_is_preempted() -> None:
    scheduler, _keeper = full(12)
    add(scheduler, "held", tokens(40))
    run(scheduler)
    request = add(scheduler, "long", tokens(40, 500), max_tokens=400)
    run(scheduler)
    assert request.num_output_tokens == 400
    assert scheduler.stats.num_preemptions == 0
    check_scheduler(scheduler)


def test_who_found_no_room_looks_again_when_something_is_held_that_may_go() -> None:
    """Nothing is let go when a request ends that is held, and who waits must hear of it."""
    scheduler, keeper = full(3)
    first = add(scheduler, "first", tokens(40), max_tokens=3)
    second = add(scheduler, "second", tokens(40, 500), max_tokens=3)
    for _ in range(20):
        step(scheduler)
    assert first.is_finished and second.is_finished
    assert keeper.kept == ["second"]
