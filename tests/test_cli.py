"""``segcredit segment`` from the outside: numbers, errors, and what a hostile file can do."""

import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from each import each
from golden_batch import LAM, PROB, PROB_EVERY, PROB_THRESHOLD, A, B, Response
from tiny_runs import write_recipe
from typer.testing import CliRunner, Result

from segcredit import __version__
from segcredit.cli import app, main
from segcredit.config import load_recipe
from segcredit.partition import PARTITIONS
from segcredit.train.trainer import Trainer

GOLDEN = json.loads((Path(__file__).parent / "golden.json").read_text())
PLAIN = {"tokens": ["So", " x", " =", " 2"]}


NOT_A_TERMINAL = {"FORCE_COLOR": None, "TTY_COMPATIBLE": None, "COLUMNS": "80"}


def segment(*args: str, stdin: str | bytes | None = None) -> Result:
    return CliRunner(env=NOT_A_TERMINAL).invoke(app, ["segment", *args], input=stdin)


def plain(text: str) -> str:
    """Without colors, which typer forces on some build servers, and on one line."""
    return " ".join(re.sub(r"\x1b\[[0-9;]*m", "", text).split())


def shown_as_json(*args: str, stdin: str) -> list[dict]:
    result = segment("-", "--json", *args, stdin=stdin)
    assert result.exit_code == 0, result.stderr
    assert result.stderr == ""
    return [json.loads(line) for line in result.stdout.splitlines()]


def lines(*rows: object) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def golden_row(response: Response) -> dict:
    return {
        "tokens": [f" t{t}" for t in range(response.length)],
        "entropy": response.entropy,
        "value": response.value,
        "logp": response.logp_old,
        "reward": response.reward,
    }


def column(cut: dict, name: str) -> list:
    return [segment[name] for segment in cut["segments"]]


def error_of(result: Result) -> str:
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    assert len(result.stderr.splitlines()) == 1, result.stderr
    return result.stderr.rstrip("\n")


# Numbers


@pytest.mark.parametrize(("response", "name"), [(A, "a"), (B, "b")])
def test_credit_equals_the_golden_numbers(response, name):
    lam = ("--lam", str(LAM))
    (paper,) = shown_as_json(*lam, stdin=lines(golden_row(response)))
    assert column(paper, "end") == response.ends
    assert column(paper, "advantage") == pytest.approx(GOLDEN[f"sapo_paper_A_{name}"], abs=1e-6)
    assert column(paper, "value_target") == pytest.approx(GOLDEN[f"sapo_paper_R_{name}"], abs=1e-6)

    (code,) = shown_as_json(*lam, "--value-at", "end", stdin=lines(golden_row(response)))
    assert column(code, "advantage") == pytest.approx(GOLDEN[f"sapo_code_A_raw_{name}"], abs=1e-6)
    assert column(code, "value_target") == pytest.approx(GOLDEN[f"sapo_code_R_{name}"], abs=1e-6)

    (ppo,) = shown_as_json(*lam, "-s", "token", stdin=lines(golden_row(response)))
    assert column(ppo, "advantage") == pytest.approx(GOLDEN[f"ppo_A_raw_{name}"], abs=1e-6)


@pytest.mark.parametrize("field", ["prob", "logp"])
def test_probability_strategies_cut_where_the_reference_does(field):
    numbers = PROB if field == "prob" else [math.log(p) for p in PROB]
    row = {"tokens": list("abcdef"), field: numbers}
    options = ("--threshold", str(PROB_THRESHOLD), "--every", str(PROB_EVERY))
    spo, accumulate = shown_as_json(
        "-s", "probability", "-s", "accumulate", *options, stdin=lines(row)
    )
    assert column(spo, "end") == GOLDEN["prob_spo_ends_n2"]
    assert column(accumulate, "end") == GOLDEN["prob_accumulate_ends_n2"]


