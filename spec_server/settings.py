"""Every setting once: its flags, environment names, default and check.

Read by cli and launch, never passed on whole. The table of fields stands in serving_fields and
drafting_fields; here are where values come from, what no field checks alone, and what follows from several.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any, Self

from pydantic import model_validator
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from spec_server.drafting_fields import DraftingFields, SamplingFields
from spec_server.options import Option
from spec_server.serving_fields import ComputeFields, LogFields, ServingFields

ENV_PREFIX = "SPEC_SERVER_"
BUILT_IN_TEMPLATE = "chatml"  # the one name that llama-server itself turns into a Jinja text
AUTO_SLOTS = 4  # llama-server's number for --parallel -1
FIXED_N_MAX, ADAPTIVE_N_MAX = 3, 16
FIXED_NGRAM, ADAPTIVE_NGRAM = 12, 3
SPEC_TYPES = ("none", "draft-simple", "draft-mtp", "ngram-simple", "ngram-mod")
LOG_LEVELS = (logging.CRITICAL, logging.ERROR, logging.WARNING, logging.INFO, logging.DEBUG, logging.DEBUG)


class LlamaServerEnv(PydanticBaseSettingsSource):
    """llama-server's own environment names; LLAMA_ARG_NO_X, whatever its value, switches X off, as there."""

    def get_field_value(self, field: FieldInfo, field_name: str) -> tuple[Any, str, bool]:
        option = option_of(field)
        for name in option.env.split():
            if name in os.environ:
                return os.environ[name], name, False
            negated = name.replace("LLAMA_ARG_", "LLAMA_ARG_NO_")
            if option.no and negated in os.environ:
                return "off", negated, False
        return None, "", False

    def __call__(self) -> dict[str, Any]:
        found = {name: self.get_field_value(field, name)[0] for name, field in Settings.model_fields.items()}
        return {name: value for name, value in found.items() if value is not None}


class Settings(LogFields, SamplingFields, DraftingFields, ComputeFields, ServingFields, BaseSettings):
    """Flags first, then SPEC_SERVER_<FIELD>, then llama-server's environment names, then the default."""

    model_config = SettingsConfigDict(
        env_prefix=ENV_PREFIX, frozen=True, extra="forbid", protected_namespaces=(), allow_inf_nan=False
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        """What no field can say of itself. Each message names its flag."""
        if not self.model:
            raise ValueError("--model: missing; -m FILE names a GGUF file, --help lists all flags")
        if self.parallel == 0:
            raise ValueError("--parallel: 0 slots serve nobody; -1 lets the server choose")
        if self.chat_template and self.chat_template_file:
            raise ValueError("--chat-template: given twice, as --chat-template-file too")
        self.template()
        self.api_keys()
        if 0 < self.ctx_size < self.n_slots:
            raise ValueError(f"--ctx-size: below the number of slots; at least {self.n_slots}, or 0")
        # of the draft context every slot has its own, unless all share one
        if 0 < self.ctx_size_draft < self.n_slots and self.is_unified:
            raise ValueError(f"--ctx-size-draft: below the number of slots; at least {self.n_slots}, or 0")
        self._check_drafters()
        return self

    def _check_drafters(self) -> None:
        for name in self.spec_type:
            if name not in SPEC_TYPES:
                raise ValueError(f"--spec-type: unknown: {name}; there are {', '.join(SPEC_TYPES)}")
        if "none" in self.spec_type and len(self.spec_type) > 1:
            raise ValueError("--spec-type: none stands alone")
        if len(set(self.spec_type)) < len(self.spec_type):
            raise ValueError("--spec-type: a drafter is named twice")
        if "draft-simple" in self.spec_type and not self.model_draft:
            raise ValueError("--spec-type: draft-simple needs a draft model, --model-draft")
        if self.spec_draft_n_min > self.draft_n_max:
            raise ValueError("--spec-draft-n-min: above --spec-draft-n-max")
        if self.spec_ngram_mod_n_min > self.spec_ngram_mod_n_max:
            raise ValueError("--spec-ngram-mod-n-min: above --spec-ngram-mod-n-max")

    @property
    def n_slots(self) -> int:
        return AUTO_SLOTS if self.parallel < 0 else self.parallel

    @property
    def is_unified(self) -> bool:
        return self.parallel < 0 if self.kv_unified is None else self.kv_unified

    @property
    def n_ubatch(self) -> int:
        """Never above the batch, so that `-b 256` alone is enough."""
        return min(self.ubatch_size, self.batch_size)

    @property
    def drafters(self) -> tuple[str, ...]:
        """In order; empty: no drafting. A draft model without --spec-type is there to be used."""
        if self.spec_type:
            return tuple(name for name in self.spec_type if name != "none")
        return ("draft-simple",) if self.model_draft else ()

    @property
    def draft_n_max(self) -> int:
        """Where nobody asked for a number: llama-server's for fixed lengths, room to choose for adaptive ones."""
        if self.spec_draft_n_max >= 0:
            return self.spec_draft_n_max
        return ADAPTIVE_N_MAX if self.spec_adaptive else FIXED_N_MAX

    @property
    def ngram_simple_size_n(self) -> int:
        """The same: with fixed lengths only a long match is worth a draft, a rule knows what a short one is worth."""
        if self.spec_ngram_simple_size_n > 0:
            return self.spec_ngram_simple_size_n
        return ADAPTIVE_NGRAM if self.spec_adaptive else FIXED_NGRAM

    @property
    def log_level(self) -> int:
        return logging.DEBUG if self.verbose else LOG_LEVELS[self.verbosity]

    def api_keys(self) -> tuple[str, ...]:
        """Those given and those in the file. A file without any would leave the server open: ValueError."""
        if not self.api_key_file:
            return self.api_key
        lines = (line.strip() for line in _text("--api-key-file", self.api_key_file).splitlines())
        found = tuple(line for line in lines if line and not line.startswith("#"))
        if not found:
            raise ValueError(f"--api-key-file: no key in {self.api_key_file}")
        return (*self.api_key, *found)

    def template(self) -> str:
        """The chat template that was given, or the name of the built-in one; empty: the model's own."""
        if not (self.chat_template or self.chat_template_file):
            return ""
        flag, text = "--chat-template", self.chat_template
        if self.chat_template_file:
            flag = "--chat-template-file"
            text = _text(flag, self.chat_template_file)
        if text != BUILT_IN_TEMPLATE and "{{" not in text and "{%" not in text:
            raise ValueError(
                f"{flag}: no Jinja template, every prompt would be its literal text; give Jinja text, "
                f"--chat-template-file FILE or {BUILT_IN_TEMPLATE} (llama.cpp's other built-in names are not known "
                "here), or leave it out to use the model's own"
            )
        return text

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return init_settings, env_settings, LlamaServerEnv(settings_cls)


def _text(flag: str, path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError as e:
        raise ValueError(f"{flag}: {path}: {e.strerror}") from None
    except UnicodeError:
        raise ValueError(f"{flag}: {path}: not UTF-8") from None


def variable_of(name: str) -> str:
    """The environment variable that a field's value would come from now; empty where none is set."""
    own = ENV_PREFIX + name.upper()
    spelled = next((variable for variable in os.environ if variable.upper() == own), "")
    return spelled or LlamaServerEnv(Settings).get_field_value(Settings.model_fields[name], name)[1]


def option_of(field: FieldInfo) -> Option:
    return next(item for item in field.metadata if isinstance(item, Option))


def env_names(name: str, option: Option) -> tuple[str, ...]:
    return (ENV_PREFIX + name.upper(), *option.env.split())
