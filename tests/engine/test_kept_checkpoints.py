"""A slot that was saved and restored goes on as if nothing had happened, however its memory has to be rewound.

The measure is a slot that was never interrupted: same tokens, same counts, for a prompt that parts from the cached
one somewhere, with and without drafts, in the same server, in a new one and in a new process.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Callable, Coroutine
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest

from persistence.files import SystemFiles
from persistence.reader import SlotFile
from persistence.snapshot import Checkpoint, SequenceState
from persistence.store import DirectoryStore
from spec_server.engine.base import DEFAULT_OWNER
from spec_server.engine.checkpoints import CheckpointOptions
from spec_server.engine.report import slot_facts
from tests.engine.harness import (
    HYBRID,
    ROOT,
    WINDOW,
    Prompt,
    Server,
    Setup,
    Turn,
    chat,
    core_of,
    filler,
    greedy,
    model_of,
    mtp,
    request,
    run,
    serve,
    smollm2,
)
from tests.fakes_engine import mixed, scripted

pytestmark = pytest.mark.model

STEP, ANSWER = 64, 16
OPTIONS = CheckpointOptions(min_step=STEP)
KINDS = {
    "hybrid": Setup(HYBRID, n_ubatch=STEP, checkpoints=OPTIONS),
    "hybrid-snapshots": Setup(HYBRID, n_ubatch=STEP, n_rs_seq=4, checkpoints=OPTIONS),
    "window": Setup(WINDOW, n_ubatch=32, checkpoints=OPTIONS),
    "mtp": Setup(
        HYBRID,
        n_ubatch=STEP,
        n_rs_seq=3,
        checkpoints=OPTIONS,
        n_max=3,
        drafter=mtp(3),
        load_mtp=True,
        expose_hidden=True,
    ),
}
# The first prompt has 344 tokens, checkpoints at every 64 and at 340; more than a window's cache holds.
# Where the second prompt parts from it, and what that finds:
PARTS = {"early": 40, "at": 128, "past": 208, "end": 343, "answer": 354}
FOUND = {"early": 0, "at": 128, "past": 192, "end": 340, "answer": 340}


@lru_cache
def first_prompt(path: Path) -> Prompt:
    return filler(model_of(path), 344, 1)


@lru_cache
def answer(path: Path, n_ubatch: int) -> list[int]:
    return greedy(path, [first_prompt(path)], ANSWER + 8, n_ubatch=n_ubatch)[0]


@lru_cache
def second_prompt(path: Path, n_ubatch: int, at: int) -> Prompt:
    whole = [*first_prompt(path).tokens, *answer(path, n_ubatch)]
    return Prompt((*whole[:at], *filler(model_of(path), 60, 2).tokens))


@lru_cache
def known_texts(path: Path, n_ubatch: int) -> dict[tuple[int, ...], list[int]]:
    prompts = [first_prompt(path), *(second_prompt(path, n_ubatch, at) for at in PARTS.values())]
    said = greedy(path, prompts, ANSWER + 8, n_ubatch=n_ubatch)
    return {p.tokens: t for p, t in zip(prompts, said, strict=True)}


def drafting(setup: Setup) -> Setup:
    """With a drafter that is sometimes right; on recurrent memory one that cannot truncate either."""
    plan = mixed(known_texts(setup.path, setup.n_ubatch), model_of(setup.path).n_vocab)
    return setup.but(n_max=4, drafter=scripted(plan, 4, needs_checkpoints=setup.path == HYBRID))


def go(work: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(work)


async def overwrite(server: Server) -> None:
    await server.ask(request(filler(server.core.model, 70, 5), 4, id_slot=0))


ALL = [(kind, drafts) for kind in KINDS for drafts in (False, True) if kind != "mtp" or drafts]
FEW = [("hybrid", True), ("window", False)]  # one of each memory, with and without drafts


def setup_of(kind: str, drafts: bool) -> Setup:
    return drafting(KINDS[kind]) if drafts and kind != "mtp" else KINDS[kind]


def cases(quick: list[tuple[str, bool]]) -> list[Any]:
    """All kinds with and without drafts; those that are not quick are marked slow."""
    return [
        pytest.param(
            (kind, drafts),
            id=f"{kind}-{'drafts' if drafts else 'plain'}",
            marks=() if (kind, drafts) in quick else pytest.mark.slow,
        )
        for kind, drafts in ALL
    ]


@pytest.fixture(params=cases(ALL))
def setup(request: pytest.FixtureRequest) -> Setup:
    return setup_of(*request.param)


@pytest.fixture(params=cases(FEW))
def some_setup(request: pytest.FixtureRequest) -> Setup:
    return setup_of(*request.param)


@pytest.mark.parametrize("case", cases(FEW))
def test_with_checkpoints_in_files_too(case: tuple[str, bool], tmp_path: Path) -> None:
    compare_with_the_live_slot(setup_of(*case).but(spill=tmp_path / "spill"), tmp_path)


def test_a_restored_slot_processes_what_the_live_one_does(setup: Setup, tmp_path: Path) -> None:
    compare_with_the_live_slot(setup, tmp_path)


def compare_with_the_live_slot(setup: Setup, tmp_path: Path) -> None:
    first = request(first_prompt(setup.path), ANSWER)
    seconds = {n: request(second_prompt(setup.path, setup.n_ubatch, at), ANSWER) for n, at in PARTS.items()}

    async def live() -> list[Turn]:
        async with serve(setup, tmp_path) as server:
            await server.ask(first)
            # from behind: what the first prompt left in front of each parting is still there
            turns = [await server.ask(second) for second in reversed(seconds.values())]
        return turns[::-1]

    async def restored() -> list[Turn]:
        async with serve(setup, tmp_path) as server:
            await server.ask(first)
            saved = await server.save(0, "a.bin")
            assert saved.n_ckpt_saved == 6
            turns = []
            for second in seconds.values():
                await overwrite(server)
                report = await server.restore(0, "a.bin")
                assert (report.n_ckpt_restored, report.n_ckpt_dropped, report.notes) == (6, 0, ())
                turns.append(await server.ask(second))
            return turns

    async def restarted() -> list[Turn]:
        turns = []
        async with serve(setup, tmp_path) as server:
            for second in seconds.values():
                await server.restore(0, "a.bin")
                turns.append(await server.ask(second))
        return turns

    lives = go(live())
    assert [t.timings.cache_n for t in lives] == list(FOUND.values())
    if setup.n_max:
        assert all(t.timings.draft_n_accepted for t in lives)
        assert any(t.timings.draft_n_accepted < t.timings.draft_n for t in lives)
    for again in (go(restored()), go(restarted())):
        assert [t.counts for t in again] == [t.counts for t in lives]
        assert [t.tokens for t in again] == [t.tokens for t in lives]
        assert [t.timings.cache_kind for t in again] == [t.timings.cache_kind for t in lives]


def test_without_the_restore_everything_is_processed(some_setup: Setup, tmp_path: Path) -> None:
    """The tests above have teeth: they would not pass by themselves."""
    setup = some_setup
    second = request(second_prompt(setup.path, setup.n_ubatch, PARTS["past"]), ANSWER)

    async def not_restored() -> Turn:
        async with serve(setup, tmp_path) as server:
            await server.ask(request(first_prompt(setup.path), ANSWER))
            await server.save(0, "a.bin")
            await overwrite(server)
            return await server.ask(second)

    assert go(not_restored()).counts[:2] == (0, len(second.prompt))


def test_ten_turns_with_a_save_and_restore_between_any_two(some_setup: Setup, tmp_path: Path) -> None:
    setup = some_setup

    async def conversation(interrupted: bool) -> list[tuple[tuple[int, int, int, int], list[int]]]:
        seen = []
        talk: list[dict[str, str]] = []
        async with serve(setup, tmp_path) as server:
            for i in range(10):
                talk.append({"role": "user", "content": f"Tell me {i + 1} things about the sea."})
                turn = await server.ask(request(chat(server.core.model, talk), 12, ignore_eos=False))
                talk.append({"role": "assistant", "content": turn.text})
                seen.append((turn.counts, turn.tokens))
                if interrupted:
                    await server.save(0, "talk.bin")
                    await overwrite(server)
                    await server.restore(0, "talk.bin")
        return seen

    plain = go(conversation(False))
    assert go(conversation(True)) == plain
    kept = [counts[0] for counts, _ in plain]
    assert kept == sorted(set(kept))


def test_an_edited_message_far_back_finds_its_checkpoint_after_a_restart(tmp_path: Path) -> None:
    """The boundary of an early turn is still there ten turns later, live and restored."""
    setup = KINDS["hybrid"]
    model = model_of(HYBRID)
    talk: list[dict[str, str]] = []
    for i in range(6):
        talk += [
            {"role": "user", "content": f"Question {i}?"},
            {"role": "assistant", "content": f"Yes, {i}."},
        ]

    async def main() -> None:
        async with serve(setup, tmp_path) as server:
            for n in range(1, 12, 2):
                prompt = chat(model, talk[:n])
                await server.ask(request(prompt, 4))
                if n == 5:
                    edited_at = prompt.boundaries[0]
            await server.save(0, "talk.bin")
        async with serve(setup, tmp_path) as server:
            await server.restore(0, "talk.bin")
            edited = chat(model, [*talk[:4], {"role": "user", "content": "Something else?"}])
            turn = await server.ask(request(edited, 4))
            assert turn.timings.cache_n == edited_at

    go(main())


# -- a process of its own

SCRIPT = """
import asyncio, json, sys
from pathlib import Path
from tests.engine.harness import request, serve
from tests.engine.test_kept_checkpoints import KINDS, second_prompt

