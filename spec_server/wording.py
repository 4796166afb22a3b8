"""What is wrong with a value, in the words of somebody who writes flags or JSON; pydantic speaks of its own types."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

_WORDS: Mapping[str, str] = {
    **dict.fromkeys(
        ("int_parsing", "int_type", "int_from_float", "int_parsing_size"), "it must be a whole number"
    ),
    **dict.fromkeys(("float_parsing", "float_type"), "it must be a number"),
    **dict.fromkeys(("bool_parsing", "bool_type"), "it must be true or false"),
    "finite_number": "it must be a finite number",
    "string_type": "it must be a string",
    "list_type": "it must be a list",
    **dict.fromkeys(("dict_type", "model_type", "model_attributes_type"), "it must be an object"),
    "greater_than_equal": "it must be at least {ge}",
    "greater_than": "it must be above {gt}",
    "less_than_equal": "it must be at most {le}",
    "less_than": "it must be below {lt}",
    **dict.fromkeys(("too_short", "string_too_short"), "it must not be empty"),
    "too_long": "it must have at most {max_length} entries",
    "literal_error": "it must be one of {expected}",
    "extra_forbidden": "no such field",
    "missing": "missing",
}


def fault(error: ErrorDetails) -> str:
    """One sentence without the field's name; pydantic's own where there is none here."""
    words = _WORDS.get(error["type"])
    if words is None:
        return error["msg"].removeprefix("Value error, ")
    return words.format_map(error.get("ctx", {}))