def test_json_says_what_was_cut_and_how():
    row = {
        "id": "r7",
        "tokens": ["So", " x\n", "", "y"],
        "entropy": [0.5, 0.25, 0.125, 0.0],
        "value": [0.5, 0.5, 0.5, 0.75],
    }
    cuts = shown_as_json("-s", "newline", "-s", "fixed", "--size", "3", stdin=lines(row))
    assert cuts[1]["settings"] == {"size": 3, "gamma": 1.0, "lam": 0.99, "value_at": "start"}
    assert cuts[0] == {
        "id": "r7",
        "strategy": "newline",
        "settings": {"gamma": 1.0, "lam": 0.99, "value_at": "start"},
        "tokens": 4,
        "segments": [
            {
                "start": 0,
                "end": 1,
                "text": "So x\n",
                "num_tokens": 2,
                "entropy_at_end": 0.25,
                "entropy_mean": 0.375,
                "value": 0.5,
                "advantage": None,  # no reward
                "value_target": None,
            },
            {
                "start": 2,
                "end": 3,
                "text": "y",
                "num_tokens": 2,
                "entropy_at_end": 0.0,
                "entropy_mean": 0.0625,
                "value": 0.5,
                "advantage": None,
                "value_target": None,
            },
        ],
    }


def test_a_hole_belongs_to_no_segment_and_changes_no_credit():
    row = golden_row(A)
    holed = {name: [*x[:3], x[0], x[0], *x[3:]] for name, x in row.items() if name != "reward"}
    holed |= {"reward": row["reward"], "mask": [True] * 3 + [False] * 2 + [True] * 3}
    whole, around = shown_as_json("--lam", str(LAM), stdin=lines(row, holed))
    assert around["tokens"] == whole["tokens"] == A.length
    assert column(around, "advantage") == column(whole, "advantage")
    assert column(around, "text") == column(whole, "text")
    assert column(around, "start") == [0, 2, 7]
    assert column(around, "end") == [1, 6, 7]


def test_all_shows_what_the_row_has_numbers_for():
    plain, full = {"text": "one\ntwo"}, golden_row(A)
    shown = shown_as_json("-s", "all", stdin=lines(plain, full))
    of_plain = [cut["strategy"] for cut in shown if cut["id"] == "line 1"]
    of_full = [cut["strategy"] for cut in shown if cut["id"] == "line 2"]
    assert of_plain == ["newline", "step", "fixed", "token", "response"]
    assert of_full == [
        "entropy",
        "probability",
        "accumulate",
        *of_plain,
        "peaks",
        "smooth",
        "value",
    ]


def test_the_default_is_entropy_where_there_are_entropies():
    shown = shown_as_json(stdin=lines({"text": "one\ntwo"}, golden_row(A)))
    assert [cut["strategy"] for cut in shown] == ["newline", "entropy"]


def test_a_strategy_asked_for_twice_is_shown_once():
    shown = shown_as_json("-s", "token", "-s", "token", "-s", "all", stdin=lines(PLAIN))
    assert [cut["strategy"] for cut in shown].count("token") == 1


