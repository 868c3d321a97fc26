"""Reads what OpenAI's clients ask for: every field is checked, and nothing that is asked for is passed over in silence.

Beyond OpenAI's fields there are `top_k` and `ignore_eos` (go on behind an end token). A request
for a feature that this server lacks is refused. The field itself is accepted if its value asks for nothing (n-gram
penalties of 0, an empty logit_bias, echo false). null is as good as a field that is left out, as OpenAI has it.
"""

import json
import secrets
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from types import UnionType
from typing import Any

from meshtrain.errors import nearest, short
from meshtrain.generate.request import MOST_LIKELY, Sampling
from meshtrain.serve.errors import Refused

# strings, and characters of one
MOST_STOPS = 16
LONGEST_STOP = 1000
LARGEST = 2**31 - 1
SEEDS = 2**32  # of the generator; OpenAI's 64 bits are taken modulo this
MESSAGES = (
    # Of a conversation, if the model has fewer positions: each message takes one at least
    2048
)
TOKENS = 16  # of a completion that does not say how many: OpenAI's own number

Message = dict[str, Any]


@dataclass(frozen=True)
class Asked:
    """Holds the fields of a body; a conversation has `messages`, a completion `prompts`."""

    model: str
    prompts: tuple[str | tuple[int, ...], ...] = ()
    messages: tuple[Message, ...] = ()
    tools: Any = None
    n: int = 1  # answers to each prompt
    most: int | None = None  # tokens of an answer; None: as many as there is room for
    sampling: Sampling = field(default_factory=Sampling)
    stop: tuple[str, ...] = ()
    ignore_ends: bool = False
    logprobs: int | None = None
    stream: bool = False
    repeatable: bool = False  # asked once more it would get the same answer
    usage: bool = False  # a stream ends on how many tokens it took


# --- JSON


def parsed(body: bytes) -> "Fields":
    """Returns the JSON object that a body holds."""
    try:
        content = json.loads(body, parse_constant=_no_number)
    # ValueError: of numbers with thousands of digits and texts that are no UTF-8 too
    except (ValueError, RecursionError) as error:
        why = "it nests too deep" if isinstance(error, RecursionError) else short(error)
        raise Refused(
            400, f"the body is not JSON that can be read: {why}.", code="invalid_json"
        ) from None
    return Fields(content, "the body")


def _no_number(word: str) -> None:
    raise ValueError(f"{word} is not a number there")


def shown(value: object) -> str:
    """Returns a value as a sentence repeats it."""
    return short(json.dumps(value, ensure_ascii=False))


