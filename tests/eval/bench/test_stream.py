"""Arrivals of streamed tokens."""

from __future__ import annotations

import pytest

from eval.bench.stream import Stream, complete, events
from eval.client import ServerError


def test_an_event_arrives_with_the_chunk_that_completes_it():
    chunks = [
        (1.0, b': ping\n\ndata: {"tok'),
        (2.0, b'ens": [1]}\n\ndata: {"tokens": [2, 3]}'),
        (3.0, b"\n\n"),
    ]
    assert list(events(chunks)) == [(2.0, {"tokens": [1]}), (3.0, {"tokens": [2, 3]})]


def test_end_markers_and_error_events_are_known():
    chunks = [(1.0, b'data: [DONE]\n\nerror: {"code": 500}\n\ndata: {"error": {"code": 400}}\n\n')]
    assert [event for _, event in events(chunks)] == [{"error": {"code": 500}}, {"error": {"code": 400}}]


def test_tokens_that_come_together_wait_once():
    stream = Stream(1.0, 1.5, ((1.1, 1), (1.3, 3), (1.4, 1)), 5, 1, 0, 0)
    assert stream.first_token_ms == pytest.approx(100.0)
    assert stream.gaps_ms() == pytest.approx([200.0, 0.0, 0.0, 100.0])


def test_the_first_event_may_hold_several():
    assert Stream(0.0, 1.0, ((0.5, 3),), 3, 1, 0, 0).gaps_ms() == [0.0, 0.0]


def test_a_stream_from_a_server(start_fake):
    fake = start_fake()
    stream = complete(fake.url, [5, 6, 7], n_tokens=8, id_slot=1, timeout_s=10)
    assert (stream.n_tokens, stream.draft_n, stream.draft_n_accepted) == (8, 6, 4)
    assert sum(n_tokens for _, n_tokens in stream.arrivals) == 8
    assert stream.sent_s < stream.arrivals[0][0] <= stream.ended_s
    body = fake.requests[-1]["body"]
    assert (body["prompt"], body["n_predict"], body["id_slot"]) == ([5, 6, 7], 8, 1)
    assert (body["temperature"], body["ignore_eos"], body["stream"]) == (0.0, True, True)


def test_refusals_and_errors_inside_a_stream_are_errors(start_fake):
    with pytest.raises(ServerError, match=r"400.*too long"):
        complete(start_fake().url, [1], n_tokens=2000, id_slot=0, timeout_s=10)
    with pytest.raises(ServerError, match="decode failed"):
        complete(start_fake(fails_at=2).url, [1], n_tokens=8, id_slot=0, timeout_s=10)


def test_a_server_that_pings_for_ever_is_given_up(start_fake):
    with pytest.raises(ServerError, match="did not end in time"):
        complete(start_fake(pings=True).url, [1], n_tokens=8, id_slot=0, timeout_s=0.3)
