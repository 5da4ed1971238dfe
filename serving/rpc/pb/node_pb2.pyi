from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class JoinRequest(_message.Message):
    __slots__ = ("engine_id", "kind", "url")
    ENGINE_ID_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    URL_FIELD_NUMBER: _ClassVar[int]
    engine_id: str
    kind: str
    url: str
    def __init__(self, engine_id: _Optional[str] = ..., kind: _Optional[str] = ..., url: _Optional[str] = ...) -> None: ...

class JoinReply(_message.Message):
    __slots__ = ("lease_s", "stage", "problem")
    LEASE_S_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    PROBLEM_FIELD_NUMBER: _ClassVar[int]
    lease_s: float
    stage: str
    problem: str
    def __init__(self, lease_s: _Optional[float] = ..., stage: _Optional[str] = ..., problem: _Optional[str] = ...) -> None: ...

class LeaveRequest(_message.Message):
    __slots__ = ("engine_id",)
    ENGINE_ID_FIELD_NUMBER: _ClassVar[int]
    engine_id: str
    def __init__(self, engine_id: _Optional[str] = ...) -> None: ...

class LeaveReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ProveRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ProveReply(_message.Message):
    __slots__ = ("server_nonce", "proof")
    SERVER_NONCE_FIELD_NUMBER: _ClassVar[int]
    PROOF_FIELD_NUMBER: _ClassVar[int]
    server_nonce: bytes
    proof: bytes
    def __init__(self, server_nonce: _Optional[bytes] = ..., proof: _Optional[bytes] = ...) -> None: ...

class SamplingParams(_message.Message):
    __slots__ = ("max_tokens", "min_tokens", "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "seed", "stop_token_ids", "ignore_eos", "logprobs", "grammar", "logit_bias", "allowed_token_ids", "prompt_logprobs", "bad_words")
    class LogitBiasEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: float
        def __init__(self, key: _Optional[int] = ..., value: _Optional[float] = ...) -> None: ...
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    ALLOWED_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    BAD_WORDS_FIELD_NUMBER: _ClassVar[int]
    max_tokens: int
    min_tokens: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    seed: int
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    ignore_eos: bool
    logprobs: int
    grammar: str
    logit_bias: _containers.ScalarMap[int, float]
    allowed_token_ids: _containers.RepeatedScalarFieldContainer[int]
    prompt_logprobs: int
    bad_words: _containers.RepeatedCompositeFieldContainer[BadWord]
    def __init__(self, max_tokens: _Optional[int] = ..., min_tokens: _Optional[int] = ..., temperature: _Optional[float] = ..., top_p: _Optional[float] = ..., top_k: _Optional[int] = ..., min_p: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., seed: _Optional[int] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., ignore_eos: _Optional[bool] = ..., logprobs: _Optional[int] = ..., grammar: _Optional[str] = ..., logit_bias: _Optional[_Mapping[int, float]] = ..., allowed_token_ids: _Optional[_Iterable[int]] = ..., prompt_logprobs: _Optional[int] = ..., bad_words: _Optional[_Iterable[_Union[BadWord, _Mapping]]] = ...) -> None: ...

class BadWord(_message.Message):
    __slots__ = ("token_ids",)
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class GenerateRequest(_message.Message):
    __slots__ = ("request_id", "prompt_token_ids", "sampling", "kv_transfer_params", "cache_salt", "priority", "output_token_ids", "cache_boundaries", "tenant")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    KV_TRANSFER_PARAMS_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    CACHE_BOUNDARIES_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    prompt_token_ids: _containers.RepeatedScalarFieldContainer[int]
    sampling: SamplingParams
    kv_transfer_params: bytes
    cache_salt: str
    priority: int
    output_token_ids: _containers.RepeatedScalarFieldContainer[int]
    cache_boundaries: _containers.RepeatedScalarFieldContainer[int]
    tenant: str
    def __init__(self, request_id: _Optional[str] = ..., prompt_token_ids: _Optional[_Iterable[int]] = ..., sampling: _Optional[_Union[SamplingParams, _Mapping]] = ..., kv_transfer_params: _Optional[bytes] = ..., cache_salt: _Optional[str] = ..., priority: _Optional[int] = ..., output_token_ids: _Optional[_Iterable[int]] = ..., cache_boundaries: _Optional[_Iterable[int]] = ..., tenant: _Optional[str] = ...) -> None: ...

class TopLogprob(_message.Message):
    __slots__ = ("token_id", "logprob")
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    token_id: int
    logprob: float
    def __init__(self, token_id: _Optional[int] = ..., logprob: _Optional[float] = ...) -> None: ...

class TokenLogprob(_message.Message):
    __slots__ = ("token_id", "logprob", "top")
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    TOP_FIELD_NUMBER: _ClassVar[int]
    token_id: int
    logprob: float
    top: _containers.RepeatedCompositeFieldContainer[TopLogprob]
    def __init__(self, token_id: _Optional[int] = ..., logprob: _Optional[float] = ..., top: _Optional[_Iterable[_Union[TopLogprob, _Mapping]]] = ...) -> None: ...

class Logprobs(_message.Message):
    __slots__ = ("tokens",)
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    tokens: _containers.RepeatedCompositeFieldContainer[TokenLogprob]
    def __init__(self, tokens: _Optional[_Iterable[_Union[TokenLogprob, _Mapping]]] = ...) -> None: ...

class PromptLogprobs(_message.Message):
    __slots__ = ("num_top", "token_ids", "logprobs", "ranks")
    NUM_TOP_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    num_top: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedScalarFieldContainer[float]
    ranks: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, num_top: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[float]] = ..., ranks: _Optional[_Iterable[int]] = ...) -> None: ...

