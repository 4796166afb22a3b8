"""Transfers through the worker: what is given back, what goes on without its caller, what an end of the server does."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from pathlib import Path

import pytest

from persistence.files import SystemFiles
from persistence.reader import SlotFile
from spec_server.engine import transfer
from spec_server.engine.errors import EngineError, Unavailable
from spec_server.engine.scratch import Scratch
from tests.engine.harness import DRAFT, HYBRID, Setup, filler, request, serve

pytestmark = pytest.mark.model

SETUP = Setup(DRAFT, n_slots=2)


def tokens_of(path: Path) -> int:
    with SlotFile.open(path, SystemFiles()) as file:
        assert file.verify() == []
        return len(file.tokens)


def test_the_shared_buffer_goes_back_when_it_lies_idle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfer, "_IDLE_S", 0.1)
    made: list[Scratch] = []
    monkeypatch.setattr(transfer, "Scratch", lambda: made.append(Scratch()) or made[-1])

    async def run() -> None:
        async with serve(SETUP, tmp_path) as server:
            await server.ask(request(filler(server.core.model, 500), 2, id_slot=0))
            for _ in range(3):
                await server.save(0, "a")
                assert made[0].n_bytes > 500_000
                await server.restore(1, "a")
                assert made[0].n_bytes > 500_000
            await asyncio.sleep(0.5)
            assert made[0].n_bytes == 0
            assert (await server.restore(1, "a")).n_restored == 501

    asyncio.run(run())


@pytest.mark.parametrize("path", [DRAFT, HYBRID], ids=["full", "hybrid"])
def test_transfers_go_on_without_their_callers(tmp_path: Path, path: Path) -> None:
    """Saves and restores that nobody waits for any more never mix: each slot and file is of one talk."""

    async def run() -> None:
        async with serve(SETUP.but(path=path), tmp_path) as server:
            lengths = {0: 200, 1: 700}
            talks = {}
            for slot, n in lengths.items():
                prompt = filler(server.core.model, n, slot)
                first = await server.ask(request(prompt, 1, id_slot=slot))
                await server.save(slot, f"{slot}")
                follow_up = [*prompt.tokens, *first.tokens]
                talks[slot] = follow_up, (await server.ask(request(follow_up, 4, id_slot=slot))).tokens
                await server.restore(slot, f"{slot}")
            for i in range(60):
                slot = i % 2
                work = server.save(slot, "left") if i % 3 else server.restore(slot, f"{slot}")
                task = asyncio.ensure_future(work)
                for _ in range(i % 7):
                    await asyncio.sleep(0.0005)
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await task
            for slot, (follow_up, tokens) in talks.items():
                turn = await server.ask(request(follow_up, 4, id_slot=slot))
                assert (turn.timings.cache_n, turn.tokens) == (lengths[slot], tokens)
            await server.save(0, "last")
        # The last save may have waited until its slot's turn was over.
        assert tokens_of(tmp_path / "left") in {n + more for n in lengths.values() for more in (0, 4)}
        assert sorted(p.name for p in tmp_path.iterdir()) == ["0", "1", "last", "left"]

    asyncio.run(run())


def test_an_end_of_the_server_ends_transfers_and_leaves_whole_files(tmp_path: Path) -> None:
    async def run() -> list[object]:
        async with serve(SETUP, tmp_path) as server:
            for slot, n in ((0, 60), (1, 900)):
                await server.ask(request(filler(server.core.model, n, slot), 1, id_slot=slot))
                await server.save(slot, "a")
            busy = asyncio.ensure_future(
                server.ask(request(filler(server.core.model, 30, 5), 500, id_slot=0))
            )
            waiting = [server.save(0, "a"), server.save(1, "a"), server.restore(1, "a"), server.erase(0)]
            tasks = [asyncio.ensure_future(work) for work in waiting]
            await asyncio.sleep(0.05)
            await server.worker.close()
            results: list[object] = await asyncio.wait_for(
                asyncio.gather(busy, *tasks, return_exceptions=True), 20
            )
            return results

    results = asyncio.run(run())
    assert isinstance(results[0], Unavailable)
    assert all(isinstance(r, EngineError) or not isinstance(r, Exception) for r in results)
    assert tokens_of(tmp_path / "a") in (60, 900)
    assert [p.name for p in tmp_path.iterdir()] == ["a"]
