"""Many clients at once: equal answers, no request lost, no slot held by a client that went away."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from tests.e2e.conftest import Start
from tests.e2e.rounding import Parting, Shape, first_difference, judge_all, judged, opened, replay
from tests.e2e.served import PAIRS, Answer, Served, answer_of, body_of, flags, until
from tests.e2e.texts import chat_prompts, prompt_of

SLOTS = 4
# How many answers part depends on who shared batches with whom, so on the clock. That each parting is rounding is
# proven by a replay of all slots; the share only tells a crowd from a collapse. In a unified cache logits move as
# soon as another slot holds cells, and most answers part sooner or later.
CROWD_SHARE = {"-no-kvu": 0.5, "-kvu": 1.0}


@pytest.fixture(scope="module")
def quick(start_server: Start) -> Iterator[Served]:
    """Four slots of a small model that drafts for itself."""
    server = start_server(flags("self", slots=SLOTS, ctx=8192))
    yield server
    server.stop()


@pytest.fixture(autouse=True)
def _idle_after(request: pytest.FixtureRequest) -> Iterator[None]:
    """Whatever a test did, every slot has to be free again."""
    yield
    if "quick" in request.fixturenames:
        server: Served = request.getfixturevalue("quick")
        assert until(lambda: server.busy() == [], 3.0)
        server.erase_all()


def streamed(server: Served, prompt: Sequence[int], n: int, slot: int = -1) -> Answer:
    """The same as `ask`, put together from the events of a stream."""
    body = {**body_of(prompt, n, slot, ignore_eos=True), "stream": True}
    texts: list[str] = []
    tokens: list[int] = []
    last: dict[str, object] = {}
    with (
        httpx.Client(base_url=server.base_url, timeout=120) as http,
        http.stream("POST", "/completion", json=body) as r,
    ):
        assert r.status_code == 200
        for line in r.iter_lines():
            if line:
                last = json.loads(line.removeprefix("data: "))
                texts.append(str(last["content"]))
                tokens += last["tokens"]
    assert last["stop"] is True
    return answer_of(prompt, {**last, "content": "".join(texts), "tokens": tokens})


def at_once(jobs: Sequence[Callable[[], Answer]]) -> list[Answer]:
    with ThreadPoolExecutor(len(jobs)) as threads:
        return list(threads.map(lambda job: job(), jobs))


def alone(server: Served, prompts: Sequence[Sequence[int]], n: int) -> list[Answer]:
    """One client, one request at a time, each on an empty slot."""
    answers = []
    for prompt in prompts:
        server.erase_all()
        answers.append(server.ask(prompt, n, 0, ignore_eos=True))
    server.erase_all()
    return answers


def partings(single: Sequence[Answer], crowd: Sequence[Answer], shape: Shape) -> list[Parting | None]:
    """Replays all of the crowd's steps together, neighbours and all, where one of its answers parts."""
    at = [first_difference(a.tokens, b.tokens) for a, b in zip(single, crowd, strict=True)]
    if not any(index is not None for index in at):
        return [None] * len(single)
    with opened(shape) as model:
        of_crowd = replay(crowd, shape, model)
        found: list[Parting | None] = []
        for i, index in enumerate(at):
            if index is None:
                found.append(None)
            else:
                [of_single] = replay([single[i]], shape, model)
                found.append(judged(single[i], crowd[i], of_single, of_crowd[i], index, True))
    return found


# -- equal answers


def compared(server: Served, shape: Shape, n: int) -> str:
    prompts = [prompt for prompt in chat_prompts(server, 14) if len(prompt) < 110][:8]
    single = alone(server, prompts, n)
    crowd = at_once([lambda p=prompt: streamed(server, p, n) for prompt in prompts])
    assert [len(answer.tokens) for answer in crowd] == [n] * len(prompts)
    assert {answer.id_slot for answer in crowd} == set(range(SLOTS))
    assert all(answer.timings["draft_n"] > 0 for answer in crowd)
    for one, other in zip(single, crowd, strict=True):
        if one.tokens == other.tokens:
            assert one.text == other.text
    return judge_all(partings(single, crowd, shape), CROWD_SHARE["-kvu" if shape.unified else "-no-kvu"])


