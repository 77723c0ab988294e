"""``segcredit verl`` and reports of verl's runs: what needs no verl."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from forked_cli import run

from segcredit.config import load_recipe
from segcredit.integrations.verl.dumps import (
    METRICS,
    ROLLOUTS,
    TOKENS,
    adopt,
    check_free,
    rotate_log,
)
from segcredit.integrations.verl.mapping import Cluster
from segcredit.integrations.verl.settings import (
    METHODS,
    SegmentSettings,
    make_method,
    parse_settings,
    refusal,
)
from segcredit.integrations.verl.translate import translate
from segcredit.partition import PARTITIONS, Newline, TopEntropy, partition_of
from segcredit.runlog import read_run

RECIPE = "geo3k/qwen2.5-vl-3b-sapo"
DOCS = Path(__file__).parents[2] / "docs"
DOCUMENTS = (DOCS / "verl.md", DOCS / "appendix" / "verl.md")


def test_what_verl_cannot_do_is_said_all_at_once(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="verl trains checkpoints") as error:
        translate(load_recipe("demo"), tmp_path)
    assert "verl has no warm_start stage" in str(error.value)
    recipe = load_recipe(RECIPE, ["algorithm={name: vineppo}", "update.minibatches=3"])
    with pytest.raises(ValueError, match="vineppo does not run on verl") as error:
        translate(recipe, tmp_path)
    assert "512 prompts do not split into 3" in str(error.value)
    for setting in ("value_at=end", "whiten=true", "clamp=5", "value_everywhere=true"):
        with pytest.raises(ValueError, match=r"has no key on verl: remove it"):
            translate(load_recipe(RECIPE, [f"algorithm.{setting}"]), tmp_path)
    own = {"epochs": 2, "prompts": 64, "minibatches": 7, "schedule": "linear", "lr": 1e-3}
    for name, value in own.items():
        first = f"{{kind: pretrain_critic, steps: 2, {name}: {value}}}"
        stages = f"stages=[{first}, {{kind: optimize, steps: 2}}]"
        with pytest.raises(ValueError, match=rf"verl pretrains a critic .*the stage's {name}"):
            translate(load_recipe(RECIPE, [stages]), tmp_path)
    with pytest.raises(ValueError, match=r"algorithm\.partition: .* cannot be cut by its values"):
        translate(load_recipe(RECIPE, ["algorithm.partition=value"]), tmp_path)
    with pytest.raises(ValueError, match="128 responses does not split over 7 GPUs"):
        translate(load_recipe(RECIPE), tmp_path, Cluster(nodes=1, gpus=7))


def test_vllms_settings_are_said_where_the_recipe_has_some(tmp_path: Path) -> None:
    keys = [f"actor_rollout_ref.rollout.{x}" for x in ("gpu_memory_utilization", "enforce_eager")]
    said = ["rollout.engine=vllm", "rollout.vllm.memory=0.3", "rollout.vllm.eager=true"]
    settings = translate(load_recipe(RECIPE, said), tmp_path).settings
    assert [settings[key] for key in keys] == [0.3, True]
    settings = translate(load_recipe(RECIPE, said), tmp_path, Cluster(rollout="sglang")).settings
    assert not {*keys} & settings.keys()
    settings = translate(load_recipe(RECIPE, ["rollout.engine=hf"]), tmp_path).settings
    assert not {*keys} & settings.keys()


def test_print_shows_a_command_that_a_shell_reads_back(tmp_path: Path) -> None:
    options = ("--print", "--gpus", "4", "--verl", "trainer.save_freq=7")
    done = run(tmp_path, "verl", RECIPE, "reward={name: geo3k}", *options)
    assert done.code == 0, done.complained
    assert "trainer.n_gpus_per_node=4" in done.said
    assert done.said.rstrip().endswith("trainer.save_freq=7")
    shown = done.said.replace("python -m verl.trainer.main_ppo", "printf '%s\\n'")
    said = subprocess.run(["bash", "-c", shown], capture_output=True, text=True).stdout.split("\n")
    assert "+segment.partition.fraction=0.3" in said
    assert "+reward.custom_reward_function.reward_kwargs.reward={name:geo3k}" in said


def test_a_report_reads_verls_dumps(tmp_path: Path) -> None:
    (tmp_path / METRICS).parent.mkdir()
    (tmp_path / ROLLOUTS).mkdir()
    (tmp_path / "config.yaml").write_text("name: x\nalgorithm: sapo\n")
    before = [
        {
            "step": 0,
            "data": {
                "val-core/toy/acc/mean@1": 0.25,
                "val-core/a/b/acc/mean@1": 0.35,
                "val-core/a/b/acc/best@1/mean": 0.9,
                "val-aux/toy/reward/mean@1": 0.3,
                "val-aux/toy/no_verdict/mean@1": 0.1,
            },
        },
        {"step": 1, "data": {"critic/score/mean": 0.1, "segment/critic_pretraining": 1.0}},
        {"step": 2, "data": {"critic/score/mean": 0.7, "segment/critic_pretraining": 0.0}},
    ]
    (tmp_path / METRICS).write_text("".join(json.dumps(x) + "\n" for x in before))
    rotate_log(tmp_path / METRICS)
    lines = [  # killed and resumed: the second step was done again
        {"step": 2, "data": {"critic/score/mean": 0.2, "segment/critic_pretraining": 0.0}},
        {"step": 3, "data": {"critic/score/mean": 0.3, "val-core/toy/acc/mean@1": 0.5}},
    ]
    (tmp_path / METRICS).write_text("".join(json.dumps(x) + "\n" for x in lines))
    tokens = {"tokens": [5, 6, 7], "pieces": ["a", "b", "c"], "segment": [0, 0, 1]}
    rows = [
        {"input": "q", "output": "abc", "gts": "4", "score": 1.0, "uid": "u_0_0", TOKENS: tokens},
        {"input": "q", "output": "ab", "gts": "4", "score": 0.0, "uid": "u_1_0", TOKENS: None},
    ]
    (tmp_path / ROLLOUTS / "2.jsonl").write_text("".join(json.dumps(x) + "\n" for x in rows))
    adopt(tmp_path)
    run = read_run(tmp_path)
    assert run.series("reward", "optimize") == ([2, 3], [0.2, 0.3])
    assert run.series("reward", "pretrain_critic") == ([1], [0.1])
    assert run.series("sampled", "evaluation") == ([0, 3], [0.3, 0.5])
    assert run.series("reward", "evaluation") == ([0], [0.3])
    assert run.series("no_verdict", "evaluation") == ([0], [0.1])
    (row,) = run.rollouts(2)
    assert row["segment"] == [0, 0, 1]
    assert (row["prompt_id"], row["reward"], row["answer"]) == ("u", 1.0, "4")
    adopt(tmp_path)  # again, as a report of a running run does
    assert run.rollout_steps == [2]


def log(folder: Path, *lines: tuple[int, dict[str, float]]) -> None:
    """What verl writes after it emptied its log."""
    rotate_log(folder / METRICS)
    rows = [json.dumps({"step": step, "data": data}) + "\n" for step, data in lines]
    (folder / METRICS).write_text("".join(rows))


def test_no_start_of_a_run_empties_the_log_of_an_earlier_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Group methods run without the plugin, so the command keeps the log: verl opens it anew."""
    from segcredit.commands.verl import _run

    first = '{"step": 1, "data": {"critic/score/mean": 0.1}}\n'
    (tmp_path / METRICS).parent.mkdir()
    (tmp_path / METRICS).write_text(first)
    (tmp_path / "verl" / "metrics-002.jsonl").write_text("")  # another was removed
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())  # as if verl were here
    empties = f"open({str(tmp_path / METRICS)!r}, 'wb')"
    assert _run(tmp_path, {}, [sys.executable, "-c", empties]) == 0
    assert (tmp_path / "verl" / "metrics-003.jsonl").read_text() == first


