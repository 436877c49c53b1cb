"""Every setting of the server, with its unit and meaning.

A setting comes from a flag of ``offramp serve``, else from the environment variable ``OFFRAMP_<NAME>``, else from the
default below. Bad settings stop the start with one line; nothing is left to fail at the first request.
"""

import math
import os
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, SecretStr, ValidationError, field_validator, model_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from models.bundle import SHIPPED_BUNDLE, Bundle, BundleError, Precision
from server.engine.order import OrderName

# No setting of max_inputs goes beyond it, so that a list can be refused at its first element too many: checking the
# half million texts, or the million numbers in their place, that fit into 2 MB held up the event loop for seconds.
MOST_INPUTS = 4096


class StartError(Exception):
    """The server cannot start; the message is the one line that the person who started it reads."""


class Settings(BaseSettings):
    """Settings of a server. Build it with :func:`load_settings`, which words its errors for people."""

    model_config = SettingsConfigDict(env_prefix="OFFRAMP_", frozen=True, extra="forbid", env_ignore_empty=True)

    bundles: Annotated[tuple[Path, ...], NoDecode] = Field(
        default=(),
        description=f"bundle folders to serve, the first is the default model; in the environment separated by "
        f"'{os.pathsep}'; none means the shipped bundle",
    )
    host: str = Field(default="127.0.0.1", min_length=1, description="address to listen on; 0.0.0.0 for all")
    port: int = Field(default=8000, ge=0, le=65535, description="TCP port; 0 takes a free one and logs it")

    device: str = Field(
        default="auto",
        pattern=r"^(auto|cpu|cuda|cuda:[0-9]{1,3}(,cuda:[0-9]{1,3})*)$",
        description="auto takes CUDA where it works, else the CPU; cuda or cuda:<n> fails at start where it does not; "
        "cuda:0,cuda:1 deals several GPUs out to as many workers",
    )
    precision: Precision | None = Field(default=None, description="graphs to run; none means each bundle's default")
    workers: int | None = Field(
        default=None,
        ge=1,
        le=256,
        description="server processes that share the port and the CPU allowance; each has models, and queues, of its "
        "own. none means one for each GPU that device names, and on the CPU as many as suit the CPUs, the memory and "
        "the models' sizes",
    )
    runs: int | None = Field(
        default=None,
        ge=1,
        le=1024,
        description="runs of segments that go on at once in a process, of all its models together; none fits them to "
        "the CPU allowance",
    )
    threads: int | None = Field(
        default=None,
        ge=1,
        le=1024,
        description="CPU threads inside one run while others run; none fits them to the CPU allowance",
    )
    lone_threads: int | None = Field(
        default=None,
        ge=1,
        le=1024,
        description="CPU threads inside a run that has the machine to itself (where that is more than threads, a "
        "second set of sessions); none measures what helps, up to half of the CPUs and 8",
    )
    measure_seconds: float = Field(
        default=0.4,
        ge=0,
        le=600,
        allow_inf_nan=False,
        description="about how long the start may measure how long runs take, per model; from it deadlines that cannot "
        "be met are known. 0 measures nothing",
    )
    max_batch_tokens: int | None = Field(
        default=None,
        ge=1,
        le=1_048_576,
        description="tokens of one micro-batch (a longer single text runs alone); "
        "none means 512 on the CPU and 8192 on CUDA",
    )
    order: OrderName = Field(
        default="oldest",
        description="which texts a free worker takes first: the oldest, those furthest on, where most answers a second "
        "are expected, or the largest micro-batch; none lets a text starve",
    )
    max_batch_texts: int | None = Field(
        default=None, ge=1, le=4096, description="texts of one micro-batch; none means 32 on the CPU and 256 on CUDA"
    )
    gpu_memory_bytes: int | None = Field(
        default=None,
        ge=1,
        description="bytes of GPU memory that a model's weights, states and runs may take with fp16 graphs (what CUDA "
        "itself takes comes on top); none means no limit of its own",
    )

    default_quality: float = Field(
        default=0.99,
        gt=0,
        le=1,
        allow_inf_nan=False,
        description="agreement with the last exit promised to requests that choose no depth; where the bundle has no "
        "such certified tier they run to the last exit",
    )
    deadline_ms: float | None = Field(
        default=None,
        gt=0,
        le=600_000,
        allow_inf_nan=False,
        description="milliseconds after which a request without deadline_ms is answered from its latest exit; "
        "none means no deadline",
    )

    max_queue: int = Field(
        default=1024,
        ge=1,
        description="texts accepted and not yet answered, per model and process; beyond it requests get 429",
    )
    max_wait_seconds: float = Field(
        default=0.5,
        gt=0,
        le=3600,
        allow_inf_nan=False,
        description="predicted seconds of work before a newcomer, per model; beyond it, and with more than 32 requests "
        "in work in a process, requests get 429 (needs measure_seconds)",
    )
    shadow_rate: float = Field(
        default=0.005,
        ge=0,
        le=1,
        allow_inf_nan=False,
        description="share of the answers under a certified quality that are checked against the last exit; early ones "
        "run on to it afterwards, behind all other work",
    )
    shadow_fall_back: bool = Field(
        default=False,
        description="serve a certified quality at full depth once shadow checks say that its promise is broken",
    )
    max_inputs: int = Field(default=128, ge=1, le=MOST_INPUTS, description="texts of one request; beyond it 413")
    max_body_bytes: int = Field(default=2 * 1024 * 1024, ge=1024, description="bytes of a request body; beyond it 413")
    max_characters: int = Field(
        default=100_000, ge=1, description="characters of one text (and of one text_pair); beyond it 413"
    )

    log_level: Literal["debug", "info", "warning", "error"] = Field(
        default="info", description="least severe level that is logged; no level ever logs a text"
    )
    access_log: bool = Field(default=False, description="log one line for every request")
    shutdown_delay_seconds: float = Field(
        default=0.0,
        ge=0,
        le=600,
        allow_inf_nan=False,
        description="seconds to go on serving after SIGTERM with readiness off, so that load balancers notice",
    )
    drain_seconds: float = Field(
        default=30.0,
        ge=0,
        le=3600,
        allow_inf_nan=False,
        description="most seconds to finish accepted work once connections are no longer accepted",
    )

    api_key: Annotated[tuple[SecretStr, ...], NoDecode] = Field(
        default=(),
        description="key that requests must carry as `Authorization: Bearer <key>`; the flag can be repeated, in the "
        "environment keys are separated by commas; none (and no api_key_file) means that no key is asked for. A flag "
        "shows in the machine's process list, the variable and the file do not",
    )
    api_key_file: Path | None = Field(
        default=None, description="file with further keys, one a line; empty lines and lines that begin with # are none"
    )
    admin: Literal["keyed", "open", "off"] = Field(
        default="keyed",
        description="who may POST to /admin/...: keyed, whoever has a key, and nobody where none is asked for; open, "
        "everybody where none is asked for; off, nobody",
    )
    metrics_port: int | None = Field(
        default=None,
        ge=0,
        le=65535,
        description="TCP port of its own for /metrics, which then leaves the other one; 0 takes a free one and logs it",
    )
    cors_allow_origin: Annotated[tuple[str, ...], NoDecode] = Field(
        default=(),
        description="origin (https://app.example) whose pages may call this server, or * for all; the flag can be "
        "repeated, in the environment origins are separated by commas; none means no CORS headers",
    )
    max_tokens: int | None = Field(
        default=None,
        ge=8,
        description="tokens of one text, special ones included; longer ones are cut, or get 413 with truncate false; "
        "none, or more than the model takes, means what the model takes",
    )
    max_concurrent_requests: int = Field(
        default=1024,
        ge=1,
        description="classification requests in work, their bodies included, each process its share of them; beyond "
        "it 429",
    )
    request_timeout_seconds: float = Field(
        default=30.0,
        gt=0,
        le=3600,
        allow_inf_nan=False,
        description="most seconds for the head of a request to arrive, and again for its body; a slower body gets 408",
    )
    keep_alive_seconds: int = Field(
        default=75,
        ge=1,
        le=86_400,
        description="seconds after which a connection without requests is closed; more than the balancer in front "
        "keeps its own (nginx and AWS: 60), or it now and then sends a request to a connection that is being closed",
    )
    log_format: Literal["text", "json"] = Field(
        default="text", description="log lines for people, or one JSON object a line"
    )
    tracing: bool = Field(
        default=False,
        description="send traces of requests to an OpenTelemetry collector (needs the extra otel); where to, how many "
        "and under which name is said by OpenTelemetry's own OTEL_* variables",
    )

    @field_validator("bundles", mode="before")
    @classmethod
    def _split(cls, value: object) -> object:
        if isinstance(value, str):
            return tuple(part for part in value.split(os.pathsep) if part)
        return value

    @field_validator("api_key", "cors_allow_origin", mode="before")
    @classmethod
    def _split_at_commas(cls, value: object) -> object:
        if isinstance(value, str):
            return tuple(part.strip() for part in value.split(",") if part.strip())
        return value

    @field_validator("api_key")
    @classmethod
    def _sendable(cls, value: tuple[SecretStr, ...]) -> tuple[SecretStr, ...]:
        for key in value:
            check_key(key.get_secret_value())
        return value

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.max_inputs > self.max_queue:
            raise ValueError(
                f"max_inputs {self.max_inputs} exceeds max_queue {self.max_queue}: a full request would never fit"
            )
        return self

    @model_validator(mode="after")
    def _worker_for_each_device(self) -> Self:
        devices = self.device.split(",")
        if self.workers is not None and len(devices) > self.workers:
            raise ValueError(f"device names {len(devices)} GPUs for {self.workers} workers; each needs one of its own")
        return self

    def for_worker(self, number: int) -> "Settings":
        """The settings of the process with this ``number``: its device, and its share of the requests in work, whose
        bodies have to fit into the memory of all."""
        most = math.ceil(self.max_concurrent_requests / (self.workers or 1))
        return self.model_copy(update={"device": self.device_of(number), "max_concurrent_requests": most})

    def device_of(self, worker: int) -> str:
        """The device that the process numbered ``worker`` takes."""
        devices = self.device.split(",")
        return devices[worker % len(devices)]

    @property
    def bundle_paths(self) -> tuple[Path, ...]:
        """The bundles to serve: those named, else the shipped one."""
        return self.bundles or (SHIPPED_BUNDLE,)


