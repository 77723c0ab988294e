"""Checkpoints of many architectures: the sampler, the trainer and stock transformers agree."""

import io
import json
import shutil
import threading
import warnings
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from tiny_families import (
    HIDDEN,
    SMALL,
    SQUARE,
    TEXT_FAMILIES,
    VISION_FAMILIES,
    TinyVision,
    require,
    save_text,
    save_vision,
    text,
    vision,
)
from tiny_policies import ask, fresh_policy, picture, pictures, seeded, vision_prompts
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoProcessor,
    Mamba2Config,
)
from transformers.utils import is_torchvision_available

from segcredit.data import prompts_from_rows
from segcredit.models import Critic, ModelError, Policy
from segcredit.models.critic import verify_equal
from segcredit.models.families import GeneralVision
from segcredit.models.general import ProcessorCodec, notice
from segcredit.models.images import image_size, open_image
from segcredit.models.layers import full_attention, set_attention
from segcredit.rollout import HFEngine
from segcredit.rollout.vllm import check_same_prompt, unprocessed_input
from segcredit.train.models import freeze_vision
from segcredit.types import Encoded, Prompt, Rollouts, Sampling

pytestmark = [
    pytest.mark.filterwarnings("ignore:no model family here describes"),
    pytest.mark.filterwarnings("ignore:__array"),  # in some stock processors
]
CLOSE = 1e-5
FAST = ("gemma3", "qwen3_5")
"""Vision-language families of which all tests are fast; the others have the slow tests, too."""
PROMPTS = [
    ask("list ?"),
    ask("count <image>red circle plus <image><image> blue square ?", *pictures(3)),
    ask("<image>list ?", picture(56, 112)),
    ask("twice red circle ?<image>", picture(140, 28, seed=5)),
    ask("<image>", picture(100, 71, seed=6)),
    ask("count " + "red circle plus " * 24 + "<image>blue square ?<image>", *pictures(2)),
]
TEXTS = [ask("list ?"), ask("count " + "red circle plus " * 24 + "blue square ?"), ask("red ")]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Each family's tiny checkpoint, made once."""

    @lru_cache
    def folder(name: str) -> Path:
        place = tmp_path_factory.mktemp(name)
        return (save_vision if name in VISION_FAMILIES else save_text)(name, place)

    return folder


@lru_cache
def _load(folder: Path) -> Policy:
    return Policy.from_pretrained(folder)


def load(name: str, folders: Any) -> Policy:
    """A policy shared by all tests: never write to it."""
    require(name)
    return _load(folders(name))


def sample(policy: Policy, prompts: list[Prompt], max_tokens: int = 12) -> Rollouts:
    """Two responses to each prompt, some with a hole."""
    encoded = [policy.encode(x) for x in prompts]
    engine = HFEngine(policy.model, policy.end_tokens, policy.banned)
    return engine.sample([*encoded, *encoded], Sampling(max_tokens), seeded())


def reference(model: Any, policy: Policy, prompt: Encoded, response: Tensor) -> Tensor:
    """log π of a response by stock transformers: one row, no padding, the model's own positions."""
    tokens = torch.cat([prompt.tokens, response])[None]
    types = {
        name: torch.nn.functional.pad(x, (0, len(response)))[None]
        for name, x in prompt.token_types.items()
    }
    with torch.no_grad():
        outputs = model(input_ids=tokens, **prompt.vision, **types, use_cache=False)
    logits = outputs.logits[0, len(prompt.tokens) - 1 : -1].float()
    if policy.banned is not None:
        logits = logits.masked_fill(policy.banned, -torch.inf)
    return logits.log_softmax(-1).gather(-1, response[:, None]).squeeze(-1)


