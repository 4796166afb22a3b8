"""A slot that was saved and restored goes on as if nothing had happened, however its memory has to be rewound.

The measure is a slot that was never interrupted: same tokens, same counts, for a prompt that parts from the cached
one somewhere, with and without drafts, in the same server, in a new one and in a new process.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from spec_server.engine.report import slot_facts
from tests.engine.harness import HYBRID, ROOT, Setup, Turn, chat, filler, model_of, request, serve
from tests.engine.kept import (
    ANSWER,
    FEW,
    FOUND,
    KINDS,
    MOST,
    PARTS,
    cases,
    first_prompt,
    go,
    overwrite,
    second_prompt,
    setup_of,
)

pytestmark = pytest.mark.model


@pytest.fixture(params=cases(MOST))
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
from tests.engine.kept import KINDS, second_prompt

async def main(kind, directory, spill, at):
    setup = KINDS[kind].but(spill=Path(spill) if spill else None)
    async with serve(setup, Path(directory)) as server:
        if at is None:
            from tests.engine.kept import ANSWER, first_prompt
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
