"""Rows that occur twice are found by wording and by sight, and training rows can be dropped."""

from io import BytesIO
from pathlib import Path
from typing import Any

from miniature import jsonl, png, rows_of
from PIL import Image

from segcredit.data.prepare import Duplicates, Report, prepare
from segcredit.data.prepare.run import normalized


def pictures(folder: Path) -> None:
    """a and a2 show the same in different files; b shows another thing."""
    (folder / "a.png").write_bytes(png(1))
    (folder / "a2.png").write_bytes(png(1, compress_level=0))
    (folder / "b.png").write_bytes(png(2))
    bmp = BytesIO()
    Image.open(BytesIO(png(1))).save(bmp, "BMP")
    (folder / "a3.bmp").write_bytes(bmp.getvalue())
    assert (folder / "a.png").read_bytes() != (folder / "a2.png").read_bytes()


def ask(question: str, *images: str) -> dict[str, Any]:
    return {"problem": question, "answer": "1", "images": list(images)}


def prepared(folder: Path, drop: bool = False, **splits: list[dict[str, Any]]) -> Report:
    pictures(folder)
    files = [str(jsonl(folder / f"{split}.jsonl", *rows)) for split, rows in splits.items()]
    return prepare(files, folder / "out", drop_duplicates=drop, force=True)


def shared(report: Report, split: str, within: str) -> Duplicates:
    (found,) = [s for s in report.shared if (s.split, s.within) == (split, within)]
    return found


def test_wording_and_sight_are_counted_apart_and_together(tmp_path: Path) -> None:
    report = prepared(
        tmp_path,
        train=[ask("Find x.", "a.png"), ask("Find y.", "b.png"), ask("Find  X.")],
        test=[
            ask("find\nX.", "a.png"),  # both, the same file
            ask("Find x.", "a2.png"),  # both, another file
            ask("Find y.", "a3.bmp"),  # wording of one, picture of another
            ask("Find z.", "b.png"),  # picture alone
            ask("Find x."),  # as the one without picture
            ask("Find w."),
        ],
    )
    assert shared(report, "test", "train") == Duplicates(
        "test", "train", rows=6, question=4, file=2, image=4, alike=4, both=3
    )
    assert shared(report, "train", "train") == Duplicates(
        "train", "train", rows=3, question=1, file=0, image=0, alike=None, both=0
    )
    assert shared(report, "test", "test") == Duplicates(
        "test", "test", rows=6, question=2, file=0, image=2, alike=None, both=1
    )
    assert report.leaking == 2


def test_training_rows_that_share_question_and_picture_are_dropped(tmp_path: Path) -> None:
    splits = {
        "train": [
            ask("Find x.", "a2.png"),  # test has it
            ask("Find x.", "b.png"),
            ask("Find y.", "a.png"),
            ask("How many?"),  # validation has it
            ask("Find x."),
        ],
        "val": [ask("how many?")],
        "test": [ask("Find x.", "a.png")],
    }
    kept = prepared(tmp_path, **splits)
    assert kept.leaking == 2
    assert len(rows_of(tmp_path / "out/train.parquet")) == 5
    report = prepared(tmp_path, drop=True, **splits)
    train = report.splits[0]
    assert (train.read, train.dropped, train.written) == (5, 2, 3)
    rows = rows_of(tmp_path / "out/train.parquet")
    assert [row["extra_info"]["index"] for row in rows] == [1, 2, 4]  # as in the source
    assert [(s.dropped, s.written) for s in report.splits[1:]] == [(0, 1), (0, 1)]


def test_one_picture_of_several_is_enough(tmp_path: Path) -> None:
    report = prepared(
        tmp_path,
        train=[ask("<image><image>Same?", "a.png", "b.png")],
        test=[ask("Same? <image>", "a3.bmp"), ask("<image>Other?", "b.png")],
    )
    assert shared(report, "test", "train") == Duplicates(
        "test", "train", rows=2, question=1, file=1, image=2, alike=2, both=1
    )


def test_without_training_data_nothing_is_compared_across(tmp_path: Path) -> None:
    report = prepared(tmp_path, drop=True, test=[ask("1?"), ask("1?")])
    assert [(s.split, s.within, s.both) for s in report.shared] == [("test", "test", 1)]
    assert report.splits[0].written == 2


def test_what_was_said_before_the_question_counts(tmp_path: Path) -> None:
    def talk(first: str) -> dict[str, Any]:
        said = [("system", first), ("user", first), ("assistant", "Yes."), ("user", "And now?")]
        return {"prompt": [{"role": r, "content": c} for r, c in said], "answer": "1"}

    report = prepared(tmp_path, train=[talk("Is 1 odd?"), talk("Is 3 odd?"), talk("is 3 odd?")])
    assert shared(report, "train", "train").question == 1


def test_wording() -> None:
    assert normalized("<image>Find  \u00a0X\n.") == "find x ."
    assert normalized("e\u0301") == normalized("\u00e9")
    assert normalized("x²") != normalized("x2")
    assert normalized("a b") != normalized("ab")
