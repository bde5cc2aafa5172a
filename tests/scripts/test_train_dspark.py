"""The trainer sees what the drafter will see; its stages stop, go on and end the same."""

import argparse
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import train_dspark
from safetensors.torch import load_file
from torch import Tensor
from train_dspark import Batch, batches, block_losses, collate, spread_taps
from training import BlockAttention, cosine

from nanospec.config import ModelConfig
from nanospec.errors import CheckpointError
from nanospec.models.decoder import Decoder
from nanospec.models.dspark import CALIBRATION, DSparkConfig, DSparkDrafter
from nanospec.models.loader import load_decoder, load_drafter
from tests import helpers

GOLDEN = Path(__file__).resolve().parents[1] / "data" / "golden" / "A"
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def golden() -> dict[str, Tensor]:
    """Golden tensors of the drafter."""
    return load_file(GOLDEN / "golden.safetensors")


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Decoder, DSparkDrafter]:
    """The golden target and drafter."""
    folder = tmp_path_factory.mktemp("drafter")
    for name in ("config.json", "model.safetensors"):
        (folder / name).write_bytes((GOLDEN / name).read_bytes())
    target_folder = GOLDEN / "target"
    target = load_decoder(
        target_folder, ModelConfig.from_folder(target_folder), dtype=torch.float32, device=CPU
    )
    return target, load_drafter(folder, DSparkConfig.from_folder(folder), target)


def test_blocks_in_training_give_the_golden_hidden_states(
    golden: dict[str, Tensor], pair: tuple[Decoder, DSparkDrafter]
) -> None:
    _, drafter = pair
    features = torch.cat([golden[f"round{k}.context_features"] for k in range(3)])
    starts = [int(golden[f"round{k}.start"]) for k in range(3)]
    anchors = torch.tensor([[starts[2], starts[0], starts[1]]])  # in any order
    length = len(features)
    context = drafter.context(features.chunk(3, dim=-1), torch.arange(length))
    block_ids = torch.cat([golden[f"round{k}.block_ids"] for k in (2, 0, 1)])
    positions = torch.cat([golden[f"round{k}.block_position_ids"] for k in (2, 0, 1)])
    attention: Any = BlockAttention(context, (1, length), anchors, 7)
    hidden = drafter(block_ids, positions, attention).view(3, 7, -1)
    for row, k in enumerate((2, 0, 1)):
        torch.testing.assert_close(hidden[row], golden[f"round{k}.hidden"], rtol=0, atol=2e-4)


def test_the_losses_are_those_of_each_block_alone(
    golden: dict[str, Tensor], pair: tuple[Decoder, DSparkDrafter]
) -> None:
    target, drafter = pair
    text = golden["prompt_ids"].tolist() + golden["greedy_ids"][:9].tolist()
    other = [*text[:6], 5, 9, 70]
    batch = collate([text, other], [13, 6], CPU)
    anchors = torch.tensor([[13, 20, 15], [6, 7, 0]])
    is_meant = torch.tensor([[True, True, True], [True, True, False]])
    found = block_losses(drafter, target, batch, anchors, is_meant)
    sums, weights, lengths = torch.zeros(3), 0.0, []
    for row, column in is_meant.nonzero().tolist():
        tokens = [text, other][row]
        length, alive = 1.0, 1.0
        for slot, (weight, *losses, overlap) in enumerate(
            one_block(target, drafter, tokens, int(anchors[row, column]))
        ):
            sums += weight * torch.tensor(losses)
            weights += weight
            alive *= overlap
            length += alive
            assert slot < 7
        lengths.append(length)
    got = torch.stack((found.ce, found.l1, found.confidence))
    torch.testing.assert_close(got, sums / weights, rtol=1e-4, atol=1e-4)
    assert float(found.length) == pytest.approx(sum(lengths) / len(lengths), abs=1e-4)