# Files that training writes


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A real run: two steps of SAPO, both recorded, with one evaluation."""
    folder = tmp_path_factory.mktemp("trained")
    stages = [{"kind": "warm_start", "steps": 1, "batch": 4}, {"kind": "optimize", "steps": 2}]
    saved = {"every": 2, "rollouts_every": 1, "rollouts": 3}
    recipe = write_recipe(folder, stages=stages, save=saved, reward=f"{folder}/reward.py:by_length")
    Trainer.from_recipe(load_recipe(str(recipe))).train(folder / "run")
    return folder / "run"


@pytest.mark.slow
def test_rollouts_of_a_run_are_shown_under_every_partition(trained):
    files = sorted((trained / "rollouts").glob("*.jsonl"))
    assert len(files) == 2
    for file in [*files, *(trained / "watched").glob("*.jsonl")]:
        rows = [json.loads(line) for line in file.read_text().splitlines()]
        result = segment(str(file), "-s", "all", "--json")
        assert result.exit_code == 0, result.stderr
        cuts = [json.loads(line) for line in result.stdout.splitlines()]
        assert [cut["strategy"] for cut in cuts] == [*PARTITIONS] * len(rows)
        by_token = [cut for cut in cuts if cut["strategy"] == "token"]
        for row, cut in zip(rows, by_token, strict=True):
            assert cut["id"] == row["prompt_id"]
            assert column(cut, "text") == row["pieces"]
            assert column(cut, "value") == row["value"]
            assert column(cut, "entropy_at_end") == row["entropy"]
            assert column(cut, "advantage")[-1] == pytest.approx(row["reward"] - row["value"][-1])


def test_a_run_alone_is_its_last_rollouts(trained):
    last = sorted((trained / "rollouts").glob("*.jsonl"))[-1]
    assert segment(str(trained), "--json").stdout == segment(str(last), "--json").stdout != ""
    page = segment(str(trained))
    assert page.exit_code == 0, page.stderr
    assert last.name in plain(page.stdout)


def test_evaluations_keep_texts_alone(trained):
    file = next((trained / "evaluations").glob("*.jsonl"))
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    result = segment(str(file), "-s", "response", "--json")
    assert result.exit_code == 0, result.stderr
    cuts = [json.loads(line) for line in result.stdout.splitlines()]
    assert [column(cut, "text") for cut in cuts] == [[row["response"]] for row in rows]


def test_a_recorded_probability_may_be_rounded_to_more_than_one():
    recorded = {"prompt_id": "7", "response": "ab", "pieces": ["a", "b"]}
    (cut,) = shown_as_json(
        "-s", "probability", stdin=lines(recorded | {"logp_old": [1e-4, -0.5], "tokens": [5, 6]})
    )
    assert cut["id"] == "7"
    wrong = segment("-", stdin=lines(recorded | {"logp_old": [0.1, -0.5]}))
    assert "logp must be a list of finite numbers ≤ 0" in error_of(wrong)


# Errors: one line, exit code 2, what to type


@each(
    ("line", "said"),
    [
        ("nonsense", "expected one JSON object per line"),
        ("[1, 2]", "got a list"),
        ("null", "got null"),
        ("[" * 100_000, "expected one JSON object per line"),
        ('{"tokens": []}', "the response is empty"),
        ('{"text": ""}', "the response is empty"),
        ("{}", "got neither"),
        ('{"text": "a", "tokens": ["a"]}', "got both"),
        ('{"token": ["a"]}', "Did you mean 'tokens'?"),
        ('{"text": "a", "zzzzz": 1}', "remove it"),
        ('{"tokens": "abc"}', "tokens must be a list of token texts, special tokens as ''; got \""),
        ('{"tokens": ["a", 5]}', "got 5 at position 1"),
        ('{"text": "a", "id": 7}', 'id must be a string; got 7; type "id": "7"'),
        ('{"tokens": ["a"], "entropy": [NaN]}', "got NaN"),
        ('{"tokens": ["a"], "entropy": [-Infinity]}', "got -Infinity"),
        ('{"tokens": ["a"], "value": [1e999]}', "value must be a list of finite numbers"),
        ('{"tokens": ["a"], "value": [%s]}' % ("9" * 400), "value must be a list of finite"),
        ('{"tokens": ["a"], "value": [%s]}' % ("9" * 5000), "expected one JSON object"),
        ('{"tokens": ["a"], "value": [null]}', "got null at position 0"),
        ('{"tokens": ["a"], "value": [true]}', "got true at position 0"),
        ('{"tokens": ["a"], "value": 1}', "value must be a list"),
        ('{"tokens": ["a"], "reward": "1"}', "reward must be a finite number"),
        ('{"tokens": ["a"], "prob": [0]}', "prob must be a list of numbers in (0, 1]"),
        ('{"tokens": ["a"], "prob": [1.5]}', "prob must be a list of numbers in (0, 1]"),
        ('{"tokens": ["a"], "logp": [0.1]}', "logp must be a list of finite numbers ≤ 0"),
        ('{"tokens": ["a"], "prob": [1], "logp": [0]}', "leave one out"),
        ('{"tokens": ["a", "b"], "entropy": [1]}', "one entry per token, 2; got 1"),
        ('{"text": "a b c", "entropy": [1]}', "give the model's own 'tokens' instead"),
        ('{"tokens": ["a"], "mask": [false]}', "got false everywhere"),
        ('{"tokens": ["a"], "mask": [2]}', "mask must be a list of true or false"),
        ('{"tokens": ["a", "b"], "value": [-1e308, 1e308], "reward": 1}', "overflows"),
    ],
)
def test_a_bad_line_is_named(line, said):
    error = error_of(segment("-", "-s", "token", stdin="\n" + line + "\n"))
    assert error.startswith("stdin:2: ")
    assert said in error


def test_what_is_not_utf8_is_said(tmp_path):
    file = tmp_path / "latin.jsonl"
    file.write_bytes('{"text": "é"}'.encode("latin-1"))
    assert error_of(segment(str(file))) == (
        f"{file}:1: expected UTF-8; got byte 0xe9 at column 11; save the file as UTF-8"
    )


def test_what_cannot_be_opened_is_said(tmp_path):
    assert "there is no file of that name" in error_of(segment(str(tmp_path / "none.jsonl")))
    assert "this is a directory" in error_of(segment(str(tmp_path)))
    assert "cannot be opened" in error_of(segment("\0"))


@pytest.mark.parametrize("content", ["", "\n  \n"])
def test_an_empty_file_is_said(content):
    assert "got nothing" in error_of(segment("-", stdin=content))


@each(
    ("options", "said"),
    [
        (["--fraction", "30"], "fraction must be in (0, 1]; got 30.0. For top-30% pass 0.30."),
        (["--threshold", "2"], "threshold must be a probability in (0, 1]; got 2.0"),
        (["--every", "0"], "every must be a whole number, at least 1; got 0"),
        (["--size", "0"], "size must be a whole number of tokens, at least 1; got 0."),
        (["--gamma", "2"], "gamma must be in [0, 1]; got 2.0"),
        (["--lam", "nan"], "lam must be in [0, 1]; got nan"),
        (["--limit", "-1"], "--limit must be at least 0; got -1"),
        (["--width", "3"], "--width must be at least 40; got 3"),
        (["-s", "entropie"], "Did you mean 'entropy'?"),
        (["-s", "entropy"], "stdin:1: strategy 'entropy' needs the field 'entropy'"),
        (["-s", "probability"], "strategy 'probability' needs the field 'prob' or 'logp'"),
        (["--example"], "expected FILE or --example; got both"),
    ],
)
def test_a_bad_option_is_named(options, said):
    assert said in error_of(segment("-", *options, stdin=lines(PLAIN)))


def test_a_refused_setting_leaves_the_page_empty():
    assert "pass 0.30" in error_of(segment("--example", "--fraction", "30"))


def test_without_a_file_the_example_is_recommended():
    assert "segcredit segment --example" in error_of(segment())


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["segment", "--strtegy", "token"], "--strategy"),
        (["segment", "x", "--size", "two"], "--size"),
        (["segment", "x", "--value-at", "middle"], "'start'"),
        (["segmen"], "'segment'"),
    ],
)
def test_a_mistyped_command_is_answered_in_one_line(arguments, said, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["segcredit", *arguments])
    with pytest.raises(SystemExit) as exit_:
        main()
    assert exit_.value.code == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert len(output.err.splitlines()) == 1
    assert said in output.err
    command = "segcredit segment" if arguments[0] == "segment" else "segcredit"
    assert f"ype {command} --help" in output.err


# The page


def test_blank_lines_a_byte_order_mark_and_crlf_are_no_rows():
    stdin = b"\xef\xbb\xbf" + json.dumps(PLAIN).encode() + b"\r\n \r\n\r\n"
    result = segment("-", "--json", stdin=stdin)
    assert [json.loads(line)["id"] for line in result.stdout.splitlines()] == ["line 1"]


def test_rows_left_out_are_counted():
    rows = lines(*[PLAIN] * 25)
    assert "5 more rows were left out; --limit 0: all." in segment("-", stdin=rows).stdout
    assert "24 more rows" in segment("-", "--limit", "1", stdin=rows).stdout
    assert "left out" not in segment("-", "--limit", "0", stdin=rows).stdout
    assert len(segment("-", "--json", stdin=rows).stdout.splitlines()) == 25

    limited = segment("-", "--json", "--limit", "24", stdin=rows)
    assert len(limited.stdout.splitlines()) == 24
    assert limited.stderr == "1 more row was left out; --limit 0: all.\n"


HOSTILE = (
    "\x1b[31m\x1b]0;title\x07 a\rb\x08c\x7f \x9b2J \u202edlrow\u202c \u2066x\u2069 \u2028 \t\x00"
)
HARMLESS = "\n\u200d"


@pytest.mark.parametrize("field", ["tokens", "text"])
@pytest.mark.parametrize("options", [[], ["--json"]])
def test_nothing_in_a_file_drives_the_terminal(field, options):
    hostile = HOSTILE + "[red]markup[/red] [/] :smile:"
    row = {field: [hostile, hostile] if field == "tokens" else hostile}
    result = segment("-", *options, stdin=lines(row | {"id": hostile, "prompt": hostile}))
    assert result.exit_code == 0, result.output
    assert all(c.isprintable() or c in HARMLESS for c in result.stdout), result.stdout
    assert "[red]markup[/red] [/] :smile:" in result.stdout


@pytest.mark.parametrize(
    "line", [{HOSTILE: 1}, {"text": "a", "id": [HOSTILE]}, {"text": [HOSTILE]}]
)
def test_nor_does_an_error_about_it(line):
    error = error_of(segment("-", stdin=lines(line)))
    assert error.isprintable(), error


def test_a_lone_surrogate_is_shown_not_raised():
    row = '{"text": "\\ud800 x"}'
    assert "‹U+D800›" in segment("-", stdin=row).stdout
    assert shown_as_json(stdin=row)[0]["segments"][0]["text"] == "\ud800 x"


def test_the_example_shows_everything_at_80_and_120_columns():
    for width in (80, 120):
        result = segment("--example", "--width", str(width), "-s", "all")
        assert result.exit_code == 0, result.stderr
        assert max(map(len, result.stdout.splitlines())) <= width + 1  # R̂ is two characters
        assert "made up to illustrate" in result.stdout
        assert "TopEntropy(fraction=0.3)" in result.stdout
        assert "StepMarkers()  3 segments" in result.stdout


def test_the_version():
    assert CliRunner().invoke(app, ["--version"]).stdout == f"segcredit {__version__}\n"


def test_alone_it_prints_help(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["segcredit"])
    with pytest.raises(SystemExit) as exit_:
        main()
    assert not exit_.value.code
    assert "segcredit demo" in plain(capsys.readouterr().out)


def test_help_has_examples_and_says_that_they_are_made_up():
    help_ = plain(segment("--help").stdout)
    assert "segcredit segment --example -s newline -s step" in help_
    assert '{"tokens": ["So", " x", " =", " 2"], "entropy": [1.2' in help_
    assert "their numbers are illustrative" in help_


# Whole processes


def process(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        env=os.environ | environment,
        encoding="utf-8",
        timeout=60,
    )


def test_help_does_not_wait_for_torch():
    code = "import sys, segcredit.cli as cli; sys.argv[1:] = ['segment', '--help']; cli.main()"
    code = f"import atexit, sys; atexit.register(lambda: print('torch' in sys.modules)); {code}"
    result = process(code)
    assert result.returncode == 0
    assert result.stdout.splitlines()[-1] == "False"


@pytest.mark.slow
def test_a_terminal_that_cannot_write_the_symbols_gets_escapes():
    code = "import sys, segcredit.cli as cli; sys.argv[1:] = ['segment', '--example']; cli.main()"
    result = process(code, PYTHONIOENCODING="ascii")
    assert result.returncode == 0, result.stderr
    assert result.stdout.isascii()
    assert "\\u21b5" in result.stdout
