"""Tokenizer, chat template, and the text stream with its stop strings."""

import random
from pathlib import Path

import pytest
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders, models

from nanospec.errors import CheckpointError, ConfigError
from nanospec.text import TextStream, Tokenizer, read_json
from tests import helpers


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(helpers.make_tokenizer(), {"eos_token": "<|end|>"}, helpers.TEMPLATE)


def stream(tokenizer: Tokenizer, text: str, stop: tuple[str, ...] = ()) -> TextStream:
    """Push a text token by token until a stop string ends it."""
    grown = TextStream(tokenizer, (), stop)
    for token in tokenizer.encode(text):
        if grown.extend([token]) is not None:
            break
    grown.finish()
    return grown


def test_pieces_taken_add_up_to_the_decoded_text(tokenizer: Tokenizer) -> None:
    text = helpers.TEXT + " naïve 🦉🦉 日本語\n\ttabs"
    grown, pieces = TextStream(tokenizer), []
    for token in tokenizer.encode(text):
        grown.extend([token])
        pieces.append(grown.take())
    grown.finish()
    pieces.append(grown.take())
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)


def test_a_character_is_held_back_until_its_bytes_are_complete(tokenizer: Tokenizer) -> None:
    owl = tokenizer.encode("\U0001f9ae")  # a guide dog: four bytes, no merges
    assert len(owl) > 1
    grown = TextStream(tokenizer)
    for token in owl[:-1]:
        grown.extend([token])
        assert grown.take() == ""
    grown.extend([owl[-1]])
    assert grown.take() == "\U0001f9ae"


def test_an_incomplete_character_at_the_end_is_not_lost(tokenizer: Tokenizer) -> None:
    tokens = tokenizer.encode("ok \U0001f9ae")[:-1]
    grown = TextStream(tokenizer)
    for token in tokens:
        grown.extend([token])
    grown.finish()
    assert grown.text == tokenizer.decode(tokens)


# Other engines: vllm PR 49391 (of two stop strings the one completed first must win).
@pytest.mark.parametrize(
    ("text", "stop", "expected"),
    [
        (" The user is a", ("a", "is"), " The user "),
        ("one two three", ("two",), "one "),
        ("one two three", ("absent",), "one two three"),
        ("aXbYc", ("Y", "X"), "a"),
        ("the abc", ("c", "abc"), "the "),  # completed together: the longer one cuts more
        ("stop at once", ("stop",), ""),
    ],
)
def test_the_stop_string_completed_first_cuts_the_text(
    tokenizer: Tokenizer, text: str, stop: tuple[str, ...], expected: str
) -> None:
    assert stream(tokenizer, text, stop).text == expected


def test_streamed_text_never_shows_part_of_a_stop_string(tokenizer: Tokenizer) -> None:
    grown, shown = TextStream(tokenizer, (), ("said so: 99", "46, isn")), ""
    for token in tokenizer.encode(helpers.TEXT):
        stopped = grown.extend([token]) is not None
        shown += grown.take()
        if stopped:
            break
    grown.finish()
    shown += grown.take()
    assert shown == grown.text == helpers.TEXT[: helpers.TEXT.index("46, isn")]


def test_stop_strings_are_ignored_while_they_may_not_stop(tokenizer: Tokenizer) -> None:
    grown = TextStream(tokenizer, (), ("is",))
    tokens = tokenizer.encode("this is")
    assert grown.extend(tokens[:3], may_stop_from=3) is None
    stop = grown.extend(tokens[3:], may_stop_from=1)
    assert stop is not None and stop >= 1
    assert grown.text.startswith("this") and grown.text != "this is"


# Found in review: tokens that end in half a character hid a stop string from the search.
def test_a_stop_string_before_half_a_character_is_found_at_once() -> None:
    fast = helpers.make_tokenizer()
    tokenizer = Tokenizer(fast, {}, None)
    half = tokenizer.encode("\U0001f9ae")[0]
    grown = TextStream(tokenizer, (), ("en",))
    joined = [*tokenizer.encode("e"), *tokenizer.encode("n")]

    class Joining(Tokenizer):
        """Decodes token 0 as "n" and the first byte of a character, as one real token does."""

        def decode(self, token_ids: object) -> str:
            ids = list(token_ids)  # type: ignore[call-overload]
            split = [part for i in ids for part in ([joined[1], half] if i == 0 else [i])]
            return tokenizer.decode(split)

    grown = TextStream(Joining(fast, {}, None), (), ("en",))
    assert grown.extend([joined[0]]) is None
    assert grown.extend([0]) == 0
    assert grown.text == ""