def test_a_later_start_replaces_the_steps_that_it_did_again(tmp_path: Path) -> None:
    reward, score = "critic/score/mean", "val-core/toy/acc/mean@1"
    log(tmp_path, (0, {score: 0.1}), (1, {reward: 0.1}), (2, {reward: 0.2}), (3, {reward: 0.3}))
    log(tmp_path, (2, {score: 0.5}), (3, {reward: 0.4}))  # resumed behind step 2, killed
    log(tmp_path, (0, {score: 0.1}))  # started anew, no step done so far
    adopt(tmp_path)
    (tmp_path / "config.yaml").write_text("name: x\nalgorithm: sapo\n")
    assert read_run(tmp_path).series("reward", "optimize") == ([1, 2, 3], [0.1, 0.2, 0.4])
    log(tmp_path, (0, {score: 0.1}), (1, {reward: 0.7}))
    adopt(tmp_path)
    assert read_run(tmp_path).series("reward", "optimize") == ([1], [0.7])
    lines = '{"data": {}}\n{"step": "x", "data": {}}\n{"step": 2, "data": 3}\n{"step": 2}\n'
    rotate_log(tmp_path / METRICS)
    (tmp_path / METRICS).write_text(lines)  # not verl's
    adopt(tmp_path)
    assert read_run(tmp_path).series("reward", "optimize") == ([1], [0.7])