@pytest.mark.parametrize("name", [*VISION_FAMILIES, *TEXT_FAMILIES])
def test_log_probs_agree(name: str, folders: Any) -> None:
    """Sampler, trainer and an unpadded forward pass of stock transformers give equal numbers."""
    policy = load(name, folders)
    vision = name in VISION_FAMILIES
    rollouts = sample(policy, PROMPTS if vision else TEXTS)
    assert rollouts.prompts is not None
    with torch.no_grad():
        logp, _ = policy.score(rollouts, 1.0)
    assert float((logp - rollouts.logp_old).abs().max()) < CLOSE
    auto = AutoModelForImageTextToText if vision else AutoModelForCausalLM
    stock = auto.from_pretrained(folders(name), dtype=torch.float32).eval()
    lengths = set()
    for row, prompt in enumerate(rollouts.prompts):
        response = rollouts.tokens[row][rollouts.mask[row]]
        lengths.add(len(response))
        expected = reference(stock, policy, prompt, response)
        assert float((logp[row][rollouts.mask[row]] - expected).abs().max()) < CLOSE, row
    assert len(lengths) > 1, "no response was padded"
    # a hole is text that the policy read: the tokens after it keep their log π
    mask = rollouts.mask.clone()
    mask[:, 1::3] = False
    rows = mask.any(dim=1)
    holed = Rollouts(
        tokens=rollouts.tokens[rows],
        mask=mask[rows],
        logp_old=rollouts.logp_old[rows],
        reward=rollouts.reward[rows],
        group=rollouts.group[rows],
        truncated=rollouts.truncated[rows],
        prompts=[x for x, keep in zip(rollouts.prompts, rows.tolist(), strict=True) if keep],
    )
    with torch.no_grad():
        again, _ = policy.score(holed, 1.0)
    assert float((again - logp[rows])[mask[rows]].abs().max()) < CLOSE


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(x, marks=[pytest.mark.slow] * (x in VISION_FAMILIES and x not in FAST))
        for x in (*VISION_FAMILIES, *TEXT_FAMILIES)
    ],
)
def test_packed_rows_and_fixed_buffers(name: str, folders: Any) -> None:
    """Faster ways to score and to sample give the same, where the model's layers allow them."""
    loaded = load(name, folders)
    prompts = PROMPTS if name in VISION_FAMILIES else TEXTS
    rollouts = sample(loaded, prompts)
    engine = HFEngine(loaded.model, loaded.end_tokens, loaded.banned, graphs=True)
    assert rollouts.prompts is not None
    again = engine.sample(rollouts.prompts, Sampling(12), seeded())
    assert torch.equal(again.tokens, rollouts.tokens)
    plain = full_attention(loaded.model.config)
    assert (engine._fixed is not None) == plain, "CUDA graphs need layers of full attention"
    packed = Policy.from_pretrained(folders(name))
    set_attention(packed.model, "packed")
    assert packed.packs == (plain and packed.family.packing)
    assert packed.packs or not plain or name == "fast_vlm"
    with torch.no_grad():
        logp, _ = packed.score(rollouts, 1.0)
    assert float((logp - rollouts.logp_old).abs().max()) < CLOSE


def test_a_model_without_a_cache_is_refused(tmp_path: Path) -> None:
    settings = {"num_heads": 8, "head_dim": 8, "state_size": 8, "n_groups": 1, "vocab_size": 9}
    Mamba2Config(hidden_size=32, num_hidden_layers=1, **settings).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"state-space model of type 'mamba2'.*past_key_values"):
        Policy.from_pretrained(tmp_path)


@pytest.mark.parametrize("name", VISION_FAMILIES)
def test_tokens_are_counted_without_decoding(name: str, folders: Any) -> None:
    """From the sizes of images alone, exactly; broken pixels do not matter."""
    policy = load(name, folders)
    for prompt in [*PROMPTS, ask("<image>list ?", turned(picture(140, 28)))]:
        assert policy.codec.count_tokens(prompt) == len(policy.encode(prompt).tokens), prompt


