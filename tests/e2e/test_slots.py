"""Slots do not mix: drafts of each come from its own state, and files of any size follow each other in one slot."""

from __future__ import annotations

import ctypes
from concurrent.futures import ThreadPoolExecutor

import pytest

from spec_server.runtime import _native
from tests.e2e.served import Answer, Served, differences
from tests.e2e.texts import chat_prompts, prompt_of, straight

GOOD = 0.98  # of a drafter that drafts for itself


def test_every_slot_drafts_with_its_own_state(double: Served) -> None:
    """The same prompt in one slot, in the other, and in both at once."""
    prompt = chat_prompts(double, 4)[3]
    alone = [double.ask(prompt, 96, slot, ignore_eos=True) for slot in (0, 1)]
    double.erase_all()
    with ThreadPoolExecutor(2) as threads:
        at_once = list(threads.map(lambda slot: double.ask(prompt, 96, slot, ignore_eos=True), (0, 1)))
    for answer in (*alone, *at_once):
        assert answer.timings["draft_n"] > 60
        assert answer.acceptance >= GOOD
    assert [answer.id_slot for answer in (*alone, *at_once)] == [0, 1, 0, 1]


def test_different_conversations_in_two_slots_at_once_draft_as_well_as_alone(double: Served) -> None:
    prompts = chat_prompts(double, 8)
    with ThreadPoolExecutor(2) as threads:
        answers = list(
            threads.map(lambda i: double.ask(prompts[i], 96, i % 2, ignore_eos=True), (3, 4, 5, 7))
        )
    for answer in answers:
        assert answer.acceptance >= GOOD


@pytest.mark.parametrize(("source", "goal"), [(0, 1), (1, 0)])
def test_a_slot_saved_here_and_restored_there_drafts_on(double: Served, source: int, goal: int) -> None:
    """While its own slot goes on with something else."""
    first = double.ask(chat_prompts(double, 5)[4], 64, source, ignore_eos=True)
    double.save(source, "moved.bin")
    live = double.ask(straight(double, first), 64, source, ignore_eos=True)
    double.ask(prompt_of(double, 100), 8, source)
    double.restore(goal, "moved.bin")
    got = double.ask(live.prompt, 64, goal, ignore_eos=True)
    assert got.acceptance >= GOOD
    assert differences(live, got) == {}


@pytest.mark.parametrize("key", ["id_slot", "slot_id"])
@pytest.mark.parametrize("slot", [0, 1])
def test_the_answer_says_which_slot_served(double: Served, key: str, slot: int) -> None:
    prompt = prompt_of(double, 10)
    body = {"prompt": prompt, "n_predict": 2, key: slot}
    assert double.post("/completion", body)["id_slot"] == slot
    messages = [{"role": "user", "content": "Hi"}]
    chat = double.post("/v1/chat/completions", {"messages": messages, "max_tokens": 2, key: slot})
    assert chat["id_slot"] == slot


@pytest.mark.parametrize("key", ["idslot", "slot", "slotid", "id-slot", "idSlot", "id_slots"])
def test_a_mistyped_slot_key_is_refused(double: Served, key: str) -> None:
    response = double.http.post("/completion", json={"prompt": "Hi", "n_predict": 2, key: 1})
    assert response.status_code == 400
    message = response.json()["error"]["message"]
    assert key in message
    assert "id_slot" in message


def test_two_names_for_two_slots_are_refused(double: Served) -> None:
    body = {"prompt": "Hi", "n_predict": 2, "id_slot": 0, "slot_id": 1}
    assert double.http.post("/completion", json=body).status_code == 400


# -- files of different sizes, one after the other

SIZES = (1000, 40, 500)
ORDERS = [(1000, 40, 1000), (40, 1000, 40), (500, 1000, 40, 500), (1000, 500, 40, 500, 1000)]


@pytest.fixture
def controls(double: Served) -> dict[int, Answer]:
    """A file per size, and what follows on the live slot."""
    controls = {}
    for size in SIZES:
        double.erase(1)
        prompt = prompt_of(double, size, skip=SIZES.index(size))
        double.ask(prompt, 1, 1)
        assert double.save(1, f"{size}.bin")["n_saved"] == size
        controls[size] = double.ask([*prompt, 500, 600], 3, 1, ignore_eos=True)
    return controls


@pytest.mark.parametrize("order", ORDERS, ids=lambda order: "-".join(map(str, order)))
def test_files_restore_in_any_order_of_size(
    double: Served, controls: dict[int, Answer], order: tuple[int, ...]
) -> None:
    for size in order:
        assert double.restore(1, f"{size}.bin")["n_restored"] == size
        got = double.ask(controls[size].prompt, 3, 1, ignore_eos=True)
        assert differences(controls[size], got) == {}


def test_other_text_of_the_same_size_would_show(double: Served, controls: dict[int, Answer]) -> None:
    """The comparison above finds a slot that holds something else."""
    double.restore(1, "40.bin")
    got = double.ask(controls[500].prompt, 3, 1, ignore_eos=True)
    assert {"cache_n", "prompt_n"} <= differences(controls[500], got).keys()


# -- sizes beyond 32 bits

STATE_SIZES = [
    "llama_state_seq_save_file",
    "llama_state_seq_load_file",
    "llama_state_seq_get_size",
    "llama_state_seq_get_size_ext",
    "llama_state_seq_get_data_ext",
    "llama_state_seq_set_data_ext",
]


@pytest.mark.parametrize("name", STATE_SIZES)
def test_the_binding_counts_bytes_in_64_bits(name: str) -> None:
    assert ctypes.sizeof(getattr(_native.lib, name).restype) == 8


@pytest.mark.parametrize("name", ["state_size", "state_get", "state_set"])
def test_our_calls_count_bytes_in_64_bits(name: str) -> None:
    call = getattr(_native, name)
    assert call.restype is ctypes.c_size_t
    assert call.argtypes.count(ctypes.c_size_t) == (0 if name == "state_size" else 1)
