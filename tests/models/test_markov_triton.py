"""The greedy step of a Markov head in two launches, against what `correct` and argmax choose."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from nanospec.models.dspark import DSparkConfig, DSparkDrafter
from nanospec.models.layers import Linear
from tests import helpers
from tests.test_pdl import REPLAYS, capture, one_after_another

GOLDEN = Path(__file__).parent.parent / "data" / "golden" / "A"
INF = float("inf")
SLOTS = 3


def make_drafter(
    kind: str,
    device: torch.device,
    *,
    vocab_size: int = 300,
    rank: int = 16,
    width: int = 48,
    dtype: torch.dtype = torch.float32,
) -> DSparkDrafter:
    """Return a random drafter of one small layer, whose Markov head says much."""
    config = DSparkConfig.from_hf(
        {
            "architectures": ["Qwen3DSparkModel"],
            "vocab_size": vocab_size,
            "hidden_size": width,
            "intermediate_size": 16,
            "num_hidden_layers": 1,
            "num_attention_heads": 1,
            "num_key_value_heads": 1,
            "head_dim": 16,
            "rms_norm_eps": 1e-6,
            "max_position_embeddings": 64,
            "rope_parameters": {"rope_theta": 500.0, "rope_type": "default"},
            "num_target_layers": 2,
            "target_layer_ids": [0],
            "block_size": 7,
            "mask_token_id": 0,
            "markov_rank": rank,
            "markov_head_type": kind,
        }
    )
    table = Linear(width, vocab_size, dtype, device)
    drafter = DSparkDrafter(config, dtype, device, embed_tokens=table, lm_head=table)
    generator = torch.Generator(device).manual_seed(0)
    for parameter in drafter.parameters():
        parameter.normal_(0.0, parameter.shape[-1] ** -0.5, generator=generator)
    assert drafter.markov_head is not None
    drafter.markov_head.markov_w1.weight.normal_(0.0, 1.0, generator=generator)
    return drafter


def chosen(logits: Tensor) -> Tensor:
    """Return the first of the largest of each row."""
    return logits.argmax(dim=-1)


@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn"])
@pytest.mark.parametrize("count", [1, 3, 17, 33])
def test_a_block_gets_the_tokens_of_the_specification(
    kind: str, count: int, device: torch.device
) -> None:
    drafter = make_drafter(kind, device)
    head = drafter.markov_head
    assert head is not None and head.can_fuse()
    generator = torch.Generator().manual_seed(count)
    hidden = torch.randn(count, SLOTS, 48, generator=generator).to(device)
    base = 0.3 * torch.randn(count, SLOTS, 300, generator=generator).to(device)
    tokens = torch.zeros(count, 1 + SLOTS, dtype=torch.int64, device=device)
    tokens[:, 0] = torch.randint(300, (count,), generator=generator)
    want, want_state = tokens[:, 0], drafter.first_state(count)
    state = want_state
    for slot in range(SLOTS):
        state = head.fused_greedy_token(
            base[:, slot], hidden[:, slot], tokens[:, slot], state, tokens[:, 1 + slot]
        )
        logits, want_state = drafter.correct(base[:, slot], hidden[:, slot], want, want_state)
        want = chosen(logits)
        assert tokens[:, 1 + slot].tolist() == want.tolist()
        assert torch.equal(state, want_state)
    assert bool((want != chosen(base[:, -1])).any()) or count == 1


def small_integers(least: int, above: int, *shape: int) -> Tensor:
    return torch.randint(least, above, shape, generator=torch.Generator().manual_seed(0)).float()


def greedy_tokens(base: Tensor, vectors: Tensor, index: Tensor | None, weight: Tensor) -> list[int]:
    """Return what the kernels choose; all that they write is between two columns they leave."""
    from nanospec.models import markov_triton

    out = torch.full((len(base), 3), -1, device=base.device)
    markov_triton.greedy_tokens(base, vectors, index, weight, out[:, 1])
    assert out[:, ::2].eq(-1).all()
    return out[:, 1].tolist()


@pytest.mark.parametrize("count", [0, 2, 18])
@pytest.mark.parametrize("vocab_size", [1, 127, 128, 700])
@pytest.mark.parametrize("is_half", [False, True])
def test_of_equal_tokens_it_is_the_first(
    count: int, vocab_size: int, is_half: bool, device: torch.device
) -> None:
    dtype = torch.float16 if is_half else torch.float32
    base = small_integers(0, 2, count, 2, vocab_size).to(device, dtype)[:, 1]
    vectors = small_integers(-1, 2, 5, 16).to(device, dtype)
    weight = small_integers(0, 2, vocab_size, 16).to(device, dtype)
    index = small_integers(0, 5, count, 2).to(device).long()[:, 0]
    logits = base + vectors[index] @ weight.T
    assert greedy_tokens(base, vectors, index, weight) == chosen(logits).tolist()
    if count <= 5:
        logits = base + vectors[:count] @ weight.T
        assert greedy_tokens(base, vectors, None, weight) == chosen(logits).tolist()
    if vocab_size == 700 and count > 0:
        assert bool(((logits == logits.amax(1, keepdim=True)).sum(dim=1) > 1).any())


def test_rows_without_a_choice_get_the_first_token(device: torch.device) -> None:
    base = torch.full((3, 300), -INF, device=device)
    base[1, 299] = -1e30
    base[2, [128, 130]] = 3.0
    ones = torch.ones(300, 16, device=device)
    assert greedy_tokens(base, ones, None, ones) == [0, 299, 128]


@pytest.mark.gpu  # of nan the interpreter warns
def test_rows_of_nan_get_a_token_that_exists() -> None:
    base = torch.full((2, 300), float("nan"), device="cuda")
    base[1, 0] = 1.0
    ones = torch.ones(300, 16, device="cuda")
    assert all(0 <= token < 300 for token in greedy_tokens(base, ones, None, ones))


def test_the_correction_is_rounded_before_it_is_added(device: torch.device) -> None:
    weight = torch.zeros(300, 16, dtype=torch.float16, device=device)
    weight[3, 0] = 1.0
    weight[5, :2] = torch.tensor([1.0, 2**-12])  # their sum rounds to 1
    ones = torch.ones(1, 16, dtype=torch.float16, device=device)
    assert greedy_tokens(torch.zeros_like(weight[:, :1]).T, ones, None, weight) == [3]


def test_ranks_that_fit() -> None:
    from nanospec.models import markov_triton

    def fitting(dtype: torch.dtype) -> list[int]:
        ranks = (8, 16, 24, 48, 128, 256, 512, 1024)
        return [r for r in ranks if markov_triton.fits(torch.empty(10, r, dtype=dtype))]

    assert fitting(torch.bfloat16) == [16, 128, 256, 512]
    assert fitting(torch.float32) == [16, 128, 256]


def test_golden_drafts_are_those_of_the_specification(
    monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    def fused(drafter: DSparkDrafter, *args: Tensor, out: Tensor) -> Tensor:
        assert drafter.markov_head is not None
        return drafter.markov_head.fused_greedy_token(*args, out)

    def plain(drafter: DSparkDrafter, *args: Tensor, out: Tensor) -> Tensor:
        logits, state = drafter.correct(*args)
        out.copy_(chosen(logits))
        return state

    def verified(step: Callable[..., Tensor]) -> list[list[int]]:
        monkeypatch.setattr(DSparkDrafter, "greedy_token", step)
        options = {"device": device.type, "kv_cache_gib": 0.05}
        llm = helpers.make_llm(GOLDEN / "target", draft=str(GOLDEN), **options)
        rows: list[list[int]] = []
        llm.engine.observers.append(lambda output: rows.extend(output.plan.tokens.tolist()))
        llm.generate([[5, 9, 2], [100, 30]], helpers.greedy(8))
        return rows

    assert verified(fused) == verified(plain)


def us_per_call(run: Callable[[], object], calls: int) -> float:
    """Return how long one of the calls in `run` takes in a graph, in microseconds."""
    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    times = []
    for _ in range(8):
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / calls)
    return sorted(times)[len(times) // 2]


@pytest.mark.gpu
@pytest.mark.parametrize("count", [1, 8, 32, 64, 256])
@torch.inference_mode()
def test_a_real_head_on_a_gpu(count: int) -> None:
    """And print how long a step takes; pytest -s shows it."""
    device, slots = torch.device("cuda", 0), 7
    shape = {"vocab_size": 151936, "rank": 256, "width": 64}
    drafter = make_drafter("vanilla", device, dtype=torch.bfloat16, **shape)
    head = drafter.markov_head
    assert head is not None and head.can_fuse()
    generator = torch.Generator(device).manual_seed(count)
    base = torch.empty(count, slots, 151936, dtype=torch.bfloat16, device=device)
    base.normal_(generator=generator)
    hidden = base[:, :, :64]
    tokens = torch.randint(151936, (count, 1 + slots), generator=generator, device=device)
    state = drafter.first_state(count)

    def fused() -> None:
        for slot in range(slots):
            known = (base[:, slot], hidden[:, slot], tokens[:, slot], state)
            drafter.greedy_token(*known, out=tokens[:, 1 + slot])

    def plain() -> None:
        for slot in range(slots):
            logits, _ = drafter.correct(base[:, slot], hidden[:, slot], tokens[:, slot], state)
            tokens[:, 1 + slot] = chosen(logits)

    times = us_per_call(plain, slots), us_per_call(fused, slots)
    print(f"\n{count} blocks: {times[0]:.1f} us a step by torch, {times[1]:.1f} us fused")
    fused()
    num_equal = 0
    for slot in range(slots):
        vectors = head.embed(tokens[:, slot]).float()
        bias = vectors @ head.markov_w2.weight.float().T
        logits = base[:, slot].float() + bias
        most, token = logits.max(dim=1)
        got = tokens[:, 1 + slot]
        # bf16 rounds the corrections of both tokens by up to 2 ** -8 of each.
        slack = 2**-7 * bias.abs().amax(dim=1)
        assert bool((logits.gather(1, got[:, None])[:, 0] >= most - slack).all())
        num_equal += int((got == token).sum())
    assert num_equal > 0.7 * tokens[:, 1:].numel()


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn"])
@pytest.mark.parametrize("count", [1, 8, 32, 64])
@torch.inference_mode()
def test_each_slot_reads_the_token_that_the_slot_before_has_just_got(
    kind: str, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same as from kernels of which none starts before the one before has ended."""
    device, slots, vocab_size = torch.device("cuda", 0), 7, 151936
    if torch.cuda.get_device_capability(device) < (9, 0):
        pytest.skip("needs compute capability 9")
    shape = {"vocab_size": vocab_size, "rank": 256, "width": 64}
    drafter = make_drafter(kind, device, dtype=torch.bfloat16, **shape)
    assert drafter.markov_head is not None and drafter.markov_head.can_fuse()
    generator = torch.Generator(device).manual_seed(count)
    base = torch.empty(count, slots, vocab_size, dtype=torch.bfloat16, device=device)
    base.normal_(std=0.3, generator=generator)
    hidden = torch.empty(count, slots, 64, dtype=torch.bfloat16, device=device)
    hidden.normal_(generator=generator)
    tokens = torch.zeros(count, 1 + slots, dtype=torch.int64, device=device)

    def chain() -> None:
        state = drafter.first_state(count)
        for slot in range(slots):
            known = (base[:, slot], hidden[:, slot], tokens[:, slot], state)
            state = drafter.greedy_token(*known, out=tokens[:, 1 + slot])

    early, _ = capture(chain)
    one_after_another(monkeypatch)
    late, _ = capture(chain)
    last = set()
    for _ in range(REPLAYS):
        # Not the roots alone: whoever reads a token too early reads one that makes a difference.
        tokens.random_(vocab_size, generator=generator)
        early.replay()
        got = tokens.tolist()
        late.replay()
        assert got == tokens.tolist()
        last.update(row[-1] for row in got)
    assert len(last) > REPLAYS // 2
