"""What is written is verl's rows, exactly; it loads as it was, and again gives the same bytes."""

import json
from io import BytesIO
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from each import each
from miniature import contents, geo3k_folder, gsm8k_row, hub_geo3k, jsonl, png, rows_of, write_table
from PIL import Image

from segcredit.data import load_prompts
from segcredit.data.prepare import KNOWN, Columns, prepare

GEO3K = (
    "You FIRST think about the reasoning process as an internal monologue and then provide the "
    "final answer. The reasoning process MUST BE enclosed within <think> </think> tags. The final "
    "answer MUST BE put in \\boxed{}."
)
GSM8K = 'Let\'s think step by step and output the final answer after "####".'
MATH = "Let's think step by step and output the final answer within \\boxed{}."


def test_geometry3k(tmp_path: Path) -> None:
    prepare("geo3k", tmp_path / "out", source=str(geo3k_folder(tmp_path / "geo")))
    assert sorted(contents(tmp_path / "out")) == [
        "test.parquet",
        "train.parquet",
        "validation.parquet",
    ]
    assert rows_of(tmp_path / "out" / "test.parquet")[1] == {
        "data_source": "hiyouga/geometry3k",
        "prompt": [{"role": "user", "content": f"<image>Find side 9. {GEO3K}"}],
        "images": [{"bytes": png(9), "path": "9.png"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "11"},
        "extra_info": {
            "split": "test",
            "index": 1,
            "question": "<image>Find side 9.",
            "answer": "11",
            "id": 9,
            "choices": ["9", "10", "11", "12"],
        },
    }


def test_geometry3k_of_the_hub(tmp_path: Path) -> None:
    write_table(tmp_path / "geo/data/train-00000-of-00002.parquet", hub_geo3k(range(3)))
    write_table(tmp_path / "geo/data/train-00001-of-00002.parquet", hub_geo3k(range(3, 5)))
    prepare("geo3k", tmp_path / "out", source=str(tmp_path / "geo"))
    rows = rows_of(tmp_path / "out" / "train.parquet")
    assert [row["extra_info"]["index"] for row in rows] == [0, 1, 2, 3, 4]
    assert rows[3]["prompt"] == [{"role": "user", "content": f"<image>Find $x_{{3}}$. {GEO3K}"}]
    assert rows[3]["images"] == [{"bytes": png(3), "path": None}]
    assert rows[3]["reward_model"]["ground_truth"] == "3"


def test_gsm8k(tmp_path: Path) -> None:
    folder = tmp_path / "gsm8k"
    jsonl(folder / "train.jsonl", gsm8k_row(5), gsm8k_row(6))
    report = prepare("gsm8k", tmp_path / "out", source=str(folder))
    row = rows_of(tmp_path / "out" / "train.parquet")[1]
    question = "Ann has 6 pens and buys 1,000 more. How many?"
    assert row == {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": f"{question} {GSM8K}"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "1006"},
        "extra_info": {
            "split": "train",
            "index": 1,
            "question": question,
            "answer": gsm8k_row(6)["answer"],
            "response": " 6 + 1,000 = 1006\n#### 1,006",
        },
    }
    assert report.reward == "gsm8k"


def test_math(tmp_path: Path) -> None:
    row = {
        "problem": "What is $\\frac12+\\frac12$?",
        "level": "Level 1",
        "type": "Algebra",
        "solution": "First \\boxed{0}, no: $\\boxed{\\frac{2}{2}}$.",
    }
    jsonl(tmp_path / "math/train.jsonl", row)
    prepare("math", tmp_path / "out", source=str(tmp_path / "math"))
    (written,) = rows_of(tmp_path / "out" / "train.parquet")
    assert written["data_source"] == "DigitalLearningGmbH/MATH-lighteval"
    assert written["prompt"][0]["content"] == f"{row['problem']} {MATH}"
    assert written["reward_model"]["ground_truth"] == "\\frac{2}{2}"
    assert {key: written["extra_info"][key] for key in ("level", "type", "solution")} == {
        key: row[key] for key in ("level", "type", "solution")
    }


@each(
    ("place", "name"),
    [
        ("math500", "HuggingFaceH4/MATH-500"),
        ("MATH-500", "HuggingFaceH4/MATH-500"),
        ("HuggingFaceH4/MATH-500", "HuggingFaceH4/MATH-500"),
        ("math500/test.jsonl", "HuggingFaceH4/MATH-500"),
        ("MATH", "DigitalLearningGmbH/MATH-lighteval"),
        ("elsewhere", "DigitalLearningGmbH/MATH-lighteval"),
    ],
)
def test_every_name_is_one_for_which_verl_has_the_scorer(place: str, name: str) -> None:
    assert KNOWN["math"].data_source(place) == name
    assert KNOWN["geo3k"].data_source(place) == "hiyouga/geometry3k"
    assert KNOWN["gsm8k"].data_source(place) == "openai/gsm8k"


def test_the_schema_is_as_the_datasets_library_writes_it(tmp_path: Path) -> None:
    """Checked against datasets 5.2, which reads this, and writes the same schema itself."""
    prepare("geo3k", tmp_path / "out", source=str(geo3k_folder(tmp_path / "geo")))
    schemas = [pq.read_schema(file) for file in sorted((tmp_path / "out").iterdir())]
    assert all(schema.equals(schemas[0], check_metadata=True) for schema in schemas)
    text = {"dtype": "string", "_type": "Value"}
    number = {"dtype": "int64", "_type": "Value"}
    assert json.loads(schemas[0].metadata[b"huggingface"]) == {
        "info": {
            "features": {
                "data_source": text,
                "prompt": [{"role": text, "content": text}],
                "images": [{"_type": "Image"}],
                "ability": text,
                "reward_model": {"style": text, "ground_truth": text},
                "extra_info": {
                    "split": text,
                    "index": number,
                    "question": text,
                    "answer": text,
                    "id": number,
                    "choices": [text],
                },
            }
        }
    }
    assert schemas[0].field("images").type == pa.list_(
        pa.struct({"bytes": pa.binary(), "path": pa.string()})
    )


def test_the_datasets_library_decodes_the_pictures(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets", reason="needs the datasets library")
    prepare("geo3k", tmp_path / "out", source=str(geo3k_folder(tmp_path / "geo")))
    files = {split: str(tmp_path / f"out/{split}.parquet") for split in ("train", "test")}
    loaded = datasets.load_dataset("parquet", data_files=files, cache_dir=str(tmp_path / "cache"))
    row = loaded["test"][1]
    assert row["images"][0].size == (9, 7)
    assert row["images"][0].tobytes() == Image.open(BytesIO(png(9))).tobytes()
    assert row["extra_info"]["choices"] == ["9", "10", "11", "12"]
    again = tmp_path / "again.parquet"
    loaded["test"].to_parquet(str(again))
    assert pq.read_schema(again).equals(pq.read_schema(files["test"]))
    assert pq.read_table(again).equals(pq.read_table(files["test"]))


def test_pictures_anywhere_give_every_file_the_column(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(png())
    jsonl(tmp_path / "train.jsonl", {"problem": "1?", "answer": "1"})
    jsonl(tmp_path / "test.jsonl", {"problem": "2?", "answer": "2", "image": "a.png"})
    prepare([str(tmp_path / "train.jsonl"), str(tmp_path / "test.jsonl")], tmp_path / "out")
    assert rows_of(tmp_path / "out/train.parquet")[0]["images"] == []
    assert len(rows_of(tmp_path / "out/test.parquet")[0]["images"]) == 1
    assert load_prompts(tmp_path / "out/train.parquet").prompts[0].images == ()


def test_rows_load_as_they_were(tmp_path: Path) -> None:
    folder = geo3k_folder(tmp_path / "geo")
    prepare("geo3k", tmp_path / "out", source=str(folder))
    for name, split in (("train", "train"), ("val", "validation"), ("test", "test")):
        before = load_prompts(folder / f"{name}.jsonl", suffix=GEO3K).prompts
        after = load_prompts(tmp_path / "out" / f"{split}.parquet").prompts
        assert [prompt.messages for prompt in after] == [prompt.messages for prompt in before]
        assert [prompt.answer for prompt in after] == [prompt.answer for prompt in before]
        assert [prompt.images for prompt in after] == [
            tuple(path.read_bytes() for path in prompt.images) for prompt in before
        ]
        assert [prompt.columns["id"] for prompt in after] == [int(prompt.id) for prompt in before]


def test_what_was_prepared_can_be_prepared_again_and_stays(tmp_path: Path) -> None:
    prepare("geo3k", tmp_path / "one", source=str(geo3k_folder(tmp_path / "geo")))
    prepare(str(tmp_path / "one"), tmp_path / "two")
    prepare("geo3k", tmp_path / "three", source=str(tmp_path / "two"))
    assert contents(tmp_path / "one") == contents(tmp_path / "two") == contents(tmp_path / "three")


def test_the_same_rows_give_the_same_bytes(tmp_path: Path) -> None:
    folder = geo3k_folder(tmp_path / "geo")
    prepare("geo3k", tmp_path / "one", source=str(folder))
    prepare("geo3k", tmp_path / "two", source=str(folder), force=True)
    assert contents(tmp_path / "one") == contents(tmp_path / "two")
    prepare("geo3k", tmp_path / "one", source=str(folder), force=True)  # over what is there
    assert contents(tmp_path / "one") == contents(tmp_path / "two")


@pytest.mark.slow
def test_many_rows_come_in_groups_and_in_order(tmp_path: Path) -> None:
    rows = [{"question": f"{n}?", "answer": str(n)} for n in range(1200)]
    prepare(str(jsonl(tmp_path / "train.jsonl", *rows)), tmp_path / "out")
    file = pq.ParquetFile(tmp_path / "out/train.parquet")
    assert [file.metadata.row_group(n).num_rows for n in range(2)] == [1000, 200]
    written = rows_of(tmp_path / "out/train.parquet")
    assert [row["reward_model"]["ground_truth"] for row in written] == [str(n) for n in range(1200)]


class TestOwnFiles:
    def test_trl(self, tmp_path: Path) -> None:
        part = [{"type": "image"}, {"type": "text", "text": "What is it?"}]
        row = {
            "prompt": [
                {"role": "system", "content": "Be brief."},
                {"role": "user", "content": part},
            ],
            "images": ["a.png"],
            "solution": "So $\\boxed{7}$.",
        }
        (tmp_path / "a.png").write_bytes(png(3))
        prepare(str(jsonl(tmp_path / "train.jsonl", row)), tmp_path / "out", suffix="Box it.")
        (written,) = rows_of(tmp_path / "out/train.parquet")
        assert written["prompt"] == [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "<image>What is it? Box it."},
        ]
        assert written["reward_model"]["ground_truth"] == "7"
        assert written["extra_info"]["question"] == "<image>What is it?"
        assert written["data_source"] == "custom"

    def test_easyr1(self, tmp_path: Path) -> None:
        write_table(tmp_path / "train.parquet", hub_geo3k(range(2)))
        prepare(str(tmp_path / "train.parquet"), tmp_path / "out", data_source="hiyouga/geometry3k")
        rows = rows_of(tmp_path / "out/train.parquet")
        assert rows[1]["prompt"][0]["content"] == "<image>Find $x_{1}$."
        assert rows[1]["data_source"] == "hiyouga/geometry3k"

    def test_verl_rows_keep_what_they_have(self, tmp_path: Path) -> None:
        row = {
            "data_source": "numina_olympiads",
            "prompt": [{"role": "user", "content": "1+1? Think."}],
            "ability": "arithmetic",
            "reward_model": {"style": "model", "ground_truth": "2"},
            "extra_info": {"split": "old", "index": 41, "question": "1+1?", "level": 3},
        }
        prepare(str(jsonl(tmp_path / "test.jsonl", row)), tmp_path / "out", suffix="Think.")
        (written,) = rows_of(tmp_path / "out/test.parquet")
        extra = written.pop("extra_info")
        assert written == {key: value for key, value in row.items() if key != "extra_info"}
        assert extra == {
            "split": "test",
            "index": 41,
            "question": "1+1?",
            "answer": "2",
            "level": 3,
        }

    def test_unusual_columns(self, tmp_path: Path) -> None:
        (tmp_path / "a.png").write_bytes(png())
        path = tmp_path / "mine.csv"
        path.write_text('Frage,Antwort,Bild,Quelle\n"Was, ""genau""\nist das?",007,a.png,Buch\n')
        columns = Columns("Frage", "Antwort", "Bild", ("Quelle",))
        report = prepare(str(path), tmp_path / "out", columns=columns)
        (written,) = rows_of(tmp_path / "out/train.parquet")
        assert written["prompt"][0]["content"] == '<image>Was, "genau"\nist das?'
        assert written["reward_model"]["ground_truth"] == "007"
        assert written["extra_info"]["Quelle"] == "Buch"
        assert report.reward is None

    def test_nested_columns(self, tmp_path: Path) -> None:
        row = {"task": {"text": "1?"}, "gold": {"value": 5}}
        columns = Columns(question="task.text", answer="gold.value")
        path = jsonl(tmp_path / "rows.jsonl", row)
        prepare(str(path), tmp_path / "out", columns=columns)
        assert load_prompts(tmp_path / "out/train.parquet").prompts[0].answer == "5"

    def test_values_that_disagree_become_text(self, tmp_path: Path) -> None:
        values = [1, 2.5, None, "x", [1], {"a": "é"}, True, 2**70]
        rows = [{"question": f"{n}?", "answer": "1", "v": v} for n, v in enumerate(values)]
        path = jsonl(tmp_path / "rows.jsonl", *rows)
        prepare(str(path), tmp_path / "out", columns=Columns(keep=("v",)))
        written = [row["extra_info"]["v"] for row in rows_of(tmp_path / "out/train.parquet")]
        assert written == ["1", "2.5", None, "x", "[1]", '{"a": "é"}', "true", str(2**70)]

    @pytest.mark.parametrize(
        ("values", "kind", "written"),
        [
            ([1, None, 2], pa.int64(), [1, None, 2]),
            ([1, 2.5], pa.float64(), [1.0, 2.5]),
            ([[], ["a"]], pa.list_(pa.string()), [[], ["a"]]),
            ([[1], [2.5]], pa.list_(pa.float64()), [[1.0], [2.5]]),
            ([[[1]], [[2]]], pa.string(), ["[[1]]", "[[2]]"]),
            ([True, False], pa.bool_(), [True, False]),
        ],
    )
    def test_values_that_agree_keep_their_type(
        self, values: list[object], kind: pa.DataType, written: list[object], tmp_path: Path
    ) -> None:
        rows = [{"question": f"{n}?", "answer": "1", "v": v} for n, v in enumerate(values)]
        path = jsonl(tmp_path / "rows.jsonl", *rows)
        prepare(str(path), tmp_path / "out", columns=Columns(keep=("v",)))
        table = pq.read_table(tmp_path / "out/train.parquet")
        found = table["extra_info"].combine_chunks().field("v")
        assert found.type == kind
        assert found.to_pylist() == written
