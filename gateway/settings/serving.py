"""Models, the backends that serve them, and the engines that Tierline brings along."""

from __future__ import annotations

import functools
from decimal import Decimal
from typing import Literal, Self
from urllib.parse import urlsplit

from pydantic import Field, model_validator

from backends.protocol import OutputLimitField
from gateway.settings.placing import PlacementSettings, ReplicaSettings, Role, check_placement
from gateway.settings.strict import BackendName, BaseUrl, HeaderName, HeaderValue, ModelName, PriceVersion, Strict
from tiers.language import Language

TierName = Literal["small", "medium", "large", "xlarge"]
Capability = Literal["tools", "vision", "json_schema", "logprobs", "reasoning", "prefill", "audio"]


class Price(Strict):
    """What a model costs, in US dollars per million tokens, with the name of its version for the ledger."""

    version: PriceVersion = "local-1"
    input_usd_per_million: Decimal = Field(ge=0)
    output_usd_per_million: Decimal = Field(ge=0)
    cached_input_usd_per_million: Decimal | None = Field(None, ge=0, description="Default: the input price.")
    batch_factor: Decimal | None = Field(None, ge=0, le=1, description="Of it, what lines of a batch pay; default: 1.")


class ModelSettings(Strict):
    """One public model name and where it is served. `price` overrides the bundled price list."""

    kind: Literal["chat", "embedding", "rerank"] = "chat"
    tier: TierName | None = Field(None, description="Of a chat model; the others have none.")
    backend: BackendName
    upstream_model: ModelName | None = Field(None, description="The backend's name of the model; default: the same.")
    parameters_billion: float | None = Field(None, gt=0)
    context_length: int = Field(8192, ge=128)
    max_output_tokens: int | None = Field(None, ge=1)
    capabilities: frozenset[Capability] = frozenset()
    languages: frozenset[Language] = Field(
        frozenset(), description="Those that it knows, such as en and zh; default: all, as far as anybody can tell."
    )
    price: Price | None = None
    price_as: str | None = Field(None, description="PROVIDER:MODEL in the bundled price list, such as openai:gpt-4o.")

    @model_validator(mode="after")
    def _tier_of_chat(self) -> Self:
        if (self.kind == "chat") != (self.tier is not None):
            raise ValueError("a chat model needs a 'tier'" if self.kind == "chat" else "only a chat model has a 'tier'")
        return self

    def knows(self, language: str) -> bool:
        """Whether it can be asked in a language."""
        return not self.languages or language in self.languages

    @property
    def shown_tier(self) -> str:
        """What ledger and headers say: the tier, or the kind of a model that has none."""
        return self.tier or self.kind


class Timeouts(Strict):
    """Deadlines of one attempt, in seconds."""

    connect_s: float = Field(2.0, gt=0)
    first_token_s: float = Field(60.0, gt=0)
    between_tokens_s: float = Field(30.0, gt=0)
    total_s: float = Field(600.0, gt=0)


class HedgeSettings(Strict):
    """A second request beside a stream that is slow to begin; the first answer counts, the other is cancelled."""

    after_quantile: float = Field(
        0.95, gt=0, lt=1, description="Of the backend's recent first-content times: then the second request goes out."
    )
    max_share: float = Field(0.05, gt=0, le=1, description="Most hedges per stream: what hedging may cost.")
    min_delay_s: float = Field(0.05, ge=0, description="Never hedge sooner than this.")


