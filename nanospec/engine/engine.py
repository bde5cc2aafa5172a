"""The engine: builds model, cache, backend and scheduler, then advances requests step by step."""

import logging
import random
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch

from nanospec.attention.backend import create_attention
from nanospec.attention.kv_ops import move_kv
from nanospec.config import EngineConfig, ModelConfig
from nanospec.device import prefer_faster_products
from nanospec.engine.capture import create_runner
from nanospec.engine.pages import PageAllocator
from nanospec.engine.round import Flight, RoundContext, launch, propose, settle
from nanospec.engine.scheduler import Scheduler
from nanospec.engine.sizing import count_pages, new_cache
from nanospec.engine.warmup import warm_up
from nanospec.errors import BackendUnavailableError, ConfigError
from nanospec.models.decoder import Decoder
from nanospec.models.loader import load_decoder
from nanospec.params import SamplingParams
from nanospec.spec.registry import create_speculator
from nanospec.spec.speculator import (
    COMMIT,
    VERIFY,
    Speculator,
    SpeculatorSetup,
    adapted,
    layer_capabilities,
    resolve_kernels,
)
from nanospec.stats import Stats, StepStats
from nanospec.text import TextStream, Tokenizer
from nanospec.types import Capability, Request, StepOutput

logger = logging.getLogger(__name__)


