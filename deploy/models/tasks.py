"""A seed and a split -> requests and replies of separate domains: SQL, JSON records, arithmetic, functions, edits.

Every item is made, none is copied. Held-out items use phrasings and words that no training item has, so a model that
answers them has learnt the task. Knows nothing of tokens or models.
"""

from __future__ import annotations

import hashlib
import json
import keyword
import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from paceline.deploy.models import words

Split = Literal["train", "new_words", "held_out"]
"""new_words: words that no training item has, in known phrasings. held_out: the phrasings are new as well."""
HELD_OUT_ONE_IN = 5


@dataclass(frozen=True, slots=True)
class Item:
    """One request and the reply it deserves."""

    domain: str
    request: str
    reply: str


def stable_hash(text: str) -> int:
    """Same number in every process, unlike hash()."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")


_ONSETS = [
    "b",
    "bl",
    "c",
    "ch",
    "cr",
    "d",
    "dr",
    "f",
    "fl",
    "g",
    "gr",
    "h",
    "j",
    "k",
    "kl",
    "l",
    "m",
    "n",
    "p",
    "pl",
    "pr",
    "qu",
    "r",
    "s",
    "sh",
    "sl",
    "st",
    "t",
    "th",
    "tr",
    "v",
    "w",
    "y",
    "z",
]
_CODAS = ["", "", "", "l", "m", "n", "nd", "r", "rk", "s", "st", "t", "x"]


class Draw:
    """Random choices of one item, each from the part of a list that belongs to the split."""

    def __init__(self, rng: random.Random, split: Split) -> None:
        self.rng = rng
        self._new_words = split != "train"
        self._new_phrases = split == "held_out"

    def phrase(self, phrases: Sequence[str]) -> str:
        """One phrasing; the last of each list is held out."""
        return phrases[-1] if self._new_phrases else self.rng.choice(phrases[:-1])

    def word(self, pool: Sequence[str]) -> str:
        """One word of the split's part of a pool; in training four in ten are made up.

        Made-up words never come twice, so they cannot be learnt by heart: what is learnt is to copy.
        """
        word = self.rng.choice(self._part(pool))
        if self._new_words or self.rng.random() < 0.6:
            return word
        made_up = "".join(
            self.rng.choice(_ONSETS) + self.rng.choice("aeiou") + self.rng.choice(_CODAS)
            for _ in range(self.rng.randrange(1, 3))
        )
        return made_up.title() if word[0].isupper() else made_up

    def some(self, pool: Sequence[str], num: int) -> list[str]:
        """`num` different words, drawn like one."""
        words: list[str] = []
        while len(words) < num:
            word = self.word(pool)
            if word not in words:
                words.append(word)
        return words

    def _part(self, pool: Sequence[str]) -> list[str]:
        return [w for w in pool if (stable_hash(w) % HELD_OUT_ONE_IN == 0) == self._new_words]


# -- question to SQL -------------------------------------------------------------------------------------

_ABOVE = ("{x} is above {n}", "{x} is more than {n}", "the {x} is over {n}", "{x} lies above {n}")
_BELOW = ("{x} is below {n}", "{x} is less than {n}", "the {x} is under {n}", "{x} lies below {n}")
_EQUAL = ("{y} is {v}", "the {y} is {v}", "{y} equals {v}", "{v} is the {y}")
_LIST = (
    "Show {a} and {b} of the {t}",
    "List {a} and {b} of all {t}",
    "Give me {a} and {b} from the {t}",
    "Which {a} and {b} do the {t} have",
)
_GROUP = (
    "For each {g}, count the {t} and give the average {x}",
    "Count the {t} and average the {x} per {g}",
    "How many {t} are there per {g}, and what is their average {x}",
    "Per {g}, the number of {t} and the mean {x}",
)
_EXTREME = (
    "Find the highest and the lowest {x} of the {t}",
    "What are the largest and the smallest {x} among the {t}",
    "Give the maximum and the minimum {x} of all {t}",
    "Show the highest and the smallest {x} of the {t}",
)
_SORT_DOWN = (
    ", {o} from high to low",
    ", sorted by {o} descending",
    ", largest {o} first",
    ", from the largest {o} down",
)
_SORT_UP = (
    ", {o} from low to high",
    ", sorted by {o} ascending",
    ", smallest {o} first",
    ", from the smallest {o} up",
)
_LIMIT = (", only {k} of them", ", first {k} only", ", at most {k} rows", ", at most {k} of them")


def plural(noun: str) -> str:
    """English plural, good enough for the nouns used here."""
    if noun.endswith("y") and noun[-2] not in "aeiou":
        return noun[:-1] + "ies"
    return noun + ("es" if noun.endswith(("s", "ch", "x")) else "s")


def sql_item(draw: Draw) -> Item:
    """A table's columns and a question -> one SELECT, clause by clause on its own line."""
    rng = draw.rng
    table = plural(draw.word(words.NOUNS))
    numbers, texts = draw.some(words.NUMBER_FIELDS, 3), draw.some(words.TEXT_FIELDS, 2)
    columns = rng.sample([*numbers, *texts], 5)
    where_text, where_sql = _conditions(draw, numbers, texts)
    kind = rng.randrange(3)
    if kind == 0:
        a, b = rng.sample(columns, 2)
        question, select, group = draw.phrase(_LIST).format(a=a, b=b, t=table), f"{a}, {b}", ""
        sortable = numbers[0]
    elif kind == 1:
        g, x = rng.choice(texts), numbers[0]
        question = draw.phrase(_GROUP).format(g=g, t=table, x=x)
        select, group = f"{g}, COUNT(*) AS num_{table}, AVG({x}) AS avg_{x}", f"GROUP BY {g}"
        sortable = f"avg_{x}"
    else:
        x = numbers[0]
        question = draw.phrase(_EXTREME).format(t=table, x=x)
        select, group, sortable = f"MAX({x}) AS max_{x}, MIN({x}) AS min_{x}", "", ""
    clauses = [f"SELECT {select}", f"FROM {table}", *where_sql, *([group] if group else [])]
    question += where_text
    if sortable and rng.random() < 0.7:
        down = rng.random() < 0.5
        said = sortable.removeprefix("avg_") if not sortable.startswith("avg_") else f"average {sortable[4:]}"
        question += draw.phrase(_SORT_DOWN if down else _SORT_UP).format(o=said)
        clauses.append(f"ORDER BY {sortable} {'DESC' if down else 'ASC'}")
        if rng.random() < 0.5:
            k = rng.randrange(2, 60)
            question += draw.phrase(_LIMIT).format(k=k)
            clauses.append(f"LIMIT {k}")
    request = f"Table {table} has the columns {', '.join(columns)}. {question}. Write the SQL."
    return Item("sql", request, "\n".join(clauses) + ";")


