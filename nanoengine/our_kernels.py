"""Whether `kernels` is ours: Hugging Face has a package of that name, which transformers may bring
along. Both write into one folder, and whichever was installed last has overwritten the other.

Looked at when nanorl, nanoengine or nanoinfer is imported, by the files alone: nothing is loaded.
"""

from __future__ import annotations

import importlib.util
import json
import sys
import warnings
from pathlib import Path

from nanoengine.command_line import python
from nanoengine.extras import DISTRIBUTION, ROOT

_FIRST_WORDS = '"""The operations both engines are made of'
"""Of the file kernels/__init__.py."""


def require_our_kernels() -> None:
    """ImportError, in one line, that says what has overwritten our package and how to mend it; a
    warning where ours has overwritten the other one."""
    spec = importlib.util.find_spec("kernels")
    file = Path(spec.origin) if spec is not None and spec.origin else None
    if file is None or not _is_ours(file):
        place = "its folder is gone" if file is None else f"{file.parent} is another one's"
        raise ImportError(
            f"{DISTRIBUTION} has a package `kernels`, and {place}: Hugging Face's `kernels` has "
            f"overwritten it, and one environment cannot hold both; run: {_mend()}"
        )
    if theirs := _their_metadata():
        warnings.warn(
            f"Hugging Face's `kernels` ({theirs}) is installed beside the package `kernels` of "
            f"{DISTRIBUTION}, which hides it: what needs it, transformers perhaps, fails; run: "
            f"{_mend()}",
            stacklevel=3,
        )


def _is_ours(file: Path) -> bool:
    with file.open(encoding="utf-8", errors="replace") as text:
        return text.readline().startswith(_FIRST_WORDS)


def _their_metadata() -> Path | None:
    """The folder in which pip describes an installed package named `kernels`; None without one."""
    folders = (Path(entry or ".") for entry in sys.path)
    return next((found for one in folders for found in one.glob("kernels-*.dist-info")), None)


def _mend() -> str:
    """The two commands."""
    pip = f"{python()} -m pip"
    again = f"{pip} install --force-reinstall --no-deps {_installed_from()}"
    return f"{pip} uninstall -y kernels && {again}"


def _installed_from() -> str:
    """The arguments that make pip install ours: the checkout, or what it was installed from."""
    from importlib import metadata  # here: `import nanorl` needs it for nothing else

    if (ROOT / "setup.py").is_file():
        return f"--no-build-isolation -e {ROOT}"
    try:
        noted = metadata.distribution(DISTRIBUTION).read_text("direct_url.json")
    except metadata.PackageNotFoundError:
        noted = None
    if not noted:
        return DISTRIBUTION
    origin = json.loads(noted)
    is_editable = origin.get("dir_info", {}).get("editable", False)
    return f"--no-build-isolation -e {origin['url']}" if is_editable else origin["url"]