class Fields:
    """A JSON object that somebody else wrote.

    `name`: where it stands, as sentences have it; `prefix`: what goes before its fields' names.
    """

    def __init__(self, values: Any, name: str, prefix: str = "") -> None:
        if not isinstance(values, dict):
            raise Refused(
                400,
                f"{name} is {shown(values)}, but it must be an object.",
                prefix.rstrip(".") or None,
                "invalid_type",
            )
        self.values = {key: value for key, value in values.items() if value is not None}
        self.name = name
        self.prefix = prefix

    def __contains__(self, name: str) -> bool:
        return name in self.values

    def only(self, known: Collection[str]) -> None:
        """Refuses the fields that are not known."""
        for key in self.values:
            if key not in known:
                ending = nearest(key, known) or "."
                raise Refused(
                    400,
                    f"{self.name} has a field {short(key)}, which is not known here{ending}",
                    self.prefix + short(key),
                    "unknown_parameter",
                )

    def wrong(self, name: str, legal: str, code: str = "invalid_value") -> Refused:
        where = self.prefix + name
        return Refused(
            400,
            f"{where} is {shown(self.values[name])}, but it must be {legal}.",
            where,
            code,
        )

    def needed(self, name: str) -> Any:
        if name not in self.values:
            where = self.prefix + name
            raise Refused(
                400, f"{where} is missing.", where, "missing_required_parameter"
            )
        return self.values[name]

    def typed(
        self,
        name: str,
        kind: type | UnionType,
        legal: str,
        default: Any = None,
    ) -> Any:
        """Returns a value of some type; true does not count as a number, as in JSON."""
        if name not in self.values:
            return default
        value = self.values[name]
        if not isinstance(value, kind) or (
            isinstance(value, bool) and kind is not bool
        ):
            raise self.wrong(name, legal, "invalid_type")
        return value

    def number(
        self,
        name: str,
        least: int,
        most: int,
        default: float,
        above: bool = False,
    ) -> float:
        """Returns a number in bounds; `above`: greater than the least."""
        value = self.typed(name, int | float, "a number", default)
        if name in self and not (
            least < value <= most or (value == least and not above)
        ):
            raise self.wrong(
                name, f"{'above' if above else 'at least'} {least} and at most {most}"
            )
        return float(value)

    def whole(self, name: str, least: int, most: int, default: Any = None) -> Any:
        """Returns a whole number in bounds."""
        value = self.typed(name, int, "a whole number", default)
        if name in self and not least <= value <= most:
            raise self.wrong(name, f"at least {least} and at most {most}")
        return value

    def flag(self, name: str) -> bool:
        return self.typed(name, bool, "true or false", False)

    def text(self, name: str) -> str:
        return encodable(self.typed(name, str, "a string", ""), self.prefix + name)

    def object(self, name: str) -> "Fields":
        where = self.prefix + name
        return Fields(self.values.get(name, {}), where, f"{where}.")

    def objects(self, name: str) -> list[dict[str, Any]]:
        values = self.typed(name, list, "a list of objects", [])
        if not all(isinstance(value, dict) for value in values):
            raise self.wrong(name, "a list of objects", "invalid_type")
        return values

    def parts(self, name: str) -> list["Fields"]:
        """Returns the objects of a list, each with the name of its place."""
        where = self.prefix + name
        return [
            Fields(value, f"{where}[{i}]", f"{where}[{i}].")
            for i, value in enumerate(self.values[name])
        ]


