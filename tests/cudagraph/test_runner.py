"""The eager runner: logits of the wanted rows, and every row is observed."""

from pathlib import Path
from typing import Any

import torch

from nanospec.attention.batch import build_batch
from nanospec.attention.torch_backend import TorchAttention
from nanospec.cudagraph.runner import EagerRunner
from tests import helpers
from tests.models.test_decoder import load


def test_logits_of_wanted_rows_and_features_of_taps(qwen3: Path) -> None:
    decoder = load(qwen3)
    cache = helpers.new_cache(num_layers=3, head_dim=16)
    batch = build_batch(
        token_ids=torch.tensor([5, 6, 7]),
        positions=torch.arange(3),
        slots=torch.arange(16, 19),
        qo_lens=[3],
        kv_lens=[3],
        page_tables=[[4]],
        logit_rows=torch.tensor([2]),
    )
    seen: list[tuple[Any, list[torch.Tensor]]] = []

    def observe(batch: Any, features: Any) -> None:
        seen.append((batch, list(features)))

    with torch.inference_mode():
        plain = EagerRunner(decoder, TorchAttention(cache)).run(batch)
        tapped = EagerRunner(decoder, TorchAttention(cache), (0, 2), observe).run(batch)
    assert plain.logits.shape == (1, helpers.VOCAB_SIZE) and plain.tier == 3
    assert torch.equal(tapped.logits, plain.logits)
    ((observed, features),) = seen
    assert (
        observed.slots is batch.slots and [tuple(each.shape) for each in features] == [(3, 48)] * 2
    )
