"""Named sets of flags."""

from __future__ import annotations

import argparse

import pytest

from eval.bench import configs
from eval.bench.arguments import add_arguments, blocks, chosen_configs
from eval.workloads import WORKLOADS


def arguments(*argv: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return parser.parse_args(argv)


def names(*argv: str) -> list[str]:
    return [one.contestant for one in chosen_configs(arguments(*argv))]


def test_a_preset_is_for_both_and_fixed_lengths_are_fixed():
    ours, peer = configs.parse("fixed4")
    assert (ours.contestant, peer.contestant) == ("ours:fixed4", "peer:fixed4")
    assert ours.flags[-2:] == ("--spec-adaptive", "off")
    assert ours.flags[:-2] == peer.flags
    assert peer.needs_draft_model


def test_an_adaptive_preset_is_ours_alone_and_keeps_its_flag():
    (adaptive,) = configs.parse("adaptive")
    assert adaptive.side == "ours"
    assert adaptive.flags.count("--spec-adaptive") == 1
    assert adaptive.flags[adaptive.flags.index("--spec-adaptive") + 1] == "on"


def test_flags_of_ones_own_for_one_side_or_both():
    (peer,) = configs.parse("peer:lookup=--spec-type ngram-mod --spec-ngram-mod-n-min 4")
    assert peer.contestant == "peer:lookup"
    assert peer.flags == ("--spec-type", "ngram-mod", "--spec-ngram-mod-n-min", "4")
    assert not peer.needs_draft_model
    assert [one.side for one in configs.parse("x=--threads 1")] == ["ours", "peer"]


@pytest.mark.parametrize("text", ["nothing", "theirs:off", "peer:adaptive", "=--flag", "peer:"])
def test_what_is_no_configuration_is_refused(text):
    with pytest.raises(argparse.ArgumentTypeError):
        configs.parse(text)


def test_a_draft_model_is_given_to_those_that_use_it():
    assert [one.needs_draft_model for one in configs.parse("off")] == [False, False]
    assert [one.needs_draft_model for one in configs.parse("chain")] == [True, True]
    assert [one.needs_draft_model for one in configs.parse("ngram-simple")] == [False, False]


def test_without_a_peer_only_ours_are_measured():
    assert names() == ["ours:off", "ours:fixed2", "ours:fixed4", "ours:fixed8", "ours:adaptive"]
    assert names("--quick", "--peer", "x") == ["ours:off", "peer:off", "peer:default", "ours:adaptive"]


def test_only_the_peers_is_no_measurement():
    with pytest.raises(ValueError, match="no configuration for our server"):
        chosen_configs(arguments("--config", "peer:off", "--peer", "x"))


def test_a_sweep_has_lengths_zero_to_eight_for_both_and_adaptive():
    found = chosen_configs(arguments("--sweep", "--peer", "x"))
    assert [one.length for one in found if one.side == "peer"] == list(range(9))
    assert [one.contestant for one in found if one.length is None] == ["ours:adaptive"]
    assert found[0].flags == ("--spec-type", "none", "--spec-adaptive", "off")
    last = next(one for one in found if one.contestant == "peer:length8")
    assert last.flags[last.flags.index("--spec-draft-n-max") + 1] == "8"


def test_a_sweep_may_have_other_flags_and_other_company():
    template = "--spec-type ngram-simple --spec-ngram-simple-size-m {n}"
    found = chosen_configs(arguments("--sweep", template, "--config", "adaptive-ngram"))
    assert found[0].contestant == "ours:adaptive-ngram"
    assert next(one for one in found if one.length == 3).flags[:4] == tuple(template.format(n=3).split())


def test_quick_is_bounded_in_time():
    one, eight = blocks(arguments("--quick"))
    assert (one.n_clients, one.workloads, eight.n_clients, eight.workloads) == (1, WORKLOADS, 8, ("chat",))
    assert one.budget_s + eight.budget_s < 300
    assert one.n_tokens == 64


def test_minutes_are_shared_out_and_without_them_there_is_no_limit():
    one, eight = blocks(arguments("--clients", "8,1", "--minutes", "20", "--workload", "json"))
    assert (one.n_clients, eight.n_clients) == (1, 8)
    assert one.budget_s + eight.budget_s < 20 * 60
    assert one.workloads == ("json",)
    assert [block.budget_s for block in blocks(arguments())] == [None, None]


@pytest.mark.parametrize(
    "argv",
    [
        ("--clients", "0"),
        ("--compare", "ours:off"),
        ("--ours-env", "X"),
        ("--workload", "poetry"),
        ("--peer", "x", "--peer-url", "http://y"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(argv, capsys):
    with pytest.raises(SystemExit):
        arguments(*argv)
