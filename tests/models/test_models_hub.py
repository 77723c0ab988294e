"""What is said of models on a hub that cannot be had: by a real server, and by none."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from fake_hub import COMMIT, fake_hub
from huggingface_hub import constants
from tiny_policies import policy

from segcredit.models import ModelError
from segcredit.models import loading as place
from segcredit.models.loading import load_config

CLOSED = "http://127.0.0.1:9"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("served")
    policy("llama").save(folder)
    return folder


@pytest.fixture
def ask(monkeypatch: pytest.MonkeyPatch) -> Any:
    """(hub, name) → what is said, and after how many seconds."""

    def told(hub: str, name: str) -> tuple[str, float]:
        path = constants.HUGGINGFACE_CO_URL_TEMPLATE.removeprefix(constants.ENDPOINT)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", hub + path)
        monkeypatch.setattr(constants, "ENDPOINT", hub)
        began = time.monotonic()
        with pytest.raises(ModelError) as error:
            load_config(name)
        return str(error.value), time.monotonic() - began

    return told


def test_every_refusal_has_its_way_out(
    model: Path, ask: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(place, "SECONDS", 0.5)
    owners = ("gated", "gated-unknown", "none", "no-config", "busy", "slow")
    with fake_hub(model) as hub:
        found = {owner: ask(hub, f"{owner}/model") for owner in owners}
    message = {owner: text for owner, (text, _) in found.items()}
    for name in ("gated", "gated-unknown"):
        assert message[name] == (
            f"{name}/model is gated: you must accept its license first. Accept it at "
            f"{hub}/{name}/model, then type: hf auth login"
        )
    assert message["none"].startswith("there is no folder 'none/model' here, and no model of that ")
    assert "hf auth login" in message["none"]
    assert "has no config.json, so transformers cannot load it" in message["no-config"]
    assert f"{hub} answered 503. Try again later; or download it elsewhere: hf" in message["busy"]
    assert f"{hub} cannot be reached (" in message["slow"]
    assert max(seconds for _, seconds in found.values()) < 8, "once, not five times"


def test_out_of_reach(ask: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    message, seconds = ask(CLOSED, "some/model")
    assert message.startswith(
        f"some/model is not a folder here, was not downloaded before, and {CLOSED} cannot be "
    )
    expected = "connection, or HF_ENDPOINT; or download it elsewhere: hf download some/model "
    assert expected in message
    assert seconds < 5, "transformers alone would try for 23"
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    message, _ = ask(CLOSED, "some/model")
    assert "HF_HUB_OFFLINE is set, so the hub is not asked. Unset it; or download it" in message


SCRIPT = """
import json, os, sys, time, urllib.request, warnings
from segcredit.models import ModelError, Policy

def load():
    began = time.monotonic()
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        try:
            found = type(Policy.from_pretrained("good/model").model).__name__
        except ModelError as error:
            found = str(error)
    said = [str(x.message) for x in warned if "downloaded copy" in str(x.message)]
    told.append([found, time.monotonic() - began, said])

def control(what):
    urllib.request.urlopen(hub + "/control/" + what).close()

hub, weights, told = os.environ["HF_ENDPOINT"], sys.argv[1], []
load()
control("down")
load()
control("up")
os.truncate(os.path.realpath(weights), os.path.getsize(weights) - 100)
load()
print("told:" + json.dumps(told))
"""


@pytest.mark.slow
def test_what_was_downloaded_serves_when_the_hub_is_gone(model: Path, tmp_path: Path) -> None:
    """In a process of its own, as transformers remembers where its hub is."""
    snapshot = tmp_path / "hub" / "models--good--model" / "snapshots" / COMMIT
    weights = snapshot / "model.safetensors"
    with fake_hub(model) as hub:
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT, str(weights)],
            env={**os.environ, "HF_ENDPOINT": hub, "HF_HOME": str(tmp_path), "NO_PROXY": "*"},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
    assert done.returncode == 0, done.stderr
    (line,) = [x for x in done.stdout.splitlines() if x.startswith("told:")]
    online, gone, damaged = json.loads(line.removeprefix("told:"))
    assert (online[0], online[2]) == ("LlamaForCausalLM", [])
    assert gone[0] == "LlamaForCausalLM"
    assert gone[1] < 10, "no file is waited for"
    (warning,) = gone[2]
    assert f"{hub} cannot be reached (" in warning
    assert f"Using the downloaded copy of good/model in {snapshot}." in warning
    size = (model / "model.safetensors").stat().st_size - 100
    assert damaged[0].startswith(f"'{weights}' is damaged or was cut off at {size} bytes")
    assert damaged[0].endswith("hf download good/model model.safetensors --force-download")