def one_block(
    target: Decoder, drafter: DSparkDrafter, tokens: list[int], anchor: int
) -> list[tuple[float, ...]]:
    """Return weight, losses and overlap of the slots of one block, all computed alone."""
    from training import CausalAttention

    size = drafter.config.block_size
    ids, at = torch.tensor(tokens), torch.arange(len(tokens))
    attention: Any = CausalAttention(1, len(tokens))
    hidden, features = target(ids, at, attention, drafter.config.target_layer_ids)
    context = drafter.context([each[:anchor] for each in features], at[:anchor])
    block = torch.tensor([tokens[anchor]] + [drafter.config.mask_token_id] * (size - 1))
    own: Any = BlockAttention(context, (1, anchor), torch.tensor([[anchor]]), size)
    drafted = drafter(block, torch.arange(anchor, anchor + size), own)
    state, found = drafter.first_state(1), []
    for slot in range(min(size, len(tokens) - anchor - 1)):
        row = drafted[slot][None]
        previous = ids[anchor + slot][None]
        logits, state = drafter.correct(drafter.base_logits(row), row, previous, state)
        confidence = drafter.confidences(row, previous)
        assert confidence is not None
        q, p = logits[0].softmax(-1), target.logits(hidden[anchor + slot]).softmax(-1)
        overlap = torch.minimum(q, p).sum()
        ce = -q[tokens[anchor + slot + 1]].log()
        bce = -overlap * confidence.sigmoid().log() - (1 - overlap) * (-confidence).sigmoid().log()
        weight = torch.tensor(-slot / 4.0).exp()
        found.append(tuple(float(each) for each in (weight, ce, (q - p).abs().sum(), bce, overlap)))
    return found


def test_anchors_are_tokens_of_the_response_with_one_after_them() -> None:
    batch = collate([[1, 2, 3, 4, 5, 6], [1, 2, 3, 4]], [2, 3], CPU)
    anchors, is_meant = batch.anchors(8, torch.Generator().manual_seed(0))
    assert sorted(anchors[0][is_meant[0]].tolist()) == [2, 3, 4]
    assert anchors[1][is_meant[1]].tolist() == []


def options(**values: Any) -> argparse.Namespace:
    return argparse.Namespace(**({"batch": 2, "seed": 0, "max_length": 64} | values))


def test_batches_go_on_where_they_stopped() -> None:
    rows = [{"prompt": [1] * n, "output": [n] * (n + 2)} for n in range(1, 12)]
    streams = [batches(rows, options(), CPU, first) for first in (0, 3, 8)]
    whole = list(itertools.islice(streams[0], 14))
    for first, stream in ((3, streams[1]), (8, streams[2])):
        for want, got in zip(whole[first:], stream, strict=False):
            assert torch.equal(want.token_ids, got.token_ids)
    seen = [int(batch.is_output.sum()) for batch in whole[:5]]
    assert len(set(seen)) > 1


def test_taps_are_spread_like_the_released_ones() -> None:
    assert spread_taps(36, 5) == [1, 9, 17, 25, 33]
    assert spread_taps(40, 5) == [1, 10, 19, 28, 37]
    assert spread_taps(8, 3) == [1, 3, 5]
    for layers in range(1, 6):
        assert max(spread_taps(layers, 3)) <= layers - 2


def test_the_learning_rate_rises_then_falls_to_nothing() -> None:
    factors = [cosine(step, 100, 10) for step in range(101)]
    assert factors[:10] == sorted(factors[:10]) and factors[9] == 1
    assert factors[10:] == sorted(factors[10:], reverse=True) and factors[100] < 1e-9


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    """A file of prompts."""
    path = tmp_path / "prompts.jsonl"
    rows = [json.dumps({"prompt": prompt}) for prompt in helpers.random_prompts(9, seed=4)]
    path.write_text("\n".join(rows))
    return path


def run(target: Path, prompts: Path, out: Path, *more: str) -> bool:
    arguments = f"--target {target} --data {prompts} --out {out} --device cpu --no-plot"
    arguments += " --held-out 3 --max-tokens 10 --max-length 64 --steps 4 --batch 2 --anchors 3"
    arguments += " --layers 1 --taps 0,1 --markov-rank 4 --max-num-seqs 8 --kv-cache-gib 0.01"
    return train_dspark.main([*arguments.split(), *more])


