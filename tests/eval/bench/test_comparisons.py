"""Which ratios are made of which samples, and what the tables say of them."""

from __future__ import annotations

import json

import pytest

from eval.bench import charts, configs, report
from eval.bench.comparisons import best_lengths, results
from eval.bench.samples import Sample, summarise

SPEEDS = {
    # contestant, beside: tokens per second of round 0 by workload
    ("ours:off", False): {"chat": 20.0, "json": 10.0},
    ("peer:off", False): {"chat": 10.0, "json": 10.0},
    ("bare", False): {"chat": 20.0, "json": 10.0},
    ("ours:off", True): {"chat": 10.0, "json": 5.0},
}


def samples(speeds, n_rounds: int = 3, n_clients: int = 1) -> list[Sample]:
    # Each round the whole machine is half as fast as in the one before.
    return [
        Sample(
            contestant=contestant,
            workload=workload,
            n_clients=n_clients,
            beside=beside,
            round=number,
            n_tokens=64,
            seconds=64 * 2**number / speed,
            draft_n=10,
            draft_n_accepted=6,
            n_read_again=0,
            first_token_ms=(50.0, 70.0),
            gaps_ms=(1.0,) * 98 + (5.0, 9.0),
            overhead_us=(120.0, 80.0) if contestant.startswith("ours") else None,
        )
        for (contestant, beside), by_workload in speeds.items()
        for workload, speed in by_workload.items()
        for number in range(n_rounds)
    ]


def both(*names: str) -> list[configs.Config]:
    return configs.chosen([configs.parse(name) for name in names], with_peer=True)


def by_name(found):
    return {one.name: one for one in found}


def test_like_is_compared_with_like_the_bare_loop_and_the_busy_machine():
    found = by_name(results(samples(SPEEDS), both("off"), []))
    assert list(found) == [
        "ours:off / peer:off, 1 client",
        "ours:off / bare, 1 client",
        "peer:off / bare, 1 client",
        "ours:off, beside a busy loop / alone, 1 client",
    ]
    ratio = found["ours:off / peer:off, 1 client"]
    assert ratio.by_workload["chat"].ratio == pytest.approx(2.0)
    assert ratio.by_workload["json"].ratio == pytest.approx(1.0)
    assert ratio.overall.ratio == pytest.approx(2**0.5)
    assert (ratio.overall.low, ratio.overall.high) == pytest.approx((2**0.5, 2**0.5))
    assert found["ours:off, beside a busy loop / alone, 1 client"].overall.ratio == pytest.approx(0.5)


def test_each_number_of_clients_has_its_own_rows():
    found = results(samples(SPEEDS) + samples(SPEEDS, n_clients=8), both("off"), [])
    assert [one.n_clients for one in found] == [1] * 4 + [8] * 4
    assert found[4].name == "ours:off / peer:off, 8 clients"


def test_adaptive_is_compared_with_the_peers_default_and_with_off():
    speeds = {("ours:adaptive", False): {"chat": 30.0}, ("peer:default", False): {"chat": 15.0}} | SPEEDS
    found = by_name(results(samples(speeds), both("off", "default", "adaptive"), []))
    assert found["ours:adaptive / peer:default, 1 client"].overall.ratio == pytest.approx(2.0)
    assert found["ours:adaptive / ours:off, 1 client"].overall.ratio == pytest.approx(1.5)
    assert found["peer:default / peer:off, 1 client"].overall.ratio == pytest.approx(1.5)


def test_a_remote_peer_is_compared_with_each_of_ours():
    speeds = {("ours:off", False): {"chat": 30.0}, ("peer:url", False): {"chat": 15.0}}
    found = by_name(results(samples(speeds), configs.chosen([configs.parse("off")], with_peer=False), []))
    assert found["ours:off / peer:url, 1 client"].overall.ratio == pytest.approx(2.0)


def test_a_ratio_that_was_asked_for_comes_first():
    found = results(samples(SPEEDS), both("off"), [("bare", "peer:off")])
    assert found[0].name == "bare / peer:off, 1 client"


def test_the_best_fixed_length_is_chosen_for_each_workload():
    speeds = {
        ("peer:off", False): {"chat": 10.0, "json": 10.0},
        ("peer:length1", False): {"chat": 12.0, "json": 9.0},
        ("peer:length2", False): {"chat": 8.0, "json": 20.0},
        ("ours:adaptive", False): {"chat": 24.0, "json": 20.0},
    }
    found = configs.chosen([configs.sweep(configs.SWEEP), configs.parse("adaptive")], with_peer=True)
    assert best_lengths(samples(speeds), found) == {"peer, 1 client": {"chat": 1, "json": 2}}
    row = by_name(results(samples(speeds), found, []))["ours:adaptive / best fixed length of peer, 1 client"]
    assert row.by_workload["chat"].ratio == pytest.approx(2.0)
    assert row.by_workload["json"].ratio == pytest.approx(1.0)


def test_a_cell_adds_its_rounds_up():
    cell = summarise(one for one in samples(SPEEDS) if (one.contestant, one.workload) == ("ours:off", "chat"))
    assert cell.n_rounds == 6
    assert cell.acceptance_rate == pytest.approx(0.6)
    assert (cell.first_token_ms, cell.gap_p50_ms, cell.gap_p99_ms) == (60.0, 1.0, 5.0)
    assert (cell.overhead_us, cell.overhead_less_drafting_us) == (120.0, 80.0)
    with pytest.raises(ValueError, match="no samples"):
        summarise([])


@pytest.fixture
def finished() -> report.Run:
    found = samples(SPEEDS)
    lengths = {"peer, 1 client": {"chat": 4}}
    return report.Run(
        {"machine": "a test"}, found, results(found, both("off"), []), lengths, ["something to know"]
    )


def test_markdown_has_all_tables_and_what_to_know(finished):
    text = report.markdown(finished)
    assert "| tokens/s, ratio | chat | json | geometric mean |" in text
    assert "| ours:off / peer:off, 1 client | 2.000 [2.000, 2.000] | 1.000 [1.000, 1.000] | 1.414" in text
    assert "| ours:off, beside a busy loop | 1 | 4.3 | 2.1 |" in text
    assert "| ours:off | 1 | 0.600 | 60 | 1.00 | 5.0 | 120 | 80 | 6 |" in text
    assert "| peer, 1 client | 4 |  |" in text
    assert "- something to know\n- machine: a test" in text


def test_one_round_has_a_ratio_without_interval():
    found = samples(SPEEDS, n_rounds=1)
    text = report.markdown(report.Run({}, found, results(found, both("off"), [])))
    assert "| ours:off / peer:off, 1 client | 2.000 | 1.000 | 1.414 |" in text


def test_json_has_every_sample_and_no_single_wait(finished):
    written = json.loads(report.to_json(finished))
    assert len(written["samples"]) == len(finished.samples)
    assert written["samples"][0]["tokens_per_s"] == 20.0
    assert "gaps_ms" not in written["samples"][0]
    assert written["results"][0]["overall"]["ratio"] == pytest.approx(2**0.5)
    assert {one["workload"] for one in written["cells"]} == {"chat", "json", "all"}


def test_charts_are_drawn(finished, tmp_path):
    sweep = configs.sweep(configs.SWEEP)
    written = charts.draw(finished, sweep, tmp_path / "charts")
    assert [path.name for path in written] == ["ratios-1.png", "rates-1.png", "lengths-1.png"]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in written)