class Engine:
    """Runs requests by continuous batching: token ids in, `Request` objects out.

    Invariant: a finished request holds no pages; without requests every page is free.
    """

    @torch.inference_mode()
    def __init__(
        self,
        config: EngineConfig,
        folder: Path,
        tokenizer: Tokenizer | None,
    ):
        """Load the model of a folder and allocate the KV cache.

        Args:
            config: all options.
            folder: of the target.
            tokenizer: of the target, for text and stop strings.

        Raises:
            CheckpointError: the model cannot be loaded.
            BackendUnavailableError: the device or attention backend cannot run here.
            ConfigError: the memory, or the model's context, does not suffice.
        """
        self.model_config = ModelConfig.from_folder(folder)
        self.max_model_len = _max_model_len(config, self.model_config)
        self.device = _device(config.device)
        if self.device.type == "cuda":
            prefer_faster_products()
        decoder = _load(config, folder, self.model_config, self.device)
        self.speculator = create_speculator(
            SpeculatorSetup(config, self.model_config, decoder.dtype, self.device, decoder)
        )
        self.stats = Stats()  # of all requests that ended; seconds are those spent in `step`
        self.step_stats = StepStats()
        self.observers: list[Callable[[StepOutput], None]] = []  # see what each round did
        self._ctx = self._round_context(config, decoder)
        if self.device.type == "cuda":
            started = time.perf_counter()
            warm_up(
                self._ctx,
                self.speculator.effective,
                self.model_config.vocab_size,
                max_rows=self._ctx.scheduler.max_num_batched_tokens,
                max_num_seqs=config.max_num_seqs,
                max_model_len=self.max_model_len,
            )
            self.speculator.warm_up(config.max_num_seqs)
            torch.cuda.synchronize()
            logger.info("warmed up in %.1f s", time.perf_counter() - started)
        self.scheduler = self._ctx.scheduler
        self.pages = self.scheduler.pages
        self._acceptance = config.acceptance
        self._tokenizer = tokenizer
        self._eos = _eos_token_ids(self.model_config, tokenizer)
        self._seeds = random.Random(config.seed)
        self._next_id = 0
        self._flight: Flight | None = None  # the round that was launched and is not settled
        self._settled = time.perf_counter()  # when the last round was, or the first one began

    @property
    def has_work(self) -> bool:
        """Whether `step` has anything to do."""
        return self.scheduler.has_work or self._flight is not None

    def check(self, prompt: Sequence[int], params: SamplingParams) -> None:
        """Raise what `add` would raise for this prompt, and do nothing else.

        Raises:
            ConfigError: the prompt is empty, too long, or not of this vocabulary.
        """
        vocab_size = self.model_config.vocab_size
        if not prompt:
            raise ConfigError("the prompt is empty; pass at least one token")
        wrong = next((token for token in prompt if not 0 <= token < vocab_size), None)
        if wrong is not None:
            raise ConfigError(f"token id {wrong} is not in the vocabulary of {vocab_size} tokens")
        if len(prompt) >= self.max_model_len:
            raise ConfigError(
                f"the prompt has {len(prompt)} tokens, which leaves no room for an output in the "
                f"context of {self.max_model_len}; shorten it"
            )
        wrong = next((token for token in params.stop_ids if not 0 <= token < vocab_size), None)
        if wrong is not None:
            raise ConfigError(
                f"stop token id {wrong} is not in the vocabulary of {vocab_size} tokens"
            )
        if params.stop_strings and self._tokenizer is None:
            raise ConfigError("stop strings need a tokenizer, and this model folder has none")

    def add(self, prompt: Sequence[int], params: SamplingParams) -> Request:
        """Queue a prompt, given as token ids.

        Raises:
            ConfigError: see `check`.
        """
        self.check(prompt, params)
        seed = self._seeds.getrandbits(63) if params.seed is None else params.seed
        by_seed = self._acceptance == "auto" and params.seed is not None
        own_stops = () if params.ignore_eos else self._eos
        request = Request(
            request_id=self._next_id,
            prompt_token_ids=list(prompt),
            params=params,
            seed=seed,
            stop_token_ids=frozenset((*own_stops, *params.stop_ids)),
            max_len=self._max_len(prompt, params),
            text=TextStream(self._tokenizer, prompt, params.stop_strings),
            shares_noise=by_seed or self._acceptance == "shared-noise" or params.is_greedy,
        )
        self._next_id += 1
        self.scheduler.add(request)
        return request

    def abort(self, request: Request) -> None:
        """End a request at once, keeping what it has; a finished one stays as it is."""
        if not request.is_finished:
            self.scheduler.finish(request, "abort")
            self.stats.add(request.stats)

    @torch.inference_mode()
    def step(self) -> list[Request]:
        """Launch a round, settle one, and return the requests that got tokens.

        Finished ones are marked. Where the engine runs ahead, the round settled is the one before
        the one launched.
        """
        started = time.perf_counter()
        if self._flight is None:
            self._settled = started
        try:
            return self._step()
        finally:
            self.stats.seconds += time.perf_counter() - started

    @torch.inference_mode()
    def settle(self) -> list[Request]:
        """Settle the round in flight, if there is one, and return the requests that got tokens."""
        return [] if self._flight is None else self._settle(self._flight)

    def _step(self) -> list[Request]:
        before = self._flight
        if before is not None and not self.scheduler.can_run_ahead():
            return self._settle(before)
        segments = self.scheduler.schedule()
        if segments and not self._ctx.runs_ahead:
            return self._settle(launch(self._ctx, segments))
        advanced: list[Request] = []
        try:
            if segments:
                self._flight = launch(self._ctx, segments, before)
                propose(self._ctx, self._flight)
        finally:  # whatever drafting raises, no round is lost
            if before is not None:
                advanced = self._settle(before)
        return advanced

    def _settle(self, flight: Flight) -> list[Request]:
        """Settle a round, and count it."""
        if self._flight is flight:
            self._flight = None
        done = settle(self._ctx, flight)
        advanced = [r for r, own in zip(done.requests, done.emitted, strict=True) if own]
        for request in advanced:
            if request.is_finished:
                self.stats.add(request.stats)
        now = time.perf_counter()
        self.step_stats.count_step(
            rows=done.num_tokens,
            tier=done.tier,
            budget=done.budget,
            seconds=now - self._settled,
            predicted_us=done.predicted_us,
        )
        self._settled = now
        return advanced

    def _round_context(self, config: EngineConfig, decoder: Decoder) -> RoundContext:
        """Allocate caches, pick kernels, and let the speculator adapt to them."""
        speculator, drafter = self.speculator, self.speculator.cache_layers()
        models = [self.model_config] if drafter is None else [self.model_config, drafter]
        num_pages = count_pages(config, decoder, models, speculator.effective, self.max_model_len)
        longest = num_pages * config.page_size
        if longest < self.max_model_len:  # only where the user asked for no length
            logger.warning(
                "the KV cache holds %d of the model's %d tokens; raise kv_cache_gib for more",
                longest,
                self.max_model_len,
            )
            self.max_model_len = longest
        # One page more than is handed out: rows that nobody will read are stored there.
        caches = [
            new_cache(config, model, num_pages + 1, decoder.embed_tokens.weight) for model in models
        ]
        kernels = resolve_kernels(
            [
                (
                    "nanospec",
                    {VERIFY: partial(create_attention, config.attention), COMMIT: move_kv},
                ),
                (type(speculator).__name__, speculator.kernels()),
            ]
        )
        attention = kernels[VERIFY](caches[0], self.model_config.num_heads)
        num_layers = self.model_config.num_layers
        capabilities = layer_capabilities(attention, kernels[COMMIT], num_layers)
        speculator.effective = adapted(speculator, capabilities)
        if drafter is not None:
            own = create_attention(config.attention, caches[1], drafter.num_heads, beside=attention)
            speculator.start(caches[1], own)
        else:
            speculator.start(None, None)
        scheduler = Scheduler(
            PageAllocator(num_pages, config.page_size, prefix_caching=config.prefix_caching),
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.forward_rows(speculator.effective.max_rows),
            admit_limit=speculator.admit_limit,
        )
        return RoundContext(
            speculator=speculator,
            runner=create_runner(
                config,
                decoder,
                speculator,
                attention,
                capabilities,
                scratch_slot=caches[0].scratch_slot,
                max_model_len=self.max_model_len,
            ),
            scheduler=scheduler,
            caches=caches,
            move_kv=kernels[COMMIT],
            runs_ahead=_runs_ahead(config, speculator, capabilities),
            observers=self.observers,
        )

    def _max_len(self, prompt: Sequence[int], params: SamplingParams) -> int:
        if params.max_tokens is None:
            return self.max_model_len
        return min(len(prompt) + params.max_tokens, self.max_model_len)