@pytest.mark.parametrize("seed", range(3))
def test_random_tokens_stream_to_what_they_decode_to(tokenizer: Tokenizer, seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(200):
        tokens = [rng.randrange(5, helpers.VOCAB_SIZE - 20) for _ in range(rng.randrange(1, 12))]
        grown, shown = TextStream(tokenizer, tokens[:3]), ""
        for token in tokens:
            grown.extend([token])
            shown += grown.take()
        grown.finish()
        shown += grown.take()
        assert shown == grown.text
        whole = tokenizer.decode(tokens[:3] + tokens)
        assert whole.endswith(grown.text.lstrip("\ufffd"))


def test_a_space_that_decoders_strip_at_the_start_is_kept() -> None:
    fast = FastTokenizer(models.WordLevel({"▁a": 0, "▁b": 1, "?": 2}, unk_token="?"))
    fast.decoder = decoders.Metaspace()
    tokenizer = Tokenizer(fast, {}, None)
    grown = TextStream(tokenizer, [0])
    grown.extend([1])
    assert tokenizer.decode([1]) == "b" and grown.text == " b"


def test_special_tokens_have_no_text(tokenizer: Tokenizer) -> None:
    assert stream(tokenizer, "<|user|>hello<|end|>").text == "hello"


def test_without_a_tokenizer_there_is_no_text() -> None:
    grown = TextStream(None)
    grown.extend([7])
    grown.finish()
    assert grown.text == "" and grown.take() == ""


def test_chat_template_wraps_the_messages(tokenizer: Tokenizer) -> None:
    ids = tokenizer.chat_ids([{"role": "user", "content": "hi <there>"}])
    want = tokenizer.encode("<|user|>hi <there><|end|><|assistant|>")
    assert ids == want


def test_chat_template_variables_and_helpers_reach_the_template() -> None:
    template = "{{ flag }}|{{ messages | tojson }}|{{ eos_token }}|{{ strftime_now('%Y')[:2] }}"
    tokenizer = Tokenizer(helpers.make_tokenizer(), {"eos_token": {"content": "<|end|>"}}, template)
    ids = tokenizer.chat_ids([{"role": "user", "content": "<é>"}], flag="on")
    assert tokenizer.decode(ids) == 'on|[{"role": "user", "content": "<é>"}]||20'


def test_a_template_that_raises_gives_its_reason() -> None:
    template = "{{ raise_exception('roles must alternate') }}"
    tokenizer = Tokenizer(helpers.make_tokenizer(), {}, template)
    with pytest.raises(ConfigError, match="roles must alternate"):
        tokenizer.chat_ids([])


def test_the_dialect_of_hugging_face_is_understood() -> None:
    template = (
        "{% generation %}{{ messages | tojson(ensure_ascii=True, indent=None) }}{% endgeneration %}"
        "{{ pad_token }}{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}x"
        "{% endfor %}"
    )
    config = {"pad_token": "<pad>"}
    tokenizer = Tokenizer(helpers.make_tokenizer(), config, template)
    message = {"role": "user", "content": "é"}
    text = tokenizer.decode(tokenizer.chat_ids([message, message]))
    one = '{"role": "user", "content": "\\u00e9"}'
    assert text == f"[{one}, {one}]<pad>x"


def test_a_message_that_breaks_the_template_is_a_clear_error() -> None:
    template = "{{ 'x' + messages[0]['content'] }}"
    with pytest.raises(ConfigError, match="rejects the messages"):
        Tokenizer(helpers.make_tokenizer(), {}, template).chat_ids(
            [{"role": "user", "content": None}]
        )


def test_an_unreadable_template_is_named(qwen3: Path, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes((qwen3 / "tokenizer.json").read_bytes())
    (tmp_path / "chat_template.jinja").write_bytes("é".encode("latin-1"))
    with pytest.raises(CheckpointError, match=r"chat_template\.jinja"):
        Tokenizer.load(tmp_path)


def test_no_template_is_a_clear_error() -> None:
    with pytest.raises(ConfigError, match="no chat template"):
        Tokenizer(helpers.make_tokenizer(), {}, None).chat_ids([])


def test_a_template_file_wins_over_the_tokenizer_config(qwen3: Path, tmp_path: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((qwen3 / name).read_bytes())
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0]['content'] }}!")
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer is not None
    assert tokenizer.decode(tokenizer.chat_ids([{"role": "user", "content": "yes"}])) == "yes!"


def test_a_folder_without_tokenizer_has_none_and_a_broken_one_is_refused(tmp_path: Path) -> None:
    assert Tokenizer.load(tmp_path) is None
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        Tokenizer.load(tmp_path)


def test_truncation_stored_in_the_tokenizer_is_switched_off() -> None:
    fast = helpers.make_tokenizer()
    fast.enable_truncation(4)
    fast.enable_padding(length=50)
    assert (
        Tokenizer(fast, {}, None).encode("abcdefghij")
        == helpers.make_tokenizer().encode("abcdefghij").ids
    )


@pytest.mark.parametrize("content", ["{", "[]", '"text"'])
def test_json_that_is_no_object_is_refused_with_its_path(tmp_path: Path, content: str) -> None:
    path = tmp_path / "x.json"
    path.write_text(content)
    with pytest.raises(CheckpointError, match=r"x\.json"):
        read_json(path)


@pytest.mark.parametrize("stop", [(), ("46, isn",)])
def test_tokens_that_come_together_stream_like_tokens_that_come_alone(
    tokenizer: Tokenizer, stop: tuple[str, ...]
) -> None:
    rng = random.Random(0)
    tokens = tokenizer.encode(helpers.TEXT + " na\u00efve \U0001f989")
    for _ in range(20):
        alone, together = (TextStream(tokenizer, tokens[:2], stop) for _ in range(2))
        end, at = None, 0
        while at < len(tokens) and end is None:
            part = tokens[at : at + rng.randrange(1, 9)]
            at += len(part)
            found = together.extend(part)
            for index, token in enumerate(part):
                step = alone.extend([token])
                assert alone.text is not None  # read after every token
                if step is not None:
                    end = index
                    break
            assert found == end
            if rng.random() < 0.5:  # whether somebody reads on the way
                assert together.text == alone.text
        for own in (alone, together):
            own.finish()
        assert together.take() == alone.take() == alone.text
        assert (end is None) == (not stop)