def _conditions(draw: Draw, numbers: list[str], texts: list[str]) -> tuple[str, list[str]]:
    """Up to three conditions, as words and as lines of a WHERE clause."""
    said, sql = [], []
    for x in numbers[: draw.rng.randrange(3)]:
        n, above = draw.rng.randrange(2, 999), draw.rng.random() < 0.5
        said.append(draw.phrase(_ABOVE if above else _BELOW).format(x=x, n=n))
        sql.append(f"{x} {'>' if above else '<'} {n}")
    if draw.rng.random() < 0.6 or not sql:
        value = draw.word(draw.rng.choice([words.CITIES, words.COLORS, words.PRODUCTS, words.LAST_NAMES]))
        y = texts[0]
        said.append(draw.phrase(_EQUAL).format(y=y, v=value))
        sql.append(f"{y} = '{value}'")
    return " where " + " and ".join(said), [
        f"{'WHERE' if i == 0 else '  AND'} {line}" for i, line in enumerate(sql)
    ]


# -- sentence to JSON record -----------------------------------------------------------------------------

_PERSON = (
    "{first} {last} is {age} years old, works as a {job} in {city} and earns {salary} euros.",
    "{first} {last}, {age}, a {job} from {city}, makes {salary} euros a year.",
    "Our {job} in {city} is called {first} {last}; age {age}, salary {salary} euros.",
    "In {city} lives {first} {last}, {job}, aged {age}, paid {salary} euros.",
)
_ORDER = (
    "{first} {last} from {city} ordered {num} {color} {product} pieces at {price} dollars each.",
    "Order for {city}: {num} times {product} in {color}, {price} dollars apiece, bought by {first} {last}.",
    "{num} {color} {product} units, {price} dollars per unit, go to {first} {last} in {city}.",
    "Please send {first} {last} in {city} the {product} in {color}, {num} of it, for {price} dollars each.",
)
_TRIP = (
    "{first} {last} flies from {city} to {to} on day {day} at {hour} o'clock, seat {seat}, for {price} euros.",
    "Flight {city} to {to}, day {day}, {hour} o'clock: {first} {last} has seat {seat} and paid {price} euros.",
    "A ticket of {price} euros takes {first} {last} from {city} to {to}, seat {seat}, day {day} at {hour} o'clock.",
    "On day {day} at {hour} o'clock {first} {last} leaves {city} for {to}; seat {seat}, {price} euros.",
)
_PRODUCT = (
    "The {color} {product} by {last} weighs {weight} grams, costs {price} dollars and {num} are in stock in {city}.",
    "{last} sells a {product} in {color}: {price} dollars, {weight} grams, {num} left in {city}.",
    "In {city} we keep {num} pieces of the {color} {product} from {last}, {weight} grams and {price} dollars each.",
    "{weight} grams of {product}, {color}, made by {last}, price {price} dollars, {num} stored in {city}.",
)
_ASK_JSON = (
    "Turn this into a JSON record: {text}",
    "{text} Write it as JSON.",
    "Extract a JSON record. {text}",
    "{text}\nAs a JSON record, please.",
)


