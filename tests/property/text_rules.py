"""What holds for any text, any tokens and any chat. Each rule draws its own case."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

from hypothesis import strategies as st

from mvllm.core.text.assets import GgufVocabulary
from mvllm.core.text.chat_template import ChatTemplate
from mvllm.core.text.control_tokens import ControlTokens
from mvllm.core.text.detokenizer import Detokenizer
from mvllm.core.text.stop import StopStrings
from mvllm.core.text.tokenizer import Tokenizer
from mvllm.core.text.vocabulary import ControlToken
from tests.models.toy_vocabularies import (
    BOS,
    CONTROL,
    byte_level_assets,
    byte_level_json,
    json_assets,
    sentencepiece_assets,
    sentencepiece_vocabulary,
)

LIBRARY = byte_level_json(adds_bos=False)
BYTE_LEVEL = Tokenizer.from_assets(byte_level_assets())
SENTENCEPIECE = Tokenizer.from_assets(sentencepiece_assets())
FROM_JSON = Tokenizer.from_assets(json_assets(LIBRARY))
UNPREFIXED = Tokenizer.from_assets(sentencepiece_assets(sentencepiece_vocabulary(add_space_prefix=False)))
TOKENIZERS = (BYTE_LEVEL, SENTENCEPIECE)

FRAGMENTS = ("<|", "|>", "im", "_start", "_end", "bos", "[", "INST", "]", "<", ">", "|", *CONTROL)
FRAGMENTS += ("<think>", "</think>", "<tool_call>", "hello", " ", "\n", "č", "中", "😀", "\U000f0000")
texts = st.lists(st.sampled_from(FRAGMENTS) | st.text(max_size=3), max_size=8).map("".join)


@st.composite
def token_ids(draw: st.DrawFn, tokenizer: Tokenizer) -> list[int]:
    """Ids at random, or those of a text, so that broken and whole characters both occur."""
    if draw(st.booleans()):
        return draw(st.lists(st.integers(0, tokenizer.vocab_size), max_size=12))
    return tokenizer.encode(draw(texts), add_special_tokens=False)


# --- detokenisation ------------------------------------------------------------------------------------


def the_stream_equals_the_text_decoded_at_once(data: st.DataObject) -> None:
    """H1, H3: whatever follows a prompt, with and without special tokens."""
    tokenizer = data.draw(st.sampled_from(TOKENIZERS))
    prompt, output = data.draw(token_ids(tokenizer)), data.draw(token_ids(tokenizer))
    skip = data.draw(st.booleans())
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=skip)
    state = detokenizer.start(prompt)
    streamed = ""
    for id in output:
        state, text = detokenizer.advance(state, id)
        streamed += text
    streamed += detokenizer.finish(state)
    skipped = tokenizer.special_ids if skip else frozenset()
    continues = any(tokenizer.token_bytes(id) for id in prompt if id not in skipped)
    assert streamed == tokenizer.decode(output, skip_special_tokens=skip, continues=continues)


def streams_do_not_disturb_each_other(data: st.DataObject) -> None:
    """H1: eight sequences through one detokenizer, in any order."""
    tokenizer = data.draw(st.sampled_from(TOKENIZERS))
    detokenizer = Detokenizer(tokenizer)
    outputs = data.draw(st.lists(token_ids(tokenizer), min_size=8, max_size=8))
    states = [detokenizer.start([]) for _ in outputs]
    streamed = [""] * len(outputs)
    turns = [stream for stream, output in enumerate(outputs) for _ in output]
    positions = [0] * len(outputs)
    for stream in data.draw(st.permutations(turns)):
        id = outputs[stream][positions[stream]]
        positions[stream] += 1
        states[stream], text = detokenizer.advance(states[stream], id)
        streamed[stream] += text
    for stream, output in enumerate(outputs):
        assert streamed[stream] + detokenizer.finish(states[stream]) == tokenizer.decode(output)


def decoding_agrees_with_the_tokenizers_library(data: st.DataObject) -> None:
    known = st.lists(st.integers(0, FROM_JSON.vocab_size - 1), max_size=12)
    ids = data.draw(known)
    skip = data.draw(st.booleans())
    assert FROM_JSON.decode(ids, skip_special_tokens=skip) == LIBRARY.decode(ids, skip_special_tokens=skip)


# --- encoding ------------------------------------------------------------------------------------------


def encoding_and_decoding_gives_the_text_back(data: st.DataObject) -> None:
    """H3: where the model adds no leading space."""
    tokenizer = data.draw(st.sampled_from((BYTE_LEVEL, UNPREFIXED)))
    text = data.draw(texts.map(lambda text: text.replace("\u2581", " ")))  # SentencePiece writes a space so
    ids = tokenizer.encode(text, add_special_tokens=False, parse_special=data.draw(st.booleans()))
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


def parsing_agrees_with_the_tokenizers_library(data: st.DataObject) -> None:
    text = data.draw(texts)
    assert FROM_JSON.encode(text) == LIBRARY.encode(text, add_special_tokens=False).ids


def there_is_exactly_one_bos_at_the_start(data: st.DataObject) -> None:
    """I1: for a completion of a model that wants one."""
    text = data.draw(texts)
    ids = BYTE_LEVEL.encode(text)
    assert ids[0] == BOS
    assert (ids[1:2] == [BOS]) == text.startswith("<|bos|><|bos|>")


def unparsed_text_yields_no_control_token(data: st.DataObject) -> None:
    tokenizer = data.draw(st.sampled_from((*TOKENIZERS, FROM_JSON)))
    ids = tokenizer.encode(data.draw(texts), add_special_tokens=False, parse_special=False)
    assert tokenizer.special_ids.isdisjoint(ids)


def control_tokens_are_found_leftmost_and_longest(data: st.DataObject) -> None:
    names = data.draw(st.lists(st.text("ab<", min_size=1, max_size=4), unique=True, max_size=5))
    text = data.draw(st.text("ab<", max_size=12))
    control = ControlTokens({name: ControlToken(id) for id, name in enumerate(names)})
    expected: list[str | int] = []
    rest = text
    while rest:
        found = max((name for name in names if rest.startswith(name)), key=len, default=None)
        if found is not None:
            expected.append(names.index(found))
        elif expected and isinstance(expected[-1], str):
            expected[-1] += rest[0]
        else:
            expected.append(rest[0])
        rest = rest[len(found or rest[0]) :]
    assert control.split(text) == expected


def _naive_sentencepiece(vocabulary: GgufVocabulary, text: str) -> list[int]:
    """Join the neighbours of the best score, leftmost first, until none can be joined."""
    normal = {
        token: (vocabulary.scores[id], id)
        for id, token in enumerate(vocabulary.tokens)
        if vocabulary.token_types[id] == 1
    }
    symbols = list("▁" + text.replace(" ", "▁")) if text else []
    while True:
        pairs = [left + right for left, right in pairwise(symbols)]
        joined = [(normal[pair][0], -at) for at, pair in enumerate(pairs) if pair in normal]
        if not joined:
            break
        at = -max(joined)[1]
        symbols[at : at + 2] = [symbols[at] + symbols[at + 1]]
    ids: list[int] = []
    for symbol in symbols:
        spelled = [4 + byte for byte in symbol.encode()]
        ids += [normal[symbol][1]] if symbol in normal else spelled
    return ids


def sentencepiece_ids_are_those_of_joining_the_best_pair(data: st.DataObject) -> None:
    words = st.sampled_from(("hello", "world", "lo", "oo", "ell", " ", "  ", "h", "d", "r", "č", "<"))
    text = data.draw(st.lists(words, max_size=8).map("".join))
    vocabulary = sentencepiece_vocabulary()
    tokenizer = Tokenizer.from_assets(sentencepiece_assets(vocabulary))
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert ids == _naive_sentencepiece(vocabulary, text)


# --- stop strings --------------------------------------------------------------------------------------


def _naive_stop(stops: Sequence[str], text: str, *, include: bool) -> tuple[str, str | None]:
    """Look at ever longer beginnings of the whole text."""
    for end in range(len(text) + 1):
        completed = [stop for stop in stops if text[:end].endswith(stop)]
        if completed:
            longest = max(completed, key=len)
            return text[: end if include else end - len(longest)], longest
    return text, None


def stop_strings_do_not_depend_on_how_the_text_arrives(data: st.DataObject) -> None:
    """G1: against a search in the whole text."""
    stops = tuple(data.draw(st.lists(st.text("ab ", min_size=1, max_size=4), max_size=3)))
    deltas = data.draw(st.lists(st.text("ab ", max_size=4), max_size=8))
    include = data.draw(st.booleans())
    watcher = StopStrings(stops, include)
    state, emitted, matched = watcher.start(), "", None
    for delta in deltas:
        state, text, matched = watcher.advance(state, delta)
        emitted += text
    emitted += watcher.flush(state)
    assert (emitted, matched) == _naive_stop(stops, "".join(deltas), include=include)


def no_more_is_held_back_than_could_become_a_stop_string(data: st.DataObject) -> None:
    stops = tuple(data.draw(st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3)))
    text = data.draw(st.text("ab", max_size=10))
    watcher = StopStrings(stops, False)
    _, emitted, matched = watcher.advance(watcher.start(), text)
    if matched is None:
        held = text.removeprefix(emitted)
        assert not held or any(stop.startswith(held) for stop in stops)


# --- chats ---------------------------------------------------------------------------------------------

_START, _END = "<|im_start|>{{ m.role }}\n", "<|im_end|>\n"
TEMPLATES = {
    "plain": "{% for m in messages %}"
    + "{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>' }}"
    + "{% endfor %}",
    "trimming": "{% for m in messages %}" + _START + "{{ m.content | trim }}" + _END + "{% endfor %}",
    "adjacent": "{% for m in messages %}{{ m.content }}{% endfor %}<|im_end|>",
    "role in a marker": "{% for m in messages %}<|{{ m.role }}|>[INST]{{ m.content }}{% endfor %}",
    "removing thoughts": "{% for m in messages %}"
    + _START
    + "{{ m.content.split('<think>')[0] ~ m.content.split('</think>')[-1] }}"
    + _END
    + "{% endfor %}",
    "slicing": "{% for m in messages %}" + _START + "{{ m.content[1:] ~ m.content[:3] }}{% endfor %}",
    "json": "{% for m in messages %}" + _START + "{{ m | tojson }}" + _END + "{% endfor %}",
}


@st.composite
def split_control_tokens(draw: st.DrawFn) -> list[str]:
    """Contents that hold a control token in two parts: in neighbours, or around what a template removes."""
    name = draw(st.sampled_from(CONTROL))
    cut = draw(st.integers(1, len(name) - 1))
    between = draw(st.sampled_from(("", "<think></think>", "</think>", "<think>")))
    if between:
        return [name[:cut] + between + name[cut:]]
    return [draw(texts) + name[:cut], name[cut:] + draw(texts)]


def content_yields_no_control_token(data: st.DataObject) -> None:
    """I5: the control tokens are those of the template with harmless content, and no text is lost."""
    source = TEMPLATES[data.draw(st.sampled_from(sorted(TEMPLATES)))]
    contents = data.draw(st.lists(texts, min_size=1, max_size=3) | split_control_tokens())
    roles = [data.draw(st.sampled_from(("user", "assistant", "im"))) for _ in contents]
    template = ChatTemplate(BYTE_LEVEL, byte_level_assets(chat_template=source))
    messages = [{"role": role, "content": text} for role, text in zip(roles, contents, strict=True)]
    harmless = [{"role": role, "content": "x"} for role in roles]
    ids = template.encode(messages)
    control = [id for id in ids if id in BYTE_LEVEL.special_ids]
    assert control == [id for id in template.encode(harmless) if id in BYTE_LEVEL.special_ids]
    assert BYTE_LEVEL.decode(ids, skip_special_tokens=False) == template.render(messages)


def harmless_content_is_encoded_as_by_the_reference(data: st.DataObject) -> None:
    """The ids are those of the rendered text, merges across the borders of content included."""
    source = TEMPLATES[data.draw(st.sampled_from(sorted(TEMPLATES)))]
    words = (
        "hello",
        " hello",
        "he",
        "llo",
        "\n",
        " ",
        "<think>",
        "</think>",
        "a < b > c",
        "č",
        "😀",
        "w",
        "or",
    )
    content = data.draw(st.lists(st.sampled_from(words), max_size=6).map("".join))
    template = ChatTemplate(BYTE_LEVEL, byte_level_assets(chat_template=source))
    messages = [{"role": "user", "content": content}, {"role": "assistant", "content": "hello"}]
    rendered = BYTE_LEVEL.encode(template.render(messages), add_special_tokens=False)
    assert template.encode(messages) == rendered
    assert template.encode(messages, parse_special_in_content=True) == rendered


RULES: dict[str, Callable[[st.DataObject], None]] = {
    rule.__name__: rule
    for rule in (
        the_stream_equals_the_text_decoded_at_once,
        streams_do_not_disturb_each_other,
        decoding_agrees_with_the_tokenizers_library,
        encoding_and_decoding_gives_the_text_back,
        parsing_agrees_with_the_tokenizers_library,
        there_is_exactly_one_bos_at_the_start,
        unparsed_text_yields_no_control_token,
        control_tokens_are_found_leftmost_and_longest,
        sentencepiece_ids_are_those_of_joining_the_best_pair,
        stop_strings_do_not_depend_on_how_the_text_arrives,
        no_more_is_held_back_than_could_become_a_stop_string,
        content_yields_no_control_token,
        harmless_content_is_encoded_as_by_the_reference,
    )
}
