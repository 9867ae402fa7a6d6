r"""Analyzes whether a match of a tokenizer.json's regular expression can contain two given characters side by side.

The result determines whether a text may be split between the characters x and y. If no match contains x directly before
y, every match that touches the boundary between them starts or ends there. Matches on one side of the boundary must
also not depend on the text on the other side. So the expression must have no anchor, no reference, and no lookaround
except `(?!\S)`, which marks the end of a run of blanks.
"""

import functools
import re
import unicodedata
import warnings
from collections.abc import Sequence
from re import _constants as ops  # type: ignore[attr-defined]
from re import _parser as parser  # type: ignore[attr-defined]
from typing import Any, NamedTuple

_PROPERTY = re.compile(r"\\([pP])\{(\^?)([A-Z][a-z]?)\}|\\p([LMNPSZC])")
_FIRST_PLACEHOLDER = 0xF0000  # private characters replace properties while the expression is parsed
_UNSUPPORTED = re.compile(r"\\[hHRXGKkgyYzbB]|&&|\[\[|\(\?[<=P#]|\\[pP]\{(?!\^?[A-Z][a-z]?\})")
_REPEATS = (ops.MAX_REPEAT, ops.MIN_REPEAT, ops.POSSESSIVE_REPEAT)


class Unknown(Exception):
    """Raised if this module cannot analyze a regular expression."""


class Facts(NamedTuple):
    """Facts about the matches of a regular expression in a text with character x directly before character y.

    Attributes:
      joins: whether a match may contain x directly before y, or whether a match depends on the character after x.
      matches_y: whether the single character y is a match, with any text after it.
      meets: whether some part of the expression, such as a character class, matches x or y. If false, no match starts
        or ends between x and y.
    """

    joins: bool
    matches_y: bool
    meets: bool


class _Node(NamedTuple):
    """Facts about the matches of one part of a regular expression, for a character x directly before a character y.

    Attributes:
      empty: whether the part may match the empty string.
      plainly_empty: whether the part may match the empty string without any lookaround.
      ends: whether a match may end with x.
      begins: whether a match may start with y.
      joins: whether a match may contain x directly before y.
      alone: whether a match may be the single character y.
      meets: whether some piece of this part matches x or y.
    """

    empty: bool
    plainly_empty: bool
    ends: bool
    begins: bool
    joins: bool
    alone: bool
    meets: bool


_NOTHING = _Node(True, True, False, False, False, False, False)


@functools.cache
def _parse(pattern: str) -> tuple[Any, tuple[str, ...]]:
    """Parses a regular expression that may contain Unicode properties, such as the category L (letters).

    Python's parser does not know properties. So each property is replaced by a character of the private use area, the
    first property by the first such character, and so on.

    Returns:
      (parse tree of Python's parser, names of the replaced properties in order). A name is `L` for the category L, and
      `^L` for all characters outside of this category.

    Raises:
      Unknown: the expression uses syntax that this module does not support.
    """
    if _UNSUPPORTED.search(pattern):
        raise Unknown
    properties: list[str] = []

    def placeholder(match: re.Match[str]) -> str:
        is_negated = (match[1] == "P") != bool(match[2])
        properties.append(f"{'^' if is_negated else ''}{match[3] or match[4]}")
        return chr(_FIRST_PLACEHOLDER + len(properties) - 1)

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            parts = parser.parse(_PROPERTY.sub(placeholder, pattern))
    except (re.error, Warning, RecursionError, OverflowError) as error:
        raise Unknown from error
    if parts.state.flags & ~ops.SRE_FLAG_UNICODE:
        raise Unknown
    return parts, tuple(properties)


def facts(pattern: str, left: str, right: str) -> Facts:
    """Returns facts about the matches of a regular expression in a text with `left` directly before `right`.

    Args:
      pattern: the regular expression of a tokenizer.json.
      left: one character, called x in `Facts`.
      right: one character, called y in `Facts`.

    Raises:
      Unknown: a match depends on characters around it, or the expression is not supported.
    """
    parts, properties = _parse(pattern)
    node = _sequence(parts, left, right, properties, False)
    return Facts(node.joins, node.alone, node.meets)


def _sequence(parts: Sequence[Any], x: str, y: str, properties: Sequence[str], ignores_case: bool) -> _Node:
    total = _NOTHING
    for part in parts:
        node = _part(part, x, y, properties, ignores_case)
        total = _Node(
            empty=total.empty and node.empty,
            plainly_empty=total.plainly_empty and node.plainly_empty,
            ends=node.ends or (node.empty and total.ends),
            begins=total.begins or (total.empty and node.begins),
            joins=total.joins or node.joins or (total.ends and node.begins),
            alone=(total.alone and node.plainly_empty) or (total.plainly_empty and node.alone),
            meets=total.meets or node.meets,
        )
    return total


