"""The example policy drafts while pages are plenty, and leaves them to the tokens when not."""

from pathlib import Path

from nanospec.types import StepOutput
from tests import helpers

PROMPTS = [[*range(5 + shift, 15 + shift)] * 3 for shift in range(6)]
SPARE = "examples.spare_pages:SparePagesSpeculator"


def drafts_by_step(folder: Path, speculator: str, num_pages: int) -> tuple[list[int], int]:
    """Return the drafts verified at each step, and how often a request was preempted."""
    llm = helpers.make_llm(
        folder, speculator=speculator, num_pages=num_pages, page_size=4, max_model_len=100
    )
    steps: list[StepOutput] = []
    llm.engine.observers.append(steps.append)
    got = helpers.token_ids(llm, PROMPTS, helpers.greedy(48))
    assert got == helpers.token_ids(helpers.make_llm(folder), PROMPTS, helpers.greedy(48))
    verified = [sum(step.counts) - len(step.requests) for step in steps]
    return verified, llm.engine.scheduler.num_preemptions


def test_it_drafts_as_its_base_while_pages_are_plenty(qwen3: Path) -> None:
    assert drafts_by_step(qwen3, SPARE, 300) == drafts_by_step(qwen3, "ngram", 300)


def test_while_pages_are_short_it_neither_drafts_nor_admits(qwen3: Path) -> None:
    spare, spare_preemptions = drafts_by_step(qwen3, SPARE, 44)
    _, preemptions = drafts_by_step(qwen3, "ngram", 44)
    assert spare_preemptions < preemptions
    assert 0 in spare and max(spare) > 0  # and it drafts again once others have ended
