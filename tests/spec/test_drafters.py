"""What the model-free speculators draft."""

import re
import sys
from pathlib import Path

import torch

from nanospec.config import EngineConfig
from nanospec.spec.ngram import NgramSpeculator
from nanospec.spec.speculator import SpeculatorSetup
from nanospec.spec.trie import TrieSpeculator
from nanospec.types import CommittedRows
from tests import helpers

SETUP = SpeculatorSetup(
    EngineConfig(model="x"), helpers.model_config(), torch.float32, torch.device("cpu")
)


def drafting(tokens: list[int], room: int = 4) -> object:
    return helpers.make_request(tokens, max_drafts=room)


def test_ngram_continues_the_latest_occurrence_of_the_longest_suffix() -> None:
    ngram = NgramSpeculator(SETUP)
    cases = {
        (1, 2, 3, 9, 1, 2, 3): [9, 1, 2, 3],
        (1, 2, 7, 5, 2, 8, 5, 1, 2): [7, 5, 2, 8],  # 1 2 is longer than 2
        (2, 7, 5, 2, 8, 6, 2): [8, 6, 2],
        (4, 4): [4],
        (1, 2, 3): None,
        (1,): None,
    }
    for tokens, want in cases.items():
        (draft,) = ngram.propose([drafting(list(tokens))])
        assert (None if draft is None else list(draft.tokens)) == want


def test_ngram_keeps_to_its_room() -> None:
    (draft,) = NgramSpeculator(SETUP).propose([drafting([1, 2, 3, 4, 5, 1], room=2)])
    assert draft is not None and list(draft.tokens) == [2, 3]


def test_trie_branches_by_frequency_and_its_survival_falls_along_every_path() -> None:
    trie = TrieSpeculator(SETUP)
    history = helpers.make_request([1, 2, 3, 4, 1, 2, 3, 5, 1, 2, 6, 6, 6])
    step = type("Step", (), {"committed": [CommittedRows(history, 0, 13)]})
    trie.observe_step(step)  # type: ignore[arg-type]
    (draft,) = trie.propose([drafting([9, 1, 2], room=6)])
    assert draft is not None and draft.parents is not None and draft.survival is not None
    assert list(draft.tokens)[:2] == [3, 6] and list(draft.parents)[:2] == [0, 0]
    assert {4, 5} <= set(draft.tokens)
    for row, parent in enumerate(draft.parents, start=1):
        above = 1.0 if parent == 0 else draft.survival[parent - 1]
        assert parent < row and 0 < draft.survival[row - 1] < above
    assert len(draft) <= 6


def test_an_unknown_context_gets_no_draft() -> None:
    assert TrieSpeculator(SETUP).propose([drafting([1, 2])]) == [None]


def test_the_speculator_in_the_documentation_works(qwen3: Path, tmp_path: Path) -> None:
    text = (Path(__file__).parents[2] / "docs" / "round.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert len(code.splitlines()) <= 45
    (tmp_path / "documented.py").write_text(code)
    sys.path.insert(0, str(tmp_path))
    try:
        llm = helpers.make_llm(qwen3, speculator="documented:TrieSpeculator")
    finally:
        sys.path.remove(str(tmp_path))
    prompts = [[*range(5, 15)] * 3, [7, 8] * 9]
    want = helpers.token_ids(helpers.make_llm(qwen3), prompts, helpers.greedy(30))
    assert helpers.token_ids(llm, prompts, helpers.greedy(30)) == want
    assert llm.stats.accepted > 0
