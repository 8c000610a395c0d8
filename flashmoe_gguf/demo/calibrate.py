"""Text to measure the dense model on: our own prompts, answered by the dense model itself.

Answers are the distribution that the embedded model has to be good at, and no corpus need be
shipped. Greedy, in fixed waves of sequences, with fixed threads: the same tokens every time.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flashmoe_gguf.errors import ModelFileError

# What the model's chat template puts before the first message when there is no system message.
SYSTEM = (
    "<|im_start|>system\n"
    "You are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
)
_WAVE = 50  # sequences decoded together: enough to amortise reading the weights
_PROMPT_GROUP = 10
_BATCH_TOKENS = 2048
_SEQUENCE_TOKENS = 160  # cells per sequence: the longest prompt and its answer
_THREADS = 2


@dataclass(frozen=True)
class Text:
    """Token ids: one prefix that all sequences share, and each sequence's own tokens after it."""

    prefix: tuple[int, ...]
    sequences: tuple[tuple[int, ...], ...]

    @property
    def n_tokens(self) -> int:
        return len(self.prefix) + sum(map(len, self.sequences))


def prompts() -> list[str]:
    """The prompts shipped with the package, one per line."""
    text = resources.files(__package__).joinpath("prompts.txt").read_text(encoding="utf-8")
    return [line for line in text.splitlines() if line]


def answer_prompts(
    path: Path, questions: Sequence[str], n_answer: int, progress: Callable[[float], None]
) -> Text:
    """Chats each question with the dense model at `path`, `n_answer` tokens of answer at most.

    `progress` gets the fraction done, several times a second. Raises ModelFileError when
    llama.cpp cannot load or run the model.
    """
    llama_cpp = _llama_cpp()
    logger = logging.getLogger("llama-cpp-python")
    level = logger.level
    logger.setLevel(logging.ERROR)  # llama.cpp logs to stderr through it
    try:
        with _Decoder(llama_cpp, path) as decoder:
            return decoder.answer(questions, n_answer, progress)
    finally:
        logger.setLevel(level)


def _llama_cpp() -> ModuleType:
    # A dense model runs the same on the stock and the patched libraries: use what is loaded.
    if "llama_cpp" in sys.modules:
        return sys.modules["llama_cpp"]
    from flashmoe_gguf.libs import load_llama_cpp

    return load_llama_cpp()


@dataclass(frozen=True)
class _Item:
    token: int
    position: int
    sequence: int
    wants_logits: bool


