from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Pool(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    POOL_UNSPECIFIED: _ClassVar[Pool]
    POOL_PREFILL: _ClassVar[Pool]
    POOL_DECODE: _ClassVar[Pool]
    POOL_ENCODE: _ClassVar[Pool]

class Tier(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TIER_DEVICE: _ClassVar[Tier]
    TIER_HOST: _ClassVar[Tier]
    TIER_DISK: _ClassVar[Tier]
    TIER_STORE: _ClassVar[Tier]

class FinishReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FINISH_REASON_NONE: _ClassVar[FinishReason]
    FINISH_REASON_STOP: _ClassVar[FinishReason]
    FINISH_REASON_LENGTH: _ClassVar[FinishReason]

class FailureCode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FAILURE_CODE_UNSPECIFIED: _ClassVar[FailureCode]
    FAILURE_CODE_NO_ROOM: _ClassVar[FailureCode]
    FAILURE_CODE_KV_FAILED: _ClassVar[FailureCode]
    FAILURE_CODE_HANDED_BACK: _ClassVar[FailureCode]
    FAILURE_CODE_DRAINING: _ClassVar[FailureCode]
    FAILURE_CODE_DROPPED: _ClassVar[FailureCode]
    FAILURE_CODE_INVALID: _ClassVar[FailureCode]
    FAILURE_CODE_ENGINE: _ClassVar[FailureCode]
    FAILURE_CODE_FINISHED: _ClassVar[FailureCode]
    FAILURE_CODE_ABORTED: _ClassVar[FailureCode]
    FAILURE_CODE_NO_ADAPTER: _ClassVar[FailureCode]

class Pause(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PAUSE_NONE: _ClassVar[Pause]
    PAUSE_NEW: _ClassVar[Pause]
    PAUSE_STEPS: _ClassVar[Pause]
POOL_UNSPECIFIED: Pool
POOL_PREFILL: Pool
POOL_DECODE: Pool
POOL_ENCODE: Pool
TIER_DEVICE: Tier
TIER_HOST: Tier
TIER_DISK: Tier
TIER_STORE: Tier
FINISH_REASON_NONE: FinishReason
FINISH_REASON_STOP: FinishReason
FINISH_REASON_LENGTH: FinishReason
FAILURE_CODE_UNSPECIFIED: FailureCode
FAILURE_CODE_NO_ROOM: FailureCode
FAILURE_CODE_KV_FAILED: FailureCode
FAILURE_CODE_HANDED_BACK: FailureCode
FAILURE_CODE_DRAINING: FailureCode
FAILURE_CODE_DROPPED: FailureCode
FAILURE_CODE_INVALID: FailureCode
FAILURE_CODE_ENGINE: FailureCode
FAILURE_CODE_FINISHED: FailureCode
FAILURE_CODE_ABORTED: FailureCode
FAILURE_CODE_NO_ADAPTER: FailureCode
PAUSE_NONE: Pause
PAUSE_NEW: Pause
PAUSE_STEPS: Pause

class RouterMessage(_message.Message):
    __slots__ = ("hello", "prefill", "decode", "retarget", "cancel", "only_copies", "pixels", "encode", "image_ready")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    DECODE_FIELD_NUMBER: _ClassVar[int]
    RETARGET_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    ONLY_COPIES_FIELD_NUMBER: _ClassVar[int]
    PIXELS_FIELD_NUMBER: _ClassVar[int]
    ENCODE_FIELD_NUMBER: _ClassVar[int]
    IMAGE_READY_FIELD_NUMBER: _ClassVar[int]
    hello: RouterHello
    prefill: SubmitPrefill
    decode: SubmitDecode
    retarget: Retarget
    cancel: Cancel
    only_copies: OnlyCopies
    pixels: Pixels
    encode: SubmitEncode
    image_ready: ImageReady
    def __init__(self, hello: _Optional[_Union[RouterHello, _Mapping]] = ..., prefill: _Optional[_Union[SubmitPrefill, _Mapping]] = ..., decode: _Optional[_Union[SubmitDecode, _Mapping]] = ..., retarget: _Optional[_Union[Retarget, _Mapping]] = ..., cancel: _Optional[_Union[Cancel, _Mapping]] = ..., only_copies: _Optional[_Union[OnlyCopies, _Mapping]] = ..., pixels: _Optional[_Union[Pixels, _Mapping]] = ..., encode: _Optional[_Union[SubmitEncode, _Mapping]] = ..., image_ready: _Optional[_Union[ImageReady, _Mapping]] = ...) -> None: ...

class Pixels(_message.Message):
    __slots__ = ("data",)
    DATA_FIELD_NUMBER: _ClassVar[int]
    data: bytes
    def __init__(self, data: _Optional[bytes] = ...) -> None: ...

class RouterHello(_message.Message):
    __slots__ = ("router_id", "report_seconds", "describe", "cache")
    ROUTER_ID_FIELD_NUMBER: _ClassVar[int]
    REPORT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    DESCRIBE_FIELD_NUMBER: _ClassVar[int]
    CACHE_FIELD_NUMBER: _ClassVar[int]
    router_id: bytes
    report_seconds: float
    describe: bool
    cache: bool
    def __init__(self, router_id: _Optional[bytes] = ..., report_seconds: _Optional[float] = ..., describe: _Optional[bool] = ..., cache: _Optional[bool] = ...) -> None: ...

class Request(_message.Message):
    __slots__ = ("request_id", "prompt_ids", "output_ids", "sampling", "timeout_ms", "priority", "alone", "retried", "cache_salt", "first_token_within", "waited", "gap_cost", "tenant", "images", "adapter", "traceparent", "name")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_IDS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    ALONE_FIELD_NUMBER: _ClassVar[int]
    RETRIED_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_WITHIN_FIELD_NUMBER: _ClassVar[int]
    WAITED_FIELD_NUMBER: _ClassVar[int]
    GAP_COST_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    IMAGES_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    request_id: bytes
    prompt_ids: bytes
    output_ids: _containers.RepeatedScalarFieldContainer[int]
    sampling: SamplingParams
    timeout_ms: int
    priority: int
    alone: bool
    retried: bool
    cache_salt: bytes
    first_token_within: float
    waited: float
    gap_cost: float
    tenant: bytes
    images: _containers.RepeatedCompositeFieldContainer[Image]
    adapter: bytes
    traceparent: str
    name: str
    def __init__(self, request_id: _Optional[bytes] = ..., prompt_ids: _Optional[bytes] = ..., output_ids: _Optional[_Iterable[int]] = ..., sampling: _Optional[_Union[SamplingParams, _Mapping]] = ..., timeout_ms: _Optional[int] = ..., priority: _Optional[int] = ..., alone: _Optional[bool] = ..., retried: _Optional[bool] = ..., cache_salt: _Optional[bytes] = ..., first_token_within: _Optional[float] = ..., waited: _Optional[float] = ..., gap_cost: _Optional[float] = ..., tenant: _Optional[bytes] = ..., images: _Optional[_Iterable[_Union[Image, _Mapping]]] = ..., adapter: _Optional[bytes] = ..., traceparent: _Optional[str] = ..., name: _Optional[str] = ...) -> None: ...

class Image(_message.Message):
    __slots__ = ("name", "start", "rows", "columns", "with_pixels")
    NAME_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    COLUMNS_FIELD_NUMBER: _ClassVar[int]
    WITH_PIXELS_FIELD_NUMBER: _ClassVar[int]
    name: bytes
    start: int
    rows: int
    columns: int
    with_pixels: bool
    def __init__(self, name: _Optional[bytes] = ..., start: _Optional[int] = ..., rows: _Optional[int] = ..., columns: _Optional[int] = ..., with_pixels: _Optional[bool] = ...) -> None: ...

class SubmitEncode(_message.Message):
    __slots__ = ("encode_id", "image", "traceparent", "name", "tenant")
    ENCODE_ID_FIELD_NUMBER: _ClassVar[int]
    IMAGE_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    encode_id: bytes
    image: Image
    traceparent: str
    name: str
    tenant: bytes
    def __init__(self, encode_id: _Optional[bytes] = ..., image: _Optional[_Union[Image, _Mapping]] = ..., traceparent: _Optional[str] = ..., name: _Optional[str] = ..., tenant: _Optional[bytes] = ...) -> None: ...

class ImageReady(_message.Message):
    __slots__ = ("name", "kv_address", "incarnation")
    NAME_FIELD_NUMBER: _ClassVar[int]
    KV_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    name: bytes
    kv_address: str
    incarnation: int
    def __init__(self, name: _Optional[bytes] = ..., kv_address: _Optional[str] = ..., incarnation: _Optional[int] = ...) -> None: ...

class StructuredOutput(_message.Message):
    __slots__ = ("json_schema", "regex", "grammar")
    JSON_SCHEMA_FIELD_NUMBER: _ClassVar[int]
    REGEX_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    json_schema: str
    regex: str
    grammar: str
    def __init__(self, json_schema: _Optional[str] = ..., regex: _Optional[str] = ..., grammar: _Optional[str] = ...) -> None: ...

class Reasoning(_message.Message):
    __slots__ = ("end_id", "start_id", "budget")
    END_ID_FIELD_NUMBER: _ClassVar[int]
    START_ID_FIELD_NUMBER: _ClassVar[int]
    BUDGET_FIELD_NUMBER: _ClassVar[int]
    end_id: int
    start_id: int
    budget: int
    def __init__(self, end_id: _Optional[int] = ..., start_id: _Optional[int] = ..., budget: _Optional[int] = ...) -> None: ...

class BadWord(_message.Message):
    __slots__ = ("token_ids",)
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class SamplingParams(_message.Message):
    __slots__ = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "seed", "max_tokens", "min_tokens", "stop_token_ids", "ignore_eos", "logit_bias", "logprobs", "prompt_logprobs", "logprob_token_ids", "allowed_token_ids", "bad_words", "structured_output", "reasoning")
    class LogitBiasEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: float
        def __init__(self, key: _Optional[int] = ..., value: _Optional[float] = ...) -> None: ...
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    ALLOWED_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    BAD_WORDS_FIELD_NUMBER: _ClassVar[int]
    STRUCTURED_OUTPUT_FIELD_NUMBER: _ClassVar[int]
    REASONING_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    seed: int
    max_tokens: int
    min_tokens: int
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    ignore_eos: bool
    logit_bias: _containers.ScalarMap[int, float]
    logprobs: int
    prompt_logprobs: int
    logprob_token_ids: _containers.RepeatedScalarFieldContainer[int]
    allowed_token_ids: _containers.RepeatedScalarFieldContainer[int]
    bad_words: _containers.RepeatedCompositeFieldContainer[BadWord]
    structured_output: StructuredOutput
    reasoning: Reasoning
    def __init__(self, temperature: _Optional[float] = ..., top_k: _Optional[int] = ..., top_p: _Optional[float] = ..., min_p: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., seed: _Optional[int] = ..., max_tokens: _Optional[int] = ..., min_tokens: _Optional[int] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., ignore_eos: _Optional[bool] = ..., logit_bias: _Optional[_Mapping[int, float]] = ..., logprobs: _Optional[int] = ..., prompt_logprobs: _Optional[int] = ..., logprob_token_ids: _Optional[_Iterable[int]] = ..., allowed_token_ids: _Optional[_Iterable[int]] = ..., bad_words: _Optional[_Iterable[_Union[BadWord, _Mapping]]] = ..., structured_output: _Optional[_Union[StructuredOutput, _Mapping]] = ..., reasoning: _Optional[_Union[Reasoning, _Mapping]] = ...) -> None: ...

class SubmitPrefill(_message.Message):
    __slots__ = ("prefill_id", "request", "handover", "report_start", "content", "plan")
    PREFILL_ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    HANDOVER_FIELD_NUMBER: _ClassVar[int]
    REPORT_START_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    PLAN_FIELD_NUMBER: _ClassVar[int]
    prefill_id: bytes
    request: Request
    handover: bool
    report_start: bool
    content: ContentSource
    plan: _containers.RepeatedCompositeFieldContainer[PlanRange]
    def __init__(self, prefill_id: _Optional[bytes] = ..., request: _Optional[_Union[Request, _Mapping]] = ..., handover: _Optional[bool] = ..., report_start: _Optional[bool] = ..., content: _Optional[_Union[ContentSource, _Mapping]] = ..., plan: _Optional[_Iterable[_Union[PlanRange, _Mapping]]] = ...) -> None: ...

class PlanRange(_message.Message):
    __slots__ = ("prefill_id", "kv_address", "incarnation", "start", "stop")
    PREFILL_ID_FIELD_NUMBER: _ClassVar[int]
    KV_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    prefill_id: bytes
    kv_address: str
    incarnation: int
    start: int
    stop: int
    def __init__(self, prefill_id: _Optional[bytes] = ..., kv_address: _Optional[str] = ..., incarnation: _Optional[int] = ..., start: _Optional[int] = ..., stop: _Optional[int] = ...) -> None: ...

class ContentSource(_message.Message):
    __slots__ = ("kv_address", "incarnation", "tier", "chunks")
    KV_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    CHUNKS_FIELD_NUMBER: _ClassVar[int]
    kv_address: str
    incarnation: int
    tier: Tier
    chunks: int
    def __init__(self, kv_address: _Optional[str] = ..., incarnation: _Optional[int] = ..., tier: _Optional[_Union[Tier, str]] = ..., chunks: _Optional[int] = ...) -> None: ...

class SubmitDecode(_message.Message):
    __slots__ = ("decode_id", "request", "source", "content")
    DECODE_ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    decode_id: bytes
    request: Request
    source: PrefillSource
    content: ContentSource
    def __init__(self, decode_id: _Optional[bytes] = ..., request: _Optional[_Union[Request, _Mapping]] = ..., source: _Optional[_Union[PrefillSource, _Mapping]] = ..., content: _Optional[_Union[ContentSource, _Mapping]] = ...) -> None: ...

class PrefillSource(_message.Message):
    __slots__ = ("prefill_id", "kv_address", "incarnation", "attempt")
    PREFILL_ID_FIELD_NUMBER: _ClassVar[int]
    KV_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    prefill_id: bytes
    kv_address: str
    incarnation: int
    attempt: int
    def __init__(self, prefill_id: _Optional[bytes] = ..., kv_address: _Optional[str] = ..., incarnation: _Optional[int] = ..., attempt: _Optional[int] = ...) -> None: ...

class Retarget(_message.Message):
    __slots__ = ("decode_id", "source", "output_ids")
    DECODE_ID_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_IDS_FIELD_NUMBER: _ClassVar[int]
    decode_id: bytes
    source: PrefillSource
    output_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, decode_id: _Optional[bytes] = ..., source: _Optional[_Union[PrefillSource, _Mapping]] = ..., output_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class Cancel(_message.Message):
    __slots__ = ("attempt_id",)
    ATTEMPT_ID_FIELD_NUMBER: _ClassVar[int]
    attempt_id: bytes
    def __init__(self, attempt_id: _Optional[bytes] = ...) -> None: ...

class OnlyCopies(_message.Message):
    __slots__ = ("chunks", "all")
    CHUNKS_FIELD_NUMBER: _ClassVar[int]
    ALL_FIELD_NUMBER: _ClassVar[int]
    chunks: _containers.RepeatedScalarFieldContainer[int]
    all: bool
    def __init__(self, chunks: _Optional[_Iterable[int]] = ..., all: _Optional[bool] = ...) -> None: ...

class WorkerMessage(_message.Message):
    __slots__ = ("step", "reserved", "failed", "status", "prefill_started", "prompt_logprobs", "description", "cache", "encoded", "image_wanted")
    STEP_FIELD_NUMBER: _ClassVar[int]
    RESERVED_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_STARTED_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    DESCRIPTION_FIELD_NUMBER: _ClassVar[int]
    CACHE_FIELD_NUMBER: _ClassVar[int]
    ENCODED_FIELD_NUMBER: _ClassVar[int]
    IMAGE_WANTED_FIELD_NUMBER: _ClassVar[int]
    step: StepOutput
    reserved: Reserved
    failed: AttemptFailed
    status: WorkerStatus
    prefill_started: PrefillStarted
    prompt_logprobs: PromptLogprobs
    description: WorkerDescription
    cache: CacheEvents
    encoded: Encoded
    image_wanted: ImageWanted
    def __init__(self, step: _Optional[_Union[StepOutput, _Mapping]] = ..., reserved: _Optional[_Union[Reserved, _Mapping]] = ..., failed: _Optional[_Union[AttemptFailed, _Mapping]] = ..., status: _Optional[_Union[WorkerStatus, _Mapping]] = ..., prefill_started: _Optional[_Union[PrefillStarted, _Mapping]] = ..., prompt_logprobs: _Optional[_Union[PromptLogprobs, _Mapping]] = ..., description: _Optional[_Union[WorkerDescription, _Mapping]] = ..., cache: _Optional[_Union[CacheEvents, _Mapping]] = ..., encoded: _Optional[_Union[Encoded, _Mapping]] = ..., image_wanted: _Optional[_Union[ImageWanted, _Mapping]] = ...) -> None: ...

class StepOutput(_message.Message):
    __slots__ = ("tokens",)
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    tokens: _containers.RepeatedCompositeFieldContainer[TokenEvent]
    def __init__(self, tokens: _Optional[_Iterable[_Union[TokenEvent, _Mapping]]] = ...) -> None: ...

class TokenEvent(_message.Message):
    __slots__ = ("attempt_id", "output_index", "token_id", "finish_reason", "logprobs", "cached_tokens", "accepted_draft", "rejected_drafts")
    ATTEMPT_ID_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_INDEX_FIELD_NUMBER: _ClassVar[int]
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_DRAFT_FIELD_NUMBER: _ClassVar[int]
    REJECTED_DRAFTS_FIELD_NUMBER: _ClassVar[int]
    attempt_id: bytes
    output_index: int
    token_id: int
    finish_reason: FinishReason
    logprobs: TokenLogprobs
    cached_tokens: int
    accepted_draft: bool
    rejected_drafts: int
    def __init__(self, attempt_id: _Optional[bytes] = ..., output_index: _Optional[int] = ..., token_id: _Optional[int] = ..., finish_reason: _Optional[_Union[FinishReason, str]] = ..., logprobs: _Optional[_Union[TokenLogprobs, _Mapping]] = ..., cached_tokens: _Optional[int] = ..., accepted_draft: _Optional[bool] = ..., rejected_drafts: _Optional[int] = ...) -> None: ...

class TokenLogprobs(_message.Message):
    __slots__ = ("logprob", "top_ids", "top_logprobs")
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    TOP_IDS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    logprob: float
    top_ids: _containers.RepeatedScalarFieldContainer[int]
    top_logprobs: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, logprob: _Optional[float] = ..., top_ids: _Optional[_Iterable[int]] = ..., top_logprobs: _Optional[_Iterable[float]] = ...) -> None: ...

class PromptLogprobs(_message.Message):
    __slots__ = ("attempt_id", "position", "logprobs", "ranks", "top_ids", "top_logprobs")
    ATTEMPT_ID_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    TOP_IDS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    attempt_id: bytes
    position: int
    logprobs: bytes
    ranks: bytes
    top_ids: bytes
    top_logprobs: bytes
    def __init__(self, attempt_id: _Optional[bytes] = ..., position: _Optional[int] = ..., logprobs: _Optional[bytes] = ..., ranks: _Optional[bytes] = ..., top_ids: _Optional[bytes] = ..., top_logprobs: _Optional[bytes] = ...) -> None: ...

class Reserved(_message.Message):
    __slots__ = ("decode_id",)
    DECODE_ID_FIELD_NUMBER: _ClassVar[int]
    decode_id: bytes
    def __init__(self, decode_id: _Optional[bytes] = ...) -> None: ...

class Encoded(_message.Message):
    __slots__ = ("encode_id",)
    ENCODE_ID_FIELD_NUMBER: _ClassVar[int]
    encode_id: bytes
    def __init__(self, encode_id: _Optional[bytes] = ...) -> None: ...

class ImageWanted(_message.Message):
    __slots__ = ("name", "lost")
    NAME_FIELD_NUMBER: _ClassVar[int]
    LOST_FIELD_NUMBER: _ClassVar[int]
    name: bytes
    lost: bool
    def __init__(self, name: _Optional[bytes] = ..., lost: _Optional[bool] = ...) -> None: ...

class PrefillStarted(_message.Message):
    __slots__ = ("prefill_id",)
    PREFILL_ID_FIELD_NUMBER: _ClassVar[int]
    prefill_id: bytes
    def __init__(self, prefill_id: _Optional[bytes] = ...) -> None: ...

class AttemptFailed(_message.Message):
    __slots__ = ("attempt_id", "code", "message", "prefill_id")
    ATTEMPT_ID_FIELD_NUMBER: _ClassVar[int]
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    PREFILL_ID_FIELD_NUMBER: _ClassVar[int]
    attempt_id: bytes
    code: FailureCode
    message: str
    prefill_id: bytes
    def __init__(self, attempt_id: _Optional[bytes] = ..., code: _Optional[_Union[FailureCode, str]] = ..., message: _Optional[str] = ..., prefill_id: _Optional[bytes] = ...) -> None: ...

class CacheEvents(_message.Message):
    __slots__ = ("reset", "added", "evicted", "device", "host", "disk", "stored", "not_stored")
    RESET_FIELD_NUMBER: _ClassVar[int]
    ADDED_FIELD_NUMBER: _ClassVar[int]
    EVICTED_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    DISK_FIELD_NUMBER: _ClassVar[int]
    STORED_FIELD_NUMBER: _ClassVar[int]
    NOT_STORED_FIELD_NUMBER: _ClassVar[int]
    reset: bool
    added: _containers.RepeatedScalarFieldContainer[int]
    evicted: _containers.RepeatedScalarFieldContainer[int]
    device: _containers.RepeatedScalarFieldContainer[int]
    host: _containers.RepeatedScalarFieldContainer[int]
    disk: _containers.RepeatedScalarFieldContainer[int]
    stored: _containers.RepeatedScalarFieldContainer[int]
    not_stored: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, reset: _Optional[bool] = ..., added: _Optional[_Iterable[int]] = ..., evicted: _Optional[_Iterable[int]] = ..., device: _Optional[_Iterable[int]] = ..., host: _Optional[_Iterable[int]] = ..., disk: _Optional[_Iterable[int]] = ..., stored: _Optional[_Iterable[int]] = ..., not_stored: _Optional[_Iterable[int]] = ...) -> None: ...

class DescribeRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WorkerDescription(_message.Message):
    __slots__ = ("first_pool", "index", "incarnation", "model", "model_fingerprint", "layout_fingerprint", "kv_address", "block_size", "num_blocks", "max_model_len", "max_num_seqs", "max_num_batched_tokens", "dtype", "device", "pid", "metrics_address", "vocab_size", "vocabulary_fingerprint", "served_model_name", "revision", "content_root", "kv_token_bytes", "offload_blocks", "tensor_parallel_size", "attention_doubles_at", "num_layers", "numerics", "status", "weights", "adapters", "adapters_revision", "max_adapters", "group", "data_parallel_size", "image_fingerprint", "kept_image_tokens", "computes_on", "exchanges_prefixes")
    FIRST_POOL_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    MODEL_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    KV_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    MAX_NUM_SEQS_FIELD_NUMBER: _ClassVar[int]
    MAX_NUM_BATCHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    METRICS_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    VOCABULARY_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    SERVED_MODEL_NAME_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    CONTENT_ROOT_FIELD_NUMBER: _ClassVar[int]
    KV_TOKEN_BYTES_FIELD_NUMBER: _ClassVar[int]
    OFFLOAD_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    TENSOR_PARALLEL_SIZE_FIELD_NUMBER: _ClassVar[int]
    ATTENTION_DOUBLES_AT_FIELD_NUMBER: _ClassVar[int]
    NUM_LAYERS_FIELD_NUMBER: _ClassVar[int]
    NUMERICS_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    ADAPTERS_REVISION_FIELD_NUMBER: _ClassVar[int]
    MAX_ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    DATA_PARALLEL_SIZE_FIELD_NUMBER: _ClassVar[int]
    IMAGE_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    KEPT_IMAGE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMPUTES_ON_FIELD_NUMBER: _ClassVar[int]
    EXCHANGES_PREFIXES_FIELD_NUMBER: _ClassVar[int]
    first_pool: Pool
    index: int
    incarnation: int
    model: str
    model_fingerprint: str
    layout_fingerprint: str
    kv_address: str
    block_size: int
    num_blocks: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    dtype: str
    device: str
    pid: int
    metrics_address: str
    vocab_size: int
    vocabulary_fingerprint: str
    served_model_name: str
    revision: str
    content_root: bytes
    kv_token_bytes: int
    offload_blocks: int
    tensor_parallel_size: int
    attention_doubles_at: int
    num_layers: int
    numerics: str
    status: WorkerStatus
    weights: StageWeights
    adapters: _containers.RepeatedCompositeFieldContainer[Adapter]
    adapters_revision: int
    max_adapters: int
    group: str
    data_parallel_size: int
    image_fingerprint: str
    kept_image_tokens: int
    computes_on: _containers.RepeatedScalarFieldContainer[str]
    exchanges_prefixes: bool
    def __init__(self, first_pool: _Optional[_Union[Pool, str]] = ..., index: _Optional[int] = ..., incarnation: _Optional[int] = ..., model: _Optional[str] = ..., model_fingerprint: _Optional[str] = ..., layout_fingerprint: _Optional[str] = ..., kv_address: _Optional[str] = ..., block_size: _Optional[int] = ..., num_blocks: _Optional[int] = ..., max_model_len: _Optional[int] = ..., max_num_seqs: _Optional[int] = ..., max_num_batched_tokens: _Optional[int] = ..., dtype: _Optional[str] = ..., device: _Optional[str] = ..., pid: _Optional[int] = ..., metrics_address: _Optional[str] = ..., vocab_size: _Optional[int] = ..., vocabulary_fingerprint: _Optional[str] = ..., served_model_name: _Optional[str] = ..., revision: _Optional[str] = ..., content_root: _Optional[bytes] = ..., kv_token_bytes: _Optional[int] = ..., offload_blocks: _Optional[int] = ..., tensor_parallel_size: _Optional[int] = ..., attention_doubles_at: _Optional[int] = ..., num_layers: _Optional[int] = ..., numerics: _Optional[str] = ..., status: _Optional[_Union[WorkerStatus, _Mapping]] = ..., weights: _Optional[_Union[StageWeights, _Mapping]] = ..., adapters: _Optional[_Iterable[_Union[Adapter, _Mapping]]] = ..., adapters_revision: _Optional[int] = ..., max_adapters: _Optional[int] = ..., group: _Optional[str] = ..., data_parallel_size: _Optional[int] = ..., image_fingerprint: _Optional[str] = ..., kept_image_tokens: _Optional[int] = ..., computes_on: _Optional[_Iterable[str]] = ..., exchanges_prefixes: _Optional[bool] = ...) -> None: ...