def _part(part: Any, x: str, y: str, properties: Sequence[str], ignores_case: bool) -> _Node:
    kind, value = part
    if kind is ops.BRANCH:
        nodes = [_sequence(one, x, y, properties, ignores_case) for one in value[1]]
        return _Node(*(any(flags) for flags in zip(*nodes, strict=True)))
    if kind is ops.SUBPATTERN:
        _, added, removed, inner = value
        if (added | removed) & ~ops.SRE_FLAG_IGNORECASE:
            raise Unknown
        ignores_case = (ignores_case or bool(added)) and not removed
        return _sequence(inner, x, y, properties, ignores_case)
    if kind is ops.ATOMIC_GROUP:
        return _sequence(value, x, y, properties, ignores_case)
    if kind in _REPEATS:
        least, most, inner = value
        node = _sequence(inner, x, y, properties, ignores_case)
        return node._replace(
            empty=node.empty or least == 0,
            plainly_empty=node.plainly_empty or least == 0,
            joins=node.joins or (most > 1 and node.ends and node.begins),
            alone=node.alone and (least <= 1 or node.plainly_empty),
        )
    if kind is ops.ASSERT_NOT and _is_not_blank(value):
        # After x, the lookahead sees y, or the end of the text if the text is cut after x. Both results agree only if y
        # is blank.
        return _NOTHING._replace(plainly_empty=False, begins=not y.isspace())
    if kind not in (ops.LITERAL, ops.NOT_LITERAL, ops.IN, ops.ANY):
        raise Unknown
    ends, begins = (_matches(part, one, properties, ignores_case) for one in (x, y))
    return _Node(False, False, ends, begins, False, begins, ends or begins)


def _is_not_blank(value: Any) -> bool:
    direction, inner = value
    return direction == 1 and list(inner) == [(ops.IN, [(ops.CATEGORY, ops.CATEGORY_NOT_SPACE)])]


def _matches(part: Any, one: str, properties: Sequence[str], ignores_case: bool) -> bool:
    """Returns whether a part of an expression, such as a character class, matches the character `one`.

    Args:
      part: a part of Python's parse tree that matches a single character.
      one: the character.
      properties: the names of the Unicode properties in the expression, returned by `_parse`.
      ignores_case: whether the match ignores case.
    """
    kind, value = part
    forms = {one, one.lower(), one.upper()} if ignores_case else {one}
    if kind is ops.ANY:
        return one != "\n"
    if kind is ops.NOT_LITERAL:
        return not any(_is_literal(value, form, properties) for form in forms)
    items = [(ops.LITERAL, value)] if kind is ops.LITERAL else list(value)
    is_negated = bool(items) and items[0][0] is ops.NEGATE
    return is_negated != any(_is_item(item, form, properties) for item in items[is_negated:] for form in forms)


def _is_item(item: Any, one: str, properties: Sequence[str]) -> bool:
    kind, value = item
    if kind is ops.LITERAL:
        return _is_literal(value, one, properties)
    if kind is ops.RANGE:
        if value[1] >= _FIRST_PLACEHOLDER:
            raise Unknown
        return len(one) == 1 and bool(value[0] <= ord(one) <= value[1])
    if value in (ops.CATEGORY_WORD, ops.CATEGORY_NOT_WORD) and not one.isascii() and not one.isalpha():
        raise Unknown  # regular expression libraries define word characters differently
    is_of = {
        ops.CATEGORY_SPACE: one.isspace(),
        ops.CATEGORY_DIGIT: one.isdecimal(),
        ops.CATEGORY_WORD: one.isalnum() or one == "_",
        ops.CATEGORY_NOT_SPACE: not one.isspace(),
        ops.CATEGORY_NOT_DIGIT: not one.isdecimal(),
        ops.CATEGORY_NOT_WORD: not (one.isalnum() or one == "_"),
    }
    if kind is not ops.CATEGORY or value not in is_of:
        raise Unknown
    return is_of[value]


def _is_literal(code: int, one: str, properties: Sequence[str]) -> bool:
    if code < _FIRST_PLACEHOLDER or len(one) != 1:
        return one == chr(code)
    name = properties[code - _FIRST_PLACEHOLDER]
    return unicodedata.category(one).startswith(name.removeprefix("^")) != name.startswith("^")