def test_a_stopped_training_goes_on_to_the_same_weights(
    qwen3: Path, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    samples = ("--samples", "2", "--temperatures", "0,1")
    assert run(qwen3, prompts, tmp_path / "straight", *samples)
    out = tmp_path / "resumed"
    assert not run(qwen3, prompts, out, *samples, "--minutes", "0")
    with monkeypatch.context() as patch:  # every look at the clock takes 25 seconds
        patch.setattr(train_dspark.time, "monotonic", itertools.count(0, 25).__next__)
        assert not run(qwen3, prompts, out, *samples, "--minutes", "1")
    assert 0 < torch.load(out / "state.pt")["step"] < 4
    before = (out / "responses" / "responses-00.jsonl").read_text()
    assert run(qwen3, prompts, out, *samples)
    assert (out / "responses" / "responses-00.jsonl").read_text() == before
    weights = [load_file(tmp_path / name / "model.safetensors") for name in ("straight", "resumed")]
    assert weights[0].keys() == weights[1].keys() and "embed_tokens.weight" not in weights[0]
    for name in weights[0]:
        assert torch.equal(weights[0][name], weights[1][name]), name
    report = json.loads((out / "report.json").read_text())
    assert report["responses"] == 12 and report["training_seconds"] > 0
    assert {row["acceptance"] for row in report["acceptance"]} == {
        "equal tokens",
        "rejection",
        "shared-noise",
    }
    assert report["curve"][-1]["step"] == 4 and "held_out_length" in report["curve"][-1]


def test_a_killed_training_repeats_no_step_of_its_curve(
    qwen3: Path, prompts: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    assert not run(qwen3, prompts, out, "--minutes", "0")
    lines = [json.dumps({"step": step, "loss": 9.0}) for step in (0, 3)]  # 3 was not saved
    (out / "losses.jsonl").write_text("\n".join(lines) + "\n")
    (out / CALIBRATION).write_text("{}")
    assert run(qwen3, prompts, out)
    curve = [json.loads(line) for line in (out / "losses.jsonl").read_text().splitlines()]
    assert [row["step"] for row in curve] == [0, 4]
    assert not (out / CALIBRATION).exists()  # it was that of other weights


@pytest.mark.parametrize("more", [(), ("--store-embeddings",), ("--shard-mb", "0.01")])
def test_what_is_saved_is_a_drafter_that_loads(
    qwen3: Path, prompts: Path, tmp_path: Path, more: tuple[str, ...]
) -> None:
    out = tmp_path / "out"
    assert run(qwen3, prompts, out, "--markov-head", "rnn", *more)
    files = sorted(path.name for path in out.glob("*.safetensors"))
    assert (len(files) > 3) == ("--shard-mb" in more)
    llm = helpers.make_llm(qwen3, draft=str(out))
    plain = helpers.make_llm(qwen3)
    tokens = helpers.random_prompts(3, seed=8)
    assert helpers.token_ids(llm, tokens, helpers.greedy()) == helpers.token_ids(
        plain, tokens, helpers.greedy()
    )
    assert llm.stats.drafted > 0
    if "--store-embeddings" in more:
        stored = load_file(out / "model.safetensors")
        table = load_file(qwen3 / "model.safetensors")["model.embed_tokens.weight"].bfloat16()
        assert torch.equal(stored["embed_tokens.weight"], table)
        assert torch.equal(stored["lm_head.weight"], table)


def test_a_few_steps_bring_the_loss_down(qwen3: Path, prompts: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert run(qwen3, prompts, out, "--steps", "100", "--anchors", "8", "--lr", "1e-2")
    curve = [json.loads(line) for line in (out / "losses.jsonl").read_text().splitlines()]
    assert curve[-1]["l1"] < 0.9 * curve[0]["l1"]


def test_bad_input_ends_in_one_clear_message(qwen3: Path, prompts: Path, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="--held-out"):
        run(qwen3, prompts, tmp_path / "a", "--held-out", "9")
    with pytest.raises(SystemExit, match="--held-out"):
        run(qwen3, prompts, tmp_path / "a", "--held-out", "0")
    with pytest.raises(SystemExit, match="--batch 64"):
        run(qwen3, prompts, tmp_path / "b", "--batch", "64")
    for wrong in (("--taps", "1,2"), ("--block-size", "0")):
        with pytest.raises(CheckpointError, match=r"target_layer_ids|block_size"):
            run(qwen3, prompts, tmp_path / "c", *wrong)
        assert not (tmp_path / "c" / "responses").exists()  # refused before hours of work


def test_prompts_that_are_too_long_are_left_out(
    qwen3: Path, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with prompts.open("a") as file:
        file.write("\n" + json.dumps({"prompt": [9] * 63}))
    assert run(qwen3, prompts, tmp_path / "out", "--steps", "1")
    assert "1 prompts do not fit" in capsys.readouterr().out


def test_a_batch_is_padded_on_the_right() -> None:
    batch = collate([[1, 2, 3], [4, 5]], [1, 1], CPU)
    assert isinstance(batch, Batch) and batch.token_ids.shape == (2, 8)
    assert batch.token_ids[1, :3].tolist() == [4, 5, 0]
    assert batch.is_output.sum(1).tolist() == [2, 1]
