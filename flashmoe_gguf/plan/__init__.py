"""What running a model would be like, before anything is loaded or even downloaded.

`sizes` turns a header or a table of models.toml into sizes; `curves` says how often a cache of
some size hits; `speed` turns hits, a drive and a memory into tokens per second; `forecast` puts
them together. It reads headers and measures drives; it loads no model and needs no llama.cpp.
"""

from flashmoe_gguf.plan.curves import HitRate, expected_hit_rate
from flashmoe_gguf.plan.forecast import Forecast, make_forecast, verdict
from flashmoe_gguf.plan.sizes import LayerCost, Subject, known_subject, read_subject
from flashmoe_gguf.plan.speed import Machine, memory_bandwidth, seconds_per_token

__all__ = [
    "Forecast",
    "HitRate",
    "LayerCost",
    "Machine",
    "Subject",
    "expected_hit_rate",
    "known_subject",
    "make_forecast",
    "memory_bandwidth",
    "read_subject",
    "seconds_per_token",
    "verdict",
]
