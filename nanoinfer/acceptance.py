"""What the results of a step do to its sequences: scores and samples are taken, drafts accepted.

A draft is accepted if it is the very token that was sampled at its position. The sample after the
last accepted draft counts too; those after a wrong one were drawn on a text that is not the
request's and are dropped, and so is everything after the token that ended the request.
"""

from __future__ import annotations

from nanoinfer.model_runner import StepResult
from nanoinfer.scheduler import Step
from nanoinfer.sequence import Sequence


def take_scores(step: Step, scores: list[float], tops: list[list[tuple[int, float]]]) -> None:
    """Log-probs of prompt tokens. Call before the scheduler's `commit`."""
    done = 0
    for seq, num_new in zip(step.seqs, step.num_new, strict=True):
        count = len(seq.unscored(num_new))
        seq.prompt_logps += scores[done : done + count]
        if seq.params.top_logps:
            seq.prompt_top_logps += tops[done : done + count]
        done += count


def take_samples(seq: Sequence, result: StepResult, row: int, version: int) -> int:
    """Append the samples of `seq`, whose rows of `result` start at `row`, as far as they count.
    Returns how many: one, and one for each accepted draft."""
    end = row
    for draft in (*seq.drafts, None):
        token = result.tokens[end]
        if end in result.top:
            seq.top_logps.append(result.top[end])
        seq.append(token, result.logps[end], version, result.sampled_logps[end])
        end += 1
        if seq.finish_reason is not None or token != draft:
            break
    return end - row
