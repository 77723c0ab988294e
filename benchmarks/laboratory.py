"""Measure properties of a laboratory world: does credit matter, and what can a critic learn?

    python benchmarks/laboratory.py mini/text --small          # on a CPU, several minutes
    python benchmarks/laboratory.py mini/text                  # full size, on one GPU
    python benchmarks/laboratory.py mini/vision --optimize 60 algorithm.lam=0.95
    python benchmarks/laboratory.py mini/text --start RUN/checkpoints/step-000050

The script runs the recipe's warm start, samples responses to held-out prompts, estimates V at step
boundaries from many continuations, pretrains the critic, and prints a table of properties.
`--optimize N` then trains N steps with the recipe's method and evaluates periodically. `--start`
loads policy and critic from a study's checkpoint instead of training them. Recipe overrides may
follow, as for `segcredit train`. `--json FILE` saves all numbers.

Reading the table: "ceiling" is the fraction of the outcome's variance that the prefix determines
under this policy, Var(V) / Var(R). V is a Monte Carlo estimate whose sampling noise is subtracted.
No critic can explain more. "critic" is 1 − Var(R − V_φ) / Var(R) at the same prefixes. Each line is
one step. Fractions refer to a response's tokens, rounded down to the previous step boundary.
"""

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from segcredit.columns import VALUE, Column
from segcredit.config import Optimize, PretrainCritic, WarmStart, load_recipe
from segcredit.core.advantages import explained_variance
from segcredit.train.build import build, make_plan
from segcredit.train.collect import Context, collect
from segcredit.train.loop import evaluate_state
from segcredit.train.metrics import Metrics, RolloutBatch
from segcredit.train.stages import stage_of
from segcredit.train.state import State, generator
from segcredit.types import Response, Sampling
from segcredit_lab.study.recipes import after
from segcredit_lab.worlds.bookings import RULES, SURE, UNSURE, Bookings

FRACTIONS = (0.0, 0.25, 0.5, 0.75)
COMMON = [
    "threads=1",
    "rollout.max_tokens=128",
    "evaluation.prompts=256",
    "model.dtype=float32",
    "model.hidden=96",
    "model.layers=2",
    "model.heads=4",
    "data.settings.modulus=7",
    "data.settings.most=3",
    "data.settings.openers=3",
    "data.settings.verbs=2",
    "data.settings.plain_right=0.95",
    "data.settings.trap_right=0.15",
    "optimizer.critic_lr=5.0e-4",
]
SMALL = {
    "ledger": [
        *COMMON,
        "data.settings.booked=[4, 4]",
        "data.settings.foreign=[0, 1]",
        "data.settings.kinds=5",
        "data.settings.regions=4",
        "stages.0.steps=600",
        "stages.0.batch=32",
        "stages.0.lr=3.0e-3",
        "stages.0.warmup_steps=30",
        "stages.1.prompts=128",
    ],
    "tile_tour": [
        *COMMON,
        "data.settings.visited=[4, 4]",
        "data.settings.size=3",
        "data.settings.colors=3",
        "data.settings.shapes=3",
        "data.settings.codes=2",
        "stages.0.steps=500",
        "stages.0.batch=32",
        "stages.0.lr=2.0e-3",
        "stages.1.steps=800",
        "stages.1.batch=32",
        "stages.1.lr=2.0e-3",
        "stages.2.prompts=128",
    ],
}
"""Overrides for one CPU core: shorter chains, fewer contexts, 0.2 and 0.4 M parameters."""


