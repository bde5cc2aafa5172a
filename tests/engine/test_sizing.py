"""Too little memory says how many pages fit and what to lower."""

from pathlib import Path

import pytest
import torch

from nanospec import LLM
from nanospec.attention.backend import HOST_PLANNED
from nanospec.attention.flash3_backend import Flash3Attention
from nanospec.attention.triton_backend import TritonAttention
from nanospec.config import CAPTURED, EngineConfig, ModelConfig
from nanospec.engine.sizing import count_pages, run_largest_step
from nanospec.errors import ConfigError
from nanospec.models.decoder import Decoder
from nanospec.models.loader import load_decoder
from nanospec.types import PlanKind, Resources
from tests import helpers

PAGE_BYTES = 2 * 3 * 16 * 2 * 16 * 4  # of the tiny Qwen3: both, layers, tokens, heads, width, fp32


def decoder(folder: Path) -> Decoder:
    config = ModelConfig.from_folder(folder)
    return load_decoder(folder, config, dtype=torch.float32, device=torch.device("cpu"))


PLAIN = Resources(PlanKind.CHAIN, 1)


def count(config: EngineConfig, folder: Path, max_model_len: int) -> int:
    own = decoder(folder)
    return count_pages(config, own, [own.config], PLAIN, max_model_len)


def test_the_cache_takes_what_it_is_given(qwen3: Path) -> None:
    config = EngineConfig(model="x", kv_cache_gib=20.5 * PAGE_BYTES / 2**30)
    assert count(config, qwen3, 256) == 20


def test_no_more_pages_than_can_be_held_at_once(qwen3: Path) -> None:
    config = EngineConfig(model="x", max_num_seqs=3)
    assert count(config, qwen3, 50) == 3 * 4


def test_too_few_pages_are_refused_with_the_way_out(qwen3: Path) -> None:
    config = EngineConfig(model="x", kv_cache_gib=5.5 * PAGE_BYTES / 2**30, max_model_len=96)
    with pytest.raises(ConfigError, match=r"^5 KV pages .* needs 6 .* at most 80"):
        count(config, qwen3, 96)


def test_where_no_page_fits_no_shorter_context_is_suggested(qwen3: Path) -> None:
    config = EngineConfig(model="x", kv_cache_gib=0.5 * PAGE_BYTES / 2**30)
    with pytest.raises(ConfigError, match=r"^0 KV pages") as raised:
        count(config, qwen3, 96)
    assert "at most" not in str(raised.value)


@pytest.mark.parametrize(("tokens", "requests"), [(7, 7), (20, 3), (16, 1)])
def test_the_largest_step_runs_at_any_size(qwen3: Path, tokens: int, requests: int) -> None:
    config = EngineConfig(
        model="x", max_num_batched_tokens=tokens, max_num_seqs=requests, page_size=3
    )
    with torch.inference_mode():
        assert run_largest_step(config, decoder(qwen3), PLAIN) > 0


def test_the_largest_step_has_all_rows_that_a_forward_may_have(
    qwen3: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nanospec.config.PROMPT_ROWS", 5)
    config = EngineConfig(model="x", max_num_seqs=3, page_size=1)
    with torch.inference_mode():
        size = run_largest_step(config, decoder(qwen3), Resources(PlanKind.CHAIN, 4))
    assert size == (3 * 4 + 5) * PAGE_BYTES // 16  # a page for each row


# Found in review: FlashAttention 3 was captured, and no memory was kept for its graphs.
def test_memory_is_kept_for_graphs_of_every_attention_that_is_captured() -> None:
    cache = helpers.new_cache()
    found = {"triton": TritonAttention(cache, 4).capability(0)}
    found["flash3"] = Flash3Attention.capability(TritonAttention(cache, 4), 0)  # as inherited
    found["flashinfer"] = HOST_PLANNED
    captured = {name for name, own in found.items() if own.takes_device_counts}
    assert {*CAPTURED} == {*captured, "auto"}  # which is triton on a GPU


@pytest.mark.gpu
def test_gpu_memory_is_sized_after_the_largest_step(tmp_path: Path) -> None:
    folder = helpers.make_checkpoint(tmp_path, "qwen3", head_dim=64)
    options = {"max_num_seqs": 64, "max_num_batched_tokens": 512, "device": "cuda"}
    small = LLM(str(folder), gpu_memory_utilization=0.05, **options)  # type: ignore[arg-type]
    assert small.engine.pages.num_pages >= 512 // 16
    with pytest.raises(ConfigError, match=r"^0 KV pages"):
        LLM(str(folder), gpu_memory_utilization=0.001, **options)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="kv_cache_gib=100000"):
        LLM(str(folder), kv_cache_gib=100_000, **options)  # type: ignore[arg-type]