def json_item(draw: Draw) -> Item:
    """One or two sentences about the same kind of thing -> a record, or a list of records."""
    kind = draw.rng.choice(("person", "order", "trip", "product"))
    pairs = [_record(draw, kind) for _ in range(1 if draw.rng.random() < 0.6 else 2)]
    text = " ".join(sentence for sentence, _ in pairs)
    records = [record for _, record in pairs]
    reply = json.dumps(records[0] if len(records) == 1 else records, indent=2)
    return Item("json", draw.phrase(_ASK_JSON).format(text=text), reply)


def _record(draw: Draw, kind: str) -> tuple[str, dict[str, object]]:
    rng = draw.rng
    first, last, city = draw.word(words.FIRST_NAMES), draw.word(words.LAST_NAMES), draw.word(words.CITIES)
    name = f"{first} {last}"
    fields: dict[str, object] = {"first": first, "last": last, "city": city}
    record: dict[str, object]
    if kind == "person":
        job, age, salary = draw.word(words.JOBS), rng.randrange(18, 80), rng.randrange(20, 99) * 1000
        fields |= {"job": job, "age": age, "salary": salary}
        record = {"type": "person", "name": name, "age": age, "job": job, "city": city, "salary": salary}
        return draw.phrase(_PERSON).format(**fields), record
    price, num = rng.randrange(2, 900), rng.randrange(2, 99)
    fields |= {"price": price, "num": num}
    if kind == "trip":
        to = rng.choice([c for c in draw.some(words.CITIES, 2) if c != city])
        day, hour, seat = (
            rng.randrange(1, 31),
            rng.randrange(1, 24),
            f"{rng.randrange(1, 40)}{rng.choice('ABCDEF')}",
        )
        fields |= {"to": to, "day": day, "hour": hour, "seat": seat}
        record = {"type": "trip", "passenger": name, "from": city, "to": to, "day": day, "hour": hour}
        return draw.phrase(_TRIP).format(**fields), record | {"seat": seat, "price": price}
    product, color = draw.word(words.PRODUCTS), draw.word(words.COLORS)
    fields |= {"product": product, "color": color}
    if kind == "order":
        record = {"type": "order", "customer": name, "city": city, "product": product, "color": color}
        return draw.phrase(_ORDER).format(**fields), record | {"quantity": num, "unit_price": price}
    weight = rng.randrange(20, 4000)
    fields["weight"] = weight
    record = {"type": "product", "product": product, "color": color, "maker": last, "weight": weight}
    return draw.phrase(_PRODUCT).format(**fields), record | {"price": price, "stock": num, "city": city}


