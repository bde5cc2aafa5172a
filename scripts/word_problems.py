"""Grade-school word problems with worked answers, endless and deterministic.

The text a toy model is trained and tested on (`make_tiny.py`). A *family* is a story: slots of
wordings for the question, one wording for the answer, and what its numbers are. A *template* is a
family with one wording chosen per slot. A tenth of the templates and a tenth of each family's
number tuples are held out: held-out problems are made of those alone, training problems of neither.
Answers restate the question sentence by sentence, so that little but results is hard to predict.

Print some: python scripts/word_problems.py --count 5 [--seed 1] [--held-out] [--json]
"""

import argparse
import itertools
import json
import random
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

SMALLEST, LARGEST = 2, 999  # of every number in a story; nothing is ever "1 apples"
HELD_OUT = 10  # one in so many

Between = Callable[[int, int], int]  # draws an integer from low to high, both included


@dataclass(frozen=True, slots=True)
class Problem:
    """A question with its worked answer, which ends in a line `#### N`."""

    question: str
    answer: str
    template: str  # family and wordings, for example gain/2-0
    numbers: tuple[int, ...]  # what the story is about: all else follows from them


@dataclass(frozen=True, slots=True)
class Noun:
    """A countable thing."""

    one: str
    many: str


@dataclass(frozen=True, slots=True)
class Family:
    """A story. Invariant: every slot mentions the same, so wordings combine freely."""

    name: str
    nouns: Sequence[Noun]  # what `{items}` and `{items2}` may be
    draw: Callable[[Between], tuple[int, ...]]  # the given numbers a, b, c, d, e
    solve: Callable[..., tuple[int, ...]]  # of those, the results r, s, t, u, one a step
    text: str  # "Q: " and a slot's wordings; at last "A: " and the answer's lines; "|" between

    def slots(self) -> list[list[str]]:
        """Return the wordings of each slot of the question."""
        return [_alternatives(part) for part in self._parts()[:-1]]

    def answer(self) -> str:
        """Return the answer's text, but for the last line."""
        return "\n".join(_alternatives(self._parts()[-1]))

    def templates(self, *, held_out: bool) -> list[tuple[str, str]]:
        """Return (id, question) of the templates of one part.

        With at most six wordings a slot, each is in more templates than are held out of all, so
        every wording occurs in training.
        """
        slots = self.slots()
        every = []
        for chosen in itertools.product(*(range(len(slot)) for slot in slots)):
            name = f"{self.name}/{'-'.join(map(str, chosen))}"
            texts = (slot[index] for slot, index in zip(slots, chosen, strict=True))
            every.append((name, " ".join(texts)))
        every.sort(key=lambda template: zlib.crc32(template[0].encode()))
        count = max(1, len(every) // HELD_OUT)
        return every[:count] if held_out else every[count:]

    def _parts(self) -> list[str]:
        return re.split(r"^ +[QA]: ", self.text, flags=re.MULTILINE)[1:]


def _alternatives(part: str) -> list[str]:
    return " ".join(part.split()).split(" | ")


def _words(text: str) -> list[str]:
    """Parse `bus stop, farm`."""
    return [word.strip() for word in text.replace("\n", " ").split(",")]


def _nouns(text: str) -> tuple[Noun, ...]:
    """Parse `cup, box, leaf/leaves`."""
    pairs = [word.split("/") for word in _words(text)]
    return tuple(Noun(pair[0], pair[1] if len(pair) > 1 else _plural(pair[0])) for pair in pairs)


def _plural(word: str) -> str:
    if word.endswith("y") and word[-2] not in "aeiou":
        return f"{word[:-1]}ies"
    return f"{word}es" if word.endswith(("s", "x", "ch", "sh")) else f"{word}s"


MEN = _words("""Aaron, Adam, Alex, Ben, Bruno, Caleb, Carlos, Chen, Daniel, David, Diego, Dylan,
Eddie, Eli, Ethan, Felix, Finn, Frank, George, Hamid, Hassan, Henry, Hugo, Ian, Ivan, Jack,
James, Jamal, John, Jorge, Juan, Kenji, Kevin, Leo, Liam, Logan, Lucas, Luis, Marco, Mark,
Martin, Max, Mike, Nathan, Noah, Oliver, Omar, Oscar, Owen, Pablo, Paul, Peter, Ravi, Raj,
Robert, Ryan, Sam, Samuel, Simon, Theo, Tim, Tom, Victor, Yusuf""")
WOMEN = _words("""Aisha, Alice, Amy, Ana, Anna, Bella, Beth, Carla, Carmen, Chloe, Clara, Daisy,
Diana, Elena, Ella, Emily, Emma, Eva, Fatima, Fiona, Gina, Grace, Hana, Hannah, Helen, Irene,
Isabel, Ivy, Jane, Janet, Jasmine, Julia, Karen, Kate, Laila, Laura, Lena, Lily, Linda, Lisa,
Lucy, Maria, Mary, Maya, Mei, Mia, Mina, Nadia, Nina, Nora, Olivia, Paula, Priya, Rachel, Rosa,
Ruby, Ruth, Sara, Sofia, Susan, Tina, Vera, Wendy, Yuki, Zoe""")

TOYS = _nouns("""marble, sticker, stamp, shell, bead, button, trading card, postcard, pencil,
pen, crayon, marker, eraser, notebook, book, comic book, magazine, puzzle, toy car, toy train,
toy boat, doll, teddy bear, balloon, kite, badge, ribbon, key ring, magnet, bracelet, hat,
scarf/scarves, cap, candle, block, figurine, board game, whistle, rock, pebble, feather,
acorn, leaf/leaves, photo, drawing, letter, envelope, paper clip, ruler, folder, bottle, mug,
cup, plate, bowl, spoon, fork, tennis ball, baseball, golf ball, paper plane, lantern, flag,
token, ticket, hair clip, paintbrush, sponge, light bulb, battery, coin, robot, pin, glove,
shirt""")
FOOD = _nouns("""apple, orange, pear, plum, peach, lemon, lime, mango/mangoes, banana, kiwi,
cherry, strawberry, grape, fig, apricot, carrot, potato/potatoes, tomato/tomatoes, onion,
pepper, cucumber, egg, radish, olive, walnut, almond, peanut, chestnut, candy, chocolate,
lollipop, jelly bean, gumdrop, sandwich, taco, dumpling, meatball, cracker""")
BAKED = _nouns("""cookie, muffin, cupcake, pancake, waffle, pie, bagel, bun, roll, doughnut,
biscuit, brownie, tart, scone, pretzel, cake""")
PLANTS = _nouns("""rose, tulip, daisy, sunflower, lily, orchid, bush, cactus, fern, pansy,
poppy, apple tree, pear tree, oak tree, pine tree, palm tree, cherry tree, cabbage, lettuce,
pumpkin""")
GIFTS = _nouns("""bike, camera, guitar, skateboard, telescope, tent, violin, watch, jacket,
keyboard, radio, lamp, desk, chair, backpack, coat, tablet, phone, scooter, drone, microscope,
necklace""")
EDIBLE = FOOD + BAKED
ANYTHING = TOYS + EDIBLE
BOXES = _nouns("""box, bag, basket, crate, tray, bucket, packet, bin, carton, case, sack,
chest""")
SHOPS = _words("""bazaar, corner shop, department store, fair, flea market, general store, mall,
market, shopping center, store, street market, supermarket, village fair, village shop""")
PLACES = _words("""beach, camp, castle, city, farm, forest, harbor, lake, library, museum, park,
river, school, stadium, station, theater, town, village, zoo""")

_Person = dict[str, object]
PRONOUNS = ("he", "He", "his", "His", "him", "himself")
PEOPLE: list[_Person] = [
    dict(zip(("A", *PRONOUNS), (name, *pronouns), strict=True))
    for names, pronouns in (
        (MEN, PRONOUNS),
        (WOMEN, ("she", "She", "her", "Her", "her", "herself")),
    )
    for name in names
]

PARTS = {2: "half", 3: "a third", 4: "a quarter", 5: "a fifth", 6: "a sixth", 8: "an eighth"}
MANY_PARTS = {
    (2, 3): "two thirds",
    (3, 4): "three quarters",
    (2, 5): "two fifths",
    (3, 5): "three fifths",
    (4, 5): "four fifths",
    (5, 6): "five sixths",
}
TIMES = {
    2: "twice",
    3: "three times",
    4: "four times",
    5: "five times",
    6: "six times",
    7: "seven times",
    8: "eight times",
    9: "nine times",
}


def some(n: Between) -> int:
    """Draw a number of things: most often two digits."""
    digits = n(0, 9)
    return n(2, 20) if digits < 3 else n(21, 99) if digits < 8 else n(100, 400)


def few(n: Between) -> int:
    """Draw a small number of things."""
    return n(2, 12)


def product(n: Between) -> tuple[int, int]:
    """Draw factors, the second of up to two digits."""
    return n(2, 9), n(2, 60)


def division(n: Between, most: int = 60) -> tuple[int, int]:
    """Draw dividend and divisor of an exact division."""
    divisor = n(2, 12)
    return divisor * n(2, most), divisor


def _part(n: Between) -> int:
    return (2, 2, 3, 4, 5, 6, 8)[n(0, 6)]


def _percent(n: Between) -> int:
    return (10, 5, 4, 2)[n(0, 3)]  # 10 %, 20 %, 25 % and 50 % as divisors


def _parts(n: Between) -> tuple[int, int, int]:
    count, whole = list(MANY_PARTS)[n(0, len(MANY_PARTS) - 1)]
    return whole * n(2, 60), whole, count


def _percents(n: Between) -> tuple[int, int, int]:
    count, whole = ((3, 4), (2, 5), (3, 5), (4, 5))[n(0, 3)]  # 75 %, 40 %, 60 % and 80 %
    return whole * n(2, 60), whole, count


def _regroup(n: Between) -> tuple[int, int, int]:
    """Draw a groups of b that make groups of c."""
    size, factor = n(2, 9), n(2, 4)
    return factor * n(1, 3), size * n(1, 3), size


def _shopping(n: Between) -> tuple[int, ...]:
    a, b, c, d = n(2, 9), n(2, 12), n(2, 9), n(2, 12)
    return a, b, c, d, a * b + c * d + n(2, 99)


def _class_trip(n: Between) -> tuple[int, ...]:
    classes, students, seats = n(2, 9), n(10, 30), n(4, 12)
    teachers = seats - classes * students % seats
    return classes, students, teachers, seats


# fmt: off
FAMILIES = (
    # One step: add, take away, compare.
    Family("gain", ANYTHING, lambda n: (some(n), some(n)), lambda a, b: (a + b,), """
        Q: {A} has {a} {items} and buys {b} more. | {A} has {a} {items}. Then {he} gets {b} more
           {items}. | {A} had {a} {items} and found {b} more. | {A} had {a} {items}. {His} friend
           gave {him} {b} more. | There are {a} {items} on {A}'s table. {A} puts {b} more {items} on
           it. | {A} owns {a} {items}. {He} buys {b} {items} at the {shop}.
        Q: How many {items} does {A} have now? | How many {items} are there now? | How many {items}
           does {A} have in total? | How many {items} is that altogether? | What is the total number
           of {items}? | How many {items} does {he} have now?
        A: At first there are {a} {items}. | Then {A} gets {b} more {items}. | So now there are {a}
           + {b} = {r} {items}.
        """),
    Family("loss", TOYS, lambda n: ((b := some(n)) + some(n), b), lambda a, b: (a - b,), """
        Q: {A} has {a} {items} and gives {b} of them away. | {A} had {a} {items}. Then {he} lost {b}
           of them. | {A} has {a} {items}. {He} sells {b} {items} at the {shop}. | {A} had {a}
           {items} but gave {b} to a friend. | There were {a} {items} in {A}'s room. {A} threw out
           {b} of them.
        Q: How many {items} does {A} have left? | How many {items} are left? | How many {items} does
           {A} have now? | How many {items} remain? | How many {items} does {A} still have? | How
           many {items} does {he} have left?
        A: At first there are {a} {items}. | Then {b} of the {items} are gone. | So {A} has {a} -
           {b} = {r} {items} left.
        """),
    Family("eat", EDIBLE, lambda n: ((b := n(2, 30)) + some(n), b), lambda a, b: (a - b,), """
        Q: There are {a} {items} in {A}'s kitchen. {A}'s family eats {b} of them. | {A} has {a}
           {items} and eats {b} of them. | {A} had {a} {items}. {He} ate {b} {items} with {his}
           friends. | {A} puts {a} {items} on the table. The children eat {b} of them.
        Q: How many {items} are left? | How many {items} remain? | How many {items} are left over? |
           How many {items} have not been eaten? | How many {items} does {A} have left?
        A: At first there are {a} {items}. | Then {b} of the {items} are eaten. | So there are {a} -
           {b} = {r} {items} left.
        """),
    Family("together", ANYTHING, lambda n: (some(n), some(n)), lambda a, b: (a + b,), """
        Q: {A} has {a} {items} and {B} has {b} {items}. | {A} has {a} {items}. {B} has {b} {items}.
           | {A} bought {a} {items}, and {B} bought {b}. | {A} brings {a} {items} to the party. {B}
           brings {b} {items}. | At the {shop}, {A} gets {a} {items} and {B} gets {b} {items}.
        Q: How many {items} do they have together? | How many {items} do {A} and {B} have in total?
           | How many {items} do the two of them have altogether? | How many {items} is that in all?
        A: {A} has {a} {items}. | {B} has {b} {items}. | Together {A} and {B} have {a} + {b} = {r}
           {items}.
        """),
    Family("red_and_blue", TOYS, lambda n: (some(n), some(n)), lambda a, b: (a + b,), """
        Q: {A} has {a} red {items} and {b} blue {items}. | There are {a} red {items} and {b} blue
           {items} in {A}'s {box}. | {A} counts {a} red {items} and {b} blue {items}. | {A} buys {a}
           red {items} and then {b} blue {items}.
        Q: How many {items} does {A} have? | How many {items} are there in all? | How many {items}
           is that in total?
        A: There are {a} red {items}. | There are {b} blue {items}. | In total there are {a} + {b} =
           {r} {items}.
        """),
    Family("more_than", ANYTHING, lambda n: (some(n), some(n)), lambda a, b: (a + b,), """
        Q: {A} has {a} {items}. | {A} collected {a} {items}. | {A} counts {his} {items} and finds
           that {he} has {a}. | There are {a} {items} in {A}'s {box}.
        Q: {B} has {b} more {items} than {A}. | {B} has {b} more than {A}. | {B} has as many {items}
           as {A} and {b} more.
        Q: How many {items} does {B} have? | How many {items} are {B}'s? | How many {items} is that
           for {B}?
        A: {A} has {a} {items}. | {B} has {b} more {items} than {A}. | So {B} has {a} + {b} = {r}
           {items}.
        """),
    Family("fewer_than", ANYTHING,
           lambda n: ((b := some(n)) + some(n), b), lambda a, b: (a - b,), """
        Q: {A} has {a} {items}. | {A} collected {a} {items}. | {A} counts {his} {items} and finds
           that {he} has {a}. | There are {a} {items} in {A}'s {box}.
        Q: {B} has {b} fewer {items} than {A}. | {B} has {b} fewer than {A}. | {A} has {b} more
           {items} than {B}.
        Q: How many {items} does {B} have? | How many {items} are {B}'s? | How many {items} is that
           for {B}?
        A: {A} has {a} {items}. | {B} has {b} fewer {items} than {A}. | So {B} has {a} - {b} = {r}
           {items}.
        """),
    Family("difference", ANYTHING,
           lambda n: ((b := some(n)) + some(n), b), lambda a, b: (a - b,), """
        Q: {A} has {a} {items} and {B} has {b} {items}. | {A} has {a} {items}. {B} has {b} {items}.
           | {A} bought {a} {items}, while {B} bought {b}. | {A} collected {a} {items} and {B}
           collected {b}.
        Q: How many more {items} does {A} have than {B}? | How many fewer {items} does {B} have than
           {A}? | What is the difference between {A}'s and {B}'s number of {items}?
        A: {A} has {a} {items}. | {B} has {b} {items}. | The difference is {a} - {b} = {r} {items}.
        """),
    Family("missing", TOYS, lambda n: ((b := some(n)) + some(n), b), lambda a, b: (a - b,), """
        Q: {A} wants to collect {a} {items}. | {A} needs {a} {items} for a school project. | {A}
           would like to have {a} {items}. | {A} has an album with room for {a} {items}.
        Q: So far {he} has {b} {items}. | {He} already has {b}. | Up to now {he} has found {b}
           {items}.
        Q: How many more {items} does {A} need? | How many {items} are still missing? | How many
           {items} must {A} still get?
        A: {A} needs {a} {items} in total. | {A} already has {b} {items}. | So {A} still needs {a} -
           {b} = {r} {items}.
        """),
    Family("age_later", TOYS, lambda n: (n(2, 70), n(2, 30)), lambda a, b: (a + b,), """
        Q: {A} is {a} years old. | {A} is {a} years old today. | {A} has just turned {a}. | This
           year {A} is {a} years old.
        Q: How old will {A} be in {b} years? | How old will {he} be {b} years from now? | What will
           {A}'s age be in {b} years?
        A: Now {A} is {a} years old. | In {b} years, {A} will be {b} years older. | Then {A} will be
           {a} + {b} = {r} years old.
        """),
    Family("age_younger", TOYS,
           lambda n: ((b := n(2, 30)) + n(3, 50), b), lambda a, b: (a - b,), """
        Q: {A} is {a} years old. | {A} has just turned {a}. | This year {A} is {a} years old.
        Q: {B} is {b} years younger than {A}. | {A} is {b} years older than {B}. | {B} was born {b}
           years after {A}.
        Q: How old is {B}? | What is {B}'s age? | How many years old is {B}?
        A: {A} is {a} years old. | {B} is {b} years younger than {A}. | So {B} is {a} - {b} = {r}
           years old.
        """),
    Family("practice", TOYS, lambda n: (some(n), some(n)), lambda a, b: (a + b,), """
        Q: {A} practices the piano for {a} minutes on Monday and {b} minutes on Tuesday. | {A} runs
           for {a} minutes in the morning and for {b} minutes in the evening. | {A} spends {a}
           minutes on homework and {b} minutes in the garden. | {A} walks to the {place} in {a}
           minutes and then home in {b} minutes.
        Q: How many minutes is that in total? | How many minutes is that altogether? | How many
           minutes does it take {him} in all?
        A: First there are {a} minutes. | Then there are {b} minutes. | In total that is {a} + {b} =
           {r} minutes.
        """),
    Family("clock", TOYS, lambda n: ((a := n(2, 10)), n(2, 12 - a)), lambda a, b: (a + b,), """
        Q: {A} starts to work at {a} o'clock and works for {b} hours. | {A} leaves for the {place}
           at {a} o'clock. The trip takes {b} hours. | {A} begins to paint a wall at {a} o'clock. It
           takes {him} {b} hours. | {A}'s train leaves at {a} o'clock and travels for {b} hours.
        Q: At what hour does it end? | At what hour is that over? | What hour will it be then?
        A: It starts at {a} o'clock. | It takes {b} hours. | So it ends at {a} + {b} = {r} o'clock.
        """),
    Family("spend", GIFTS, lambda n: ((b := some(n)) + some(n), b), lambda a, b: (a - b,), """
        Q: {A} has ${a}. | {A} has saved ${a}. | {A} goes to the {shop} with ${a}. | There are ${a}
           in {A}'s wallet.
        Q: {He} buys a new {item} for ${b}. | {He} spends ${b} on a {item} for {his} sister. | {He}
           pays ${b} for a used {item}.
        Q: How many dollars does {A} have left? | How much money does {he} have left? | How many
           dollars remain? | How much money is left?
        A: At first {A} has {a} dollars. | The {item} costs {b} dollars. | So {A} has {a} - {b} =
           {r} dollars left.
        """),
    Family("two_prices", GIFTS, lambda n: (some(n), some(n)), lambda a, b: (a + b,), """
        Q: {A} buys a {item} for ${a} and a {item2} for ${b}. | At the {shop}, {A} pays ${a} for a
           {item} and ${b} for a {item2}. | A {item} costs ${a} and a {item2} costs ${b}. {A} buys
           both. | {A} bought a {item} that cost ${a}. {He} also bought a {item2} for ${b}.
        Q: How many dollars does {A} pay in total? | How much money does {he} spend? | How many
           dollars is that altogether? | What is the total cost in dollars?
        A: The {item} costs {a} dollars. | The {item2} costs {b} dollars. | Together they cost {a} +
           {b} = {r} dollars.
        """),
    # One step: multiply, divide.
    Family("times_as_many", ANYTHING, lambda n: (n(2, 60), n(2, 9)), lambda a, b: (a * b,), """
        Q: {A} has {a} {items}. | {A} bought {a} {items}. | There are {a} {items} in {A}'s {box}. |
           {A} collected {a} {items}.
        Q: {B} has {b} times as many {items} as {A}. | {B} has {times} as many. | {B} has {times} as
           many {items} as {A}. | {B} has {b} times the number of {items} that {A} has.
        Q: How many {items} does {B} have? | How many {items} are {B}'s? | How many {items} is that
           for {B}?
        A: {A} has {a} {items}. | {B} has {b} times as many {items} as {A}. | So {B} has {a} * {b} =
           {r} {items}.
        """),
    Family("groups", ANYTHING, product, lambda a, b: (a * b,), """
        Q: {A} has {a} {boxes} with {b} {items} in each. | {A} buys {a} {boxes} of {items}. Each
           {box} holds {b} {items}. | There are {a} {boxes}. {A} puts {b} {items} into each {box}. |
           {A} fills {a} {boxes}, and every {box} has {b} {items} in it. | There are {b} {items} in
           a {box}. {A} has {a} {boxes}.
        Q: How many {items} are there in total? | How many {items} is that in all? | How many
           {items} does {A} have? | How many {items} are in the {boxes} altogether?
        A: There are {a} {boxes}. | Each {box} holds {b} {items}. | In total there are {a} * {b} =
           {r} {items}.
        """),
    Family("share", ANYTHING, division, lambda a, b: (a // b,), """
        Q: {A} has {a} {items} and shares them equally among {b} friends. | {A} shares {a} {items}
           equally among {b} children. | {b} children share {a} {items} from {A}'s {box} equally. |
           {A} divides {a} {items} evenly among {b} people.
        Q: How many {items} does each of them get? | How many {items} does each one get? | How many
           {items} are there for each?
        A: There are {a} {items} to share. | They are shared equally among {b}. | So each one gets
           {a} / {b} = {r} {items}.
        """),
    Family("pack", ANYTHING, division, lambda a, b: (a // b,), """
        Q: {A} has {a} {items} and puts {b} {items} into each {box}. | {A} packs {a} {items} into
           {boxes}. Each {box} holds {b} {items}. | A {box} has room for {b} {items}. {A} has {a}
           {items} to pack. | {A} sorts {a} {items} into {boxes} of {b} {items} each.
        Q: How many {boxes} does {A} need? | How many {boxes} are needed? | How many {boxes} will
           {he} fill?
        A: There are {a} {items} to pack. | Each {box} holds {b} {items}. | So {A} needs {a} / {b} =
           {r} {boxes}.
        """),
    Family("price", TOYS, product, lambda a, b: (a * b,), """
        Q: {A} buys {a} {items} for ${b} each. | One {item} costs ${b}. {A} buys {a} {items}. | {A}
           buys {a} {items} at the {shop}. Each one costs ${b}. | The {items} at the {shop} cost
           ${b} each, and {A} buys {a} of them.
        Q: How many dollars does {A} pay? | How much does {he} pay in dollars? | How much money does
           {A} spend? | How many dollars is that in total? | What is the total price?
        A: {A} buys {a} {items}. | Each {item} costs {b} dollars. | In total {A} pays {a} * {b} =
           {r} dollars.
        """),
    Family("unit_price", TOYS, division, lambda a, b: (a // b,), """
        Q: {A} pays ${a} for {b} {items}. | {A} buys {b} {items} at the {shop} and pays ${a} in
           total. | {b} {items} cost ${a} in total. {A} buys them all. | At the {shop}, {A} spends
           ${a} on {b} {items}.
        Q: All of them have the same price. | Each {item} costs the same. | They all cost the same.
        Q: How many dollars does one {item} cost? | What is the price of one {item}? | How much does
           each {item} cost?
        A: Together the {b} {items} cost {a} dollars. | Each {item} costs the same. | So one {item}
           costs {a} / {b} = {r} dollars.
        """),
    Family("rate", TOYS, product, lambda a, b: (a * b,), """
        Q: {A} reads {b} pages every day. | {A} has a long book and reads {b} pages of it a day. |
           Each day, {A} reads {b} pages.
        Q: {He} does that for {a} days. | {He} keeps this up for {a} days. | {He} does so {a} days
           in a row.
        Q: How many pages does {A} read? | How many pages is that in total? | How many pages does
           {he} read altogether?
        A: {A} reads {b} pages a day. | {A} does so for {a} days. | In total {A} reads {a} * {b} =
           {r} pages.
        """),
    Family("drive", TOYS, lambda n: (n(2, 9), 5 * n(4, 16)), lambda a, b: (a * b,), """
        Q: {A} drives at {b} miles per hour for {a} hours. | {A} takes a train to the {place}. It
           goes {b} miles per hour for {a} hours. | For {a} hours, {A}'s bus travels at {b} miles
           per hour. | {A} drives to the {place} in {a} hours. {He} drives {b} miles every hour.
        Q: How many miles is that? | How many miles does {A} travel? | How far does {he} get, in
           miles?
        A: The trip takes {a} hours. | Every hour {A} travels {b} miles. | In total {A} travels {a}
           * {b} = {r} miles.
        """),
    Family("speed", TOYS, lambda n: division(n, 80), lambda a, b: (a // b,), """
        Q: {A} drives {a} miles in {b} hours. | {A}'s train covers {a} miles in {b} hours. | It
           takes {A} {b} hours to travel {a} miles to the {place}.
        Q: How many miles does {A} travel per hour? | What is the speed in miles per hour? | How
           many miles is that in one hour, if the speed never changes?
        A: The trip is {a} miles long. | It takes {b} hours. | So {A} travels {a} / {b} = {r} miles
           per hour.
        """),
    Family("cents", TOYS, lambda n: (n(2, 12), n(1, 2) * 25), lambda a, b: (a * b,), """
        Q: {A} buys {a} {items} for {b} cents each. | One {item} costs {b} cents. {A} buys {a}
           {items}. | {A} buys {a} {items} at the {shop}. Each one costs {b} cents.
        Q: How many cents does {A} pay? | How many cents is that in total? | What do all the {items}
           cost in cents?
        A: {A} buys {a} {items}. | Each {item} costs {b} cents. | In total {A} pays {a} * {b} = {r}
           cents.
        """),
    Family("area", TOYS, product, lambda a, b: (a * b,), """
        Q: {A} has a garden that is {a} meters wide and {b} meters long. | {A} paints a wall that is
           {a} meters high and {b} meters long. | {A} lays a floor that is {a} meters wide and {b}
           meters long.
        Q: What is its area in square meters? | How many square meters is that? | How large is its
           area, in square meters?
        A: One side is {a} meters and the other side is {b} meters. | The area is one side times the
           other side. | So the area is {a} * {b} = {r} square meters.
        """),
    Family("rope", TOYS, division, lambda a, b: (a // b,), """
        Q: {A} has a rope that is {a} meters long. | {A} buys {a} meters of rope. | A rope of {a}
           meters lies in {A}'s garage.
        Q: {He} cuts it into {b} equal pieces. | {He} cuts the rope into {b} pieces of the same
           length. | {He} makes {b} pieces of the same length from it.
        Q: How many meters long is each piece? | How long is one piece, in meters? | What is the
           length of a piece in meters?
        A: The rope is {a} meters long. | It is cut into {b} equal pieces. | So each piece is {a} /
           {b} = {r} meters long.
        """),
    Family("part", ANYTHING, lambda n: ((b := _part(n)) * n(2, 60), b), lambda a, b: (a // b,), """
        Q: {A} has {a} {items} and gives {part} of them to {B}. | {A} had {a} {items}. {B} got
           {part} of them. | There are {a} {items} in {A}'s {box}, and {part} of them belong to {B}.
           | {A} gives {B} {part} of {his} {a} {items}.
        Q: How many {items} does {B} get? | How many {items} are there for {B}? | How many {items}
           is that?
        A: There are {a} {items}. | To find {part} of the {items}, divide {a} by {b}. | So {B} gets
           {a} / {b} = {r} {items}.
        """),
    Family("percent", PLANTS,
           lambda n: ((b := _percent(n)) * n(2, 80), b), lambda a, b: (a // b,), """
        Q: {A} plants {a} {items}, and {percent}% of them grow well. | There are {a} {items} in
           {A}'s garden. {A} waters {percent}% of them. | {A} has {a} {items} and sells {percent}%
           of them at the {shop}. | {A} grows {a} {items}. Of these, {percent}% are already tall.
        Q: How many {items} is that? | How many {items} are these {percent}%? | What number of
           {items} is that?
        A: There are {a} {items}. | To find {percent}% of the {items}, divide {a} by {b}. | So that
           is {a} / {b} = {r} {items}.
        """),
    # Two steps.
    Family("gain_loss", ANYTHING,
           lambda n: (some(n), some(n), n(2, 60)), lambda a, b, c: (a + b, a + b - c), """
        Q: {A} has {a} {items}. | {A} starts the day with {a} {items}. | There are {a} {items} in
           {A}'s {box}.
        Q: {He} buys {b} more {items} at the {shop}. | Then {he} gets {b} more. | {His} friend
           brings {him} {b} more {items}.
        Q: After that {he} gives away {c} of them. | Later {he} gives {c} {items} to {his} neighbor.
           | Then {he} sells {c} of the {items}.
        Q: How many {items} does {A} have now? | How many {items} are left? | How many {items} does
           {he} have in the end?
        A: At first {A} has {a} {items}. | With {b} more {items}, {A} has {a} + {b} = {r} {items}. |
           Then {c} of the {items} are gone. | So {A} has {r} - {c} = {s} {items} left.
        """),
    Family("loss_loss", ANYTHING,
           lambda n: ((b := few(n)) + (c := few(n)) + some(n), b, c),
           lambda a, b, c: (a - b, a - b - c), """
        Q: {A} has {a} {items}. | {A} starts the day with {a} {items}. | There are {a} {items} in
           {A}'s {box}.
        Q: {He} gives {b} of them to {his} brother. | {He} gives {b} {items} to {B}. | In the
           morning {he} sells {b} of them.
        Q: Then {he} loses {c} of them. | Later {he} gives {c} {items} to {his} neighbor. | In the
           evening {he} sells {c} more.
        Q: How many {items} does {A} have now? | How many {items} are left? | How many {items} does
           {he} have in the end?
        A: At first {A} has {a} {items}. | Without {b} of the {items}, {A} has {a} - {b} = {r}
           {items}. | Then {c} more of the {items} are gone. | So {A} has {r} - {c} = {s} {items}
           left.
        """),
    Family("three_days", ANYTHING,
           lambda n: (some(n), n(2, 99), n(2, 99)), lambda a, b, c: (a + b, a + b + c), """
        Q: {A} sells {items} at the {shop}. | {A} has a small stand and sells {items}. | {A} sells
           {items} to visitors of the {place}.
        Q: {He} sells {a} on Monday, {b} on Tuesday and {c} on Wednesday. | On Monday {he} sells
           {a}, on Tuesday {b}, and on Wednesday {c}. | On Monday {he} sells {a} {items}. On Tuesday
           {he} sells {b}, and on Wednesday {c}.
        Q: How many {items} does {A} sell in the three days? | How many {items} is that in total? |
           How many {items} does {he} sell altogether?
        A: On Monday {A} sells {a} {items} and on Tuesday {b} {items}. | In these two days {A} sells
           {a} + {b} = {r} {items}. | On Wednesday {A} sells {c} {items}. | In total {A} sells {r} +
           {c} = {s} {items}.
        """),
    Family("more_total", ANYTHING,
           lambda n: (n(2, 200), n(2, 99)), lambda a, b: (a + b, a + a + b), """
        Q: {A} has {a} {items}. | {A} collected {a} {items}. | There are {a} {items} in {A}'s {box}.
        Q: {B} has {b} more {items} than {A}. | {B} has {b} more than {A}. | {B} has as many {items}
           as {A} and {b} more.
        Q: How many {items} do they have together? | How many {items} do {A} and {B} have in total?
           | How many {items} do the two of them have altogether?
        A: {A} has {a} {items}, and {B} has {b} more {items} than {A}. | So {B} has {a} + {b} = {r}
           {items}. | Together {A} and {B} have {a} + {r} = {s} {items}.
        """),
    Family("fewer_total", ANYTHING,
           lambda n: ((b := n(2, 99)) + n(2, 200), b), lambda a, b: (a - b, a + a - b), """
        Q: {A} has {a} {items}. | {A} collected {a} {items}. | There are {a} {items} in {A}'s {box}.
        Q: {B} has {b} fewer {items} than {A}. | {B} has {b} fewer than {A}. | {A} has {b} more
           {items} than {B}.
        Q: How many {items} do they have together? | How many {items} do {A} and {B} have in total?
           | How many {items} do the two of them have altogether?
        A: {A} has {a} {items}, and {B} has {b} fewer {items} than {A}. | So {B} has {a} - {b} = {r}
           {items}. | Together {A} and {B} have {a} + {r} = {s} {items}.
        """),
    Family("times_total", ANYTHING,
           lambda n: (n(2, 60), n(2, 9)), lambda a, b: (a * b, a + a * b), """
        Q: {A} has {a} {items}. | {A} bought {a} {items}. | {A} collected {a} {items}.
        Q: {B} has {b} times as many {items} as {A}. | {B} has {times} as many. | {B} has {times} as
           many {items} as {A}.
        Q: How many {items} do they have together? | How many {items} do {A} and {B} have in total?
           | How many {items} do the two of them have altogether?
        A: {A} has {a} {items}, and {B} has {b} times as many {items} as {A}. | So {B} has {a} * {b}
           = {r} {items}. | Together {A} and {B} have {a} + {r} = {s} {items}.
        """),
    Family("groups_and_loose", ANYTHING,
           lambda n: (*product(n), n(2, 60)), lambda a, b, c: (a * b, a * b + c), """
        Q: {A} has {a} {boxes} with {b} {items} in each. | {A} buys {a} {boxes} of {items}. Each
           {box} holds {b} {items}. | {A} fills {a} {boxes}, and every {box} has {b} {items} in it.
        Q: {He} also has {c} {items} on the table. | There are also {c} loose {items}. | Another {c}
           {items} are not in a {box}.
        Q: How many {items} are there in total? | How many {items} is that in all? | How many
           {items} does {A} have altogether?
        A: There are {a} {boxes}, and each {box} holds {b} {items}. | In the {boxes} there are {a} *
           {b} = {r} {items}. | Besides, there are {c} more {items}. | In total there are {r} + {c}
           = {s} {items}.
        """),
    Family("groups_used", ANYTHING,
           lambda n: (*product(n), n(2, 90)), lambda a, b, c: (a * b, a * b - c), """
        Q: {A} has {a} {boxes} with {b} {items} in each. | {A} buys {a} {boxes} of {items}. Each
           {box} holds {b} {items}. | {A} fills {a} {boxes}, and every {box} has {b} {items} in it.
        Q: {He} gives away {c} {items}. | Then {he} sells {c} of the {items}. | {His} friends take
           {c} of the {items}.
        Q: How many {items} are left? | How many {items} does {A} still have? | How many {items}
           remain?
        A: There are {a} {boxes}, and each {box} holds {b} {items}. | At first there are {a} * {b} =
           {r} {items}. | Then {c} of the {items} are gone. | So there are {r} - {c} = {s} {items}
           left.
        """),
    Family("pay_with", TOYS,
           lambda n: ((a := n(2, 9)), (b := n(2, 30)), a * b + n(2, 60)),
           lambda a, b, c: (a * b, c - a * b), """
        Q: {A} buys {a} {items} for ${b} each. | One {item} costs ${b}. {A} buys {a} {items}. | {A}
           buys {a} {items} at the {shop}. Each one costs ${b}.
        Q: {He} had ${c} before. | {He} came with ${c}. | {He} gives the clerk ${c}.
        Q: How many dollars does {A} have after that? | How many dollars of this money does {he} get
           to keep? | How much of this money is left?
        A: {A} buys {a} {items}, and each {item} costs {b} dollars. | The {items} cost {a} * {b} =
           {r} dollars. | {A} had {c} dollars. | So {A} has {c} - {r} = {s} dollars left.
        """),
    Family("give_then_share", ANYTHING,
           lambda n: ((b := n(2, 40)) + (c := few(n)) * n(2, 40), b, c),
           lambda a, b, c: (a - b, (a - b) // c), """
        Q: {A} has {a} {items}. | {A} bought {a} {items} at the {shop}. | There are {a} {items} in
           {A}'s {box}.
        Q: {He} keeps {b} of them for {himself}. | {He} gives {b} of them to {B}. | {He} puts {b} of
           them aside.
        Q: {He} shares the rest equally among {c} friends. | The rest is shared equally among {c}
           children. | {He} divides the others evenly among {c} neighbors.
        Q: How many {items} does each of them get? | How many {items} does each one get? | How many
           {items} are there for each?
        A: {A} has {a} {items}, and {b} of the {items} are put aside. | To share there are {a} - {b}
           = {r} {items}. | They are shared equally among {c}. | So each one gets {r} / {c} = {s}
           {items}.
        """),
    Family("join_then_share", ANYTHING,
           lambda n: ((c := few(n)) * n(2, 40) - (b := n(2, 20)), b, c),
           lambda a, b, c: (a + b, (a + b) // c), """
        Q: {A} has {a} {items} and {B} has {b} {items}. | {A} brings {a} {items} and {B} brings {b}.
           | {A} bought {a} {items}, and {B} bought {b} {items}.
        Q: They put them together and share them equally among {c} children. | All of these {items}
           are shared equally among {c} friends. | They pack all of them into {c} gift bags with the
           same number in each.
        Q: How many {items} are there for each? | How many {items} is that each? | How many {items}
           does each one get?
        A: {A} has {a} {items} and {B} has {b} {items}. | Together they have {a} + {b} = {r}
           {items}. | They are divided equally by {c}. | So each one gets {r} / {c} = {s} {items}.
        """),
    Family("part_left", ANYTHING,
           lambda n: ((b := _part(n)) * n(2, 60), b), lambda a, b: (a // b, a - a // b), """
        Q: {A} has {a} {items}. | {A} bought {a} {items} at the {shop}. | There are {a} {items} in
           {A}'s {box}.
        Q: {He} gives {part} of them to {B}. | {He} sells {part} of them. | {He} uses {part} of the
           {items}.
        Q: How many {items} are left? | How many {items} does {A} still have? | How many {items}
           remain?
        A: There are {a} {items}. To find {part} of the {items}, divide {a} by {b}. | That is {a} /
           {b} = {r} {items}. | These {r} {items} are gone. | So there are {a} - {r} = {s} {items}
           left.
        """),
    Family("parts", EDIBLE, _parts, lambda a, b, c: (a // b, a // b * c), """
        Q: {A} has {a} {items}. | {A} brings {a} {items} to school. | There are {a} {items} in {A}'s
           {box}.
        Q: {His} guests eat {parts} of them. | {He} gives away {parts} of the {items}. | {He} needs
           {parts} of them for a party.
        Q: How many {items} is that? | What number of {items} is that? | How many {items} are these
           {parts}?
        A: There are {a} {items}. To find {parts}, first divide {a} by {b}. | One part is {a} / {b}
           = {r} {items}. | We need {c} of these parts. | So that is {r} * {c} = {s} {items}.
        """),
    Family("percents", PLANTS, _percents, lambda a, b, c: (a // b, a // b * c), """
        Q: {A} plants {a} {items}. | {A} has {a} {items} in {his} garden. | There are {a} {items} on
           {A}'s farm.
        Q: Of these, {percents}% grow well. | {He} waters {percents}% of them. | {He} sells
           {percents}% of the {items}.
        Q: How many {items} is that? | What number of {items} is that? | How many {items} are these
           {percents}%?
        A: There are {a} {items}. To find {percents}%, first divide {a} by {b}. | One part is {a} /
           {b} = {r} {items}. | We need {c} of these parts. | So that is {r} * {c} = {s} {items}.
        """),
    Family("discount", GIFTS,
           lambda n: ((b := _percent(n)) * n(2, 80), b), lambda a, b: (a // b, a - a // b), """
        Q: {A} wants to buy a {item} that costs ${a}. | A {item} at the {shop} costs ${a}. {A} wants
           it. | {A} finds a {item} with a price of ${a}.
        Q: Today there is a discount of {percent}%. | It is on sale with {percent}% off. | {A} has a
           coupon for {percent}% off.
        Q: How many dollars does {A} pay? | How much must {he} pay for the {item}? | What is the
           price with the discount, in dollars?
        A: The {item} costs {a} dollars. To find {percent}% of the price, divide {a} by {b}. | The
           discount is {a} / {b} = {r} dollars. | The price goes down by {r} dollars. | So {A} pays
           {a} - {r} = {s} dollars.
        """),
    Family("perimeter", TOYS, lambda n: (n(2, 99), n(2, 99)), lambda a, b: (a + b, 2 * (a + b)), """
        Q: {A} has a garden that is {a} meters wide and {b} meters long. | {A}'s field has four
           sides. It is {a} meters wide and {b} meters long. | {A} draws a rectangle in the sand. It
           is {a} meters wide and {b} meters long.
        Q: {He} wants a fence around it. | {He} walks around it once. | {He} puts a rope all around
           it.
        Q: How many meters is that? | How many meters long is the way around it? | What is its
           perimeter in meters?
        A: It is {a} meters wide and {b} meters long. | One width and one length are {a} + {b} = {r}
           meters. | There are two of each. | So the perimeter is {r} * 2 = {s} meters.
        """),
    Family("earn_and_spend", GIFTS,
           lambda n: (*product(n), n(2, 200)), lambda a, b, c: (a * b, a * b - c), """
        Q: {A} works {a} hours and earns ${b} per hour. | {A} earns ${b} an hour and works for {a}
           hours. | For every hour of work {A} earns ${b}. {He} works {a} hours.
        Q: Then {he} buys a {item} for ${c}. | Later {he} spends ${c} on a {item}. | With this money
           {he} pays ${c} for a {item}.
        Q: How many dollars does {A} have left? | How much money is left? | How many dollars remain?
        A: {A} works {a} hours and earns {b} dollars an hour. | {A} earns {a} * {b} = {r} dollars. |
           The {item} costs {c} dollars. | So {A} has {r} - {c} = {s} dollars left.
        """),
    Family("save_for", GIFTS,
           lambda n: ((b := n(2, 90)) + (c := few(n)) * n(2, 40), b, c),
           lambda a, b, c: (a - b, (a - b) // c), """
        Q: {A} wants to buy a {item} that costs ${a}. | A {item} at the {shop} costs ${a}, and {A}
           wants it. | {A} needs ${a} for a {item}.
        Q: {He} already has ${b} and saves ${c} a week. | So far {he} has ${b}. Every week {he}
           saves ${c}. | {He} has ${b} now and can save ${c} more each week.
        Q: How many weeks does {A} have to save? | After how many weeks can {he} buy it? | How many
           weeks will it take?
        A: The {item} costs {a} dollars, and {A} already has {b} dollars. | {A} still needs {a} -
           {b} = {r} dollars. | Every week {A} saves {c} dollars. | So it takes {r} / {c} = {s}
           weeks.
        """),
    Family("savings", TOYS,
           lambda n: (n(2, 200), *product(n)), lambda a, b, c: (b * c, a + b * c), """
        Q: {A} has ${a} in {his} piggy bank. | {A} has saved ${a}. | {A} got ${a} for {his}
           birthday.
        Q: For {b} weeks {he} saves ${c} a week. | Then {he} puts ${c} aside every week, for {b}
           weeks. | {He} earns ${c} more in each of the next {b} weeks.
        Q: How many dollars does {A} have then? | How much money does {he} have in the end? | How
           many dollars is that altogether?
        A: {A} saves {c} dollars a week for {b} weeks. | That makes {b} * {c} = {r} dollars. | At
           first {A} had {a} dollars. | So {A} has {a} + {r} = {s} dollars.
        """),
    Family("bus", TOYS,
           lambda n: ((b := n(2, 20)) + n(2, 60), b, n(2, 30)),
           lambda a, b, c: (a - b, a - b + c), """
        Q: {A} rides a bus with {a} people on it. | There are {a} people on {A}'s bus to the
           {place}. | {A} drives a bus. There are {a} people on it.
        Q: At the next stop {b} people get off and {c} get on. | Then {b} people leave the bus and
           {c} people get on. | Soon {b} people get off, and {c} new people get on.
        Q: How many people are on the bus now? | How many people is that now? | How many people are
           there on the bus after that?
        A: There are {a} people on the bus, and {b} people get off. | Then there are {a} - {b} = {r}
           people on the bus. | After that {c} people get on. | So now there are {r} + {c} = {s}
           people on the bus.
        """),
    Family("temperature", TOYS,
           lambda n: (n(3, 50), n(2, 30), n(2, 30)), lambda a, b, c: (a + b, a + b - c), """
        Q: In the morning it is {a} degrees at {A}'s house. | {A} reads {a} degrees on {his}
           thermometer in the morning. | {A} visits the {place}. In the morning it is {a} degrees
           there.
        Q: By noon it is {b} degrees warmer. | At noon the temperature is {b} degrees higher. | Then
           the temperature rises by {b} degrees.
        Q: In the evening it falls by {c} degrees. | At night it gets {c} degrees colder. | Later
           the temperature drops by {c} degrees.
        Q: How many degrees is it then? | What is the temperature in the end, in degrees? | How many
           degrees is it in the end?
        A: In the morning it is {a} degrees, and then it gets {b} degrees warmer. | At noon it is
           {a} + {b} = {r} degrees. | Then it gets {c} degrees colder. | So in the end it is {r} -
           {c} = {s} degrees.
        """),
    Family("pages_left", TOYS,
           lambda n: ((b := n(2, 9)) * (c := n(2, 50)) + n(2, 200), b, c),
           lambda a, b, c: (b * c, a - b * c), """
        Q: {A} reads a book with {a} pages. | {A}'s new book has {a} pages. | {A} borrows a book
           from the library. It has {a} pages.
        Q: {He} reads {c} pages a day for {b} days. | For {b} days {he} reads {c} pages each day. |
           {He} reads in it on {b} days, {c} pages each time.
        Q: How many pages are left? | How many pages does {A} still have to read? | How many pages
           has {he} not read yet?
        A: {A} reads {c} pages a day for {b} days. | {A} reads {b} * {c} = {r} pages. | The book has
           {a} pages. | So there are {a} - {r} = {s} pages left.
        """),
    Family("hours_and_minutes", TOYS,
           lambda n: (n(2, 9), n(2, 59)), lambda a, b: (a * 60, a * 60 + b), """
        Q: {A} watches a film that lasts {a} hours and {b} minutes. | {A}'s train ride takes {a}
           hours and {b} minutes. | {A} walks to the {place} in {a} hours and {b} minutes. | It
           takes {A} {a} hours and {b} minutes to clean the house.
        Q: How many minutes is that? | How long is that in minutes? | How many minutes does it take?
        A: There are {a} full hours, and each hour has 60 minutes. | The full hours are {a} * 60 =
           {r} minutes. | Besides, there are {b} minutes. | So that is {r} + {b} = {s} minutes.
        """),
    Family("dozen", EDIBLE, lambda n: (n(2, 9), n(2, 40)), lambda a, b: (a * 12, a * 12 - b), """
        Q: {A} buys {a} dozen {items}. | {A} has {a} dozen {items}. | {A} orders {a} dozen {items}
           for a party.
        Q: {He} uses {b} of them. | {His} guests eat {b} of them. | {He} gives {b} of them to {B}.
        Q: How many {items} are left? | How many {items} remain? | How many {items} does {A} still
           have?
        A: There are {a} dozen {items}, and each dozen has 12 {items}. | At first there are {a} * 12
           = {r} {items}. | Then {b} of the {items} are gone. | So there are {r} - {b} = {s} {items}
           left.
        """),
    Family("trays_to_bags", BAKED, _regroup, lambda a, b, c: (a * b, a * b // c), """
        Q: {A} bakes {a} trays of {items} with {b} {items} on each tray. | {A} bakes {items}. There
           are {a} trays with {b} {items} each. | {A} fills {a} trays with {items}, {b} on each
           tray.
        Q: {He} packs them into bags of {c} {items} each. | {He} puts {c} {items} into each bag. |
           Every bag gets {c} of the {items}.
        Q: How many bags does {A} fill? | How many bags are needed? | How many bags of {items} is
           that?
        A: There are {a} trays, and each tray has {b} {items}. | In total there are {a} * {b} = {r}
           {items}. | Each bag holds {c} {items}. | So {A} fills {r} / {c} = {s} bags.
        """),
    Family("rows", PLANTS,
           lambda n: (*product(n), n(2, 60)), lambda a, b, c: (a * b, a * b - c), """
        Q: {A} plants {a} rows of {b} {items}. | In {A}'s garden there are {a} rows with {b} {items}
           each. | {A} plants {items} in {a} rows. There are {b} {items} in each row.
        Q: In winter, {c} of them die. | A storm destroys {c} of the {items}. | Later {he} removes
           {c} of them.
        Q: How many {items} are left? | How many {items} remain? | How many {items} are still there?
        A: There are {a} rows, and each row has {b} {items}. | At first there are {a} * {b} = {r}
           {items}. | Then {c} of the {items} are gone. | So there are {r} - {c} = {s} {items} left.
        """),
    Family("wages", TOYS,
           lambda n: (n(2, 9), n(2, 9), n(2, 9)), lambda a, b, c: (a * b, a * b * c), """
        Q: {A} works {a} hours a day and earns ${c} per hour. | {A} earns ${c} an hour and works {a}
           hours every day. | For {a} hours a day {A} has a job that pays ${c} an hour.
        Q: {He} does so for {b} days. | {He} works on {b} days. | {He} keeps this job for {b} days.
        Q: How many dollars does {A} earn in all? | How much money does {he} earn? | How many
           dollars is that in total?
        A: {A} works {a} hours a day for {b} days. | That makes {a} * {b} = {r} hours. | For each
           hour {A} earns {c} dollars. | In total {A} earns {r} * {c} = {s} dollars.
        """),
    Family("ages_sum", TOYS, lambda n: (n(2, 20), n(2, 5)), lambda a, b: (a * b, a + a * b), """
        Q: {A} is {a} years old. | This year {A} is {a} years old. | {A} has just turned {a}.
        Q: {B} is {b} times as old as {A}. | {B} is {times} as old as {A}. | {B} is {times} as old.
        Q: How old are they together? | What is the sum of their ages? | How many years old are {A}
           and {B} together?
        A: {A} is {a} years old, and {B} is {b} times as old as {A}. | So {B} is {a} * {b} = {r}
           years old. | Together they are {a} + {r} = {s} years old.
        """),
    Family("age_of_other_later", TOYS,
           lambda n: (n(2, 50), n(2, 30), n(2, 20)), lambda a, b, c: (a + b, a + b + c), """
        Q: {A} is {a} years old. | This year {A} is {a} years old. | {A} has just turned {a}.
        Q: {B} is {b} years older than {A}. | {A} is {b} years younger than {B}. | {B} was born {b}
           years before {A}.
        Q: How old will {B} be in {c} years? | How old will {B} be {c} years from now? | What will
           {B}'s age be in {c} years?
        A: {A} is {a} years old, and {B} is {b} years older than {A}. | Now {B} is {a} + {b} = {r}
           years old. | In {c} years, {B} will be {c} years older. | Then {B} will be {r} + {c} =
           {s} years old.
        """),
    Family("average", TOYS,
           lambda n: (2 * n(2, 90) - (b := n(2, 60)), b), lambda a, b: (a + b, (a + b) // 2), """
        Q: {A} scores {a} points in the first game and {b} points in the second game. | {A} plays
           two games. {He} gets {a} points in the first one and {b} in the second one. | In two
           games {A} gets {a} points and {b} points.
        Q: What is {his} average number of points? | How many points is that per game on average? |
           How many points does {A} get per game on average?
        A: The two games bring {a} points and {b} points. | In total that is {a} + {b} = {r} points.
           | There are two games. | So the average is {r} / 2 = {s} points.
        """),
    Family("trip_and_rest", TOYS,
           lambda n: ((b := n(2, 9)) * (c := 5 * n(2, 16)) + n(2, 99), b, c),
           lambda a, b, c: (b * c, a - b * c), """
        Q: {A} goes on a trip of {a} miles. | {A} wants to travel {a} miles to the {place}. | The
           {place} is {a} miles from {A}'s home, and {A} drives there.
        Q: {He} drives for {b} hours at {c} miles per hour. | For {b} hours {he} drives {c} miles
           per hour. | In the first {b} hours {he} drives {c} miles each hour.
        Q: How many miles are left? | How many miles does {A} still have to go? | How many miles
           remain?
        A: {A} drives {c} miles an hour for {b} hours. | {A} has driven {b} * {c} = {r} miles. | The
           trip is {a} miles long. | So there are {a} - {r} = {s} miles left.
        """),
    Family("tank", TOYS,
           lambda n: (n(20, 300), *product(n)), lambda a, b, c: (b * c, a + b * c), """
        Q: There are {a} liters of water in {A}'s tank. | {A} has a pool with {a} liters of water in
           it. | {A}'s pond holds {a} liters of water.
        Q: {He} adds {c} liters every minute for {b} minutes. | For {b} minutes, {c} liters flow
           into it per minute. | A pump brings {c} more liters a minute, for {b} minutes.
        Q: How many liters of water are there then? | How many liters is that in the end? | How much
           water is that, in liters?
        A: Every minute brings {c} liters of water for {b} minutes. | That makes {b} * {c} = {r}
           liters. | At first there were {a} liters. | So there are {a} + {r} = {s} liters.
        """),
    # Three steps and four.
    Family("two_kinds", TOYS,
           lambda n: (few(n), n(2, 9), few(n), n(2, 9)),
           lambda a, b, c, d: (a * b, c * d, a * b + c * d), """
        Q: {A} buys {a} {items} for ${b} each and {c} {items2} for ${d} each. | One of the {items}
           costs ${b}, one of the {items2} ${d}. {A} buys {a} {items} and {c} {items2}. | {A} buys
           {a} {items} and {c} {items2}. The {items} cost ${b} each and the {items2} ${d} each.
        Q: How many dollars does {A} pay in total? | How much money does {he} spend? | How many
           dollars is that altogether? | What is the total cost in dollars?
        A: There are {a} {items}, and each costs {b} dollars. | The {items} cost {a} * {b} = {r}
           dollars. | There are {c} {items2}, and each costs {d} dollars. | The {items2} cost {c} *
           {d} = {s} dollars. | In total {A} pays {r} + {s} = {t} dollars.
        """),
    Family("tickets", TOYS,
           lambda n: (few(n), n(2, 20), few(n), n(2, 9)),
           lambda a, b, c, d: (a * b, c * d, a * b + c * d), """
        Q: {A} buys tickets for the {place}. | {A} takes {his} family to the {place}. | {A} plans a
           visit to the {place}.
        Q: There are {a} adults and {c} children. | {a} adults and {c} children want to go. | The
           group has {a} adults and {c} children.
        Q: A ticket costs ${b} for an adult and ${d} for a child. | Adults pay ${b} each and
           children pay ${d} each. | Each adult pays ${b}, and each child pays ${d}.
        Q: How many dollars do they pay in total? | How much do all the tickets cost, in dollars? |
           How many dollars is that altogether?
        A: There are {a} adults, and each adult pays {b} dollars. | The adults pay {a} * {b} = {r}
           dollars. | There are {c} children, and each child pays {d} dollars. | The children pay
           {c} * {d} = {s} dollars. | In total they pay {r} + {s} = {t} dollars.
        """),
    Family("two_beds", PLANTS,
           lambda n: (few(n), few(n), few(n), few(n)),
           lambda a, b, c, d: (a * b, c * d, a * b + c * d), """
        Q: {A} plants {a} rows of {b} {items} and {c} rows of {d} {items2}. | In {A}'s garden there
           are {a} rows of {b} {items} and {c} rows of {d} {items2}. | There are {a} rows with {b}
           {items} each in {A}'s garden, and {c} rows with {d} {items2} each.
        Q: How many plants are there in total? | How many plants is that altogether? | How many
           plants does {A} have in these rows?
        A: There are {a} rows, and each has {b} {items}. | These are {a} * {b} = {r} {items}. |
           There are {c} rows, and each has {d} {items2}. | These are {c} * {d} = {s} {items2}. | In
           total there are {r} + {s} = {t} plants.
        """),
    Family("legs", TOYS,
           lambda n: (n(2, 60), n(2, 60)), lambda a, b: (a * 4, b * 2, a * 4 + b * 2), """
        Q: {A} has {a} cows and {b} hens. | There are {a} cows and {b} hens on {A}'s farm. | {A}
           counts {a} cows and {b} hens.
        Q: Each cow has 4 legs and each hen has 2. | A cow has 4 legs, and a hen has 2 legs. | Cows
           have 4 legs each and hens have 2 legs each.
        Q: How many legs do the animals have in total? | How many legs is that altogether? | How
           many legs are there?
        A: There are {a} cows, and each cow has 4 legs. | The cows have {a} * 4 = {r} legs. | There
           are {b} hens, and each hen has 2 legs. | The hens have {b} * 2 = {s} legs. | In total
           there are {r} + {s} = {t} legs.
        """),
    Family("three_people", ANYTHING,
           lambda n: (n(2, 80), n(2, 40), n(2, 5)),
           lambda a, b, c: (a + b, (a + b) * c, a + b + (a + b) * c), """
        Q: {A} has {a} {items}, and {B} has {b} more {items} than {A}. | {A} has {a} {items}. {B}
           has {b} more than {A}. | {A} collected {a} {items}, and {B} collected {b} more than {A}.
        Q: {C} has {c} times as many {items} as {B}. | {C} has {c} times as many as {B}. | {C} has
           {c} times the number of {items} that {B} has.
        Q: How many {items} do {B} and {C} have together? | How many {items} do {B} and {C} have in
           total? | How many {items} are {B}'s and {C}'s altogether?
        A: {A} has {a} {items}, and {B} has {b} more {items} than {A}. | So {B} has {a} + {b} = {r}
           {items}. | {C} has {c} times as many {items} as {B}. | So {C} has {r} * {c} = {s}
           {items}. | Together {B} and {C} have {r} + {s} = {t} {items}.
        """),
    Family("stand", FOOD,
           lambda n: (n(2, 9), n(2, 9), n(2, 9), n(2, 90)),
           lambda a, b, c, d: (a * b, a * b * c, a * b * c - d), """
        Q: {A} sells {a} {boxes} of {items} at the {shop}. There are {b} {items} in each {box}. | At
           the {shop}, {A} sells {a} {boxes} of {items} with {b} {items} in each. | {A} takes {a}
           {boxes} with {b} {items} each to the {shop} and sells them all.
        Q: {He} gets ${c} for each of the {items}. | People pay {him} ${c} for each of the {items}.
           | Each of the {items} brings {him} ${c}.
        Q: The {boxes} cost {him} ${d}. | {He} pays ${d} for the stand. | {He} has to pay ${d} for
           the trip.
        Q: How many dollars does {A} keep? | How many dollars are left for {him}? | How much of this
           money is left?
        A: There are {a} {boxes}, and each {box} holds {b} {items}. | {A} sells {a} * {b} = {r}
           {items}. | For each of the {items}, {A} gets {c} dollars. | {A} gets {r} * {c} = {s}
           dollars. | {A} has to pay {d} dollars. | So {A} keeps {s} - {d} = {t} dollars.
        """),
    Family("percent_then_more", PLANTS,
           lambda n: ((b := _percent(n)) * n(2, 80), b, n(2, 60)),
           lambda a, b, c: (a // b, a - a // b, a - a // b + c), """
        Q: {A} has {a} {items}. | {A} plants {a} {items} in {his} garden. | There are {a} {items} in
           {A}'s garden.
        Q: {He} gives {percent}% of them to {B}. | A storm destroys {percent}% of them. | {He} sells
           {percent}% of the {items}.
        Q: Then {he} plants {c} new {items}. | After that {he} gets {c} more {items}. | In spring
           {he} buys {c} more.
        Q: How many {items} does {A} have now? | How many {items} are there in the end? | How many
           {items} is that now?
        A: There are {a} {items}. To find {percent}% of the {items}, divide {a} by {b}. | That is
           {a} / {b} = {r} {items}. | These {r} {items} are gone. | So there are {a} - {r} = {s}
           {items} left. | After that {A} gets {c} more {items}. | Now there are {s} + {c} = {t}
           {items}.
        """),
    Family("half_then_more", EDIBLE,
           lambda n: ((b := _part(n)) * n(3, 60), b, n(2, 30)),
           lambda a, b, c: (a // b, a - a // b, a - a // b - c), """
        Q: {A} has {a} {items}. | {A} buys {a} {items} at the {shop}. | There are {a} {items} in
           {A}'s kitchen.
        Q: {He} gives {part} of them to {B}. | On Monday {his} family eats {part} of them. | {He}
           takes {part} of the {items} to school.
        Q: Then {he} eats {c} of the others. | Later {he} gives {c} {items} to {his} neighbor. | On
           the next day {c} more are eaten.
        Q: How many {items} are left? | How many {items} remain? | How many {items} does {A} have in
           the end?
        A: There are {a} {items}. To find {part} of the {items}, divide {a} by {b}. | That is {a} /
           {b} = {r} {items}. | These {r} {items} are gone. | So there are {a} - {r} = {s} {items}
           left. | Then {c} more of the {items} are gone. | So there are {s} - {c} = {t} {items}
           left.
        """),
    Family("shopping_change", TOYS,
           _shopping, lambda a, b, c, d, e: (a * b, c * d, a * b + c * d, e - a * b - c * d), """
        Q: {A} buys {a} {items} for ${b} each and {c} {items2} for ${d} each. | {A} buys {a} {items}
           and {c} {items2}. The {items} cost ${b} each and the {items2} ${d} each. | At the {shop},
           {A} takes {a} {items} at ${b} each and {c} {items2} at ${d} each.
        Q: {He} had ${e} before. | {He} came with ${e}. | {He} gives the clerk ${e}.
        Q: How many dollars does {A} have after that? | How many dollars of this money does {he} get
           to keep? | How much of this money is left?
        A: There are {a} {items}, and each costs {b} dollars. | The {items} cost {a} * {b} = {r}
           dollars. | There are {c} {items2}, and each costs {d} dollars. | The {items2} cost {c} *
           {d} = {s} dollars. | In total that is {r} + {s} = {t} dollars. | {A} had {e} dollars. |
           So {A} has {e} - {t} = {u} dollars left.
        """),
    Family("class_trip", TOYS,
           _class_trip, lambda a, b, c, d: (a * b, a * b + c, (a * b + c) // d), """
        Q: {A} plans a school trip to the {place}. | {A}'s school visits the {place}. | {A} is a
           teacher, and {his} school goes to the {place}.
        Q: There are {a} classes with {b} students each, and {c} teachers. | {a} classes of {b}
           students each go there with {c} teachers. | {c} teachers and {a} classes with {b}
           students each come along.
        Q: Each small bus has room for {d} people. | They ride in small buses with {d} people in
           each. | {d} people fit into one small bus.
        Q: How many buses do they need? | How many buses are needed for the trip? | How many buses
           is that?
        A: There are {a} classes, and each class has {b} students. | In total there are {a} * {b} =
           {r} students. | Besides, there are {c} teachers. | Together there are {r} + {c} = {s}
           people. | Each bus has room for {d} people. | So they need {s} / {d} = {t} buses.
        """),
)
# fmt: on


def problems(seed: int, *, held_out: bool) -> Iterator[Problem]:
    """Yield problems without end, the same for the same arguments.

    Args:
        seed: of families, wordings, names and numbers.
        held_out: whether templates and numbers are those kept from training, or those in it.
    """
    rng = random.Random(seed)
    pick = rng.choice
    uniform = rng.random

    def between(low: int, high: int) -> int:
        return low + int(uniform() * (high - low + 1))

    prepared = [
        (family, family.templates(held_out=held_out), family.answer()) for family in FAMILIES
    ]
    while True:
        family, templates, answer = pick(prepared)
        given, results = _numbers(family, between, held_out)
        fields = _cast(pick) | _scene(pick, family.nouns) | _spoken(given, results)
        template, question = pick(templates)
        yield Problem(
            question=question.format_map(fields),
            answer=f"{answer.format_map(fields)}\n#### {results[-1]}",
            template=template,
            numbers=given,
        )


def is_held_out(family: str, numbers: tuple[int, ...]) -> bool:
    """Return whether these given numbers are kept from the training of a family."""
    return zlib.crc32(f"{family}{numbers}".encode()) % HELD_OUT == 0


def _numbers(
    family: Family, between: Between, held_out: bool
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Draw given numbers of one part until they and all results are in range."""
    while True:
        given = family.draw(between)
        if is_held_out(family.name, given) != held_out:
            continue
        results = family.solve(*given)
        if min(given) >= SMALLEST <= min(results) and max(*given, *results) <= LARGEST:
            return given, results


def _cast(pick: Callable[[Sequence[_Person]], _Person]) -> dict[str, object]:
    """Return names of three people, and pronouns of the first."""
    first, second, third = pick(PEOPLE), pick(PEOPLE), pick(PEOPLE)
    while second is first:
        second = pick(PEOPLE)
    while third is first or third is second:
        third = pick(PEOPLE)
    return first | {"B": second["A"], "C": third["A"]}


def _scene(pick: Callable[[Sequence[Any]], Any], nouns: Sequence[Noun]) -> dict[str, object]:
    """Return the things and places of a story."""
    noun, other, container = pick(nouns), pick(nouns), pick(BOXES)
    while other is noun:
        other = pick(nouns)
    return {
        "item": noun.one,
        "items": noun.many,
        "item2": other.one,
        "items2": other.many,
        "box": container.one,
        "boxes": container.many,
        "shop": pick(SHOPS),
        "place": pick(PLACES),
    }


def _spoken(given: tuple[int, ...], results: tuple[int, ...]) -> dict[str, object]:
    """Return all numbers by letter, and in words what b says as a part, or as a factor."""
    fields: dict[str, object] = dict(zip("abcde", given, strict=False))
    fields |= zip("rstu", results, strict=False)
    divisor = given[1]
    fields["part"] = PARTS.get(divisor)
    fields["parts"] = MANY_PARTS.get((given[-1], divisor))
    fields["percent"] = 100 // divisor
    fields["percents"] = 100 * given[-1] // divisor
    fields["times"] = TIMES.get(divisor)
    return fields


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=5, help="problems to print (default 5)")
    parser.add_argument("--seed", type=int, default=0, help="of everything (default 0)")
    parser.add_argument("--held-out", action="store_true", help="print held-out problems")
    parser.add_argument("--json", action="store_true", help="print JSON lines")
    args = parser.parse_args()
    stream = problems(args.seed, held_out=args.held_out)
    for problem in itertools.islice(stream, args.count):
        if args.json:
            print(json.dumps({"question": problem.question, "answer": problem.answer}))
            continue
        print(f"[{problem.template} {problem.numbers}]\n{problem.question}\n{problem.answer}\n")


if __name__ == "__main__":
    main()
