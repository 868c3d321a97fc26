"""From the JSON of OpenAI's clients to what is asked: every field checked, nothing that is asked for passed over in silence.

Beyond OpenAI's fields there are `top_k` and `ignore_eos` (go on behind an end token). What this server cannot do is refused where it is
asked for, and taken where a client spells out that it does not want it (n-gram penalties of 0, an empty logit_bias, echo false).
"""

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from meshtrain.generate.request import MOST_LIKELY, Sampling
from meshtrain.serve.errors import Refused
from meshtrain.serve.fields import Fields, encodable, shown

MOST_STOPS, LONGEST_STOP = 16, 1000  # strings, and characters of one
LARGEST = 2**31 - 1
SEEDS = 2**32  # of the generator; OpenAI's 64 bits are taken modulo this
TOKENS = 16  # of a completion that does not say how many: OpenAI's own number

Message = dict[str, Any]


@dataclass(frozen=True)
class Asked:
    """What a body asks for; a conversation has `messages`, a completion `prompts`."""

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
    usage: bool = False  # a stream ends on how many tokens it took


# Known to OpenAI's clients, and without a meaning here.
PASSED_OVER = ("user", "metadata", "prompt_cache_key", "prompt_cache_retention", "safety_identifier", "parallel_tool_calls")  # fmt: skip
SHARED = (
    "model", "n", "max_tokens", "temperature", "top_p", "top_k", "seed", "stop", "stream", "stream_options", "logprobs", "ignore_eos",
)  # fmt: skip
# What is not there, with the values that do not ask for it.
ABSENT: Mapping[str, tuple[Any, ...]] = {
    "frequency_penalty": (0,), "presence_penalty": (0,), "logit_bias": ({},),
}  # fmt: skip
ABSENT_COMPLETION: Mapping[str, tuple[Any, ...]] = {**ABSENT, "suffix": ("",), "echo": (False,)}
ABSENT_CHAT: Mapping[str, tuple[Any, ...]] = {
    **ABSENT, "functions": ([],), "function_call": ("none", "auto"), "modalities": (["text"],), "store": (False,), "prediction": (),
    "service_tier": ("auto", "default"), "audio": (), "web_search_options": (), "reasoning_effort": ("none",), "verbosity": ("medium",),
}  # fmt: skip
COMPLETION = (*SHARED, *PASSED_OVER, *ABSENT_COMPLETION, "prompt", "best_of")
CHAT = (
    *SHARED, *PASSED_OVER, *ABSENT_CHAT, "messages", "max_completion_tokens", "top_logprobs", "response_format", "tools", "tool_choice",
)  # fmt: skip


def completion(fields: Fields, answers: int, usual: Sampling) -> Asked:
    """What POST /v1/completions asks for; `answers`: the most that a request may have; `usual`: how tokens are chosen where it does not say."""
    fields.only(COMPLETION)
    _refuse(fields, ABSENT_COMPLETION)
    prompts = _prompts(fields)
    n = _n(fields, answers, len(prompts))
    if "best_of" in fields and fields.whole("best_of", 1, LARGEST) != n:
        raise fields.wrong("best_of", f"n ({n}), since all answers are given", "unsupported")
    return Asked(
        prompts=prompts,
        n=n,
        most=fields.whole("max_tokens", 1, LARGEST, TOKENS),
        logprobs=fields.whole("logprobs", 0, MOST_LIKELY),
        **_shared(fields, usual),
    )


def chat(fields: Fields, answers: int, usual: Sampling) -> Asked:
    """What POST /v1/chat/completions asks for."""
    fields.only(CHAT)
    _refuse(fields, ABSENT_CHAT)
    if "response_format" in fields:
        form = fields.object("response_format")
        if form.needed("type") != "text":
            raise form.wrong("type", '"text": no other form can be promised here', "unsupported")
    names = [name for name in ("max_tokens", "max_completion_tokens") if name in fields]
    most = {fields.whole(name, 1, LARGEST) for name in names}
    if len(most) > 1:
        raise fields.wrong("max_tokens", "the same as max_completion_tokens, or left out")
    likeliest = fields.whole("top_logprobs", 0, MOST_LIKELY)
    if not fields.flag("logprobs") and likeliest is not None:
        raise fields.wrong("top_logprobs", "left out unless logprobs is true")
    return Asked(
        messages=_messages(fields),
        tools=_tools(fields),
        n=_n(fields, answers, 1),
        most=most.pop() if most else None,
        logprobs=(likeliest or 0) if fields.flag("logprobs") else None,
        **_shared(fields, usual),
    )


def _refuse(fields: Fields, absent: Mapping[str, Sequence[Any]]) -> None:
    for name, neutral in absent.items():
        # 0 == False, but neither is the other's type
        if name in fields and not any(
            fields.values[name] == value and isinstance(fields.values[name], bool) == isinstance(value, bool)
            for value in neutral
        ):
            what = " or ".join(map(shown, neutral))
            raise fields.wrong(name, f"{what + ', or ' if what else ''}left out: that is not built here", "unsupported")


