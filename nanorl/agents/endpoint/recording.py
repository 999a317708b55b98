"""`Recording`: answers the calls of one episode, and keeps the tokens of every answer.

Whoever calls sends the whole conversation each time, as text. Where it begins with messages that
were answered before, and says what the answer said, the ids of that answer are taken as they were
sampled, and only what follows is encoded; text that the policy never said, in the place of an
answer or anywhere, is text that the policy reads. So nothing that was sampled is tokenised again,
and a history that was changed is a new branch of the tree.

The run decides how tokens are drawn (temperature, seeds), since its log-probs are those of
training; the client decides where they end: stop texts, length, a schema, a forced tool.
Whoever calls may be steered by the policy, so a call costs the others nothing: what cannot fit the
context is refused before it is encoded, long prompts are encoded in a thread, one at a time for an
episode, and the texts that end an answer, its grammar and the number of answers are bounded.
An answer is recorded, and counts as a call, when it is about to be sent; one that nobody waits for
any more is neither, and the engine gives it up.
Left out: prompts that end with a half-written answer; what a client does with what it was sent, for
one that could read an answer and disown it would choose what is trained.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from nanoengine.spans import content_ids
from nanoengine.text.chat_template import Message
from nanoengine.text.tokenizer import ChatTokenizer
from nanoinfer.chat.form import ChatForms
from nanoinfer.chat.prompts import ChatPrompt, chat_prompt
from nanoinfer.chat.reasoning import opened_reasoning
from nanoinfer.chat.turns import ids_after_turn
from nanoinfer.dialects.call_params import call_grammar, check_stop
from nanoinfer.dialects.exchange import ApiCall, ApiReply, Json, message_of
from nanoinfer.http.api_error import ApiError
from nanoinfer.options.outputs import joined
from nanoinfer.params import Output, SamplingParams
from nanoinfer.server.completions import check_grammar_size
from nanoinfer.server.config import CompletionLimits
from nanoinfer.server.prompt_bound import TOO_LONG, PromptBound
from nanoinfer.server.requests import MAX_TOP_LOGPROBS
from nanorl.agents.context import Generator
from nanorl.agents.endpoint.call_count import CallCount, NoCallsLeftError
from nanorl.agents.endpoint.call_tree import CallNode, CallTree
from nanorl.agents.episode import Episode
from nanorl.agents.limits import Limits
from nanorl.agents.picture_limits import broken_by, broken_limit
from nanorl.agents.tokens import Truncation
from nanorl.envs.rewards.base import Transcript
from nanorl.task import derive_seed
from nanorl.types import InfrastructureError, Rollout, Status

if TYPE_CHECKING:
    from nanoinfer.vision.given_pictures import GivenPictures

MAX_STOP_IDS = 1000
MOST_IMAGES = 100
"""Pictures in a prompt where agent.max_images says nothing: an agent may be hostile."""


@dataclass(eq=False)
class _Said:
    """A conversation up to an answer, and the tokens that stand for it."""

    messages: list[Message]
    tools: list[Json]
    node: CallNode
    has_instructions: bool

    @property
    def inherited(self) -> list[Message]:
        """The messages that a call that goes on from here need not send."""
        return self.messages[1:] if self.has_instructions else self.messages


@dataclass(frozen=True)
class Sampled:
    """Replies to a call, and the tokens of its prompt."""

    ids: list[int]
    replies: list[ApiReply]


class Recording:
    """The calls of one episode. Calls may come at the same time."""

    def __init__(
        self,
        generator: Generator,
        tokenizer: ChatTokenizer,
        *,
        limits: Limits,
        sampling: SamplingParams,
    ) -> None:
        """`sampling.seed` is the episode's seed; every call derives its own from its prompt."""
        self.tree = CallTree()
        self.tokenizer = tokenizer
        self.limits = limits
        self.truncation: Truncation | None = None
        """The limit that an answer or a call ran into last."""
        self.metrics: Counter[str] = Counter()
        self._generator = generator
        self._sampling = sampling
        self._said: dict[bytes, _Said] = {}
        self._answers: dict[str, _Said] = {}
        self._forms = ChatForms(tokenizer)
        self._bound = PromptBound(tokenizer, limits.max_context_tokens)
        self._num_asked: Counter[bytes] = Counter()  # the same prompt has other seeds each time
        self._calls = CallCount(limits.max_turns)
        self._last: _Said | None = None
        self._pictures: set[str] = set()  # that clients have sent, by their SHA-256

    @property
    def num_answers(self) -> int:
        """Completions that were given."""
        return len(self.tree.nodes)

    @property
    def max_body_bytes(self) -> int:
        """The largest body of a call, in bytes: a longer one cannot fit the context."""
        return self._bound.max_body_bytes

    def too_long(self) -> ApiError:
        """Note that a prompt cannot fit the context, and return the error for the client."""
        self.truncation = "context"
        return self._bound.error()

    def rollout(self, played: Rollout) -> Rollout:
        """`played`, which has no tokens, with those of the calls: the sequence of the last one,
        the others as branches. What its turns earned, the last turn did."""
        sequences = self.tree.sequences()
        if not sequences:
            return played
        main, *branches = sequences
        earned, given_up = sum(played.turn_rewards), self._calls.num_given_up
        status = played.status
        if status != Status.FAILED and self.truncation is not None:
            is_turn = self.truncation == "turn"
            status = Status.TRUNCATED_TURN if is_turn else Status.TRUNCATED_CONTEXT
        return replace(
            played,
            tokens=main.tokens,
            loss_mask=main.loss_mask,
            logps=main.logps,
            versions=main.versions,
            turn_spans=main.turn_spans,
            images=main.images,
            turn_rewards=[*[0.0] * (len(main.turn_spans) - 1), earned] if earned else [],
            branches=branches,
            status=status,
            metrics={
                **{name: float(count) for name, count in self.metrics.items()},
                **played.metrics,
                "num_calls": float(self.num_answers),
                **({"calls_given_up": float(given_up)} if given_up else {}),
            },
        )

    def transcript(self, answer: str | None) -> Transcript:
        """The conversation of the last call as text."""
        last = self._last
        messages = [] if last is None else last.messages
        return Transcript(
            messages=messages,
            text=str(messages[-1]["content"]) if messages else "",
            answer=answer,
            is_truncated=self.truncation is not None,
        )

    async def answer(self, call: ApiCall, name: str) -> Sampled:
        """The replies to `call`, recorded: `answering` for whoever reads them at once."""
        async with self.answering(call, name) as sampled:
            return sampled

    @asynccontextmanager
    async def answering(self, call: ApiCall, name: str) -> AsyncIterator[Sampled]:
        """Sample the replies to `call`; under `name` a later call may go on from it. They are
        recorded when the block ends without an exception. ApiError tells the client what cannot
        be."""
        call = self._continued(call)
        prompt = await self.prompt(call)
        ids = prompt.ids
        form = self._forms.of(call.tools)
        async with self._taken(call.n):
            outputs = await self.sample(ids, self._params(call, prompt), call.n)
            opened = opened_reasoning(self.tokenizer, ids)
            replies = []
            for output in outputs:
                text, stop_text = form.spoken(
                    self.tokenizer,
                    output.ids,
                    call.stop,
                    stop_ids=call.stop_token_ids,
                    min_tokens=call.min_tokens,
                )
                replies.append(form.reply(text, output, call, stop_text, opened))
            yield Sampled(ids, replies)
            self.metrics.update(f"ignored_{field}" for field in call.ignored)
            self._note_end(outputs)
            for reply in replies:
                self._keep(prompt, reply, call, name)

    def _keep(self, prompt: ChatPrompt, reply: ApiReply, call: ApiCall, name: str) -> None:
        messages = [*call.messages, message_of(reply)]
        node = self.tree.add(prompt.ids, reply.output, prompt.images)
        said = _Said(messages, call.tools, node, call.has_instructions)
        self._said.setdefault(_digests(call, messages)[-1], said)
        self._answers.setdefault(name, said)
        self._last = said

    async def complete(self, ids: Sequence[int], params: SamplingParams) -> list[Output]:
        """The completions of a prompt, recorded: `completing` for whoever reads them at once."""
        async with self.completing(ids, params) as outputs:
            return outputs

    @asynccontextmanager
    async def completing(
        self, ids: Sequence[int], params: SamplingParams
    ) -> AsyncIterator[list[Output]]:
        """Complete a prompt of token ids, as a client asks that renders by itself. Temperature,
        truncation and seed of `params` are the run's. Recorded as by `answering`."""
        prompt = list(ids)
        async with self._taken(params.n):
            outputs = await self.sample(prompt, self._decided(prompt, params), params.n)
            yield outputs
            self._note_end(outputs)
            for output in outputs:
                self.tree.add(prompt, output, params.images)

    def _decided(self, prompt: list[int], params: SamplingParams) -> SamplingParams:
        """The client's `params` in the fields that it decides, and the run's own in the rest."""
        room = self._room(ChatPrompt(prompt, params.images))
        if params.top_logps > MAX_TOP_LOGPROBS:
            raise ApiError(400, f"top_logps={params.top_logps}: at most {MAX_TOP_LOGPROBS}")
        most = min(params.max_tokens, room)
        decided = replace(
            self._sampling,
            max_tokens=most,
            min_tokens=min(params.min_tokens, most),
            ignore_eos=params.ignore_eos,
            grammar=params.grammar,
            stop=params.stop,
            stop_token_ids=params.stop_token_ids,
            top_logps=params.top_logps,
            images=params.images,
            n=1,
        )
        _check_ends(decided)
        return decided

    def _note_end(self, outputs: Sequence[Output]) -> None:
        is_cut = any(output.finish_reason == "length" for output in outputs)
        self.truncation = "turn" if is_cut else None

    @asynccontextmanager
    async def _taken(self, n: int) -> AsyncIterator[None]:
        """The places of `n` answers; see `CallCount`."""
        try:
            async with self._calls.taken(n):
                yield
        except NoCallsLeftError:
            self.truncation = "context"
            raise

    async def sample(self, ids: list[int], params: SamplingParams, n: int) -> list[Output]:
        """`n` completions of a prompt, each with a seed of its own. Who gives up, gives all up."""
        asked = repr(content_ids(ids, params.images))
        key = hashlib.blake2b(asked.encode(), digest_size=16).digest()
        seeds = []
        for _ in range(n):
            seeds.append(derive_seed(self._sampling.seed, "call", key.hex(), self._num_asked[key]))
            self._num_asked[key] += 1
        tasks = [
            asyncio.ensure_future(self._sample_one(ids, replace(params, seed=seed)))
            for seed in seeds
        ]
        try:
            return list(await asyncio.gather(*tasks))
        except ValueError as error:  # the engine's, of what it cannot do: a schema, a stop text
            raise ApiError(400, str(error)) from None
        finally:
            for task in tasks:  # where one failed, the others are no answer
                task.cancel()

    async def prompt_ids(self, call: ApiCall) -> list[int]:
        """The tokens of a call's prompt."""
        return (await self.prompt(call)).ids

    async def prompt(self, call: ApiCall) -> ChatPrompt:
        """The prompt of a call: the tokens and pictures known, then the encoding of what is new."""
        try:
            return await self._bound.encoded(
                [call.messages, call.tools, call.variables],
                lambda: self._encoded(call),
                is_seeing=bool(self._pictures),
            )
        except ApiError as error:
            raise self.too_long() if error.code == TOO_LONG else error from None

    def check_pictures(self, given: GivenPictures) -> None:
        """ApiError for pictures of a body that cannot fit, or that are more than an episode may
        bring to the run's store; nothing of them has been decoded yet."""
        if given.num_tokens >= self.limits.max_context_tokens:
            raise self.too_long()
        num_pictures, num_tokens = given.num_pictures, given.num_tokens
        self._check_images(broken_limit(self._image_limits, num_pictures, num_tokens))
        found = self._pictures | given.files.keys()
        most = self._most_images * self.limits.max_turns
        if len(found) > most:
            raise ApiError(
                400,
                f"the episode has brought {len(self._pictures)} different pictures, and may bring "
                f"{most} (agent.max_images, or {MOST_IMAGES}, times agent.max_turns)",
            )
        self._pictures = found

    @property
    def _most_images(self) -> int:
        return self.limits.max_images or MOST_IMAGES

    @property
    def _image_limits(self) -> Limits:
        return replace(self.limits, max_images=self._most_images)

    def _check_images(self, broken: str) -> None:
        """ApiError for the limit of pictures that a prompt has broken, if it has."""
        if broken:
            self.truncation = "context"
            raise ApiError(
                400, f"one prompt with {broken}; leave older pictures out", code=TOO_LONG
            )

    def _encoded(self, call: ApiCall) -> ChatPrompt:
        messages = call.messages
        if not messages:
            raise ApiError(400, "messages: give at least one", "messages")
        if messages[-1]["role"] == "assistant":
            raise ApiError(
                400, "messages: the last one is the assistant's; end with a user's or a tool's",
                "messages",
            )  # fmt: skip
        try:
            form = self._forms.of(call.tools)
            digests = _digests(call, messages)
            for end in range(len(messages) - 1, 0, -1):
                said = self._said.get(digests[end - 1])
                if said is not None:
                    history, new = form.written(messages[:end]), form.written(messages[end:])
                    return self._go_on(said.node, history, new, form.schemas, call.variables)
            return chat_prompt(
                self.tokenizer,
                form.opening(messages),
                tools=form.schemas,
                variables=call.variables,
            )
        except (ValueError, RecursionError) as error:  # the template rejects it
            raise ApiError(400, f"messages: {error}", "messages") from None

    def _go_on(
        self,
        node: CallNode,
        history: Sequence[Message],
        new: Sequence[Message],
        tools: Sequence[Json] | None,
        variables: Json,
    ) -> ChatPrompt:
        last_id = node.output.ids[-1] if node.output.ids else None
        after = ids_after_turn(
            self.tokenizer, last_id, history, new, tools=tools, variables=variables
        )
        known = node.ids[: -1 if after.replaces_end else None]
        images = self.tokenizer.images_in(after.ids, new, len(known))
        return ChatPrompt(known + after.ids, (*node.images, *images))

    def _continued(self, call: ApiCall) -> ApiCall:
        if not call.continues:
            return call
        said = self._answers.get(call.continues)
        if said is None:
            raise ApiError(
                404, f"no answer {call.continues!r} in this episode", "previous_response_id"
            )
        place = 1 if call.has_instructions else 0
        own, new = call.messages[:place], call.messages[place:]
        return replace(call, messages=[*own, *said.inherited, *new], continues="")

    def _params(self, call: ApiCall, prompt: ChatPrompt) -> SamplingParams:
        try:
            grammar = call_grammar(call)
        except ValueError as error:
            raise ApiError(400, str(error), "tool_choice") from None
        room = self._room(prompt)
        most = room if call.max_tokens is None else min(call.max_tokens, room)
        params = _with_ends(
            self._sampling,
            call,
            max_tokens=most,
            grammar=grammar,
            top_logps=call.num_top or 0,
            images=prompt.images,
            n=1,
        )
        _check_ends(params)
        return params

    def _room(self, prompt: ChatPrompt) -> int:
        """Tokens that an answer may have. ApiError where a limit of the episode is reached."""
        limits, ids = self.limits, prompt.ids
        self._check_images(broken_by(self._image_limits, prompt.images))
        rooms = [limits.max_turn_tokens, limits.max_context_tokens - len(ids)]
        if limits.max_response_tokens is not None:
            sampled = sum(len(node.output.ids) for node in self.tree.nodes)
            rooms.append(limits.max_response_tokens - sampled)
        if min(rooms) < 1:
            self.truncation = "context"
            raise ApiError(
                400,
                f"the prompt has {len(ids)} tokens; the context length is "
                f"{limits.max_context_tokens} (agent.max_context_tokens)",
                "messages",
                code=TOO_LONG,
            )
        return min(rooms)

    async def _sample_one(self, ids: list[int], params: SamplingParams) -> Output:
        whole: Output | None = None
        while True:
            so_far = [] if whole is None else whole.ids
            rest = replace(
                params,
                max_tokens=params.max_tokens - len(so_far),
                min_tokens=max(0, params.min_tokens - len(so_far)),
            )
            output = await self._generator.generate(ids + so_far, rest)
            whole = output if whole is None else joined(whole, output)
            if output.finish_reason != "abort":
                return whole
            if params.grammar is not None:  # it would begin again in the middle of a text
                raise InfrastructureError("an answer with a schema was aborted")


