"""Settings of every process. Read once at start, from EPILORA_* variables; passed on by constructor.

`epilora serve` sets these variables for its children; in Kubernetes a ConfigMap does.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

from pydantic import Field, SecretStr, ValidationInfo, field_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from epilora.errors import InvalidArgumentError

MAX_PORT = 65535


class CommonSettings(BaseSettings):
    """What more than one process needs to agree on."""

    model_config = SettingsConfigDict(env_prefix="EPILORA_", frozen=True, extra="ignore")

    model: Path
    """Directory of the Hugging Face checkpoint (config.json, *.safetensors, tokenizer files)."""
    num_ranks: int = Field(default=1, ge=1)
    """EP ranks in the group, G."""
    run_dir: Path = Path("/tmp/epilora")
    """Directory for Unix sockets."""
    worker_address: str = "unix:{run_dir}/worker-{ep_rank}.sock"
    """Address of a worker; {run_dir}, {ep_rank} and {port} (worker_base_port + ep_rank) are filled in."""
    worker_base_port: int = 50100
    """See worker_address."""
    loader_address: str = "unix:{run_dir}/loader.sock"
    """Address of the loader; {run_dir} is filled in."""
    worker_listen: str = ""
    """Address a worker listens on, filled in like worker_address; empty: worker_address."""
    loader_listen: str = ""
    """Address the loader listens on, filled in like loader_address; empty: loader_address."""
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "INFO"
    """Least severe level that is logged."""
    max_message_bytes: int = Field(default=64 << 20, ge=1 << 20)
    """Limit of one gRPC message, bytes."""
    max_restarts: int = Field(default=5, ge=0)
    """How often epilora serve starts the loader, the gateway or the group of ranks again within
    restart_window_seconds; if one of them ends once more, the service ends with that process's last error."""
    restart_window_seconds: float = Field(default=60.0, gt=0, allow_inf_nan=False)
    """See max_restarts. The limit is reached only if so many starts that fail take less than this together."""

    @field_validator("worker_address", "worker_listen", "loader_address", "loader_listen")
    @classmethod
    def _can_be_filled_in(cls, value: str, info: ValidationInfo) -> str:
        known = ["run_dir"] if str(info.field_name).startswith("loader") else ["run_dir", "ep_rank", "port"]
        try:
            value.format(**dict.fromkeys(known, 0))
        except (LookupError, ValueError, AttributeError, TypeError):
            names = ", ".join(f"{{{name}}}" for name in known)
            raise ValueError(f"expected an address in which nothing but {names} is in braces") from None
        return value

    def worker_address_of(self, ep_rank: int) -> str:
        """Address at which one rank's worker is reached."""
        return self._fill(self.worker_address, ep_rank)

    def worker_listen_of(self, ep_rank: int) -> str:
        """Address on which one rank's worker listens."""
        return self._fill(self.worker_listen or self.worker_address, ep_rank)

    def loader_address_resolved(self) -> str:
        """Address at which the loader is reached."""
        return self.loader_address.format(run_dir=self.run_dir)

    def loader_listen_resolved(self) -> str:
        """Address on which the loader listens."""
        return (self.loader_listen or self.loader_address).format(run_dir=self.run_dir)

    def _fill(self, template: str, ep_rank: int) -> str:
        return template.format(run_dir=self.run_dir, ep_rank=ep_rank, port=self.worker_base_port + ep_rank)