def test_a_reward_that_does_not_say_what_is_correct_has_no_accuracy(tmp_path: Path) -> None:
    """verl's core number is the reward then; it was shown as accuracy."""
    log(tmp_path, (0, {"val-core/toy/reward/mean@4": 0.5}))
    adopt(tmp_path)
    (tmp_path / "config.yaml").write_text("name: x\nalgorithm: sapo\n")
    run = read_run(tmp_path)
    with pytest.raises(ValueError, match=r"has no metric 'sampled'\. It has: reward"):
        run.series("sampled", "evaluation")
    assert run.series("reward", "evaluation") == ([0], [0.5])


def test_a_native_runs_metrics_are_never_replaced(tmp_path: Path) -> None:
    """A folder of segcredit train that gets a folder verl/, by --out or by somebody else."""
    own = '{"step": 1, "stage": "optimize", "reward": 0.9}\n'
    (tmp_path / "config.yaml").write_text("name: x\nalgorithm: sapo\n")
    (tmp_path / "metrics.jsonl").write_text(own)
    (tmp_path / "rollouts").mkdir()
    log(tmp_path, (1, {"critic/score/mean": 0.1}))
    with pytest.raises(ValueError, match=r"metrics\.jsonl from segcredit and a verl run"):
        adopt(tmp_path)
    assert (tmp_path / "metrics.jsonl").read_text() == own
    with pytest.raises(ValueError, match=r"holds metrics\.jsonl of another run.*--out"):
        check_free(tmp_path)
    (tmp_path / "metrics.jsonl").unlink()
    check_free(tmp_path)
    adopt(tmp_path)
    adopt(tmp_path)  # its own it may replace
    check_free(tmp_path)
    assert read_run(tmp_path).series("reward", "optimize") == ([1], [0.1])


def _names(row: str) -> list[str]:
    return [x for x in re.findall(r"`(\w+)`", row.split("|")[1]) if x in PARTITIONS]


def test_the_document_lists_every_setting() -> None:
    text = "".join(path.read_text() for path in DOCUMENTS)
    listed = re.findall(r"^\| `segment\.(\w+)` \|", text, re.MULTILINE)
    assert listed == list(SegmentSettings.model_fields)
    for name in METHODS:
        assert f"`{name}`" in text
    table = text[text.index("| `segment.partition.name` |") :]
    lines = {name: row for row in table.split("\n\n")[0].splitlines() for name in _names(row)}
    assert lines.keys() == PARTITIONS.keys()
    for name, row in lines.items():
        assert re.findall(r"`(\w+)`", row.split("|")[2]) == list(
            PARTITIONS[name].setting_fields()
        ), name
    defaults = {k: str(x.default) for k, x in SegmentSettings.model_fields.items() if x.default}
    for name, default in defaults.items():
        assert re.search(rf"`segment\.{name}` \| `?{default}`? \|", text), name


def test_every_partition_is_made_by_name() -> None:
    given = {"fixed": {"size": 4}, "entropy": {"fraction": 0.5}}
    with pytest.raises(ValueError, match="cannot be cut by its values"):
        parse_settings({"partition": "value"})
    for name, kind in PARTITIONS.items():
        if name == "value":
            continue
        made = partition_of(
            parse_settings({"partition": {"name": name, **given.get(name, {})}}).partition
        )
        assert type(made) is kind
        assert all(getattr(made, key) == x for key, x in given.get(name, {}).items())
    assert partition_of(parse_settings({"partition": {"fraction": 0.5}}).partition) == TopEntropy(
        0.5
    )
    assert partition_of(parse_settings({"partition": "newline"}).partition) == Newline()


def test_a_recipes_partition_is_said_in_the_same_words(tmp_path: Path) -> None:
    for spec in ({"name": "entropy", "fraction": 0.1}, {"name": "fixed", "size": 4}, "step"):
        chosen = json.dumps({"name": "sapo", "partition": spec})
        recipe = load_recipe(RECIPE, [f"algorithm={chosen}"])
        settings = translate(recipe, tmp_path).settings
        head = "+segment.partition."
        said = {key.removeprefix(head): x for key, x in settings.items() if key.startswith(head)}
        assert said == (spec if isinstance(spec, dict) else {"name": spec})


def test_the_tested_range_of_versions() -> None:
    assert refusal("0.9.1") is None
    for other in ("0.9.0", "0.9.2", "0.10.0.dev1", "1.0"):
        assert f"this is verl {other}" in (refusal(other) or "")
    assert refusal("0.10.0", allowed=True) is None


