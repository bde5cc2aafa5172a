"""`LLM`: the offline API, shaped like vLLM's."""

import gc
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeGuard, cast

from nanospec.config import EngineConfig
from nanospec.engine.engine import Engine
from nanospec.errors import ConfigError
from nanospec.models.loader import resolve_model
from nanospec.params import SamplingParams
from nanospec.stats import Stats
from nanospec.text import Message, Tokenizer
from nanospec.types import FinishReason, Request

Prompt = str | Sequence[int]  # text, or token ids


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """The output of one request."""

    text: str  # without special tokens and without what ended it
    token_ids: list[int]  # up to and including the token that ended it
    finish_reason: FinishReason


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """What `LLM.generate` returns for one prompt."""

    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]  # one; a list, as in vLLM
    stats: Stats


class LLM:
    """A model, ready to generate.

    Example:
        >>> llm = LLM("path/to/Qwen3-0.6B")
        >>> params = SamplingParams(temperature=0, max_tokens=64)
        >>> llm.generate("The capital of France is", params)[0].outputs[0].text
    """

    def __init__(
        self,
        model: str | None = None,
        *,
        draft: str | None = None,
        speculator: str = "auto",
        dtype: str = "auto",
        device: str = "auto",
        **options: Any,
    ):
        """Load a model.

        Args:
            model: a folder in Hugging Face's layout, or a Hugging Face id; None for the toy that
                comes with the package, and its drafter.
            draft: the same for a drafter.
            speculator: what drafts: auto, none, ngram, trie, draft, dspark, dspark-tree, or
                module:Class.
            dtype: auto, float32, bfloat16 or float16.
            device: auto, cpu or cuda.
            options: the other fields of `EngineConfig`.

        Raises:
            ConfigError: an option is unknown or cannot work.
            CheckpointError: the model cannot be found or loaded.
            BackendUnavailableError: device or attention backend cannot run here.
        """
        named = {
            "model": model,
            "draft": draft,
            "speculator": speculator,
            "dtype": dtype,
            "device": device,
        }
        config = EngineConfig.from_options(named | options)
        folder = resolve_model(config.model)
        self.tokenizer = Tokenizer.load(folder)
        self.engine = Engine(config, folder, self.tokenizer)

    @property
    def stats(self) -> Stats:
        """Totals of all requests that have ended; seconds are those in which rounds ran."""
        return self.engine.stats

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Complete prompts, all together.

        Args:
            prompts: one or many, each a string or token ids.
            sampling_params: one for all, or one each; None means `SamplingParams()`.

        Returns:
            One output per prompt, in their order.

        Raises:
            ConfigError: a prompt or parameter cannot work; then nothing is generated.
        """
        if isinstance(prompts, Mapping):
            raise ConfigError("prompts are strings or token ids, not dictionaries")
        is_one = isinstance(prompts, str) or (len(prompts) > 0 and _is_token_ids(prompts))
        batch = cast(Sequence[Prompt], [prompts] if is_one else prompts)
        return self._run([self.encode(prompt) for prompt in batch], sampling_params)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Reply to one conversation, or to many together.

        Args:
            messages: `{"role": ..., "content": ...}` each, oldest first; or a list of such lists.
            sampling_params: see `generate`.
            chat_template_kwargs: more variables of the template, e.g. `{"enable_thinking": False}`.

        Raises:
            ConfigError: see `generate`; also a model without a chat template.
        """
        is_one = len(messages) > 0 and isinstance(messages[0], Mapping)
        batch = cast(Sequence[Sequence[Message]], [messages] if is_one else messages)
        variables = chat_template_kwargs or {}
        prompts = [self.encode_chat(each, **variables) for each in batch]
        return self._run(prompts, sampling_params)

    def encode(self, prompt: Prompt) -> list[int]:
        """Return a prompt's token ids.

        Raises:
            ConfigError: it is neither text nor token ids, or text without a tokenizer.
        """
        if not isinstance(prompt, str):
            if not _is_token_ids(prompt):
                raise ConfigError(f"a prompt is a string or a list of token ids, not {prompt!r}")
            return list(prompt)
        return self._require_tokenizer().encode(prompt)

    def encode_chat(self, messages: Sequence[Message], **variables: Any) -> list[int]:
        """Return the token ids of a conversation, ready for the reply.

        Raises:
            ConfigError: there is no tokenizer or chat template, or it rejects the messages.
        """
        return self._require_tokenizer().chat_ids(messages, **variables)

    def _require_tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise ConfigError("this model folder has no tokenizer.json; pass token ids")
        return self.tokenizer

    def _run(
        self,
        prompts: list[list[int]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
    ) -> list[RequestOutput]:
        params = _params_per_prompt(sampling_params, len(prompts))
        for prompt, own in zip(prompts, params, strict=True):
            self.engine.check(prompt, own)
        requests = [self.engine.add(*pair) for pair in zip(prompts, params, strict=True)]
        try:
            with old_objects_left_alone():
                while not all(request.is_finished for request in requests):
                    self.engine.step()
                self.engine.settle()
        finally:  # an interruption leaves nothing running
            for request in requests:
                self.engine.abort(request)
        return [output_of(request) for request in requests]


# Interpreters may start with some: those are no caller's wish.
_FROZEN_AT_START = gc.get_freeze_count()


@contextmanager
def old_objects_left_alone() -> Iterator[None]:
    """Keep Python's garbage collector from walking all there is: now and then 0.15 s, many rounds.

    What is made meanwhile is collected as ever, and the rest afterwards, unless the caller has said
    otherwise by a `gc.freeze` of its own since nanospec was imported. For one thread.
    """
    if gc.get_freeze_count() > _FROZEN_AT_START:
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def output_of(request: Request) -> RequestOutput:
    """Return what a finished request gives its user."""
    assert request.finish_reason is not None, "the request is still running"
    completion = CompletionOutput(
        text=request.text.text,
        token_ids=request.output_token_ids,
        finish_reason=request.finish_reason,
    )
    return RequestOutput(request.prompt_token_ids, [completion], request.stats)


def _is_token_ids(value: Any) -> TypeGuard[Sequence[int]]:
    is_sequence = isinstance(value, Sequence) and not isinstance(value, str)
    return is_sequence and all(type(item) is int for item in value)


def _params_per_prompt(
    given: SamplingParams | Sequence[SamplingParams] | None, count: int
) -> list[SamplingParams]:
    if given is None or isinstance(given, SamplingParams):
        return [given or SamplingParams()] * count
    if len(given) != count:
        raise ConfigError(
            f"{len(given)} sampling_params for {count} prompts; pass one, or one each"
        )
    return list(given)
