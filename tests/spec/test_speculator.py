"""The hooks: who may change what, what is lowered and why, and what is refused."""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from nanospec.attention.kv_cache import PagedKVCache
from nanospec.attention.kv_ops import move_kv
from nanospec.attention.torch_backend import TorchAttention
from nanospec.config import EngineConfig
from nanospec.errors import ConfigError, PlanError
from nanospec.spec.plan import build_plan
from nanospec.spec.registry import SPECULATORS
from nanospec.spec.speculator import (
    COMMIT,
    VERIFY,
    KernelKey,
    Speculator,
    SpeculatorSetup,
    about,
    resolve_kernels,
)
from nanospec.types import (
    Budget,
    Capability,
    Draft,
    EngineView,
    PlanKind,
    Request,
    Resources,
    StepOutput,
    VerifyPlan,
)
from tests import helpers
from tests.speculators import RandomDrafts


class Limited(TorchAttention):
    """Attention with a capability of its own."""

    limit = Capability(PlanKind.MASK, 64, False)

    def capability(self, layer: int) -> Capability:
        """See `AttentionBackend.capability`."""
        return self.limit if layer == 1 else Capability(PlanKind.MASK, 64, True)


def limited(**changes: Any) -> Callable[[PagedKVCache, int], TorchAttention]:
    """Return a factory of attention whose layer 1 can do less."""
    values = {"kind": PlanKind.MASK, "max_rows": 64, "takes_device_counts": True} | changes
    kind = type("Own", (Limited,), {"limit": Capability(**values)})
    return lambda cache, num_heads: kind(cache)


def with_kernels(base: type[Speculator], kernels: Mapping[KernelKey, Any], **extra: Any) -> Any:
    """Return a speculator that also provides kernels."""
    return type("Own", (base,), {"kernels": lambda self: kernels} | extra)


def build(
    folder: Path, kind: type[Speculator], monkeypatch: pytest.MonkeyPatch, **options: Any
) -> Any:
    monkeypatch.setitem(SPECULATORS, "test", kind)
    return helpers.make_llm(folder, speculator="test", **options)


def planned(requests: Sequence[Request], counts: Sequence[int], resources: Resources) -> VerifyPlan:
    """Build a plan for the tiny Qwen3, within resources that need not be the agreed ones."""
    device = torch.device("cpu")
    return build_plan(requests, counts, resources=resources, vocab_size=320, device=device)


PROMPTS = helpers.random_prompts(3, seed=1)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"kind": PlanKind.CHAIN, "reason": "it has no masks"}, (PlanKind.CHAIN, 8)),
        ({"max_rows": 3, "reason": "its tile has three rows"}, (PlanKind.TREE, 3)),
        ({"max_rows": 1, "reason": "it takes no float32"}, (PlanKind.TREE, 1)),
    ],
)
def test_what_one_layer_cannot_do_lowers_the_plan_with_its_reason_logged_once(
    qwen3: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    changes: dict[str, Any],
    expected: tuple[PlanKind, int],
) -> None:
    want = helpers.token_ids(helpers.make_llm(qwen3), PROMPTS, helpers.greedy(15))
    kind = with_kernels(RandomDrafts, {VERIFY: limited(**changes)})
    with caplog.at_level(logging.WARNING):
        llm = build(qwen3, kind, monkeypatch)
    effective = llm.engine.speculator.effective
    assert (effective.kind, effective.max_rows) == expected
    lines = [record.getMessage() for record in caplog.records]
    assert len([line for line in lines if changes["reason"] in line]) == 1
    assert helpers.token_ids(llm, PROMPTS, helpers.greedy(15)) == want


