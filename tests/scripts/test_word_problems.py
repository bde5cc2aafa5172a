import itertools
import json
import operator
import re
from pathlib import Path

import pytest
import word_problems
from word_problems import FAMILIES, Family, Problem, is_held_out, problems

DATA = Path(__file__).resolve().parents[1] / "data"
OPERATIONS = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv}
BY_NAME = {family.name: family for family in FAMILIES}
FAMILY = pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)


def take(count: int, *, held_out: bool, seed: int = 0) -> list[Problem]:
    return list(itertools.islice(problems(seed, held_out=held_out), count))


@pytest.fixture(scope="module")
def every() -> list[Problem]:
    return take(10_000, held_out=False) + take(5_000, held_out=True)


def fields(text: str) -> set[str]:
    return set(re.findall(r"{(\w+)}", text))


def test_every_calculation_is_right_and_the_last_is_the_answer(every: list[Problem]) -> None:
    for problem in every:
        steps = re.findall(r"(\d+) ([-+*/]) (\d+) = (\d+)", problem.answer)
        for left, sign, right, result in steps:
            assert OPERATIONS[sign](int(left), int(right)) == int(result), problem
        body, _, last = problem.answer.rpartition("\n#### ")
        assert last == steps[-1][-1], problem
        assert body.count("=") == len(steps) == body.count(" = "), problem


def test_numbers_stay_within_limits(every: list[Problem]) -> None:
    for problem in every:
        numbers = [int(number) for number in re.findall(r"\d+", problem.question + problem.answer)]
        assert min(numbers) >= word_problems.SMALLEST, problem
        assert max(numbers) <= word_problems.LARGEST, problem


def test_every_family_occurs_held_out_and_in_training(every: list[Problem]) -> None:
    seen = {(p.template.partition("/")[0], is_held_out(*key(p))) for p in every}
    assert seen == set(itertools.product(BY_NAME, (False, True)))


def test_held_out_shares_neither_templates_nor_numbers_with_training() -> None:
    training, held_out = take(20_000, held_out=False), take(5_000, held_out=True)
    assert not {p.template for p in training} & {p.template for p in held_out}
    assert not {key(p) for p in training} & {key(p) for p in held_out}
    assert not {p.question for p in training} & {p.question for p in held_out}


def key(problem: Problem) -> tuple[str, tuple[int, ...]]:
    return problem.template.partition("/")[0], problem.numbers


def test_a_tenth_of_numbers_is_held_out() -> None:
    pairs = itertools.product(range(2, 102), repeat=2)
    assert sum(is_held_out("gain", pair) for pair in pairs) == pytest.approx(1000, abs=100)


@FAMILY
def test_every_wording_occurs_in_training_templates(family: Family) -> None:
    held_out = {name for name, _ in family.templates(held_out=True)}
    training = {name for name, _ in family.templates(held_out=False)}
    assert held_out and not held_out & training
    chosen = [name.partition("/")[2].split("-") for name in training]
    for slot, wordings in enumerate(family.slots()):
        assert {int(each[slot]) for each in chosen} == set(range(len(wordings)))
        assert 3 <= len(wordings) <= 6


@FAMILY
def test_every_question_says_what_the_answer_needs(family: Family) -> None:
    results = set("rstu")
    names_of_b = {"part", "percent", "percents", "times", "parts"}
    for _, question in family.templates(held_out=True) + family.templates(held_out=False):
        given = fields(question)
        if given & names_of_b:
            given.add("b")
        if "parts" in given or "percents" in given:
            given.add("c")
        singular = {"box": "boxes", "item": "items"}
        given |= {one for one, many in singular.items() if many in given}
        assert fields(family.answer()) - results <= given, question


def test_problems_depend_on_the_seed_alone() -> None:
    assert take(50, held_out=False, seed=3) == take(50, held_out=False, seed=3)
    assert take(50, held_out=False, seed=3) != take(50, held_out=False, seed=4)


def test_the_text_is_clean_english(every: list[Problem]) -> None:
    wrong = re.compile(
        r"[{}]|  |None|\b1 |\b[Aa] (?!used)[aeiou]|\b[Aa]n (?!hour)[^aeiou]|\b(\w+) \1\b| [.,?]"
    )
    for problem in every:
        for text in (problem.question, problem.answer):
            assert not wrong.search(text), text
            assert text == text.strip()
        assert problem.question.endswith("?"), problem.question
        assert re.search(r"[.]\n#### \d+$", problem.answer), problem.answer


def test_names_and_things_are_many_and_different() -> None:
    names = [str(person["A"]) for person in word_problems.PEOPLE]
    nouns = (*word_problems.ANYTHING, *word_problems.PLANTS, *word_problems.GIFTS)
    assert len(set(names)) == len(names) >= 100
    assert len(set(nouns)) == len(nouns) >= 100
    assert len(BY_NAME) == len(FAMILIES) >= 40


def test_a_plain_question_of_a_user_is_not_foreign() -> None:
    first, last = BY_NAME["gain"].slots()
    assert "{A} has {a} {items} and buys {b} more." in first
    assert "How many {items} does {he} have now?" in last


def test_the_stored_held_out_problems_are_apart_from_training_and_each_other() -> None:
    text = (DATA / "word_problems_heldout.jsonl").read_text(encoding="utf-8")
    rows = [json.loads(line) for line in text.splitlines()]
    for row in rows:
        family = BY_NAME[row["template"].partition("/")[0]]
        held_out = {template for template, _ in family.templates(held_out=True)}
        assert row["template"] in held_out
    assert len({row["question"] for row in rows}) == len(rows) == 200
