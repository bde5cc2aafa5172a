import json
from dataclasses import replace
from pathlib import Path

import make_tiny
import pytest
import torch
from make_tiny import Recipe, Trainer
from training import save_checkpoint

from nanospec import LLM
from nanospec.config import ModelConfig
from nanospec.text import Tokenizer

DATA = Path(__file__).resolve().parents[1] / "data"
SMALL = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
}
RECIPE = Recipe(steps=12, tokenizer_problems=500, problems=96, rows=16, warmup=2, evaluate_every=6)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The stage `data`, with a config that trains quickly."""
    out = tmp_path_factory.mktemp("tiny")
    assert make_tiny.make_data(out, RECIPE)
    (out / "target" / "config.json").write_text(json.dumps(make_tiny.CONFIG | SMALL))
    return out


@pytest.fixture
def few_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(make_tiny, "HELD_OUT_COUNT", 4)
    monkeypatch.setattr(make_tiny, "MAX_ANSWER", 8)


def tokenizer_of(out: Path) -> Tokenizer:
    tokenizer = Tokenizer.load(out / "target")
    assert tokenizer is not None
    return tokenizer


def new_trainer(out: Path) -> Trainer:
    config = ModelConfig.from_folder(out / "target")
    return Trainer(config, RECIPE, torch.device("cpu"))


def test_the_chat_template_writes_the_prompt_of_training(made: Path) -> None:
    tokenizer = tokenizer_of(made)
    question = "Tom has 3 apples and buys 14 more. How many apples does he have now?"
    ids = tokenizer.chat_ids([{"role": "user", "content": question}])
    assert ids == tokenizer.encode(make_tiny.PROMPT.format(question))
    assert ids[0] == 1 and tokenizer.eos_token_id == make_tiny.END == 2


def test_every_digit_is_a_token(made: Path) -> None:
    tokenizer = tokenizer_of(made)
    texts = [tokenizer.decode([token]) for token in tokenizer.encode("has $40 + 125 pears")]
    assert [text for text in texts if text.strip().isdigit()] == list("40125")


def test_ids_stay_below_the_vocabulary_and_decode_to_the_text(made: Path) -> None:
    problem = make_tiny._take(5, 1)[0]
    tokens, lens, prompts = make_tiny._tokenise(made / "target", [problem])
    assert tokens.min() >= 0 and tokens.max() < make_tiny.VOCAB_SIZE
    assert lens.sum() == len(tokens) and tokens[-1] == make_tiny.END
    answer = tokenizer_of(made).decode(tokens[prompts[0] :].tolist())
    assert answer == problem.answer


def test_stored_held_out_problems_are_those_the_stage_writes(made: Path) -> None:
    assert (made / make_tiny.HELD_OUT).read_bytes() == (DATA / make_tiny.HELD_OUT).read_bytes()


def test_padding_has_no_weight_and_the_answer_all(made: Path) -> None:
    corpus = make_tiny.load_corpus(made, RECIPE, torch.device("cpu"))
    rows = torch.tensor([3, 70])
    ids, weights = corpus.padded(rows)
    for row, each, weight in zip(rows.tolist(), ids, weights, strict=True):
        start, length = int(corpus.starts[row]), int(corpus.lens[row])
        prompt = int(corpus.prompts[row])
        assert each[:length].tolist() == corpus.tokens[start : start + length].tolist()
        assert each[length:].eq(0).all() and weight[length:].eq(0).all() and weight[0] == 0
        assert weight[1:prompt].eq(make_tiny.QUESTION_WEIGHT).all()
        assert weight[prompt:length].eq(1).all()


def test_micro_batches_do_not_change_the_step(made: Path) -> None:
    corpus = make_tiny.load_corpus(made, RECIPE, torch.device("cpu"))
    config = ModelConfig.from_folder(made / "target")
    whole, parts = (
        Trainer(config, replace(RECIPE, micro_batches=count), torch.device("cpu"))
        for count in (1, 4)
    )
    whole.advance(corpus)
    parts.advance(corpus)
    torch.testing.assert_close(whole.report()["loss"], parts.report()["loss"], rtol=0, atol=1e-4)
    for name, weight in whole.decoder.named_parameters():
        torch.testing.assert_close(
            weight, parts.decoder.get_parameter(name), rtol=0, atol=1e-3, msg=name
        )


def test_a_resumed_training_is_the_same_training(made: Path, tmp_path: Path) -> None:
    corpus = make_tiny.load_corpus(made, RECIPE, torch.device("cpu"))
    straight, first, second = (new_trainer(made) for _ in range(3))
    for _ in range(8):  # beyond the first of the corpus' epochs of 6 steps
        straight.advance(corpus)
    for _ in range(3):
        first.advance(corpus)
    first.save(tmp_path / "state.pt")
    second.load(tmp_path / "state.pt")
    for _ in range(5):
        second.advance(corpus)
    assert straight.step == second.step
    for name, weight in straight.decoder.named_parameters():
        torch.testing.assert_close(weight, second.decoder.get_parameter(name), rtol=0, atol=0)


@pytest.mark.usefixtures("few_tests")
def test_the_target_stage_stops_resumes_and_reports(
    made: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert not make_tiny.train_target(made, replace(RECIPE, minutes=0))
    assert (made / "target_state.pt").exists() and not (made / "target_report.json").exists()
    assert make_tiny.train_target(made, RECIPE)
    report = json.loads((made / "target_report.json").read_text())
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == report
    assert report["steps"] == RECIPE.steps and report["loss"] < 8
    assert 0 <= report["exact_match_held_out"] <= 1
    for stage in ("data", "target"):  # both are done
        make_tiny.main(["--out", str(made), "--stage", stage])
    assert capsys.readouterr().out.count("exists") == 2


def test_the_other_stages_make_and_install_a_pair_that_runs(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = new_trainer(made)
    save_checkpoint(made / "target", trainer.decoder, trainer.decoder.config, prefix="model.")
    drafter = "--layers 1 --taps 0 --markov-rank 4 --samples 1 --max-tokens 8 --max-length 256"
    monkeypatch.setattr(make_tiny, "DRAFTER", f"{drafter} --batch 2 --anchors 2 --held-out 2")
    monkeypatch.setattr(make_tiny, "MAX_ANSWER", 8)
    monkeypatch.setattr(make_tiny, "EMBEDDED_PAIR", tmp_path / "pair")
    monkeypatch.setattr(make_tiny, "ROOT", tmp_path)
    (tmp_path / "tests" / "data").mkdir(parents=True)
    recipe = replace(RECIPE, drafter_problems=6, drafter_steps=(1, 2), calibration_problems=4)
    for stage in ("drafter", "calibrate", "install"):
        make, result = make_tiny.STAGES[stage]
        assert make(made, recipe) and (made / result).exists()
    assert (tmp_path / "tests" / "data" / make_tiny.HELD_OUT).exists()
    shipped = {path.name for path in (tmp_path / "pair" / "drafter").iterdir()}
    assert shipped == {"config.json", "model.safetensors", "confidence.json"}
    pair = tmp_path / "pair"
    llm = LLM(str(pair / "target"), draft=str(pair / "drafter"), device="cpu")
    assert llm.chat([{"role": "user", "content": "2 + 3?"}])[0].outputs[0].token_ids
    assert llm.stats.drafted > 0