class BackendSettings(Strict):
    """A server that serves models: `engine` (the bundled one, by name), `embedder` (the cache's), `base_urls`, or
    `replicas` that differ."""

    engine: str | None = None
    embedder: bool = Field(False, description="The cache process's embedding model; needs cache.embeddings_port.")
    base_urls: tuple[BaseUrl, ...] = ()
    replicas: tuple[ReplicaSettings, ...] = ()
    placement: PlacementSettings = PlacementSettings()
    dialect: Literal["openai", "anthropic"] = Field("openai", description="The API that the servers speak.")
    output_limit_field: OutputLimitField | None = Field(
        None, description="What they call the most tokens of a chat answer; default: what the client calls it."
    )
    flex: bool | None = Field(
        None, description="Whether they know the service tier flex; default: OpenAI's own do, others do not."
    )
    api_key_env: str | None = Field(None, description="Environment variable that holds the backend's API key.")
    headers: dict[HeaderName, HeaderValue] = Field({})
    max_outstanding: int = Field(256, ge=1, description="Requests at once per replica.")
    max_queued: int = Field(256, ge=0, description="Requests that may wait for a replica when all are busy.")
    queue_timeout_s: float = Field(10.0, gt=0, description="How long one of them waits.")
    attempts: int = Field(2, ge=1, le=10, description="Tries per candidate, before the next candidate.")
    retry_share: float = Field(0.2, ge=0, le=1, description="Most retries per request, over all requests.")
    hedge: HedgeSettings | None = Field(None, description="Off unless given.")
    timeouts: Timeouts = Timeouts()

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if [bool(self.engine), self.embedder, bool(self.base_urls), bool(self.replicas)].count(True) != 1:
            raise ValueError("give either 'engine', 'embedder: true', 'base_urls' or 'replicas'")
        check_placement(self.replicas, self.placement)
        if any(replica.role == "prefill" for replica in self.replicas):
            if self.dialect != "openai":
                raise ValueError("only bundled engines have roles, and they speak the dialect openai")
            if self.placement.prefill_timeout_s >= self.timeouts.first_token_s:
                raise ValueError(
                    "placement.prefill_timeout_s must be below timeouts.first_token_s, which it is part of"
                )
        if self.dialect != "openai" and (self.embedder or self.engines):
            raise ValueError("the bundled engine and embedder speak the dialect openai")
        if self.output_limit_field and (self.dialect != "openai" or self.embedder):
            raise ValueError("only servers of the dialect openai that chat have an 'output_limit_field'")
        if self.flex and (self.dialect != "openai" or not self.urls):
            raise ValueError("only servers of the dialect openai that have an address can know 'flex'")
        if len({name.lower() for name in self.headers}) < len(self.headers):
            raise ValueError("'headers' has a name twice: upper and lower case are the same")
        return self

    @functools.cached_property
    def engines(self) -> tuple[str, ...]:
        """The bundled engines that serve it, by name."""
        if self.engine is not None:
            return (self.engine,)
        return tuple(replica.engine for replica in self.replicas if replica.engine is not None)

    @functools.cached_property
    def roles(self) -> dict[str, Role]:
        """What each of its bundled engines does."""
        return {replica.engine: replica.role for replica in self.replicas if replica.engine is not None}

    @functools.cached_property
    def urls(self) -> tuple[str, ...]:
        """The addresses that the file names."""
        return self.base_urls or tuple(replica.url for replica in self.replicas if replica.url is not None)

    @functools.cached_property
    def limits_output_by(self) -> OutputLimitField | None:
        """The field for the most tokens of a chat answer: `output_limit_field`, or what OpenAI's own servers want."""
        if self.output_limit_field is None and self.dialect == "openai" and self.urls:
            hosts = [urlsplit(url).hostname or "" for url in self.urls]
            if all(host == "api.openai.com" or host.endswith(".openai.azure.com") for host in hosts):
                return "max_completion_tokens"
        return self.output_limit_field

    @functools.cached_property
    def knows_flex(self) -> bool:
        """Whether `service_tier: flex` is passed on: as `flex` says, or to OpenAI's own servers."""
        if self.flex is not None:
            return self.flex
        return bool(self.urls) and all(urlsplit(url).hostname == "api.openai.com" for url in self.urls)


class SamplingDefaults(Strict):
    """What counts where a request names no value; the defaults are the API's."""

    temperature: float = Field(1.0, ge=0, le=2)
    top_p: float = Field(1.0, ge=0, le=1)


ToolParser = Literal[
    "auto", "qwen3_coder", "pythonic", "mistral", "llama3", "phi4", "gemma", "hermes", "harmony"
]  # the engine's, which the gateway does not import


