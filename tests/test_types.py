"""Sampling parameters refuse what cannot work; statistics add up."""

import copy
import pickle
from typing import Any

import pytest
import torch

from nanospec import SamplingParams
from nanospec.errors import ConfigError
from nanospec.types import Draft, DraftRow, DraftRows, Stats


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": -0.1},
        {"temperature": float("nan")},
        {"temperature": float("inf")},
        {"top_k": -2},
        {"top_p": 1.1},
        {"top_p": -0.1},
        {"top_p": float("nan")},
        {"min_p": 2},
        {"max_tokens": 0},
        {"min_tokens": -1},
        {"max_tokens": 4, "min_tokens": 5},
        {"max_tokens": None, "min_tokens": -1},
        {"stop": ""},
        {"stop": ["a", ""]},
        {"seed": 2**63},
        {"seed": 1.5},
        {"max_tokens": 3.5},
        {"top_k": 2.5},
        {"min_tokens": None},
        {"stop_token_ids": ["a"]},
    ],
)
def test_a_value_out_of_range_is_refused_by_name(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as raised:
        SamplingParams(**options)
    assert any(name in str(raised.value) for name in options)


@pytest.mark.parametrize(
    "options",
    [{"top_p": 0.0}, {"top_k": -1}, {"max_tokens": None, "min_tokens": 99}, {"seed": -(2**63)}],
)
def test_values_at_the_edge_are_taken(options: dict[str, Any]) -> None:
    SamplingParams(**options)


def test_an_unknown_parameter_is_an_error() -> None:
    with pytest.raises(TypeError, match="temprature"):
        SamplingParams(temprature=1.0)  # type: ignore[call-arg]


def test_none_is_no_stop_as_in_vllm() -> None:
    params = SamplingParams(stop=None, stop_token_ids=None, max_tokens=None)
    assert params.stop_strings == params.stop_ids == ()


def test_one_stop_string_may_be_given_bare() -> None:
    assert SamplingParams(stop="end").stop_strings == ("end",)
    assert SamplingParams(stop=["a", "b"]).stop_strings == ("a", "b")


def test_stats_derive_their_rates_and_survive_emptiness() -> None:
    assert Stats().acceptance_length == Stats().tokens_per_second == 0.0
    stats = Stats(rounds=4, emitted=10, tokens=11, seconds=2.0)
    assert stats.acceptance_length == 2.5
    assert stats.tokens_per_second == 5.5
    wanted = {"rounds", "drafted", "verified", "accepted", "acceptance_length", "seconds"}
    assert wanted | {"tokens_per_second"} <= set(stats.as_dict())


@pytest.mark.parametrize("has_probs", [False, True])
def test_a_draft_of_a_batch_is_the_start_of_its_row(has_probs: bool) -> None:
    tokens, survival = torch.arange(6).view(2, 3), torch.rand(2, 3)
    rows = DraftRows(tokens, torch.rand(2, 3, 5) if has_probs else None, survival)
    for row, (draft, length) in enumerate(zip(rows.drafts([2, 3]), (2, 3), strict=True)):
        probs = None if rows.probs is None else rows.probs[row, :length]
        plain = Draft(tokens[row, :length], None, probs, survival[row, :length])
        assert len(draft) == length
        assert (draft.depths, draft.origin, draft.row) == (plain.depths, rows, row)
        for name in ("tokens", "parents", "probs", "survival", "positions", "visibility"):
            for same in (draft, draft.but(), copy.copy(draft), pickle.loads(pickle.dumps(draft))):
                found, wanted = getattr(same, name), getattr(plain, name)
                assert found is wanted is None or torch.equal(found, wanted)
        assert draft == draft and len({draft, draft}) == 1
        assert draft.but(survival=[0.5]).survival == [0.5]


def test_a_draft_of_a_batch_is_no_longer_than_its_row_and_has_one() -> None:
    rows = DraftRows(torch.zeros(2, 4, dtype=torch.int64), None, None)
    assert [len(draft) for draft in rows.drafts([7, 2])] == [4, 2]
    with pytest.raises(ValueError, match=r"longer|shorter"):
        rows.drafts([1])


# Found on a CPU: views of each request's row were a sixth of what the host does in a round.
def test_drafts_of_a_batch_are_not_cut_out_before_they_are_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rows = DraftRows(torch.zeros(2, 4, dtype=torch.int64), torch.zeros(2, 4, 5), torch.zeros(2, 4))

    def cut(*_: Any) -> None:
        raise AssertionError("a row was cut out")

    for name in ("__getitem__", "unbind"):
        monkeypatch.setattr(torch.Tensor, name, cut)
    drafts = rows.drafts([4, 3])
    assert [(type(draft), draft.row, len(draft)) for draft in drafts] == [
        (DraftRow, 0, 4),
        (DraftRow, 1, 3),
    ]
