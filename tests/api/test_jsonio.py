"""Whatever a stored file or a client says can be told in JSON."""

from __future__ import annotations

import json

import pytest

from spec_server.api.jsonio import dumps


@pytest.mark.parametrize(
    "value",
    [
        {"a": [1, None, "ü", 0.5]},
        {"found": 1 << 80, "expected": -(1 << 70)},
        {"name": "half \ud800 a pair"},
        ("a", ("b",)),
        {},
    ],
)
def test_any_plain_value_has_a_form(value: object) -> None:
    assert json.loads(dumps(value)) == json.loads(json.dumps(value))


def test_what_is_no_value_is_an_error() -> None:
    with pytest.raises(TypeError, match="not JSON: object"):
        dumps({"a": object()})
