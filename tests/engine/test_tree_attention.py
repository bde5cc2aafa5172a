"""Verifying a tree equals running each of its paths alone, beside chunks and plain rows."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from nanospec.attention.backend import create_attention
from nanospec.config import ModelConfig
from nanospec.engine.packing import pack
from nanospec.models.decoder import Decoder
from nanospec.models.loader import load_decoder
from nanospec.spec.plan import build_plan
from nanospec.types import Draft, PlanKind, Request, Resources, Segment
from tests import helpers

PAGE = 4


def run(decoder: Decoder, backend: str, jobs: list[tuple[list[int], Draft | None]]) -> list[Tensor]:
    """Cache each context, then run its last token with its draft; return each one's logits."""
    device = decoder.device
    config = decoder.config
    cache = helpers.new_cache(
        num_pages=200,
        page_size=PAGE,
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        dtype=decoder.dtype,
        device=device,
    )
    attention = create_attention(backend, cache, config.num_heads)
    requests: list[Request] = []
    free = list(range(200))
    for index, (tokens, draft) in enumerate(jobs):
        size = 0 if draft is None else len(draft)
        request = helpers.make_request(tokens, request_id=index, draft=draft, max_drafts=99)
        request.pages = [
            free.pop(7 * len(free) % 11) for _ in range(-(-(len(tokens) + size) // PAGE))
        ]
        requests.append(request)
    resources = Resources(PlanKind.MASK, 64)
    options = {"page_size": PAGE, "scratch_slot": 199 * PAGE, "device": device}
    plan = build_plan(
        requests,
        [request.num_planned for request in requests],
        resources=resources,
        vocab_size=config.vocab_size,
        device=device,
    )
    # The contexts run as chunks in the same forward as the trees.
    chunks = [Segment(r, len(r.tokens) - 1) for r in requests if len(r.tokens) > 1]
    step = pack(plan, requests, chunks, **options)  # type: ignore[arg-type]
    with torch.inference_mode():
        attention.begin(step.batch)
        hidden, _ = decoder(step.batch.token_ids, step.batch.positions, attention)
        logits = decoder.logits(hidden[step.batch.logit_rows]).float().cpu()
    return list(logits.split([1 + request.num_planned for request in requests]))


def random_jobs(seed: int) -> list[tuple[list[int], Draft | None]]:
    generator = torch.Generator().manual_seed(seed)

    def below(high: int) -> int:
        return int(torch.randint(high, (1,), generator=generator))

    jobs: list[tuple[list[int], Draft | None]] = []
    for size in (0, 1, 5, 16, 63 if seed == 0 else 9):
        tokens = [5 + below(290) for _ in range(1 + below(20))]
        parents = [below(row) for row in range(1, size + 1)]
        draft = Draft([5 + below(290) for _ in range(size)], parents) if size else None
        jobs.append((tokens, draft))
    return jobs


def path_to(draft: Draft, row: int) -> list[int]:
    """Return the tokens from the root's child down to a row."""
    assert draft.parents is not None
    path: list[int] = []
    while row > 0:
        path.insert(0, int(draft.tokens[row - 1]))
        row = draft.parents[row - 1]
    return path


@pytest.mark.parametrize("seed", range(4))
def test_every_path_of_a_tree_is_as_if_alone(qwen3: Path, seed: int) -> None:
    config = ModelConfig.from_folder(qwen3)
    decoder = load_decoder(qwen3, config, dtype=torch.float32, device=torch.device("cpu"))
    jobs = random_jobs(seed)
    for (tokens, draft), got in zip(jobs, run(decoder, "torch", jobs), strict=True):
        for row in range(len(got)):
            alone = tokens + (path_to(draft, row) if draft is not None else [])
            (want,) = run(decoder, "torch", [(alone, None)])
            torch.testing.assert_close(got[row], want[0], rtol=1e-4, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(4))
def test_flashinfers_trees_are_those_of_the_torch_backend(tmp_path: Path, seed: int) -> None:
    folder = helpers.make_checkpoint(tmp_path, "qwen3", head_dim=64)
    config = ModelConfig.from_folder(folder)
    device = torch.device("cuda", 0)
    decoder = load_decoder(folder, config, dtype=torch.bfloat16, device=device)
    jobs = random_jobs(seed)
    pairs = zip(run(decoder, "flashinfer", jobs), run(decoder, "torch", jobs), strict=True)
    for got, want in pairs:
        error = (got - want).norm() / want.norm()
        assert error < 0.03
