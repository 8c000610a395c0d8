"""A tiny random MoE model that can be talked to: letters for a vocabulary, and a chat template.

Its answers are nonsense, but depend on every token before them, so a token that is lost, or a
state that is mixed up with another request's, shows. `make_chat` writes it.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from gguf import TokenType

from . import archs
from .builder import Builder, Spec, Tensor

_LETTERS = [chr(c) for c in range(33, 127)]
_MARKERS = ["<unk>", "<s>", "<|im_end|>", "<|im_start|>"]
_VOCABULARY = [*_MARKERS, *(f"<0x{b:02X}>" for b in range(256)), "\u2581", *_LETTERS]
_SILENT = 4 + 256  # markers and bytes come first; of these only the end is ever likely

TEMPLATE = (
    "{% for message in messages %}{% if message['role'] == 'refused' %}"
    "{{ raise_exception('this role is refused') }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


class _ChatBuilder(Builder):
    n_vocab = len(_VOCABULARY)


def make_chat(path: Path, seed: int = 1, n_layer: int = 3, n_expert: int = 8) -> Path:
    """Writes the model and returns its path; another seed gives another one."""
    spec = Spec(
        "chat",
        "qwen3moe",
        "a vocabulary of letters and a chat template",
        archs.qwen3moe,
        n_layer=n_layer,
        n_expert=n_expert,
        seed=seed,
    )
    builder = _ChatBuilder(spec)
    spec.build(builder)
    _silence(builder)
    _add_vocabulary(builder)
    return builder.write(path)


def _silence(m: Builder) -> None:
    """Answers are letters: what is no text gets the logit 0, the end of an answer a random one."""
    i = next(i for i, t in enumerate(m.tensors) if t.name == "output.weight")
    rows = np.array(m.tensors[i].data)
    end = rows[_MARKERS.index("<|im_end|>")].copy()
    rows[:_SILENT] = 0
    rows[_MARKERS.index("<|im_end|>")] = end
    m.tensors[i] = Tensor("output.weight", m.tensors[i].qtype, rows)


def _add_vocabulary(m: Builder) -> None:
    kinds = [TokenType.UNKNOWN, *[TokenType.CONTROL] * 3, *[TokenType.BYTE] * 256]
    kinds += [TokenType.NORMAL] * (len(_LETTERS) + 1)
    m.metadata |= {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": _VOCABULARY,  # type: ignore[dict-item]
        "tokenizer.ggml.scores": [0.0] * len(_VOCABULARY),
        "tokenizer.ggml.token_type": [int(kind) for kind in kinds],
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.ggml.add_eos_token": False,
        "tokenizer.ggml.add_space_prefix": False,
        "tokenizer.chat_template": TEMPLATE,
    }