class KvTransferStats(_message.Message):
    __slots__ = ("attention_bytes", "state_bytes", "transfer_ms", "prefill_cached_tokens", "decode_cached_tokens", "verified", "started_at", "cause")
    ATTENTION_BYTES_FIELD_NUMBER: _ClassVar[int]
    STATE_BYTES_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_MS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DECODE_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    VERIFIED_FIELD_NUMBER: _ClassVar[int]
    STARTED_AT_FIELD_NUMBER: _ClassVar[int]
    CAUSE_FIELD_NUMBER: _ClassVar[int]
    attention_bytes: int
    state_bytes: int
    transfer_ms: float
    prefill_cached_tokens: int
    decode_cached_tokens: int
    verified: bool
    started_at: float
    cause: str
    def __init__(self, attention_bytes: _Optional[int] = ..., state_bytes: _Optional[int] = ..., transfer_ms: _Optional[float] = ..., prefill_cached_tokens: _Optional[int] = ..., decode_cached_tokens: _Optional[int] = ..., verified: _Optional[bool] = ..., started_at: _Optional[float] = ..., cause: _Optional[str] = ...) -> None: ...

class Command(_message.Message):
    __slots__ = ("number", "request", "traceparent")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    number: int
    request: bytes
    traceparent: str
    def __init__(self, number: _Optional[int] = ..., request: _Optional[bytes] = ..., traceparent: _Optional[str] = ...) -> None: ...

class Happened(_message.Message):
    __slots__ = ("number", "output", "error")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    number: int
    output: GenerateOutput
    error: ErrorDetail
    def __init__(self, number: _Optional[int] = ..., output: _Optional[_Union[GenerateOutput, _Mapping]] = ..., error: _Optional[_Union[ErrorDetail, _Mapping]] = ...) -> None: ...

class News(_message.Message):
    __slots__ = ("happened",)
    HAPPENED_FIELD_NUMBER: _ClassVar[int]
    happened: _containers.RepeatedCompositeFieldContainer[Happened]
    def __init__(self, happened: _Optional[_Iterable[_Union[Happened, _Mapping]]] = ...) -> None: ...

class GenerateOutput(_message.Message):
    __slots__ = ("token_ids", "logprobs", "finish_reason", "stop_reason", "num_cached_tokens", "kv_transfer_params", "kv_transfer", "prompt_logprobs", "num_tokens_lost_to_state")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    STOP_REASON_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    KV_TRANSFER_PARAMS_FIELD_NUMBER: _ClassVar[int]
    KV_TRANSFER_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_LOST_TO_STATE_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: Logprobs
    finish_reason: str
    stop_reason: int
    num_cached_tokens: int
    kv_transfer_params: bytes
    kv_transfer: KvTransferStats
    prompt_logprobs: PromptLogprobs
    num_tokens_lost_to_state: int
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Union[Logprobs, _Mapping]] = ..., finish_reason: _Optional[str] = ..., stop_reason: _Optional[int] = ..., num_cached_tokens: _Optional[int] = ..., kv_transfer_params: _Optional[bytes] = ..., kv_transfer: _Optional[_Union[KvTransferStats, _Mapping]] = ..., prompt_logprobs: _Optional[_Union[PromptLogprobs, _Mapping]] = ..., num_tokens_lost_to_state: _Optional[int] = ...) -> None: ...

class DescribeRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ResetPrefixCacheRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ResetPrefixCacheReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class NodeInfo(_message.Message):
    __slots__ = ("engine_id", "kind", "model_names", "max_model_len", "vocab_size", "num_requests_running", "num_requests_waiting", "kv_cache_usage", "ready", "reason", "hand_over_problems", "num_waiting_tokens", "prefill_tokens_per_s", "decode_tokens_per_s", "link_bytes_per_s", "kv_bytes_per_token", "state_bytes", "kv_events", "num_requests_loading", "num_held", "arena", "prefix_query_tokens", "prefix_hit_tokens", "root", "model_identity")
    ENGINE_ID_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    MODEL_NAMES_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    NUM_REQUESTS_RUNNING_FIELD_NUMBER: _ClassVar[int]
    NUM_REQUESTS_WAITING_FIELD_NUMBER: _ClassVar[int]
    KV_CACHE_USAGE_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    HAND_OVER_PROBLEMS_FIELD_NUMBER: _ClassVar[int]
    NUM_WAITING_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    DECODE_TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    LINK_BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    KV_BYTES_PER_TOKEN_FIELD_NUMBER: _ClassVar[int]
    STATE_BYTES_FIELD_NUMBER: _ClassVar[int]
    KV_EVENTS_FIELD_NUMBER: _ClassVar[int]
    NUM_REQUESTS_LOADING_FIELD_NUMBER: _ClassVar[int]
    NUM_HELD_FIELD_NUMBER: _ClassVar[int]
    ARENA_FIELD_NUMBER: _ClassVar[int]
    PREFIX_QUERY_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREFIX_HIT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ROOT_FIELD_NUMBER: _ClassVar[int]
    MODEL_IDENTITY_FIELD_NUMBER: _ClassVar[int]
    engine_id: str
    kind: str
    model_names: _containers.RepeatedScalarFieldContainer[str]
    max_model_len: int
    vocab_size: int
    num_requests_running: int
    num_requests_waiting: int
    kv_cache_usage: float
    ready: bool
    reason: str
    hand_over_problems: _containers.RepeatedCompositeFieldContainer[HandOverProblem]
    num_waiting_tokens: int
    prefill_tokens_per_s: float
    decode_tokens_per_s: float
    link_bytes_per_s: float
    kv_bytes_per_token: int
    state_bytes: int
    kv_events: KvEventsInfo
    num_requests_loading: int
    num_held: int
    arena: ArenaUse
    prefix_query_tokens: int
    prefix_hit_tokens: int
    root: str
    model_identity: str
    def __init__(self, engine_id: _Optional[str] = ..., kind: _Optional[str] = ..., model_names: _Optional[_Iterable[str]] = ..., max_model_len: _Optional[int] = ..., vocab_size: _Optional[int] = ..., num_requests_running: _Optional[int] = ..., num_requests_waiting: _Optional[int] = ..., kv_cache_usage: _Optional[float] = ..., ready: _Optional[bool] = ..., reason: _Optional[str] = ..., hand_over_problems: _Optional[_Iterable[_Union[HandOverProblem, _Mapping]]] = ..., num_waiting_tokens: _Optional[int] = ..., prefill_tokens_per_s: _Optional[float] = ..., decode_tokens_per_s: _Optional[float] = ..., link_bytes_per_s: _Optional[float] = ..., kv_bytes_per_token: _Optional[int] = ..., state_bytes: _Optional[int] = ..., kv_events: _Optional[_Union[KvEventsInfo, _Mapping]] = ..., num_requests_loading: _Optional[int] = ..., num_held: _Optional[int] = ..., arena: _Optional[_Union[ArenaUse, _Mapping]] = ..., prefix_query_tokens: _Optional[int] = ..., prefix_hit_tokens: _Optional[int] = ..., root: _Optional[str] = ..., model_identity: _Optional[str] = ...) -> None: ...

class ArenaUse(_message.Message):
    __slots__ = ("num_units", "attention", "idle_attention", "states", "idle_states")
    NUM_UNITS_FIELD_NUMBER: _ClassVar[int]
    ATTENTION_FIELD_NUMBER: _ClassVar[int]
    IDLE_ATTENTION_FIELD_NUMBER: _ClassVar[int]
    STATES_FIELD_NUMBER: _ClassVar[int]
    IDLE_STATES_FIELD_NUMBER: _ClassVar[int]
    num_units: int
    attention: int
    idle_attention: int
    states: int
    idle_states: int
    def __init__(self, num_units: _Optional[int] = ..., attention: _Optional[int] = ..., idle_attention: _Optional[int] = ..., states: _Optional[int] = ..., idle_states: _Optional[int] = ...) -> None: ...

