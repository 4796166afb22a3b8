"""How settings appear outside: flags, environment names, words for values."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import orjson
from pydantic import AfterValidator, BeforeValidator, Field
from pydantic_settings import NoDecode


@dataclass(frozen=True, slots=True)
class Option:
    """`flags`, `no` (those that switch it off) and `env` (llama-server's names) are separated by spaces.
    Without `metavar` it is a switch."""

    flags: str
    group: str
    metavar: str
    help: str
    no: str = ""
    env: str = ""
    unit: str = ""
    is_repeatable: bool = False

    @property
    def name(self) -> str:
        """The flag that messages use: the first long one."""
        names = self.flags.split()
        return next((name for name in names if name.startswith("--")), names[0])


SWITCH_WORDS = {
    **dict.fromkeys(("on", "enabled", "true", "1"), True),
    **dict.fromkeys(("off", "disabled", "false", "0"), False),
}
_WHOLE = re.compile(r"[+-]?[0-9]+")
_FLASH_WORDS = {
    "true": "on",
    "enabled": "on",
    "1": "on",
    "false": "off",
    "disabled": "off",
    "0": "off",
    "-1": "auto",
}
_LOG_WORDS = {"critical": 0, "error": 1, "warning": 2, "warn": 2, "info": 3, "trace": 4, "debug": 5}


def _split(value: object) -> object:
    """Comma lists, given once or repeated."""
    if isinstance(value, str):
        value = [value]
    if isinstance(value, list | tuple):
        return tuple(part.strip() for item in value for part in str(item).split(",") if part.strip())
    return value


def _switch(value: object) -> object:
    return SWITCH_WORDS.get(value.strip().lower(), value) if isinstance(value, str) else value


def _auto(value: object) -> object:
    return -1 if value == "auto" else value


def _layers(value: object) -> object:
    if not isinstance(value, str):
        return value
    known = {"auto": -1, "all": -2}.get(value.strip().lower(), value)
    if isinstance(known, str) and not _WHOLE.fullmatch(known.strip()):
        raise ValueError("it must be a whole number, auto or all")
    return known


def _flash_attn(value: object) -> object:
    return _FLASH_WORDS.get(value, value) if isinstance(value, str) else value


def _verbosity(value: object) -> object:
    return _LOG_WORDS.get(value.strip().lower(), value) if isinstance(value, str) else value


def _json_object(value: object) -> object:
    if isinstance(value, str):
        try:
            return orjson.loads(value or "{}")
        except orjson.JSONDecodeError as error:
            raise ValueError(f"not JSON: {error}") from None
    return value


def _not_zero(value: int) -> int:
    if value == 0:
        raise ValueError("it must be 1 or more, or auto")
    return value


Words = Annotated[tuple[str, ...], NoDecode, BeforeValidator(_split)]
Switch = Annotated[bool, BeforeValidator(_switch)]
CountOrAuto = Annotated[int, BeforeValidator(_auto), Field(ge=-1)]
Layers = Annotated[int, BeforeValidator(_layers), Field(ge=-2)]
KvType = Literal["f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "iq4_nl", "q5_0", "q5_1"]
Count = Annotated[int, Field(ge=0)]
Positive = Annotated[int, Field(ge=1)]
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
Ngram = Annotated[int, Field(ge=1, le=1024)]
NgramOrAuto = Annotated[int, BeforeValidator(_auto), Field(ge=-1, le=1024), AfterValidator(_not_zero)]
SpecVerify = Literal["exact-match", "token", "block"]
LoadMode = Literal["auto", "none", "mmap", "mlock", "mmap+mlock", "dio"]
FlashAttn = Annotated[Literal["on", "off", "auto"], BeforeValidator(_flash_attn)]
Verbosity = Annotated[int, BeforeValidator(_verbosity), Field(ge=0, le=5)]
JsonObject = Annotated[dict[str, Any], NoDecode, BeforeValidator(_json_object)]