class WorkerSettings(CommonSettings):
    """Settings of a compute worker."""

    placement: str = "linear"
    """"linear", "round_robin", or the path of a JSON file with an explicit placement (docs/placement.md)."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Element type of the weights in memory; auto: the checkpoint's."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: cuda where a GPU is there."""
    load_format: Literal["safetensors", "random"] = "safetensors"
    """random: weights are drawn, not read (benchmarks; only config.json is needed)."""
    expert_backend: Literal["auto", "loop", "grouped", "triton"] = "auto"
    """loop: the plain reference, one expert after another; grouped: grouped matrix products; triton: fused kernels of
    experts and adapters (docs/kernels.md). auto: triton on a GPU, grouped where the kernels do not fit the model."""
    decode_graphs: Literal["auto", "off"] = "auto"
    """auto: steps in which every sequence has one token run as one CUDA graph, where expert_backend is triton and the
    dispatch backend has fixed shapes (docs/kernels.md)."""
    dispatch_backend: Literal["auto", "local", "allgather_reducescatter", "all_to_all", "one_sided"] = "auto"
    """How rows travel to their experts: allgather_reducescatter sends each token to every rank, all_to_all only to the
    ranks of its experts, one_sided writes it there, between GPUs of one host. auto: local for one rank; for several,
    one_sided where it can be and is measured to be faster, else allgather_reducescatter (docs/dispatch.md)."""
    expert_tp: int = Field(default=1, ge=1)
    """Ranks that share each expert, every one with a part of its width; the placement is over num_ranks / expert_tp."""
    num_adapter_slots: int = Field(default=32, ge=1, le=1024)
    """Adapters that may be active at once."""
    max_adapter_bytes: int = Field(default=0, ge=0)
    """Bytes that adapters may take on this rank; 0: 1/8 of the device's memory (GPU), or 4 GiB (CPU)."""
    adapter_dtype: Literal["model", "file"] = "model"
    """Element type of adapters in memory: the model's, or that of the adapter's file (twice the bytes for float32)."""
    pinned_cache_bytes: int = Field(default=8 << 30, ge=0)
    """Bytes of slice files in the cache that this rank keeps registered with its GPU, for later loads of them; such
    memory is not swapped out. 0: none, and each load copies through buffers (docs/slices.md)."""
    kv_cache_bytes: int = Field(default=0, ge=0)
    """Bytes of the key/value cache; 0: 70 % of what is free after loading (GPU), or 256 MiB (CPU)."""
    state_cache_bytes: int = Field(default=0, ge=0)
    """Bytes that the states of recurrent layers may take; they limit the requests that are generated at once.
    0: 35 % of what is free after loading (GPU), or 256 MiB (CPU)."""
    kv_block_size: int = Field(default=16, ge=1)
    """Positions in a block of the key/value cache."""
    max_sequence_length: int = Field(default=0, ge=0)
    """Positions of a sequence, prompt and output; 0: the model's limit, as far as the cache allows."""
    max_num_sequences: int = Field(default=64, ge=1)
    """Requests that are generated at once on this rank."""
    max_num_batched_tokens: int = Field(default=2048, ge=1)
    """Tokens in one step of this rank; longer prompts are prefilled in chunks."""
    max_queued_requests: int = Field(default=256, ge=1)
    """Generate requests that may wait on this rank. Messages of ExpertService streams do not count."""
    output_queue_size: int = Field(default=1024, ge=1)
    """Messages a client may leave unread before it is cancelled."""
    collective_timeout_seconds: float = Field(default=30.0, gt=0, allow_inf_nan=False)
    """Deadline of every collective; past it the group restarts."""
    consensus: Literal["auto", "shared_memory", "gloo"] = "auto"
    """How ranks agree on each step; auto: shared memory where all ranks are on one host, else gloo."""
    expert_steps_per_generate_step: int = Field(default=1, ge=1)
    """Expert steps done at most for each generate step while both have work."""
    torch_threads: int = Field(default=0, ge=0)
    """Threads of a CPU worker; 0: cores / ranks, at least 1."""

    def num_placed(self, num_ranks: int) -> int:
        """Over how many the placement of so many ranks is: those that share experts count once.

        Raises:
            InvalidArgumentError: expert_tp does not divide them (reason EXPERT_TP).
        """
        if num_ranks % self.expert_tp:
            raise InvalidArgumentError(
                f"EPILORA_EXPERT_TP is {self.expert_tp}, which does not divide the {num_ranks} ranks",
                reason="EXPERT_TP",
            )
        return num_ranks // self.expert_tp

    def why_no_kernels(self, *, on_gpu: bool) -> str:
        """Why the fused expert kernels cannot run, whatever the model is; empty: they can, as far as settings tell."""
        if self.adapter_dtype != "model":
            return "EPILORA_ADAPTER_DTYPE is file, and the kernels take adapters in the model's type"
        if not on_gpu and os.environ.get("TRITON_INTERPRET") != "1":
            return "the device is a CPU"
        return ""

    def check_expert_backend(self, why_no_kernels: str) -> None:
        """Does nothing where the kernels are not asked for, or can run.

        Raises:
            InvalidArgumentError: expert_backend is triton, and they cannot (reason EXPERT_BACKEND).
        """
        if self.expert_backend == "triton" and why_no_kernels:
            raise InvalidArgumentError(
                f"EPILORA_EXPERT_BACKEND is triton, but {why_no_kernels}; use auto or grouped", reason="EXPERT_BACKEND"
            )


