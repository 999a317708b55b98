"""What pictures need of a model's chat template and of a run's context.

A template has to print one placeholder for a picture, between the two marks that its model was
trained with; a context has to hold the pictures of all turns.
Left out: whether the model looks at them, which hiding them in an environment tells.
"""

from __future__ import annotations

from collections.abc import Sequence

from nanoengine.spans import ImageSpan
from nanoengine.text.chat_template import Message
from nanoengine.text.tokenizer import ChatTokenizer
from nanoengine.vision.seeing_config import SeeingConfig
from nanoengine.vision.whole_pictures import by_picture
from nanorl.observability.alarms.finding import Finding, Severity
from nanorl.options.run_config import RunConfig
from nanorl.types import Rollout

_SHOWN: Sequence[Message] = (
    {
        "role": "user",
        "content": [
            {"type": "text", "text": "a"},
            {"type": "image", "sha256": ""},
            {"type": "text", "text": "b"},
        ],
    },
)
_REMEDY = (
    "take chat_template from the model's own folder, or print '{}' for parts of type image in it"
)


def picture_template_findings(tokenizer: ChatTokenizer, config: SeeingConfig) -> list[Finding]:
    """A template that prints no placeholder for a picture, or none of the marks around it."""
    start, pad, end = (
        config.vision_start_token_id, config.image_token_id, config.vision_end_token_id
    )  # fmt: skip
    marks = [one for one in (start, pad, end) if one is not None]
    written = "".join(tokenizer.id_to_token(one) or f"token {one}" for one in marks)
    try:
        # Not as a model that sees encodes a chat: that opens its pictures.
        text, masks = ChatTokenizer.render_masked(tokenizer, _SHOWN, add_generation_prompt=True)
        ids = tokenizer.encode_rendered(text, masks)
    except ValueError as error:
        return [_no_placeholder(f"the chat template takes no picture ({error})", written)]
    places = [place for place, token in enumerate(ids) if token == pad]
    if len(places) != 1:
        seen = f"the chat template prints {len(places)} placeholders for a picture"
        return [_no_placeholder(seen, written)]
    [place] = places
    if start is None or ids[place - 1 : place + 2] == [start, pad, end]:
        return []
    around = tokenizer.decode(ids[max(place - 1, 0) : place + 2])
    return [
        Finding(
            name="picture_without_marks",
            severity=Severity.WARNING,
            seen=f"the chat template writes a picture as {around!r}",
            why=f"the model knows pictures between its two marks, {written}",
            remedy=_REMEDY.format(written),
        )
    ]


def pictures_summary(rollouts: Sequence[Rollout]) -> str:
    """Say how many pictures a rollout was shown, and how many of its tokens they are."""
    lengths = [
        length for one in rollouts for each in one.sequences for length in _lengths(each.images)
    ]
    if not lengths:
        return ""
    each = " to ".join(map(str, dict.fromkeys((min(lengths), max(lengths)))))
    share = sum(lengths) / sum(one.num_tokens for one in rollouts)
    return (
        f"pictures: {len(lengths) / len(rollouts):.1f} a rollout, {each} tokens each, "
        f"{share:.0%} of all its tokens"
    )


def context_finding(rollouts: Sequence[Rollout], config: RunConfig) -> Finding | None:
    """A context that is full of pictures before the last turn that a rollout may have."""
    needed = max((_needed(one, config.agent.max_turns) for one in rollouts), default=0)
    most = config.agent.max_context_tokens
    if needed <= most:
        return None
    length = max(length for one in rollouts for length in _lengths(one.images))
    return Finding(
        name="pictures_do_not_fit",
        severity=Severity.WARNING,
        seen=f"{config.agent.max_turns} turns with a picture of {length} tokens each need about "
        f"{needed} tokens, --agent.max-context-tokens is {most}",
        why="rollouts are cut off before their last turn, with the picture that did not fit",
        remedy=f"set --agent.max-context-tokens {needed} or more, draw smaller pictures, or lower "
        "size in the model's preprocessor_config.json",
    )


def _lengths(images: Sequence[ImageSpan]) -> list[int]:
    """The tokens of each picture, of all its tiles together."""
    return [sum(span.length for span in picture) for picture in by_picture(images)]


def _needed(rollout: Rollout, max_turns: int) -> int:
    """The tokens of a rollout that goes on as its turns with pictures did; 0 without such turns."""
    spans = rollout.turn_spans
    replies = [
        one.observation_end - one.action_end
        for one in spans
        if any(one.action_end <= image.start < one.observation_end for image in rollout.images)
    ]
    if not replies:
        return 0
    said = sum(one.action_end - one.action_start for one in spans) / len(spans)
    return round(spans[0].action_start + max_turns * said + (max_turns - 1) * max(replies))


def _no_placeholder(seen: str, written: str) -> Finding:
    return Finding(
        name="template_without_pictures",
        severity=Severity.WARNING,  # of texts alone it can be a good run
        seen=seen,
        why="an environment that shows pictures ends the run",
        remedy=_REMEDY.format(written),
    )