# -- worked arithmetic -----------------------------------------------------------------------------------

_PLACES = ("ones", "tens", "hundreds", "thousands", "ten thousands")
_ASK_SUM = (
    "Add {a} and {b} step by step.",
    "What is {a} + {b}? Show the work.",
    "Work out {a} + {b}, digit by digit.",
    "Find the sum of {a} and {b} and show each step.",
)
_ASK_PRODUCT = (
    "Multiply {a} by {b} step by step.",
    "What is {a} * {b}? Show the work.",
    "Work out {a} * {b}, digit by digit.",
    "Find the product of {a} and {b} and show each step.",
)
_ASK_STORY = (
    "{first} buys {m} boxes of {k} {items} and then {n} more. How many {items} does {first} have? Explain.",
    "A shop in {city} gets {m} crates with {k} {items} each and {n} single ones. How many {items} are there? Explain.",
    "{m} shelves hold {k} {items} each, and {n} {items} lie beside them. How many {items} is that? Explain.",
    "There are {n} {items} on a truck to {city}, and {m} pallets with {k} {items} each. How many in all? Explain.",
)


def arithmetic_item(draw: Draw) -> Item:
    """A sum, a product with one digit, or a short story -> the work, place by place, and the answer."""
    rng, kind = draw.rng, draw.rng.randrange(3)
    if kind == 0:
        a, b = rng.randrange(100, 10_000), rng.randrange(100, 10_000)
        return Item("arithmetic", draw.phrase(_ASK_SUM).format(a=a, b=b), _worked_sum(a, b))
    if kind == 1:
        a, b = rng.randrange(11, 1000), rng.randrange(2, 10)
        return Item("arithmetic", draw.phrase(_ASK_PRODUCT).format(a=a, b=b), _worked_product(a, b))
    m, k, n = rng.randrange(2, 10), rng.randrange(11, 100), rng.randrange(11, 100)
    items = plural(draw.word(words.PRODUCTS))
    asked = draw.phrase(_ASK_STORY).format(
        m=m, k=k, n=n, items=items, first=draw.word(words.FIRST_NAMES), city=draw.word(words.CITIES)
    )
    first, second = _worked_product(k, m), _worked_sum(m * k, n)
    return Item(
        "arithmetic",
        asked,
        f"First {k} * {m}.\n{first}\nThen {m * k} + {n}.\n{second}\nAnswer: {m * k + n} {items}",
    )


def _worked_sum(a: int, b: int) -> str:
    lines, carry, left, right = [], 0, a, b
    for place in _PLACES:
        if not (left or right):
            break
        total = left % 10 + right % 10 + carry
        lines.append(
            f"{place}: {left % 10} + {right % 10} + {carry} = {total}, write {total % 10}, carry {total // 10}"
        )
        left, right, carry = left // 10, right // 10, total // 10
    return "\n".join([*lines, f"{a} + {b} = {a + b}"])


def _worked_product(a: int, b: int) -> str:
    lines, carry, left = [], 0, a
    for place in _PLACES:
        if not left:
            break
        total = left % 10 * b + carry
        lines.append(
            f"{place}: {left % 10} * {b} + {carry} = {total}, write {total % 10}, carry {total // 10}"
        )
        left, carry = left // 10, total // 10
    return "\n".join([*lines, f"{a} * {b} = {a * b}"])


# -- function completion ---------------------------------------------------------------------------------

