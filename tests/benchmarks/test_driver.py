"""The VLMEvalKit driver, with a stub of the server and a fake of ms-vlmeval."""

import json
import os
import pickle
import re
import socket
import stat
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from stub_server import stub_server, system_prompts
from toolkit_tables import small_tables

from segcredit.benchmarks.run import weights_digest
from segcredit.benchmarks.server import Program, Server, ServerError, connect, serve
from segcredit.benchmarks.vlmevalkit import (
    TOOLKIT,
    DriverError,
    DriverSettings,
    check_sets,
    evaluate_with_toolkit,
    prepare_environment,
)

HERE = Path(__file__).parent
SETTINGS = DriverSettings(system_prompt="Think first.", concurrency=2)


def executable(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


@pytest.fixture
def python(tmp_path: Path) -> Path:
    """Python of an environment with a fake of ms-vlmeval."""
    script = f'#!/bin/sh\nexec {sys.executable} {HERE / "fake_toolkit.py"} "$@"\n'
    return executable(tmp_path / "environment" / "bin" / "python", script)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    small_tables(tmp_path / "data")
    return tmp_path / "data"


@pytest.fixture
def fake_vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Put a ``vllm`` on the path that runs this line of shell."""

    monkeypatch.setattr("segcredit.benchmarks.server.POLL_INTERVAL", 0.05)

    def install(line: str) -> None:
        executable(tmp_path / "tools" / "vllm", f"#!/bin/sh\n{line}\n")
        monkeypatch.setenv("PATH", f"{tmp_path / 'tools'}:{os.environ['PATH']}")
        monkeypatch.setattr(sys, "executable", str(tmp_path / "nowhere" / "python"))

    return install


STUB = f'PYTHONPATH={HERE.parent} exec {sys.executable} {HERE / "stub_server.py"} "$@"'


def constant(_: str) -> str:
    return "<think>It could be B.</think>The answer is \\boxed{C}."


def test_answers_scores_and_settings(python: Path, data: Path, tmp_path: Path) -> None:
    output = tmp_path / "output"
    seen_progress = []
    with stub_server(constant) as (url, seen):
        results, own = evaluate_with_toolkit(
            python,
            connect(url),
            ["logicvista", "wemath"],
            output,
            SETTINGS,
            data,
            lambda *x: seen_progress.append(x),
        )
    assert len(seen.bodies) == 7
    assert system_prompts(seen) == {"Think first."}
    assert {(x["temperature"], x["top_p"], x["model"]) for x in seen.bodies} == {
        (0.6, 0.95, "first")
    }
    assert [x.correct for x in results["logicvista"].answers] == [True, False, False, False]
    assert results["logicvista"].scores["accuracy"].value == 25
    assert results["logicvista"].answers[0].response == (
        "<think>It could be B.</think>The answer is \\boxed{C}."
    )
    assert results["wemath"].scores["score (strict)"].value == 50  # both steps, not the problem
    assert own["wemath"].score == 12.38
    assert own["logicvista"].score is None
    assert "with a judge only" in own["logicvista"].reason
    lines = (output / "answers" / "logicvista.jsonl").read_text().splitlines()
    assert [json.loads(x)["answer"] for x in lines] == ["C"] * 4
    written = json.loads((output / "scores.json").read_text())
    assert written["wemath"]["vlmevalkit_score"] == 12.38
    assert written["wemath"]["driver"] == "ms-vlmeval==0.0.20"
    assert all(name in ("logicvista", "wemath") for name, _, _ in seen_progress)


def test_other_settings_use_another_folder(python: Path, data: Path, tmp_path: Path) -> None:
    with stub_server(constant) as (url, _):
        for settings in (SETTINGS, DriverSettings(temperature=0, system_prompt="x")):
            evaluate_with_toolkit(python, connect(url), ["wemath"], tmp_path / "o", settings, data)
    assert len(list((tmp_path / "o" / "vlmevalkit").iterdir())) == 2


def test_other_weights_arguments_or_questions_are_asked_again(
    python: Path, data: Path, tmp_path: Path
) -> None:
    """The same command after more training: the served name and the folder have not changed."""
    from safetensors.torch import save_file
    from torch import ones

    asked, weights = [], tmp_path / "model" / "model.safetensors"
    weights.parent.mkdir()
    table = data / f"{TOOLKIT['wemath'].dataset}.tsv"
    with stub_server(constant) as (url, seen):

        def ask(arguments: str = "") -> int:
            before = len(seen.bodies)
            served = (str(weights.parent), weights_digest(str(weights.parent)), arguments)
            output = tmp_path / "output"
            evaluate_with_toolkit(
                python, connect(url), ["wemath"], output, SETTINGS, data, served=served
            )
            return len(seen.bodies) - before

        save_file({"w": ones(2)}, weights)
        asked += [ask(), ask()]
        save_file({"w": 2 * ones(2)}, weights)
        asked += [ask(), ask(), ask("--max-model-len 99"), ask()]
        table.write_bytes(table.read_bytes().replace(b"?", b"??"))
        asked += [ask(), ask()]
    assert asked == [3, 0, 3, 0, 3, 0, 3, 0]


def test_questions_that_the_first_run_downloads_are_not_asked_again(
    python: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = data / f"{TOOLKIT['wemath'].dataset}.tsv"
    monkeypatch.setenv("FAKE_DOWNLOAD", str(table.rename(tmp_path / "elsewhere.tsv")))
    with stub_server(constant) as (url, seen):
        for _ in range(2):
            evaluate_with_toolkit(python, connect(url), ["wemath"], tmp_path / "o", SETTINGS, data)
        assert len(seen.bodies) == 3


def test_a_limit_leaves_incomplete_problems_out(python: Path, data: Path, tmp_path: Path) -> None:
    with stub_server(constant) as (url, _):
        server = connect(url)
        some = DriverSettings(limit=2, system_prompt="x")
        results, _ = evaluate_with_toolkit(python, server, ["logicvista"], tmp_path, some, data)
        assert [x.id for x in results["logicvista"].questions] == ["0", "1"]
        with pytest.raises(DriverError, match="none of the 2 predictions of VLMEvalKit completes"):
            evaluate_with_toolkit(python, server, ["wemath"], tmp_path, some, data)


@pytest.mark.parametrize(
    ("fake", "said"),
    [
        ("crash", r"exit code 3 on wemath.*something specific is broken.*Run the same command"),
        ("nothing", r"no predictions for wemath.*the tsv cannot be downloaded.*--data FOLDER"),
        ("failed", r"3 of 3 requests of wemath failed.*Run the same command again"),
        ("columns", r"expected the columns index and prediction in .*got 'index'"),
        ("score", r"expected a score in the column 'Score \(Strict\)'.*'no number'"),
    ],
)
def test_what_goes_wrong_in_the_toolkit(
    fake: str, said: str, python: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE", fake)
    with stub_server(constant) as (url, _), pytest.raises(DriverError) as error:
        evaluate_with_toolkit(python, connect(url), ["wemath"], tmp_path / "o", SETTINGS, data)
    assert re.search(said, str(error.value), re.DOTALL), str(error.value)


def test_sets_that_the_toolkit_does_not_have() -> None:
    check_sets(list(TOOLKIT))
    with pytest.raises(DriverError, match=r"VLMEvalKit has no set for 'gsm8k'.*without --driver"):
        check_sets(["gsm8k", "wemath"])


def test_the_environment_is_used_if_it_is_there(python: Path) -> None:
    assert prepare_environment(python.parents[1]) == python


def test_an_environment_with_another_version_is_refused(
    python: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_VERSION", "0.0.1")
    with pytest.raises(DriverError, match=r"has ms-vlmeval 0\.0\.1\. Leave --environment out"):
        prepare_environment(python.parents[1])


def test_a_folder_that_is_no_environment_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(DriverError, match="has other files"):
        prepare_environment(tmp_path)
    assert (tmp_path / "notes.txt").exists()


def test_an_environment_that_cannot_be_created(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = executable(tmp_path / "python", "#!/bin/sh\necho no ensurepip here >&2\nexit 1\n")
    monkeypatch.setattr(sys, "executable", str(broken))
    with pytest.raises(DriverError, match=r"(?s)could not be created.*no ensurepip here.*--env"):
        prepare_environment(tmp_path / "new")


def test_the_server_is_started_and_stopped(
    fake_vllm: Callable[[str], None], python: Path, data: Path, tmp_path: Path
) -> None:
    fake_vllm(STUB)
    with serve("my-model", tmp_path / "server.log", arguments="--max-model-len 64") as server:
        results, _ = evaluate_with_toolkit(
            python, server, ["wemath"], tmp_path / "o", SETTINGS, data
        )
        process = server.process
    assert results["wemath"].scores["score (strict)"].value == 50
    assert process is not None
    assert process.ended is not None
    assert "serve my-model --host 127.0.0.1 --port" in (tmp_path / "server.log").read_text()
    assert "--max-model-len 64" in (tmp_path / "server.log").read_text()


def test_no_vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    with (
        pytest.raises(ServerError, match=r"vLLM is not installed.*--server http://HOST:PORT/v1"),
        serve("m", tmp_path / "log"),
    ):
        pass


def test_a_port_that_is_taken(fake_vllm: Callable[[str], None], tmp_path: Path) -> None:
    fake_vllm(STUB)
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with (
            pytest.raises(ServerError, match=f"--port {port} is not free.*Leave --port out"),
            serve("m", tmp_path / "log", port),
        ):
            pass


def test_a_server_that_cannot_start(fake_vllm: Callable[[str], None], tmp_path: Path) -> None:
    fake_vllm("echo 'ValueError: no such architecture' >&2; exit 7")
    said = r"(?s)exit code 7 before it answered.*no such architecture.*--serve-args"
    with pytest.raises(ServerError, match=said), serve("m", tmp_path / "log"):
        pass


def test_a_server_that_never_answers(
    fake_vllm: Callable[[str], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_vllm("echo loading; exec sleep 60")
    monkeypatch.setattr("segcredit.benchmarks.server.START_TIMEOUT", 0.2)
    with (
        pytest.raises(ServerError, match=r"(?s)did not answer.*loading"),
        serve("m", tmp_path / "l"),
    ):
        pass


def test_a_server_that_dies(python: Path, data: Path, tmp_path: Path) -> None:
    dead = Program(["sh", "-c", "echo CUDA out of memory; exit 9"], tmp_path / "server.log")
    while dead.ended is None:
        pass
    server = Server("http://127.0.0.1:9/v1", "model", dead)
    with pytest.raises(ServerError, match=r"(?s)exit code 9 before all.*CUDA out of memory.*kept"):
        evaluate_with_toolkit(python, server, ["wemath"], tmp_path / "o", SETTINGS, data)


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("localhost:8000", "--server needs the URL"),
        ("http://127.0.0.1:9/v1", r"got .*refused.*Start it \(vllm serve MODEL\)"),
    ],
)
def test_a_server_that_cannot_be_reached(url: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        connect(url)


@pytest.mark.slow
def test_half_a_checkpoint_is_replaced(
    python: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """VLMEvalKit cannot read the file that a kill left incomplete."""
    monkeypatch.setattr("segcredit.benchmarks.vlmevalkit._KEEP_EVERY", 0)
    monkeypatch.setenv("FAKE", "checkpoint")
    with stub_server(constant) as (url, _):
        args = (python, connect(url), ["wemath"], tmp_path / "o", SETTINGS, data)
        evaluate_with_toolkit(*args)
        (file,) = (tmp_path / "o").glob("vlmevalkit/*/policy/*_checkpoint.pkl")
        whole = file.read_bytes()
        assert pickle.loads(whole) == {"0": "an answer"}
        file.write_bytes(whole[:-3])
        evaluate_with_toolkit(*args)
        assert file.with_suffix(".seen").read_bytes() == whole
        file.write_bytes(b"")
        file.with_suffix(".complete").unlink()
        evaluate_with_toolkit(*args)
        assert not file.with_suffix(".seen").exists()
