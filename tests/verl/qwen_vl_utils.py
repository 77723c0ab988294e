"""In the place of the package of that name, which wants torchvision. Tests only."""


def process_vision_info(messages, image_patch_size=14, return_video_metadata=False):
    """The pictures of the messages, in order."""
    parts = [x for message in messages for x in message["content"] if isinstance(x, dict)]
    images = [x["image"].convert("RGB") for x in parts if x.get("type") == "image"]
    return images or None, None
