"""The parameters cell of a notebook: what it declares, and what a user may pass.

The cell carries the tag `parameters`. Each of its lines is one parameter,

    seed: int = 0  # seed of weights and batches

with a type out of TYPES, a default of that type and a help comment. Papermill itself takes any name and any value
(it only warns about a name the notebook does not have); here both are checked before a kernel starts.
"""

from __future__ import annotations

import ast
import difflib
import io
import json
import math
import re
import tokenize
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from mxfp4.errors import UserError

_SCALARS = {"int": int, "float": float, "str": str, "bool": bool}
TYPES = (
    *_SCALARS,
    *(f"list[{s}]" for s in ("int", "float", "str")),
    *(f"tuple[{s}, ...]" for s in ("int", "float", "str")),
)
_PAIR = re.compile(r"\s*[^\W\d]\w*\s*=")
_WORDS = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}


@dataclass(frozen=True)
class Parameter:
    """One line of the parameters cell."""

    name: str
    type: str
    """One of TYPES."""
    default: Any
    help: str

    @property
    def scalar(self) -> str:
        """The type of one value: of an item of a list or tuple."""
        return self.type.removeprefix("list[").removeprefix("tuple[").rstrip("]").partition(",")[0]

    def parse(self, value: Any) -> Any:
        """`value`, a string from the command line or a Python value, as this type. Raises UserError."""
        scalar = self.scalar
        if scalar == self.type:
            return self._scalar(value, scalar)
        if isinstance(value, str):
            value = self._items(value.strip())
        if not isinstance(value, (list, tuple)):
            raise self._refuse(value)
        items = [self._scalar(item, scalar) for item in value]
        return tuple(items) if self.type.startswith("tuple") else items

    def _items(self, text: str) -> list[Any]:
        """The items of a list given as text: JSON, a Python literal, or values with commas between them."""
        brackets = text[:1] + text[-1:] in ("[]", "()")
        for read in (json.loads, ast.literal_eval):
            try:
                value = read(text)
            except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
                continue
            if value is None or isinstance(value, (dict, set)):
                raise self._refuse(text)
            # Without brackets, 8,16 may also be two words.
            if isinstance(value, (list, tuple)) and (brackets or self.scalar != "str" or _are_words(value)):
                return list(value)
        inner = text[1:-1] if brackets else text
        return [_unquoted(part) for part in inner.split(",") if part.strip()]

    def _scalar(self, value: Any, kind: str) -> Any:
        if isinstance(value, str) and kind == self.type:
            value = _unquoted(value)
        if kind == "str":
            if not isinstance(value, str):
                raise self._refuse(value)
            return value
        if kind == "bool":
            word = _WORDS.get(value.strip().lower()) if isinstance(value, str) else value
            if not isinstance(word, bool):
                raise self._refuse(value)
            return word
        if isinstance(value, bool) or not isinstance(value, (str, int, float)):
            raise self._refuse(value)
        try:
            number = int(value) if kind == "int" and not isinstance(value, float) else float(value)
        except ValueError:
            raise self._refuse(value) from None
        if (kind == "int" and isinstance(number, float)) or not math.isfinite(number):
            raise self._refuse(value)
        return number

    def _refuse(self, value: Any) -> UserError:
        allowed = {
            "int": "an int, such as 3",
            "float": "a finite float, such as 0.5",
            "str": "a str",
            "bool": "true or false",
        }.get(self.type, f"{self.type}, as JSON such as [1, 2] or its items separated by commas")
        return UserError(f"parameter {self.name}={value!r}: allowed is {allowed} ({self.help})")


def read_parameters(cell_source: str, where: str) -> dict[str, Parameter]:
    """The parameters that the source of a parameters cell declares, in order; `where` names the notebook in errors."""
    try:
        tree = ast.parse(cell_source)
    except SyntaxError as error:
        raise UserError(f"{where}: line {error.lineno} of the parameters cell is not Python: {error.msg}") from None
    comments = {
        token.start[0]: token.string.lstrip("#").strip()
        for token in tokenize.generate_tokens(io.StringIO(cell_source).readline)
        if token.type == tokenize.COMMENT
    }
    found: dict[str, Parameter] = {}
    for node in tree.body:
        line = ast.get_source_segment(cell_source, node)
        if not isinstance(node, ast.AnnAssign) or not isinstance(node.target, ast.Name) or node.value is None:
            raise UserError(f"{where}: {line!r} in the parameters cell; allowed is `name: type = default  # help`")
        name, kind = node.target.id, ast.unparse(node.annotation)
        if kind not in TYPES:
            raise UserError(f"{where}: parameter {name} has type {kind}; allowed: {', '.join(TYPES)}")
        if name in found:
            raise UserError(f"{where}: parameter {name} is declared twice")
        if not comments.get(node.end_lineno or 0):
            raise UserError(f"{where}: parameter {name} has no help comment; write `{line}  # what it is`")
        try:
            default = ast.literal_eval(node.value)
        except ValueError:
            raise UserError(f"{where}: the default of {name} is no plain value: {ast.unparse(node.value)}") from None
        parameter = Parameter(name, kind, default, comments[node.end_lineno or 0])
        if isinstance(default, str) and kind != "str":
            raise UserError(f"{where}: parameter {name}: {kind} has a str as its default")
        parameter.parse(default)
        found[name] = parameter
    return found


def bind(known: Mapping[str, Parameter], given: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Every parameter with its value: the default, or what is given, checked. Raises UserError for unknown names."""
    for name in given:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {close[0]}? " if close else ""
            raise UserError(f"{where} has no parameter {name!r}: {hint}known: {', '.join(known) or 'none'}")
    return {name: p.parse(given[name]) if name in given else p.default for name, p in known.items()}


def split_pair(text: str) -> tuple[str, str]:
    """ "name=value" -> (name, value); spaces around the first = are no part of either."""
    name, equals, value = text.partition("=")
    if not equals or not name.strip().isidentifier():
        raise UserError(f"-p {text!r}: allowed is name=value")
    return name.strip(), value.strip()


def join_words(words: Iterable[str]) -> list[str]:
    """Pairs out of what a shell split at spaces: `a = 1` and `a=[1, 2]` are one pair each."""
    pairs: list[str] = []
    for word in words:
        before = pairs[-1] if pairs else ""
        is_open = before.rstrip().endswith(("=", ",")) or before.count("[") > before.count("]")
        if pairs and ((word.startswith("=") and "=" not in before) or (is_open and not _PAIR.match(word))):
            pairs[-1] = f"{before} {word}"
        else:
            pairs.append(word)
    return pairs


def _are_words(values: Iterable[Any]) -> bool:
    return all(isinstance(value, str) for value in values)


def _unquoted(text: str) -> str:
    """`text` without spaces around it, or, in quotes, what stands between them: JSON's escapes count in double ones."""
    text = text.strip()
    if len(text) > 1 and text[0] == text[-1] == '"':
        try:
            value = json.loads(text)
        except ValueError:
            return text
        return value if isinstance(value, str) else text
    return text[1:-1] if re.fullmatch(r"'[^'\\]*'", text) else text
