"""Datasets on the Hub: addresses, pinned commits, and what is said when the Hub cannot be asked.

The Hub itself is replaced; the datasets library reads a local folder in its place.
"""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx2
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from each import each
from huggingface_hub import HfApi
from huggingface_hub.errors import (
    GatedRepoError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from tiny_runs import changed

from segcredit.config import RecipeError, load_run_recipe, parse_recipe
from segcredit.data import load_prompts
from segcredit.data.hub import Address
from segcredit.data.readers import pin_addresses
from segcredit.data.worlds import make_world
from segcredit.models import Policy
from segcredit.train.build import make_plan
from segcredit.train.trainer import Trainer

datasets = pytest.importorskip("datasets")
COMMIT, OTHER = "a" * 40, "b" * 40
REPOSITORY = "openai/gsm8k"


class FakeHub:
    """Answers for HfApi.dataset_info and, from a local folder, for datasets.load_dataset."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self.asked: list[tuple[str, str | None]] = []
        self.loaded: list[tuple[Any, ...]] = []
        self.error: Exception | None = None
        self.commit = COMMIT
        self._load = datasets.load_dataset
        monkeypatch.setattr(HfApi, "dataset_info", self.dataset_info)
        monkeypatch.setattr(datasets, "load_dataset", self.load_dataset)

    def dataset_info(self, repo_id: str, *, revision: str | None, timeout: float) -> Any:
        self.asked.append((repo_id, revision))
        if self.error is not None:
            raise self.error
        return SimpleNamespace(sha=self.commit)

    def load_dataset(
        self, path: str, name: str | None, *, split: str, revision: str | None = None
    ) -> Any:
        self.loaded.append((path, name, split, revision))
        place = self.folder if name is None else self.folder / name
        return self._load(str(place), split=split, cache_dir=str(self.folder.parent / "cache"))


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeHub:
    folder = tmp_path / "dataset" / "main"
    folder.mkdir(parents=True)
    for split, count in (("train", 8), ("test", 2)):
        rows = {"question": [f"1 + {n}?" for n in range(count)], "answer": ["#### 2"] * count}
        pq.write_table(pa.table(rows), folder / f"{split}.parquet")
    monkeypatch.chdir(tmp_path)
    datasets.disable_progress_bars()
    return FakeHub(tmp_path / "dataset", monkeypatch)


@each(
    ("name", "parts"),
    [
        ("hub:a/b", ("a/b", None, "train", None)),
        ("a/b", ("a/b", None, "train", None)),
        ("hub:a/b:test", ("a/b", None, "test", None)),
        ("hub:a/b/main:train[:10%]", ("a/b", "main", "train[:10%]", None)),
        (f"hub:a/b.c/main:test@{COMMIT}", ("a/b.c", "main", "test", COMMIT)),
        ("hub:a/b@refs/pr/1", ("a/b", None, "train", "refs/pr/1")),
    ],
)
def test_addresses(name: str, parts: tuple[Any, ...]) -> None:
    found = Address.parse(name)
    assert found == Address(*parts)
    assert Address.parse(str(found)) == found


@each("name", ["hub:", "hub:a", "hub:a/b/c/d", "hub:a/b:", "hub:a/b@", "hub:a b/c", "hub:/a/b"])
def test_what_is_no_address(name: str) -> None:
    with pytest.raises(ValueError, match=r"expected a dataset as hub:OWNER/NAME\[/CONFIG\]"):
        load_prompts(name)


def test_rows_of_a_split(hub: FakeHub) -> None:
    found = load_prompts([f"hub:{REPOSITORY}/main:train", f"hub:{REPOSITORY}/main:test"]).prompts
    assert [x.messages[0]["content"] for x in found[:3]] == ["1 + 0?", "1 + 1?", "1 + 2?"]
    assert [x.answer for x in found] == ["2"] * 10
    assert [x.source for x in found][7:9] == [
        f"hub:{REPOSITORY}/main:train",
        f"hub:{REPOSITORY}/main:test",
    ]
    assert hub.loaded == [(REPOSITORY, "main", split, None) for split in ("train", "test")]
    assert hub.asked == []


def test_hub_means_the_hub_where_a_folder_has_the_same_name(hub: FakeHub) -> None:
    Path(REPOSITORY).mkdir(parents=True)
    with pytest.raises(ValueError, match="got the folder"):
        load_prompts(REPOSITORY)
    assert len(load_prompts(f"hub:{REPOSITORY}/main").prompts) == 8


@pytest.mark.slow
def test_a_run_records_the_commit_and_keeps_it(hub: FakeHub, tmp_path: Path) -> None:
    data = {"train": [f"hub:{REPOSITORY}/main:train"], "test": [f"{REPOSITORY}/main:test@v1"]}
    recipe = changed(reward="exact", data=data, stages=[{"kind": "optimize", "steps": 1}])
    model = tmp_path / "model"
    tiny_policy().save(model)
    recipe["model"] = {"path": str(model)}
    Trainer.from_recipe(parse_recipe(recipe)).train(tmp_path / "run", progress=False)
    assert hub.asked == [(REPOSITORY, None), (REPOSITORY, "v1")]
    pinned = [f"hub:{REPOSITORY}/main:{split}@{COMMIT}" for split in ("train", "test")]
    hub.commit = OTHER  # the dataset changes on the Hub
    hub.loaded.clear()
    again = load_run_recipe(tmp_path / "run")
    assert [*again.data.train, *again.data.test] == pinned
    assert make_plan(again).recipe == again
    assert [x[3] for x in hub.loaded] == [COMMIT, COMMIT]
    assert len(hub.asked) == 2
    card = next((tmp_path / "run" / "checkpoints").glob("step-*/policy/README.md")).read_text()
    assert f"datasets:\n- {REPOSITORY}\n" in card
    assert pinned[0] in card


def test_a_model_from_memory_keeps_the_commit(hub: FakeHub) -> None:
    policy = tiny_policy()
    trainer = Trainer(
        policy.model, f"hub:{REPOSITORY}/main", tokenizer=policy.codec.tokenizer, steps=1,
        reward="exact", rollout={"prompts": 4, "max_tokens": 4},
    )  # fmt: skip
    assert trainer.recipe.data.train == [f"hub:{REPOSITORY}/main:train@{COMMIT}"]
    assert trainer.recipe.model.path == "checkpoints/initial"


def tiny_policy() -> Policy:
    world = make_world("derived_variables", given=2, derived=3, needed=[1, 2], modulus=7)
    return Policy.tiny("qwen2", world.tokenizer(), hidden=32, layers=1, heads=4)


def test_files_are_not_asked_for(hub: FakeHub) -> None:
    names = ["a.jsonl", "dataset/main/train.parquet", "train: rows given in Python"]
    assert pin_addresses(names) == names
    assert hub.asked == []


def refused(kind: type[Exception], status: int = 404) -> Exception:
    request = httpx2.Request("GET", "https://hub.test")
    return kind("refused", response=httpx2.Response(status, request=request))  # type: ignore[call-arg]


@each(
    ("error", "said"),
    [
        (httpx2.ConnectError("no\nroute"), f"Hub: no route. .*{REPOSITORY}:train@COMMIT"),
        (OfflineModeIsEnabled("offline"), "the network and HF_HUB_OFFLINE"),
        (refused(RepositoryNotFoundError), f"neither a file '{REPOSITORY}' here nor a dataset"),
        (refused(RevisionNotFoundError), "expected a branch, tag or commit of"),
        (refused(GatedRepoError, 403), "is gated: accept its terms on the Hub first"),
    ],
)
def test_the_hub_does_not_tell_the_commit(hub: FakeHub, error: Exception, said: str) -> None:
    hub.error = error
    recipe = changed(reward="exact", data={"train": [REPOSITORY]}, model={"path": "model"})
    recipe["stages"] = [{"kind": "optimize", "steps": 1}]
    with pytest.raises(RecipeError, match=f"^data: (?s:.*){said}"):
        make_plan(parse_recipe(recipe))
    assert not hub.loaded


def test_without_the_extra(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ValueError, match=r"needs the package datasets.*\[hub\]"):
        load_prompts(f"hub:{REPOSITORY}")


def test_another_commit_of_the_cache_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the Hub, datasets takes whatever it downloaded last and only logs it."""
    place = f"/cache/openai___gsm8k/main/0.0.0/{OTHER}/gsm8k-train.arrow"
    table = SimpleNamespace(cache_files=[{"filename": place}])
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: table)
    address = Address(REPOSITORY, "main", "train", COMMIT)
    with pytest.raises(ValueError, match=f"expected commit {COMMIT}.* has commit {OTHER}"):
        address.load()
    assert Address(REPOSITORY, "main", "train", OTHER).load() is table


def test_the_real_functions_have_these_arguments() -> None:
    from inspect import signature

    assert {"revision", "timeout"} <= signature(HfApi.dataset_info).parameters.keys()
    assert {"path", "name", "split", "revision"} <= signature(
        datasets.load_dataset
    ).parameters.keys()
