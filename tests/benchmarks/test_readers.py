"""Benchmark data in all layouts, and everything that can be wrong with it."""

import base64
import csv
import json
from pathlib import Path

import pytest
from bench import needs_data, questions, write_logicvista
from tiny_policies import picture

from segcredit.benchmarks import Benchmark, find_data, make_benchmark
from segcredit.benchmarks.readers import data_folders
from segcredit.benchmarks.run import load_questions
from segcredit.types import Prompt

COLUMNS = ["index", "image", "question", "answer", "skill"]


def write_tsv(path: Path, rows: list[dict], columns: list[str] | None = None) -> Path:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, columns or COLUMNS, delimiter="\t", lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    return path.parent


def encoded(image: bytes) -> str:
    return base64.b64encode(image).decode()


def read(folder: Path, name: str = "logicvista") -> list[Prompt]:
    benchmark: Benchmark = make_benchmark(name)
    found = find_data(benchmark.layouts, [folder])
    assert found is not None
    return benchmark.read(found)


def tsv_row(index: int, **columns: object) -> dict:
    row = {"index": index, "question": "Which?", "answer": "A", "skill": "spatial"}
    return {**row, "image": encoded(picture(56, 56, seed=index)), **columns}


def test_tsv_with_base64_images(tmp_path: Path) -> None:
    asked = read(write_tsv(tmp_path / "LogicVista.tsv", [tsv_row(n) for n in range(3)]))
    assert [x.id for x in asked] == ["0", "1", "2"]
    assert [x.images for x in asked] == [(picture(56, 56, seed=n),) for n in range(3)]
    assert asked[0].columns == {"skill": "spatial"}


def test_rows_that_refer_to_an_image_share_it(tmp_path: Path) -> None:
    rows = [tsv_row(0, image="2"), tsv_row(1, image="2"), tsv_row(2)]
    asked = read(write_tsv(tmp_path / "LogicVista.tsv", rows))
    assert {x.images for x in asked} == {(picture(56, 56, seed=2),)}
    assert asked[0].images[0] is asked[1].images[0], "kept in memory once"


def test_several_images_in_a_cell(tmp_path: Path) -> None:
    images = [picture(56, 56, seed=n) for n in (1, 2)]
    cell = str([encoded(x) for x in images])
    (asked,) = read(write_tsv(tmp_path / "LogicVista.tsv", [tsv_row(0, image=cell)]))
    assert list(asked.images) == images
    assert asked.messages[0]["content"] == "<image><image>Which?"


@pytest.mark.slow
@needs_data
def test_the_tsv_of_real_rows_equals_the_git_layout(tmp_path: Path) -> None:
    real = questions("logicvista")[:20]
    rows = [
        {
            "index": n,
            "image": encoded(x.images[0].read_bytes()),
            "question": x.messages[0]["content"].removeprefix("<image>"),
            "answer": x.answer,
            "skill": x.columns["skill"],
        }
        for n, x in enumerate(real)
    ]
    again = read(write_tsv(tmp_path / "LogicVista.tsv", rows))
    for a, b in zip(real, again, strict=True):
        assert a.images[0].read_bytes() == b.images[0]
        assert (a.messages, a.answer, a.columns) == (b.messages, b.answer, b.columns)


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        (tsv_row(0, image="7"), "or the index of a row that has one, under 'image'; got '7'"),
        (tsv_row(0, image="!" * 200), "expected base64; got '!!!"),
        (tsv_row(0, image=encoded(b"no image" * 40)), "expected an image (PNG"),
        (tsv_row(0, image=""), "expected an image in the column 'image' or"),
        (tsv_row(0, answer=""), "expected a value in the column 'answer'; the row has the columns"),
        (tsv_row(0, question="x" * 200_000), "expected at most 100,000 characters under"),
    ],
)
def test_bad_cells(tmp_path: Path, row: dict, problem: str) -> None:
    folder = write_tsv(tmp_path / "LogicVista.tsv", [tsv_row(5), row])
    with pytest.raises(ValueError, match="Is this the data of LogicVista") as error:
        read(folder)
    assert "LogicVista.tsv row 2: " in str(error.value)
    assert problem in str(error.value)