def test_counts_on_the_device_are_lowered_where_a_layer_takes_none(
    qwen3: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Ragged(RandomDrafts):
        def resources(self) -> Resources:
            super().resources()
            return Resources(PlanKind.TREE, 8, needs_device_counts=True)

    with caplog.at_level(logging.WARNING):
        llm = build(qwen3, Ragged, monkeypatch)  # the torch backend plans on the host
    assert not llm.engine.speculator.effective.needs_device_counts
    assert any("plans on the host" in record.getMessage() for record in caplog.records)
    free = with_kernels(Ragged, {VERIFY: lambda cache, _: AllTaking(cache)})
    assert build(qwen3, free, monkeypatch).engine.speculator.effective.needs_device_counts


class AllTaking(TorchAttention):
    """Attention that claims everything."""

    def capability(self, layer: int) -> Capability:
        """See `AttentionBackend.capability`."""
        return Capability(PlanKind.MASK, 64, True)


def test_counts_known_on_the_device_alone_are_read_and_rows_beyond_them_do_not_exist(
    qwen3: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class DeviceCounts(RandomDrafts):
        def plan(self, requests: Sequence[Request]) -> VerifyPlan:
            plan = super().plan(requests)
            fewer = (plan.num_rows // 2).clamp(min=1)  # the host reserved more than is verified
            return replace(plan, num_rows=fewer, row_counts=None)

    want = helpers.token_ids(helpers.make_llm(qwen3), PROMPTS, helpers.greedy(15))
    llm = build(qwen3, DeviceCounts, monkeypatch)
    assert helpers.token_ids(llm, PROMPTS, helpers.greedy(15)) == want


def test_a_mask_speculator_is_refused_where_only_trees_are_verified(
    qwen3: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from examples.lookahead import LookaheadSpeculator

    reason = "it sees ancestors only"
    kernels = {VERIFY: limited(kind=PlanKind.TREE, reason=reason)}
    with pytest.raises(ConfigError, match=f"needs mask plans.*trees only.*{reason}"):
        build(qwen3, with_kernels(LookaheadSpeculator, kernels), monkeypatch)


def test_a_commit_kernel_that_declines_a_layer_leaves_chains(
    qwen3: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Declining:
        def __call__(self, *moves: Tensor) -> None:
            raise AssertionError("a chain needs no moves")

        def declines(self, layer: int) -> str:
            return "its cache cannot be moved" if layer == 2 else ""

    with caplog.at_level(logging.WARNING):
        llm = build(qwen3, with_kernels(RandomDrafts, {COMMIT: Declining()}), monkeypatch)
    assert llm.engine.speculator.effective.kind is PlanKind.CHAIN
    assert any("cannot be moved" in record.getMessage() for record in caplog.records)
    want = helpers.token_ids(helpers.make_llm(qwen3), PROMPTS, helpers.greedy(15))
    assert helpers.token_ids(llm, PROMPTS, helpers.greedy(15)) == want


def test_a_provided_kernel_is_used_and_its_override_logged(
    qwen3: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    calls: list[int] = []

    def counting(cache: Tensor, src: Tensor, dst: Tensor, counts: Tensor) -> None:
        calls.append(len(counts))
        move_kv(cache, src, dst, counts)

    with caplog.at_level(logging.INFO):
        llm = build(qwen3, with_kernels(RandomDrafts, {COMMIT: counting}), monkeypatch)
    assert [r.getMessage() for r in caplog.records if "overrides" in r.getMessage()] == [
        "Own overrides the kernel for ('paged_kv', 'commit')"
    ]
    helpers.token_ids(llm, PROMPTS, helpers.greedy(15))
    assert calls


def test_the_later_provider_of_a_kernel_wins_and_unknown_operations_are_refused() -> None:
    table = resolve_kernels([("a", {COMMIT: min}), ("b", {COMMIT: max}), ("c", {})])
    assert table[COMMIT] is max
    with pytest.raises(ConfigError, match="known are"):
        resolve_kernels([("a", {("paged_kv", "store"): min})])


@pytest.mark.parametrize(
    ("draft", "message"),
    [
        (Draft([5] * 9), "10 rows, and only 8 were declared"),
        (Draft([5, 5], parents=[0, 0]), "is a tree, and only a chain was declared"),
        (Draft([5, 999]), "row 2: token 999"),
    ],
)
def test_a_plan_that_breaks_the_contract_stops_the_step_before_anything_changes(
    qwen3: Path, monkeypatch: pytest.MonkeyPatch, draft: Draft, message: str
) -> None:
    class Own(Speculator):
        def resources(self) -> Resources:
            return Resources(PlanKind.TREE, 64)

        def propose(self, requests: Sequence[Request]) -> Sequence[Draft | None]:
            for request in requests:
                request.max_drafts = 99
            return [draft for _ in requests]

        def plan(self, requests: Sequence[Request]) -> VerifyPlan:
            counts = [request.num_planned for request in requests]
            return planned(requests, counts, Resources(PlanKind.CHAIN, 8))

    llm = build(qwen3, Own, monkeypatch)
    request = llm.engine.add([5, 6, 7], helpers.greedy(20))
    llm.engine.step()
    before = (list(request.tokens), request.kv_len, llm.engine._ctx.caches[0].k.clone())
    with pytest.raises(PlanError, match=message):
        llm.engine.step()
    assert (request.tokens, request.kv_len) == before[:2]
    assert torch.equal(llm.engine._ctx.caches[0].k, before[2])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda p: {"kind": PlanKind.CHAIN, "num_masked": 0},
            "it is a tree, and less was declared",
        ),
        (lambda p: {"num_masked": 0}, "it is a tree, and less was declared"),
        (lambda p: {"parents": p.parents + (p.parents >= 0) * 9}, "parents come before children"),
        (lambda p: {"tokens": p.tokens + (p.parents >= 0) * 999}, "is not in the vocabulary"),
        (lambda p: {"tokens": p.tokens + 1}, "row 0 is the root"),
        (lambda p: {"num_rows": p.num_rows * 0, "row_counts": None}, "0 rows in a plan"),
    ],
)
def test_a_plan_of_ones_own_is_read_back_and_checked(
    qwen3: Path, monkeypatch: pytest.MonkeyPatch, change: Any, message: str
) -> None:
    class Own(Speculator):
        def resources(self) -> Resources:
            return Resources(PlanKind.TREE, 8)

        def propose(self, requests: Sequence[Request]) -> Sequence[Draft | None]:
            return [Draft([5, 6, 7], parents=[0, 0, 1]) for _ in requests]

        def plan(self, requests: Sequence[Request]) -> VerifyPlan:
            plan = super().plan(requests)
            return replace(plan, **change(plan)) if plan.max_rows > 1 else plan

    llm = build(qwen3, Own, monkeypatch)
    with pytest.raises(PlanError, match=f"request . row .: .*{message}|{message}"):
        helpers.token_ids(llm, PROMPTS, helpers.greedy(15))
    assert not llm.engine.has_work


def test_a_mask_of_ones_own_may_not_let_a_draft_see_more_than_its_ancestors(
    qwen3: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Seeing(Speculator):
        def resources(self) -> Resources:
            return Resources(PlanKind.MASK, 8)

        def propose(self, requests: Sequence[Request]) -> Sequence[Draft | None]:
            return [Draft([5, 6, 7], parents=[0, 0, -1], positions=[1, 1, 2]) for _ in requests]

        def plan(self, requests: Sequence[Request]) -> VerifyPlan:
            plan = super().plan(requests)
            if plan.visibility is None:
                return plan
            return replace(plan, visibility=torch.ones_like(plan.visibility))

    llm = build(qwen3, Seeing, monkeypatch)
    with pytest.raises(PlanError, match="row 2: a row that may be accepted"):
        helpers.token_ids(llm, PROMPTS, helpers.greedy(15))


def test_a_plan_of_ones_own_must_keep_to_the_pages(
    qwen3: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Greedy(Speculator):
        def propose(self, requests: Sequence[Request]) -> Sequence[Draft | None]:
            return [Draft([5] * 7) for _ in requests]

        def plan(self, requests: Sequence[Request]) -> VerifyPlan:
            counts = [0 if request.draft is None else 7 for request in requests]
            plan = planned(requests, counts, Resources(PlanKind.CHAIN, 8))
            return replace(plan, row_counts=None)

    llm = build(qwen3, Greedy, monkeypatch, adaptive="schedule:[[1,99,2]]")
    with pytest.raises(PlanError, match="there are pages for 2 drafts"):
        helpers.token_ids(llm, PROMPTS, helpers.greedy(15))


def test_statistics_count_what_the_plan_verified(
    qwen3: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class OneOfMany(Speculator):
        def propose(self, requests: Sequence[Request]) -> Sequence[Draft | None]:
            return [Draft([5] * request.max_drafts) for request in requests]

        def plan(self, requests: Sequence[Request]) -> VerifyPlan:
            counts = [min(request.num_planned, 1) for request in requests]
            return planned(requests, counts, self.effective)

    llm = build(qwen3, OneOfMany, monkeypatch)
    stats = llm.generate(PROMPTS[0], helpers.greedy(15))[0].stats
    assert stats.verified <= stats.rounds < stats.drafted
    assert len(stats.offered) == 1 and stats.offered[0] == stats.verified


def test_what_hangs_below_a_lookahead_row_was_never_offered(
    qwen3: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Nobodys(Speculator):
        def resources(self) -> Resources:
            return Resources(PlanKind.MASK, 8)

        def propose(self, requests: Sequence[Request]) -> Sequence[Draft | None]:
            options = {"parents": [-1, 1, 2], "positions": [2, 3, 4]}
            return [Draft([5, 6, 7], **options) for _ in requests]  # type: ignore[arg-type]

    stats = build(qwen3, Nobodys, monkeypatch).generate(PROMPTS[0], helpers.greedy(15))[0].stats
    assert stats.verified > 0 and stats.offered == [] and stats.accepted == 0


def test_a_budget_is_capped_by_what_was_agreed_on(
    qwen3: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Lavish(RandomDrafts):
        def candidate_budget(self, view: EngineView) -> Budget:
            return Budget(1000, 20)

    llm = build(qwen3, Lavish, monkeypatch, max_draft_len=4)
    want = helpers.token_ids(helpers.make_llm(qwen3), PROMPTS, helpers.greedy(15))
    assert helpers.token_ids(llm, PROMPTS, helpers.greedy(15)) == want


def test_resources_are_asked_for_once(qwen3: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    class Counting(RandomDrafts):
        def resources(self) -> Resources:
            calls.append(1)
            return super().resources()

    build(qwen3, Counting, monkeypatch)
    assert len(calls) == 1


def test_a_plan_of_ones_own_beyond_what_was_agreed_is_refused(
    qwen3: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class TwoChildren(Speculator):
        def propose(self, requests: Sequence[Request]) -> Sequence[Draft | None]:
            return [Draft([5, 6]) for _ in requests]

        def plan(self, requests: Sequence[Request]) -> VerifyPlan:
            for request in requests:
                if request.draft is not None:
                    request.draft = Draft([5, 6], parents=[0, 0])
            counts = [request.num_planned for request in requests]
            return planned(requests, counts, Resources(PlanKind.MASK, 64))

    llm = build(qwen3, TwoChildren, monkeypatch)
    with pytest.raises(PlanError, match="were agreed on"):
        helpers.token_ids(llm, PROMPTS, helpers.greedy(15))


class Recording(RandomDrafts):
    """Writes down which hooks are called, in order."""

    calls: list[str]
    length = 3

    def resources(self) -> Resources:
        """See `Speculator.resources`."""
        self.calls = []
        return super().resources()

    def admit_limit(self, view: EngineView) -> int | None:
        """See `Speculator.admit_limit`."""
        self.calls.append("admit_limit")
        return 2

    def plan(self, requests: Sequence[Request]) -> VerifyPlan:
        """See `Speculator.plan`."""
        self.calls.append("plan")
        return super().plan(requests)

    def accept(self, *arguments: Any) -> Any:
        """See `Speculator.accept`."""
        self.calls.append("accept")
        assert arguments[1].logits.shape[0] == len(arguments[3].depth)
        return super().accept(*arguments)

    def observe_step(self, step: StepOutput) -> None:
        """See `Speculator.observe_step`."""
        self.calls.append("observe_step")
        for request, kept in zip(step.requests, step.emitted, strict=True):
            assert request.tokens[-len(kept) :] == kept
        for rows in step.committed:
            assert rows.end == rows.request.kv_len or rows.request in step.requests
        assert step.logits is not None and len(step.logits) == len(step.rows.depth)

    def candidate_budget(self, view: EngineView) -> Budget:
        """See `Speculator.candidate_budget`."""
        self.calls.append("candidate_budget")
        assert view.num_running <= 2
        return Budget(view.num_running * self.length, 1 + self.length)

    def propose(self, requests: Sequence[Request]) -> Sequence[Draft | None]:
        """See `Speculator.propose`."""
        self.calls.append("propose")
        assert all(0 < request.max_drafts <= self.length for request in requests)
        return super().propose(requests)


def test_hooks_are_called_in_the_order_of_the_table(
    qwen3: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = build(qwen3, Recording, monkeypatch)
    helpers.token_ids(llm, PROMPTS, helpers.greedy(15))
    round_order = ["admit_limit", "plan", "accept", "observe_step", "candidate_budget"]
    assert llm.engine.speculator.calls[:6] == [*round_order, "propose"]


def test_admit_limit_bounds_how_many_run_and_below_one_is_an_error(
    qwen3: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = build(qwen3, Recording, monkeypatch)
    for prompt in PROMPTS:
        llm.engine.add(prompt, helpers.greedy(5))
    llm.engine.step()
    assert len(llm.engine.scheduler.running) == 2
    nobody = type("Nobody", (Recording,), {"admit_limit": lambda self, view: 0})
    with pytest.raises(ConfigError, match="admit_limit is 0"):
        helpers.token_ids(build(qwen3, nobody, monkeypatch), PROMPTS, helpers.greedy(5))


def test_a_budget_of_one_row_skips_propose(qwen3: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    off = type("Off", (Recording,), {"length": 0})
    llm = build(qwen3, off, monkeypatch)
    want = helpers.token_ids(helpers.make_llm(qwen3), PROMPTS, helpers.greedy(9))
    assert helpers.token_ids(llm, PROMPTS, helpers.greedy(9)) == want
    assert "propose" not in llm.engine.speculator.calls


def test_the_total_of_a_budget_is_never_exceeded(
    qwen3: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Pool(Recording):
        def candidate_budget(self, view: EngineView) -> Budget:
            return Budget(4, 1 + 3)

    llm = build(qwen3, Pool, monkeypatch)
    totals = []
    llm.engine.observers.append(
        lambda step: totals.append(step.plan.num_tokens - step.plan.num_reqs)
    )
    helpers.token_ids(llm, PROMPTS, helpers.greedy(15))
    assert 0 < max(totals) <= 4


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("oracle", "unknown; pass one of auto, none, ngram, trie, draft"),
        ("no.such.module:Thing", "cannot be loaded"),
        ("nanospec.types:NoSuchThing", "cannot be loaded"),
        ("nanospec.types:Draft", "no subclass"),
        ("draft", "pass --draft"),
    ],
)
def test_a_speculator_that_cannot_be_had_is_refused(qwen3: Path, name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        helpers.make_llm(qwen3, speculator=name)


def test_a_drafter_with_a_speculator_that_takes_none_is_refused(qwen3: Path) -> None:
    with pytest.raises(ConfigError, match="takes no drafter"):
        helpers.make_llm(qwen3, speculator="ngram", draft=str(qwen3))


def test_setup_tells_a_speculator_where_it_is(qwen3: Path) -> None:
    setup = helpers.make_llm(qwen3).engine.speculator.setup
    assert isinstance(setup, SpeculatorSetup)
    assert setup.model.vocab_size == helpers.VOCAB_SIZE and setup.device.type == "cpu"


def test_cost_tables_are_told_apart_by_what_costs_depend_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = helpers.model_config()

    def stated(
        max_rows: int = 8, name: str = "X", device: str = "cpu", *, of: Any = model, **options: Any
    ) -> dict[str, str]:
        config = EngineConfig(model="x", **options)
        return about(
            SpeculatorSetup(config, of, torch.float32, torch.device(device)), name, max_rows
        )

    shapes = [{"intermediate_size": 99}, {"num_heads": 4}, {"num_kv_heads": 1}, {"head_dim": 4}]
    found = [
        stated(),
        *(stated(of=replace(model, **changes)) for changes in shapes),
        stated(attention="flashinfer"),
        stated(run_ahead="on"),
        stated(draft="d"),
        stated(max_rows=5),
        stated(name="Y"),
    ]
    assert len({tuple(each.values()) for each in found}) == len(found)
    assert stated(attention="torch", max_num_seqs=9, max_graph_rows=5) == stated()
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "a GPU")
    graphs = [{}, {"max_num_seqs": 64}, {"max_graph_rows": 100}, {"max_graph_rows": 0}]
    rows = [stated(device="cuda", **options)["max_graph_rows"] for options in graphs]
    assert rows == ["3072", "768", "100", "0"]
    assert stated(device="cuda") == stated(device="cuda", attention="triton", run_ahead="on")
