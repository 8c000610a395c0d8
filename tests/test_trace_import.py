"""Routes that other programs wrote: every layout that is read, and what is wrong with others."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from flashmoe_gguf.errors import TraceError
from flashmoe_gguf.trace import NO_EXPERT, Trace, import_routes

# BigMoeOnEdge, docs/telemetry.md: long format, last layer without most of the prompt.
ROUTE_TRACE = """\
# route_trace v1
# model=m.gguf arch=qwen3moe n_layer=2 n_expert=16 n_expert_used=2
# layer=0 expert_bytes=10 dense_bytes=20
turn,phase,step,layer,slot,expert,weight,residency,expert_bytes
0,0,0,0,0,3,0.75,0,10
0,0,0,0,1,1,0.25,0,10
0,0,1,0,0,2,0.5,0,10
0,0,1,0,1,1,nan,1,0
0,0,1,1,1,0,0.25,1,0
0,0,1,1,0,2,0.5,1,0
0,1,2,0,0,3,0.5,1,0
0,1,2,0,1,1,0.5,1,0
0,1,2,1,0,2,0.5,1,0
0,1,2,1,1,0,0.5,1,0
1,0,0,0,0,15,0.5,1,0
1,0,0,0,1,1,0.5,1,0
"""
TWO_TOKENS = [[[3, 1], [2, 0]], [[1, 3], [0, 5]]]


def load(tmp_path: Path, text: str, n_expert: int | None = None) -> Trace:
    (tmp_path / "routes").write_text(text, encoding="utf-8")
    return import_routes(tmp_path / "routes", n_expert)


def test_a_route_trace(tmp_path: Path) -> None:
    trace = load(tmp_path, ROUTE_TRACE)
    n = NO_EXPERT
    assert trace.experts.tolist() == [
        [[3, 1], [n, n]],
        [[2, 1], [2, 0]],
        [[3, 1], [2, 0]],
        [[15, 1], [n, n]],
    ]
    assert trace.seq.tolist() == [0, 3, 4]
    assert trace.n_expert.tolist() == [16, 16]
    assert trace.phase is not None and trace.phase.tolist() == [0, 0, 1, 0]
    assert trace.probs is not None
    assert trace.probs[1, 1].tolist() == [0.5, 0.25]
    assert np.isnan(trace.probs[1, 0, 1]) and np.isnan(trace.probs[0, 1, 0])


@pytest.mark.parametrize(
    "text",
    [
        "token,layer,experts\n0,0,3 1\n0,1,2 0\n1,0,1 3\n1,1,0 5\n",
        'Step,Layer,Experts\n1,0,"1,3"\n1,1,[0;5]\n0,0,3|1\n0,1,2 0\n',
        "pos,layer_idx,expert_0,expert_1\n0,0,3,1\n0,1,2,0\n1,0,1,3\n1,1,0,5\n",
        "token,layer,e1,e0\n0,0,1,3\n0,1,0,2\n1,0,3,1\n1,1,5,0\n",
        "token,layer,expert\n0,0,3\n0,0,1\n0,1,2\n0,1,0\n1,0,1\n1,0,3\n1,1,0\n1,1,5\n",
        '{"token":0,"layer":0,"experts":[3,1]}\n{"token":0,"layer":1,"experts":[2,0]}\n'
        '{"token":1,"layer":0,"experts":[1,3]}\n{"token":1,"layer":1,"experts":[0,5]}\n',
        '{"experts":[[3,1],[2,0]]}\n{"experts":[[1,3],[0,5]]}\n',
        '{"token":9,"routes":[[1,3],[0,5]]}\n{"token":4,"routes":[[3,1],[2,0]]}\n',
        "[[3,1],[2,0]]\n\n[[1,3],[0,5]]\n",
    ],
)
def test_layouts(tmp_path: Path, text: str) -> None:
    trace = load(tmp_path, text)
    assert trace.experts.tolist() == TWO_TOKENS
    assert trace.seq.tolist() == [0, 2]
    assert trace.n_expert.tolist() == [6, 6]
    assert trace.probs is None and trace.phase is None and trace.fingerprint == ""
    assert load(tmp_path, text, 9).n_expert.tolist() == [9, 9]


def test_what_json_lines_may_say_besides(tmp_path: Path) -> None:
    trace = load(
        tmp_path,
        '{"seq":"b","token":0,"layer":4,"experts":[3],"weights":[0.5],"phase":"prefill"}\n'
        '{"seq":"a","token":0,"layer":2,"experts":[1,2],"weights":[0.5,0.25],"phase":"decode"}\n',
    )
    n = NO_EXPERT
    assert trace.experts.tolist() == [[[n, n], [3, n]], [[1, 2], [n, n]]]
    assert trace.layers.tolist() == [2, 4]
    assert trace.seq.tolist() == [0, 1, 2]
    assert trace.phase is not None and trace.phase.tolist() == [0, 1]
    assert trace.probs is not None and trace.probs[1, 0].tolist() == [0.5, 0.25]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "no routes"),
        ("a,b\n1,2\n", "line 1: no 'token'"),
        ("token,layer\n1,2\n", "line 1: no 'experts'"),
        ("token,layer,expert\n", "no routes"),
        ("token,layer,expert\n0,0\n", "line 2: 2 cells under 3 columns"),
        ("token,layer,expert\n0,0,x\n", "line 2: invalid literal"),
        ("token,layer,expert\n0,0,-1\n", "out of range"),
        ("token,layer,expert\n0,0,65535\n", "out of range"),
        ("token,layer,expert\n0,0,1\n0,0,1\n", "line 3: token 0 uses an expert of layer 0 twice"),
        ("token,layer,expert,phase\n0,0,1,late\n", "'late' is no phase"),
        ("[[1,2],[3,4]]\n7\n", "line 2: neither an object nor a list"),
        ("[[1,2],[3,4.5]]\n", "4.5 is no whole number"),
        ("[[1,2],[3,true]]\n", "True is no whole number"),
        ('{"token":0,"layer":0,"experts":[1],"weights":[1,2]}\n', "1 experts have 2 weights"),
        ('{"token":0,"layer":0}\n', "no 'experts'"),
        ('{"token":0,"layer":0,"experts":3}\n', "'experts' is no list"),
        ('{"token":0,\n', "line 1: Expecting"),
        ("[" * 100_000 + "\n", "these are no routes"),
    ],
)
def test_files_that_are_none(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(TraceError, match=words):
        load(tmp_path, text)


def test_fewer_experts_than_are_used(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="uses expert 5 of 4"):
        load(tmp_path, "[[5]]\n", 4)
    with pytest.raises(TraceError, match="cannot read"):
        import_routes(tmp_path / "none.csv")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(TraceError, match="these are no routes"):
        import_routes(tmp_path / "binary")
