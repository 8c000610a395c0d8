"""`lookahead=`: guesses at the next layers' experts while the drive would idle."""

from __future__ import annotations

from dataclasses import dataclass

from flashmoe_gguf.errors import OptionError


@dataclass(frozen=True)
class Lookahead:
    """Guesses at the next layers' experts: by what, how many each at most, and whether only while
    it is measured to gain.
    """

    predictor: str
    width: int
    adaptive: bool


AUTO_LOOKAHEAD = Lookahead("routing", 1, True)


def parse_lookahead(text: str | int) -> Lookahead | None:
    """What `lookahead=` means: "auto", "off", or how many experts per layer to guess at most,
    with the predictor before it if not the default, such as "router:2".

    Raises OptionError for anything else.
    """
    if text == "off" or text == 0 or text == "0":
        return None
    if text == "auto":
        return AUTO_LOOKAHEAD
    predictor, _, width = str(text).rpartition(":")
    if predictor not in ("", "routing", "router") or not width.isdecimal() or int(width) < 1:
        raise OptionError(
            f"lookahead '{text}'", "auto, off, a number of experts, routing:N or router:N"
        )
    return Lookahead(predictor or AUTO_LOOKAHEAD.predictor, int(width), False)