def test_a_processor_tries_each_size_once_and_in_threads(
    folders: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All rows of a data set are checked before training: the slow part runs beside the reading."""
    policy = Policy.from_pretrained(load("glm4v", folders).model.name_or_path)
    call, threads = ProcessorCodec._call, []

    def seen(self: Any, *arguments: Any) -> Any:
        threads.append(threading.current_thread() is threading.main_thread())
        return call(self, *arguments)

    monkeypatch.setattr(ProcessorCodec, "_call", seen)
    data = [picture(40 + 8 * n, 40, seed=n) for n in range(6)]
    rows = [{"prompt": "<image>list ?", "images": [x], "answer": "1"} for x in [*data, *data]]
    codec = policy.codec
    options: Any = {"count_tokens": codec.count_tokens, "measure": codec.measure_images}
    assert len(prompts_from_rows(rows, **options).prompts) == len(rows)
    assert not any(threads)
    assert len(data) <= len(threads) <= len(rows), "two threads may try the same size at once"


@pytest.mark.parametrize("name", VISION_FAMILIES)
def test_tokens_of_images_are_never_sampled(name: str, folders: Any) -> None:
    policy = load(name, folders)
    config, banned = policy.model.config, policy.banned
    assert banned is not None
    assert bool(banned[policy.family.image_token_id(config)])  # type: ignore[attr-defined]
    names = ("image_token", "video_token", "boi_token", "start_image_token")
    tokens = [token for key in names if (token := VISION_FAMILIES[name].tokens.get(key))]
    assert all(bool(banned[policy.codec.tokenizer.convert_tokens_to_ids(x)]) for x in tokens)
    assert not banned[list(policy.end_tokens)].any()


@pytest.mark.parametrize(
    "name",
    [pytest.param(x, marks=[pytest.mark.slow] * (x not in FAST)) for x in VISION_FAMILIES],
)
def test_critic_lora_frozen_vision_and_saving(name: str, folders: Any, tmp_path: Path) -> None:
    policy = Policy.from_pretrained(load(name, folders).model.name_or_path)
    critic = Critic.from_policy(policy)
    verify_equal(policy.family.trunk(policy.model), critic.trunk)
    rollouts = sample(policy, PROMPTS[:3], 4)
    value = critic(rollouts)
    assert value.shape == rollouts.mask.shape
    value.sum().backward()
    assert critic.head.weight.grad is not None
    critic.save(tmp_path / "critic")
    verify_equal(critic.trunk, Critic.from_saved(tmp_path / "critic").trunk)
    policy.save(tmp_path / "policy")
    stock, info = AutoModelForImageTextToText.from_pretrained(
        tmp_path / "policy", dtype=torch.float32, output_loading_info=True
    )
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    again = Policy.from_pretrained(tmp_path / "policy")
    for prompt in PROMPTS:
        one, other = policy.encode(prompt), again.encode(prompt)
        assert torch.equal(one.tokens, other.tokens)
        assert all(torch.equal(x, other.vision[key]) for key, x in one.vision.items())
    for key, x in policy.model.state_dict().items():
        assert torch.equal(x, stock.state_dict()[key]), key
    freeze_vision(policy.model, policy.family)
    tower = VISION_FAMILIES[name].tower
    frozen = {key for key, x in policy.model.named_parameters() if not x.requires_grad}
    assert frozen
    assert all(f".{tower}." in key for key in frozen)
    assert not any(f".{tower}." in key for key in policy.trained())
    adapted = policy.with_lora(2, 2.0)
    assert adapted.lora is not None
    names = [path for path, _, _ in adapted.lora._pairs("policy")]
    assert names
    assert not any(tower in path.split(".") for path in names)
    logp, _ = adapted.score(rollouts, 1.0)
    assert float((logp.detach() - rollouts.logp_old).abs().max()) < CLOSE


@pytest.mark.parametrize("name", ["qwen2_5_vl", "qwen3_vl"])
def test_the_general_path_equals_a_family(name: str, tmp_path: Path) -> None:
    """On models that have a family: the same tokens, pixels, positions and log π."""
    owner = fresh_policy(name)
    owner.save(tmp_path)
    general = Policy.from_pretrained(tmp_path, family="general")
    assert isinstance(general.family, GeneralVision)
    prompts = vision_prompts()
    for prompt in prompts:
        one, other = owner.encode(prompt), general.encode(prompt)
        assert torch.equal(one.tokens, other.tokens)
        assert torch.equal(one.positions, other.positions)
        assert all(torch.equal(x, other.vision[key]) for key, x in one.vision.items())
    assert torch.equal(torch.tensor(owner.codec.banned), torch.tensor(general.codec.banned))
    rollouts = sample(owner, prompts)
    for policy in (owner, general):
        with torch.no_grad():
            logp, _ = policy.score(rollouts, 1.0)
        assert float((logp - rollouts.logp_old).abs().max()) < CLOSE


def test_a_chat_template_for_text_alone(folders: Any, tmp_path: Path) -> None:
    """One that joins strings gets the image token in the text; parts would be lost or refused."""
    shutil.copytree(folders("fast_vlm"), tmp_path, dirs_exist_ok=True)
    (tmp_path / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m['role'] + '\\n' + m['content'] }}{% endfor %}"
    )
    codec = Policy.from_pretrained(tmp_path).codec
    prompt = ask("red <image>blue ?", picture(56, 56))
    assert codec.render(prompt) == "user\nred <file_sep>blue ?"
    assert codec.count_tokens(prompt) == len(codec.encode(prompt)[0])


@pytest.mark.parametrize("name", VISION_FAMILIES)
def test_mistakes_with_images(name: str, folders: Any) -> None:
    """Found from the row alone, before anything is trained."""
    codec = load(name, folders).codec
    with pytest.raises(ValueError, match=r"has 1 image\(s\), but 2 <image> mark"):
        codec.count_tokens(ask("<image>list <image>?", picture(56, 56)))
    with pytest.raises(ValueError, match=r"has 1 image\(s\), but 0 <image> mark"):
        codec.count_tokens(ask("list ?", picture(56, 56)))
    for token in codec.tokenizer.convert_ids_to_tokens(list(codec.banned)):
        with pytest.raises(ValueError, match=r"which is a token of images|image token"):
            codec.count_tokens(ask(f"<image>list {token}?", picture(56, 56)))
    for width, height in ((6000, 2), (1, 1), (10_000, 40), (3, 900)):
        prompt = ask("<image>list ?", picture(width, height))
        counted = told(codec.count_tokens, prompt)
        assert counted == told(lambda x: len(codec.encode(x)[0]), prompt)
        refused = f"the model's image processor rejects an image of {width}×{height} pixels"
        assert isinstance(counted, int) or counted.startswith(refused)
    if name in ("glm4v", "qwen3_5"):  # the others resize every image to a square
        assert "aspect ratio" in told(codec.count_tokens, ask("<image>", picture(6000, 2)))


def told(read: Callable[[Prompt], int], prompt: Prompt) -> Any:
    """The result, or the message."""
    try:
        return read(prompt)
    except ValueError as error:
        return str(error)


@pytest.mark.parametrize("name", VISION_FAMILIES)
def test_vllm_gets_the_same_prompt_and_prefix(name: str, folders: Any) -> None:
    """Unprocessed: vLLM's own processor replaces one mark per image. vLLM itself is not run."""
    policy = load(name, folders)
    codec = policy.codec
    assert isinstance(codec, ProcessorCodec)
    prompt = PROMPTS[1]
    prefix = torch.tensor([21, 22])
    made = unprocessed_input(codec, policy.encode(prompt).extended(prefix))
    assert len(made["multi_modal_data"]["image"]) == 3
    marks = codec.tokenizer.decode(made["prompt_token_ids"]).count(codec.image_token)
    assert marks == 3
    assert made["prompt_token_ids"][-2:] == [21, 22]
    encoded = policy.encode(prompt)
    check_same_prompt(encoded, encoded.tokens.tolist())
    with pytest.raises(ValueError, match="they must be the same"):
        check_same_prompt(encoded, made["prompt_token_ids"])


@pytest.mark.filterwarnings("default:no model family here describes")
def test_a_notice_says_once_what_is_not_optimized(folders: Any) -> None:
    notice.cache_clear()
    with pytest.warns(UserWarning, match=r"models of type 'fast_vlm', so .* without packing"):
        Policy.from_pretrained(folders("fast_vlm"))
    for name in ("fast_vlm", "internvl"):  # said already; a family
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)
            Policy.from_pretrained(folders(name))