def test_the_reason_stands_at_the_end(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Ray goes on talking after the error; the command says it once more."""
    from segcredit.commands.verl import _echo, _run

    script = tmp_path / "fails.py"
    script.write_text(
        "print('Traceback (most recent call last):')\n"
        "print('RuntimeError: segcredit: the run stopped in step 3, because …')\n"
        "print('(WorkerDict pid=7) [rank0] other words')\nraise SystemExit(1)\n"
    )
    code, last = _echo([sys.executable, str(script)])
    assert (code, last) == (1, "segcredit: the run stopped in step 3, because …")
    assert "other words" in capfd.readouterr().out
    assert _run(tmp_path / "run", {}, [sys.executable, str(script)]) in (1, 2)
    assert capfd.readouterr().err.strip().splitlines()[-1].startswith("error: ")


def test_rows_that_verl_cannot_read_are_found_before_it_starts(tmp_path: Path) -> None:
    good, bad = tmp_path / "good.jsonl", tmp_path / "bad.jsonl"
    messages = [{"role": "user", "content": "1 + 1?"}]
    good.write_text(json.dumps({"prompt": messages, "reward_model": {"ground_truth": "2"}}) + "\n")
    bad.write_text(json.dumps({"prompt": "1 + 1?", "answer": "2"}) + "\n")
    translate(load_recipe(RECIPE, [f"data.train=[{good}]"]), tmp_path)
    with pytest.raises(ValueError, match=r"bad\.jsonl holds rows that verl cannot read"):
        translate(load_recipe(RECIPE, [f"data.train=[{bad}]"]), tmp_path)
    pq.write_table(pa.Table.from_pylist([json.loads(good.read_text())]), tmp_path / "x.parquet")
    translate(load_recipe(RECIPE, [f"data.train=[{tmp_path}/x.parquet]"]), tmp_path)
    pq.write_table(pa.Table.from_pylist([{"question": "1 + 1?"}]), tmp_path / "y.parquet")
    with pytest.raises(ValueError, match=r"y\.parquet holds rows that verl cannot read"):
        translate(load_recipe(RECIPE, [f"data.train=[{tmp_path}/y.parquet]"]), tmp_path)


OWN = """
from dataclasses import dataclass

from segcredit.algorithms import sapo
from segcredit.partition import FixedLength

@dataclass(frozen=True)
class Pairs(FixedLength):
    size: int = 2

def short_sapo(lam=0.9, **settings):
    return sapo(lam=lam, **settings)

def group(**settings):
    from segcredit.algorithms import gspo
    return gspo()

def steps(**settings):
    from segcredit.algorithms import vineppo
    return vineppo()
"""


def test_own_partitions_and_methods_arrive_by_absolute_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The plugin builds the same method from verl's settings, wherever its process runs."""
    (tmp_path / "own.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    file = tmp_path.resolve() / "own.py"
    chosen = ["algorithm={name: sapo, partition: {name: 'own.py:Pairs', size: 3}}"]
    settings = translate(load_recipe(RECIPE, chosen), tmp_path).settings
    assert settings["+segment.partition.name"] == f"{file}:Pairs"
    assert settings["+segment.partition.size"] == 3
    chosen = ["algorithm={name: 'own.py:short_sapo', lam: 0.8}"]
    settings = translate(load_recipe(RECIPE, chosen), tmp_path).settings
    assert settings["+segment.algorithm"] == f"{file}:short_sapo"
    assert settings["algorithm.lam"] == 0.8
    assert settings["+segment.recorded_every"] >= 1
    monkeypatch.chdir("/")
    section = {"algorithm": f"{file}:short_sapo", "partition": {"name": f"{file}:Pairs"}}
    method = make_method(parse_settings(section), settings)
    assert type(method.credit.over).__name__ == "Pairs"
    monkeypatch.chdir(tmp_path)
    recipe = load_recipe(RECIPE, ["algorithm=own.py:group", "rollout.samples=8"])
    settings = translate(recipe, tmp_path).settings  # verl has all of its parts
    assert settings["actor_rollout_ref.actor.policy_loss.loss_mode"] == "gspo"
    with pytest.raises(ValueError, match=r"own\.py:steps does not run on verl.*GAE, a critic"):
        translate(load_recipe(RECIPE, ["algorithm=own.py:steps"]), tmp_path)
    with pytest.raises(ValueError, match="expected a method with GAE, a critic"):
        make_method(parse_settings({"algorithm": f"{file}:group"}), settings)
