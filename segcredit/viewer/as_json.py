"""A cut as one line of JSON."""

import json
from dataclasses import asdict

from segcredit.viewer.cut import Cut, partition_settings
from segcredit.viewer.settings import Settings


def as_json(label: str, cut: Cut, settings: Settings) -> str:
    """The numbers unrounded, and ASCII throughout, so that a terminal may print it as it is."""
    return json.dumps(
        {
            "id": label,
            "strategy": cut.strategy,
            "settings": {
                **partition_settings(cut.partition),
                "gamma": settings.gamma,
                "lam": settings.lam,
                "value_at": settings.value_at.value,
            },
            "tokens": cut.num_tokens,
            "segments": [asdict(segment) for segment in cut.segments],
        }
    )
