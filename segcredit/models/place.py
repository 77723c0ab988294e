"""Where a model lies: in a folder, or on the hub, which is asked once and shortly."""

import re
import warnings
from difflib import get_close_matches
from pathlib import Path

from huggingface_hub import (
    constants,
    get_hf_file_metadata,
    hf_hub_url,
    try_to_load_from_cache,
)
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
)

from segcredit.printable import named, printable

CONFIG = "config.json"
SECONDS = 5.0
"""For the hub's first answer: transformers alone tries for 23 s, and again for every file."""
HUB_ID = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")
"""name or owner/name; what begins with a dot is a path."""


class ModelError(ValueError):
    """A model that cannot be loaded: why, and the way out, in one message."""


def locate(source: str | Path) -> str:
    """A folder as it is; an id if the hub has it, or, where the hub is out of reach, its cache."""
    path = Path(source)
    if path.is_dir():
        return str(source)
    if path.is_file():
        raise ModelError(f"{named(path)} is a file. Pass the folder that it lies in.")
    if (problem := nowhere(str(source), "a Hugging Face folder")) is not None:
        raise ModelError(problem)
    return _ask_hub(str(source))


def nowhere(source: str, expected: str) -> str | None:
    """Why a name is neither here nor could be an id on the hub; None: it is or could."""
    path = Path(source)
    beside = path.parent.is_dir() and path.parent != Path()  # owner/name, but owner is a folder
    here = path.exists() or path.is_symlink()
    if here or (isinstance(source, str) and HUB_ID.fullmatch(source) and not beside):
        return None
    others = [x.name for x in path.parent.iterdir()] if path.parent.is_dir() else []
    near = get_close_matches(path.name, others, n=1)
    hint = f" Did you mean {str(path.parent / near[0])!r}?" if near else ""
    return (
        f"there is no {named(source)}: expected {expected}, or a hub id such as "
        f"Qwen/Qwen2.5-VL-3B-Instruct.{hint}"
    )


def cached(source: str) -> Path | None:
    """The folder in which the hub's cache keeps an id."""
    if Path(source).exists() or not HUB_ID.fullmatch(source):
        return None
    found = try_to_load_from_cache(source, CONFIG)
    return Path(found).parent if isinstance(found, str) else None


def _ask_hub(source: str) -> str:
    hub = constants.ENDPOINT
    try:
        get_hf_file_metadata(hf_hub_url(source, CONFIG), timeout=SECONDS)
    except GatedRepoError:
        raise ModelError(
            f"{source} is gated: its authors want a licence accepted first. Accept it at "
            f"{hub}/{source}, then type: hf auth login"
        ) from None
    except RepositoryNotFoundError:
        raise ModelError(
            f"there is no folder {named(source)} here, and no model of that name at {hub}; look at "
            f"its spelling. If it is private, type: hf auth login"
        ) from None
    except EntryNotFoundError:
        raise ModelError(
            f"{source} at {hub} has no {CONFIG}, so it is no model that transformers loads: an "
            f"adapter, a GGUF file or a data set? Pass the model it was made from."
        ) from None
    except HfHubHTTPError as error:
        code = getattr(error.response, "status_code", "an error")
        return _from_cache(source, f"{hub} answered {code}. Try again later")
    except OfflineModeIsEnabled:
        return _from_cache(source, "HF_HUB_OFFLINE is set, so the hub is not asked. Unset it")
    except Exception as error:  # of whichever library speaks HTTP: they share no class
        why = printable(" ".join(str(error).split()), 120) or type(error).__name__
        return _from_cache(
            source, f"{hub} cannot be reached ({why}). Look at the connection, or at HF_ENDPOINT"
        )
    return source


def _from_cache(source: str, why: str) -> str:
    """Go on with what was downloaded before, if anything was."""
    folder = cached(source)
    if folder is None:
        raise ModelError(
            f"{source} is no folder here, was not downloaded before, and {why}; or fetch it "
            f"elsewhere by: hf download {source} --local-dir FOLDER; copy the FOLDER here and pass "
            f"its path."
        )
    warnings.warn(f"{why}. Going on with {source} as it lies in {folder}.", stacklevel=2)
    return str(folder)
