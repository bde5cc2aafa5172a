"""The mask-plan example really needs a mask, and changes nothing but speed."""

from pathlib import Path

from nanospec.types import PlanKind, StepOutput
from tests import helpers


def test_its_plans_are_masks_and_its_lookahead_rows_are_never_accepted(qwen3: Path) -> None:
    llm = helpers.make_llm(qwen3, speculator="examples.lookahead:LookaheadSpeculator")
    steps: list[StepOutput] = []
    llm.engine.observers.append(steps.append)
    prompts = [[*range(5, 15)] * 3, [7, 8] * 9]
    got = helpers.token_ids(llm, prompts, helpers.greedy(40))
    assert got == helpers.token_ids(helpers.make_llm(qwen3), prompts, helpers.greedy(40))
    masks = [step for step in steps if step.plan.kind is PlanKind.MASK]
    assert masks
    for step in masks:
        for index, path in enumerate(step.path):
            parents = step.plan.parents[index].tolist()
            assert all(parents[row] >= 0 for row in path[1:])
    assert sum(len(path) - 1 for step in steps for path in step.path) > 0, "nothing was accepted"