async def main(kind, directory, spill, at):
    setup = KINDS[kind].but(spill=Path(spill) if spill else None)
    async with serve(setup, Path(directory)) as server:
        if at is None:
            from tests.engine.test_kept_checkpoints import ANSWER, first_prompt
            await server.ask(request(first_prompt(setup.path), ANSWER))
            await server.save(0, "a.bin")
            return
        await server.restore(0, "a.bin")
        second = second_prompt(setup.path, setup.n_ubatch, at)
        turn = await server.ask(request(second, 16))
        print(json.dumps({"counts": turn.counts, "tokens": turn.tokens}))

asyncio.run(main(*json.loads(sys.argv[1])))
"""


def in_a_new_process(*given: object) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, json.dumps(given)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return dict(json.loads(done.stdout)) if done.stdout else {}


@pytest.mark.parametrize(("kind", "spilled"), [("hybrid", True), ("window", False)])
def test_saved_by_one_process_and_restored_by_another(kind: str, spilled: bool, tmp_path: Path) -> None:
    setup = KINDS[kind]
    spill = str(tmp_path / "spill") if spilled else None
    in_a_new_process(kind, str(tmp_path), spill, None)
    at = PARTS["past"]
    found = in_a_new_process(kind, str(tmp_path), spill, at)

    async def live() -> Turn:
        async with serve(setup, tmp_path / "live") as server:
            await server.ask(request(first_prompt(setup.path), ANSWER))
            return await server.ask(request(second_prompt(setup.path, setup.n_ubatch, at), ANSWER))

    turn = go(live())
    assert found == {"counts": list(turn.counts), "tokens": turn.tokens}
    assert found["counts"][0] == FOUND["past"]


# -- several slots


@pytest.mark.parametrize("kv_unified", [False, True], ids=["streams", "unified"])
@pytest.mark.parametrize("kind", ["hybrid", "window"])
def test_checkpoints_move_between_slots_and_numbers_of_slots(
    kind: str, kv_unified: bool, tmp_path: Path
) -> None:
    one = KINDS[kind]
    three = one.but(n_slots=3, kv_unified=kv_unified)
    first = request(first_prompt(one.path), ANSWER)
    second = second_prompt(one.path, one.n_ubatch, PARTS["past"])

    async def there_and_back(a: Setup, slot_a: int, b: Setup, slot_b: int) -> Turn:
        async with serve(a, tmp_path) as server:
            await server.ask(request(first.prompt, ANSWER, id_slot=slot_a))
            await server.save(slot_a, "a.bin")
        async with serve(b, tmp_path) as server:
            await server.restore(slot_b, "a.bin")
            return await server.ask(request(second, ANSWER, id_slot=slot_b))

    expected = go(there_and_back(one, 0, one, 0))
    for way in ((one, 0, three, 2), (three, 1, one, 0), (three, 0, three, 2)):
        turn = go(there_and_back(*way))
        assert turn.counts == expected.counts
        if not kv_unified:  # shared cells round differently
            assert turn.tokens == expected.tokens


# -- files that hold more, less or other checkpoints


async def a_saved_slot(setup: Setup, directory: Path) -> None:
    async with serve(setup, directory) as server:
        await server.ask(request(first_prompt(setup.path), ANSWER))
        await server.save(0, "a.bin")


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


# -- exact append, erase


@pytest.mark.parametrize("kind", ["hybrid", "window"])
def test_an_exact_append_after_a_restart_reuses_all(kind: str, tmp_path: Path) -> None:
    setup = KINDS[kind]
    model = model_of(setup.path)
    prompt = filler(model, 1000, 1)

    async def main() -> None:
        async with serve(setup, tmp_path) as server:
            said = (await server.ask(request(prompt, 8))).tokens
            await server.save(0, "a.bin")
        follow = [*prompt.tokens, *said, *filler(model, 20, 2).tokens]
        async with serve(setup, tmp_path) as server:
            report = await server.restore(0, "a.bin")
            turn = await server.ask(request(follow, 4))
            assert turn.timings.cache_n == report.n_reusable == 1007
            assert turn.timings.cache_n + turn.timings.prompt_n == len(follow)

    go(main())


def test_an_erased_slot_has_nothing_left(some_setup: Setup, tmp_path: Path) -> None:
    setup = some_setup

    async def main() -> None:
        async with serve(setup, tmp_path) as server:
            await server.ask(request(first_prompt(setup.path), ANSWER))
            assert (await server.erase(0)).n_erased == 344 + ANSWER - 1
            facts = slot_facts(server.core, server.core.slots[0])
            assert (facts["n_tokens"], facts["checkpoints"]) == (0, [])
            assert server.core.drafter.n_tokens(0) == 0
            saved = await server.save(0, "empty.bin")
            assert (saved.n_saved, saved.n_ckpt_saved) == (0, 0)

    go(main())


@pytest.mark.slow
def test_thirty_long_prompts_erased_one_after_the_other_leave_no_memory(tmp_path: Path) -> None:
    setup = Setup(HYBRID, n_ctx=4096, n_ubatch=256)
    prompt = filler(model_of(HYBRID), 4000, 1)

    async def main() -> list[int]:
        resident = []
        async with serve(setup, tmp_path) as server:
            for _ in range(30):
                await server.ask(request(prompt, 2, cache_prompt=False))
                assert len(server.core.slots[0].checkpoints) > 10
                await server.erase(0)
                resident.append(resident_bytes())
        return resident

    resident = go(main())
    assert max(resident[3:]) < 1.05 * resident[2]


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096
