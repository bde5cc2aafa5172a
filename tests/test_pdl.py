"""Kernels that start early touch nothing early, and give what they give one after another."""

import ast
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import nanospec
from nanospec.attention.batch import build_batch
from nanospec.config import ModelConfig
from nanospec.models.decoder import Decoder
from tests import helpers

ROOT = Path(nanospec.__file__).parent
REPLAYS = 50
NUM_KERNELS = 10  # that may be launched early
# What may be called before the wait, beside casts and loads of weights: it touches no memory.
HELPERS = {"_weight_rows"}
HARMLESS = HELPERS | {"tl.arange", "tl.program_id", "tl.num_programs", "tl.zeros", "tl.full"}
HARMLESS |= {"tl.where", "tl.minimum", "tl.maximum"}


def functions() -> list[ast.FunctionDef]:
    """Return all functions of files of kernels."""
    return [
        node
        for path in sorted(ROOT.rglob("*_triton.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef)
    ]


def is_harmless(call: ast.Call) -> bool:
    """Return whether a call may come before the wait."""
    if isinstance(call.func, ast.Attribute) and call.func.attr == "to":
        return True
    if ast.unparse(call.func) != "tl.load":
        return ast.unparse(call.func) in HARMLESS
    names = {node.id for node in ast.walk(call.args[0]) if isinstance(node, ast.Name)}
    pointers = {name for name in names if "ptr" in name}
    return bool(pointers) and all("weight" in name for name in pointers)


def harmful_calls(step: ast.AST) -> list[str]:
    """Return the calls of a step that may not come before the wait."""
    calls = [node for node in ast.walk(step) if isinstance(node, ast.Call)]
    return [ast.unparse(call) for call in calls if not is_harmless(call)]


def test_every_kernel_waits_on_every_path_and_reads_only_weights_before() -> None:
    found = [each for each in functions() if "PDL" in [arg.arg for arg in each.args.args]]
    assert len(found) == NUM_KERNELS
    for kernel in found:
        steps = [ast.unparse(step) for step in kernel.body]
        assert steps.count("pdl.wait(PDL)") == 1, f"{kernel.name} waits not at all, or in a branch"
        for step in kernel.body[: steps.index("pdl.wait(PDL)")]:
            assert not harmful_calls(step), f"{kernel.name} does this before it waits"
            ends = any(isinstance(node, ast.Return) for node in ast.walk(step))
            assert not ends, f"{kernel.name} ends without waiting"


def test_helpers_called_before_the_wait_touch_no_memory() -> None:
    found = [each for each in functions() if each.name in HELPERS]
    assert {each.name for each in found} == HELPERS
    for helper in found:
        for step in helper.body:
            assert not harmful_calls(step) and "tl.load" not in ast.unparse(step), helper.name


def test_nothing_is_early_without_a_gpu() -> None:
    from nanospec import pdl

    assert pdl.launch_options(torch.zeros(1)) == {"PDL": False}


@pytest.fixture
def device(device: torch.device) -> torch.device:
    """A GPU whose kernels may start early."""
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (9, 0):
        pytest.skip("needs compute capability 9")
    return device


def one_after_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """Launch the same kernels, compiled alike, the usual way."""
    from nanospec import pdl

    options = {"PDL": True, "launch_pdl": False}
    monkeypatch.setattr(pdl, "launch_options", lambda x: options)


def capture(run: Any) -> tuple[torch.cuda.CUDAGraph, Any]:
    """Return a graph, and what it leaves."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        left = run()
    return graph, left


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 8, 13, 17, 64])
@torch.inference_mode()
def test_a_chain_of_products_reads_what_was_just_written(
    rows: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beyond 16 rows kernels of cuBLAS stand between ours."""
    from nanospec.models import layers, layers_triton, linear_triton

    def random(*shape: int) -> Tensor:
        return (torch.randn(shape, device=device) / shape[-1] ** 0.5).bfloat16()

    first, second, third = random(4096, 4096), random(24576, 4096), random(4096, 12288)
    norm, x = random(4096) * 64, random(rows, 4096)
    inputs = [random(rows, 4096) * 64 for _ in range(REPLAYS)]
    assert linear_triton.can_run(x, first) == (rows <= 16)

    def chain() -> list[Tensor]:
        found = []
        stream, delta = x, None
        for _ in range(3):
            stream, normed = layers_triton.add_rms_norm(stream, delta, norm, 1e-6)
            once = layers.linear(normed, first)
            fused = layers.linear_swiglu(once, second)
            unfused = layers_triton.swiglu(layers.linear(once, second))
            delta = layers.linear(fused, third)
            found += [stream, normed, once, fused, unfused, delta]
        return found

    early, got = capture(chain)
    one_after_another(monkeypatch)
    late, want = capture(chain)
    for each in inputs:
        x.copy_(each)
        early.replay()
        late.replay()
        torch.testing.assert_close(got, want, rtol=0, atol=0)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "lens",
    [([1], [300]), ([8, 3], [700, 40]), ([17], [300]), ([61, 3], [700, 40])],
    ids=str,
)
@torch.inference_mode()
def test_a_decoder_reads_what_was_just_written(
    lens: tuple[list[int], list[int]], device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    from nanospec.attention.triton_backend import TritonAttention

    torch.manual_seed(0)
    config = decoder_config()
    decoder = Decoder(config, torch.bfloat16, device)
    for parameter in decoder.parameters():
        parameter.normal_(std=0.05 if parameter.dim() > 1 else 1.0)
    shape: dict[str, Any] = {"num_layers": config.num_layers, "head_dim": config.head_dim}
    cache = helpers.new_cache(100, 16, **shape, dtype=torch.bfloat16, device=device)
    attention = TritonAttention(cache, config.num_heads)
    qo_lens, kv_lens = lens
    starts = [50 * index for index in range(len(qo_lens))]  # pages
    tables = [list(range(first, first + 50)) for first in starts]
    places = list(zip(qo_lens, kv_lens, strict=True))
    positions = torch.tensor([at for own, end in places for at in range(end - own, end)])
    offsets = [16 * first for first, own in zip(starts, qo_lens, strict=True) for _ in range(own)]
    tokens = torch.zeros(sum(qo_lens), dtype=torch.int64, device=device)
    batch = build_batch(
        tokens,
        positions.to(device),
        (positions + torch.tensor(offsets)).to(device),
        qo_lens,
        kv_lens,
        tables,
        tokens[:0],
    )

    def forward() -> Tensor:
        attention.begin(batch)
        return decoder(batch.token_ids, batch.positions, attention)[0]

    early, got = capture(forward)
    one_after_another(monkeypatch)
    late, want = capture(forward)
    for _ in range(REPLAYS):
        batch.token_ids.random_(config.vocab_size)
        early.replay()
        found = got, cache.k.clone(), cache.v.clone()
        late.replay()
        torch.testing.assert_close(found, (want, cache.k, cache.v), rtol=0, atol=0)


def decoder_config() -> ModelConfig:
    """Return the shape of a small model all of whose products our kernels take."""
    shape = {
        "architectures": ["Qwen3ForCausalLM"],
        "vocab_size": 512,
        "hidden_size": 1024,
        "intermediate_size": 2048,
        "num_hidden_layers": 6,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "max_position_embeddings": 4096,
    }
    return ModelConfig.from_hf(shape)
