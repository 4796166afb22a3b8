"""No variable that looks like a setting is lost in silence, and none that protects is lost at all."""

from __future__ import annotations

import pytest

from spec_server.cli import parse

BASE = ["-m", "m.gguf"]


pytestmark = pytest.mark.usefixtures("clean_environment")


@pytest.mark.parametrize(
    ("name", "value", "note"),
    [
        ("LLAMA_ARG_ROPE_SCALE", "2", "is not known here, ignored"),
        ("LLAMA_ARG_EMBEDDINGS", "1", "is not known here, ignored"),
        ("LLAMA_ARG_HF_REPO", "a/b", "is not known here, ignored"),
        ("SPEC_SERVER_PROT", "1", "is not known here, ignored"),
        ("spec_server_prot", "1", "is not known here, ignored"),
        ("LLAMA_ARG_MMAP", "0", "has no effect here"),
        ("LLAMA_ARG_NO_MMAP", "1", "has no effect here"),
        ("LLAMA_ARG_MLOCK", "1", "has no effect here"),
        ("LLAMA_ARG_NO_HOST", "1", "has no effect here"),
        ("LLAMA_ARG_TIMEOUT", "600", "has no effect here"),
        ("LLAMA_ARG_THINK", "none", "has no effect here"),
        ("LLAMA_ARG_JINJA", "0", "has no effect here"),
        ("LLAMA_ARG_CONTEXT_SHIFT", "1", "has no effect here"),
        ("LLAMA_ARG_CACHE_RAM", "8192", "has no effect here yet"),
        ("LLAMA_ARG_SSL_KEY_FILE", "", "is not known here, ignored"),
        ("LLAMA_ARG_CORS_ORIGINS", "*", "is not known here, ignored"),
    ],
)
def test_what_is_not_read_is_named_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str, value: str, note: str
) -> None:
    monkeypatch.setenv(name, value)
    parse(BASE)
    assert capsys.readouterr().err == f"spec-server: {name} {note}\n"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("LLAMA_ARG_JINJA", "1"),
        ("LLAMA_ARG_NO_CONTEXT_SHIFT", "1"),
        ("LLAMA_ARG_CONTEXT_SHIFT", "off"),
        ("LLAMA_ARG_ENDPOINT_METRICS", "true"),
        ("LLAMA_ARG_NO_KV_UNIFIED", "1"),
        ("LLAMA_ARG_CACHE_RAM", "0"),
        ("LLAMA_ARG_PORT", "81"),
        ("LLAMA_ARG_LOAD_MODE", "mlock"),
        ("LLAMA_API_KEY", "x"),
        ("spec_server_port", "81"),
        ("LLAMA_CACHE", "/tmp"),
        ("SPEC_SERVERS", "2"),
    ],
)
def test_what_is_read_or_so_anyway_is_no_news(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str, value: str
) -> None:
    monkeypatch.setenv(name, value)
    parse(BASE)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    "name",
    [
        "LLAMA_ARG_SSL_KEY_FILE",
        "LLAMA_ARG_SSL_CERT_FILE",
        "LLAMA_ARG_API_KEY",
        "LLAMA_API_KEYS",
        "LLAMA_API_KEY_FILE",
        "LLAMA_APIKEY",
        "SPEC_SERVER_API_KEYS",
        "SPEC_SERVER_SSL_KEY_FILE",
        "LLAMA_ARG_CORS_ORIGINS",
    ],
)
def test_a_variable_that_would_protect_is_not_ignored(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    monkeypatch.setenv(name, "secret")
    with pytest.raises(SystemExit) as stop:
        parse(BASE)
    assert stop.value.code == 2
    [line] = capsys.readouterr().err.splitlines()
    assert name in line
    assert "secret" not in line


@pytest.mark.parametrize(
    ("name", "value", "flag"),
    [
        ("LLAMA_ARG_PORT", "eighty", "--port"),
        ("SPEC_SERVER_PORT", "eighty", "--port"),
        ("spec_server_port", "eighty", "--port"),
        ("LLAMA_ARG_DRAFT_MAX", "-5", "--spec-draft-n-max"),
        ("LLAMA_ARG_N_PARALLEL", "0", "--parallel"),
        ("LLAMA_ARG_API_KEY_FILE", "/nowhere/keys", "--api-key-file"),
        ("LLAMA_ARG_CHAT_TEMPLATE", "llama2", "--chat-template"),
    ],
)
def test_a_wrong_value_names_flag_and_variable(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str, value: str, flag: str
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit) as stop:
        parse(BASE)
    assert stop.value.code == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(f"spec-server: {flag}: ")
    assert line.endswith(f", from {name}")


def test_a_flag_that_is_wrong_does_not_blame_the_variable_it_replaces(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LLAMA_ARG_PORT", "81")
    with pytest.raises(SystemExit):
        parse([*BASE, "--port", "eighty"])
    assert "LLAMA_ARG_PORT" not in capsys.readouterr().err
