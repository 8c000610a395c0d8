"""Completions and conversations against a scripted engine: no model, every ending."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashmoe_gguf.chat import ChatSession, Completion, Sampling
from flashmoe_gguf.chat.completion import StopFilter, Summary
from flashmoe_gguf.chat.engine import Message
from flashmoe_gguf.errors import ExpertReadError, OptionError

END = 256
MARKERS = ("<|channel|>", "<|message|>", "<|end|>", "<|start|>", "<|other|>")
CHANNEL, MESSAGE, MESSAGE_END, START, OTHER = range(END + 1, END + 6)
READ_ERROR = ExpertReadError(file="m.gguf", layer=1, expert=2, tensor="t", errno=5)


class Script:
    """An engine whose tokens are bytes (and END), and whose answers are given beforehand.

    `events` may hold exceptions to raise in place of a token, and functions to call before one.
    Tokens already in the context are not computed again, as in llama.cpp.
    """

    def __init__(self, *answers: Sequence[object], n_ctx: int = 1000) -> None:
        self.answers = list(answers)
        self.prompts: list[str] = []
        self.samplings: list[Sampling] = []
        self.n_ctx = n_ctx
        self.computed_tokens = 0
        self.context: list[int] = []
        self.aborts_in_decode: list[bool] = []

    def tokenize(self, text: str) -> list[int]:
        return list(text.encode())

    def tokenize_prompt(self, text: str) -> list[int]:
        return self.tokenize(text)

    def piece(self, token: int) -> bytes:
        return bytes([token]) if token < END else b""

    def marker(self, token: int) -> str:
        return MARKERS[token - END - 1]

    def is_end(self, token: int) -> bool:
        return token == END

    def render(self, messages: Sequence[Message]) -> str:
        return "".join(f"<{m['role'][0]}>{m['content']}" for m in messages) + "<a>"

    def generate(
        self, tokens: Sequence[int], sampling: Sampling, stopped: Callable[[], bool]
    ) -> Generator[int, None, None]:
        self.prompts.append(bytes(tokens).decode())
        self.samplings.append(sampling)
        known = 0
        while known < min(len(tokens), len(self.context)) and self.context[known] == tokens[known]:
            known += 1
        self._compute(len(tokens) - known)
        self.context = list(tokens)
        for event in self.answers.pop(0):
            if callable(event):
                event()
                if stopped():
                    return
                continue
            if isinstance(event, Exception):
                raise event
            assert isinstance(event, int)
            yield event
            self._compute(1)
            self.context.append(event)

    def _compute(self, count: int) -> None:
        self.computed_tokens += count

    def interruptible(self, wanted: bool) -> None:
        self.aborts_in_decode.append(wanted)

    def progress(self) -> tuple[float, int] | None:
        return (1.0, 2)

    def stats(self) -> None:
        return None


def said(text: str) -> list[object]:
    return [*text.encode(), END]


def complete(engine: Script, prompt: str = "p", **options: object) -> tuple[list[str], Summary]:
    completion = Completion(engine, engine.tokenize(prompt), **options)  # type: ignore[arg-type]
    return list(completion.text()), completion.summary()


def test_pieces_come_one_by_one_and_end_with_the_model() -> None:
    pieces, summary = complete(Script(said("abc")), "hello")
    assert pieces == ["a", "b", "c"]
    assert summary.finish == "stop"
    assert (summary.prompt_tokens, summary.answer_tokens, summary.decode_tokens) == (5, 3, 3)
    assert summary.cache is None and summary.wait_share == 0.0


def test_characters_are_whole() -> None:
    pieces, _ = complete(Script(said("é漢😀")))
    assert pieces == ["é", "漢", "😀"]


def test_half_a_character_at_the_end_is_marked() -> None:
    pieces, _ = complete(Script([ord("a"), 0xE6, 0xBC, END]))
    assert pieces == ["a", "\ufffd"]


def test_only_the_final_channel_is_the_answer() -> None:
    thoughts = [CHANNEL, *b"analysis", MESSAGE, *b"easy: 4", MESSAGE_END]
    call = [START, *b"assistant", CHANNEL, *b"commentary to=f", MESSAGE, *b"{}", MESSAGE_END]
    final = [START, *b"assistant", CHANNEL, *b"final", MESSAGE, *b"It is ", OTHER, *b"4.", END]
    engine = Script([*thoughts, *call, *final], said("5"))
    session = ChatSession(engine)
    assert ask(session, "2 + 2") == "It is 4."
    assert session.messages[-1]["content"] == "It is 4."


def test_other_models_markers_hide_nothing() -> None:
    pieces, _ = complete(Script([*b"a", START, *b"b", MESSAGE, *b"c", OTHER, *b"d", END]))
    assert pieces == ["a", "b", "c", "d"]


@pytest.mark.parametrize(
    ("max_tokens", "n_ctx", "finish"), [(3, 99, "length"), (None, 4, "context")]
)
def test_limits(max_tokens: int | None, n_ctx: int, finish: str) -> None:
    pieces, summary = complete(Script(said("abcdef"), n_ctx=n_ctx), max_tokens=max_tokens)
    assert (pieces, summary.finish) == (["a", "b", "c"], finish)


def test_no_tokens_wanted_computes_nothing() -> None:
    engine = Script()
    pieces, summary = complete(engine, max_tokens=0)
    assert (pieces, summary.finish, engine.prompts) == ([], "length", [])


@pytest.mark.parametrize(
    ("prompt", "words"), [("", "prompt is empty"), ("x" * 9, "takes 9 tokens, the context holds 8")]
)
def test_prompts_that_cannot_be(prompt: str, words: str) -> None:
    with pytest.raises(OptionError, match=words) as caught:
        complete(Script(n_ctx=8), prompt)
    assert caught.value.hint


def test_stop_texts_are_held_back() -> None:
    pieces, summary = complete(Script(said("one, two; three")), stop=["; t", ", x"])
    assert "".join(pieces) == "one, two"
    assert summary.finish == "stop"
    pieces, summary = complete(Script(said("a; ")), stop=["; t"])
    assert "".join(pieces) == "a; "


@given(
    st.text("ab", max_size=20),
    st.lists(st.text("ab", min_size=1, max_size=4), max_size=3),
    st.lists(st.integers(0, 20), max_size=5),
)
def test_stop_filter_cuts_at_the_first_stop_text(
    text: str, stops: list[str], cuts: list[int]
) -> None:
    places = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    stop_filter = StopFilter(stops)
    shown = ""
    for start, end in pairwise(places):
        shown += stop_filter.feed(text[start:end])
        # nothing shown is ever taken back, and at most one stop text's length is held
        assert text.startswith(shown)
        if not stop_filter.found:
            assert end - len(shown) < max([len(s) for s in stops], default=1)
    shown += stop_filter.flush()
    first = [
        text[:end] for end in range(len(text) + 1) if any(text[:end].endswith(s) for s in stops)
    ]
    if not first:
        assert shown == text and not stop_filter.found
    else:
        assert stop_filter.found
        assert not any(stop in shown for stop in stops)


def test_cancel_between_tokens() -> None:
    engine = Script(said("abcdef"))
    completion = Completion(engine, [1])
    pieces = []
    for piece in completion.text():
        pieces.append(piece)
        if piece == "b":
            completion.cancel()
    assert pieces == ["a", "b"]
    assert completion.summary().finish == "cancelled"


def test_cancel_in_the_prompt() -> None:
    engine = Script([])
    completion = Completion(engine, [1, 2])
    engine.answers = [[completion.cancel, ord("a")]]
    assert list(completion.text()) == []
    summary = completion.summary()
    assert (summary.finish, summary.answer_tokens) == ("cancelled", 0)
    assert summary.prompt_tokens == 2  # the script computes all of it before it looks


def test_decode_is_interrupted_only_where_it_is_slow() -> None:
    engine = Script(said("ab"))
    completion = Completion(engine, [1])
    assert completion.progress() == (1.0, 2)
    assert list(completion.text()) == ["a", "b"]
    assert completion.progress() is None
    assert engine.aborts_in_decode[0] is True  # the prompt always is
    assert not any(engine.aborts_in_decode[1:])


def test_known_tokens_are_not_counted_again() -> None:
    engine = Script(said("x"), said("y"))
    complete(engine, "abc")
    _, summary = complete(engine, "abcdx")
    assert summary.prompt_tokens == 2


def ask(session: ChatSession, text: str) -> str:
    return "".join(session.ask(text))


def test_history_goes_into_the_next_prompt() -> None:
    engine = Script(said(" Paris."), said("Rome."))
    sampling = Sampling(temperature=0.0)
    session = ChatSession(engine, system="be brief", sampling=sampling)
    assert ask(session, "France?") == "Paris."  # the tokenizer's space is not the answer's
    assert ask(session, "Italy?") == "Rome."
    assert engine.prompts == [
        "<s>be brief<u>France?<a>",
        "<s>be brief<u>France?<a>Paris.<u>Italy?<a>",
    ]
    assert engine.samplings == [sampling, sampling]
    assert session.n_turns == 2
    session.clear()
    assert session.messages == [{"role": "system", "content": "be brief"}]


def test_a_full_context_drops_the_oldest_turns() -> None:
    engine = Script(said("A" * 17), said("B" * 17), said("C"), n_ctx=100)
    session = ChatSession(engine)
    assert [session.ask("1" * 17).dropped, session.ask("2").dropped] == [0, 0]
    assert ask(session, "1" * 17) == "A" * 17
    assert ask(session, "2" * 17) == "B" * 17
    # 3 + 17 + 3 + 17, twice, and this: 90 of 100 tokens leave less than an eighth
    turn = session.ask("3" * 4)
    assert turn.dropped == 1
    assert "".join(turn) == "C"
    assert engine.prompts[-1] == f"<u>{'2' * 17}<a>{'B' * 17}<u>3333<a>"


def test_a_message_that_cannot_fit() -> None:
    session = ChatSession(Script(said("fine"), n_ctx=20))
    ask(session, "short")
    with pytest.raises(OptionError, match="the message takes 36 tokens") as caught:
        session.ask("x" * 30)
    assert "--ctx" in caught.value.hint
    assert session.n_turns == 1  # nothing was dropped for it


def test_an_answer_cut_by_the_context_is_kept_and_dropped_next() -> None:
    engine = Script(said("A" * 50), said("B"), n_ctx=30)
    session = ChatSession(engine)
    turn = session.ask("hi")
    assert len("".join(turn)) == 22
    assert turn.summary().finish == "context"
    after = session.ask("again")
    assert after.dropped == 1
    assert "".join(after) == "B"


def test_a_failed_turn_leaves_no_trace() -> None:
    engine = Script(said("one"), [*b"tw", READ_ERROR], said("three"))
    session = ChatSession(engine)
    ask(session, "1")
    pieces = []
    with pytest.raises(ExpertReadError):
        for piece in session.ask("2"):
            pieces.append(piece)
    assert pieces == ["t", "w"]
    assert session.n_turns == 1
    assert ask(session, "3") == "three"
    assert engine.prompts[-1] == "<u>1<a>one<u>3<a>"


def test_a_cancelled_answer_counts_as_far_as_it_got() -> None:
    engine = Script(said("abcdef"), said("z"))
    session = ChatSession(engine)
    turn = session.ask("1")
    for piece in turn:
        if piece == "b":
            turn.cancel()
    assert session.messages[-1] == {"role": "assistant", "content": "ab"}


def test_a_turn_cancelled_in_the_prompt_is_forgotten() -> None:
    engine = Script([])
    session = ChatSession(engine)
    turn = session.ask("1")
    engine.answers = [[turn.cancel, ord("a")]]
    assert list(turn) == []
    assert session.n_turns == 0


def test_an_abandoned_turn_is_forgotten() -> None:
    session = ChatSession(Script(said("abc")))
    pieces = iter(session.ask("1"))
    assert next(pieces) == "a"
    pieces.close()
    assert session.n_turns == 0
