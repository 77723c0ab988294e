"""Files and datasets: every ending, pictures beside the file, what is told of a wrong name."""

import base64
import json
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from small_data import FakeDataset, png

from segcredit.data import BadRows, load_prompts, readers
from segcredit.data.readers import PREPARED
from segcredit.installing import install_command
from segcredit.integrations.verl.translate import is_verl_file
from segcredit.models.images import open_image

GOOD = {"problem": "2 + 2?", "answer": "4"}
IMAGE = pa.struct({"bytes": pa.binary(), "path": pa.string()})
"""As the datasets library writes pictures."""


def lines(path: Path, *rows: object) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def table(**columns: pa.Array) -> pa.Table:
    return pa.table(columns)


def verl_table(num: int) -> pa.Table:
    message = pa.struct({"role": pa.string(), "content": pa.string()})
    texts = [[{"role": "user", "content": f"<image>Find {n}."}] for n in range(num)]
    images = [[{"bytes": png(), "path": "gone.png"}] for _ in range(num)]
    return table(
        data_source=pa.array(["geo"] * num),
        prompt=pa.array(texts, pa.list_(message)),
        images=pa.array(images, pa.list_(IMAGE)),
        reward_model=pa.array([{"style": "rule", "ground_truth": str(n)} for n in range(num)]),
        extra_info=pa.array([{"index": n, "split": "train"} for n in range(num)]),
    )


class TestJson:
    def test_lines_with_a_byte_order_mark_blank_lines_and_crlf(self, tmp_path: Path) -> None:
        path = tmp_path / "train.JSONL"
        row = json.dumps(GOOD).encode()
        path.write_bytes(b"\xef\xbb\xbf" + row + b"\r\n\r\n  \n" + row)
        loaded = load_prompts(str(path))
        assert [prompt.id for prompt in loaded.prompts] == ["train:1", "train:4"]
        assert loaded.prompts[0].answer == "4"

    @pytest.mark.parametrize(
        "text",
        [
            json.dumps([GOOD, GOOD], indent=2),
            "\ufeff \n" + json.dumps([GOOD, GOOD]),
            json.dumps(GOOD) + "\n" + json.dumps(GOOD) + "\n",
        ],
        ids=["list", "byte order mark", "lines"],
    )
    def test_a_list_or_lines(self, text: str, tmp_path: Path) -> None:
        path = tmp_path / "train.json"
        path.write_text(text, encoding="utf-8")
        loaded = load_prompts(path)
        assert [prompt.id for prompt in loaded.prompts] == ["train:1", "train:2"]

    def test_a_single_object_over_several_lines(self, tmp_path: Path) -> None:
        path = tmp_path / "train.json"
        path.write_text(json.dumps(GOOD, indent=2))
        assert load_prompts(path).prompts[0].answer == "4"
        path.write_text(json.dumps({"data": [GOOD]}, indent=2))
        with pytest.raises(BadRows, match=r"row 1: expected a question .* got the keys 'data'"):
            load_prompts(path)

    @pytest.mark.parametrize(
        ("content", "said"),
        [
            (b'[{"problem": "a"},\n {"problem"]', ":2: expected a JSON object"),
            (b'[{"problem": "a"},\n\n "\xff"]', ":3: expected UTF-8; got byte 0xff"),
        ],
    )
    def test_a_broken_list_names_the_line(self, content: bytes, said: str, tmp_path: Path) -> None:
        path = tmp_path / "train.json"
        path.write_bytes(content)
        with pytest.raises(BadRows) as caught:
            load_prompts(path)
        assert f"{path}{said}" in str(caught.value)

    @pytest.mark.parametrize("given", ["folder/images/a.png", "uri"])
    def test_pictures_beside_the_file(
        self, given: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "data" / "folder" / "images").mkdir(parents=True)
        (tmp_path / "data" / "folder" / "images" / "a.png").write_bytes(png())
        if given == "uri":
            given = "data:image/png;base64," + base64.b64encode(png()).decode()
        rows = [GOOD | {"images": [given]}, GOOD | {"image": {"bytes": None, "path": given}}]
        rows = rows if "folder" in given else rows[:1]
        monkeypatch.chdir(tmp_path)
        lines(Path("data/train.jsonl"), *rows)
        for prompt in load_prompts("data/train.jsonl").prompts:
            (image,) = prompt.images
            assert isinstance(image, bytes) or image.is_absolute()
            assert open_image(image).getpixel((0, 0)) == (255, 0, 0)