def _runs_ahead(
    config: EngineConfig, speculator: Speculator, capabilities: Sequence[Capability]
) -> bool:
    """Decide whether rounds are launched before the one before is settled."""
    why_not = ""
    if not speculator.runs_ahead or speculator.estimator is not None:
        why_not = f"{type(speculator).__name__} drafts on the host, from tokens it must have read"
    elif _is_newer(type(speculator), "propose", "propose_ahead"):
        why_not = f"{type(speculator).__name__} has a propose of its own, and no propose_ahead"
    if config.run_ahead == "on" and why_not:
        raise ConfigError(f"run_ahead=on: {why_not}; pass run_ahead=auto")
    # Attention that plans on the host would wait for the very lengths that it runs ahead of.
    takes_device_counts = all(each.takes_device_counts for each in capabilities)
    return not why_not and (
        config.run_ahead == "on" or (config.run_ahead == "auto" and takes_device_counts)
    )


def _is_newer(kind: type, name: str, other: str) -> bool:
    """Whether a class overrides one method below the class that defines the other."""
    owners = [next(k for k in kind.__mro__ if each in vars(k)) for each in (name, other)]
    return owners[0] is not owners[1] and issubclass(owners[0], owners[1])


def _load(
    config: EngineConfig, folder: Path, model_config: ModelConfig, device: torch.device
) -> Decoder:
    started = time.perf_counter()
    dtype = _dtype(config.dtype, model_config.dtype, device)
    try:
        decoder = load_decoder(
            folder, model_config, dtype=dtype, device=device, load_format=config.load_format
        )
    except torch.OutOfMemoryError as error:
        raise ConfigError(
            f"the weights of {folder} do not fit the memory of {device} as {dtype}"
        ) from error
    seconds = time.perf_counter() - started
    logger.info("loaded %s as %s on %s in %.1f s", folder, dtype, device, seconds)
    if device.type == "cuda":
        # Imported here: Triton takes long to import and a CPU needs none.
        from nanospec.models.linear_triton import why_not

        for name, weight in decoder.layers[0].named_parameters():
            if weight.dim() == 2 and (reason := why_not(weight)):
                logger.info("few rows times %s: by the library's kernels, as %s", name, reason)
    return decoder


def _device(name: str) -> torch.device:
    has_cuda = torch.cuda.is_available()
    if name == "cuda" and not has_cuda:
        raise BackendUnavailableError("no CUDA device is usable here; pass --device cpu")
    if name == "auto":
        name = "cuda" if has_cuda else "cpu"
    # With its index, so that it equals the device of tensors on it.
    return (
        torch.device("cuda", torch.cuda.current_device()) if name == "cuda" else torch.device(name)
    )


def _dtype(wanted: str, stored: str, device: torch.device) -> torch.dtype:
    if wanted == "auto":
        wanted = "bfloat16" if stored == "float32" and device.type == "cuda" else stored
    dtypes = {name: getattr(torch, name) for name in ("float32", "bfloat16", "float16")}
    if wanted not in dtypes:
        raise ConfigError(f"the checkpoint's dtype {wanted!r} cannot be run; pass --dtype bfloat16")
    dtype: torch.dtype = dtypes[wanted]
    return dtype


def _max_model_len(config: EngineConfig, model: ModelConfig) -> int:
    limit = model.max_position_embeddings
    if config.max_model_len is None:
        return limit
    if config.max_model_len > limit:
        raise ConfigError(
            f"max_model_len={config.max_model_len} exceeds the model's {limit} positions; "
            f"pass {limit} or less"
        )
    return config.max_model_len


def _eos_token_ids(model: ModelConfig, tokenizer: Tokenizer | None) -> tuple[int, ...]:
    """Return the model's end-of-sequence tokens, or else the tokenizer's."""
    found = model.eos_token_ids
    if not found and tokenizer is not None and tokenizer.eos_token_id is not None:
        found = (tokenizer.eos_token_id,)
    # A padded or reduced vocabulary may leave out what a config still names; it never comes.
    return tuple(token for token in found if 0 <= token < model.vocab_size)
