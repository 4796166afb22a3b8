"""How settings appear outside: flags, environment names, words for values, and flags only tolerated."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

import orjson
from pydantic import AfterValidator, BeforeValidator, Field
from pydantic_settings import NoDecode

# Start scripts of llama-server go on working: these are always so here, or have nothing to act on.
ALWAYS_SO = {
    "--metrics": 0,
    "--jinja": 0,
    "-cb": 0,
    "--cont-batching": 0,
    "--no-context-shift": 0,
    "--no-ui": 0,
    "--no-webui": 0,
    "--no-mmproj": 0,
    "--no-mmproj-auto": 0,
    "--offline": 0,
    "--no-cache-idle-slots": 0,
    "--no-warmup": 0,
}
# Accepted with a note on standard error: they change speed or appearance in llama-server and nothing here.
IGNORED = {
    "--ui": 0,
    "--webui": 0,
    "--props": 0,
    "--perf": 0,
    "--no-perf": 0,
    "--warmup": 0,
    "--cache-idle-slots": 0,
    "--mlock": 0,
    "--mmap": 0,
    "--no-mmap": 0,
    "-lm": 1,
    "--load-mode": 1,
    "--check-tensors": 0,
    "--repack": 0,
    "-nr": 0,
    "--no-repack": 0,
    "-e": 0,
    "--escape": 0,
    "--no-escape": 0,
    "--prio": 1,
    "--prio-batch": 1,
    "--poll": 1,
    "--poll-batch": 1,
    "-to": 1,
    "--timeout": 1,
    "--threads-http": 1,
    "--cache-reuse": 1,
    "--numa": 1,
    "--log-file": 1,
    "--keep": 1,
    "-sps": 1,
    "--slot-prompt-similarity": 1,
    "-dt": 1,
    "--defrag-thold": 1,
    "--log-disable": 0,
    "--log-colors": 1,
    "--log-prefix": 0,
    "--no-log-prefix": 0,
    "--log-timestamps": 0,
    "--no-log-timestamps": 0,
    "--reasoning-format": 1,
    "-fit": 1,
    "--fit": 1,
    "-td": 1,
    "--threads-draft": 1,
    "--spec-draft-threads": 1,
    "-tbd": 1,
    "--threads-batch-draft": 1,
    "--spec-draft-threads-batch": 1,
    "--draft-p-split": 1,
    "--spec-draft-p-split": 1,
    "--spec-draft-backend-sampling": 0,
    "--no-spec-draft-backend-sampling": 0,
}


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


_SWITCH_WORDS = {"on": True, "enabled": True, "off": False, "disabled": False}
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
    return _SWITCH_WORDS.get(value.strip().lower(), value) if isinstance(value, str) else value


def _auto(value: object) -> object:
    return -1 if value == "auto" else value


def _layers(value: object) -> object:
    return {"auto": -1, "all": -2}.get(value.strip().lower(), value) if isinstance(value, str) else value


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
FlashAttn = Annotated[Literal["on", "off", "auto"], BeforeValidator(_flash_attn)]
Verbosity = Annotated[int, BeforeValidator(_verbosity), Field(ge=0, le=5)]
JsonObject = Annotated[dict[str, Any], NoDecode, BeforeValidator(_json_object)]