# {s} one noun, {p} its plural, {x} a number's name, {y} a text's name, {n} a number.
_FUNCTIONS = (
    ("total_{x}({p})", "Sum of the {x} of all {p}.",
     "    total = 0\n    for {s} in {p}:\n        total += {s}.{x}\n    return total\n"),
    ("average_{x}({p})", "Mean {x} of the {p}; 0.0 if there are none.",
     "    if not {p}:\n        return 0.0\n    return sum({s}.{x} for {s} in {p}) / len({p})\n"),
    ("{p}_above({p}, {x})", "The {p} whose {x} is larger than a limit.",
     "    found = []\n    for {s} in {p}:\n        if {s}.{x} > {x}:\n            found.append({s})\n    return found\n"),
    ("largest_{s}({p})", "The {s} with the largest {x}, or None.",
     "    best = None\n    for {s} in {p}:\n        if best is None or {s}.{x} > best.{x}:\n            best = {s}\n    return best\n"),
    ("{p}_by_{y}({p})", "Group the {p} by {y}.",
     "    groups = {{}}\n    for {s} in {p}:\n        groups.setdefault({s}.{y}, []).append({s})\n    return groups\n"),
    ("count_{y}({p})", "How often each {y} occurs among the {p}.",
     "    counts = {{}}\n    for {s} in {p}:\n        counts[{s}.{y}] = counts.get({s}.{y}, 0) + 1\n    return counts\n"),
    ("find_{s}({p}, {y})", "First {s} with this {y}, or None.",
     "    for {s} in {p}:\n        if {s}.{y} == {y}:\n            return {s}\n    return None\n"),
    ("check_{x}({x})", "Raise ValueError unless the {x} is between 0 and {n}.",
     '    if not 0 <= {x} <= {n}:\n        raise ValueError(f"{x}={{{x}}}: expected 0 to {n}")\n    return {x}\n'),
    ("sorted_{p}({p})", "The {p} ordered by {x}, then by {y}.",
     "    return sorted({p}, key=lambda {s}: ({s}.{x}, {s}.{y}))\n"),
    ("unique_{y}s({p})", "Each {y} of the {p} once, in order of appearance.",
     "    seen = set()\n    result = []\n    for {s} in {p}:\n        if {s}.{y} not in seen:\n            seen.add({s}.{y})\n            result.append({s}.{y})\n    return result\n"),
    ("{s}_to_dict({s})", "The {s} as a dict of {x} and {y}.",
     '    return {{\n        "{x}": {s}.{x},\n        "{y}": {s}.{y},\n    }}\n'),
    ("load_{p}(path)", "Read {p} from a JSON file; each has {x} and {y}.",
     '    with open(path, encoding="utf-8") as file:\n        rows = json.load(file)\n    return [{S}(row["{x}"], row["{y}"]) for row in rows]\n'),
    ("write_{p}(path, {p})", "Write the {y} and {x} of the {p} to a CSV file.",
     '    with open(path, "w", newline="") as file:\n        writer = csv.writer(file)\n        writer.writerow(["{y}", "{x}"])\n        for {s} in {p}:\n            writer.writerow([{s}.{y}, {s}.{x}])\n'),
    ("running_{x}({p})", "Running totals of the {x} of the {p}.",
     "    totals = []\n    total = 0\n    for {s} in {p}:\n        total += {s}.{x}\n        totals.append(total)\n    return totals\n"),
    ("split_{p}({p}, {x})", "Two lists: the {p} below this {x}, and the others.",
     "    below, others = [], []\n    for {s} in {p}:\n        if {s}.{x} < {x}:\n            below.append({s})\n        else:\n            others.append({s})\n    return below, others\n"),
    ("print_{p}({p})", "Print one line for each of the {p}: {y} and {x}.",
     '    for {s} in {p}:\n        print(f"{{{s}.{y}}}: {{{s}.{x}}}")\n'),
    ("update_{x}({p}, {y}, {x})", "Set the {x} of every {s} with this {y}; how many there were.",
     "    changed = 0\n    for {s} in {p}:\n        if {s}.{y} == {y}:\n            {s}.{x} = {x}\n            changed += 1\n    return changed\n"),
    ("top_{p}({p}, limit={n})", "The {p} with the largest {x}, at most limit.",
     "    ordered = sorted({p}, key=lambda {s}: {s}.{x}, reverse=True)\n    return ordered[:limit]\n"),
)  # fmt: skip
_ASK_FUNCTION = (
    "Complete this function:\n\n{head}",
    "Write the body of this function.\n\n{head}",
    "{head}\nComplete the function above.",
    "Here a function begins; finish it.\n\n{head}",
)