def check_key(key: str) -> None:
    """Raises ``ValueError`` where ``key`` cannot stand in a header: it never says the key."""
    if not key or not key.isascii() or not key.isprintable() or " " in key:
        raise ValueError("a key is one or more printable ASCII characters without spaces")


def load_settings(**flags: Any) -> Settings:
    """Settings from ``flags`` (those that are not ``None``), the environment and the defaults.

    Raises :class:`StartError`, naming the setting and its environment variable, where a value is not allowed; the
    message never says a key.
    """
    given = {name: value for name, value in flags.items() if value is not None}
    try:
        return Settings(**given)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        if not first["loc"]:
            raise StartError(f"settings: {first['msg'].removeprefix('Value error, ')}") from None
        name = str(first["loc"][0])
        if name == "api_key":
            # Whatever is wrong with it, the log is no place for a key.
            raise StartError(f"setting --api-key or OFFRAMP_API_KEY: {first['msg']}") from None
        variable = f"OFFRAMP_{name.upper()}"
        source = f"--{name.replace('_', '-')}" if name in given else variable
        hint = ""
        if name == "port" and str(first["input"]).startswith("tcp://"):
            # Kubernetes injects OFFRAMP_PORT=tcp://... into pods beside a Service named "offramp".
            hint = " (set by a Kubernetes Service named offramp: use enableServiceLinks: false)"
        raise StartError(f"setting {source}: {first['msg']}, got {first['input']!r}{hint}") from None


def load_bundles(settings: Settings) -> list[Bundle]:
    """The bundles that ``settings`` name, verified. Raises :class:`StartError`."""
    try:
        return [Bundle.load(path) for path in settings.bundle_paths]
    except BundleError as error:
        raise StartError(str(error)) from None


def unknown_variables(environment: dict[str, str]) -> list[str]:
    """Names in ``environment`` that look like settings and are none: most likely typing errors."""
    known = {f"OFFRAMP_{name.upper()}" for name in Settings.model_fields}
    return sorted(name for name in environment if name.startswith("OFFRAMP_") and name not in known)