class Adapter(_message.Message):
    __slots__ = ("name", "path", "fingerprint")
    NAME_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    name: str
    path: str
    fingerprint: bytes
    def __init__(self, name: _Optional[str] = ..., path: _Optional[str] = ..., fingerprint: _Optional[bytes] = ...) -> None: ...

class AdapterSet(_message.Message):
    __slots__ = ("revision", "replaces", "adapters")
    REVISION_FIELD_NUMBER: _ClassVar[int]
    REPLACES_FIELD_NUMBER: _ClassVar[int]
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    revision: int
    replaces: int
    adapters: _containers.RepeatedCompositeFieldContainer[Adapter]
    def __init__(self, revision: _Optional[int] = ..., replaces: _Optional[int] = ..., adapters: _Optional[_Iterable[_Union[Adapter, _Mapping]]] = ...) -> None: ...

class StatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class PauseRequest(_message.Message):
    __slots__ = ("pause", "abort", "seconds", "keep_kv")
    PAUSE_FIELD_NUMBER: _ClassVar[int]
    ABORT_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    KEEP_KV_FIELD_NUMBER: _ClassVar[int]
    pause: Pause
    abort: bool
    seconds: float
    keep_kv: bool
    def __init__(self, pause: _Optional[_Union[Pause, str]] = ..., abort: _Optional[bool] = ..., seconds: _Optional[float] = ..., keep_kv: _Optional[bool] = ...) -> None: ...

class RestartEngineRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class RestartedEngine(_message.Message):
    __slots__ = ("seconds",)
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    seconds: float
    def __init__(self, seconds: _Optional[float] = ...) -> None: ...

class MemoryRequest(_message.Message):
    __slots__ = ("release", "tags")
    RELEASE_FIELD_NUMBER: _ClassVar[int]
    TAGS_FIELD_NUMBER: _ClassVar[int]
    release: bool
    tags: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, release: _Optional[bool] = ..., tags: _Optional[_Iterable[str]] = ...) -> None: ...

class WeightsCommand(_message.Message):
    __slots__ = ("stage", "close", "apply", "version")
    STAGE_FIELD_NUMBER: _ClassVar[int]
    CLOSE_FIELD_NUMBER: _ClassVar[int]
    APPLY_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    stage: StageWeights
    close: bool
    apply: bool
    version: str
    def __init__(self, stage: _Optional[_Union[StageWeights, _Mapping]] = ..., close: _Optional[bool] = ..., apply: _Optional[bool] = ..., version: _Optional[str] = ...) -> None: ...

class StageWeights(_message.Message):
    __slots__ = ("path", "version", "named_at", "rolls", "fingerprint", "peer")
    PATH_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    NAMED_AT_FIELD_NUMBER: _ClassVar[int]
    ROLLS_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    PEER_FIELD_NUMBER: _ClassVar[int]
    path: str
    version: str
    named_at: int
    rolls: bool
    fingerprint: str
    peer: str
    def __init__(self, path: _Optional[str] = ..., version: _Optional[str] = ..., named_at: _Optional[int] = ..., rolls: _Optional[bool] = ..., fingerprint: _Optional[str] = ..., peer: _Optional[str] = ...) -> None: ...