def _with_ends(sampling: SamplingParams, call: ApiCall, **more: Any) -> SamplingParams:
    """`sampling` with all that a client says of where an answer ends. ApiError where it cannot
    be."""
    try:
        return replace(
            sampling,
            min_tokens=call.min_tokens,
            stop=call.stop,
            stop_token_ids=call.stop_token_ids,
            ignore_eos=call.ignore_eos,
            **more,
        )
    except ValueError as error:
        raise ApiError(400, str(error)) from None


def _check_ends(params: SamplingParams) -> None:
    """ApiError for texts and grammars that would cost the engine more than the answer."""
    check_stop(params.stop)
    if len(params.stop_token_ids) > MAX_STOP_IDS:
        raise ApiError(400, f"stop_token_ids: at most {MAX_STOP_IDS}", "stop_token_ids")
    try:
        check_grammar_size(params.grammar, CompletionLimits())
    except ValueError as error:
        raise ApiError(400, str(error)) from None


def _digests(call: ApiCall, messages: Sequence[Message]) -> list[bytes]:
    """One for each message: a hash of the call's tools and variables, and of all messages so far.
    What clients change
    when they send an answer back does not count: ids of calls, blanks around a text, the spelling
    of JSON."""
    opening = json.dumps([call.tools, call.variables], sort_keys=True)
    chain = hashlib.blake2b(opening.encode(), digest_size=16)
    digests = []
    for message in messages:
        chain.update(json.dumps(_compared(message), sort_keys=True).encode() + b"\n")
        digests.append(chain.digest())
    return digests


def _compared(message: Message) -> list[Any]:
    calls = [call["function"] for call in message.get("tool_calls") or ()]
    return [
        message["role"],
        str(message["content"] or "").strip(),
        [[function["name"], function["arguments"]] for function in calls],
    ]


@asynccontextmanager
async def record(episode: Episode) -> AsyncIterator[Any]:
    """Record an episode, as `Episode.record` does. InfrastructureError where the agent has no
    endpoint."""
    if episode.open_session is None:
        raise InfrastructureError("this agent has no endpoint: play it through an AgentKit")
    episode.opening = await episode.env.reset(episode.task)
    episode.recording = recording = Recording(
        episode.generator, episode.tokenizer, limits=episode.limits, sampling=episode.sampling
    )
    async with episode.open_session(recording) as session:
        yield session
