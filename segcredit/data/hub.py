"""Addresses of datasets on the Hugging Face Hub: parse them, pin their commit, load them."""

import re
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any

from segcredit.installing import install_command
from segcredit.printable import named, printable, shown

PREFIX = "hub:"
FORM = "hub:OWNER/NAME[/CONFIG][:SPLIT][@REVISION]"
SECONDS = 10.0
"""Timeout of the Hub's answer."""
_ADDRESS = re.compile(
    r"(?P<repository>[\w-][\w.-]*/[\w-][\w.-]*)(/(?P<config>[\w.-]+))?(:(?P<split>[^\s@]+))?"
    r"(@(?P<revision>[\w./-]+))?"
)
_COMMIT = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True)
class Address:
    """A split of a dataset on the Hub, at a revision."""

    repository: str
    config: str | None = None
    split: str = "train"
    revision: str | None = None

    @classmethod
    def parse(cls, name: str) -> "Address | None":
        """Parse an address with or without ``hub:``; None if it cannot be one."""
        match = _ADDRESS.fullmatch(name.removeprefix(PREFIX))
        if match is not None:
            return cls(**{key: x for key, x in match.groupdict().items() if x is not None})
        if name.startswith(PREFIX):
            raise ValueError(
                f"expected a dataset as {FORM}; got {shown(name)}. Type, for example: "
                f"hub:openai/gsm8k/main:train"
            )
        return None

    @property
    def name(self) -> str:
        """The address without its revision."""
        config = "" if self.config is None else f"/{self.config}"
        return f"{PREFIX}{self.repository}{config}:{self.split}"

    def __str__(self) -> str:
        return self.name + ("" if self.revision is None else f"@{self.revision}")

    @property
    def is_pinned(self) -> bool:
        """Whether the revision is a commit, which never changes; branches and tags may."""
        return self.revision is not None and _COMMIT.fullmatch(self.revision) is not None

    def pinned(self) -> "Address":
        """Ask the Hub for the commit of the revision, unless it is one already."""
        if self.is_pinned:
            return self
        hub = import_module("huggingface_hub")
        errors = import_module("huggingface_hub.errors")
        try:
            found = hub.HfApi().dataset_info(
                self.repository, revision=self.revision, timeout=SECONDS
            )
        except errors.GatedRepoError:
            raise ValueError(
                f"{self.repository} is gated: accept its terms on the Hub first, then type: hf "
                f"auth login"
            ) from None
        except errors.RevisionNotFoundError:
            raise ValueError(
                f"expected a branch, tag or commit of {self.repository}; got "
                f"{shown(self.revision)}. Leave out what follows @ for the main branch."
            ) from None
        except errors.RepositoryNotFoundError:
            raise ValueError(
                f"expected a file or a dataset on the Hub; there is neither a file "
                f"{named(self.repository)} here nor a dataset of that name on the Hub. Check its "
                f"spelling; if it is private, type: hf auth login"
            ) from None
        except Exception as error:  # HTTP libraries share no class of errors
            why = printable(" ".join(str(error).split()), 200) or type(error).__name__
            raise ValueError(
                f"expected a file, or a dataset on the Hub; there is no file "
                f"{named(self.repository)} here, and the dataset's commit cannot be read "
                f"from the Hub: {why}. Check the name, the network and HF_HUB_OFFLINE; or name the "
                f"commit of an earlier download, which is in the config.yaml of its run: "
                f"{self.name}@COMMIT"
            ) from None
        return replace(self, revision=str(found.sha))

    def load(self) -> Any:
        """Load the split with the datasets library, completely and without streaming."""
        try:
            datasets = import_module("datasets")
        except ImportError:
            raise ValueError(
                f"{shown(str(self))} needs the package datasets, which is not installed. Type: "
                f"{install_command('hub')}; or pass a local file."
            ) from None
        revision = {} if self.revision is None else {"revision": self.revision}
        try:
            table = datasets.load_dataset(
                self.repository, self.config, split=self.split, **revision
            )
        except Exception as error:  # the library's errors have no common class
            why = printable(str(error), 300)
            raise ValueError(
                f"expected a file or a dataset on the Hub, {FORM}; {shown(str(self))} cannot be "
                f"loaded: {why}"
            ) from None
        self._check_commit(table)
        return table

    def _check_commit(self, table: Any) -> None:
        """Refuse another commit: without the Hub, datasets takes the newest one in its cache."""
        if not self.is_pinned:
            return
        places = [str(x["filename"]) for x in getattr(table, "cache_files", [])]
        found = {part for place in places for part in place.split("/") if _COMMIT.fullmatch(part)}
        if found and self.revision not in found:
            raise ValueError(
                f"expected commit {self.revision} of {self.repository}; the Hub cannot be reached, "
                f"and the cache of datasets has commit {', '.join(sorted(found))}. Connect to the "
                f"Hub, or change the address to {self.name}@{min(found)}"
            )
