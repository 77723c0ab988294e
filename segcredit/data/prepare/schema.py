"""The parquet schema of verl's rows, with the features by which datasets decodes the pictures."""

import json
from importlib import import_module
from typing import Any

from segcredit.data.prepare.items import Item
from segcredit.data.prepare.kinds import NOTHING, TEXT, Kinds, inner_kind

pa = import_module("pyarrow")

_STRING = {"dtype": "string", "_type": "Value"}
_IMAGE = {"_type": "Image"}


def schema(kinds: Kinds, with_pictures: bool) -> Any:
    """Columns in verl's order; ``images`` only where some row has one.

    Lists of features are written as JSON lists: every version of datasets reads those, while
    ``{"_type": "List"}``, as it writes them since 4.0, is unknown to those before.
    """
    features: dict[str, Any] = {
        "data_source": _STRING,
        "prompt": [{"role": _STRING, "content": _STRING}],
        **({"images": [_IMAGE]} if with_pictures else {}),
        "ability": _STRING,
        "reward_model": {"style": _STRING, "ground_truth": _STRING},
        "extra_info": {
            "split": _STRING,
            "index": {"dtype": "int64", "_type": "Value"},
            "question": _STRING,
            **{name: _feature(kind) for name, kind in kinds.of.items()},
        },
    }
    metadata = {"huggingface": json.dumps({"info": {"features": features}})}
    fields = [pa.field(name, _type(feature)) for name, feature in features.items()]
    return pa.schema(fields, metadata=metadata)


def row(item: Item, split: str, kinds: Kinds, with_pictures: bool) -> dict[str, Any]:
    """An item as verl's row."""
    pictures = [{"bytes": picture.content, "path": picture.name} for picture in item.pictures]
    extra = {"split": split, "index": item.index, "question": item.question}
    return {
        "data_source": item.data_source,
        "prompt": item.messages,
        **({"images": pictures} if with_pictures else {}),
        "ability": item.ability,
        "reward_model": {"style": item.style, "ground_truth": item.answer},
        "extra_info": extra | kinds.cast(item.kept),
    }


def _feature(kind: str) -> Any:
    inner = inner_kind(kind)
    if inner is not None:
        return [_feature(inner)]
    return {"dtype": TEXT if kind == NOTHING else kind, "_type": "Value"}


def _type(feature: Any) -> Any:
    """The Arrow type of a feature, as datasets stores it."""
    if isinstance(feature, list):
        return pa.list_(_type(feature[0]))
    if feature == _IMAGE:
        return pa.struct({"bytes": pa.binary(), "path": pa.string()})
    if feature.get("_type") == "Value":
        return pa.type_for_alias(feature["dtype"])
    return pa.struct({name: _type(inner) for name, inner in feature.items()})
