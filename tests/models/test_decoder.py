"""The decoder equals transformers, whole or in chunks, alone or among others."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from nanospec.attention.batch import build_batch
from nanospec.attention.torch_backend import TorchAttention
from nanospec.config import ModelConfig
from nanospec.models.decoder import Decoder
from nanospec.models.loader import load_decoder
from tests import helpers

GOLDEN = Path(__file__).parent.parent / "data" / "golden"


def load(folder: Path) -> Decoder:
    config = ModelConfig.from_folder(folder)
    return load_decoder(folder, config, dtype=torch.float32, device=torch.device("cpu"))


@torch.inference_mode()
def run(
    decoder: Decoder, prompts: Sequence[Sequence[int]], chunk: int, taps: Sequence[int] = ()
) -> tuple[list[Tensor], list[list[Tensor]]]:
    """Run prompts side by side in chunks; return each one's logits, and its streams per tap."""
    config, size = decoder.config, 4
    pages_each = -(-max(map(len, prompts)) // size)
    cache = helpers.new_cache(
        num_pages=pages_each * len(prompts),
        page_size=size,
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
    )
    attention = TorchAttention(cache)
    logits: list[list[Tensor]] = [[] for _ in prompts]
    streams: list[list[list[Tensor]]] = [[[] for _ in taps] for _ in prompts]
    for start in range(0, max(map(len, prompts)), chunk):
        spans = [range(min(start, len(p)), min(start + chunk, len(p))) for p in prompts]
        tables = [list(range(i * pages_each, (i + 1) * pages_each)) for i in range(len(prompts))]
        positions = torch.tensor([position for span in spans for position in span])
        batch = build_batch(
            token_ids=torch.tensor(
                [p[i] for p, span in zip(prompts, spans, strict=True) for i in span]
            ),
            positions=positions,
            slots=torch.tensor(
                [
                    t[i // size] * size + i % size
                    for t, s in zip(tables, spans, strict=True)
                    for i in s
                ]
            ),
            qo_lens=[len(span) for span in spans],
            kv_lens=[span.stop for span in spans],
            page_tables=tables,
            logit_rows=torch.arange(len(positions)),
        )
        attention.begin(batch)
        hidden, tapped = decoder(batch.token_ids, positions, attention, taps)
        rows = decoder.logits(hidden).split(batch.lens()[0])
        for index, own in enumerate(rows):
            logits[index].append(own)
        for tap, stream in enumerate(tapped):
            for index, own in enumerate(stream.split(batch.lens()[0])):
                streams[index][tap].append(own)
    return [torch.cat(each) for each in logits], [[torch.cat(t) for t in s] for s in streams]


@pytest.mark.parametrize("family", ["qwen3", "llama"])
@pytest.mark.parametrize("chunk", [1, 3, 16, 1000])
def test_logits_equal_transformers_in_chunks_and_in_company(
    family: str, chunk: int, request: pytest.FixtureRequest
) -> None:
    folder = request.getfixturevalue(family)
    reference, decoder = helpers.load_reference(folder), load(folder)
    prompts = helpers.random_prompts(3, seed=1, longest=50)
    want = [helpers.reference_logits(reference, prompt) for prompt in prompts]
    together, _ = run(decoder, prompts, chunk)
    alone, _ = run(decoder, prompts[:1], chunk)
    for got, expected in zip([*together, alone[0]], [*want, want[0]], strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "overrides",
    [
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}},
        {"tie_word_embeddings": False, "head_dim": 32},
        {"num_key_value_heads": 1},
        {"num_key_value_heads": 4},
    ],
    ids=["yarn", "untied-wide-heads", "one-kv-head", "no-groups"],
)
def test_qwen3_variants_equal_transformers(overrides: dict[str, Any], tmp_path: Path) -> None:
    folder = helpers.make_checkpoint(tmp_path, "qwen3", **overrides)
    prompt = helpers.random_prompts(1, seed=2, longest=60)[0]
    want = helpers.reference_logits(helpers.load_reference(folder), prompt)
    torch.testing.assert_close(run(load(folder), [prompt], 7)[0][0], want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("case", ["Q", "L"])
@pytest.mark.parametrize("chunk", [5, 1000])
def test_golden_logits(case: str, chunk: int) -> None:
    golden = load_file(GOLDEN / case / "golden.safetensors")
    decoder = load(GOLDEN / case)
    prompts = [golden[f"prompt{i}.ids"].tolist() for i in range(2)]
    for i, got in enumerate(run(decoder, prompts, chunk)[0]):
        torch.testing.assert_close(got, golden[f"prompt{i}.logits"], rtol=0, atol=2e-4)


def test_taps_give_the_residual_stream_after_the_layers_asked_for(qwen3: Path) -> None:
    reference, decoder = helpers.load_reference(qwen3), load(qwen3)
    prompt = helpers.random_prompts(1, seed=3)[0]
    with torch.inference_mode():
        hidden = reference(torch.tensor([prompt]), output_hidden_states=True).hidden_states
    _, streams = run(decoder, [prompt], 4, taps=(1, 0))
    torch.testing.assert_close(streams[0][0], hidden[2][0], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(streams[0][1], hidden[1][0], rtol=1e-4, atol=1e-4)
    assert run(decoder, [prompt], 4)[1] == [[]]