class LoaderSettings(CommonSettings):
    """Settings of the loader."""

    cache_dir: Path = Path("/dev/shm/epilora")
    """Directory of the slice cache; owned by one loader."""
    cache_budget_bytes: int = Field(default=8 << 30, ge=1 << 20)
    """Bytes the slice cache may use."""
    cache_idle_bytes: int = Field(default=0, ge=0)
    """Bytes of it that slices of unloaded adapters may keep, for a load of the same files; 0: an unload frees them."""
    cache: SecretStr = SecretStr("")
    """URL of a Redis that carries slices between nodes: redis://, rediss:// (TLS) or unix://; empty: none."""
    cache_ttl_seconds: float = Field(default=86400.0, ge=1, allow_inf_nan=False)
    """How long that Redis keeps slices that nobody pulls."""
    cache_timeout_seconds: float = Field(default=5.0, gt=0, allow_inf_nan=False)
    """Deadline of connecting to Redis and of each of its answers; past it the slices are built here."""
    cache_wait_seconds: float = Field(default=60.0, gt=0, allow_inf_nan=False)
    """How long to wait for slices that another node's loader is building; past it they are built here, too."""
    cache_pinned_sources: list[str] = Field(default_factory=list)
    """Sources, spelled as in LoadAdapter, whose slices stay in the cache when they are unloaded."""
    adapter_roots: list[Path] = Field(default_factory=list)
    """Directories under which adapters may lie. Empty: none may be loaded."""
    source_prefixes: list[str] = Field(default_factory=list)
    """Remote places that adapters may be loaded from, e.g. hf://my-org, s3://bucket/adapters, https://host/path.
    Empty: none."""
    download_dir: Path = Path("/tmp/epilora-downloads")
    """Where remote adapters are kept on disk: a cache of the Hugging Face Hub, and files of s3:// and http(s)://."""
    download_bytes: int = Field(default=20 << 30, ge=0)
    """Bytes that files of s3:// and http(s):// may take there; those that were used longest ago go."""
    source_timeout_seconds: float = Field(default=30.0, gt=0, allow_inf_nan=False)
    """Deadline of each answer of a remote place."""
    hf_endpoint: str = ""
    """Address of the Hugging Face Hub; empty: the public one, or what HF_ENDPOINT says."""
    max_header_bytes: int = Field(default=32 << 20, ge=1024)
    """Limit of a safetensors header; about 150 bytes a tensor, and some 10 times as much memory while it is parsed."""
    max_lora_rank: int = Field(default=512, ge=1)
    """Largest lora_rank accepted."""


class GatewaySettings(CommonSettings):
    """Settings of the gateway."""

    listen: str = "127.0.0.1:50051"
    """host:port of the public services; port 0: any free one."""
    metrics_listen: str = "127.0.0.1:9400"
    """host:port of the Prometheus metrics; port 0: any free one; empty: none."""
    state_dir: Path = Path(".epilora")
    """Directory of the adapter registry."""
    drain_timeout_seconds: float = Field(default=30.0, ge=0, allow_inf_nan=False)
    """How long requests in flight may go on after an unload, a reload or a stop was asked for."""
    load_timeout_seconds: float = Field(default=600.0, gt=0, allow_inf_nan=False)
    """Deadline of one adapter load."""
    rebalance_timeout_seconds: float = Field(default=1800.0, gt=0, allow_inf_nan=False)
    """Deadline of one move to another placement, up to the step at which the ranks take it up."""
    probe_interval_seconds: float = Field(default=0.5, gt=0, allow_inf_nan=False)
    """Time between two looks at each rank."""
    probe_timeout_seconds: float = Field(default=2.0, gt=0, allow_inf_nan=False)
    """A rank that twice in a row does not answer within this is not ready."""
    control_timeout_seconds: float = Field(default=30.0, gt=0, allow_inf_nan=False)
    """Deadline of one control call to a worker or the loader: activate, retire, discard, release."""
    max_expert_messages: int = Field(default=16, ge=1)
    """Messages of one ExpertService stream that may be unanswered; the stream is read no further until one is."""
    address_file: Path | None = None
    """Where to write the bound addresses as JSON once the gateway listens: {"listen": ..., "metrics": ...}."""

    @field_validator("listen", "metrics_listen")
    @classmethod
    def _is_host_and_port(cls, address: str, info: ValidationInfo) -> str:
        if (address.startswith("unix:") and info.field_name == "listen") or (
            not address and info.field_name == "metrics_listen"
        ):
            return address
        host, _, port = address.rpartition(":")
        if not host or not (port.isascii() and port.isdigit()) or int(port) > MAX_PORT:
            raise ValueError(f"expected host:port with a port of 0 to {MAX_PORT}")
        return address
