"""Where an answer ends, what is counted, what sampling does: with drafts as without."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from tests.e2e.conftest import Start
from tests.e2e.served import Answer, Served, flags
from tests.e2e.texts import chat_prompts, prompt_of

CHAT = "/v1/chat/completions"
SMOLLM2_ENDS = {0, 2, 4}


@pytest.fixture(scope="module")
def small(start_server: Start) -> Iterator[Served]:
    """Little context, long drafts."""
    server = start_server(flags("self", "--spec-draft-n-max", "16", ctx=64))
    yield server
    server.stop()


def events(server: Served, path: str, body: dict[str, object]) -> list[dict[str, object]]:
    """Every line of a stream as JSON; each has to be whole UTF-8 of its own."""
    response = server.http.post(path, json={**body, "stream": True})
    assert response.status_code == 200, response.text
    lines = [line.decode("utf-8") for line in response.content.split(b"\n") if line]
    assert all(line.startswith("data: ") for line in lines)
    return [json.loads(line[6:]) for line in lines if line != "data: [DONE]"]


def ended_by_draft(answer: Answer) -> bool:
    """A drafted token that ends the answer stood as well, though it is in no context."""
    if not answer.rounds:
        return False
    last = answer.rounds[-1]
    return last["draft"][last["accepted"] : last["accepted"] + 1] == [answer.tokens[-1]]


def assert_counts(answer: Answer) -> None:
    """Every round gives what was accepted and one more; the first token comes with the prompt."""
    rounds, timings = answer.rounds, answer.timings
    assert timings["predicted_n"] == len(answer.tokens) == 1 + sum(r["accepted"] + 1 for r in rounds)
    assert timings["draft_n"] == sum(len(r["draft"]) for r in rounds)
    assert timings["draft_n_accepted"] == sum(r["accepted"] for r in rounds) + ended_by_draft(answer)
    assert timings["n_drafts"] == sum(bool(r["draft"]) for r in rounds)
    assert 0 <= timings["draft_n_accepted"] <= min(timings["draft_n"], timings["predicted_n"] - 1)
    position = len(answer.prompt) - 1
    done = 1
    for entry in rounds:
        n = entry["accepted"]
        assert entry["draft"][:n] == list(answer.tokens[done : done + n])
        done += n + 1
        position += n + 1
        assert entry["target_pos"] == position


# -- the context's end


@pytest.mark.parametrize("from_end", [1, 2, 5, 8, 17])
def test_near_the_end_of_the_context_drafts_get_shorter_and_the_answer_ends(
    small: Served, from_end: int
) -> None:
    n_ctx = small.get("/props")["n_ctx"]
    answer = small.ask(prompt_of(small, n_ctx - from_end), 64, ignore_eos=True)
    # A token for every free cell, and one that needs none.
    assert len(answer.tokens) == from_end + 1
    assert answer.stop_type == "limit"
    assert_counts(answer)
    assert all(entry["target_pos"] < n_ctx for entry in answer.rounds)
    assert len(small.ask(prompt_of(small, 20), 8, ignore_eos=True).tokens) == 8


@pytest.mark.parametrize("path", [CHAT, "/v1/completions"])
@pytest.mark.parametrize("stream", [False, True])
def test_running_out_of_context_keeps_the_text_and_says_length(
    small: Served, path: str, stream: bool
) -> None:
    n_ctx = small.get("/props")["n_ctx"]
    text = small.post("/detokenize", {"tokens": prompt_of(small, n_ctx - 90)})["content"]
    messages = [{"role": "user", "content": text}]
    body: dict[str, object] = {"messages": messages} if path == CHAT else {"prompt": text}
    body |= {"max_tokens": 500, "temperature": 0, "ignore_eos": True}
    if stream:
        chunks = events(small, path, {**body, "stream_options": {"include_usage": True}})
        usage = chunks[-1]["usage"]
        choices = [chunk["choices"][0] for chunk in chunks if chunk["choices"]]
        reason = choices[-1]["finish_reason"]
        texts = [c["delta"].get("content", "") if path == CHAT else c["text"] for c in choices]
        answer = "".join(texts)
    else:
        whole = small.post(path, body)
        usage, choice = whole["usage"], whole["choices"][0]
        reason = choice["finish_reason"]
        answer = choice["message"]["content"] if path == CHAT else choice["text"]
    assert reason == "length"
    assert usage["completion_tokens"] == n_ctx - usage["prompt_tokens"] + 1
    assert len(answer) > 20


def test_the_advertised_context_is_the_one_in_force(double: Served, start_server: Start) -> None:
    odd = start_server([*flags("self", slots=2), "-c", "1000"])
    for server in (odd, double):
        n_ctx = server.get("/props")["n_ctx"]
        assert server.get("/props")["default_generation_settings"]["n_ctx"] == n_ctx
        assert [slot["n_ctx"] for slot in server.get("/slots")] == [n_ctx, n_ctx]
        assert server.get("/v1/models")["data"][0]["meta"]["n_ctx"] == n_ctx
        assert len(server.ask(prompt_of(server, n_ctx - 16), 8, ignore_eos=True).tokens) == 8
        too_long = {"prompt": prompt_of(server, n_ctx + 1), "n_predict": 8}
        assert server.http.post("/completion", json=too_long).status_code == 400
    odd.stop()


# -- ends of answers


def test_what_was_accepted_behind_the_end_is_neither_counted_nor_kept(double: Served) -> None:
    """Stop strings at any place of a drafted block, and end tokens: the next turn finds exactly what was delivered."""
    prompt = chat_prompts(double, 5)[4]
    whole = double.ask(prompt, 64, ignore_eos=True, speculative={"n_max": 3})
    pieces = [double.post("/detokenize", {"tokens": [token]})["content"] for token in whole.tokens]
    for at in range(20, 28):
        double.erase(0)
        stop = "".join(pieces[at : at + 2])
        if not stop.strip() or whole.text.index(stop) != len("".join(pieces[:at])):
            continue
        answer = double.ask(prompt, 64, ignore_eos=True, stop=[stop])
        assert answer.stop_type == "word"
        assert answer.text == whole.text[: whole.text.index(stop)]
        assert len(answer.tokens) == at + 2
        assert_counts(answer)
        following = double.ask([*answer.prompt, *answer.tokens, 500], 1)
        assert following.timings["cache_n"] == len(answer.history)


@pytest.mark.parametrize("question", ["Hi", "What is 2+2?", "Say hello."])
def test_after_an_end_token_the_next_turn_reuses_prompt_and_answer(real: Served, question: str) -> None:
    answer = real.ask(real.chat_tokens([{"role": "user", "content": question}]), 100)
    assert answer.stop_type == "eos"
    assert answer.timings["draft_n_accepted"] > 0
    assert_counts(answer)
    # Nothing behind the end, and the end only once.
    assert answer.tokens.index(answer.tokens[-1]) == len(answer.tokens) - 1
    following = real.ask([*answer.prompt, *answer.tokens, *prompt_of(real, 20)], 4)
    assert following.timings["cache_n"] == len(answer.prompt) + len(answer.tokens) - 1


@pytest.mark.parametrize(
    "fields",
    [{}, {"temperature": 0.8, "seed": 5, "top_k": 0, "top_p": 1.0, "min_p": 0.0}],
    ids=["greedy", "sampled"],
)
def test_an_answer_that_ignores_the_end_has_no_end_token(real: Served, fields: dict[str, object]) -> None:
    prompt = real.chat_tokens([{"role": "user", "content": "What is 2+2?"}])
    ended = real.ask(prompt, 64, **fields)
    assert ended.stop_type == "eos"
    real.erase(0)
    answer = real.ask(prompt, 64, ignore_eos=True, **fields)
    assert (answer.stop_type, len(answer.tokens)) == ("limit", 64)
    assert not SMOLLM2_ENDS & set(answer.tokens)
    assert answer.tokens[: len(ended.tokens) - 1] == ended.tokens[:-1]
    assert answer.timings["draft_n_accepted"] > 0
    assert_counts(answer)


def test_counts_describe_what_was_delivered(double: Served, real: Served) -> None:
    for i, prompt in enumerate(chat_prompts(double, 30)):
        assert_counts(double.ask(prompt, 1 + i % 9, i % 2))
    for i, prompt in enumerate(chat_prompts(real, 4)):
        assert_counts(real.ask(prompt, 5 + i))


def test_a_single_token_is_answered_without_a_draft(double: Served) -> None:
    timings = double.ask(prompt_of(double, 30), 1).timings
    assert (timings["predicted_n"], timings["draft_n"], timings["draft_n_accepted"]) == (1, 0, 0)


# -- sampling


def sampled(server: Served, prompt: list[int], **fields: object) -> str:
    return str(server.post("/completion", {"prompt": prompt, "n_predict": 24, **fields})["content"])


def test_temperature_varies_the_text_and_temperature_0_does_not(double: Served) -> None:
    prompt = chat_prompts(double, 2)[1]
    assert len({sampled(double, prompt, temperature=1.2) for _ in range(10)}) >= 5
    assert len({sampled(double, prompt, temperature=0) for _ in range(4)}) == 1


def test_a_seed_gives_its_text_again(double: Served) -> None:
    prompt = chat_prompts(double, 2)[1]
    texts = {seed: sampled(double, prompt, temperature=1.2, seed=seed) for seed in range(4)}
    assert len(set(texts.values())) > 1
    for seed, text in texts.items():
        assert sampled(double, prompt, temperature=1.2, seed=seed) == text


@pytest.mark.parametrize("narrow", [{"top_k": 1}, {"top_p": 0.0, "top_k": 0}, {"min_p": 1.0, "top_k": 0}])
def test_a_narrow_sampler_at_high_temperature_is_greedy(double: Served, narrow: dict[str, float]) -> None:
    prompt = chat_prompts(double, 2)[1]
    assert sampled(double, prompt, temperature=1.2, **narrow) == sampled(double, prompt, temperature=0)


@pytest.mark.parametrize("speculative", [{}, {"type": "none"}], ids=["drafts", "no drafts"])
@pytest.mark.parametrize("temperature", [0, 0.8])
def test_a_banned_token_never_appears(
    double: Served, speculative: dict[str, object], temperature: float
) -> None:
    prompt = chat_prompts(double, 2)[1]
    free = double.ask(prompt, 48, ignore_eos=True)
    banned = max(set(free.tokens), key=free.tokens.count)
    fields = {"logit_bias": {str(banned): -100}, "temperature": temperature, "seed": 3}
    answer = double.ask(prompt, 48, ignore_eos=True, speculative=speculative, **fields)
    assert len(answer.tokens) == 48
    assert banned not in answer.tokens
    assert (answer.timings["draft_n"] > 0) == (not speculative)


# -- text in whole characters

# Gone on with, so that the answer is full of characters that take several tokens each.
PATTERNS = ["1 \U0001f642\n", "漢字\n", "日本語のテキスト。", "ďaleko ťažko žiť. "]


@pytest.mark.parametrize(
    ("path", "pattern"),
    [
        (CHAT, PATTERNS[0]),
        ("/completion", PATTERNS[1]),
        *(pytest.param("/completion", pattern, marks=pytest.mark.slow) for pattern in PATTERNS[2:]),
    ],
)
def test_characters_of_several_tokens_are_never_split_in_a_stream(
    real: Served, path: str, pattern: str
) -> None:
    text = pattern * (200 // len(pattern.encode()))
    messages = [{"role": "user", "content": "Go on."}, {"role": "assistant", "content": text}]
    body: dict[str, object] = {"messages": messages} if path == CHAT else {"prompt": text}
    for n in (16, 17):
        fields = {**body, "max_tokens": n, "temperature": 0, "ignore_eos": True}
        real.erase(0)
        chunks = events(real, path, fields)
        choices = [c["choices"][0] for c in chunks if path == CHAT and c["choices"]]
        deltas = [c["delta"].get("content", "") for c in choices] or [c["content"] for c in chunks]
        joined = "".join(deltas)
        assert sum(not char.isascii() for char in joined) >= 3
        # Only at the very end may there be a character that the limit cut off.
        assert "\ufffd" not in joined[:-1]
        real.erase(0)
        whole = real.post(path, fields)
        assert joined == (whole["choices"][0]["message"]["content"] if path == CHAT else whole["content"])
        assert whole["timings"]["draft_n_accepted"] > 0


def test_a_limit_in_mid_character_gives_no_broken_bytes(real: Served) -> None:
    """The first token of such a character alone: nothing to show but a replacement at the end."""
    for n in range(1, 7):
        body = {"prompt": PATTERNS[0] * 10, "n_predict": n, "temperature": 0}
        joined = "".join(str(chunk["content"]) for chunk in events(real, "/completion", body))
        assert joined.rstrip("\ufffd") in PATTERNS[0] * 4
        assert joined.count("\ufffd") <= 1


def test_token_ids_come_back_as_text_special_tokens_included(real: Served) -> None:
    text = "<|im_start|>user\nHi<|im_end|>"
    tokens = real.http.post("/tokenize", json={"content": text, "parse_special": True}).json()["tokens"]
    assert set(tokens) & {1, 2} == {1, 2}
    assert real.http.post("/detokenize", json={"tokens": tokens}).json() == {"content": text}
    answer = real.http.post("/completion", json={"prompt": tokens, "n_predict": 1}).json()
    assert answer["prompt"] == text
