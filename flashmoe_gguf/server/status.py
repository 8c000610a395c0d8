"""What the server tells about itself: health, figures and the use of experts, as plain values."""

from __future__ import annotations

import dataclasses
import time
import weakref
from typing import Any

from flashmoe_gguf.errors import FlashMoEError
from flashmoe_gguf.host import process_memory
from flashmoe_gguf.llama import Llama
from flashmoe_gguf.server.cloudwatch import Moment
from flashmoe_gguf.server.gate import Gate
from flashmoe_gguf.server.meters import Meters
from flashmoe_gguf.server.models import Models
from flashmoe_gguf.stats import ExpertUse, Stats


class Status:
    """Asks; any thread may call, also while a model is loading, computing or closing."""

    def __init__(self, models: Models, meters: Meters, gate: Gate) -> None:
        self.models = models
        self.meters = meters
        self.gate = gate
        self._started = time.monotonic()

    @property
    def uptime_seconds(self) -> float:
        return time.monotonic() - self._started

    def health(self) -> tuple[int, dict[str, Any]]:
        """(HTTP status, body). `status` is loading, ready, prefill or error."""
        models, current = self.models, self.models.current
        body: dict[str, Any] = {"status": "ready", "model": models.current_alias}
        body |= {"running": self.gate.running is not None, "waiting": self.gate.waiting}
        if current is None:
            if models.state == "failed":
                error = models.error
                return 503, {**body, "status": "error", "error": str(error)}
            fraction = round(models.loaded_fraction, 3)
            return 503, {**body, "status": "loading", "loaded": fraction}
        if (progress := self._prefill(current[1])) is not None:
            body |= {"status": "prefill", "prefill": progress}
        return 200, body

    def _prefill(self, llm: Llama) -> dict[str, int] | None:
        """Tokens of the prompt that is being computed; None between prompts."""
        ticket = self.gate.running
        if ticket is None or ticket.first_token_seconds is not None:
            return None
        try:
            progress = llm.eval_progress()
        except FlashMoEError:  # closed meanwhile
            return None
        return None if progress is None else {"done": int(progress[0]), "total": progress[1]}

    def cache(self) -> tuple[Stats | None, list[ExpertUse]]:
        """The cache's counters and the use of experts; (None, []) where nothing is streamed."""
        current = self.models.current
        if current is None:
            return None, []
        try:
            return current[1].stats(), current[1].expert_use()
        except FlashMoEError:  # closed meanwhile
            return None, []

    def moment(self) -> Moment | None:
        """What the figures for CloudWatch are made from; None while no model is in memory."""
        current = self.models.current
        if current is None:
            return None
        alias, llm = current
        try:
            stats = llm.stats()
        except FlashMoEError:  # closed meanwhile
            return None
        counts = self.meters.counts()
        return Moment(alias, weakref.ref(llm), stats, counts.decode_tokens, counts.decode_seconds)

    def stats(self) -> dict[str, Any]:
        """The body of /flashmoe/stats."""
        cache, use = self.cache()
        counts = self.meters.counts()
        _, health = self.health()
        return {
            **health,
            "uptime_seconds": round(self.uptime_seconds, 3),
            "memory": {
                "resident_bytes": process_memory()[0],
                "budget_bytes": cache.budget_bytes if cache is not None else None,
            },
            "tokens": {
                "prompt": counts.prompt_tokens,
                "answer": counts.answer_tokens,
                "prefill_seconds": round(counts.prefill_seconds, 6),
                "decode_seconds": round(counts.decode_seconds, 6),
                "decode_per_second": round(counts.decode_rate, 3),
                "per_second": round(counts.tokens_per_second, 3),
            },
            "first_token": {
                "count": counts.first_tokens,
                "seconds": round(counts.first_token_seconds, 6),
            },
            "requests": [
                {"path": path, "status": status, "count": n}
                for (path, status), n in sorted(counts.requests.items())
            ],
            "errors": counts.errors,
            "cache": None if cache is None else _cache_values(cache),
            "layers": [_layer_values(row) for row in use],
            "regret": regret(cache),
        }

    def experts(self) -> dict[str, Any]:
        """The body of /flashmoe/experts: rows per layer, each [n_expert]."""
        _, use = self.cache()
        return {
            "layers": [
                {
                    "layer": row.counts.layer,
                    "resident": row.resident.tolist(),
                    "uses": row.uses.tolist(),
                }
                for row in use
            ]
        }


def regret(cache: Stats | None) -> dict[str, float | None] | None:
    """Hit rates of this run, LRU and Belady's optimum over the last tokens; None until measured."""
    if cache is None or cache.regret is None:
        return None
    return {**dataclasses.asdict(cache.regret), "gap_closed": cache.regret.gap_closed}


def _cache_values(cache: Stats) -> dict[str, Any]:
    values = {f.name: getattr(cache, f.name) for f in dataclasses.fields(cache)}
    del values["regret"]  # is beside it
    return {
        **values,
        "misses": cache.misses,
        "hit_rate": round(cache.hit_rate, 6),
        "decode_hit_rate": round(cache.decode_hit_rate, 6),
    }


def _layer_values(row: ExpertUse) -> dict[str, int]:
    counts = row.counts
    return {
        "layer": counts.layer,
        "n_expert": counts.n_expert,
        "n_slots": counts.n_slots,
        "resident": counts.n_resident,
        "hits": counts.hits,
        "misses": counts.lookups - counts.hits,
        "evicted": counts.evicted,
    }