class CheckpointRequest(_message.Message):
    __slots__ = ("version",)
    VERSION_FIELD_NUMBER: _ClassVar[int]
    version: str
    def __init__(self, version: _Optional[str] = ...) -> None: ...

class CheckpointPart(_message.Message):
    __slots__ = ("name", "size", "data")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    name: str
    size: int
    data: bytes
    def __init__(self, name: _Optional[str] = ..., size: _Optional[int] = ..., data: _Optional[bytes] = ...) -> None: ...

class WeightsReport(_message.Message):
    __slots__ = ("bytes", "seconds")
    BYTES_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    bytes: int
    seconds: float
    def __init__(self, bytes: _Optional[int] = ..., seconds: _Optional[float] = ...) -> None: ...

class PhasesRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class Phases(_message.Message):
    __slots__ = ("phases",)
    PHASES_FIELD_NUMBER: _ClassVar[int]
    phases: _containers.RepeatedCompositeFieldContainer[Phase]
    def __init__(self, phases: _Optional[_Iterable[_Union[Phase, _Mapping]]] = ...) -> None: ...

class Phase(_message.Message):
    __slots__ = ("kind", "start", "seconds", "about")
    class AboutEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    KIND_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    ABOUT_FIELD_NUMBER: _ClassVar[int]
    kind: str
    start: float
    seconds: float
    about: _containers.ScalarMap[str, float]
    def __init__(self, kind: _Optional[str] = ..., start: _Optional[float] = ..., seconds: _Optional[float] = ..., about: _Optional[_Mapping[str, float]] = ...) -> None: ...

