"""Where a prefill chunk ends: a pure function."""


def plan_prefill_chunk(
    num_computed_tokens: int, num_prompt_tokens: int, num_tokens: int, *, budget: int
) -> int:
    """Tokens to compute next, at most `budget`.

    A chunk never runs over the end of the prompt: what was generated is recomputed (after a
    preemption or a failed load) in chunks of its own, so the prompt's chunks, and with them its
    rounding, stay the same.
    """
    end = num_prompt_tokens if num_computed_tokens < num_prompt_tokens else num_tokens
    return min(end - num_computed_tokens, budget)
