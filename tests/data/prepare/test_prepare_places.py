"""Where rows come from: folders of every layout, files of every kind, the Hub."""

import base64
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pyarrow as pa
import pytest
from each import each
from miniature import contents, gsm8k_row, hub_geo3k, jsonl, png, rows_of, write_table
from small_data import FakeDataset

from segcredit.data.prepare import Columns, prepare

ROWS = [gsm8k_row(n) for n in range(5)]


def table(rows: list[dict[str, Any]]) -> pa.Table:
    return pa.Table.from_pylist(rows)


def write_arrow(path: Path, rows: pa.Table, file: bool = False) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    make = pa.ipc.new_file if file else pa.ipc.new_stream
    with pa.OSFile(str(path), "wb") as sink, make(sink, rows.schema) as writer:
        writer.write_table(rows, max_chunksize=2)
    return path


def written(folder: Path) -> dict[str, list[str]]:
    """Split → the answers."""
    return {
        file.stem: [row["reward_model"]["ground_truth"] for row in rows_of(file)]
        for file in sorted(folder.iterdir())
    }


def answers(*numbers: int) -> list[str]:
    return [str(n + 1000) for n in numbers]


class TestFolders:
    def test_the_hubs_parquet_with_parts(self, tmp_path: Path) -> None:
        for part, shift in (("main", 0), ("socratic", 3)):
            folder = tmp_path / "gsm8k" / part
            write_table(folder / "train-00000-of-00001.parquet", table(ROWS[shift : shift + 1]))
            write_table(folder / "test-00000-of-00001.parquet", table(ROWS[shift + 1 : shift + 2]))
        prepare("gsm8k", tmp_path / "usual", source=str(tmp_path / "gsm8k"))
        assert written(tmp_path / "usual") == {"train": answers(0), "test": answers(1)}
        prepare("gsm8k", tmp_path / "other", source=str(tmp_path / "gsm8k"), config="socratic")
        assert written(tmp_path / "other") == {"train": answers(3), "test": answers(4)}
        with pytest.raises(ValueError, match=r"got none, and there are 'main', 'socratic'. Choose"):
            prepare(str(tmp_path / "gsm8k"), tmp_path / "out")
        with pytest.raises(ValueError, match=r"got 'mein', .* Choose: --config main"):
            prepare("gsm8k", tmp_path / "out", source=str(tmp_path / "gsm8k"), config="mein")

    def test_files_beside_the_parts_are_the_whole(self, tmp_path: Path) -> None:
        write_table(tmp_path / "set/data/train-0.parquet", table(ROWS[:2]))
        write_table(tmp_path / "set/algebra/train-0.parquet", table(ROWS[2:3]))
        prepare("gsm8k", tmp_path / "out", source=str(tmp_path / "set"))
        assert written(tmp_path / "out") == {"train": answers(0, 1)}

    def test_as_datasets_saves_to_disk(self, tmp_path: Path) -> None:
        for split, rows in (("train", ROWS[:3]), ("test", ROWS[3:])):
            write_arrow(tmp_path / "saved" / split / "data-00000-of-00001.arrow", table(rows))
            (tmp_path / "saved" / split / "state.json").write_text("{}")
            (tmp_path / "saved" / split / "dataset_info.json").write_text("{}")
            (tmp_path / "saved" / split / "cache-12ab.arrow").write_text("no data")
        (tmp_path / "saved" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
        prepare("gsm8k", tmp_path / "out", source=str(tmp_path / "saved"))
        assert written(tmp_path / "out") == {"train": answers(0, 1, 2), "test": answers(3, 4)}

    def test_arrow_files_of_both_kinds_with_pictures(self, tmp_path: Path) -> None:
        write_arrow(tmp_path / "a/geometry3k-train.arrow", hub_geo3k(range(5)))
        write_arrow(tmp_path / "b/geometry3k-train.arrow", hub_geo3k(range(5)), file=True)
        for name in "ab":
            prepare("geo3k", tmp_path / f"out-{name}", source=str(tmp_path / name))
        assert contents(tmp_path / "out-a") == contents(tmp_path / "out-b")
        rows = rows_of(tmp_path / "out-a/train.parquet")
        assert [row["images"][0]["bytes"] for row in rows] == [png(n) for n in range(5)]

    def test_one_kind_of_file_is_read_and_hidden_ones_are_not(self, tmp_path: Path) -> None:
        jsonl(tmp_path / "set/train.jsonl", ROWS[0])
        jsonl(tmp_path / "set/.cache/train.jsonl", ROWS[1])
        jsonl(tmp_path / "set/.train.jsonl", ROWS[1])
        (tmp_path / "set/train.csv").write_text("question,answer\nno,no\n")
        (tmp_path / "set/README.md").write_text("train")
        prepare("gsm8k", tmp_path / "out", source=str(tmp_path / "set"))
        assert written(tmp_path / "out") == {"train": answers(0)}

    @pytest.mark.parametrize(
        ("name", "split"),
        [
            ("val.jsonl", "validation"),
            ("dev.jsonl", "validation"),
            ("gsm8k_TEST.jsonl", "test"),
            ("test-00000-of-00003.jsonl", "test"),
            ("rows.jsonl", "train"),
            ("latest.jsonl", "train"),
            ("contrain.jsonl", "train"),
        ],
    )
    def test_splits_by_name(self, name: str, split: str, tmp_path: Path) -> None:
        path = jsonl(tmp_path / "dev" / name, ROWS[0])  # a folder's own name says nothing
        prepare("gsm8k", tmp_path / "a", source=str(path))
        prepare("gsm8k", tmp_path / "b", source=str(path.parent))
        assert list(written(tmp_path / "a")) == list(written(tmp_path / "b")) == [split]

    def test_a_folder_without_data(self, tmp_path: Path) -> None:
        (tmp_path / "README.md").write_text("")
        with pytest.raises(ValueError, match=r"expected data \(.parquet, .* got none"):
            prepare("gsm8k", tmp_path / "out", source=str(tmp_path))
        assert not (tmp_path / "out").exists()


class TestFiles:
    def test_splits_can_be_said(self, tmp_path: Path) -> None:
        one, two = jsonl(tmp_path / "one.jsonl", *ROWS[:2]), jsonl(tmp_path / "two.jsonl", ROWS[2])
        prepare([str(one), f"test={two}"], tmp_path / "out")
        assert written(tmp_path / "out") == {"train": answers(0, 1), "test": answers(2)}
        prepare([f"hard={one}", f"val={two}"], tmp_path / "more")
        assert written(tmp_path / "more") == {"hard": answers(0, 1), "validation": answers(2)}

    def test_a_split_of_a_folder(self, tmp_path: Path) -> None:
        jsonl(tmp_path / "set/train.jsonl", ROWS[0])
        jsonl(tmp_path / "set/test.jsonl", ROWS[1])
        more = jsonl(tmp_path / "more.jsonl", ROWS[2])
        places = [f"test={tmp_path / 'set'}", f"train={more}"]
        prepare("gsm8k", tmp_path / "out", source=places)
        assert written(tmp_path / "out") == {"train": answers(2), "test": answers(1)}
        with pytest.raises(ValueError, match=r"a split 'validation' in .* has 'train', 'test'"):
            prepare("gsm8k", tmp_path / "no", source=f"val={tmp_path / 'set'}")

    def test_a_name_with_an_equals_sign(self, tmp_path: Path, monkeypatch) -> None:
        monkeypatch.chdir(tmp_path)
        jsonl(Path("a=b.jsonl"), ROWS[0])
        prepare("a=b.jsonl", tmp_path / "out")
        assert written(tmp_path / "out") == {"train": answers(0)}

    def test_shards_of_one_split_follow_one_another(self, tmp_path: Path) -> None:
        one, two = jsonl(tmp_path / "b.jsonl", *ROWS[:2]), jsonl(tmp_path / "a.jsonl", ROWS[2])
        prepare([str(one), str(two)], tmp_path / "out")
        rows = rows_of(tmp_path / "out/train.parquet")
        assert [row["extra_info"]["index"] for row in rows] == [0, 1, 2]
        assert written(tmp_path / "out") == {"train": answers(0, 1, 2)}

    @pytest.mark.parametrize("ending", ["json", "csv", "tsv", "arrow", "parquet"])
    def test_every_kind_gives_what_lines_give(self, ending: str, tmp_path: Path) -> None:
        path = tmp_path / f"train.{ending}"
        if ending == "json":
            path.write_text(json.dumps(ROWS))
        elif ending == "arrow":
            write_arrow(path, table(ROWS))
        elif ending == "parquet":
            write_table(path, table(ROWS))
        else:
            comma = "," if ending == "csv" else "\t"
            rows = [[f'"{text}"' for text in row.values()] for row in ROWS]
            lines = [comma.join(cells) for cells in [["question", "answer"], *rows]]
            path.write_text("\ufeff" + "\r\n".join(lines) + "\r\n\r\n")
        prepare("gsm8k", tmp_path / "one", source=str(path))
        lines_of_json = jsonl(tmp_path / "train.jsonl", *ROWS)
        prepare("gsm8k", tmp_path / "two", source=str(lines_of_json))
        assert contents(tmp_path / "one") == contents(tmp_path / "two")

    def test_a_picture_in_a_cell(self, tmp_path: Path) -> None:
        content = png(1) + b"\0" * 300_000  # longer than Python's cells may be
        cell = "data:image/png;base64," + base64.b64encode(content).decode()
        (tmp_path / "train.csv").write_text(f'question,answer,image\n?,1,"{cell}"\n')
        prepare(str(tmp_path / "train.csv"), tmp_path / "out")
        (row,) = rows_of(tmp_path / "out/train.parquet")
        assert row["images"] == [{"bytes": content, "path": None}]

    @each(
        ("content", "said"),
        [
            (b'question,answer\n"never closed,1\n', "cannot be read: unexpected end of data"),
            (b"question,answer\ncaf\xe9,1\n", "in UTF-8; got byte 0xe9. Save it as UTF-8"),
            (b"question,question,answer\n1,2,3\n", "expected unique column names"),
            (b"", "expected at least one row"),
            (b"question,answer\n", "expected at least one row"),
            (b"question,answer\n1,2,3\n", "row 1: expected 2 cells; got 3"),
            (b"question,answer\n1,2\n\n1\n", "row 2: expected 2 cells; got 1"),
        ],
    )
    def test_tables_that_are_none(self, content: bytes, said: str, tmp_path: Path) -> None:
        (tmp_path / "train.csv").write_bytes(content)
        with pytest.raises(ValueError, match=said):
            prepare(str(tmp_path / "train.csv"), tmp_path / "out")
        assert not (tmp_path / "out").exists()

    @pytest.mark.parametrize("cut", [3, 40, 200, -9])
    def test_arrow_files_that_are_not_whole(self, cut: int, tmp_path: Path) -> None:
        path = write_arrow(tmp_path / "train.arrow", table(ROWS))
        path.write_bytes(path.read_bytes()[:cut])
        with pytest.raises(
            ValueError, match=r"expected an Arrow file; .* Was the download complete"
        ):
            prepare("gsm8k", tmp_path / "out", source=str(path))

    @pytest.mark.parametrize(
        ("name", "said"),
        [
            ("trian.jsonl", "there is no .*trian.jsonl'. Did you mean 'train.jsonl'?"),
            ("train.csv", "there is no .*train.csv'. Did you mean 'train.jsonl'?"),
            ("train.xlsx", "expected a file that ends in .parquet, .arrow, .jsonl"),
            ("gone/train.jsonl", "There is no folder"),
        ],
    )
    def test_files_that_are_not_there(self, name: str, said: str, tmp_path: Path) -> None:
        jsonl(tmp_path / "train.jsonl", ROWS[0])
        (tmp_path / "train.xlsx").write_bytes(b"PK")
        with pytest.raises(ValueError, match=said):
            prepare(str(tmp_path / name), tmp_path / "out")

    def test_a_file_twice(self, tmp_path: Path) -> None:
        path = jsonl(tmp_path / "train.jsonl", ROWS[0])
        with pytest.raises(ValueError, match=r"expected each file once; got .* twice"):
            prepare([str(path), f"test={tmp_path}/../{tmp_path.name}/train.jsonl"], tmp_path / "o")


class TestHub:
    @pytest.fixture
    def elsewhere(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        """Where no folder can be taken for an owner on the Hub."""
        (tmp_path / "work").mkdir()
        monkeypatch.chdir(tmp_path / "work")
        return tmp_path / "work"

    @pytest.fixture
    def asked(self, elsewhere: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
        """A datasets library that notes what it is asked."""
        calls: list[tuple[Any, ...]] = []

        def load_dataset(name: str, config: str | None) -> dict[str, FakeDataset]:
            calls.append((name, config))
            if "gone" in name:
                raise FileNotFoundError(f"Dataset '{name}' doesn't exist\non the Hub")
            rows = hub_geo3k(range(100)) if "geometry" in name else table(ROWS)
            return {"test": FakeDataset(rows.slice(0, 2)), "train": FakeDataset(rows.slice(2))}

        datasets = ModuleType("datasets")
        datasets.load_dataset = load_dataset  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "datasets", datasets)
        return calls

    @pytest.fixture
    def fetched(self, elsewhere: Path, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
        """No datasets library, and a download that finds its files in a folder."""
        calls: list[dict[str, Any]] = []
        folder = elsewhere.parent / "snapshot"
        write_table(folder / "main/train-00000-of-00001.parquet", table(ROWS[2:]))
        write_table(folder / "main/test-00000-of-00001.parquet", table(ROWS[:2]))
        write_table(folder / "socratic/test-00000-of-00001.parquet", table(ROWS[:1]))

        def snapshot_download(name: str, **how: Any) -> str:
            calls.append({"name": name, **how})
            if "gone" in name:
                raise ConnectionError("no route")
            return str(folder)

        hub = ModuleType("huggingface_hub")
        hub.snapshot_download = snapshot_download  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "datasets", None)
        monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
        return calls

    def test_by_datasets(self, asked: list[Any], tmp_path: Path) -> None:
        prepare("gsm8k", tmp_path / "out")
        assert asked == [("openai/gsm8k", "main")]
        assert written(tmp_path / "out") == {"test": answers(0, 1), "train": answers(2, 3, 4)}

    def test_pictures_by_datasets_are_those_of_the_files(
        self, asked: list[Any], tmp_path: Path
    ) -> None:
        prepare("geo3k", tmp_path / "out")
        write_table(tmp_path / "geo/data/test-0.parquet", hub_geo3k(range(2)))
        write_table(tmp_path / "geo/data/train-0.parquet", hub_geo3k(range(2, 100)))
        prepare("geo3k", tmp_path / "local", source=str(tmp_path / "geo"))
        assert contents(tmp_path / "out") == contents(tmp_path / "local")

    def test_other_names_and_parts(self, asked: list[Any], tmp_path: Path) -> None:
        columns = Columns(answer="answer")
        prepare("someone/else", tmp_path / "a", config="small", columns=columns)
        prepare("openai/gsm8k", tmp_path / "b")  # known by its id
        prepare("gsm8k", tmp_path / "c", source="test=mine/copy")
        assert asked == [("someone/else", "small"), ("openai/gsm8k", "main"), ("mine/copy", "main")]
        assert rows_of(tmp_path / "a/test.parquet")[0]["data_source"] == "custom"
        assert rows_of(tmp_path / "b/test.parquet")[0]["data_source"] == "openai/gsm8k"
        assert list(written(tmp_path / "c")) == ["test"]

    def test_by_download(self, fetched: list[dict[str, Any]], tmp_path: Path) -> None:
        prepare("gsm8k", tmp_path / "out")
        assert written(tmp_path / "out") == {"test": answers(0, 1), "train": answers(2, 3, 4)}
        (call,) = fetched
        assert call["name"] == "openai/gsm8k"
        assert call["repo_type"] == "dataset"
        assert "*.parquet" in call["allow_patterns"]

    @pytest.mark.parametrize("way", ["asked", "fetched"])
    def test_what_cannot_be_reached(
        self, way: str, request: pytest.FixtureRequest, tmp_path: Path
    ) -> None:
        request.getfixturevalue(way)
        with pytest.raises(ValueError, match="'gone/gsm8k' cannot be loaded") as caught:
            prepare("gsm8k", tmp_path / "out", source="gone/gsm8k")
        assert "hf download gone/gsm8k --repo-type dataset --local-dir gsm8k" in str(caught.value)
        assert "--from gsm8k" in str(caught.value)

    def test_a_folder_of_this_machine_is_not_asked_for(
        self, asked: list[Any], elsewhere: Path, tmp_path: Path
    ) -> None:
        (elsewhere / "downloads").mkdir()
        with pytest.raises(ValueError, match="there is no 'downloads/gsm8k'"):
            prepare("gsm8k", tmp_path / "out", source="downloads/gsm8k")
        assert asked == []


@each(
    ("what", "source", "said"),
    [
        (["geo3"], (), "got 'geo3'. Did you mean 'geo3k'?"),
        (["geometry"], (), "Did you mean 'geo3k'?"),
        (["zzz"], (), "expected a dataset \\(geo3k, gsm8k, math, words\\) or a file; got 'zzz'.$"),
        (["geo3k", "a.jsonl"], (), "segcredit prepare geo3k --from a.jsonl"),
        (["geo3k", "math"], (), "expected one dataset, or files"),
        (["a.jsonl"], ("b.jsonl",), "--from needs a dataset \\(geo3k, gsm8k, math, words\\)"),
        (["gsm"], ("b.jsonl",), "Did you mean 'gsm8k'?"),
        ([], (), "got nothing"),
    ],
)
def test_what_is_meant(what: list[str], source: tuple[str, ...], said: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=said.replace("?", "[?]")):
        prepare(what, tmp_path / "out", source=source)
