"""Upload a saved policy with its model card to the Hugging Face Hub."""

import re
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from segcredit.printable import listed, named, printable, shown
from segcredit.runlog.card import CARD, HUB_ID
from segcredit.runlog.folder import POLICY, by_step, step_name, step_of
from segcredit.runlog.reader import Run
from segcredit.runlog.storage import recorded_files, verify

if TYPE_CHECKING:
    from huggingface_hub import HfApi

PICKLES = (".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt")
"""Suffixes of files that may run code when they are loaded."""
_LOGIN = "Type: hf auth login"
_PATH = re.compile(r"(?<![\w.:/~@<])(?:~|\.\.)?/[\w.~-][^\s`'\"|,\]}]*")


class PublishError(ValueError):
    """A policy that cannot be uploaded; the message says why, and what to do."""


@dataclass(frozen=True)
class Policy:
    """A saved policy whose content was verified."""

    folder: Path
    step: int
    sizes: dict[str, int]
    """Bytes of every file to upload, by its name in the repository."""

    @cached_property
    def card(self) -> str:
        """Text of the model card; empty if the checkpoint has none."""
        path = self.folder / CARD
        return path.read_text(encoding="utf-8") if CARD in self.sizes else ""

    @property
    def local_paths(self) -> list[str]:
        """Absolute paths of this machine that the model card names."""
        return sorted({x.rstrip(".,;:)") for x in _PATH.findall(self.card)})


def find_saved_policy(run: Run, step: int | None) -> Policy:
    """Find the policy of a checkpoint (None: the last complete one) and verify its files.

    Only files that the checkpoint's manifest lists are accepted, so nothing that was added later
    is uploaded; and no file that may run code when it is loaded.
    """
    place = run.last_complete_checkpoint() if step is None else _checkpoint(run, step)
    if place is None:
        raise PublishError(
            f"expected a complete checkpoint in {run.path}; there is none. Resume it."
        )
    if step is not None:
        verify(place)
    folder = place / POLICY
    inside = f"{POLICY}/"
    known = {x.removeprefix(inside) for x in recorded_files(place) if x.startswith(inside)}
    found = [x for x in sorted(folder.rglob("*")) if x.is_symlink() or not x.is_dir()]
    names = [x.relative_to(folder).as_posix() for x in found]
    if added := [x for x in names if x not in known]:
        raise PublishError(
            f"expected only files that the run wrote in {folder}; got {listed(added)}. Move them "
            f"away, then push again."
        )
    if bad := [y for x, y in zip(found, names, strict=True) if x.is_symlink() or _is_pickle(x)]:
        raise PublishError(
            f"expected plain files that run no code when they are loaded; got {listed(bad)} in "
            f"{folder}. Save the weights as safetensors."
        )
    number = step_of(place.name)
    assert number is not None
    return Policy(folder, number, {y: x.stat().st_size for x, y in zip(found, names, strict=True)})


def upload(policy: Policy, repo: str, private: bool, update: bool, api: "HfApi") -> str:
    """Upload the policy as one commit; return the repository's address.

    Args:
        repo: ``owner/name``.
        private: Make a new repository private.
        update: Add a commit to a repository that exists; otherwise it must be new.
        api: Client of the Hub.
    """
    from huggingface_hub import CommitOperationAdd

    check_name(repo)
    files = [CommitOperationAdd(name, policy.folder / name) for name in policy.sizes]
    with _explained(repo):
        api.whoami()  # before anything is created
        exists = api.repo_exists(repo)
        if exists and not update:
            raise PublishError(
                f"expected a new repository; {repo} exists. To add this checkpoint to it as a new "
                f"commit, type the same command with --update"
            )
        if update and not exists:
            raise PublishError(
                f"expected an existing repository; there is no {repo}. Leave --update out"
            )
        if not exists:
            api.create_repo(repo, private=private)
    again = "" if exists else f" {repo} was created: to push again, add --update."
    with _explained(repo, again):
        title = f"Policy after step {policy.step}"
        api.create_commit(repo, files, commit_message=title)
    return f"{api.endpoint}/{repo}"


def check_name(repo: str) -> None:
    """Refuse a name that is not a valid repository name."""
    from huggingface_hub.errors import HFValidationError

    try:
        if HUB_ID.fullmatch(repo) is None:
            raise HFValidationError
        import_module("huggingface_hub.utils").validate_repo_id(repo)
    except HFValidationError:
        raise PublishError(
            f"expected a repository such as my-name/my-model; got {shown(repo)}."
        ) from None


@contextmanager
def _explained(repo: str, after: str = "") -> Iterator[None]:
    """Turn errors of the Hub and of the network into messages."""
    from huggingface_hub.errors import (
        HfHubHTTPError,
        LocalTokenNotFoundError,
        OfflineModeIsEnabled,
    )

    try:
        yield
    except PublishError:
        raise
    except LocalTokenNotFoundError:
        raise PublishError(f"expected a login on the Hub; there is none. {_LOGIN}") from None
    except OfflineModeIsEnabled:
        raise PublishError(
            "expected a connection to the Hub; HF_HUB_OFFLINE is set. Unset it."
        ) from None
    except HfHubHTTPError as error:
        code = getattr(error.response, "status_code", None)
        why = printable(" ".join(str(error).split()), 200)
        advice = {
            401: f"the token is not valid. {_LOGIN}",
            403: f"the token may not write to {repo}. Choose your own name, or a token that may "
            f"write. {_LOGIN}",
        }.get(code or 0, f"{why}. Try again later.")
        raise PublishError(f"the Hub answered {code or 'an error'}: {advice}{after}") from None
    except Exception as error:  # HTTP libraries share no class of errors
        why = printable(" ".join(str(error).split()), 200) or type(error).__name__
        raise PublishError(
            f"expected a connection to the Hub; it failed: {why}. Check the network, or "
            f"HF_ENDPOINT.{after}"
        ) from None


def _checkpoint(run: Run, step: int) -> Path:
    kept = dict(by_step(run.folder.checkpoints))
    if step in kept:
        return kept[step]
    raise PublishError(
        f"expected a step with a checkpoint; {named(run.path)} has no {step_name(step)}. It has "
        f"{', '.join(str(x) for x in kept) or 'none'}. Type, for example: segcredit push "
        f"{shlex.quote(str(run.path))} OWNER/NAME --checkpoint {max(kept, default=0)}"
    )


def _is_pickle(path: Path) -> bool:
    return path.suffix.lower() in PICKLES
