"""The public Python API: a trainer that writes the report page of its run."""

import warnings
from dataclasses import replace
from pathlib import Path

from segcredit.train import trainer
from segcredit.train.arguments import check_switch
from segcredit.train.loop import Observer
from segcredit.train.trainer import Result


class Trainer(trainer.Trainer):
    """Trains one model with one method.

    All settings, rows and types are validated when the trainer is created, before any model is
    loaded.

    Args:
        model: Folder or hub id of the model, a ``PreTrainedModel`` of transformers, or settings
            such as ``{"path": …, "dtype": …}``. The run trains a copy of a model in memory and
            saves the original weights in its checkpoints/initial.
        data: Training data: files, rows, a ``datasets.Dataset``, a data frame of pandas or polars,
            or settings such as ``{"train": …, "suffix": …}``.
        algorithm: Name of a method, a name with settings, or an ``Algorithm`` object.
        reward: Name of a reward, a name with settings, a function, a ``RewardFn``, or a list of
            these, which is a weighted sum.
        reward_weights: Weight of each reward of a list. None: the ``weight`` of its settings, or 1.
        test: Held-out data: files or rows.
        steps: Number of optimization steps, 100 by default; ``stages`` has its own steps.
        tokenizer: Tokenizer or processor of a model in memory, or ``(tokenizer,
            image_processor)``.
        callbacks: Objects of ``segcredit.Callback``, called during training.
        settings: Other sections of a recipe, such as ``rollout={"prompts": 64}``.
    """

    def train(  # type: ignore[override]
        self,
        folder: str | Path | None = None,
        resume: bool = False,
        watch: Observer | None = None,
        progress: bool = True,
        report: bool = True,
    ) -> Result:
        """Run all stages; with ``resume``, continue the run in ``folder``.

        Args:
            folder: Run directory; by default a new one under runs/.
            resume: Continue from the last checkpoint in ``folder``.
            watch: Receives progress, such as a progress bar; by default progress and metrics
                are shown.
            progress: False prints nothing; ignored if ``watch`` is given.
            report: Write curves and the report page at the end; ``result.report`` is the page.
        """
        check_switch("report", report)
        finish = _write_report if report else None
        return super().train(folder, resume, watch, progress, finish)


def _write_report(result: Result) -> Result:
    """Write curves and report page; a failure is a warning and does not fail the finished run."""
    from segcredit.commands.report import finish_report

    assert result.folder is not None  # rank 0
    _, page = finish_report(result.folder, warnings.warn)
    return replace(result, report=page)