class SetPoolRequest(_message.Message):
    __slots__ = ("pool",)
    POOL_FIELD_NUMBER: _ClassVar[int]
    pool: Pool
    def __init__(self, pool: _Optional[_Union[Pool, str]] = ...) -> None: ...

class PrefixLink(_message.Message):
    __slots__ = ("incarnation", "tier", "wait", "tokens_per_s")
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    WAIT_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    incarnation: int
    tier: Tier
    wait: float
    tokens_per_s: float
    def __init__(self, incarnation: _Optional[int] = ..., tier: _Optional[_Union[Tier, str]] = ..., wait: _Optional[float] = ..., tokens_per_s: _Optional[float] = ...) -> None: ...

class KvLink(_message.Message):
    __slots__ = ("incarnation", "bytes_per_s", "bytes_waiting", "used")
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    BYTES_WAITING_FIELD_NUMBER: _ClassVar[int]
    USED_FIELD_NUMBER: _ClassVar[int]
    incarnation: int
    bytes_per_s: float
    bytes_waiting: int
    used: float
    def __init__(self, incarnation: _Optional[int] = ..., bytes_per_s: _Optional[float] = ..., bytes_waiting: _Optional[int] = ..., used: _Optional[float] = ...) -> None: ...

class StepModel(_message.Message):
    __slots__ = ("rows", "decode_seconds", "context_seconds", "tokens", "prompt_seconds", "pair_seconds", "overlap", "decode_factor", "prompt_factor")
    ROWS_FIELD_NUMBER: _ClassVar[int]
    DECODE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    PAIR_SECONDS_FIELD_NUMBER: _ClassVar[int]
    OVERLAP_FIELD_NUMBER: _ClassVar[int]
    DECODE_FACTOR_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FACTOR_FIELD_NUMBER: _ClassVar[int]
    rows: _containers.RepeatedScalarFieldContainer[int]
    decode_seconds: _containers.RepeatedScalarFieldContainer[float]
    context_seconds: float
    tokens: _containers.RepeatedScalarFieldContainer[int]
    prompt_seconds: _containers.RepeatedScalarFieldContainer[float]
    pair_seconds: float
    overlap: float
    decode_factor: float
    prompt_factor: float
    def __init__(self, rows: _Optional[_Iterable[int]] = ..., decode_seconds: _Optional[_Iterable[float]] = ..., context_seconds: _Optional[float] = ..., tokens: _Optional[_Iterable[int]] = ..., prompt_seconds: _Optional[_Iterable[float]] = ..., pair_seconds: _Optional[float] = ..., overlap: _Optional[float] = ..., decode_factor: _Optional[float] = ..., prompt_factor: _Optional[float] = ...) -> None: ...