def test_stock_processors_make_the_same_tensors(folders: Any) -> None:
    """Those that need no torchvision; with torchvision, all of them."""
    tried = 0
    for name in VISION_FAMILIES:
        if VISION_FAMILIES[name].video and not is_torchvision_available():
            continue
        policy = load(name, folders)
        stock = AutoProcessor.from_pretrained(folders(name))
        for prompt in PROMPTS[1:]:
            parts: list[dict[str, Any]] = []
            images = iter(prompt.images)
            for n, words in enumerate(prompt.messages[0]["content"].split("<image>")):
                parts += [{"type": "image", "image": open_image(next(images))}] if n else []
                parts += [{"type": "text", "text": words}] if words else []
            made = stock.apply_chat_template(
                [{"role": "user", "content": parts}],
                add_generation_prompt=True,
                tokenize=True,
                return_dict=True,
                return_tensors="pt",
            )
            ours = policy.encode(prompt)
            assert torch.equal(made["input_ids"][0], ours.tokens)
            assert ours.vision.keys() | ours.token_types.keys() <= made.keys()
            for key, x in ours.vision.items():
                assert torch.equal(made[key], x), (name, key)
            for key, x in ours.token_types.items():
                assert torch.equal(made[key][0], x), (name, key)
        tried += 1
    assert tried >= 3


