"""Flags, environment and checks of the settings; docs/configuration.md tells the truth about them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from spec_server.cli import build_parser, known_flags, parse
from spec_server.settings import Settings, env_names, option_of
from spec_server.tolerated import ALWAYS_SO, DEVICES, IGNORED, NEUTRAL, OLDER, REFUSED, REFUSED_FLAGS

PAGE = Path(__file__).parent.parent / "docs" / "configuration.md"
BASE = ["-m", "m.gguf"]


pytestmark = pytest.mark.usefixtures("clean_environment")


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as stop:
        parse(arguments)
    assert stop.value.code == 2
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "field", "value"),
    [
        ("-md d.gguf", "model_draft", "d.gguf"),
        ("--spec-draft-model d.gguf", "model_draft", "d.gguf"),
        ("-ngl 5", "gpu_layers", 5),
        ("-ngl all", "gpu_layers", -2),
        ("--n-gpu-layers auto", "gpu_layers", -1),
        ("-ngld 0", "gpu_layers_draft", 0),
        ("-np 8", "parallel", 8),
        ("-np -1", "parallel", -1),
        ("-ub 64", "ubatch_size", 64),
        ("-b 128", "batch_size", 128),
        ("-cd 256", "ctx_size_draft", 256),
        ("-kvu", "kv_unified", True),
        ("-no-kvu", "kv_unified", False),
        ("--no-kv-unified", "kv_unified", False),
        ("-fa on", "flash_attn", "on"),
        ("-fa 0", "flash_attn", "off"),
        ("-ctk q8_0", "cache_type_k", "q8_0"),
        ("-ctv bf16", "cache_type_v", "bf16"),
        ("-ctkd q4_0", "cache_type_k_draft", "q4_0"),
        ("--spec-draft-type-v f32", "cache_type_v_draft", "f32"),
        ("--ctx_size 99", "ctx_size", 99),
        ("--ctx-size=99", "ctx_size", 99),
        ("--draft-max 7", "spec_draft_n_max", 7),
        ("--draft 7", "spec_draft_n_max", 7),
        ("--draft-min 1", "spec_draft_n_min", 1),
        ("--draft-p-min 0.5", "spec_draft_p_min", 0.5),
        ("--swa-checkpoints 3", "ctx_checkpoints", 3),
        ("-s -1", "seed", -1),
        ("--temp 0", "temperature", 0.0),
        ("--api-key a,b --api-key c", "api_key", ("a", "b", "c")),
        ("--spec-type ngram-mod,ngram-simple", "spec_type", ("ngram-mod", "ngram-simple")),
        ("--draft-rebuild off", "draft_rebuild", False),
        ("--no-slots", "slots", False),
        ("--swa-full", "swa_full", True),
        ("--log-level debug", "verbosity", 5),
        (
            '--chat-template-kwargs {"enable_thinking":false}',
            "chat_template_kwargs",
            {"enable_thinking": False},
        ),
    ],
)
def test_llama_servers_flags(arguments: str, field: str, value: object) -> None:
    assert getattr(parse([*BASE, *arguments.split()]), field) == value


def test_defaults_are_llama_servers() -> None:
    settings = parse(BASE)
    assert (settings.host, settings.port) == ("127.0.0.1", 8080)
    assert (settings.ctx_size, settings.batch_size, settings.ubatch_size) == (0, 2048, 512)
    assert (settings.n_slots, settings.is_unified) == (4, True)
    assert (settings.spec_draft_n_min, settings.spec_draft_p_min) == (0, 0.0)
    assert settings.spec_adaptive
    assert settings.draft_n_max == 16
    assert parse([*BASE, "--spec-adaptive", "off"]).draft_n_max == 3
    assert (settings.temperature, settings.top_k, settings.top_p, settings.min_p) == (0.8, 40, 0.95, 0.05)
    assert settings.ctx_checkpoints == 32
    assert settings.drafters == ()


def test_what_follows_from_several_settings() -> None:
    assert parse([*BASE, "-np", "2"]).is_unified is False
    assert parse([*BASE, "-np", "2", "-kvu"]).is_unified is True
    assert parse([*BASE, "-no-kvu"]).is_unified is False
    assert parse([*BASE, "-b", "256"]).n_ubatch == 256
    assert parse([*BASE, "-md", "d"]).drafters == ("draft-simple",)
    assert parse([*BASE, "-md", "d", "--spec-type", "none"]).drafters == ()
    assert parse([*BASE, "--spec-type", "draft-mtp,ngram-mod"]).drafters == ("draft-mtp", "ngram-mod")


@pytest.mark.parametrize(
    ("arguments", "flag"),
    [
        ("", "--model"),
        ("-m m -c abc", "--ctx-size"),
        ("-m m -c -5", "--ctx-size"),
        ("-m m -np 0", "--parallel"),
        ("-m m --port 70000", "--port"),
        ("-m m -fa maybe", "--flash-attn"),
        ("-m m -ctk f8", "--cache-type-k"),
        ("-m m --cache-ram much", "--cache-ram"),
        ("-m m -c 3", "--ctx-size: below the number of slots; at least 4,"),
        ("-m m -np 1 -c 1 -cd 1 -np 2", "--ctx-size: below the number of slots; at least 2,"),
        ("-m m -c 7 -np 8 -kvu", "--ctx-size: below the number of slots; at least 8,"),
        ("-m m -c 4096 -cd 7 -np 8 -kvu", "--ctx-size-draft: below the number of slots; at least 8,"),
        ("-m m -cd 3", "--ctx-size-draft: below the number of slots; at least 4,"),
        ("-m m --spec-adaptive maybe", "--spec-adaptive"),
        ("-m m --spec-type draft-eagle3", "--spec-type"),
        ("-m m --spec-type none,ngram-mod", "--spec-type"),
        ("-m m --spec-type draft-simple", "--spec-type"),
        ("-m m --spec-type ngram-mod --spec-type ngram-mod", "--spec-type"),
        ("-m m --spec-draft-n-min 5 --spec-draft-n-max 4", "--spec-draft-n-min"),
        ("-m m --spec-draft-p-min 2", "--spec-draft-p-min"),
        ("-m m --temp -1", "--temp"),
        ("-m m --temp nan", "--temp"),
        ("-m m --chat-template a --chat-template-file b", "--chat-template"),
        ("-m m --chat-template llama2", "--chat-template:"),
        ("-m m --chat-template ./template.jinja", "--chat-template-file FILE"),
        ("-m m --chat-template-file /nowhere/t.jinja", "--chat-template-file: /nowhere/t.jinja"),
        ("-m m --api-key-file /nowhere/keys", "--api-key-file: /nowhere/keys"),
        ("-m m --api-key-file /", "--api-key-file: /"),
        ("-m m --mirostat 2", "--mirostat"),
        ("-m m --dry-multiplier 0.8", "--dry-multiplier"),
        ("-m m --top-nsigma 1", "--top-nsigma"),
        ("-m m --adaptive-target 0", "--adaptive-target"),
        ("-m m -sm row", "-sm"),
        ("-m m -mg 1", "-mg"),
        ("-m m --device CUDA0", "--device"),
        ("-m m --chat-template-kwargs [1]", "--chat-template-kwargs"),
        ("-m m --chat-template-kwargs {", "--chat-template-kwargs"),
        ("-m m --verbosity loud", "--verbosity"),
        ("-m", "--model"),
    ],
)
def test_wrong_value_names_its_flag(capsys: pytest.CaptureFixture[str], arguments: str, flag: str) -> None:
    message = refusal(capsys, *arguments.split())
    assert flag in message
    assert message.count("\n") == 1
    assert "Input should" not in message


@pytest.mark.parametrize(
    "arguments", ["-c 4 -cd 4", "-np 1 -c 1", "-np 8 -c 8 -cd 1", "-np 8 -kvu -c 8 -cd 8"]
)
def test_a_context_of_a_token_for_each_slot_is_enough(arguments: str) -> None:
    """Below, llama ends the process; a draft context that is not shared is meant for each slot."""
    assert parse([*BASE, *arguments.split()]).model == "m.gguf"


@pytest.mark.parametrize("flag", ["--foo", "-mx", "-cbx", "--kv-unifie", "--ctx", "-tbx", "--ssl-key-file"])
def test_unknown_flag_is_named(capsys: pytest.CaptureFixture[str], flag: str) -> None:
    assert f"unknown flag {flag}" in refusal(capsys, *BASE, flag, "value")


def test_all_unknown_flags_are_named_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    message = refusal(capsys, *BASE, "--foo", "1", "--spec-draft-nmax=3", "--bar", "--foo")
    assert message.count("\n") == 1
    assert [message.count(f"unknown flag {flag}") for flag in ("--foo", "--spec-draft-nmax", "--bar")] == [
        1
    ] * 3
    assert "did you mean --spec-draft-n-max?" in message


@pytest.mark.parametrize("flag", [*sorted(REFUSED_FLAGS), "--contextshift", "--no-metrics", "--no-jinjas"])
def test_no_flag_of_another_meaning_is_suggested(capsys: pytest.CaptureFixture[str], flag: str) -> None:
    assert "did you mean" not in refusal(capsys, *BASE, flag)


def test_without_any_flag_the_way_in_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    message = refusal(capsys)
    assert "-m FILE" in message
    assert "--help" in message


def test_start_scripts_of_llama_server_go_on_working(capsys: pytest.CaptureFixture[str]) -> None:
    tolerated = [argument for flag, n in {**ALWAYS_SO, **IGNORED}.items() for argument in (flag, *["x"] * n)]
    tolerated += [argument for flag, values in NEUTRAL.items() for v in values for argument in (flag, v)]
    assert parse([*BASE, *tolerated, "--mirostat", "0.0"]).model == "m.gguf"
    notes = capsys.readouterr().err.splitlines()
    assert notes == [f"spec-server: {flag} has no effect here" for flag in IGNORED]


@pytest.mark.parametrize(("flag", "field"), DEVICES.items())
def test_no_device_is_no_layer_on_a_gpu(flag: str, field: str) -> None:
    layers = ["-ngl", "99", "-ngld", "99"]
    assert getattr(parse([*BASE, *layers, flag, "none"]), field) == 0
    assert getattr(parse([*BASE, flag, "none", *layers]), field) == 0


@pytest.mark.parametrize(("value", "notes"), [("8192", 1), ("-1", 1), ("0", 0)])
def test_a_prompt_cache_is_only_an_optimisation(
    capsys: pytest.CaptureFixture[str], value: str, notes: int
) -> None:
    parse([*BASE, "-cram", value])
    assert capsys.readouterr().err == "spec-server: --cache-ram has no effect here yet\n" * notes


def test_a_template_is_jinja_text_or_the_one_built_in_name(tmp_path: Path) -> None:
    text = "{% for m in messages %}{{ m.content }}{% endfor %}"
    (tmp_path / "template").write_text(text)
    assert parse([*BASE, "--chat-template-file", str(tmp_path / "template")]).template() == text
    assert parse([*BASE, "--chat-template", text]).template() == text
    assert parse([*BASE, "--chat-template", "chatml"]).template() == "chatml"
    assert parse(BASE).template() == ""


def test_a_template_file_without_jinja_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "template").write_text("")
    assert "--chat-template-file:" in refusal(
        capsys, *BASE, "--chat-template-file", str(tmp_path / "template")
    )


def test_environment_stands_in_for_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLAMA_ARG_MODEL", "theirs.gguf")
    monkeypatch.setenv("LLAMA_ARG_CTX_SIZE", "64")
    monkeypatch.setenv("LLAMA_API_KEY", "a,b")
    monkeypatch.setenv("LLAMA_ARG_NO_KV_UNIFIED", "1")
    monkeypatch.setenv("SPEC_SERVER_CTX_SIZE", "128")
    monkeypatch.setenv("SPEC_SERVER_SPEC_TYPE", "ngram-mod")
    monkeypatch.setenv("SPEC_SERVER_CHAT_TEMPLATE_KWARGS", '{"a": 1}')
    settings = parse([])
    assert settings.model == "theirs.gguf"
    assert settings.ctx_size == 128
    assert settings.api_key == ("a", "b")
    assert settings.kv_unified is False
    assert settings.drafters == ("ngram-mod",)
    assert settings.chat_template_kwargs == {"a": 1}
    assert parse(["-c", "256"]).ctx_size == 256


def test_keys_come_from_flag_and_file(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# ours\nfirst\n\n second \n")
    settings = parse([*BASE, "--api-key", "x", "--api-key-file", str(file)])
    assert settings.api_keys() == ("x", "first", "second")


def test_a_key_file_without_a_key_would_leave_the_server_open(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "keys").write_text("# none yet\n\n")
    assert "--api-key-file: no key" in refusal(capsys, *BASE, "--api-key-file", str(tmp_path / "keys"))


@pytest.mark.parametrize("word", ["foo", "1.5", "", "all of them"])
def test_layers_that_are_no_number_and_no_word_of_theirs(
    word: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "it must be a whole number, auto or all" in refusal(capsys, *BASE, "-ngl", word)


@pytest.mark.parametrize(
    ("flags", "mode"),
    [
        ("--mlock", "mmap+mlock"),
        ("--mmap", "mmap"),
        ("--no-mmap", "none"),
        ("--no-mmap --mlock", "mlock"),
        ("--mlock --no-mmap", "mlock"),
        ("-dio", "dio"),
        ("--no-direct-io", "auto"),
        ("--mlock -lm none", "none"),
        ("-lm none --mlock", "none"),
    ],
)
def test_older_flags_for_the_load_mode_do_what_they_did(flags: str, mode: str) -> None:
    assert parse([*BASE, *flags.split()]).load_mode == mode


def test_help_groups_and_names_every_flag(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        parse(["--help"])
    assert stop.value.code == 0
    text = capsys.readouterr().out
    for field in Settings.model_fields.values():
        option = option_of(field)
        assert f"\n{option.group}:\n" in text
        assert all(flag in text for flag in (*option.flags.split(), *option.no.split()))
    line = " ".join(text.partition("\n  --omp-spin ")[2].split())
    assert "(default: auto)" in line.partition("[")[0]  # the word, not the number that stands for it
    _, _, tolerated = text.partition("\nAccepted for llama-server's sake, without effect:\n")
    assert {*ALWAYS_SO, *IGNORED, *NEUTRAL, *DEVICES} - set(tolerated.split()) == set()


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        parse(["--version"])
    assert stop.value.code == 0
    assert re.fullmatch(r"spec-server \d+\.\d+\.\d+\S*\n", capsys.readouterr().out)


def rows() -> dict[str, list[str]]:
    """The settings tables of the page, by the first flag of each row."""
    lines = [line for line in PAGE.read_text().splitlines() if line.startswith("| `-")]
    cells = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]
    return {row[0]: row for row in cells}


@pytest.mark.parametrize("name", list(Settings.model_fields))
def test_every_setting_is_documented(name: str) -> None:
    field = Settings.model_fields[name]
    option = option_of(field)
    flags = ", ".join(f"`{flag}`" for flag in (*option.flags.split(), *option.no.split()))
    names = ", ".join(f"`{variable}`" for variable in env_names(name, option))
    row = rows()[flags]
    assert row[1] == names
    assert row[2] == (option.unit or "none")
    assert row[3] == default_cell(field.default, option.metavar)


def default_cell(value: object, metavar: str) -> str:
    if value == -1 and "auto" in metavar.split("|"):
        return "auto"
    if value is None or value in ("", ()) or value == {}:
        return "none"
    if isinstance(value, bool):
        return "on" if value else "off"
    return str(value)


def test_every_documented_flag_exists() -> None:
    known = known_flags(build_parser())
    documented = set(re.findall(r"`(--?[A-Za-z][\w.-]*)`", PAGE.read_text()))
    assert documented - known == REFUSED_FLAGS
    assert {*ALWAYS_SO, *IGNORED, *NEUTRAL, *DEVICES, *OLDER} - documented == set()


def test_no_flag_is_both_refused_and_known() -> None:
    assert REFUSED_FLAGS & known_flags(build_parser()) == set()
    assert sum(len(flags.split()) for flags in REFUSED.values()) == len(REFUSED_FLAGS)
