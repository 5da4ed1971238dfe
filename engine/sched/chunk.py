"""The size of the next prefill chunk: a pure function."""


def plan_prefill_chunk(
    num_computed_tokens: int, num_prompt_tokens: int, num_tokens: int, *, budget: int
) -> int:
    """The number of tokens to compute next, at most `budget`.

    A chunk never crosses the end of the prompt. Generated tokens that must be recomputed (after a
    preemption or a failed load) get chunks of their own, so the prompt's chunks, and with them its
    rounding, stay the same.
    """
    end = num_prompt_tokens if num_computed_tokens < num_prompt_tokens else num_tokens
    return min(end - num_computed_tokens, budget)