class TestParquet:
    def test_verl_round_trip(self, tmp_path: Path) -> None:
        path = tmp_path / "train.parquet"
        pq.write_table(verl_table(150), path)
        prompts = load_prompts(path).prompts
        assert [prompt.id for prompt in prompts] == [str(n) for n in range(150)]
        assert [prompt.answer for prompt in prompts] == [str(n) for n in range(150)]
        assert {prompt.images for prompt in prompts} == {(png(),)}
        assert prompts[149].messages == ({"role": "user", "content": "<image>Find 149."},)
        assert prompts[1].columns["split"] == "train"

    def test_single_images_paths_and_nulls(self, tmp_path: Path) -> None:
        (tmp_path / "a.png").write_bytes(png())
        images = [{"bytes": png(), "path": None}, {"bytes": None, "path": "a.png"}, None]
        pq.write_table(
            table(
                problem=pa.array(["a", "b", "c"]),
                answer=pa.array([1, 2, 3]),
                image=pa.array(images, IMAGE),
            ),
            tmp_path / "train.parquet",
        )
        prompts = load_prompts(tmp_path / "train.parquet").prompts
        assert [prompt.images for prompt in prompts] == [(png(),), (tmp_path / "a.png",), ()]
        assert [prompt.id for prompt in prompts] == ["train:1", "train:2", "train:3"]
        assert [prompt.answer for prompt in prompts] == ["1", "2", "3"]

    def test_bad_rows_by_number(self, tmp_path: Path) -> None:
        path = tmp_path / "train.parquet"
        texts = ["ok"] * 100
        texts[70] = ""
        pq.write_table(table(problem=pa.array(texts), answer=pa.array(["1"] * 100)), path)
        with pytest.raises(BadRows) as caught:
            load_prompts(path)
        assert [bad.where for bad in caught.value.bad] == [f"{path} row 71"]

    def test_text_that_is_not_utf8_spoils_its_row_alone(self, tmp_path: Path) -> None:
        path = tmp_path / "train.parquet"
        raw = pa.array([b"a", b"caf\xe9", b"c"]).view(pa.string())
        pq.write_table(table(problem=raw, answer=pa.array(["1", "2", "3"])), path)
        loaded = load_prompts(path, skip_bad_rows=True)
        assert [prompt.answer for prompt in loaded.prompts] == ["1", "3"]
        assert [bad.where for bad in loaded.bad] == [f"{path} row 2"]
        assert "expected text in UTF-8" in loaded.bad[0].problem

    @pytest.mark.parametrize(
        ("column", "said"),
        [
            ("problem", "expected a column with the answer, 'reward_model.ground_truth' or"),
            ("answer", "expected a column with the question, 'prompt' or 'problem' or 'question'"),
        ],
    )
    def test_missing_columns_are_told_once(self, column: str, said: str, tmp_path: Path) -> None:
        path = tmp_path / "train.parquet"
        pq.write_table(table(**{column: pa.array(["a"] * 9)}), path)
        with pytest.raises(BadRows) as caught:
            load_prompts(path)
        (bad,) = caught.value.bad
        assert bad.where == str(path)
        assert said in bad.problem
        assert bad.problem.endswith(f"; got '{column}'")
        good = lines(tmp_path / "good.jsonl", GOOD)
        assert len(load_prompts([path, good], skip_bad_rows=True).prompts) == 1

    @pytest.mark.parametrize("damage", ["text", "cut", "middle"])
    def test_a_damaged_file_is_one_message(self, damage: str, tmp_path: Path) -> None:
        path = tmp_path / "train.parquet"
        pq.write_table(verl_table(20), path)
        content = bytearray(path.read_bytes())
        if damage == "text":
            content = bytearray(b"version https://git-lfs.github.com/spec/v1\n")
        elif damage == "cut":
            content = content[:-20]
        else:
            content[4:400] = b"\xff" * 396
        path.write_bytes(content)
        with pytest.raises(
            ValueError, match=r"expected a parquet file; .*train.parquet' cannot be"
        ):
            load_prompts(path)