def turned(image: bytes) -> bytes:
    """The picture as a JPEG that its EXIF data turns by 90 degrees."""
    file = io.BytesIO()
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.open(io.BytesIO(image)).save(file, "JPEG", exif=exif)
    assert image_size(file.getvalue()) == open_image(file.getvalue()).size
    return file.getvalue()


def test_a_model_that_is_not_causal_is_not_scored(folders: Any) -> None:
    """Without a family, scoring at once is compared with token by token, on the first image."""
    policy = load("fast_vlm", folders)
    rollouts = sample(policy, PROMPTS[:3], 4)
    wrong = Policy.from_pretrained(folders("fast_vlm"))

    def look_ahead(module: Any, given: Any, named: Any, output: Any) -> None:
        if not named.get("use_cache"):
            output.logits = output.logits + output.logits.roll(-1, dims=1)

    wrong.model.register_forward_hook(look_ahead, with_kwargs=True)
    with pytest.raises(ValueError, match=r"cannot be scored: .* Its attention is not causal"):
        wrong.score(rollouts, 1.0)


def test_a_prefix_language_model_is_not_scored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PaliGemma attends in both directions within a prompt, and would within a response."""
    kind = TinyVision(
        "paligemma",
        lambda number: {
            "text_config": text(model_type="gemma"),
            "vision_config": vision(model_type="siglip_vision_model", **SMALL),
            "image_token_index": number("<image>"),
            "projection_dim": HIDDEN,
            "hidden_size": HIDDEN,
            "tie_word_embeddings": False,
        },
        "PaliGemmaProcessor",
        "SiglipImageProcessorPil",
        {"size": SQUARE, "image_seq_length": 16},
        "<image>",
        {"image_token": "<image>"},
    )
    monkeypatch.setitem(VISION_FAMILIES, "paligemma", kind)
    save_vision("paligemma", tmp_path)
    file = tmp_path / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"bos_token": "<|im_start|>"}))
    policy = Policy.from_pretrained(tmp_path)
    rollouts = sample(policy, PROMPTS[:3], 4)
    with pytest.raises(ValueError, match="PaliGemmaForConditionalGeneration cannot be scored"):
        policy.score(rollouts, 1.0)
