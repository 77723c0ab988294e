"""``segcredit push`` with a client that keeps what it gets; the real Hub is never asked."""

import shutil
from pathlib import Path
from typing import Any

import httpx2
import pytest
from huggingface_hub import HfApi
from huggingface_hub.errors import (
    HfHubHTTPError,
    LocalTokenNotFoundError,
    OfflineModeIsEnabled,
)
from tiny_runs import changed
from typer.testing import CliRunner, Result

from segcredit.cli import app
from segcredit.config import parse_recipe
from segcredit.runlog import read_run
from segcredit.runlog.publish import Policy, find_saved_policy
from segcredit.runlog.storage import seal
from segcredit.train.trainer import Trainer

REPO = "me/counting"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with two checkpoints."""
    folder = tmp_path_factory.mktemp("push") / "run"
    stages = [{"kind": "warm_start", "steps": 1, "batch": 4}, {"kind": "optimize", "steps": 1}]
    recipe = parse_recipe(changed(reward="exact", stages=stages, save__every=1))
    Trainer.from_recipe(recipe).train(folder, progress=False)
    return folder


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(trained, tmp_path / "run"))


class FakeHub:
    """What the command asks of HfApi, with the signatures of HfApi."""

    endpoint = "https://hub.test"

    def __init__(self, existing: tuple[str, ...] = (), fails: dict[str, Exception] | None = None):
        self.repos = dict.fromkeys(existing)
        self.fails = fails or {}
        self.commits: list[dict[str, bytes]] = []

    def _meet(self, name: str) -> None:
        if name in self.fails:
            raise self.fails[name]

    def whoami(self) -> dict[str, str]:
        self._meet("whoami")
        return {"name": "me"}

    def repo_exists(self, repo_id: str) -> bool:
        self._meet("repo_exists")
        return repo_id in self.repos

    def create_repo(self, repo_id: str, *, private: bool) -> None:
        self._meet("create_repo")
        self.repos[repo_id] = private

    def create_commit(self, repo_id: str, operations: Any, *, commit_message: str) -> None:
        self._meet("create_commit")
        files = {x.path_in_repo: Path(x.path_or_fileobj).read_bytes() for x in operations}
        self.commits.append({"title": commit_message.encode(), **files})


def push(monkeypatch: pytest.MonkeyPatch, hub: FakeHub, *words: Any) -> Result:
    monkeypatch.setattr("huggingface_hub.HfApi", lambda: hub)
    return CliRunner().invoke(app, ["push", *map(str, words)])


def http_error(status: int) -> HfHubHTTPError:
    request = httpx2.Request("POST", "https://hub.test")
    return HfHubHTTPError("no\nanswer", response=httpx2.Response(status, request=request))


def test_the_fake_has_the_methods_of_the_real_client() -> None:
    for name in ("whoami", "repo_exists", "create_repo", "create_commit", "endpoint"):
        assert hasattr(HfApi(), name)


def test_the_last_policy_with_its_card(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = FakeHub()
    done = push(monkeypatch, hub, run, REPO, "--private")
    assert done.exit_code == 0, done.output
    assert f"uploaded  https://hub.test/{REPO}" in done.output
    assert hub.repos == {REPO: True}
    (files,) = hub.commits
    folder = run / "checkpoints" / "step-000002" / "policy"
    assert files.pop("title") == b"Policy after step 2"
    assert files == {x.name: x.read_bytes() for x in folder.iterdir()}
    assert {"README.md", "config.json", "model.safetensors"} <= files.keys()
    assert b"saved after step 2" in files["README.md"]


def test_an_earlier_checkpoint(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = FakeHub((REPO,))
    done = push(monkeypatch, hub, run, REPO, "--checkpoint", 1, "--update")
    assert done.exit_code == 0, done.output
    assert hub.commits[0]["title"] == b"Policy after step 1"
    problem = push(monkeypatch, hub, run, REPO, "--checkpoint", 7)
    assert problem.exit_code == 2
    assert "has no step-000007. It has 1, 2." in problem.output
    assert "--checkpoint 2" in problem.output


def test_a_dry_run_lists_everything_and_asks_nothing(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = FakeHub(fails={"whoami": AssertionError("asked")})
    done = push(monkeypatch, hub, run, REPO, "--dry-run")
    assert done.exit_code == 0, done.output
    folder = run / "checkpoints" / "step-000002" / "policy"
    sizes = {x.name: x.stat().st_size for x in folder.iterdir()}
    for name, size in sizes.items():
        assert f"{size:,} bytes  {name}" in done.output
    assert f"{sum(sizes.values()):,} bytes  in all" in done.output
    assert not hub.repos
    assert "state" not in done.output


@pytest.mark.parametrize(
    ("existing", "words", "said"),
    [
        ((REPO,), [], f"expected a new repository; {REPO} exists"),
        ((), ["--update"], f"there is no {REPO}. Leave --update out"),
        ((), ["--update", "--private"], "Leave one of them out"),
    ],
)
def test_the_repository_is_as_expected(
    run: Path, monkeypatch: pytest.MonkeyPatch, existing: Any, words: list[str], said: str
) -> None:
    hub = FakeHub(existing)
    done = push(monkeypatch, hub, run, REPO, *words)
    assert done.exit_code == 2
    assert said in done.output
    assert not hub.commits


@pytest.mark.parametrize("name", ["me", "a/b/c", "a b/c", "me/x--y", "https://hub.test/me/x", ""])
def test_names_that_are_no_repositories(
    run: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    done = push(monkeypatch, FakeHub(), run, name, "--dry-run")
    assert done.exit_code == 2
    assert "expected a repository such as my-name/my-model" in done.output


@pytest.mark.parametrize(
    ("call", "error", "said"),
    [
        ("whoami", LocalTokenNotFoundError("none"), "there is none. Type: hf auth login"),
        ("whoami", http_error(401), "the token is not valid. Type: hf auth login"),
        ("whoami", httpx2.ConnectError("no route"), "it failed: no route. Check the network"),
        ("whoami", OfflineModeIsEnabled("off"), "HF_HUB_OFFLINE is set. Unset it"),
        ("create_repo", http_error(403), f"the token may not write to {REPO}"),
        ("create_commit", http_error(500), f"Try again later. {REPO} was created"),
        ("create_commit", TimeoutError(), "failed: TimeoutError. Check the network"),
    ],
)
def test_failures_of_the_hub(
    run: Path, monkeypatch: pytest.MonkeyPatch, call: str, error: Exception, said: str
) -> None:
    hub = FakeHub(fails={call: error})
    done = push(monkeypatch, hub, run, REPO)
    assert done.exit_code == 2
    assert said in done.output
    assert ("add --update" in done.output) == (call == "create_commit")
    assert not hub.commits


@pytest.mark.parametrize("name", ["notes.txt", ".hidden", "sub/x.json", "pytorch_model.bin"])
def test_what_the_run_did_not_write_is_not_uploaded(
    run: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    added = run / "checkpoints" / "step-000002" / "policy" / name
    added.parent.mkdir(exist_ok=True)
    added.write_text("x")
    done = push(monkeypatch, FakeHub(), run, REPO)
    assert done.exit_code == 2
    assert f"expected only files that the run wrote in {added.parents[name.count('/')]}" in (
        done.output
    )
    assert name in done.output


def test_nor_a_file_that_may_run_code(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = run / "checkpoints" / "step-000002"
    (place / "policy" / "pytorch_model.bin").write_bytes(b"x")
    (place / "manifest.json").unlink()
    seal(place)
    done = push(monkeypatch, FakeHub(), run, REPO)
    assert done.exit_code == 2
    assert "run no code when they are loaded; got 'pytorch_model.bin'" in done.output


def test_nor_a_link_that_replaces_a_file(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = run / "checkpoints" / "step-000002" / "policy" / "config.json"
    aside = run / "elsewhere.json"
    file.rename(aside)
    file.symlink_to(aside)
    done = push(monkeypatch, FakeHub(), run, REPO)
    assert done.exit_code == 2
    assert "expected plain files" in done.output


def test_a_damaged_checkpoint_is_refused(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = run / "checkpoints" / "step-000002" / "policy" / "README.md"
    file.write_text("x" * file.stat().st_size)
    hub = FakeHub()
    done = push(monkeypatch, hub, run, REPO, "--checkpoint", 2)
    assert done.exit_code == 2
    assert "README.md was altered" in done.output
    assert not hub.repos


def test_a_run_without_checkpoints(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.rmtree(run / "checkpoints")
    done = push(monkeypatch, FakeHub(), run, REPO)
    assert done.exit_code == 2
    assert "expected a complete checkpoint" in done.output
    with pytest.raises(ValueError, match="It has none"):
        find_saved_policy(read_run(run), 1)


def test_paths_of_this_machine_are_named(tmp_path: Path) -> None:
    text = "train: [/home/me/a.jsonl, ~/b.csv, ../c.csv, hub:a/b/c, https://d.test/e] `/models/f`"
    (tmp_path / "README.md").write_text(f"<summary>x</summary>\n{text}\n")
    policy = Policy(tmp_path, 1, {"README.md": 1})
    assert policy.local_paths == ["../c.csv", "/home/me/a.jsonl", "/models/f", "~/b.csv"]
    assert Policy(tmp_path, 1, {}).local_paths == []