@dataclass
class Laboratory:
    """A training state that runs through the stages, and the measurements taken on it."""

    state: State
    world: Bookings
    prompts: int
    found: dict[str, Any] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)

    def run(self, prefixes: int, continuations: int, steps: int) -> None:
        """Run and measure all stages in order."""
        state = self.state
        for number, stage in enumerate(state.recipe.stages):
            state.stage, state.stage_step = number, 0
            if not isinstance(stage, WarmStart) and "sampled" not in self.found:
                self._after_warm_start(prefixes, continuations)
            if isinstance(stage, Optimize):
                if state.recipe.model.critic is not None:
                    stage_of(state, stage).enter()
                    self._critic()
                if not steps:
                    return
                stage = stage.model_copy(update={"steps": steps})
            self._stage(stage, f"{number} {stage.kind} {getattr(stage, 'phase', '')}".strip())
            if isinstance(stage, PretrainCritic):
                self._critic()

    def _stage(self, stage: WarmStart | PretrainCritic | Optimize, name: str) -> None:
        state, begun = self.state, time.perf_counter()
        stage_of(state, stage).enter()
        last: dict[str, float] = {}
        every = max(1, stage.steps // 10)
        while state.stage_step < stage.steps:
            last, _ = stage_of(state, stage).step()
            state.stage_step += 1
            state.step += 1
            if state.stage_step % every == 0:
                shown = [
                    k for k in ("nll", "accuracy", "explained_variance", "clipped") if k in last
                ]
                self._note(name, state.stage_step, {k: last[k] for k in shown}, begun)
            asked = state.recipe.evaluation.every
            if isinstance(stage, Optimize) and asked and state.stage_step % asked == 0:
                curve = self.found.setdefault("curve", [])
                measured = evaluate_state(state)
                assert measured is not None
                curve.append({"step": state.stage_step, **measured.metrics()})
                self._note("held out", state.stage_step, {"sampled": measured.sampled}, begun)
        self.seconds[name] = time.perf_counter() - begun
        self.found[f"{name} last"] = last

    def _note(self, name: str, step: int, shown: dict[str, float], begun: float) -> None:
        numbers = "  ".join(f"{k} {x:.4f}" for k, x in shown.items())
        print(f"  {name} {step}: {numbers}  ({time.perf_counter() - begun:.0f} s)", flush=True)

    def _after_warm_start(self, prefixes: int, continuations: int) -> None:
        begun = time.perf_counter()
        measured = evaluate_state(self.state)
        assert measured is not None
        self.found |= {"sampled": measured.sampled, "greedy": measured.greedy}
        self.rollouts = self._collect((), "warm")
        self.found |= self._chains(self.rollouts) | self._entropies(self.rollouts)
        self.seconds["measure"] = time.perf_counter() - begun
        begun = time.perf_counter()
        self.found["ceiling"] = self._ceiling(prefixes, continuations)
        self.seconds["oracle"] = time.perf_counter() - begun
        print("\n" + table(self.found, self.seconds) + "\n", flush=True)

    def _collect(self, columns: tuple[Column, ...], purpose: str) -> RolloutBatch:
        """Sample responses to held-out prompts that evaluations do not use."""
        assert self.state.world is not None
        prompts = self.state.world.prompts("test", 10_000, self.prompts)
        return collect(Context(self.state, Metrics(), ("laboratory", purpose)), prompts, columns)

    def _chains(self, collected: RolloutBatch) -> dict[str, Any]:
        """Measure response lengths and the effect of errors on accuracy."""
        lengths = sorted(x.num_tokens for x in collected.responses)
        right = [bool(x.correct) for x in collected.rewards]
        errors = [self.world.errors(x.prompt, x.text) for x in collected.responses]
        by_number: dict[str, dict[str, float]] = {}
        for name, some in (("0", (0, 0)), ("1", (1, 1)), ("2 or more", (2, 1000))):
            mine = [
                x
                for x, found in zip(right, errors, strict=True)
                if some[0] <= len(found) <= some[1]
            ]
            by_number[name] = {
                "share": len(mine) / len(right),
                "accuracy": statistics.fmean(mine) if mine else float("nan"),
            }
        at = [
            self._kind_at(x.text, found[0])
            for x, found in zip(collected.responses, errors, strict=True)
            if found
        ]
        decisions = [
            sum(mark.kind == "decision" for mark in self.world.marks(x.text))
            for x in collected.responses
        ]
        return {
            "length": {
                "least": lengths[0],
                "median": statistics.median(lengths),
                "mean": statistics.fmean(lengths),
                "most": lengths[-1],
            },
            "truncated": statistics.fmean(x.truncated for x in collected.responses),
            "decisions": statistics.fmean(decisions),
            "by errors": by_number,
            "first error at a decision": at.count("decision") / max(1, len(at)),
            "doubted": self._remarks(collected),
        }

    def _kind_at(self, text: str, place: int) -> str:
        return next((x.kind for x in self.world.marks(text) if x.start == place), "plain")

    def _kinds(self, collected: RolloutBatch) -> list[list[str]]:
        """Return the kind of each token."""
        rollouts, codec = collected.rollouts, self.state.policy.codec
        kinds = []
        for row, response in enumerate(collected.responses):
            marks = {mark.start: mark.kind for mark in self.world.marks(response.text)}
            tokens = rollouts.tokens[row][rollouts.mask[row]].tolist()
            place, mine = 0, []
            for piece in codec.pieces(tokens):
                mine.append(marks.get(place, "plain"))
                place += len(piece)
            kinds.append(mine)
        return kinds

    def _entropies(self, collected: RolloutBatch) -> dict[str, Any]:
        rollouts = collected.rollouts
        assert rollouts.entropy is not None
        by_kind: dict[str, list[float]] = {"decision": [], "style": [], "plain": []}
        top: list[str] = []
        for row, mine in enumerate(self._kinds(collected)):
            entropy = rollouts.entropy[row][rollouts.mask[row]].tolist()
            for kind, x in zip(mine, entropy, strict=True):
                by_kind[kind].append(x)
            best = sorted(range(len(mine)), key=lambda i: -entropy[i])
            top += [mine[i] for i in best[: len(mine) // 10]]
        count = sum(map(len, by_kind.values()))
        return {
            "entropy": {kind: statistics.fmean(x or [0.0]) for kind, x in by_kind.items()},
            "share of tokens": {kind: len(x) / count for kind, x in by_kind.items()},
            "share of the top 10 %": {kind: top.count(kind) / len(top) for kind in by_kind},
        }

    def _boundaries(self, collected: RolloutBatch, row: int) -> list[int]:
        """Return the number of tokens before each fraction, rounded down to whole lines."""
        rollouts, codec = collected.rollouts, self.state.policy.codec
        pieces = codec.pieces(rollouts.tokens[row][rollouts.mask[row]].tolist())
        ends = [0, *(n + 1 for n, piece in enumerate(pieces) if "\n" in piece)]
        return [max(x for x in ends if x <= share * len(pieces)) for share in FRACTIONS]

    def _ceiling(self, prefixes: int, continuations: int) -> dict[str, float]:
        """Compute Var(V) / Var(R) at each fraction, corrected for the noise of the estimates."""
        state, collected = self.state, self.rollouts
        rollouts = collected.rollouts
        assert rollouts.prompts is not None
        settings = state.recipe.rollout
        sampling = Sampling(settings.max_tokens, settings.temperature)
        rows = range(min(prefixes, len(collected.responses)))
        cuts = {row: self._boundaries(collected, row) for row in rows}
        found = {}
        for number, share in enumerate(FRACTIONS):
            begun = [rollouts.tokens[row, : cuts[row][number]].cpu() for row in rows]
            asked = [rollouts.prompts[row] for row in rows for _ in range(continuations)]
            after = [x for x in begun for _ in range(continuations)]
            drawn = state.engine.continue_from(
                asked, after, sampling, generator(state.seed, "laboratory", "oracle", number)
            )
            values = self._grade(collected, rows, begun, drawn.tokens, drawn.mask, continuations)
            found[str(share)] = oracle_share(values.view(len(rows), continuations))
        return found

    def _grade(
        self,
        collected: RolloutBatch,
        rows: Sequence[int],
        begun: Sequence[torch.Tensor],
        tokens: torch.Tensor,
        mask: torch.Tensor,
        continuations: int,
    ) -> torch.Tensor:
        codec, most = self.state.policy.codec, self.state.recipe.rollout.max_tokens
        before = [codec.decode(x.tolist()) for x in begun]
        responses = []
        for place, (mine, kept) in enumerate(zip(tokens.cpu(), mask.cpu(), strict=True)):
            row = place // continuations
            text = before[row] + codec.decode(mine[kept].tolist())
            prompt = collected.responses[rows[row]].prompt
            responses.append(Response(prompt, text, int(kept.sum()), False, most))
        return torch.tensor([x.value for x in self.state.reward(responses)])

    def _critic(self) -> None:
        """Measure the critic's explained variance on new responses and its reaction to errors."""
        begun = time.perf_counter()
        collected = self._collect((VALUE,), "critic")
        rollouts = collected.rollouts
        assert rollouts.value is not None
        mask, reward = rollouts.mask, rollouts.reward
        everywhere = reward[:, None].expand_as(rollouts.value)[mask]
        self.found["critic everywhere"] = explained_variance(rollouts.value[mask], everywhere)
        cuts = [self._boundaries(collected, row) for row in range(len(reward))]
        at = torch.tensor(cuts, device=mask.device)
        self.found["critic"] = {
            str(share): explained_variance(
                rollouts.value.gather(1, at[:, number : number + 1]).squeeze(1), reward
            )
            for number, share in enumerate(FRACTIONS)
        }
        self.found["V over a rule"] = self._jumps(collected)
        self.seconds["measure critic"] = time.perf_counter() - begun

    def _jumps(self, collected: RolloutBatch) -> dict[str, float]:
        """Return the mean change of V over rules up to the first error, in traps and elsewhere.

        For a good critic V falls at a wrong decision where a right one was likely, and rises at a
        right decision in a trap.
        """
        rollouts, codec = collected.rollouts, self.state.policy.codec
        assert rollouts.value is not None
        found: dict[str, list[float]] = {}
        for row, response in enumerate(collected.responses):
            puzzle = self.world.read(response.prompt)
            own = [x if x.owner == puzzle.owner else None for x in puzzle.entries]
            first = self.world.first_error(response.prompt, response.text)
            pieces = codec.pieces(rollouts.tokens[row][rollouts.mask[row]].tolist())
            value = rollouts.value[row].tolist()
            place = 0
            for token, piece in enumerate(pieces[:-2]):
                line = response.text.count("\n", 0, place)
                entry = own[line] if line < len(own) and piece.strip() in RULES else None
                if entry is not None and (first is None or place <= first):
                    trap = self.world.guideline(entry.context).rate < 0.5
                    name = f"{'wrong' if place == first else 'right'}{' in a trap' if trap else ''}"
                    # V two tokens later, when the prefix includes the decision
                    found.setdefault(name, []).append(value[token + 2] - value[token])
                place += len(piece)
        return {name: statistics.fmean(x) for name, x in sorted(found.items())}

    def _remarks(self, collected: RolloutBatch) -> dict[str, float]:
        """Return how often wrong and right lines are marked as unsure."""
        doubts: dict[str, list[bool]] = {"of wrong lines": [], "of right lines": []}
        for response in collected.responses:
            errors = self.world.errors(response.prompt, response.text)
            end = 0
            for line in response.text.split("\n"):
                begin, end = end, end + len(line) + 1
                words = line.split()
                if SURE in words or UNSURE in words:
                    wrong = any(begin <= x < end for x in errors)
                    doubts[f"of {'wrong' if wrong else 'right'} lines"].append(UNSURE in words)
        return {name: statistics.fmean(x or [0]) for name, x in doubts.items()}


def oracle_share(outcomes: torch.Tensor) -> float:
    """Return Var(V) / Var(R) of (prefixes, continuations) outcomes; unbiased in Var(V)."""
    value = outcomes.double().mean(dim=1)
    count = outcomes.shape[1]
    noise = float((value * (1 - value)).mean()) / (count - 1)
    mean = float(value.mean())
    spread = mean * (1 - mean)
    return (float(value.var(correction=1)) - noise) / spread if spread else 0.0


def table(found: dict[str, Any], seconds: dict[str, float]) -> str:
    """Format all measurements as a Markdown table."""
    rows = [("property", "value"), ("---", "---")]

    def add(name: str, x: object) -> None:
        if isinstance(x, dict):
            for key, inner in x.items():
                add(f"{name}: {key}", inner)
        elif isinstance(x, list):
            add(name, "  ".join(f"{y['step']}: {y['sampled']:.3f}" for y in x))
        else:
            rows.append((name, f"{x:.3f}" if isinstance(x, float) else str(x)))

    for name, x in found.items():
        if not name.endswith(" last"):
            add(name, x)
    rows += [(f"seconds: {name}", f"{x:.1f}") for name, x in seconds.items()]
    return "\n".join(f"| {name} | {x} |" for name, x in rows)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("recipe")
    parser.add_argument("--small", action="store_true", help="reduced sizes for one CPU core")
    parser.add_argument(
        "--optimize", type=int, default=0, metavar="N", help="training steps after the measurements"
    )
    parser.add_argument("--start", type=Path, help="checkpoint with policy and critic")
    parser.add_argument("--prompts", type=int, help="number of held-out responses")
    parser.add_argument("--prefixes", type=int, help="number of responses with continuations")
    parser.add_argument("--continuations", type=int, help="continuations per prefix")
    parser.add_argument("--json", type=Path)
    parser.add_argument("settings", nargs="*", help="recipe overrides: key.path=value")
    asked, more = parser.parse_known_args()
    overrides = [*asked.settings, *more]
    world = load_recipe(asked.recipe).data.world
    if asked.small and world not in SMALL:
        parser.error(f"--small supports {', '.join(SMALL)}; {asked.recipe} uses {world}")
    small = SMALL[str(world)] if asked.small else []
    recipe = load_recipe(asked.recipe, ["evaluation.greedy=true", *small, *overrides])
    if asked.start is not None:
        begun = recipe.model_copy(
            update={"stages": [x for x in recipe.stages if not isinstance(x, Optimize)]}
        )
        recipe = after(recipe, begun, str(asked.start))
    state = build(make_plan(recipe))
    if not isinstance(state.world, Bookings):
        parser.error(f"{recipe.data.world} does not report where errors are")
    count = sum(x.numel() for x in state.policy.model.parameters())
    print(f"{state.world!r}\n{count:,} parameters on {state.policy.device}", flush=True)
    laboratory = Laboratory(state, state.world, asked.prompts or (256 if asked.small else 1024))
    laboratory.found["parameters"] = count
    laboratory.run(
        asked.prefixes or (64 if asked.small else 256),
        asked.continuations or (8 if asked.small else 16),
        asked.optimize,
    )
    print("\n" + table(laboratory.found, laboratory.seconds))
    if asked.json is not None:
        record = {"recipe": recipe.as_dict(), "found": laboratory.found}
        asked.json.write_text(json.dumps(record | {"seconds": laboratory.seconds}, indent=1))


if __name__ == "__main__":
    main()