class TestNames:
    def test_a_missing_file_suggests_its_neighbor(self, tmp_path: Path) -> None:
        lines(tmp_path / "train.jsonl", GOOD)
        (tmp_path / "notes.txt").write_text("")
        with pytest.raises(ValueError, match=r"there is no .*\. Did you mean 'train.jsonl'\?"):
            load_prompts(tmp_path / "trian.jsonl")
        with pytest.raises(ValueError, match=r"The folder holds 'train.jsonl'\.$"):
            load_prompts(tmp_path / "zzz.parquet")
        with pytest.raises(ValueError, match=r"There is no folder .*nowhere' either"):
            load_prompts(tmp_path / "nowhere" / "train.jsonl")

    def test_a_folder(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match=r"got the folder .* The folder holds no data file"):
            load_prompts(tmp_path)
        lines(tmp_path / "a.jsonl", GOOD)
        with pytest.raises(ValueError, match=r"The folder holds 'a.jsonl'"):
            load_prompts(tmp_path)

    def test_an_unknown_ending(self, tmp_path: Path) -> None:
        lines(tmp_path / "train.xml", GOOD)
        lines(tmp_path / "train.jsonl", GOOD)
        with pytest.raises(ValueError, match=r"ends in .parquet, .*, .tsv; .*'train.jsonl'\?"):
            load_prompts(tmp_path / "train.xml")

    def test_tables_of_text(self, tmp_path: Path) -> None:
        (tmp_path / "train.csv").write_text('question,answer\n"1 + 1, is?",2\n')
        (prompt,) = load_prompts(tmp_path / "train.csv").prompts
        assert (prompt.messages[0]["content"], prompt.answer) == ("1 + 1, is?", "2")

    @pytest.mark.parametrize(
        ("name", "content"),
        [
            ("a.jsonl", ""),
            ("a.jsonl", " \n\n"),
            ("a.json", ""),
            ("a.json", "[]"),
            ("a.parquet", ""),
        ],
    )
    def test_an_empty_file(self, name: str, content: str, tmp_path: Path) -> None:
        (tmp_path / name).write_text(content)
        with pytest.raises(ValueError, match=f"expected at least one row; .*{name}' is empty"):
            load_prompts(tmp_path / name, skip_bad_rows=True)

    def test_an_empty_table(self, tmp_path: Path) -> None:
        pq.write_table(verl_table(1).slice(0, 0), tmp_path / "a.parquet")
        with pytest.raises(ValueError, match="is empty"):
            load_prompts(tmp_path / "a.parquet")

    @pytest.mark.parametrize("name", ["a\0b.jsonl", "x" * 5000 + ".jsonl", "x" * 5000, ""])
    def test_names_no_system_takes(self, name: str) -> None:
        with pytest.raises(ValueError, match="expected a data file") as caught:
            load_prompts(name)
        assert str(caught.value).isprintable()

    def test_data_of_a_built_in_recipe_names_the_command_that_makes_it(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(tmp_path)
        for name, command in PREPARED.items():
            with pytest.raises(ValueError, match=f"there is no .* type: {command}$"):
                load_prompts(f"{name}/train.parquet")

    def test_no_file_and_one_file_twice(self, tmp_path: Path) -> None:
        path = lines(tmp_path / "a.jsonl", GOOD)
        with pytest.raises(ValueError, match="expected at least one data file; got none"):
            load_prompts([])
        with pytest.raises(ValueError, match=r"expected each file once; got .*a.jsonl' twice"):
            load_prompts([path, str(path)])

    def test_files_of_one_name_in_two_folders(self, tmp_path: Path) -> None:
        for folder in ("gsm8k", "math"):
            (tmp_path / folder).mkdir()
            lines(tmp_path / folder / "train.jsonl", GOOD)
        other = lines(tmp_path / "other.jsonl", GOOD)
        names = [tmp_path / "gsm8k" / "train.jsonl", tmp_path / "math" / "train.jsonl", other]
        ids = [prompt.id for prompt in load_prompts(names).prompts]
        assert ids == [f"{names[0]}:1", f"{names[1]}:1", "other:1"]

    def test_a_limit_over_several_files_still_checks_that_they_are_there(
        self, tmp_path: Path
    ) -> None:
        first = lines(tmp_path / "a.jsonl", GOOD, GOOD)
        second = lines(tmp_path / "b.jsonl", GOOD, "bad")
        ids = [prompt.id for prompt in load_prompts([first, second], limit=3).prompts]
        assert ids == ["a:1", "a:2", "b:1"]
        with pytest.raises(ValueError, match="there is no"):
            load_prompts([first, tmp_path / "gone.jsonl"], limit=1)


class TestHub:
    @pytest.fixture
    def asked(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[tuple[object, ...]]:
        calls: list[tuple[object, ...]] = []

        def load_dataset(name: str, config: str | None, *, split: str) -> FakeDataset:
            calls.append((name, config, split))
            if split == "nope":
                raise RuntimeError("unknown split\n'nope'")
            return FakeDataset(verl_table(100))

        module = ModuleType("datasets")
        module.load_dataset = load_dataset
        monkeypatch.setitem(sys.modules, "datasets", module)
        monkeypatch.chdir(tmp_path)
        return calls

    @pytest.mark.parametrize(
        ("name", "call"),
        [
            ("hiyouga/geometry3k", ("hiyouga/geometry3k", None, "train")),
            ("hiyouga/geometry3k:test", ("hiyouga/geometry3k", None, "test")),
            ("openai/gsm8k/main:train[:10%]", ("openai/gsm8k", "main", "train[:10%]")),
            ("Qwen/set-2.5", ("Qwen/set-2.5", None, "train")),
        ],
    )
    def test_a_dataset(
        self, name: str, call: tuple[object, ...], asked: list[tuple[object, ...]]
    ) -> None:
        loaded = load_prompts(name)
        assert asked == [call]
        assert [prompt.id for prompt in loaded.prompts] == [str(n) for n in range(100)]
        assert loaded.prompts[99].images == (png(),)

    def test_what_the_library_says_is_passed_on(self, asked: list[tuple[object, ...]]) -> None:
        with pytest.raises(
            ValueError, match="'hub:a/b:nope' cannot be loaded: unknown split↵'nope'"
        ):
            load_prompts("a/b:nope")

    @pytest.mark.parametrize("name", ["data/train.jsonl", "here/train.csv", "train", "/a/b"])
    def test_names_of_files_are_not_asked_for(
        self, name: str, asked: list[tuple[object, ...]]
    ) -> None:
        Path("here").mkdir()
        with pytest.raises(ValueError, match="expected a data file; there is no"):
            load_prompts(name)
        assert not asked

    def test_without_the_library(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.setitem(sys.modules, "datasets", None)
        monkeypatch.chdir(tmp_path)
        with pytest.raises(
            ValueError, match=re.escape(f"Type: {install_command('hub')}; or pass a local file")
        ):
            load_prompts("hiyouga/geometry3k")


# ── Small files that unpack to a lot ─────────────────────────────────────────────────────────────


def repeating(path: Path, size: int, rows: int, **changes: Any) -> Path:
    """One text of that size, which every row repeats: a few kB on the disk."""
    text = pa.array(["a" * size])
    column = pa.DictionaryArray.from_arrays(pa.array([0] * rows, pa.int32()), text)
    table = pa.table({"problem": column, "answer": ["1"] * rows})
    settings = {"compression": "zstd", "dictionary_pagesize_limit": 2**30, "store_schema": False}
    pq.write_table(table, path, write_statistics=False, **settings | changes)
    assert path.stat().st_size < 10_000
    return path


def test_a_small_parquet_file_does_not_ask_for_gigabytes(tmp_path: Path) -> None:
    path = repeating(tmp_path / "a.parquet", 100 * 2**20, 70)  # 7 GB as rows
    before = pa.total_allocated_bytes()
    with pytest.raises(ValueError, match=r"unpacks to at most 67,108,864 bytes.*a\.parquet"):
        load_prompts(path)
    with pytest.raises(ValueError, match="in its pages"):
        is_verl_file(path)
    assert pa.total_allocated_bytes() - before < 2**20


def test_nor_does_one_whose_pages_are_small(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("segcredit.data.readers._READ", 2**25)
    monkeypatch.setattr("segcredit.data.readers._BATCH", 2**24)
    sizes: list[int] = []
    real = readers.table_rows

    def watched(name: str, batch: Any, first: int) -> Any:
        sizes.append(batch.nbytes)
        return real(name, batch, first)

    monkeypatch.setattr(readers, "table_rows", watched)
    path = repeating(tmp_path / "a.parquet", 2**22, 1000)
    with pytest.raises(ValueError, match="has more in its rows"):
        load_prompts(path)
    assert max(sizes) <= 2**24 + 2**16
    assert sum(sizes) <= 2**25 + 2**24


@pytest.mark.parametrize(
    ("characters", "count", "said"),
    [(20_000, 1000, "has more in its rows"), (1, 20_000, "has 20,000 rows")],
)
def test_rows_count_as_what_they_are_in_python(
    tmp_path: Path, monkeypatch: Any, characters: int, count: int, said: str
) -> None:
    """Columns that pyarrow keeps as dictionaries have few bytes, and so have very short rows."""
    monkeypatch.setattr("segcredit.data.readers._READ", 2**23)
    indices = pa.array([0], pa.int8()).take(pa.array([0] * count, pa.int32()))
    texts = pa.DictionaryArray.from_arrays(indices, pa.array(["q" * characters]))
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"problem": texts, "answer": texts}), path)
    assert path.stat().st_size < 20_000
    with pytest.raises(ValueError, match=said):
        load_prompts(path)


def test_rows_without_end(tmp_path: Path) -> None:
    rows = 20_000_000  # of nothing, in a few bytes
    table = pa.table(
        {"problem": pa.nulls(rows, pa.string()), "answer": pa.nulls(rows, pa.string())}
    )
    path = tmp_path / "a.parquet"
    pq.write_table(table, path, write_statistics=False)
    assert path.stat().st_size < 100_000
    with pytest.raises(ValueError, match="has 20,000,000 rows"):
        load_prompts(path)


def test_a_list_of_nothing(tmp_path: Path, monkeypatch: Any) -> None:
    """A list of 2 · 10⁹ nulls would be a file of 1 kB, too."""
    monkeypatch.setattr("segcredit.data.readers._READ", 2**24)
    count = 5_000_000
    values = pa.ListArray.from_arrays(pa.array([0, count], pa.int32()), pa.nulls(count, pa.int8()))
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"problem": ["1 + 1?"], "answer": ["2"], "x": values}), path)
    assert path.stat().st_size < 10_000
    with pytest.raises(ValueError, match="has 5,000,002 values"):
        load_prompts(path)


