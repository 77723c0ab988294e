"""A tiny Qwen-VL with pictures, for machines without torchvision. Tests only."""

import types
from io import BytesIO
from pathlib import Path


def make_model(folder: Path, name: str = "qwen2_5_vl") -> Path:
    """A vision-language model with random weights, as a Hugging Face folder."""
    import torch
    from toy import make_tokenizer

    from segcredit.models import Policy

    torch.manual_seed(0)
    policy = Policy.tiny(name, make_tokenizer(), hidden=64, layers=2, heads=4)
    policy.save(folder)
    return folder


def make_rows(path: Path, number: int = 64) -> Path:
    """verl's rows with a picture each, in parquet."""
    import pyarrow as pa
    import pyarrow.parquet as pq
    from PIL import Image

    rows = []
    for i in range(number):
        held = BytesIO()
        Image.new("RGB", (56, 56 + 28 * (i % 2)), (40 * (i % 6), 90, 200)).save(held, "PNG")
        rows.append(
            {
                "data_source": "toy",
                "prompt": [{"role": "user", "content": "<image>say"}],
                "images": [{"bytes": held.getvalue()}],
                "ability": "toy",
                "reward_model": {"style": "rule", "ground_truth": "letters"},
                "extra_info": {"index": i},
            }
        )
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path


class TinyProcessor:
    """What verl asks of a processor, on our own codec: the stock one wants torchvision."""

    image_token, video_token = "<|image_pad|>", "<|video_pad|>"
    feature_extractor = None

    def __init__(self, folder):
        from transformers import AutoConfig
        from transformers.models.qwen2_5_vl import Qwen2_5_VLModel

        from segcredit.models import Codec
        from segcredit.models.families import Qwen2_5VL

        self.codec = Codec.from_pretrained(folder, Qwen2_5VL())
        self.tokenizer = self.codec.tokenizer
        self.image_processor = self.codec.image_processor
        self.chat_template = self.tokenizer.chat_template
        self.config = AutoConfig.from_pretrained(folder)
        for name in ("get_rope_index", "get_vision_position_ids"):
            if hasattr(Qwen2_5_VLModel, name):
                setattr(self, name, types.MethodType(getattr(Qwen2_5_VLModel, name), self))

    def apply_chat_template(self, *args, **kwargs):
        return self.tokenizer.apply_chat_template(*args, **kwargs)

    def __call__(self, text, images=None, videos=None, return_tensors="pt", **kwargs):
        import torch
        from transformers import BatchFeature

        found = {}
        (text,) = text
        if images:
            found = dict(self.image_processor(images=images, return_tensors="pt"))
            if self.image_token in text:
                counts = self.codec.family.count_image_tokens(self.image_processor, found)
                text = self.codec.repeat_image_tokens(text, counts)
        ids = torch.tensor([self.tokenizer(text, add_special_tokens=False)["input_ids"]])
        kinds = (ids == self.config.image_token_id).long()
        found |= {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        return BatchFeature(found | {"mm_token_type_ids": kinds})

    def save_pretrained(self, folder):
        self.codec.save(Path(folder))


def image_processor(folder):
    from segcredit.models.families import Qwen2_5VL

    return Qwen2_5VL().load_image_processor(folder)