class KvEventsInfo(_message.Message):
    __slots__ = ("endpoint", "replay_endpoint", "topic", "hash_block_size", "hash_seed", "groups", "model_identity")
    ENDPOINT_FIELD_NUMBER: _ClassVar[int]
    REPLAY_ENDPOINT_FIELD_NUMBER: _ClassVar[int]
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    HASH_BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    HASH_SEED_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    MODEL_IDENTITY_FIELD_NUMBER: _ClassVar[int]
    endpoint: str
    replay_endpoint: str
    topic: str
    hash_block_size: int
    hash_seed: str
    groups: _containers.RepeatedCompositeFieldContainer[KvGroupInfo]
    model_identity: str
    def __init__(self, endpoint: _Optional[str] = ..., replay_endpoint: _Optional[str] = ..., topic: _Optional[str] = ..., hash_block_size: _Optional[int] = ..., hash_seed: _Optional[str] = ..., groups: _Optional[_Iterable[_Union[KvGroupInfo, _Mapping]]] = ..., model_identity: _Optional[str] = ...) -> None: ...

class KvGroupInfo(_message.Message):
    __slots__ = ("kind", "sliding_window")
    KIND_FIELD_NUMBER: _ClassVar[int]
    SLIDING_WINDOW_FIELD_NUMBER: _ClassVar[int]
    kind: str
    sliding_window: int
    def __init__(self, kind: _Optional[str] = ..., sliding_window: _Optional[int] = ...) -> None: ...

class HandOverProblem(_message.Message):
    __slots__ = ("engine_id", "address", "cause", "detail", "count", "since_s", "retry_in_s")
    ENGINE_ID_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    CAUSE_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    SINCE_S_FIELD_NUMBER: _ClassVar[int]
    RETRY_IN_S_FIELD_NUMBER: _ClassVar[int]
    engine_id: str
    address: str
    cause: str
    detail: str
    count: int
    since_s: float
    retry_in_s: float
    def __init__(self, engine_id: _Optional[str] = ..., address: _Optional[str] = ..., cause: _Optional[str] = ..., detail: _Optional[str] = ..., count: _Optional[int] = ..., since_s: _Optional[float] = ..., retry_in_s: _Optional[float] = ...) -> None: ...

class GetTokenizerRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class TokenizerFiles(_message.Message):
    __slots__ = ("files",)
    class FilesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: bytes
        def __init__(self, key: _Optional[str] = ..., value: _Optional[bytes] = ...) -> None: ...
    FILES_FIELD_NUMBER: _ClassVar[int]
    files: _containers.ScalarMap[str, bytes]
    def __init__(self, files: _Optional[_Mapping[str, bytes]] = ...) -> None: ...

class HandshakeRequest(_message.Message):
    __slots__ = ("engine_id", "transports")
    ENGINE_ID_FIELD_NUMBER: _ClassVar[int]
    TRANSPORTS_FIELD_NUMBER: _ClassVar[int]
    engine_id: str
    transports: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, engine_id: _Optional[str] = ..., transports: _Optional[_Iterable[str]] = ...) -> None: ...

class HandshakeReply(_message.Message):
    __slots__ = ("engine_id", "transport", "transport_address", "geometry", "lease_s")
    class GeometryEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    ENGINE_ID_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    GEOMETRY_FIELD_NUMBER: _ClassVar[int]
    LEASE_S_FIELD_NUMBER: _ClassVar[int]
    engine_id: str
    transport: str
    transport_address: bytes
    geometry: _containers.ScalarMap[str, str]
    lease_s: float
    def __init__(self, engine_id: _Optional[str] = ..., transport: _Optional[str] = ..., transport_address: _Optional[bytes] = ..., geometry: _Optional[_Mapping[str, str]] = ..., lease_s: _Optional[float] = ...) -> None: ...

class ClaimRequest(_message.Message):
    __slots__ = ("engine_id", "request_id", "caller_engine_id")
    ENGINE_ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    CALLER_ENGINE_ID_FIELD_NUMBER: _ClassVar[int]
    engine_id: str
    request_id: str
    caller_engine_id: str
    def __init__(self, engine_id: _Optional[str] = ..., request_id: _Optional[str] = ..., caller_engine_id: _Optional[str] = ...) -> None: ...

