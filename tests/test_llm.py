"""The offline API: shapes of input and output, and errors before anything runs."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from nanospec import LLM, SamplingParams
from nanospec.errors import CheckpointError, ConfigError
from tests import helpers


@pytest.fixture(scope="module")
def llm(qwen3: Path) -> LLM:
    return helpers.make_llm(qwen3)


def test_an_output_has_the_fields_of_vllms(llm: LLM) -> None:
    (output,) = llm.generate("the owl", helpers.greedy(5))
    completion = output.outputs[0]
    assert output.prompt_token_ids == llm.encode("the owl")
    assert len(completion.token_ids) == 5 and completion.finish_reason == "length"
    assert llm.tokenizer is not None
    assert completion.text == llm.tokenizer.decode(completion.token_ids)
    assert output.stats.tokens == 5 and output.stats.rounds == 4
    assert output.stats.seconds > 0 and output.stats.tokens_per_second > 0


def test_totals_are_the_sums_of_the_requests(qwen3: Path) -> None:
    llm = helpers.make_llm(qwen3, speculator="ngram")
    outputs = llm.generate(["the owl the owl the owl", [5, 6] * 9], helpers.greedy(12))
    for name in ("rounds", "drafted", "verified", "accepted", "emitted", "tokens"):
        want = sum(getattr(output.stats, name) for output in outputs)
        assert getattr(llm.stats, name) == want
    assert llm.stats.verified > 0 and llm.stats.seconds > 0


def test_prompts_may_be_text_or_token_ids_one_or_many(llm: LLM) -> None:
    ids = llm.encode("the owl")
    want = llm.generate("the owl", helpers.greedy())[0].outputs[0].token_ids
    for prompts in ("the owl", ids, tuple(ids), ["the owl"], [ids], ["the owl", ids]):
        outputs = llm.generate(prompts, helpers.greedy())
        assert all(output.outputs[0].token_ids == want for output in outputs)
    assert llm.generate([], helpers.greedy()) == []


def test_the_default_parameters_are_vllms(llm: LLM) -> None:
    (output,) = llm.generate("the owl")
    assert len(output.outputs[0].token_ids) <= SamplingParams().max_tokens == 16


def test_each_prompt_may_have_its_own_parameters(llm: LLM) -> None:
    outputs = llm.generate(["the owl", "the owl"], [helpers.greedy(3), helpers.greedy(7)])
    assert [len(output.outputs[0].token_ids) for output in outputs] == [3, 7]
    with pytest.raises(ConfigError, match="2 sampling_params for 1 prompts"):
        llm.generate(["the owl"], [helpers.greedy(3), helpers.greedy(7)])


def test_chat_takes_one_conversation_or_many(llm: LLM) -> None:
    conversation = [{"role": "user", "content": "hi"}]
    one = llm.chat(conversation, helpers.greedy())
    many = llm.chat([conversation, conversation], helpers.greedy())
    assert one[0].prompt_token_ids == llm.encode("<|user|>hi<|end|><|assistant|>")
    assert [output.outputs[0].text for output in many] == [one[0].outputs[0].text] * 2
    llm.chat(conversation, helpers.greedy(2), chat_template_kwargs={"enable_thinking": False})


def test_one_bad_prompt_stops_the_call_before_anything_runs(llm: LLM) -> None:
    with pytest.raises(ConfigError, match="no room"):
        llm.generate(["fine", [5] * 300], helpers.greedy())
    with pytest.raises(ConfigError, match="string or a list of token ids"):
        llm.generate([["a", "b"]], helpers.greedy())  # type: ignore[list-item]
    with pytest.raises(ConfigError, match="string or a list of token ids"):
        llm.generate([[True, False]], helpers.greedy())
    with pytest.raises(ConfigError, match="not dictionaries"):
        llm.generate({"prompt": "hi"}, helpers.greedy())  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="not valid Unicode"):
        llm.generate("half a pair: \ud800", helpers.greedy())
    assert not llm.engine.has_work


def test_an_interrupted_call_leaves_nothing_running(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = iter([llm.engine.step, llm.engine.step])

    def step() -> object:
        try:
            return next(steps)()
        except StopIteration:
            raise KeyboardInterrupt from None

    monkeypatch.setattr(llm.engine, "step", step)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["the owl"] * 3, helpers.greedy(50))
    assert not llm.engine.has_work
    assert llm.engine.pages.num_free == llm.engine.pages.num_pages


def test_unknown_options_and_models_are_errors(qwen3: Path) -> None:
    with pytest.raises(ConfigError, match="did you mean 'max_num_seqs'"):
        LLM(str(qwen3), max_num_seq=4)
    with pytest.raises(CheckpointError, match="folder"):
        LLM("./no/such/folder")


def test_a_model_without_tokenizer_takes_token_ids_only(qwen3: Path, tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((qwen3 / name).read_bytes())
    llm = helpers.make_llm(tmp_path)
    (output,) = llm.generate([5, 6, 7], helpers.greedy(3))
    assert output.outputs[0].text == "" and len(output.outputs[0].token_ids) == 3
    with pytest.raises(ConfigError, match=r"no tokenizer\.json"):
        llm.generate("text", helpers.greedy(3))
    with pytest.raises(ConfigError, match="stop strings need a tokenizer"):
        llm.generate([5, 6], helpers.greedy(3, stop="x"))


@contextmanager
def gc_begun_with_some_frozen(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Make as if the interpreter had started with frozen objects, as Python 3.12 does."""
    gc.freeze()
    with monkeypatch.context() as patch:
        patch.setattr("nanospec.llm._FROZEN_AT_START", gc.get_freeze_count())
        yield


# Found on a GPU: a full collection took 0.15 s, in which a dozen rounds could have been launched.
def test_the_collector_leaves_alone_what_is_older_than_a_generation(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    frozen: list[int] = []

    def observe(step: object) -> None:
        frozen.append(gc.get_freeze_count())

    llm.engine.observers.append(observe)
    try:
        llm.generate([5, 6, 7], helpers.greedy(4))
        assert min(frozen) > 1000 and gc.get_freeze_count() == 0
        with gc_begun_with_some_frozen(monkeypatch):
            frozen.clear()
            llm.generate([5, 6, 7], helpers.greedy(4))
            assert min(frozen) > 1000 and gc.get_freeze_count() == 0
        gc.freeze()  # the caller's own
        llm.generate([5, 6, 7], helpers.greedy(4))
        assert gc.get_freeze_count() > 1000
    finally:
        gc.unfreeze()
        llm.engine.observers.remove(observe)
