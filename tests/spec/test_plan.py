"""Plans are checked before anything is written; their kind follows from what is in them."""

from typing import Any

import pytest
import torch

from nanospec.errors import PlanError
from nanospec.spec.plan import build_plan, first_path
from nanospec.types import Draft, PlanKind, Request, Resources, VerifyPlan
from tests import helpers

CPU = torch.device("cpu")
LOWER = [[column <= row for column in range(4)] for row in range(4)]


def plan(
    *drafts: Draft | None,
    counts: list[int] | None = None,
    resources: Resources | None = None,
    shares_noise: bool = True,
) -> VerifyPlan:
    """Plan drafts of requests whose roots are tokens 90, 91, .."""
    requests: list[Request] = []
    for index, draft in enumerate(drafts):
        options = {"request_id": 7 + index, "draft": draft, "shares_noise": shares_noise}
        requests.append(helpers.make_request([90 + index], **options))
    wanted = counts or [0 if draft is None else len(draft) for draft in drafts]
    own = resources or Resources(PlanKind.MASK, 64)
    return build_plan(requests, wanted, resources=own, vocab_size=100, device=CPU)


@pytest.mark.parametrize(
    ("draft", "kind"),
    [
        (None, PlanKind.CHAIN),
        (Draft([1, 2, 3]), PlanKind.CHAIN),
        (Draft([1, 2, 3], parents=[0, 1, 2]), PlanKind.CHAIN),
        (Draft([1, 2, 3], parents=[0, 0, 1]), PlanKind.TREE),
        (Draft([1, 2, 3], positions=[1, 2, 3], visibility=LOWER), PlanKind.CHAIN),
        (Draft([1, 2, 3], parents=[0, 1, -1]), PlanKind.MASK),
        (Draft([1, 2, 3], parents=[0, 1, -1], positions=[1, 2, 9]), PlanKind.MASK),
    ],
)
def test_the_kind_is_derived_from_what_the_rows_need(draft: Draft | None, kind: PlanKind) -> None:
    assert plan(draft).kind is kind
    assert plan(Draft([5]), draft).kind is kind


def test_ragged_requests_are_padded_and_counted() -> None:
    built = plan(None, Draft([1, 2, 3]), Draft([4, 5], parents=[0, 0]), counts=[0, 2, 2])
    assert built.tokens.tolist() == [[90, 0, 0], [91, 1, 2], [92, 4, 5]]
    assert built.parents.tolist() == [[-1, 0, 0], [-1, 0, 1], [-1, 0, 0]]
    assert built.num_rows.tolist() == built.row_counts == [1, 3, 3]
    assert built.num_tokens == 7 and built.kind is PlanKind.TREE
    assert built.probs is None and built.positions is None and built.visibility is None


def test_recorded_probabilities_are_padded_beside_point_masses() -> None:
    q = torch.rand(2, 100)
    built = plan(Draft([1, 2], probs=q), Draft([3, 4, 5]), shares_noise=False)
    assert built.probs is not None and built.is_sampled is not None
    assert built.is_sampled.tolist() == [True, False]
    assert torch.equal(built.probs[0, :2], q) and not built.probs[1].any()


def test_lookahead_rows_are_nobodys_children_with_what_hangs_below_them() -> None:
    built = plan(Draft([1, 2, 3], parents=[0, -1, 2], positions=[1, 5, 6]))
    assert built.parents.tolist() == [[-1, 0, -1, -1]]
    assert built.positions is not None and built.positions.tolist() == [[0, 1, 5, 6]]


def test_requests_that_share_noise_need_no_probabilities() -> None:
    assert plan(Draft([1, 2], probs=torch.rand(2, 100))).probs is None


def test_an_empty_round_has_an_empty_plan() -> None:
    built = build_plan([], [], resources=Resources(PlanKind.CHAIN, 1), vocab_size=9, device=CPU)
    assert (built.num_reqs, built.num_tokens) == (0, 0)


