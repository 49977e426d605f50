"""Keys of texts, and whose a request is."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.decoding.request import Request, SamplingParams
from outrider.decoding.sources.text_keys import request_hash, request_of, text_key


def test_choices_of_a_request_share_its_hash() -> None:
    name = "chatcmpl-5f3a"
    assert text_key(f"{name}/0") == text_key(name) == request_hash(name) << 16
    assert text_key(f"{name}/65279") == request_hash(name) << 16 | 65279
    assert request_of(text_key(f"{name}/3")) == request_hash(name)
    assert text_key("a/b/2") == request_hash("a/b") << 16 | 2


@pytest.mark.parametrize("name", ["", "/", "a/", "/3", "a/65536", "a/-1", "a/1x", "a/²", "a/٣", "a/000001", "a/" + "9" * 5000])
def test_an_id_of_another_form_is_a_name(name: str) -> None:
    assert text_key(name) == request_hash(name) << 16


def test_the_hash_is_the_same_in_every_process() -> None:
    assert request_hash("") == 0xE4A6A0577479B2B4  # the first of BLAKE2b-64
    assert text_key("chatcmpl-1/1") & 0xFFFF == 1


@settings(max_examples=20)
@given(st.text("a/1é\ud800", max_size=8), st.integers(0, 65535))
def test_keys_are_below_2_to_the_80(name: str, choice: int) -> None:
    assert 0 <= text_key(name) < 2**80 and 0 <= text_key(f"{name}/{choice}") < 2**80


def test_a_request_knows_its_text_and_tenant() -> None:
    request = Request("r/1", [1], SamplingParams(), tenant="acme", public=False)
    assert (request.text, request.tenant, request.public) == (text_key("r/1"), "acme", False)
    private = Request("r", [1], SamplingParams())
    assert private.tenant is None and private.public