@pytest.mark.parametrize("switch", CROWD_SHARE)
def test_eight_streaming_clients_get_the_answers_that_one_client_gets(
    start_server: Start, switch: str
) -> None:
    server = start_server(flags("self", switch, slots=SLOTS))
    shape = Shape(PAIRS["self"][0], slots=SLOTS, unified=switch == "-kvu")
    print(compared(server, shape, 64))
    server.stop()


@pytest.mark.parametrize("switch", CROWD_SHARE)
def test_prompts_that_begin_in_one_step_lie_there_oldest_request_first(
    start_server: Start, switch: str
) -> None:
    """Whatever slots they got: a replay in the order of slots comes to other tokens, the recorded order to the same."""
    server = start_server(flags("self", switch, slots=SLOTS))
    prompts = [prompt for prompt in chat_prompts(server, 18) if len(prompt) < 110][:9]
    answers: list[Answer] = []
    for turn in range(3):  # from the second on there are cells that the turn before left

        def late(slot: int, turn: int = turn) -> Answer:
            # While slot 0 reads, the last slot's first.
            time.sleep(0.02 + 0.004 * (SLOTS - slot))
            return server.ask(prompts[3 * turn + slot - 1], 48, slot, ignore_eos=True)

        first = prompt_of(server, 420, skip=3 * turn)
        jobs = [lambda p=first: server.ask(p, 48, 0, ignore_eos=True)]
        answers += at_once([*jobs, *(lambda slot=slot: late(slot) for slot in range(1, SLOTS))])
    shape = Shape(PAIRS["self"][0], slots=SLOTS, unified=switch == "-kvu")
    with opened(shape) as model:
        replay(answers, shape, model)
    server.stop()


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("switch", CROWD_SHARE)
def test_eight_clients_of_a_big_target_get_the_answers_that_one_client_gets(
    start_server: Start, switch: str
) -> None:
    server = start_server(flags("real", switch, slots=SLOTS))
    shape = Shape(PAIRS["real"][0], slots=SLOTS, unified=switch == "-kvu")
    print(compared(server, shape, 32))
    server.stop()


def test_three_rounds_of_streams_and_whole_answers_at_once_all_end_well(quick: Served) -> None:
    shape = Shape(PAIRS["self"][0], slots=SLOTS, ctx=8192)
    prompts = [p for p in chat_prompts(quick, 16) if len(p) < 110][:10]
    single = alone(quick, prompts, 32)
    found: list[Parting | None] = []
    for _ in range(3):
        quick.erase_all()
        jobs = [lambda p=prompt: streamed(quick, p, 32) for prompt in prompts[:8]]
        jobs += [lambda p=prompt: quick.ask(p, 32, -1, ignore_eos=True) for prompt in prompts[8:]]
        found += partings(single, at_once(jobs), shape)
    print(judge_all(found, CROWD_SHARE["-no-kvu"]))
    assert quick.get("/health") == {"status": "ok"}
    assert len(quick.ask(prompts[0], 4, ignore_eos=True).tokens) == 4


# -- clients that go away


class Gone:
    """A request on a raw socket that is closed whenever the test wants."""

    def __init__(self, server: Served, path: str, body: dict[str, object]) -> None:
        host, port = server.base_url.removeprefix("http://").split(":")
        data = json.dumps(body).encode()
        lines = (f"POST {path} HTTP/1.1", "Host: x", f"Content-Length: {len(data)}", "", "")
        self.socket = socket.create_connection((host, int(port)), timeout=30)
        self.socket.sendall("\r\n".join(lines).encode() + data)
        self.received = b""

    def wait_for(self, n_events: int) -> None:
        while self.received.count(b"data: ") < n_events:
            data = self.socket.recv(65536)
            assert data, self.received
            self.received += data

    def close(self) -> None:
        self.socket.close()


def assert_stopped(server: Served, seconds: float = 2.0) -> None:
    assert until(lambda: server.busy() == [], seconds)
    steps = server.metrics()["n_steps_total"]
    time.sleep(0.2)
    assert server.metrics()["n_steps_total"] == steps


