"""The holder of one key: its limits, what it has used of them, and its terms."""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from engine.errors import OverloadedError
from proxy.access.api_key import ApiKey
from proxy.access.bucket import Bucket
from proxy.access.fair_queue import Share
from proxy.metrics import ProxyMetrics
from serving.http.callers import Terms


class Client:
    """Lives as long as its key's name is in the file; `policy` is what the file says now."""

    def __init__(self, policy: ApiKey, metrics: ProxyMetrics) -> None:
        self._metrics = metrics
        self._num_open = 0
        self._requests: Bucket | None = None
        self._tokens: Bucket | None = None
        self.policy = policy

    @property
    def policy(self) -> ApiKey:
        return self._policy

    @policy.setter
    def policy(self, policy: ApiKey) -> None:
        self._policy = policy
        self._requests = _limited(self._requests, policy.requests_per_minute)
        self._tokens = _limited(self._tokens, policy.tokens_per_minute)

    @property
    def name(self) -> str:
        return self._policy.name

    @property
    def tenant(self) -> str:
        return self._policy.owner

    @property
    def is_operator(self) -> bool:
        return self._policy.operator

    @property
    def terms(self) -> Terms:
        policy = self._policy
        return Terms(
            may_choose_priority=policy.client_priority,
            cache_world=policy.owner if policy.isolate_cache else "",
            hides_cached_tokens=policy.hide_cached_tokens,
        )

    @property
    def share(self) -> Share:
        return Share(self._policy.owner, self._policy.weight, self._policy.priority)

    @contextmanager
    def entering(self) -> Iterator[None]:
        """Counts one request until the block ends; OverloadedError where a limit is reached."""
        most = self._policy.max_concurrent_requests
        if most is not None and self._num_open >= most:
            raise self._refusal("max_concurrent_requests", most, 1.0)
        self._require_tokens()
        if self._requests is not None:
            if seconds := self._requests.seconds_until(1):
                raise self._refusal("requests_per_minute", self._requests.limit, seconds)
            self._requests.take(1)
        self._metrics.key_requests.labels(self.name, "admitted").inc()
        self._num_open += 1
        try:
            yield
        finally:
            self._num_open -= 1

    def headers(self) -> Mapping[str, str]:
        """OpenAI's `x-ratelimit-*` for the limits that there are."""
        told: dict[str, str] = {}
        for kind, bucket in (("requests", self._requests), ("tokens", self._tokens)):
            told |= {} if bucket is None else bucket.headers(kind)
        return told

    @contextmanager
    def waiting(self, num_prompt_tokens: int) -> Iterator[None]:
        """The prompts' tokens are taken while the request waits, and given back if that fails.

        Raises OverloadedError while earlier ones are not paid off.
        """
        self._require_tokens()
        self._take(num_prompt_tokens)
        try:
            yield
        except BaseException as error:
            self._take(-num_prompt_tokens)
            if isinstance(error, OverloadedError):
                self._metrics.key_requests.labels(self.name, "queue").inc()
            raise
        self._metrics.key_tokens.labels(self.name, "prompt").inc(num_prompt_tokens)

    def on_tokens(self, count: int) -> None:
        """Takes tokens that were generated."""
        self._metrics.key_tokens.labels(self.name, "generated").inc(count)
        self._take(count)

    def _require_tokens(self) -> None:
        if self._tokens is not None and self._tokens.level <= 0:
            seconds = self._tokens.seconds_until(1)
            raise self._refusal("tokens_per_minute", self._tokens.limit, seconds)

    def _take(self, count: int) -> None:
        if self._tokens is not None:
            self._tokens.take(count)

    def _refusal(self, limit: str, value: float, seconds: float) -> OverloadedError:
        self._metrics.key_requests.labels(self.name, limit).inc()
        return OverloadedError(
            f"{limit} of key {self.name!r} is {value:.0f}: try again in {seconds:.0f} s",
            retry_after_s=max(1, math.ceil(seconds)),
        )


def _limited(bucket: Bucket | None, per_minute: int | None) -> Bucket | None:
    """The bucket with a new limit; what was used stays used."""
    if per_minute is None:
        return None
    if bucket is None:
        return Bucket(per_minute)
    bucket.limit = per_minute
    return bucket