def write_arrow(path: Path, *columns: pa.Array, file: bool = False, **options: Any) -> Path:
    batch = pa.RecordBatch.from_arrays(list(columns), ["problem", "answer", "x"][: len(columns)])
    new = pa.ipc.new_file if file else pa.ipc.new_stream
    with new(str(path), batch.schema, options=pa.ipc.IpcWriteOptions(**options)) as writer:
        writer.write_batch(batch)
    return path


TEXTS, NUMBERS = pa.array(["1 + 1?"]), pa.array(["2"])
OFFSETS = pa.array([0, 1000], pa.int32())
REPEATING: dict[str, pa.Array] = {
    "dictionary": pa.DictionaryArray.from_arrays(pa.array([0], pa.int8()), pa.array(["a" * 1000])),
    "null": pa.ListArray.from_arrays(OFFSETS, pa.nulls(1000)),
    "struct": pa.ListArray.from_arrays(OFFSETS, pa.array([{}] * 1000, pa.struct([]))),
    "fixed_size_binary": pa.ListArray.from_arrays(OFFSETS, pa.array([b""] * 1000, pa.binary(0))),
    "run_end_encoded": pa.RunEndEncodedArray.from_arrays(pa.array([1], pa.int32()), TEXTS),
    "string_view": TEXTS.cast(pa.string_view()),
    "union": pa.UnionArray.from_dense(pa.array([0], pa.int8()), pa.array([0], pa.int32()), [TEXTS]),
}