class _Decoder:
    """A llama.cpp model with a context for a wave of sequences that share a prefix."""

    def __init__(self, llama_cpp: ModuleType, path: Path) -> None:
        self._api: Any = llama_cpp
        self._model: Any = None
        self._context: Any = None
        self._batch: Any = None
        self._path = path

    def __enter__(self) -> _Decoder:
        api = self._api
        api.llama_backend_init()
        model_options = api.llama_model_default_params()
        model_options.use_extra_bufts = False  # repacked kernels differ in low bits by CPU
        self._model = api.llama_model_load_from_file(str(self._path).encode(), model_options)
        if not self._model:
            raise ModelFileError(f"llama.cpp cannot load {self._path}")
        self._vocab = api.llama_model_get_vocab(self._model)
        options = api.llama_context_default_params()
        options.n_seq_max = _WAVE + 1
        options.n_ctx = (_WAVE + 1) * _SEQUENCE_TOKENS
        options.kv_unified = True  # all sequences read the prefix's cells
        options.n_batch = _BATCH_TOKENS
        options.n_threads = options.n_threads_batch = _THREADS
        self._context = api.llama_init_from_model(self._model, options)
        if not self._context:
            self.__exit__()
            raise ModelFileError(f"llama.cpp cannot make a context for {self._path}")
        self._batch = api.llama_batch_init(_BATCH_TOKENS, 0, 1)
        return self

    def __exit__(self, *_: object) -> None:
        if self._batch is not None:
            self._api.llama_batch_free(self._batch)
        if self._context:
            self._api.llama_free(self._context)
        if self._model:
            self._api.llama_model_free(self._model)
        self._model = self._context = self._batch = None

    def answer(
        self, questions: Sequence[str], n_answer: int, progress: Callable[[float], None]
    ) -> Text:
        progress(0.0)
        prefix = self._tokenize(SYSTEM)
        self._decode([_Item(token, i, _WAVE, False) for i, token in enumerate(prefix)])
        done: list[tuple[int, ...]] = []
        n_waves = -(-len(questions) // _WAVE)
        for wave in range(n_waves):
            chunk = questions[wave * _WAVE : (wave + 1) * _WAVE]
            sequences = [
                self._tokenize(f"<|im_start|>user\n{q}<|im_end|>\n<|im_start|>assistant\n")
                for q in chunk
            ]
            self._reset(len(sequences))
            for step in self._extend(sequences, len(prefix), n_answer):
                progress((wave + step / n_answer) / n_waves)
            done += map(tuple, sequences)
        return Text(prefix=tuple(prefix), sequences=tuple(done))

    def _extend(self, sequences: list[list[int]], start: int, n_answer: int) -> Iterator[int]:
        """Appends up to `n_answer` tokens to each sequence; yields often, the steps done so far."""
        live = list(range(len(sequences)))
        for step in range(n_answer):
            going = []
            # Whole prompts go in groups, so that there is progress to report between them.
            group = _PROMPT_GROUP if step == 0 else _WAVE
            for begin in range(0, len(live), group):
                indices = live[begin : begin + group]
                items = []
                for index in indices:
                    tokens = sequences[index]
                    last = len(tokens) - 1
                    first = 0 if step == 0 else last
                    items += [
                        _Item(tokens[i], start + i, index, i == last)
                        for i in range(first, last + 1)
                    ]
                for index, token in zip(indices, self._decode(items), strict=True):
                    # The end token stays: the split model has to stop where the dense one does.
                    sequences[index].append(token)
                    if not self._api.llama_vocab_is_eog(self._vocab, token):
                        going.append(index)
                yield step
            live = going
            if not live:
                return

    def _decode(self, items: Sequence[_Item]) -> list[int]:
        """Runs one batch; the most likely next token of each item that wants logits."""
        api, batch = self._api, self._batch
        n_vocab = api.llama_vocab_n_tokens(self._vocab)
        if len(items) > _BATCH_TOKENS:
            raise ValueError(f"{len(items)} tokens in a wave of prompts, {_BATCH_TOKENS} at most")
        for i, item in enumerate(items):
            batch.token[i] = item.token
            batch.pos[i] = item.position
            batch.n_seq_id[i] = 1
            batch.seq_id[i][0] = item.sequence
            batch.logits[i] = item.wants_logits
        batch.n_tokens = len(items)
        status = api.llama_decode(self._context, batch)
        if status != 0:
            raise ModelFileError(f"llama.cpp cannot run {self._path}: llama_decode gave {status}")
        chosen = []
        for i, item in enumerate(items):
            if item.wants_logits:
                logits: NDArray[np.float32] = np.ctypeslib.as_array(
                    api.llama_get_logits_ith(self._context, i), (n_vocab,)
                )
                chosen.append(int(logits.argmax()))
        return chosen

    def _reset(self, n_sequences: int) -> None:
        """Leaves only the prefix in the cache, as the start of each sequence."""
        memory = self._api.llama_get_memory(self._context)
        for index in range(_WAVE):
            self._api.llama_memory_seq_rm(memory, index, -1, -1)
        for index in range(n_sequences):
            self._api.llama_memory_seq_cp(memory, _WAVE, index, -1, -1)

    def _tokenize(self, text: str) -> list[int]:
        raw = text.encode()
        tokens = (self._api.llama_token * (len(raw) + 1))()
        n = self._api.llama_tokenize(self._vocab, raw, len(raw), tokens, len(tokens), False, True)
        return list(tokens[:n])
