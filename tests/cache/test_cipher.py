"""Sealed values: nothing opens that was changed, moved or closed with another key; keys can be changed."""

from __future__ import annotations

import base64
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache.store.cipher import Checksums, Encryption, InvalidKeys, Sealer, Unreadable, parse_keys, sealer

OLD, NEW = bytes(range(32)), bytes(range(1, 33))


def seals(encrypts: bool) -> Sealer:
    return sealer([OLD] if encrypts else [])


@pytest.mark.parametrize("encrypts", [False, True])
@given(value=st.binary(max_size=200), bound_to=st.binary(max_size=20))
def test_a_value_opens_where_it_belongs(encrypts: bool, value: bytes, bound_to: bytes) -> None:
    sealed = seals(encrypts).seal(value, bound_to)
    assert seals(encrypts).unseal(sealed, bound_to) == value
    with pytest.raises(Unreadable):
        seals(encrypts).unseal(sealed, bound_to + b"!")


@pytest.mark.parametrize("encrypts", [False, True])
@given(value=st.binary(min_size=1, max_size=100), at=st.integers(0, 10_000), bit=st.integers(0, 7), cut=st.booleans())
def test_a_changed_value_does_not_open(encrypts: bool, value: bytes, at: int, bit: int, cut: bool) -> None:
    sealed = bytearray(seals(encrypts).seal(value, b"here"))
    at %= len(sealed)
    if cut:
        del sealed[at:]
    else:
        sealed[at] ^= 1 << bit
    with pytest.raises(Unreadable):
        seals(encrypts).unseal(bytes(sealed), b"here")


def test_encrypted_values_tell_nothing() -> None:
    one, other = (Encryption([OLD]).seal(b"the answer is 42", b"x") for _ in range(2))
    assert b"answer" not in one
    assert one != other


def test_keys_change_by_putting_a_new_one_in_front() -> None:
    before, during, after = Encryption([OLD]), Encryption([NEW, OLD]), Encryption([NEW])
    old = before.seal(b"old", b"")
    assert during.unseal(old, b"") == b"old"
    new = during.seal(b"new", b"")
    assert after.unseal(new, b"") == b"new"
    for cipher, sealed in ((after, old), (before, new), (Checksums(), new), (after, Checksums().seal(b"plain", b""))):
        with pytest.raises(Unreadable):
            cipher.unseal(sealed, b"")


def test_threads_may_share_a_cipher() -> None:
    cipher = Encryption([OLD])
    faults: list[Exception] = []

    def work(number: int) -> None:
        try:
            for i in range(500):
                value = b"%d %d" % (number, i)
                assert cipher.unseal(cipher.seal(value, value), value) == value
        except Exception as error:
            faults.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert faults == []


def test_keys_as_configured() -> None:
    standard, for_urls = base64.b64encode(b"\xff" * 32).decode(), base64.urlsafe_b64encode(b"\xff" * 32).decode()
    assert parse_keys(f" {standard} ,{base64.b64encode(OLD).decode()},") == [b"\xff" * 32, OLD]
    assert parse_keys(f"{standard},{for_urls}") == [b"\xff" * 32]


@pytest.mark.parametrize("text", ["", " , ", "secret", base64.b64encode(b"short").decode(), "é" * 44])
def test_what_is_no_key_is_refused_without_being_shown(text: str) -> None:
    with pytest.raises(InvalidKeys, match="openssl rand -base64 32") as refusal:
        parse_keys(text)
    assert len(text) < 4 or text not in str(refusal.value)
