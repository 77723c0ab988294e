"""Prompts encoded by several threads are what one thread makes of them."""

import threading

import pytest
import torch
from tiny_policies import ask, fresh_policy, picture, policy

from segcredit.models.inputs import encode_all
from segcredit.types import Encoded, Prompt


def test_many_images_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    owner = fresh_policy("qwen2_5_vl")  # nothing is remembered yet
    asked = [
        ask(f"<image>list {'red ' * (n % 7)}?", picture(28 * (1 + n % 4), 56, seed=n))
        for n in range(40)
    ]
    asked.insert(7, ask("list ?"))
    alone = [fresh_policy("qwen2_5_vl").encode(x) for x in asked]
    used = set()

    def encode(prompt: Prompt) -> Encoded:
        used.add(threading.get_ident())
        return owner.encode(prompt)

    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    together = encode_all(encode, asked)
    assert len(used) > 1
    for a, b in zip(alone, together, strict=True):
        assert a.prompt is b.prompt
        assert torch.equal(a.tokens, b.tokens)
        assert torch.equal(a.positions, b.positions)
        assert a.vision.keys() == b.vision.keys()
        assert all(torch.equal(a.vision[name], b.vision[name]) for name in a.vision)


def test_an_error_in_a_thread_reaches_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    asked = [ask("<image>?", picture(28, 28)), ask("<image>?", b"no picture", id="broken")]
    with pytest.raises(ValueError, match=r"picture|image"):
        encode_all(policy("qwen2_5_vl").encode, asked)


def test_text_and_a_single_thread_need_no_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_pool(*_: object) -> None:
        raise AssertionError("a pool was made")

    monkeypatch.setattr("segcredit.models.inputs.ThreadPoolExecutor", no_pool)
    owner = policy("qwen2_5_vl")
    assert len(encode_all(owner.encode, [ask("list ?")] * 3)) == 3
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    assert len(encode_all(owner.encode, [ask("<image>?", picture(28, 28))] * 3)) == 3
    assert encode_all(owner.encode, []) == []
