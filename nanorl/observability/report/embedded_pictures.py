"""Pictures inside of report.html: each file once, as a data URL in a rule of the page's style.

    pictures = EmbeddedPictures(RunPictures.of(tokenizer))
    pictures.markup(shown)          # small, with a line; open, as large as the model saw it
    pictures.style                  # the rules, for the head of the page

Rules, because a page without scripts can then show one file in many places. Files beyond MOST_BYTES
in all, or that cannot be shown, are a line that says so.
Left out: the size that a file itself has, which the viewer says.
"""

from __future__ import annotations

import base64
from dataclasses import dataclass, field

from nanorl.observability.report.markup import text
from nanorl.shown_pictures import HASH_CHARS, RunPictures, ShownPicture

MOST_BYTES = 4_000_000
"""Of the files of all pictures in a page."""
_MOST_SIDE = 2048  # pixels; a grid may say anything


@dataclass
class EmbeddedPictures:
    """The pictures that a page has taken so far; `pictures` None: of a model that reads text."""

    pictures: RunPictures | None
    style: str = ""
    _num_bytes: int = 0
    _found: dict[str, str] = field(default_factory=dict)  # hash -> class, or "" and a reason
    _reasons: dict[str, str] = field(default_factory=dict)

    def markup(self, shown: ShownPicture) -> str:
        """The picture where it stands, or a line that says why it is not there."""
        name = self._class_of(shown.sha256)
        if not name:
            reason = self._reasons[shown.sha256]
            line = f"{shown.title}, sha256 {shown.sha256[:HASH_CHARS]}: {reason}"
            return f'<p class="picture meta">{text(line)}</p>'
        width, height = (min(side, _MOST_SIDE) for side in shown.size or (0, 0))
        return (
            f'<details class="picture"><summary><span class="small shown {name}" role="img" '
            f'aria-label="{text(shown.title)}"></span><span class="meta">{text(shown.title)}</span>'
            f'</summary><div class="inside"><div class="shown {name}" '
            f'style="aspect-ratio:{width}/{height};width:{width}px"></div></div></details>'
        )

    def _class_of(self, sha256: str) -> str:
        """The class whose rule shows that file; empty where there is a reason against it."""
        if sha256 not in self._found:
            self._found[sha256] = ""
            try:
                self._found[sha256] = self._embed(sha256)
            except (KeyError, ValueError) as error:
                self._reasons[sha256] = str(error.args[0])
        return self._found[sha256]

    def _embed(self, sha256: str) -> str:
        if self.pictures is None:
            raise KeyError("the run's model reads text alone")
        from nanoengine.vision.picture_files import media_type  # here: few runs have pictures

        data = self.pictures.data(sha256)
        if self._num_bytes + len(data) > MOST_BYTES:
            raise ValueError(
                f"not in this page, which has {MOST_BYTES:,} bytes of pictures at most, and this "
                f"one has {len(data):,}: see nanorl view"
            )
        self._num_bytes += len(data)
        name = f"px{len(self._found)}"
        url = f"data:{media_type(data)};base64,{base64.b64encode(data).decode()}"
        self.style += f".{name}{{background-image:url({url})}}\n"
        return name
