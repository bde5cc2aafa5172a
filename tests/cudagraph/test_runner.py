"""The eager runner: logits of the wanted rows, features when asked."""

from pathlib import Path

import torch

from nanospec.attention.torch_backend import TorchAttention
from nanospec.cudagraph.runner import EagerRunner
from nanospec.engine.packing import pack
from nanospec.types import Segment
from tests import helpers
from tests.models.test_decoder import load


def test_logits_of_wanted_rows_and_features_of_taps(qwen3: Path) -> None:
    decoder = load(qwen3)
    cache = helpers.new_cache(num_layers=3, head_dim=16)
    request = helpers.make_request([5, 6, 7])
    request.pages = [4]
    batch = pack([Segment(request, 3)], cache.page_size, torch.device("cpu"))
    with torch.inference_mode():
        plain = EagerRunner(decoder, TorchAttention(cache)).run(batch)
        tapped = EagerRunner(decoder, TorchAttention(cache), taps=(0, 2)).run(batch)
    assert plain.logits.shape == (1, helpers.VOCAB_SIZE) and plain.features == []
    assert torch.equal(tapped.logits, plain.logits)
    assert [tuple(feature.shape) for feature in tapped.features] == [(3, 48)] * 2
