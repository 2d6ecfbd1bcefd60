"""Random damage for the fuzz tests: the same damage for the same seed."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterator
from typing import Any

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
        kind = chance.choice((_cut, _flip, _change, _change, _change, _remove, _add))
        yield kind(content, chance)


def _cut(content: bytes, chance: random.Random) -> tuple[str, bytes]:
    end = chance.randrange(len(content))
    return f"cut at {end}", content[:end]


def _flip(content: bytes, chance: random.Random) -> tuple[str, bytes]:
    place, bit = chance.randrange(len(content)), chance.randrange(8)
    flipped = bytes([content[place] ^ (1 << bit)])
    return f"bit {bit} of byte {place}", content[:place] + flipped + content[place + 1 :]


def _change(content: bytes, chance: random.Random) -> tuple[str, bytes]:
    def change(holder: Any, key: Any) -> str:
        holder[key] = chance.choice(HOSTILE)
        return f"{key} = {holder[key]!r}"

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
        return f"beside {key}: {value!r}"

    return _edited(content, chance, add)


def _edited(content: bytes, chance: random.Random, edit: Any) -> tuple[str, bytes]:
    values = copy.deepcopy(json.loads(content))
    holder, key = chance.choice(list(_places(values)))
    done = edit(holder, key)
    return done, json.dumps(values).encode()


def _places(values: Any) -> Iterator[tuple[Any, Any]]:
    """Every (object or list, key) in a document."""
    keys = values.keys() if isinstance(values, dict) else range(len(values))
    for key in list(keys):
        yield values, key
        if isinstance(values[key], dict | list):
            yield from _places(values[key])
