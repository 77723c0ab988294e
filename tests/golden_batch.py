"""The two responses of the algorithm reference (§1) on which all golden numbers were worked out.

Plain lists, 0-based tokens, γ = 1, λ = 0.9, top 30 %. V[t] is the value of the prefix *before*
token t, H[t] the entropy of the distribution that token t was drawn from. `PROB`, `SPO_VALUES`
and the tuples below them are the further inputs that the method cards give in passing.
"""

from dataclasses import dataclass

GAMMA = 1.0
LAM = 0.9
FRACTION = "0.30"


@dataclass(frozen=True)
class Response:
    """One sampled response with everything that the losses read, one number per token."""

    reward: float
    entropy: list[float]
    value: list[float]  # V under the old critic: baselines and targets come from it
    value_now: list[float]  # V during the update: only the value loss reads it
    logp_old: list[float]
    log_ratio: list[float]  # x = log π_θ − log π_old
    ref_gap: list[float]  # log π_old − log π_ref
    ends: list[int]  # the top-30 % entropy segments

    @property
    def length(self) -> int:
        """T, the number of tokens."""
        return len(self.entropy)

    @property
    def logp(self) -> list[float]:
        """log π_θ = log π_old + x."""
        return [old + x for old, x in zip(self.logp_old, self.log_ratio, strict=True)]

    @property
    def logp_ref(self) -> list[float]:
        """log π_ref = log π_old − (log π_old − log π_ref)."""
        return [old - gap for old, gap in zip(self.logp_old, self.ref_gap, strict=True)]


A = Response(
    reward=1.0,
    entropy=[0.1, 1.2, 0.3, 0.2, 0.9, 0.05],
    value=[0.5, 0.6, 0.4, 0.3, 0.7, 0.8],
    value_now=[0.55, 0.5, 0.45, 0.35, 1.4, 0.7],
    logp_old=[-0.5, -1.2, -0.3, -0.2, -0.9, -0.05],
    log_ratio=[0.1, -0.2, 0.3, 0.05, 0.25, -0.1],
    ref_gap=[0.1, -0.1, 0.2, 0.0, 0.1, -0.05],
    ends=[1, 4, 5],
)

B = Response(
    reward=0.0,
    entropy=[0.7, 0.2],
    value=[0.2, 0.4],
    value_now=[0.25, 0.3],
    logp_old=[-0.7, -0.4],
    log_ratio=[-0.3, 0.4],
    ref_gap=[0.05, 0.1],
    ends=[0, 1],
)

# §2 and §4.10, SPO-chain: token probabilities (T = 6), cut at every 2nd token below 0.9, and the
# Monte-Carlo values at the two cuts {0, 3}; the response is scored 1. The log-ratios are A's.
PROB = [0.95, 0.3, 0.92, 0.6, 0.85, 0.99]
PROB_THRESHOLD = 0.9
PROB_EVERY = 2
SPO_CUT_VALUES = [0.5, 0.25]

# §4.6 and §4.7: one group of four.
GROUP_REWARDS = [1.0, 0.0, 0.0, 0.0]

# §4.9 and §4.14: Monte-Carlo values at the starts of three steps of a response scored 1.
STEP_VALUES = [0.5, 0.75, 0.25]

# §4.10, SPO-tree: a tree of two levels by its leaf rewards.
TREE = [[1.0, 0.0], [0.0, 0.0]]

# §4.11, single-stream SPO: two prompts as (α, β, reward, drift D).
TRACKED = [(4.0, 4.0, 1.0, 0.03), (6.0, 2.0, 0.0, 0.006)]

# §5, Lift: ten tokens.
LIFT_ENTROPY = [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0]
LIFT_JUMP = [0.05, 0.3, 0.1, 0.02, 0.2, 0.01, 0.15, 0.03, 0.4, 0.25]
LIFT_D = 0.7
