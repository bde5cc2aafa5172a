"""A stand-in for vLLM where there is none: the few names that are used, served by nanospec."""

from types import SimpleNamespace
from typing import Any, ClassVar

from vllm.sampling_params import RequestOutputKind

__version__ = "0.0-stub"


class SamplingParams(SimpleNamespace):
    """Keeps what it is given."""


class LLM:
    """Keeps its options, and says wrong tokens where it is told to."""

    seen: ClassVar[list[dict[str, Any]]] = []  # options of all made so far
    wrong: ClassVar[set[tuple[int, int]]] = set()  # (request, place in its output)

    def __init__(self, *, fail: str | None = None, **options: Any):
        if fail is not None:
            raise RuntimeError(fail)
        self.seen.append(options)
        self.llm_engine = _Engine(options, self.wrong)


class _Engine:
    def __init__(self, options: dict[str, Any], wrong: set[tuple[int, int]]):
        import nanospec

        own = options.get("speculative_config")
        self._engine = nanospec.LLM(
            options["model"],
            draft=own and own["model"],
            speculator="dspark" if own else "none",
            max_draft_len=own and own["num_speculative_tokens"],
            max_model_len=options["max_model_len"],
            device="cpu",
            kv_cache_gib=0.1,
        ).engine
        self._wrong = wrong
        self._running: dict[int, tuple[str, int]] = {}

    def add_request(self, request_id: str, prompt: dict[str, Any], params: SamplingParams) -> str:
        """Queue a request."""
        import nanospec

        own = vars(params).copy()
        assert own.pop("output_kind") is RequestOutputKind.DELTA
        request = self._engine.add(prompt["prompt_token_ids"], nanospec.SamplingParams(**own))
        self._running[request.request_id] = (request_id, 0)
        return f"{request_id}-internal"

    def step(self) -> list[SimpleNamespace]:
        """Return what is new."""
        found = []
        for request in self._engine.step():
            name, seen = self._running[request.request_id]
            self._running[request.request_id] = (name, request.num_output)
            new = [
                token ^ ((int(name), seen + place) in self._wrong)
                for place, token in enumerate(request.output_token_ids[seen:])
            ]
            output = SimpleNamespace(token_ids=new, finish_reason=request.finish_reason)
            found.append(SimpleNamespace(request_id=name, outputs=[output]))
        return found