def function_item(draw: Draw) -> Item:
    """Signature and docstring of one or two functions -> the whole functions."""
    heads, codes = zip(*(_function(draw) for _ in range(1 if draw.rng.random() < 0.5 else 2)), strict=True)
    request = draw.phrase(_ASK_FUNCTION).format(head="\n\n".join(heads))
    if len(heads) > 1:
        request = request.replace("this function", "these functions").replace("the function", "the functions")
    return Item("functions", request, "\n\n".join(codes))


def _function(draw: Draw) -> tuple[str, str]:
    signature, doc, body = draw.rng.choice(_FUNCTIONS)
    s = draw.word(words.NOUNS)
    fields = {
        "s": s,
        "p": plural(s),
        "S": s.title(),
        "x": draw.word(words.NUMBER_FIELDS),
        "y": draw.word(words.TEXT_FIELDS),
        "n": draw.rng.randrange(10, 500),
    }
    head = f"def {signature}:\n    {_QUOTES}{doc}{_QUOTES}\n".format(**fields)
    return head, head + body.format(**fields)


_QUOTES = '"' * 3

# -- edits: mostly copying -------------------------------------------------------------------------------

_ASK_RENAME = (
    "Rename `{old}` to `{new}` in this code:\n\n{code}",
    "In the following code, call `{old}` `{new}` instead.\n\n{code}",
    "{code}\nRepeat this code with `{old}` renamed to `{new}`.",
    "Here is some code:\n\n{code}\nGive it back with `{new}` in place of `{old}`.",
)
_ASK_SET = (
    "Set {field} to {value} in this record:\n\n{text}",
    "Repeat this record with {field} changed to {value}.\n\n{text}",
    "{text}\nChange {field} to {value}.",
    "Here is a record:\n\n{text}\nGive it back, but with {field} being {value}.",
)


def edit_item(draw: Draw) -> Item:
    """Code or a record and one small change -> the whole text with the change."""
    if draw.rng.random() < 0.3:
        _, record = _record(draw, draw.rng.choice(("person", "order", "trip", "product")))
        field = draw.rng.choice([key for key, value in record.items() if isinstance(value, int)])
        value = draw.rng.randrange(2, 900)
        request = draw.phrase(_ASK_SET).format(field=field, value=value, text=json.dumps(record, indent=2))
        return Item("edits", request, json.dumps(record | {field: value}, indent=2))
    code = "\n\n".join(_function(draw)[1] for _ in range(draw.rng.randrange(1, 5)))
    return rename_item(draw, code)


def rename_item(draw: Draw, code: str) -> Item:
    """Rename one identifier of a piece of code."""
    names = sorted(set(re.findall(r"\b[a-z_]{4,}\b", code)) - set(keyword.kwlist))
    old, new = draw.rng.choice(names), draw.word(words.NOUNS) + "_" + draw.word(words.NUMBER_FIELDS)
    request = draw.phrase(_ASK_RENAME).format(old=old, new=new, code=code)
    return Item("edits", request, re.sub(rf"\b{old}\b", new, code))


# ---------------------------------------------------------------------------------------------------------

DOMAINS: dict[str, Callable[[Draw], Item]] = {
    "sql": sql_item,
    "json": json_item,
    "arithmetic": arithmetic_item,
    "functions": function_item,
}
"""Tasks with one right answer each."""
UNKNOWN_TO_DRAFT = ("sql", "arithmetic")
"""What the bundled draft has never seen, so that there is something to learn from live traffic."""
EDITS = "edits"


def items(domain: str, split: Split, seed: int) -> Iterator[Item]:
    """Endless items of a domain; item i depends on (domain, split, seed, i) alone."""
    make = DOMAINS.get(domain, edit_item)
    index = 0
    while True:
        yield make(Draw(random.Random(f"{domain}/{split}/{seed}/{index}"), split))
        index += 1
