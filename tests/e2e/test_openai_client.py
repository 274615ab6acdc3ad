"""The official OpenAI client against a real server process with the real model."""

import asyncio
import shutil
import signal
import subprocess
import threading

import openai
import pytest

MODEL = "SmolLM2-135M-Instruct"
LONG = "1, 2, 3, 4, 5, 6, 7, 8, 9, 10,"  # the model goes on counting


def messages(text="Name three colours."):
    return [{"role": "user", "content": text}]


@pytest.fixture
def client(server):
    with openai.OpenAI(base_url=server.base_url, api_key="unused", max_retries=0, timeout=60) as client:
        yield client


def async_client(server, **options):
    return openai.AsyncOpenAI(
        base_url=server.base_url, api_key="unused", **{"max_retries": 0, "timeout": 60, **options}
    )


def test_models_are_listed_and_can_be_asked_for(client):
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("another")


def test_a_plain_answer(client):
    answer = client.chat.completions.create(model=MODEL, messages=messages(), max_tokens=12, temperature=0)
    choice = answer.choices[0]
    assert choice.message.role == "assistant"
    assert choice.message.content
    assert choice.finish_reason == "length"
    assert answer.usage.completion_tokens == 12
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 12
    assert answer.id.startswith("chatcmpl-")


def test_a_streamed_answer_is_the_plain_one(client):
    options = {"model": MODEL, "messages": messages(), "max_tokens": 16, "temperature": 0}
    plain = client.chat.completions.create(**options)
    chunks = list(client.chat.completions.create(**options, stream=True, stream_options={"include_usage": True}))
    *content, last = chunks
    assert last.choices == []
    assert last.usage.completion_tokens == plain.usage.completion_tokens
    assert all(chunk.usage is None for chunk in content)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in content)
    assert text == plain.choices[0].message.content
    reasons = [chunk.choices[0].finish_reason for chunk in content if chunk.choices[0].finish_reason]
    assert reasons == [plain.choices[0].finish_reason]


def test_completions_plain_streamed_and_stopped(client):
    options = {"model": MODEL, "prompt": LONG, "max_tokens": 24, "temperature": 0}
    plain = client.completions.create(**options)
    streamed = "".join(chunk.choices[0].text for chunk in client.completions.create(**options, stream=True))
    assert streamed == plain.choices[0].text
    stopped = client.completions.create(**options, stop=[", 13"])
    assert stopped.choices[0].text == " 11, 12"
    assert stopped.choices[0].finish_reason == "stop"


def test_a_seed_repeats_and_choices_differ(client):
    options = {"model": MODEL, "messages": messages("Invent a name."), "max_tokens": 8, "seed": 7, "n": 3}
    first, second = (client.chat.completions.create(**options, extra_body={"top_k": 40}) for _ in range(2))
    texts = [choice.message.content for choice in first.choices]
    assert texts == [choice.message.content for choice in second.choices]
    assert len(set(texts)) > 1


def test_a_repeated_prompt_comes_from_the_prefix_cache(client):
    prompt = "A prompt that nobody sends twice but this test. " * 6
    first, second = (
        client.completions.create(model=MODEL, prompt=prompt, max_tokens=2, temperature=0) for _ in range(2)
    )
    assert second.usage.prompt_tokens_details.cached_tokens >= 32
    assert second.choices[0].text == first.choices[0].text


async def test_32_at_once_get_what_each_gets_alone(server):
    prompts = [f"{index}, {index + 1}, {index + 2}," for index in range(32)]
    options = {"model": MODEL, "max_tokens": 8, "temperature": 0}
    async with async_client(server) as client:
        together = await asyncio.gather(*(client.completions.create(prompt=prompt, **options) for prompt in prompts))
        alone = [await client.completions.create(prompt=prompt, **options) for prompt in prompts[::8]]
    assert [answer.usage.completion_tokens for answer in together] == [8] * 32
    assert [answer.choices[0].text for answer in together[::8]] == [answer.choices[0].text for answer in alone]


async def test_32_streams_at_once(server):
    async def read(client, index):
        stream = await client.chat.completions.create(
            model=MODEL, messages=messages(f"Say {index}."), max_tokens=6, temperature=0, stream=True
        )
        return [chunk.choices[0].finish_reason async for chunk in stream][-1]

    async with async_client(server) as client:
        reasons = await asyncio.gather(*(read(client, index) for index in range(32)))
    assert set(reasons) <= {"length", "stop"}


def cancelled(server):
    return server.metric("quire_requests_total", finish_reason="cancelled")


def test_a_stream_left_early_frees_its_blocks_and_is_counted(server, client):
    before = cancelled(server)
    stream = client.completions.create(model=MODEL, prompt=LONG, max_tokens=1000, temperature=0, stream=True)
    for _ in range(3):
        next(stream)
    assert server.metric("quire_requests_running") == 1
    stream.close()
    server.wait_idle()
    server.until(lambda: cancelled(server) == before + 1, 5, "one more cancelled request")


async def test_an_answer_given_up_frees_its_blocks_and_is_counted(server):
    before = cancelled(server)
    async with async_client(server) as client:
        answer = asyncio.create_task(
            client.completions.create(model=MODEL, prompt=LONG, max_tokens=1000, temperature=0)
        )
        await asyncio.to_thread(server.until, lambda: server.metric("quire_requests_running") == 1, 10, "running")
        answer.cancel()
        with pytest.raises(asyncio.CancelledError):
            await answer
    await asyncio.to_thread(server.wait_idle)
    await asyncio.to_thread(server.until, lambda: cancelled(server) == before + 1, 5, "one more cancelled request")


