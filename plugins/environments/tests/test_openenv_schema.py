"""The request of the OpenEnv adapter for a schema, which needs no OpenEnv: slow, redirecting and malformed servers."""

import time

import pytest

from posttrain.errors import InputError
from posttrain_environments import openenv
from tests.engines.test_openai_client import body, drip_body, drip_headers, server


@pytest.mark.parametrize("respond", [drip_body, drip_headers])
def test_a_server_that_drips_is_given_up(respond, monkeypatch):
    monkeypatch.setattr(openenv, "_SECONDS", 1.0)
    with server(respond) as port:
        started = time.monotonic()
        with pytest.raises(InputError, match="no server of OpenEnv answers"):
            openenv._served_schema(f"http://127.0.0.1:{port}")
        assert time.monotonic() - started < 4


def test_a_redirect_to_another_server_is_not_followed():
    with server(lambda send: send(body('{"action": {}}'))) as other:
        location = f"Location: http://127.0.0.1:{other}/schema\r\n"
        with (
            server(lambda send: send(body("", "302 Found", location))) as port,
            pytest.raises(InputError, match="redirects to"),
        ):
            openenv._served_schema(f"http://127.0.0.1:{port}")


@pytest.mark.parametrize("text", ["[]", "{}", "[" * 50_000, "<html>", "\x00"])
def test_a_malformed_schema_is_one_sentence(text):
    with server(lambda send: send(body(text))) as port, pytest.raises(InputError, match="start it") as raised:
        openenv._served_schema(f"http://127.0.0.1:{port}")
    assert "\n" not in str(raised.value)


def test_a_schema_is_read():
    with server(lambda send: send(body('{"action": {"properties": {}}}'))) as port:
        assert openenv._served_schema(f"http://127.0.0.1:{port}") == {"properties": {}}