@pytest.mark.parametrize("name", REPEATING)
def test_arrow_types_whose_values_take_no_space_are_refused(name: str, tmp_path: Path) -> None:
    path = write_arrow(tmp_path / "a.arrow", TEXTS, NUMBERS, REPEATING[name])
    with pytest.raises(ValueError, match=rf"has the type .*{name}.*write its rows as .parquet"):
        load_prompts(path)


@pytest.mark.parametrize("file", [False, True])
@pytest.mark.parametrize("compression", ["zstd", "lz4"])
def test_a_compressed_arrow_file_is_refused(compression: str, file: bool, tmp_path: Path) -> None:
    """16 kB of it asked for 500 MB before anything could be checked."""
    columns = pa.array(["1 + 1?" * 1000]), NUMBERS
    path = write_arrow(tmp_path / "a.arrow", *columns, file=file, compression=compression)
    before = pa.total_allocated_bytes()
    with pytest.raises(ValueError, match="is compressed"):
        load_prompts(path)
    assert pa.total_allocated_bytes() - before < 2**16


@pytest.mark.parametrize("file", [False, True])
def test_arrow_offsets_outside_their_values_are_not_followed(file: bool, tmp_path: Path) -> None:
    """They ended the process by a bus error, or read other memory."""
    texts = pa.array(["x" * 700, "y" * 700])
    path = write_arrow(tmp_path / "a.arrow", texts, pa.array(["1", "2"]), file=file)
    content = path.read_bytes()
    offsets = (700).to_bytes(4, "little") + (1400).to_bytes(4, "little")
    assert content.count(offsets) == 1
    path.write_bytes(content.replace(offsets, b"\xff\xff\xff\x7f" * 2))
    with pytest.raises(ValueError, match="cannot be read"):
        load_prompts(path)


def test_an_arrow_file_with_more_rows_than_its_size_allows(
    tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setattr("segcredit.data.readers._READ", 2**20)
    count = 100_000
    path = write_arrow(tmp_path / "a.arrow", pa.nulls(count), pa.nulls(count))
    with pytest.raises(ValueError, match=r"expected a .arrow file.*more in its rows"):
        load_prompts(path)


def test_an_ordinary_file_that_compresses_well(tmp_path: Path) -> None:
    rows = [{"problem": "a" * 20_000 + str(n), "answer": "1"} for n in range(200)]
    path = tmp_path / "a.parquet"
    pq.write_table(pa.Table.from_pylist(rows), path, compression="zstd")
    assert path.stat().st_size < 100_000
    assert len(load_prompts(path).prompts) == 200
