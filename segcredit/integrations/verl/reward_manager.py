"""verl's reward manager, extended to pass the response's length to the reward."""

from typing import Any

import numpy as np
from verl.experimental.reward_loop.reward_manager.naive import NaiveRewardManager

from segcredit.integrations.verl.reward import NUM_TOKENS, TRUNCATED


class CountingRewardManager(NaiveRewardManager):  # type: ignore[misc]
    """verl's naive manager; adds the number of tokens and whether the response was truncated."""

    async def run_single(self, data: Any) -> dict[str, Any]:
        """Grade the last response of a trajectory, as verl does."""
        data = data[-1:]
        item = data[0]
        tokens = item.batch["responses"]
        length = int(item.batch["attention_mask"][-len(tokens) :].sum())
        limit = int(self.config.data.max_response_length)
        ended = length > 0 and int(tokens[length - 1]) == self.tokenizer.eos_token_id
        extra = dict(item.non_tensor_batch.get("extra_info") or {})
        extra |= {NUM_TOKENS: length, TRUNCATED: length >= limit and not ended}
        extra_info = np.empty(1, dtype=object)
        extra_info[0] = extra
        data.non_tensor_batch["extra_info"] = extra_info
        return await super().run_single(data)
