"""A route beside vLLM's own, which tells how many tokens each running request has: GET /hpcrl/tokens.

vLLM changes weights under running requests, and does not say which tokens are of which weights. Asked while it is paused, this does.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

PATH = "/hpcrl/tokens"


def tokens_so_far(engine: Any) -> dict[str, dict[int, int]]:
    """Return the tokens generated so far, by request id and index of the sample. Finished samples are missing.

    Args:
        engine: the server's `vllm.v1.engine.async_llm.AsyncLLM`.
    """
    counts: dict[str, dict[int, int]] = defaultdict(dict)
    for state in engine.output_processor.request_states.values():
        counts[state.external_req_id][state.request_index] = state.detokenizer.num_output_tokens()
    return dict(counts)
