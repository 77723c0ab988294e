"""Build hook: make the links and pictures of README.md absolute, for package indexes."""

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

_LINK = re.compile(
    r'(?P<before>\]\(|\b(?:src|srcset|href)=")(?![a-z][a-z+.-]*:|#|/)(?P<path>[^)"\s]+)'
)
_PICTURES = (".svg", ".png", ".jpg", ".gif")
_CODE = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)


def absolute_links(text: str, repository: str, version: str) -> str:
    """Replace relative links outside code blocks by addresses of the released version."""

    def absolute(found: re.Match[str]) -> str:
        path = found["path"].removeprefix("./")
        kind = "raw" if path.split("#")[0].endswith(_PICTURES) else "blob"
        return f"{found['before']}{repository}/{kind}/v{version}/{path}"

    parts = _CODE.split(text)
    return "".join(x if x.startswith("```") else _LINK.sub(absolute, x) for x in parts)


class ReadmeHook(MetadataHookInterface):
    """Set the project's readme from README.md, with absolute links."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Add the field readme to the metadata."""
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        code = (Path(self.root) / "segcredit" / "__init__.py").read_text(encoding="utf-8")
        version = re.search(r'^__version__ = "(.+)"$', code, re.MULTILINE)
        if version is None:
            raise ValueError(
                'expected a line __version__ = "…" in segcredit/__init__.py; got none. Add it.'
            )
        repository = metadata["urls"]["Repository"].rstrip("/")
        metadata["readme"] = {
            "content-type": "text/markdown",
            "text": absolute_links(text, repository, version[1]),
        }
