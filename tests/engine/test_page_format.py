"""Pages on their way: what comes out is what went in, or it is refused."""

import pytest

from engine.transfer.format import PageFormat, PageName, PageRefused

NAME = PageName(b"d" * 32, b"p" * 32, bytes(range(64)))
CONTENT = bytes(range(256)) * 4


def make(**changes):
    fields = {"model_digest": b"model", "layout": "bfloat16 [1]", "page_bytes": len(CONTENT), "secret": b"s" * 32}
    return PageFormat(**{**fields, **changes})


def test_a_page_comes_out_as_it_went_in():
    value = make().pack(NAME, CONTENT)
    assert len(value) == make().value_bytes
    assert bytes(make().unpack(NAME, value)) == CONTENT


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"model_digest": b"other"}, "another model"),
        ({"layout": "float32 [1]"}, "another data type or shape"),
        ({"page_bytes": 512}, "1024 of 512 bytes"),
        ({"secret": b"t" * 32}, "checksum"),
    ],
)
def test_another_engines_pages_are_refused(changes, why):
    value = make().pack(NAME, CONTENT)
    with pytest.raises(PageRefused, match=why):
        make(**changes).unpack(NAME, value)


@pytest.mark.parametrize(
    "name",
    [
        PageName(b"e" * 32, NAME.parent, NAME.tokens),
        PageName(NAME.digest, b"q" * 32, NAME.tokens),
        PageName(NAME.digest, NAME.parent, NAME.tokens[:-1] + b"x"),
        PageName(NAME.digest, NAME.parent + NAME.tokens[:1], NAME.tokens[1:]),
    ],
)
def test_a_page_under_another_name_is_refused(name):
    with pytest.raises(PageRefused, match="checksum"):
        make().unpack(name, make().pack(NAME, CONTENT))


def test_every_single_damaged_byte_is_found():
    value = make().pack(NAME, CONTENT)
    for at in range(len(value)):
        damaged = value[:at] + bytes([value[at] ^ 0x40]) + value[at + 1 :]
        with pytest.raises(PageRefused):
            make().unpack(NAME, damaged)


def test_what_is_cut_off_or_too_long_is_refused():
    value = make().pack(NAME, CONTENT)
    for wrong in [value[:length] for length in range(0, len(value), 7)] + [value + b"x"]:
        with pytest.raises(PageRefused):
            make().unpack(NAME, wrong)


def test_a_content_of_another_size_is_not_packed():
    with pytest.raises(ValueError, match="a page has 1024 bytes, not 3"):
        make().pack(NAME, b"abc")


def test_pages_that_differ_in_model_layout_or_secret_have_spaces_of_their_own():
    others = [make(), make(model_digest=b"o"), make(layout="float32 [1]"), make(secret=b"t" * 32)]
    assert len({other.space for other in others}) == 4
    assert make().space == make().space