def encodable(text: str, where: str) -> str:
    """Returns a text; half a surrogate pair, which JSON can spell, is none."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise Refused(
            400,
            f"{where} is not text: it holds half a surrogate pair.",
            where,
            "invalid_value",
        ) from None
    return text


# --- the two kinds of request

# Known to OpenAI's clients, and without a meaning here.
PASSED_OVER = (
    "user",
    "metadata",
    "prompt_cache_key",
    "prompt_cache_retention",
    "safety_identifier",
    "parallel_tool_calls",
)
SHARED = (
    "model",
    "n",
    "max_tokens",
    "temperature",
    "top_p",
    "top_k",
    "seed",
    "stop",
    "stream",
    "stream_options",
    "logprobs",
    "ignore_eos",
)
# What is not there, with the values that do not ask for it.
ABSENT: Mapping[str, tuple[Any, ...]] = {
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "logit_bias": ({},),
}
ABSENT_COMPLETION: Mapping[str, tuple[Any, ...]] = {
    **ABSENT,
    "suffix": ("",),
    "echo": (False,),
}
ABSENT_CHAT: Mapping[str, tuple[Any, ...]] = {
    **ABSENT,
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "store": (False,),
    "prediction": (),
    "service_tier": ("auto", "default"),
    "audio": (),
    "web_search_options": (),
    "reasoning_effort": ("none",),
    "verbosity": ("medium",),
}
COMPLETION = (*SHARED, *PASSED_OVER, *ABSENT_COMPLETION, "prompt", "best_of")
CHAT = (
    *SHARED,
    *PASSED_OVER,
    *ABSENT_CHAT,
    "messages",
    "max_completion_tokens",
    "top_logprobs",
    "response_format",
    "tools",
    "tool_choice",
)


def completion(
    fields: Fields, answers: int, usual: Sampling, length: int = LARGEST
) -> Asked:
    """Reads POST /v1/completions; `answers`: the most that a request may have; `usual`: how tokens are chosen where it
    does not say; `length`: the model's positions.
    """
    fields.only(COMPLETION)
    _refuse(fields, ABSENT_COMPLETION)
    prompts = _prompts(fields, answers, length)
    n = _n(fields, answers, len(prompts))
    if fields.whole("best_of", 1, LARGEST, n) != n:
        raise fields.wrong(
            "best_of", f"n ({n}), since all answers are given", "unsupported"
        )
    return Asked(
        prompts=prompts,
        n=n,
        most=fields.whole("max_tokens", 1, LARGEST, TOKENS),
        logprobs=fields.whole("logprobs", 0, MOST_LIKELY),
        **_shared(fields, usual),
    )


def chat(fields: Fields, answers: int, usual: Sampling, length: int = LARGEST) -> Asked:
    """Reads POST /v1/chat/completions."""
    fields.only(CHAT)
    _refuse(fields, ABSENT_CHAT)
    if "response_format" in fields:
        form = fields.object("response_format")
        if form.needed("type") != "text":
            raise form.wrong(
                "type", '"text": no other form can be promised here', "unsupported"
            )
    limits = {
        fields.whole(name, 1, LARGEST)
        for name in ("max_tokens", "max_completion_tokens")
    } - {None}
    if len(limits) > 1:
        raise fields.wrong(
            "max_tokens", "the same as max_completion_tokens, or left out"
        )
    logprobs = fields.flag("logprobs")
    top = fields.whole("top_logprobs", 0, MOST_LIKELY)
    if top is not None and not logprobs:
        raise fields.wrong("top_logprobs", "left out unless logprobs is true")
    # What the chat template is told of; the model's answer is text, whatever it calls.
    tools = fields.objects("tools")
    choice = fields.values.get("tool_choice", "auto")
    if choice not in ("auto", "none"):
        raise fields.wrong(
            "tool_choice",
            '"auto" or "none": no call can be promised here',
            "unsupported",
        )
    return Asked(
        messages=_messages(fields, max(length, MESSAGES)),
        tools=tools if tools and choice == "auto" else None,
        n=_n(fields, answers, 1),
        most=limits.pop() if limits else None,
        logprobs=(top or 0) if logprobs else None,
        **_shared(fields, usual),
    )


def _refuse(fields: Fields, absent: Mapping[str, Sequence[Any]]) -> None:
    for name, value in fields.values.items():
        neutral = absent.get(name, (value,))
        # 0 == False, but neither is the other's type
        if not any(
            value == legal and isinstance(value, bool) == isinstance(legal, bool)
            for legal in neutral
        ):
            what = " or ".join(map(shown, neutral))
            raise fields.wrong(
                name,
                f"{what + ', or ' if what else ''}left out: that is not built here",
                "unsupported",
            )


def _shared(fields: Fields, usual: Sampling) -> dict[str, Any]:
    fields.text("user")
    temperature = fields.number("temperature", 0, 2, usual.temperature)
    top_k = fields.whole("top_k", 0, LARGEST, usual.top_k)
    top_p = fields.number("top_p", 0, 1, usual.top_p, above=True)
    seed = fields.whole("seed", -(2**63), 2**63 - 1)
    drawn = secrets.randbelow(SEEDS) if seed is None else seed % SEEDS
    stream = fields.flag("stream")
    options = fields.object("stream_options")
    if "stream_options" in fields and not stream:
        raise fields.wrong("stream_options", "left out unless stream is true")
    options.only(("include_usage", "include_obfuscation"))
    if options.flag("include_obfuscation"):
        raise options.wrong(
            "include_obfuscation", "false: that is not built here", "unsupported"
        )
    fields.needed("model")
    return {
        "model": fields.text("model"),
        # What the most likely token is, depends on none of the others.
        "sampling": Sampling()
        if temperature == 0
        else Sampling(temperature, top_k, top_p, drawn),
        "repeatable": temperature == 0 or seed is not None,
        "stop": _stop(fields),
        "ignore_ends": fields.flag("ignore_eos"),
        "stream": stream,
        "usage": options.flag("include_usage"),
    }


def too_long(what: str, where: str, length: int) -> Refused:
    sentence = f"{what} are more than the {length} positions that there are."
    return Refused(400, sentence, where, "context_length_exceeded")


def _n(fields: Fields, answers: int, prompts: int) -> int:
    n = fields.whole("n", 1, LARGEST, 1)
    if n * prompts > answers:
        raise Refused(
            400,
            f"{n * prompts} answers are asked for, but a request may have {answers} (--queue).",
            "n",
            "invalid_value",
        )
    return n


def _stop(fields: Fields) -> tuple[str, ...]:
    legal = "a string or a list of strings"
    stop = fields.typed("stop", str | list, legal, [])
    texts = [stop] if isinstance(stop, str) else stop
    if not all(isinstance(text, str) for text in texts):
        raise fields.wrong("stop", legal, "invalid_type")
    if len(texts) > MOST_STOPS or any(
        not 0 < len(text) <= LONGEST_STOP for text in texts
    ):
        raise fields.wrong(
            "stop", f"at most {MOST_STOPS} strings of 1 to {LONGEST_STOP} characters"
        )
    return tuple(encodable(text, "stop") for text in texts)


def _prompts(
    fields: Fields, answers: int, length: int
) -> tuple[str | tuple[int, ...], ...]:
    """A string, strings, token ids, or lists of them: OpenAI's four forms.

    Nothing is looked at that is too much in any case.
    """
    legal = "a string, a list of strings, a list of token ids, or a list of such lists"
    fields.needed("prompt")
    prompt = fields.typed("prompt", str | list, legal)
    if isinstance(prompt, list) and (not prompt or [] in prompt):
        raise fields.wrong("prompt", f"{legal}; an empty list is none")
    prompts: list[str | tuple[int, ...]] = []
    several = [prompt] if isinstance(prompt, str) or _is_id(prompt[0]) else prompt
    _n(fields, answers, len(several))
    for each in several:
        if isinstance(each, str):
            prompts.append(encodable(each, "prompt"))
        elif isinstance(each, list) and len(each) > length:
            raise too_long(f"{len(each)} tokens of prompt", "prompt", length)
        elif isinstance(each, list) and all(map(_is_id, each)):
            prompts.append(tuple(each))
        else:
            raise fields.wrong("prompt", legal, "invalid_type")
    return tuple(prompts)


def _is_id(value: object) -> bool:
    return (
        isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= LARGEST
    )


ROLES = ("system", "developer", "user", "assistant", "tool")
PARTS = (
    "role",
    "content",
    "name",
    "tool_calls",
    "tool_call_id",
    "refusal",
    "reasoning_content",
)


def _messages(fields: Fields, most: int) -> tuple[Message, ...]:
    fields.needed("messages")
    messages = fields.typed("messages", list, "a list of messages")
    if not messages:
        raise fields.wrong("messages", "a list of at least one message")
    if len(messages) > most:
        raise too_long(f"{len(messages)} messages", "messages", most)
    return tuple(map(_message, fields.parts("messages")))


def _message(fields: Fields) -> Message:
    """Returns one message as it stands; the form that the template takes is chosen where it is written
    (`data.forms`).
    """
    fields.only(PARTS)
    fields.needed("role")
    role = fields.text("role")
    calls = fields.objects("tool_calls")
    if role not in ROLES:
        raise fields.wrong("role", " or ".join(map(shown, ROLES)))
    if not (role == "assistant" and calls):
        fields.needed("content")
    more = {
        name: fields.text(name)
        for name in ("name", "tool_call_id", "reasoning_content")
        if name in fields
    }
    message = {"role": role, "content": _content(fields), **more}
    return message | ({"tool_calls": calls} if calls else {})


def _content(fields: Fields) -> str | list[dict[str, Any]] | None:
    content = fields.typed("content", str | list, "a string or a list of text parts")
    if not isinstance(content, list):
        return None if content is None else fields.text("content")
    parts = fields.parts("content")
    for part in parts:
        if part.needed("type") != "text":
            raise part.wrong(
                "type", '"text": this model reads nothing else', "unsupported"
            )
        part.needed("text")
    return [{"type": "text", "text": part.text("text")} for part in parts]