class EngineSettings(Strict):
    """One bundled engine process, started by `tierline up`."""

    model: str = Field(description="A pulled model's name, or the path of a GGUF file or a Hugging Face folder.")
    host: str = "127.0.0.1"
    port: int = Field(8101, ge=0, le=65535)
    threads: int | None = Field(None, ge=1)
    tensor_parallel: int = Field(1, ge=1, le=64, description="Processes that share each block of the model.")
    pipeline_parallel: int = Field(1, ge=1, le=64, description="Stages that the model's blocks are divided into.")
    max_model_len: int | None = Field(None, ge=128)
    max_num_seqs: int = Field(64, ge=1)
    max_num_batched_tokens: int = Field(512, ge=16)
    kv_cache_bytes: int | None = Field(None, ge=1 << 20)
    kv_host_bytes: int | None = Field(None, ge=1 << 20, description="Of a second pool, for pages that are evicted.")
    kv_host_dir: str | None = Field(None, description="Folder of that pool's file; by default memory, with a GPU.")
    kv_redis_bytes: int = Field(4 << 30, ge=1 << 20, description="Of pages where TIERLINE_KV_REDIS_URL is set.")
    kv_redis_ttl_seconds: int = Field(3600, ge=1, description="How long a page that nobody uses stays there.")
    kv_listen: str | None = Field(
        None,
        description="Where others fetch its pages; tierline up chooses a place on this host where a role needs one.",
    )
    kv_address: str | None = Field(None, description="Under which they reach that, where it is another.")
    kv_outbox_bytes: int = Field(1 << 30, ge=1 << 20, description="Of pages that it offers to others.")
    kv_peers: tuple[str, ...] = Field((), description="Further engines whose pages it may fetch, by kv_address.")
    target_tpot_ms: float | None = Field(
        None, ge=0.1, le=60_000, description="Keep steps so short that an answer gets its next token within this time."
    )
    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    kv_dtype: Literal["auto", "fp8"] = Field("auto", description="Of keys and values; fp8, on a GPU, takes half.")
    graphs: bool = Field(True, description="On a GPU, record steps before the first request and replay them.")
    deterministic: bool = Field(False, description="On a GPU, a row's result does not depend on the rows beside it.")
    overlap: bool = Field(False, description="Choose and prepare the next step while the device works on this one.")
    trace: str | None = Field(None, description="File for the time of each step, for chrome://tracing.")
    task: Literal["auto", "generate", "embed", "score"] = Field(
        "auto", description="What to do with texts; auto: what the model is made for. One engine has one task."
    )
    max_batch_size: int = Field(8, ge=1, description="Texts to embed or score that wait for no further ones.")
    max_wait_ms: float = Field(2.0, ge=0, le=10_000, description="How long such a text may wait for others.")
    speculative: Literal["off", "ngram", "draft", "eagle3"] = Field(
        "off",
        description="Propose tokens and check several in one step: by look-up, by a draft model or by an EAGLE-3 head.",
    )
    num_speculative_tokens: int = Field(4, ge=1, le=32, description="Of one request in one step, at most.")
    draft_model: str | None = Field(
        None, description="With `draft` a small model of the same vocabulary; with `eagle3` the folder of the head."
    )
    lora: dict[ModelName, str] = Field({}, description="Folders of PEFT adapters by the names they are served under.")
    lora_dir: str | None = Field(None, description="Below it lie adapters that may be loaded while the engine runs.")
    max_loras: int = Field(
        4, ge=1, description="Adapters at a time; memory is kept for so many, and with lora_dir for one more."
    )
    max_lora_rank: int = Field(16, ge=1, description="The largest rank of an adapter.")
    tool_parser: ToolParser = Field("auto", description="Form of tool calls; auto: by the model's chat template.")
    reasoning_parser: Literal["auto", "none", "think", "harmony"] = Field(
        "auto", description="Form of thoughts, which are told apart from the answer; auto: by the chat template."
    )
    sampling: SamplingDefaults = SamplingDefaults()
    autostart: bool = True

    @model_validator(mode="after")
    def _settings_that_belong_together(self) -> EngineSettings:
        if (self.draft_model is not None) != (self.speculative in ("draft", "eagle3")):
            raise ValueError("'speculative: draft' or 'eagle3' and 'draft_model' need each other")
        parsers = (self.tool_parser, self.reasoning_parser)
        if "auto" not in parsers and parsers.count("harmony") == 1:
            raise ValueError("harmony is one form for 'tool_parser' and 'reasoning_parser': choose it for both")
        return self

    @model_validator(mode="after")
    def _what_parts_of_a_model_cannot_have(self) -> EngineSettings:
        if self.tensor_parallel * self.pipeline_parallel == 1:
            return self
        asked = {
            "lora": bool(self.lora),
            "lora_dir": self.lora_dir is not None,
            "kv_host_bytes": self.kv_host_bytes is not None,
            "kv_listen": self.kv_listen is not None,
            "speculative: eagle3": self.speculative == "eagle3",
        }
        if refused := [name for name, is_asked in asked.items() if is_asked]:
            raise ValueError(f"'{refused[0]}' does not go with 'tensor_parallel' or 'pipeline_parallel'")
        return self

    @model_validator(mode="after")
    def _room_for_its_adapters(self) -> EngineSettings:
        if len(self.lora) > self.max_loras:
            raise ValueError(f"'lora' names {len(self.lora)} adapters, 'max_loras' allows {self.max_loras}")
        return self


class FailoverSettings(Strict):
    """Bounds of one request, over all its candidates, attempts and waits."""

    max_attempts: int = Field(6, ge=1, le=100)
    total_s: float = Field(900.0, gt=0, description="From the first attempt to the end of the answer.")
