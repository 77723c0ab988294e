"""examples/tiny_checkpoint.py makes a checkpoint on which SAPO runs with a user's own rows."""

import json
from pathlib import Path

import pytest
from each import each
from test_examples import load_example
from tiny_policies import picture
from transformers import AutoTokenizer

from segcredit import Trainer
from segcredit.runlog import read_run

QUESTION = "Zoë has {} apples \N{ALMOST EQUAL TO} {} and buys 4. How many?\n"


def by_length(num_tokens, **columns):
    """Grade by length: a random model answers nothing right."""
    return [float(n % 3) for n in num_tokens]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*responses were cut off:UserWarning")
@each("images", [False, True])
def test_sapo_runs_on_a_tiny_checkpoint_of_eight_rows(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    images: bool,
) -> None:
    folder = tmp_path / ("images" if images else "text")
    folder.mkdir()
    rows = [{"problem": QUESTION.format(n, n), "answer": str(n + 4)} for n in range(8)]
    if images:
        (folder / "x.png").write_bytes(picture(56, 56))
        rows = [x | {"problem": "<image>" + x["problem"], "images": ["x.png"]} for x in rows]
    data, model = folder / "rows.jsonl", folder / "tiny"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))

    load_example("tiny_checkpoint", monkeypatch).main([str(data), str(model)])
    assert "parameters" in capsys.readouterr().out
    tokenizer = AutoTokenizer.from_pretrained(model)
    text = QUESTION.format(11, "€")
    assert tokenizer.decode(tokenizer(text).input_ids) == text, "it encodes what it has not seen"

    trainer = Trainer(
        model=str(model),
        data=str(data),
        algorithm="sapo",
        reward=by_length,
        steps=2,
        rollout={"prompts": 8, "max_tokens": 8},
        update={"minibatches": 2},
        evaluation={"every": 0},
    )
    result = trainer.train(folder / "run")
    assert (Path(result.model) / "chat_template.jinja").exists()
    steps = [x for x in read_run(folder / "run").metrics if x["stage"] == "optimize"]
    assert [x["step"] for x in steps] == [1, 2]
    assert all(x["policy/grad_norm"] > 0 for x in steps)
