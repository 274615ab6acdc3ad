"""Templates that requests bring: whatever they do, the server goes on, and the fault is named as theirs."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from server.text.own_template import MAX_CHARS, OwnTemplateError, OwnTemplates
from tests.server.conftest import running, text_of
from tests.server.test_errors import invalid

HELLO = {"messages": [{"role": "user", "content": "hi"}]}
FINE = "{{ bos_token }}{{ messages[0].content }}!"

HOSTILE = {
    "a loop": "{% set r = range(99999) %}{% for a in r %}{% for b in r %}{% endfor %}{% endfor %}",
    "a long text": "{{ 'x' * (10 ** 10) }}",
    "a long list": "{{ ([0] * (10 ** 10)) | length }}",
    "a large number": "{{ 9 ** (9 ** 9) }}",
    "a wide format": "{{ '%100000000000d' % 1 }}",
    "a text replaced by texts": "{{ ('a' * 100000) | replace('a', 'b' * 1000000) }}",
    "a doubled text": "{% set n = namespace(s='x') %}{% for i in range(60) %}{% set n.s = n.s ~ n.s %}{% endfor %}",
    "much output": "{% set s = 'x' * 1000000 %}{% for i in range(99999) %}{{ s }}{% endfor %}",
    "deep syntax": "{{ " + "(" * 20_000 + ")" * 20_000 + " }}",
    "a deep call": "{% macro f(n) %}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}",
}


@pytest.fixture
async def own() -> AsyncIterator[OwnTemplates]:
    templates = OwnTemplates({"bos_token": "<s>"}, time_limit_s=0.5)
    yield templates
    await templates.close()


@pytest.mark.parametrize("source", HOSTILE.values(), ids=HOSTILE.keys())
async def test_a_hostile_template_is_given_up_and_the_loop_goes_on(own: OwnTemplates, source: str) -> None:
    await own.render(FINE, HELLO)
    render = asyncio.create_task(own.render(source, HELLO))
    turns = 0
    while not render.done():
        await asyncio.sleep(0.01)
        turns += 1
    with pytest.raises(OwnTemplateError):
        await render
    assert turns, "the loop had its turns meanwhile"
    assert await own.render(FINE, HELLO) == "<s>hi!"


async def test_a_fair_template_has_all_that_it_would_have_in_the_server(own: OwnTemplates) -> None:
    source = "{{ documents[0].t }}{{ mood }}{% if add_generation_prompt %}>{% endif %}{{ tools | tojson }}\ud800"
    arguments = {**HELLO, "documents": [{"t": "ü🙂"}], "mood": "glad", "tools": [{"type": "function"}]}
    assert await own.render(source, arguments) == 'ü🙂glad>[{"type": "function"}]\ud800'
    longest = "{{ '🙂' * " + str(MAX_CHARS) + " }}"
    assert len(await own.render(longest, HELLO)) == MAX_CHARS


async def test_many_at_once_are_rendered_in_turn(own: OwnTemplates) -> None:
    prompts = await asyncio.gather(*(own.render(f"{{{{ {i} }}}}", HELLO) for i in range(20)))
    assert prompts == [str(i) for i in range(20)]


async def test_a_caller_that_leaves_gets_nobody_the_wrong_prompt(own: OwnTemplates) -> None:
    leaving = asyncio.create_task(own.render(HOSTILE["a loop"], HELLO))
    await asyncio.sleep(0.1)
    leaving.cancel()
    assert await own.render(FINE, HELLO) == "<s>hi!"
    assert leaving.cancelled()


async def test_the_process_knows_none_of_the_servers_secrets(
    own: OwnTemplates, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QUIRE_API_KEY", "secret")
    await own.render(FINE, HELLO)
    process = own._process
    assert process is not None
    assert b"secret" not in environment_of(process.pid)


def environment_of(pid: int) -> bytes:
    """What a process was started with; nothing where the system does not tell."""
    file = Path(f"/proc/{pid}/environ")
    return file.read_bytes() if file.exists() else b""


async def test_the_fault_is_the_templates_and_the_server_serves_on() -> None:
    async with running(trust_request_chat_template=True) as bench:
        assert text_of(await bench.chat("SAY:hello|", chat_template="{{ messages[0].content }}")) == "hello"
        for source in ("{% if", "{{ raise_exception('not so') }}", "{{ 1 / 0 }}", HOSTILE["a long text"]):
            error = invalid(await bench.chat("SAY:hello|", chat_template=source))
            assert error["param"] == "chat_template"
            assert "own chat template" in error["message"]
            error = invalid(await bench.post("/tokenize", {**HELLO, "chat_template": source}))
            assert error["param"] == "chat_template"
        assert "no RAISE" in (refused := invalid(await bench.chat("RAISE")))["message"]
        assert refused["param"] == "messages"
        assert text_of(await bench.chat("SAY:hello|")) == "hello"
