"""Compare the speed of two revisions of segcredit, measured in turns in one run.

    python benchmarks/revisions.py --before HEAD~20          # this tree beside an older commit
    python benchmarks/revisions.py --before v0.1 --rounds 9  # more rounds, smaller noise

Each round measures both revisions one after the other, in a new process each, so that a slow moment
of the machine affects both. Printed are medians and the median of the paired ratios after / before.

- credit: top-entropy partition, segment GAE, geometric-mean ratio, clipped surrogate and boundary
  value loss, forward and backward, on 32 × 512 tokens.
- step: phases of SAPO steps of the demo (a tiny Qwen2.5-VL with critic), from its metrics.jsonl.

Only names that stay stable are used, so any two revisions with the same names can be compared.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CREDIT = """
import json, statistics, time, torch
from segcredit.core.advantages import segment_gae
from segcredit.core.losses import boundary_value_loss, clipped_surrogate
from segcredit.core.ratios import geometric_mean_ratio

try:
    from segcredit.core.losses import response_mean
except ImportError:  # older revisions
    from segcredit.core.reduce import response_mean
from segcredit.partition import top_entropy

torch.set_num_threads(1)
torch.manual_seed(0)
shape = (32, 512)
mask = torch.arange(512) < torch.randint(256, 513, (32, 1))
entropy, value, logp = torch.rand(shape), torch.rand(shape), -torch.rand(shape)
logp_new, value_new = (logp + 0.01).requires_grad_(), (value + 0.01).requires_grad_()
reward, times = torch.rand(32), []
for _ in range(30):
    begun = time.perf_counter()
    segments = top_entropy(entropy, mask, 0.30)
    credit = segment_gae(reward, value, segments, gamma=1.0, lam=0.99)
    ratio = geometric_mean_ratio(logp_new, logp, segments)
    loss = response_mean(clipped_surrogate(ratio, credit.advantage, 0.2, 0.2), mask)
    loss = loss + boundary_value_loss(value_new, value, credit.value_target, segments)
    loss.backward()
    times.append(time.perf_counter() - begun)
print(json.dumps({"credit": statistics.median(times[5:])}))
"""
DEMO = (
    *(f"stages.{number}.steps={steps}" for number, steps in enumerate((1, 1, 1, 6))),
    *("evaluation.prompts=4", "save.rollouts_every=0", "save.every=100", "threads=1"),
)
PHASES = ("sample", "score", "annotate", "credit", "update", "sync")


def run(tree: Path, *command: str) -> str:
    """Run a command with the segcredit of that tree."""
    environment = {**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=tree, env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(command)[:100]} failed in {tree}:\n{done.stderr[-2000:]}")
    return done.stdout


def measure(tree: Path) -> dict[str, float]:
    """Measure seconds of credit assignment and of each phase of a training step."""
    found: dict[str, float] = json.loads(run(tree, sys.executable, "-c", CREDIT))
    with tempfile.TemporaryDirectory() as folder:
        start = "import sys; from segcredit.cli import main; main()"
        run(tree, sys.executable, "-c", start, "demo", *DEMO, "--folder", f"{folder}/run")
        lines = (Path(folder) / "run" / "metrics.jsonl").read_text().splitlines()
    rows = [row for row in map(json.loads, lines) if row["stage"] == "optimize"][1:]
    for phase in PHASES:
        found[f"step: {phase}"] = statistics.median(row[f"time/{phase}"] for row in rows)
    found["step: all phases"] = statistics.median(
        sum(row[f"time/{phase}"] for phase in PHASES) for row in rows
    )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--before", default="HEAD~1", help="older revision (commit, tag, branch)")
    parser.add_argument("--rounds", type=int, default=5, help="measurements of each revision")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        older = Path(folder) / "before"
        git = ("git", "-C", str(ROOT), "worktree")
        subprocess.run([*git, "add", "--quiet", "--detach", str(older), given.before], check=True)
        try:
            pairs = []
            for number in range(given.rounds):
                order = (older, ROOT) if number % 2 == 0 else (ROOT, older)
                found = {tree: measure(tree) for tree in order}
                pairs.append((found[older], found[ROOT]))
                print(f"round {number + 1} of {given.rounds}", file=sys.stderr)
        finally:
            subprocess.run([*git, "remove", "--force", str(older)], check=True)
    print(f"{'':18} {'before ms':>10} {'after ms':>10} {'after / before':>15}")
    for name in pairs[0][0]:
        before, after = ([pair[i][name] for pair in pairs] for i in (0, 1))
        ratio = statistics.median(b / a for a, b in zip(before, after, strict=True))
        shown = [1e3 * statistics.median(x) for x in (before, after)]
        print(f"{name:18} {shown[0]:10.2f} {shown[1]:10.2f} {ratio:15.3f}")


if __name__ == "__main__":
    main()
