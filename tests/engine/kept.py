"""What tests of saved and restored checkpoints share: prompts that part from a cached one, and servers to ask."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest

from spec_server.engine.checkpoints import CheckpointOptions
from tests.engine.harness import (
    HYBRID,
    WINDOW,
    Prompt,
    Server,
    Setup,
    filler,
    greedy,
    model_of,
    mtp,
    request,
    serve,
)
from tests.fakes_engine import mixed, scripted

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
MOST = [*FEW, ("hybrid-snapshots", False), ("window", True), ("mtp", True)]


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


async def a_saved_slot(setup: Setup, directory: Path) -> None:
    async with serve(setup, directory) as server:
        await server.ask(request(first_prompt(setup.path), ANSWER))
        await server.save(0, "a.bin")
