"""The offline API with the embedded model: the same engine, scheduler and translation as behind HTTP."""

import pytest

from server.errors import ApiError
from server.flags import ConfigError
from server.llm import LLM, RequestError


@pytest.fixture(scope="module")
def llm():
    with LLM(dtype="float32", max_model_len=512, num_kv_blocks=128, max_num_seqs=4, progress=False) as model:
        yield model


def test_prompts_are_answered_in_order(llm):
    prompts = [f"{start}, {start + 1}, {start + 2}," for start in range(1, 60, 6)]
    together = llm.generate(prompts, max_tokens=4, temperature=0)
    alone = [llm.generate(prompt, max_tokens=4, temperature=0)[0] for prompt in prompts[::4]]
    assert [answer.text for answer in together[::4]] == [answer.text for answer in alone]
    assert {answer.usage["completion_tokens"] for answer in together} == {4}


def test_token_ids_are_one_prompt(llm):
    as_text = llm.generate("1, 2, 3,", max_tokens=4, temperature=0, return_token_ids=True)
    prompt_ids = as_text[0].body["choices"][0]["prompt_token_ids"]
    as_ids = llm.generate(prompt_ids, max_tokens=4, temperature=0)
    assert [answer.text for answer in as_ids] == [answer.text for answer in as_text]


def test_conversations(llm):
    messages = [{"role": "user", "content": "Say hello."}]
    one = llm.chat(messages, max_tokens=6, temperature=0)
    two = llm.chat([messages, messages], max_tokens=6, temperature=0)
    assert len(one) == 1
    assert [answer.text for answer in two] == [one[0].text] * 2
    assert one[0].outputs[0].message["role"] == "assistant"


def test_every_field_of_the_api_works(llm):
    answer = llm.generate("1, 2, 3,", max_tokens=8, temperature=0, n=2, stop=[" 5"], logprobs=1)[0]
    assert [output.finish_reason for output in answer.outputs] == ["stop", "stop"]
    assert [output.text for output in answer.outputs] == [" 4,", " 4,"]
    assert answer.outputs[0].stop_reason == " 5"
    assert answer.outputs[0].logprobs["tokens"] == [" ", "4", ","]


@pytest.mark.parametrize(
    ("params", "param"),
    [({"temperature": 5}, "temperature"), ({"stream": True}, "stream"), ({"max_tokens": object()}, None)],
)
def test_what_cannot_be_used_is_named(llm, params, param):
    with pytest.raises(RequestError) as error:
        llm.generate("x", **params)
    assert (error.value.param, error.value.status) == (param, 400)


def test_one_bad_body_spoils_no_other(llm):
    good = {"prompt": "1, 2,", "max_tokens": 2, "temperature": 0}
    first, second, third = llm.answers([good, {"prompt": "x", "min_p": 7}, good])
    assert isinstance(second, ApiError)
    assert first["choices"] == third["choices"]


def test_bodies_are_read_as_fast_as_they_are_answered(llm):
    given = []

    def bodies():
        for number in range(100):
            given.append(number)
            yield {"prompt": "1,", "max_tokens": 1}

    answers = llm.answers(bodies())
    next(answers)
    assert len(given) <= 16
    answers.close()
    assert llm.generate("1,", max_tokens=1)


def test_settings_are_those_of_the_server():
    with pytest.raises(ConfigError, match=r"max_num_sqes.*did you mean max-num-seqs"):
        LLM(max_num_sqes=4)
    with pytest.raises(ConfigError, match="dtype: expected one of"):
        LLM(dtype="int3")


def test_closing_twice_is_harmless(llm):
    model = LLM(dtype="float32", max_model_len=64, num_kv_blocks=8, max_num_seqs=1, progress=False)
    model.close()
    model.close()
