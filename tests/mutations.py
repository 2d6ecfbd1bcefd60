"""Random damage for the fuzz tests: the same damage for the same seed."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterator
from typing import Any

DEEP = 5_000
HUGE = 10**5_000

# Each has broken a real reader somewhere: what JSON allows is far more than what a reader expects.
HOSTILE: tuple[Any, ...] = (
    None,
    True,
    False,
    0,
    -1,
    3,
    2**63,
    -(2**63),
    HUGE,
    0.5,
    -0.0,
    1e308,
    float("nan"),
    float("inf"),
    "",
    "7",
    "nan",
    "../../etc",
    "\0",
    "\ud800",
    "\x1b[31mred",
    [],
    [0],
    {},
    {"a": 1},
)


def damaged(content: bytes, count: int, seed: int) -> Iterator[tuple[str, bytes]]:
    """`count` damaged versions of a JSON file, each with a word on what was done to it."""
    chance = random.Random(seed)
    for _ in range(count):
        kind = chance.choice(
            (_cut, _flip, _nest, _repeat, _change, _change, _change, _remove, _add)
        )
        yield kind(content, chance)


def _cut(content: bytes, chance: random.Random) -> tuple[str, bytes]:
    end = chance.randrange(len(content))
    return f"cut at {end}", content[:end]


def _flip(content: bytes, chance: random.Random) -> tuple[str, bytes]:
    place, bit = chance.randrange(len(content)), chance.randrange(8)
    flipped = bytes([content[place] ^ (1 << bit)])
    return f"bit {bit} of byte {place}", content[:place] + flipped + content[place + 1 :]


def _nest(content: bytes, chance: random.Random) -> tuple[str, bytes]:
    text = content.decode()
    places = [place for place, character in enumerate(text) if character == ":"]
    place = chance.choice(places) + 1
    return f"deep at {place}", (
        text[:place] + "[" * DEEP + "]" * DEEP + "," + text[place:]
    ).encode()


def _repeat(content: bytes, chance: random.Random) -> tuple[str, bytes]:
    """A name twice in one object, the second time with another value."""
    text = content.decode()
    place = chance.choice([place for place, character in enumerate(text) if character == "{"]) + 1
    name = text[place:].lstrip().partition(":")[0]
    return f"{name} twice", (
        text[:place] + f"{name}: 0," * (name[:1] == '"') + text[place:]
    ).encode()


def _change(content: bytes, chance: random.Random) -> tuple[str, bytes]:
    def change(holder: Any, key: Any) -> str:
        holder[key] = chance.choice(HOSTILE)
        return f"{key} = {_brief(holder[key])}"

    return _edited(content, chance, change)


def _remove(content: bytes, chance: random.Random) -> tuple[str, bytes]:
    def remove(holder: Any, key: Any) -> str:
        del holder[key]
        return f"no {key}"

    return _edited(content, chance, remove)


def _add(content: bytes, chance: random.Random) -> tuple[str, bytes]:
    def add(holder: Any, key: Any) -> str:
        value = chance.choice(HOSTILE)
        if isinstance(holder, list):
            holder.insert(key, value)
        else:
            holder[f"{key}_"] = value
        return f"beside {key}: {_brief(value)}"

    return _edited(content, chance, add)


def _edited(content: bytes, chance: random.Random, edit: Any) -> tuple[str, bytes]:
    values = copy.deepcopy(json.loads(content))
    holder, key = chance.choice(list(_places(values)))
    done = edit(holder, key)
    return done, dump(values).encode("utf-8", "surrogatepass")


def _places(values: Any) -> Iterator[tuple[Any, Any]]:
    """Every (object or list, key) in a document."""
    keys = values.keys() if isinstance(values, dict) else range(len(values))
    for key in list(keys):
        yield values, key
        if isinstance(values[key], dict | list):
            yield from _places(values[key])


def dump(value: Any) -> str:
    """JSON with integers of any length."""
    mark = "<huge>"
    text = json.dumps(_marked(value, mark))
    return text.replace(json.dumps(mark), "1" + "0" * 5_000)


def _marked(value: Any, mark: str) -> Any:
    if isinstance(value, dict):
        return {key: _marked(one, mark) for key, one in value.items()}
    if isinstance(value, list):
        return [_marked(one, mark) for one in value]
    return mark if isinstance(value, int) and value == HUGE else value


def _brief(value: Any) -> str:
    return "huge" if isinstance(value, int) and value == HUGE else repr(value)
