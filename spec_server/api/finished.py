"""The line that the log gets for each request that came to its end: counts and times, never a word of the text."""

from __future__ import annotations

import logging

from spec_server.api.wire import ratio
from spec_server.engine.base import Finished

log = logging.getLogger(__name__)


def log_finished(finished: Finished) -> None:
    t = finished.timings
    log.info(
        "slot %d: prompt of %d tokens, %d cached, %d in %.0f ms (%.1f/s); "
        "%d generated in %.0f ms (%.1f/s), %d of %d drafted accepted; end: %s",
        finished.id_slot,
        finished.n_prompt,
        t.cache_n,
        t.prompt_n,
        t.prompt_ms,
        ratio(t.prompt_n * 1e3, t.prompt_ms),
        t.predicted_n,
        t.predicted_ms,
        ratio(t.predicted_n * 1e3, t.predicted_ms),
        t.draft_n_accepted,
        t.draft_n,
        finished.stop_type,
    )