def endless(prompt: Sequence[int], slot: int, *, stream: bool) -> dict[str, object]:
    return {**body_of(prompt, 6000, slot, ignore_eos=True), "stream": stream, "trace": False}


@pytest.mark.parametrize("path", ["/completion", "/v1/completions"])
def test_a_client_that_leaves_a_stream_frees_its_slot(quick: Served, path: str) -> None:
    client = Gone(quick, path, endless(prompt_of(quick, 40), 2, stream=True))
    client.wait_for(3)
    assert quick.busy() == [2]
    client.close()
    assert_stopped(quick)


def test_a_client_that_leaves_before_a_whole_answer_frees_its_slot(quick: Served) -> None:
    client = Gone(quick, "/completion", endless(prompt_of(quick, 40), 1, stream=False))
    assert until(lambda: quick.busy() == [1], 2.0)
    time.sleep(0.2)
    assert quick.busy() == [1]
    client.close()
    assert_stopped(quick)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_during_the_prompt_frees_its_slot(quick: Served, stream: bool) -> None:
    """And what was processed of the prompt stays, as whole micro-batches, for the next one that begins so."""
    prompt = prompt_of(quick, 2400) * 3
    client = Gone(quick, "/completion", endless(prompt, 3, stream=stream))
    assert until(lambda: quick.get("/slots")[3]["n_tokens"] > 0, 5.0)
    client.close()
    assert_stopped(quick)
    held = quick.get("/slots")[3]["n_tokens"]
    assert 0 < held < len(prompt)
    assert held % 512 == 0
    assert quick.ask(prompt[: held + 5], 1, 3).timings["cache_n"] == held


def test_a_client_that_leaves_the_queue_is_never_served(quick: Served) -> None:
    busy = [
        Gone(quick, "/completion", endless(prompt_of(quick, 40), slot, stream=True)) for slot in range(SLOTS)
    ]
    for client in busy:
        client.wait_for(1)
    waiting = Gone(quick, "/completion", endless(prompt_of(quick, 60), -1, stream=True))
    assert until(lambda: quick.metrics()["requests_deferred"] == 1, 2.0)
    waiting.close()
    assert until(lambda: quick.metrics()["requests_deferred"] == 0, 2.0)
    assert quick.busy() == [0, 1, 2, 3]
    for client in busy:
        client.close()
    assert_stopped(quick)


def test_fifty_clients_that_leave_at_any_time_leave_all_slots_free(quick: Served) -> None:
    prompts = [prompt_of(quick, 30 + 37 * i, skip=i % 7) for i in range(50)]
    before = quick.metrics()["requests_total"]

    def leave(i: int) -> None:
        client = Gone(quick, "/completion", endless(prompts[i], -1, stream=i % 5 != 4))
        if i % 5 < 3:
            client.wait_for(1 + i % 3)  # else: while waiting, during its prompt, or in mid-answer
        else:
            time.sleep(0.01 * i)
        client.close()

    threads = [threading.Thread(target=leave, args=(i,)) for i in range(50)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert_stopped(quick)
    assert quick.metrics()["requests_deferred"] == 0
    # None of them was served to its end.
    assert quick.metrics()["requests_total"] == before
    crowd = at_once([lambda p=prompt: streamed(quick, p, 16) for prompt in prompts[:8]])
    assert [len(answer.tokens) for answer in crowd] == [16] * 8


# -- status routes


def test_status_routes_do_not_wait_for_the_model(quick: Served) -> None:
    """During a long prompt and a long answer."""
    jobs = [
        Gone(quick, "/completion", endless(prompt_of(quick, 2600) * 3, 0, stream=True)),
        Gone(quick, "/completion", endless(prompt_of(quick, 40), 1, stream=True)),
    ]
    assert until(lambda: quick.busy() == [0, 1], 3.0)
    slowest = 0.0
    for _ in range(8):
        for path in ("/health", "/slots", "/metrics", "/props", "/v1/models"):
            started = time.monotonic()
            assert quick.http.get(path).status_code == 200
            slowest = max(slowest, time.monotonic() - started)
        time.sleep(0.1)
    assert 1 in quick.busy()
    for job in jobs:
        job.close()
    assert slowest < 1.0
    assert_stopped(quick)