@pytest.mark.parametrize(
    ("draft", "message"),
    [
        (Draft([1, 2], parents=[0, 3]), "row 2: its parent is row 3"),
        (Draft([1, 2], parents=[0, 2]), "row 2: its parent is row 2"),
        (Draft([1, 2], parents=[0, -2]), "row 2: its parent is row -2"),
        (Draft([1, 100]), "row 2: token 100 is not in the vocabulary of 100"),
        (Draft([-1]), "row 1: token -1"),
        (Draft([1, 2], parents=[0]), "parents has 1 entries for 2 tokens"),
        (Draft([1, 2], survival=[0.5]), "survival has 1 entries"),
        (Draft([1, 2], positions=[1]), "positions has 1 entries"),
        (Draft([1, 2], probs=torch.ones(2, 99)), r"probs has shape \(2, 99\), not \(2, 100\)"),
        (Draft([1], probs=torch.ones(1, 100, dtype=torch.bfloat16)), "judged in float32"),
        (Draft([1], visibility=[[True]]), r"visibility is not \[2, 2\]"),
        (Draft([1, 2], positions=[1, -1]), "before the root"),
        (Draft([1, 2], positions=[1, 3]), "row 2: a row that may be accepted"),
        (Draft([1, 2, 3], visibility=[[True] * 4] * 2 + [[True, False] * 2] * 2), "row 2: a row"),
    ],
)
def test_a_malformed_draft_is_refused_by_request_and_row(draft: Draft, message: str) -> None:
    with pytest.raises(PlanError, match="request 8, .*" + message):
        plan(None, draft)


@pytest.mark.parametrize(
    ("draft", "resources", "message"),
    [
        (Draft([1] * 4), Resources(PlanKind.CHAIN, 4), "5 rows, and only 4 were declared"),
        (
            Draft([1, 2], parents=[0, 0]),
            Resources(PlanKind.CHAIN, 9),
            "is a tree, and only a chain",
        ),
        (Draft([1, 2], parents=[0, -1]), Resources(PlanKind.TREE, 9), "is a mask, and only a tree"),
    ],
)
def test_a_plan_beyond_the_resources_is_refused(
    draft: Draft, resources: Resources, message: str
) -> None:
    with pytest.raises(PlanError, match=message):
        plan(draft, resources=resources)


def test_more_rows_than_the_draft_has_are_refused() -> None:
    with pytest.raises(PlanError, match="3 draft rows are planned, the draft has 2"):
        plan(Draft([1, 2]), counts=[3])


def test_the_first_path_of_a_tree_is_a_chain() -> None:
    q = torch.arange(5.0)[:, None].expand(5, 100)
    tree = Draft([1, 2, 3, 4, 5], parents=[0, 0, 1, 1, 3], probs=q, survival=[5, 4, 3, 2, 1])
    path = first_path(tree)
    assert list(path.tokens) == [1, 3, 5] and path.parents is None
    assert path.survival == [5, 3, 1]
    assert path.probs is not None and path.probs[:, 0].tolist() == [0, 2, 4]
    chain = Draft([1, 2])
    assert first_path(chain) is chain


def test_any_leading_part_of_a_tree_is_closed() -> None:
    generator = torch.Generator().manual_seed(0)
    for _ in range(50):
        parents = [int(torch.randint(row, (1,), generator=generator)) for row in range(1, 20)]
        for count in range(20):
            built = plan(Draft(list(range(19)), parents=parents), counts=[count])
            assert all(parent < built.max_rows for parent in built.parents[0].tolist())


def test_chains_may_be_up_to_63_drafts_long() -> None:
    built = plan(Draft([1] * 63))
    assert built.max_rows == 64
    options: dict[str, Any] = {"resources": Resources(PlanKind.MASK, 64)}
    with pytest.raises(PlanError, match="65 rows"):
        plan(Draft([1] * 64), **options)
