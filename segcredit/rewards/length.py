"""The length penalty that the authors of SAPO subtract from every reward without saying so."""


def authors_length_penalty(num_tokens: int, max_tokens: int) -> float:
    """.001 for each token beyond nine tenths of the limit, .3 more at the limit; .5 at most.

    ``reward_manager/naive.py:95-105`` of their release; the paper's reward has no such term.
    """
    over = max(0.0, num_tokens - 0.9 * max_tokens)
    at_limit = 0.3 if num_tokens >= max_tokens - 1 else 0.0
    return min(0.5, 0.001 * over + at_limit)