def test_a_prompt_that_is_too_long_names_both_numbers(client):
    with pytest.raises(openai.BadRequestError, match="maximum context length is 2048 tokens") as error:
        client.completions.create(model=MODEL, prompt="word " * 3000, max_tokens=1)
    assert error.value.code == "context_length_exceeded"


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"temperature": 3}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"n": 0}, "n"),
        ({"stop": [""]}, "stop"),
        ({"logit_bias": {"999999": 1}}, "logit_bias"),
        ({"extra_body": {"min_p": 2}}, "min_p"),
        ({"messages": []}, "messages"),
    ],
)
def test_a_bad_parameter_is_named(client, options, param):
    with pytest.raises(openai.BadRequestError) as error:
        client.chat.completions.create(**{"model": MODEL, "messages": messages(), "max_tokens": 1} | options)
    assert error.value.type == "invalid_request_error"
    assert error.value.param.startswith(param)


def test_an_unknown_model_is_404(client):
    with pytest.raises(openai.NotFoundError) as error:
        client.chat.completions.create(model="made-up", messages=messages(), max_tokens=1)
    assert error.value.code == "model_not_found"


def test_every_answer_carries_an_id_and_its_timing(client):
    raw = client.chat.completions.with_raw_response.create(
        model=MODEL, messages=messages(), max_tokens=2, extra_headers={"x-request-id": "mine-1"}
    )
    assert raw.headers["x-request-id"] == "mine-1"
    assert all(part in raw.headers["server-timing"] for part in ("queue;dur=", "prefill;dur=", "decode;dur="))


def test_every_request_ends_in_exactly_one_cell(server, client):
    def total(**labels):
        return server.metric("quire_requests_total", endpoint="/v1/chat/completions", **labels)

    before, failed = total(), total(status="400")
    for _ in range(3):
        client.chat.completions.create(model=MODEL, messages=messages(), max_tokens=1)
    with pytest.raises(openai.BadRequestError):
        client.chat.completions.create(model=MODEL, messages=messages(), max_tokens=1, temperature=9)
    server.until(lambda: total() == before + 4, 5, "four more requests")
    assert total(status="400") == failed + 1


def test_gauges_return_to_their_idle_values(server, client):
    client.chat.completions.create(model=MODEL, messages=messages(), max_tokens=4)
    server.wait_idle()
    for name in ("quire_kv_usage_ratio", "vllm:kv_cache_usage_perc", "vllm:num_requests_running"):
        assert server.metric(name) == 0, name
    assert server.metric("vllm:generation_tokens_total") == server.metric("quire_generation_tokens_total") > 0
    assert server.metric("quire_time_to_first_token_seconds_count") > 0


@pytest.fixture(scope="module")
def narrow_server(start_server):
    """One sequence at a time and one in the queue; nothing under vLLM's names, which promtool would refuse."""
    flags = ("--max-num-seqs", "1", "--max-num-queued-reqs", "1", "--num-kv-blocks", "256", "--disable-vllm-metrics")
    return start_server(*flags)


async def test_overload_completes_what_was_accepted_and_refuses_the_rest_with_a_time(narrow_server):
    async with async_client(narrow_server) as client:

        async def ask():
            try:
                answer = await client.completions.create(model=MODEL, prompt=LONG, max_tokens=24, temperature=0)
            except openai.RateLimitError as error:
                return error
            return answer

        results = await asyncio.gather(*(ask() for _ in range(6)))
    refused = [result for result in results if isinstance(result, openai.RateLimitError)]
    answered = [result for result in results if not isinstance(result, openai.RateLimitError)]
    assert answered
    assert refused
    assert {answer.usage.completion_tokens for answer in answered} == {24}
    for error in refused:
        assert 1 <= int(error.response.headers["retry-after"]) <= 60
        assert 1000 <= int(error.response.headers["retry-after-ms"]) <= 60_000
        assert error.code == "queue_full"
        assert {"reason", "queue_depth", "limit", "retry_after_s"} <= set(error.body)


async def test_the_sdks_own_retry_succeeds_after_an_overload(narrow_server):
    before = narrow_server.metric("quire_requests_total", status="429")
    async with async_client(narrow_server, max_retries=8) as client:
        options = {"model": MODEL, "prompt": LONG, "max_tokens": 12, "temperature": 0}
        answers = await asyncio.gather(*(client.completions.create(**options) for _ in range(4)))
    assert [answer.usage.completion_tokens for answer in answers] == [12] * 4
    assert narrow_server.metric("quire_requests_total", status="429") > before


def test_metrics_of_a_used_server_pass_promtool(narrow_server):
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not installed (Debian: prometheus)")
    _, text = narrow_server.get("/metrics")
    result = subprocess.run([promtool, "check", "metrics"], input=text, capture_output=True, text=True, timeout=30)
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")


def test_sigterm_finishes_what_runs_and_takes_nothing_new(narrow_server):
    with openai.OpenAI(base_url=narrow_server.base_url, api_key="unused", max_retries=0, timeout=60) as client:
        stream = client.completions.create(model=MODEL, prompt=LONG, max_tokens=60, temperature=0, stream=True)
        chunks = [next(stream)]
        rest = threading.Thread(target=lambda: chunks.extend(stream))
        narrow_server.process.send_signal(signal.SIGTERM)
        narrow_server.until(lambda: narrow_server.get("/ready")[0] == 503, 10, "not ready")
        assert narrow_server.get("/health")[0] == 200
        with pytest.raises(openai.InternalServerError) as error:
            client.completions.create(model=MODEL, prompt=LONG, max_tokens=1)
        assert error.value.status_code == 503
        assert error.value.code == "draining"
        rest.start()
        rest.join(60)
    assert chunks[-1].choices[0].finish_reason == "length"
    assert "".join(chunk.choices[0].text for chunk in chunks).startswith(" 11, 12, 13")
    assert narrow_server.process.wait(30) == 0
