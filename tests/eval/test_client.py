"""The client against a fake that speaks llama-server's wire form."""

from __future__ import annotations

import pytest

from eval.client import Client, ServerError

HELLO = [{"role": "user", "content": "say hello twice"}]


def test_chat_joins_the_stream_and_reads_the_last_timings(start_fake):
    fake = start_fake()
    with Client(fake.url) as client:
        turn = client.chat(HELLO, max_tokens=8)
    assert len(turn.text.split(" ")) == 8
    assert (turn.prompt_n, turn.cache_n, turn.predicted_n) == (6, 0, 8)
    assert (turn.draft_n, turn.draft_n_accepted) == (6, 4)
    assert (turn.prompt_ms, turn.predicted_ms) == (1.5, 2.5)
    assert turn.first_token_ms > 0


def test_completion_speaks_the_other_form(start_fake):
    fake = start_fake()
    with Client(fake.url) as client:
        turn = client.complete("one two three", max_tokens=4)
    assert len(turn.text.split(" ")) == 4
    assert (turn.prompt_n, turn.predicted_n) == (3, 4)
    assert fake.requests[-1]["body"]["n_predict"] == 4


def test_requests_are_greedy_streamed_and_bound_to_the_slot(start_fake):
    fake = start_fake()
    with Client(fake.url, api_key="secret") as client:
        client.chat(HELLO, max_tokens=4, id_slot=1, options={"speculative.n_max": 0})
    request = fake.requests[-1]
    assert request["headers"]["Authorization"] == "Bearer secret"
    expected = {
        "stream": True,
        "temperature": 0.0,
        "id_slot": 1,
        "cache_prompt": True,
        "speculative.n_max": 0,
    }
    assert expected.items() <= request["body"].items()
    assert not fake.slots[0].words
    assert fake.slots[1].words


def test_absent_draft_counts_are_zero(start_fake):
    fake = start_fake()
    with Client(fake.url) as client:
        turn = client.chat(HELLO, max_tokens=2)
    assert (turn.draft_n, turn.draft_n_accepted) == (0, 0)


def test_an_error_status_carries_the_servers_message(start_fake):
    fake = start_fake()
    with Client(fake.url) as client, pytest.raises(ServerError, match="400 too long"):
        client.chat(HELLO, max_tokens=2000)


def test_an_error_inside_a_stream_is_an_error(start_fake):
    fake = start_fake(fails_at=3)
    with Client(fake.url) as client, pytest.raises(ServerError, match="decode failed"):
        client.chat(HELLO, max_tokens=8)


def test_a_slot_is_saved_erased_and_restored(start_fake, tmp_path):
    fake = start_fake(slot_save_path=tmp_path)
    with Client(fake.url) as client:
        client.chat(HELLO, max_tokens=4)
        saved = client.save(0, "a.bin")
        erased = client.erase(0)
        restored = client.restore(0, "a.bin")
    assert saved["n_saved"] == erased["n_erased"] == restored["n_restored"] == 9
    assert saved["n_written"] == restored["n_read"] == (tmp_path / "a.bin").stat().st_size