def test_wrong_columns(tmp_path: Path) -> None:
    folder = write_tsv(
        tmp_path / "LogicVista.tsv", [{"id": "1", "frage": "Was?"}], columns=["id", "frage"]
    )
    with pytest.raises(ValueError, match="has no questions of LogicVista"):
        read(folder)
    folder = write_tsv(
        tmp_path / "LogicVista.tsv",
        [{"index": "1", "question": "Q"}],
        columns=["index", "question"],
    )
    with pytest.raises(ValueError, match="the row has the columns 'index', 'question'"):
        read(folder)


def test_a_missing_image_is_named_with_its_row(data: Path) -> None:
    (data / "logicvista/data/images/v1_3.png").unlink()
    with pytest.raises(ValueError, match="1 bad row") as error:
        read(data)
    assert "dataset.json row 4 (v1_3): expected an image in 'v1_3.png'; got no such" in str(
        error.value
    )


@pytest.mark.parametrize("name", ["../secret.png", "/etc/passwd", "a/../../../secret.png"])
def test_images_outside_the_folder_are_refused(data: Path, name: str) -> None:
    (data / "logicvista/data/secret.png").write_bytes(picture(56, 56))
    file = data / "logicvista/data/dataset.json"
    rows = json.loads(file.read_text())
    rows["v1_0"]["imagename"] = name
    file.write_text(json.dumps(rows))
    with pytest.raises(ValueError, match=r"which leads out of it|no such file"):
        read(data)


def test_damaged_json(data: Path) -> None:
    file = data / "logicvista/data/dataset.json"
    file.write_text(file.read_text()[:-20])
    with pytest.raises(ValueError, match=r"expected a JSON file;.*Was the download complete"):
        read(data)
    file.write_text("3")
    with pytest.raises(ValueError, match="expected a list or an object of rows"):
        read(data)


def test_two_questions_with_one_id(tmp_path: Path) -> None:
    folder = write_tsv(tmp_path / "LogicVista.tsv", [tsv_row(1), tsv_row(1)])
    with pytest.raises(ValueError, match="row 2: expected a unique id; got '1' a second time"):
        read(folder)


def test_missing_data_says_which_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LMUData", str(tmp_path / "lmu"))
    with pytest.raises(ValueError, match="expected the data of LogicVista, DynaMath in") as error:
        load_questions(["logicvista", "dynamath"])
    assert "logicvista: It is read from LogicVista.tsv (VLMEvalKit) or" in str(error.value)
    assert "--data FOLDER" in str(error.value)
    with pytest.raises(ValueError, match="--data must be a folder"):
        data_folders("nowhere")
    (tmp_path / "lmu").mkdir()
    write_tsv(tmp_path / "lmu/LogicVista.tsv", [tsv_row(1)])
    (found,) = load_questions(["logicvista"])
    assert [x.id for x in found.questions] == ["1"], "found in $LMUData"
    write_logicvista(tmp_path / "data/bench")
    (found,) = load_questions(["logicvista"])
    assert len(found.questions) == 9, "the data of the project first"


def test_files_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub
    import pyarrow as arrow
    import pyarrow.parquet as parquet

    image = picture(56, 56)
    row = {"index": 0, "question": "Q? Options: A: x, B: y", "image": image, "answer": "A"}
    row |= {"category": "math", "l2_category": "geometry"}
    asked = []

    def download(name: str, **settings: object) -> str:
        asked.append((name, settings))
        parquet.write_table(arrow.Table.from_pylist([row]), tmp_path / "mmstar.parquet")
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    benchmark = make_benchmark("mmstar")
    found = find_data(benchmark.layouts, [tmp_path / "nothing"], hub=True)
    assert found is not None
    (question,) = benchmark.read(found)
    assert question.images == (image,)
    wanted = {"repo_type": "dataset", "allow_patterns": ["mmstar.parquet"]}
    assert asked == [("Lin-Chen/MMStar", wanted)]

    def fail(*names: object, **settings: object) -> str:
        raise OSError("no network")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(ValueError, match="no network") as error:
        benchmark.read(found)
    assert "hf download Lin-Chen/MMStar --repo-type dataset --local-dir MMStar" in str(error.value)
