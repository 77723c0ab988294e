"""Draw docs/img/chains-light.svg and chains-dark.svg: what a short horizon costs, by chain length.

Numbers are those of docs/results/chain-…/study.csv, as docs/make_results.py brought them. Run from
anywhere: ``python docs/make_chains.py``; with ``--png FOLDER`` it also writes bitmaps.
"""

import csv

from make_overview import HERE, OWN, SHORT, Look, asked_png, mark, prepare, save
from matplotlib.figure import Figure

STUDIES = {
    "chain-two-half": "2 decisions in 49 tokens",
    "chain-two": "2 decisions in 49 tokens",
    "chain-four": "4 decisions in 95 tokens",
    "chain-eight": "8 decisions in 220 tokens",
    "chain-two_padded": "2 decisions in 220 tokens",
}
ARMS = {"sapo_short": (SHORT, "SAPO with PPO's horizon"), "ppo": (OWN, "PPO")}
"""In which colour, and what it is called."""


def draw(look: Look) -> Figure:
    """One row a length, in it both methods with the short horizon."""
    figure = Figure(figsize=(7.8, 4.2), layout="constrained", facecolor=look.page)
    axis = figure.subplots()
    prepare(axis, look, len(STUDIES))
    axis.set_xlim(-28, 22)
    axis.set_xlabel(
        "points of held-out accuracy above SAPO, mean over the learning curve", color=look.ink
    )
    labels = []
    for at, (study, label) in enumerate(STUDIES.items()):
        lines = (HERE / "results" / study / "study.csv").read_text().splitlines()
        rows = {row["arm"]: row for row in csv.DictReader(lines)}
        rates = [f"{float(row['learning_rate']):g}" for row in rows.values()]
        told = rates[0] if len({*rates}) == 1 else ", ".join(rates)
        labels.append(f"{label}\n{len(rows['sapo']['seeds'].split())} seeds, rate {told}")
        for arm, offset in zip(ARMS, (-0.16, 0.2), strict=True):
            mean, low, high = (
                100 * float(rows[arm][f"area_difference{end}"]) for end in ("", "_low", "_high")
            )
            mark(axis, look, look.kinds[ARMS[arm][0]], at + offset, (mean, low, high))
    axis.set_yticks(range(len(STUDIES)), labels)
    handles = [
        axis.plot([], [], "o-", color=look.kinds[kind], label=label)[0]
        for kind, label in ARMS.values()
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=2, labelcolor=look.ink)
    return figure


if __name__ == "__main__":
    save(draw, "chains", asked_png(__doc__ or ""))