class GroupBlocks(_message.Message):
    __slots__ = ("ids",)
    IDS_FIELD_NUMBER: _ClassVar[int]
    ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, ids: _Optional[_Iterable[int]] = ...) -> None: ...

class ClaimReply(_message.Message):
    __slots__ = ("num_tokens", "groups", "generation")
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    num_tokens: int
    groups: _containers.RepeatedCompositeFieldContainer[GroupBlocks]
    generation: int
    def __init__(self, num_tokens: _Optional[int] = ..., groups: _Optional[_Iterable[_Union[GroupBlocks, _Mapping]]] = ..., generation: _Optional[int] = ...) -> None: ...

class RenewRequest(_message.Message):
    __slots__ = ("engine_id", "caller_engine_id", "request_ids", "generations")
    ENGINE_ID_FIELD_NUMBER: _ClassVar[int]
    CALLER_ENGINE_ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_IDS_FIELD_NUMBER: _ClassVar[int]
    GENERATIONS_FIELD_NUMBER: _ClassVar[int]
    engine_id: str
    caller_engine_id: str
    request_ids: _containers.RepeatedScalarFieldContainer[str]
    generations: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, engine_id: _Optional[str] = ..., caller_engine_id: _Optional[str] = ..., request_ids: _Optional[_Iterable[str]] = ..., generations: _Optional[_Iterable[int]] = ...) -> None: ...

class RenewReply(_message.Message):
    __slots__ = ("lost_request_ids",)
    LOST_REQUEST_IDS_FIELD_NUMBER: _ClassVar[int]
    lost_request_ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, lost_request_ids: _Optional[_Iterable[str]] = ...) -> None: ...

class ReleaseRequest(_message.Message):
    __slots__ = ("engine_id", "request_id", "reason", "generation")
    ENGINE_ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    engine_id: str
    request_id: str
    reason: str
    generation: int
    def __init__(self, engine_id: _Optional[str] = ..., request_id: _Optional[str] = ..., reason: _Optional[str] = ..., generation: _Optional[int] = ...) -> None: ...

class ReleaseReply(_message.Message):
    __slots__ = ("was_alive",)
    WAS_ALIVE_FIELD_NUMBER: _ClassVar[int]
    was_alive: bool
    def __init__(self, was_alive: _Optional[bool] = ...) -> None: ...

class DigestsRequest(_message.Message):
    __slots__ = ("engine_id", "request_id", "generation", "ranges")
    ENGINE_ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    RANGES_FIELD_NUMBER: _ClassVar[int]
    engine_id: str
    request_id: str
    generation: int
    ranges: _containers.RepeatedCompositeFieldContainer[BlockRange]
    def __init__(self, engine_id: _Optional[str] = ..., request_id: _Optional[str] = ..., generation: _Optional[int] = ..., ranges: _Optional[_Iterable[_Union[BlockRange, _Mapping]]] = ...) -> None: ...

class BlockRange(_message.Message):
    __slots__ = ("kept", "layers", "block_size", "start", "end")
    KEPT_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    kept: str
    layers: _containers.RepeatedScalarFieldContainer[int]
    block_size: int
    start: int
    end: int
    def __init__(self, kept: _Optional[str] = ..., layers: _Optional[_Iterable[int]] = ..., block_size: _Optional[int] = ..., start: _Optional[int] = ..., end: _Optional[int] = ...) -> None: ...

class RangeDigests(_message.Message):
    __slots__ = ("digests",)
    DIGESTS_FIELD_NUMBER: _ClassVar[int]
    digests: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, digests: _Optional[_Iterable[int]] = ...) -> None: ...

class DigestsReply(_message.Message):
    __slots__ = ("ranges",)
    RANGES_FIELD_NUMBER: _ClassVar[int]
    ranges: _containers.RepeatedCompositeFieldContainer[RangeDigests]
    def __init__(self, ranges: _Optional[_Iterable[_Union[RangeDigests, _Mapping]]] = ...) -> None: ...

class ErrorDetail(_message.Message):
    __slots__ = ("error", "message", "param", "code", "retry_after_s")
    ERROR_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    PARAM_FIELD_NUMBER: _ClassVar[int]
    CODE_FIELD_NUMBER: _ClassVar[int]
    RETRY_AFTER_S_FIELD_NUMBER: _ClassVar[int]
    error: str
    message: str
    param: str
    code: str
    retry_after_s: int
    def __init__(self, error: _Optional[str] = ..., message: _Optional[str] = ..., param: _Optional[str] = ..., code: _Optional[str] = ..., retry_after_s: _Optional[int] = ...) -> None: ...