class WorkerStatus(_message.Message):
    __slots__ = ("health", "requests_running", "requests_waiting", "tokens_waiting", "tokens_of_others", "blocks_free", "blocks_total", "held_prefills", "reservations", "transfers_open", "arena_slots_free", "arena_slots_total", "prefill_tokens_per_s", "prefill_position", "step_seconds", "computed_prompt_tokens", "no_room", "pool", "long_chunk_tokens", "long_chunk_seconds", "kv_transports", "prefix_links", "host_tokens_per_s", "disk_tokens_per_s", "store_tokens_per_s", "store", "requests_decoding", "fastest_step_seconds", "generation_tokens", "kv_transfers", "kv_bytes", "handovers", "handovers_hidden", "prefix_cache_queries", "prefix_cache_hits", "prefix_fetched_tokens", "store_fetched_tokens", "host_loaded_tokens", "disk_loaded_tokens", "draft_tokens", "accepted_draft_tokens", "step_model", "decode_context", "gap_target_seconds", "mixed_step_tokens", "gap_cost", "blocks_spare", "kv_memory_bytes", "state_memory_bytes", "window_memory_bytes", "images_waiting", "images_encoded", "encode_token_seconds", "encode_queue_seconds", "adapters_on_device", "adapter_move_seconds", "pause", "released", "lost_weights", "standby", "standby_memory_bytes", "staged_version", "idle", "kv_links", "kv_sent")
    class Health(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        HEALTH_UNSPECIFIED: _ClassVar[WorkerStatus.Health]
        HEALTH_SERVING: _ClassVar[WorkerStatus.Health]
        HEALTH_DRAINING: _ClassVar[WorkerStatus.Health]
    HEALTH_UNSPECIFIED: WorkerStatus.Health
    HEALTH_SERVING: WorkerStatus.Health
    HEALTH_DRAINING: WorkerStatus.Health
    class KvTransportsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    class KvSentEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    HEALTH_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_RUNNING_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_WAITING_FIELD_NUMBER: _ClassVar[int]
    TOKENS_WAITING_FIELD_NUMBER: _ClassVar[int]
    TOKENS_OF_OTHERS_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FREE_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    HELD_PREFILLS_FIELD_NUMBER: _ClassVar[int]
    RESERVATIONS_FIELD_NUMBER: _ClassVar[int]
    TRANSFERS_OPEN_FIELD_NUMBER: _ClassVar[int]
    ARENA_SLOTS_FREE_FIELD_NUMBER: _ClassVar[int]
    ARENA_SLOTS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    PREFILL_TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    PREFILL_POSITION_FIELD_NUMBER: _ClassVar[int]
    STEP_SECONDS_FIELD_NUMBER: _ClassVar[int]
    COMPUTED_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NO_ROOM_FIELD_NUMBER: _ClassVar[int]
    POOL_FIELD_NUMBER: _ClassVar[int]
    LONG_CHUNK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LONG_CHUNK_SECONDS_FIELD_NUMBER: _ClassVar[int]
    KV_TRANSPORTS_FIELD_NUMBER: _ClassVar[int]
    PREFIX_LINKS_FIELD_NUMBER: _ClassVar[int]
    HOST_TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    DISK_TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    STORE_TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    STORE_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_DECODING_FIELD_NUMBER: _ClassVar[int]
    FASTEST_STEP_SECONDS_FIELD_NUMBER: _ClassVar[int]
    GENERATION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    KV_TRANSFERS_FIELD_NUMBER: _ClassVar[int]
    KV_BYTES_FIELD_NUMBER: _ClassVar[int]
    HANDOVERS_FIELD_NUMBER: _ClassVar[int]
    HANDOVERS_HIDDEN_FIELD_NUMBER: _ClassVar[int]
    PREFIX_CACHE_QUERIES_FIELD_NUMBER: _ClassVar[int]
    PREFIX_CACHE_HITS_FIELD_NUMBER: _ClassVar[int]
    PREFIX_FETCHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STORE_FETCHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    HOST_LOADED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DISK_LOADED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STEP_MODEL_FIELD_NUMBER: _ClassVar[int]
    DECODE_CONTEXT_FIELD_NUMBER: _ClassVar[int]
    GAP_TARGET_SECONDS_FIELD_NUMBER: _ClassVar[int]
    MIXED_STEP_TOKENS_FIELD_NUMBER: _ClassVar[int]
    GAP_COST_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_SPARE_FIELD_NUMBER: _ClassVar[int]
    KV_MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    STATE_MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    WINDOW_MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    IMAGES_WAITING_FIELD_NUMBER: _ClassVar[int]
    IMAGES_ENCODED_FIELD_NUMBER: _ClassVar[int]
    ENCODE_TOKEN_SECONDS_FIELD_NUMBER: _ClassVar[int]
    ENCODE_QUEUE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    ADAPTERS_ON_DEVICE_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_MOVE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    PAUSE_FIELD_NUMBER: _ClassVar[int]
    RELEASED_FIELD_NUMBER: _ClassVar[int]
    LOST_WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    STANDBY_FIELD_NUMBER: _ClassVar[int]
    STANDBY_MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    STAGED_VERSION_FIELD_NUMBER: _ClassVar[int]
    IDLE_FIELD_NUMBER: _ClassVar[int]
    KV_LINKS_FIELD_NUMBER: _ClassVar[int]
    KV_SENT_FIELD_NUMBER: _ClassVar[int]
    health: WorkerStatus.Health
    requests_running: int
    requests_waiting: int
    tokens_waiting: int
    tokens_of_others: int
    blocks_free: int
    blocks_total: int
    held_prefills: int
    reservations: int
    transfers_open: int
    arena_slots_free: int
    arena_slots_total: int
    prefill_tokens_per_s: float
    prefill_position: float
    step_seconds: float
    computed_prompt_tokens: int
    no_room: int
    pool: Pool
    long_chunk_tokens: int
    long_chunk_seconds: float
    kv_transports: _containers.ScalarMap[str, str]
    prefix_links: _containers.RepeatedCompositeFieldContainer[PrefixLink]
    host_tokens_per_s: float
    disk_tokens_per_s: float
    store_tokens_per_s: float
    store: str
    requests_decoding: int
    fastest_step_seconds: float
    generation_tokens: int
    kv_transfers: int
    kv_bytes: int
    handovers: int
    handovers_hidden: float
    prefix_cache_queries: int
    prefix_cache_hits: int
    prefix_fetched_tokens: int
    store_fetched_tokens: int
    host_loaded_tokens: int
    disk_loaded_tokens: int
    draft_tokens: int
    accepted_draft_tokens: int
    step_model: StepModel
    decode_context: int
    gap_target_seconds: float
    mixed_step_tokens: int
    gap_cost: float
    blocks_spare: int
    kv_memory_bytes: int
    state_memory_bytes: int
    window_memory_bytes: int
    images_waiting: int
    images_encoded: int
    encode_token_seconds: float
    encode_queue_seconds: float
    adapters_on_device: _containers.RepeatedScalarFieldContainer[bytes]
    adapter_move_seconds: float
    pause: Pause
    released: _containers.RepeatedScalarFieldContainer[str]
    lost_weights: bool
    standby: str
    standby_memory_bytes: int
    staged_version: str
    idle: bool
    kv_links: _containers.RepeatedCompositeFieldContainer[KvLink]
    kv_sent: _containers.ScalarMap[str, int]
    def __init__(self, health: _Optional[_Union[WorkerStatus.Health, str]] = ..., requests_running: _Optional[int] = ..., requests_waiting: _Optional[int] = ..., tokens_waiting: _Optional[int] = ..., tokens_of_others: _Optional[int] = ..., blocks_free: _Optional[int] = ..., blocks_total: _Optional[int] = ..., held_prefills: _Optional[int] = ..., reservations: _Optional[int] = ..., transfers_open: _Optional[int] = ..., arena_slots_free: _Optional[int] = ..., arena_slots_total: _Optional[int] = ..., prefill_tokens_per_s: _Optional[float] = ..., prefill_position: _Optional[float] = ..., step_seconds: _Optional[float] = ..., computed_prompt_tokens: _Optional[int] = ..., no_room: _Optional[int] = ..., pool: _Optional[_Union[Pool, str]] = ..., long_chunk_tokens: _Optional[int] = ..., long_chunk_seconds: _Optional[float] = ..., kv_transports: _Optional[_Mapping[str, str]] = ..., prefix_links: _Optional[_Iterable[_Union[PrefixLink, _Mapping]]] = ..., host_tokens_per_s: _Optional[float] = ..., disk_tokens_per_s: _Optional[float] = ..., store_tokens_per_s: _Optional[float] = ..., store: _Optional[str] = ..., requests_decoding: _Optional[int] = ..., fastest_step_seconds: _Optional[float] = ..., generation_tokens: _Optional[int] = ..., kv_transfers: _Optional[int] = ..., kv_bytes: _Optional[int] = ..., handovers: _Optional[int] = ..., handovers_hidden: _Optional[float] = ..., prefix_cache_queries: _Optional[int] = ..., prefix_cache_hits: _Optional[int] = ..., prefix_fetched_tokens: _Optional[int] = ..., store_fetched_tokens: _Optional[int] = ..., host_loaded_tokens: _Optional[int] = ..., disk_loaded_tokens: _Optional[int] = ..., draft_tokens: _Optional[int] = ..., accepted_draft_tokens: _Optional[int] = ..., step_model: _Optional[_Union[StepModel, _Mapping]] = ..., decode_context: _Optional[int] = ..., gap_target_seconds: _Optional[float] = ..., mixed_step_tokens: _Optional[int] = ..., gap_cost: _Optional[float] = ..., blocks_spare: _Optional[int] = ..., kv_memory_bytes: _Optional[int] = ..., state_memory_bytes: _Optional[int] = ..., window_memory_bytes: _Optional[int] = ..., images_waiting: _Optional[int] = ..., images_encoded: _Optional[int] = ..., encode_token_seconds: _Optional[float] = ..., encode_queue_seconds: _Optional[float] = ..., adapters_on_device: _Optional[_Iterable[bytes]] = ..., adapter_move_seconds: _Optional[float] = ..., pause: _Optional[_Union[Pause, str]] = ..., released: _Optional[_Iterable[str]] = ..., lost_weights: _Optional[bool] = ..., standby: _Optional[str] = ..., standby_memory_bytes: _Optional[int] = ..., staged_version: _Optional[str] = ..., idle: _Optional[bool] = ..., kv_links: _Optional[_Iterable[_Union[KvLink, _Mapping]]] = ..., kv_sent: _Optional[_Mapping[str, int]] = ...) -> None: ...
