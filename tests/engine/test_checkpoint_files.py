"""Slot files whose checkpoints are too many, of another kind, or damaged: told, and never worth more than time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from persistence.files import SystemFiles
from persistence.reader import SlotFile
from persistence.snapshot import Checkpoint, SequenceState
from persistence.store import DirectoryStore
from spec_server.engine.base import DEFAULT_OWNER
from spec_server.engine.checkpoints import CheckpointOptions
from tests.engine.harness import Setup, core_of, filler, request, run, serve, smollm2
from tests.engine.kept import (
    ANSWER,
    FEW,
    FOUND,
    KINDS,
    PARTS,
    a_saved_slot,
    cases,
    drafting,
    first_prompt,
    go,
    known_texts,
    second_prompt,
    setup_of,
)

pytestmark = pytest.mark.model


@pytest.fixture(params=cases(FEW))
def some_setup(request: pytest.FixtureRequest) -> Setup:
    return setup_of(*request.param)


def rewrite(directory: Path, change: Callable[[list[Checkpoint]], list[Checkpoint]]) -> None:
    """The same file with other checkpoints, every checksum right."""
    with SlotFile.open(directory / "a.bin", SystemFiles()) as file:
        state = file.read_target()
        checkpoints = change(list(file.checkpoints()))
        draft = file.draft()
        assert file.facts is not None
        writer = DirectoryStore(directory).create(DEFAULT_OWNER, "a.bin")
        writer.payload(list(file.tokens), state)
        writer.checkpoints(len(checkpoints), checkpoints)
        if draft:
            writer.draft(draft.fit, draft.context, draft.spec)
        writer.commit(file.facts)


@pytest.mark.parametrize(
    ("options", "kept", "note"),
    [
        (CheckpointOptions(n_max=2), [128, 340], "4 checkpoints left out: at most 2 a slot"),
        (CheckpointOptions(ram_bytes=3 * 448_684), [128, 256, 340], "3 checkpoints left out"),
        (CheckpointOptions(n_max=0), [], "6 checkpoints left out: at most 0 a slot"),
    ],
    ids=["fewer", "less memory", "none"],
)
def test_more_checkpoints_than_this_server_keeps_are_thinned_out_and_told(
    options: CheckpointOptions, kept: list[int], note: str, tmp_path: Path
) -> None:
    setup = KINDS["hybrid"]

    async def main() -> None:
        await a_saved_slot(setup, tmp_path)
        async with serve(setup.but(checkpoints=options), tmp_path) as server:
            report = await server.restore(0, "a.bin")
            assert [c.n_tokens for c in server.core.slots[0].checkpoints] == kept
            assert (report.n_ckpt_restored, report.n_ckpt_dropped) == (len(kept), 6 - len(kept))
            assert [note in n for n in report.notes] == [True]
            second = second_prompt(setup.path, setup.n_ubatch, PARTS["end"])
            assert (await server.ask(request(second, 2))).timings.cache_n == (340 if kept else 0)

    go(main())


def test_a_model_that_needs_none_drops_them_and_says_so(tmp_path: Path) -> None:
    setup = Setup(smollm2(), n_ctx=256)

    async def main() -> None:
        async with serve(setup, tmp_path) as server:
            prompt = filler(server.core.model, 40, 1)
            await server.ask(request(prompt, 4))
            await server.save(0, "a.bin")
            rewrite(tmp_path, lambda _: [Checkpoint(20, 0, 19, SequenceState(b"x" * 64))])
            report = await server.restore(0, "a.bin")
            assert (report.n_ckpt_restored, report.n_ckpt_dropped) == (0, 1)
            assert "needs none" in report.notes[0]
            assert (await server.ask(request([*prompt.tokens[:30], 5], 2))).counts[:2] == (30, 1)

    go(main())


def cut_short(state: bytes) -> bytes:
    return state[: len(state) // 2]


def other_magic(state: bytes) -> bytes:
    return b"\0\0\0\0" + state[4:]


def many_cells(state: bytes) -> bytes:
    at = 12 if len(state) < 200_000 else 8  # a window's part begins with its number of streams
    return state[:at] + (1 << 20).to_bytes(4, "little") + state[at + 4 :]


def other_layers(state: bytes) -> bytes:
    return state.replace(state[24:40], bytes(16), 1)


def nothing(state: bytes) -> bytes:
    return b""


DAMAGES = [cut_short, other_magic, many_cells, other_layers, nothing]


@pytest.mark.parametrize("damage", DAMAGES)
def test_one_that_does_not_load_costs_a_full_processing_and_nothing_else(
    some_setup: Setup, damage: Callable[[bytes], bytes]
) -> None:
    setup = some_setup
    second = request(second_prompt(setup.path, setup.n_ubatch, PARTS["at"]), ANSWER)
    with core_of(setup) as core:
        slot = core.slots[0]
        run(core, request(first_prompt(setup.path).tokens[:300], 1))
        slot.checkpoints[:] = [
            replace(c, state=SequenceState(damage(bytes(c.state.target)), c.state.draft))
            for c in slot.checkpoints
        ]
        turn = run(core, second)[0]
        assert turn.counts[:2] == (0, len(second.prompt))
        assert turn.tokens == known_texts(setup.path, setup.n_ubatch)[tuple(second.prompt)][:ANSWER]
        # what was taken on the way is good again, for target and drafter
        again = run(core, second)[0]
        assert again.timings.cache_n == len(second.prompt) - 4
        assert again.tokens == turn.tokens
        assert again.timings.draft_n == turn.timings.draft_n
        assert core.checkpoints.counts.refused == 1


def test_those_of_a_file_that_cannot_be_this_targets_are_left_out_and_told(
    some_setup: Setup, tmp_path: Path
) -> None:
    """Every checksum is right, so only the states themselves can tell."""
    setup = some_setup
    second = request(second_prompt(setup.path, setup.n_ubatch, PARTS["past"]), ANSWER)

    def damaged(checkpoints: list[Checkpoint]) -> list[Checkpoint]:
        return [
            replace(c, state=SequenceState(damage(bytes(c.state.target)), c.state.draft))
            for c, damage in zip(checkpoints[1:], DAMAGES, strict=True)
        ]

    async def main() -> None:
        await a_saved_slot(setup, tmp_path)
        rewrite(tmp_path, damaged)
        async with serve(setup, tmp_path) as server:
            report = await server.restore(0, "a.bin")
            assert len(report.notes) == report.n_ckpt_dropped >= 4
            turn = await server.ask(second)
            assert turn.counts[:2] == (0, len(second.prompt))
            assert turn.tokens == known_texts(setup.path, setup.n_ubatch)[tuple(second.prompt)][:ANSWER]

    go(main())


def test_a_checkpoint_of_another_length_than_it_says_does_not_load(some_setup: Setup, tmp_path: Path) -> None:
    setup = some_setup

    async def main() -> None:
        await a_saved_slot(setup, tmp_path)
        rewrite(tmp_path, lambda cs: [Checkpoint(c.n_tokens - 3, 0, 0, c.state) for c in cs])
        async with serve(setup, tmp_path) as server:
            await server.restore(0, "a.bin")
            second = request(second_prompt(setup.path, setup.n_ubatch, PARTS["past"]), ANSWER)
            turn = await server.ask(second)
            assert turn.tokens == known_texts(setup.path, setup.n_ubatch)[tuple(second.prompt)][:ANSWER]

    go(main())


def test_two_at_one_place_or_in_disorder_are_not_taken(tmp_path: Path) -> None:
    setup = KINDS["window"]

    async def main() -> None:
        await a_saved_slot(setup, tmp_path)
        rewrite(tmp_path, lambda cs: [cs[1], cs[1], cs[0], cs[3]])
        async with serve(setup, tmp_path) as server:
            report = await server.restore(0, "a.bin")
            assert [c.n_tokens for c in server.core.slots[0].checkpoints] == [128, 256]
            assert report.n_ckpt_dropped == 2

    go(main())


def test_a_drafter_whose_part_is_refused_is_cold_and_the_text_stands(tmp_path: Path) -> None:
    setup = drafting(KINDS["hybrid"])
    second = request(second_prompt(setup.path, setup.n_ubatch, PARTS["past"]), ANSWER)

    async def main() -> None:
        async with serve(setup, tmp_path) as server:
            await server.ask(request(first_prompt(setup.path), ANSWER))
            server.core.drafter.refuse_states = True  # type: ignore[attr-defined]
            turn = await server.ask(second)
            assert turn.counts == (FOUND["past"], len(second.prompt) - FOUND["past"], 0, 0)
            assert turn.tokens == known_texts(setup.path, setup.n_ubatch)[tuple(second.prompt)][:ANSWER]
            assert server.core.checkpoints.counts.draft_refused == 1

    go(main())