def _shared(fields: Fields, usual: Sampling) -> dict[str, Any]:
    fields.text("user")
    temperature = fields.number("temperature", 0.0, 2.0, usual.temperature)
    top_k = fields.whole("top_k", 0, LARGEST, usual.top_k)
    top_p = fields.number("top_p", 0.0, 1.0, usual.top_p, above=True)
    seed = fields.whole("seed", -(2**63), 2**63 - 1)
    # What the most likely token is, depends on none of the others.
    greedy = temperature == 0
    drawn = secrets.randbelow(SEEDS) if seed is None else seed % SEEDS
    stream = fields.flag("stream")
    if "stream_options" in fields and not stream:
        raise fields.wrong("stream_options", "left out unless stream is true")
    options = fields.object("stream_options")
    options.only(("include_usage", "include_obfuscation"))
    if options.flag("include_obfuscation"):
        raise options.wrong("include_obfuscation", "false: that is not built here", "unsupported")
    return {
        "model": fields.text("model", fields.needed("model")),
        "sampling": Sampling() if greedy else Sampling(temperature, top_k, top_p, drawn),
        "stop": _stop(fields),
        "ignore_ends": fields.flag("ignore_eos"),
        "stream": stream,
        "usage": options.flag("include_usage"),
    }


def _n(fields: Fields, answers: int, prompts: int) -> int:
    n = fields.whole("n", 1, LARGEST, 1)
    if n * prompts > answers:
        raise Refused(400, f"{n * prompts} answers are asked for, but a request may have {answers} (--queue).", "n", "invalid_value")  # fmt: skip
    return n


def _stop(fields: Fields) -> tuple[str, ...]:
    stop = fields.values.get("stop", [])
    texts = [stop] if isinstance(stop, str) else stop
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise fields.wrong("stop", "a string or a list of strings", "invalid_type")
    if len(texts) > MOST_STOPS or any(not 0 < len(text) <= LONGEST_STOP for text in texts):
        raise fields.wrong("stop", f"at most {MOST_STOPS} strings of 1 to {LONGEST_STOP} characters")
    return tuple(encodable(text, "stop") for text in texts)


def _prompts(fields: Fields) -> tuple[str | tuple[int, ...], ...]:
    """A string, strings, token ids, or lists of them: OpenAI's four forms."""
    legal = "a string, a list of strings, a list of token ids, or a list of such lists"
    prompt = fields.needed("prompt")
    if isinstance(prompt, str) or (isinstance(prompt, list) and prompt and _is_id(prompt[0])):
        prompt = [prompt]
    if not isinstance(prompt, list):
        raise fields.wrong("prompt", legal, "invalid_type")
    if not prompt or [] in prompt:
        raise fields.wrong("prompt", f"{legal}; an empty list is none")
    prompts: list[str | tuple[int, ...]] = []
    for each in prompt:
        if isinstance(each, str):
            prompts.append(encodable(each, "prompt"))
        elif isinstance(each, list) and all(map(_is_id, each)):
            prompts.append(tuple(each))
        else:
            raise fields.wrong("prompt", legal, "invalid_type")
    return tuple(prompts)


def _is_id(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= LARGEST


def _tools(fields: Fields) -> Any:
    """What the chat template is told of; the model's answer is text, whatever it calls."""
    tools = fields.values.get("tools", [])
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise fields.wrong("tools", "a list of objects", "invalid_type")
    if fields.values.get("tool_choice", "auto") not in ("auto", "none"):
        raise fields.wrong("tool_choice", '"auto" or "none": no call can be promised here', "unsupported")
    return None if fields.values.get("tool_choice") == "none" else tools or None


# --- messages

ROLES = ("system", "developer", "user", "assistant", "tool")
PARTS = ("role", "content", "name", "tool_calls", "tool_call_id", "refusal", "reasoning_content")


def _messages(fields: Fields) -> tuple[Message, ...]:
    messages = fields.needed("messages")
    if not isinstance(messages, list):
        raise fields.wrong("messages", "a list of messages", "invalid_type")
    if not messages:
        raise fields.wrong("messages", "a list of at least one message")
    return tuple(_message(Fields(each, f"messages[{i}]", f"messages[{i}].")) for i, each in enumerate(messages))


def _message(fields: Fields) -> Message:
    """One message as templates take it: a text for its content. A developer is what templates call system."""
    fields.only(PARTS)
    fields.needed("role")
    role = fields.choice("role", ROLES, "")
    calls = fields.values.get("tool_calls", [])
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise fields.wrong("tool_calls", "a list of objects", "invalid_type")
    if not (role == "assistant" and calls):
        fields.needed("content")
    more = {name: fields.text(name) for name in ("name", "tool_call_id", "reasoning_content") if name in fields}
    return {
        "role": "system" if role == "developer" else role,
        "content": _content(fields),
        **more,
        **({"tool_calls": calls} if calls else {}),
    }


def _content(fields: Fields) -> str:
    content = fields.values.get("content", "")
    if not isinstance(content, list):
        if not isinstance(content, str):
            raise fields.wrong("content", "a string or a list of text parts", "invalid_type")
        return fields.text("content")
    where = f"{fields.prefix}content"
    parts = [Fields(part, f"{where}[{i}]", f"{where}[{i}].") for i, part in enumerate(content)]
    for part in parts:
        if part.needed("type") != "text":
            raise part.wrong("type", '"text": this model reads nothing else', "unsupported")
        part.needed("text")
    return "".join(part.text("text") for part in parts)
