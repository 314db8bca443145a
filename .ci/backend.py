"""setuptools, but that type checkers and editors see an editable installation.

The folders at the top of the repository are the package `gradwire`. setuptools maps them by a finder that only a
running Python can ask; mypy and pyright look for a path, and so miss `py.typed`. Here the path is `.editable`, where a
link by the package's name leads to the repository.
"""

import base64
import hashlib
import zipfile
from collections.abc import Mapping
from pathlib import Path

from setuptools import build_meta
from setuptools.build_meta import *  # noqa: F403 - the other hooks are setuptools' own

NAME = "gradwire"


def build_editable(
    wheel_directory: str, config_settings: Mapping | None = None, metadata_directory: str | None = None
) -> str:
    """PEP 660's hook."""
    name: str = build_meta.build_editable(wheel_directory, config_settings, metadata_directory)
    if not {"editable_mode", "editable-mode"} & set(config_settings or {}):
        links = Path.cwd() / ".editable"
        try:
            links.mkdir(exist_ok=True)
            if not (links / NAME).is_symlink():
                (links / NAME).symlink_to("..", target_is_directory=True)
        except OSError:  # a folder that cannot be written, or a system without links: then by the finder
            return name
        _lead_to(links, Path(wheel_directory, name))
    return name


def _lead_to(folder: Path, wheel: Path) -> None:
    """Put `folder` in the place of what the wheel has to find the package by."""
    with zipfile.ZipFile(wheel) as archive:
        files = {name: archive.read(name) for name in archive.namelist() if not name.startswith("__editable__")}
    files[f"__editable__.{NAME}.pth"] = f"{folder}\n".encode()
    (record,) = (name for name in files if name.endswith(".dist-info/RECORD"))
    del files[record]
    lines = [f"{name},sha256={_digest(content)},{len(content)}" for name, content in files.items()]
    files[record] = "\n".join([*lines, f"{record},,", ""]).encode()
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            archive.writestr(name, content)


def _digest(content: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
