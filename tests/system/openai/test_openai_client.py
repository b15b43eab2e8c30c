"""The official OpenAI client against a running pool, as people use it."""

import asyncio
import base64
from collections.abc import Iterator

import openai
import pytest
from openai import AsyncOpenAI, OpenAI

from tests.system import pools
from tests.system.pools import RunningPool

QUESTION = [{"role": "user", "content": "Tell me about the sea."}]
ENDLESS = [{"role": "user", "content": "the the the the"}]
"""At temperature 0 the tiny model repeats itself until its context of 512 tokens is full."""


@pytest.fixture(scope="module")
def client(pool: RunningPool) -> Iterator[OpenAI]:
    with OpenAI(base_url=pool.url + "/v1", api_key=pool.api_key, max_retries=0) as made:
        yield made


@pytest.fixture(scope="module")
def model(client: OpenAI) -> str:
    models = client.models.list().data
    assert [one.id for one in models] == ["tiny-q8_0"]
    assert models[0].object == "model"
    return models[0].id


def test_models(client: OpenAI, model: str) -> None:
    assert client.models.retrieve(model).id == model
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("nobody")
    assert caught.value.code == "model_not_found"


def test_a_plain_answer(client: OpenAI, model: str) -> None:
    answer = client.chat.completions.create(
        model=model, messages=QUESTION, max_tokens=12, temperature=0
    )
    choice = answer.choices[0]
    assert answer.object == "chat.completion"
    assert answer.model == model
    assert choice.message.role == "assistant"
    assert choice.message.content
    assert choice.finish_reason in ("stop", "length")
    assert answer.usage is not None
    assert 1 <= answer.usage.completion_tokens <= 12
    total = answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer.usage.total_tokens == total


def test_both_names_of_max_tokens(client: OpenAI, model: str) -> None:
    for name in ("max_tokens", "max_completion_tokens"):
        answer = client.chat.completions.create(model=model, messages=QUESTION, **{name: 3})
        assert answer.usage is not None
        assert answer.usage.completion_tokens <= 3


def test_a_stream_says_the_same(client: OpenAI, model: str) -> None:
    options = {"model": model, "messages": QUESTION, "max_tokens": 24, "temperature": 0, "seed": 7}
    whole = client.chat.completions.create(**options)
    chunks = list(
        client.chat.completions.create(
            **options, stream=True, stream_options={"include_usage": True}
        )
    )
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    assert chunks[0].choices[0].delta.role == "assistant"
    assert len({chunk.id for chunk in chunks}) == 1
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] is not None
    assert chunks[-1].choices == []
    assert chunks[-1].usage == whole.usage
    assert all(chunk.usage is None for chunk in chunks[:-1])


def test_a_stream_without_usage(client: OpenAI, model: str) -> None:
    chunks = list(
        client.chat.completions.create(model=model, messages=QUESTION, max_tokens=4, stream=True)
    )
    assert all(chunk.choices and chunk.usage is None for chunk in chunks)


def test_headers_carry_receipt_node_and_request(
    client: OpenAI, model: str, pool: RunningPool
) -> None:
    raw = client.chat.completions.with_raw_response.create(
        model=model, messages=QUESTION, max_tokens=4
    )
    answer = raw.parse()
    receipt_id = raw.headers["x-potluck-receipt"]
    receipt = pools.until(
        lambda: (
            pool.http.get(f"/api/v1/receipts/{receipt_id}").status_code == 200
            and pool.get(f"/receipts/{receipt_id}")
        ),
        what="the receipt",
    )
    assert raw.headers["x-request-id"]
    assert receipt["node"] == raw.headers["x-potluck-node"]
    assert answer.usage is not None
    assert receipt["prompt_tokens"] == answer.usage.prompt_tokens
    assert receipt["completion_tokens"] == answer.usage.completion_tokens
    assert int(raw.headers["x-potluck-cost-micro"]) == receipt["total_micro"]


def test_logprobs(client: OpenAI, model: str) -> None:
    answer = client.chat.completions.create(
        model=model, messages=QUESTION, max_tokens=5, temperature=0, logprobs=True, top_logprobs=3
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content
    for entry in logprobs.content:
        assert entry.logprob <= 0
        assert entry.bytes is not None
        assert len(entry.top_logprobs) == 3
        assert entry.logprob == pytest.approx(max(one.logprob for one in entry.top_logprobs))
    spelled = b"".join(bytes(entry.bytes or []) for entry in logprobs.content)
    assert spelled.decode(errors="replace").startswith(answer.choices[0].message.content or "")


def test_logprobs_in_a_stream(client: OpenAI, model: str) -> None:
    chunks = client.chat.completions.create(
        model=model, messages=QUESTION, max_tokens=5, temperature=0, logprobs=True, stream=True
    )
    entries = [
        entry
        for chunk in chunks
        for choice in chunk.choices
        if choice.logprobs
        for entry in choice.logprobs.content or []
    ]
    assert 1 <= len(entries) <= 5
    assert all(entry.top_logprobs == [] for entry in entries)


def test_several_choices(client: OpenAI, model: str) -> None:
    answer = client.chat.completions.create(
        model=model, messages=QUESTION, max_tokens=6, n=3, temperature=1
    )
    assert sorted(choice.index for choice in answer.choices) == [0, 1, 2]
    assert answer.usage is not None
    assert answer.usage.completion_tokens <= 18
    one = client.chat.completions.create(model=model, messages=QUESTION, max_tokens=6)
    assert one.usage is not None
    assert answer.usage.prompt_tokens == one.usage.prompt_tokens


def test_stop(client: OpenAI, model: str) -> None:
    free = client.chat.completions.create(
        model=model, messages=QUESTION, max_tokens=30, temperature=0
    )
    text = free.choices[0].message.content or ""
    words = text.split()
    assert len(words) > 3
    stop = words[2]
    stopped = client.chat.completions.create(
        model=model, messages=QUESTION, max_tokens=30, temperature=0, stop=[stop]
    )
    assert stopped.choices[0].finish_reason == "stop"
    assert stopped.choices[0].message.content == text[: text.index(stop)]


def test_a_seed_repeats_itself(client: OpenAI, model: str) -> None:
    options = {"model": model, "messages": QUESTION, "max_tokens": 10, "temperature": 1.5}
    first, again, other = (
        client.chat.completions.create(**options, seed=seed).choices[0].message.content
        for seed in (11, 11, 12)
    )
    assert first == again
    assert other != first


def test_content_in_parts(client: OpenAI, model: str) -> None:
    plain, parts = (
        client.chat.completions.create(
            model=model,
            messages=[{"role": "system", "content": "Be brief."}, {"role": "user", "content": c}],
            max_tokens=8,
            temperature=0,
        )
        for c in (
            "Hello sea",
            [{"type": "text", "text": "Hello"}, {"type": "text", "text": " sea"}],
        )
    )
    assert plain.choices[0].message.content == parts.choices[0].message.content


@pytest.mark.parametrize(
    ("changed", "error", "code"),
    [
        ({"model": "nobody"}, openai.NotFoundError, "model_not_found"),
        ({"messages": []}, openai.BadRequestError, "invalid_request"),
        ({"max_tokens": 0}, openai.BadRequestError, "invalid_request"),
        ({"max_tokens": "many"}, openai.BadRequestError, "invalid_request"),
        ({"temperature": 3}, openai.BadRequestError, "invalid_request"),
        ({"n": 100}, openai.BadRequestError, "invalid_request"),
        ({"stop": ["x"] * 9}, openai.BadRequestError, "invalid_request"),
        (
            {"messages": [{"role": "user", "content": "sea " * 8_000}]},
            openai.BadRequestError,
            "context_length_exceeded",
        ),
    ],
)
def test_errors_say_what_is_wrong(
    client: OpenAI, model: str, changed: dict, error: type, code: str
) -> None:
    options = {"model": model, "messages": QUESTION, "max_tokens": 4}
    with pytest.raises(error) as caught:
        client.chat.completions.create(**{**options, **changed})
    assert caught.value.code == code
    assert caught.value.type
    assert caught.value.message


def test_an_image_is_refused_by_a_text_model(client: OpenAI, model: str) -> None:
    picture = "data:image/png;base64," + base64.b64encode(b"no image").decode()
    content = [{"type": "image_url", "image_url": {"url": picture}}]
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model=model, messages=[{"role": "user", "content": content}])
    assert caught.value.code == "unsupported_parameter"


def test_a_wrong_key(pool: RunningPool, model: str) -> None:
    stranger = OpenAI(base_url=pool.url + "/v1", api_key="pk_" + "x" * 43, max_retries=0)
    with pytest.raises(openai.AuthenticationError) as caught:
        stranger.chat.completions.create(model=model, messages=QUESTION)
    assert caught.value.code == "invalid_key"


def test_a_client_that_waits_no_longer(client: OpenAI, model: str, pool: RunningPool) -> None:
    with pytest.raises(openai.APITimeoutError):
        client.with_options(timeout=0.05).chat.completions.create(
            model=model, messages=ENDLESS, temperature=0, n=4
        )
    pools.until(lambda: in_flight(pool) == 0, what="an idle engine")


def test_a_client_that_leaves_stops_the_engine(
    client: OpenAI, model: str, pool: RunningPool
) -> None:
    """Tried a few times: on a busy machine the answer may end before we leave."""
    for _ in range(5):
        receipt = receipt_of_a_stream_left_early(client, model, pool)
        if receipt["outcome"] == "cancelled":
            break
    assert receipt["outcome"] == "cancelled"
    assert 3 <= receipt["completion_tokens"] < 500
    pools.until(lambda: in_flight(pool) == 0, what="an idle engine")


def receipt_of_a_stream_left_early(client: OpenAI, model: str, pool: RunningPool) -> dict:
    raw = client.chat.completions.with_raw_response.create(
        model=model, messages=ENDLESS, temperature=0, stream=True
    )
    stream = raw.parse()
    shown = 0
    for chunk in stream:
        shown += bool(chunk.choices and chunk.choices[0].delta.content)
        if shown == 3:
            break
    stream.close()
    path = f"/receipts/{raw.headers['x-potluck-receipt']}"
    return pools.until(
        lambda: pool.http.get(f"/api/v1{path}").status_code == 200 and pool.get(path),
        what="the receipt",
    )


def test_async(pool: RunningPool, model: str) -> None:
    async def main() -> None:
        async with AsyncOpenAI(base_url=pool.url + "/v1", api_key=pool.api_key) as client:
            answer = await client.chat.completions.create(
                model=model, messages=QUESTION, max_tokens=5
            )
            assert answer.choices[0].message.content is not None
            stream = await client.chat.completions.create(
                model=model, messages=QUESTION, max_tokens=5, stream=True
            )
            parts = [chunk async for chunk in stream]
            assert parts[-1].choices[0].finish_reason

    asyncio.run(main())


def test_twenty_at_once(pool: RunningPool, model: str) -> None:
    """Alternately streamed and not; each gets its own whole answer."""

    async def one(client: AsyncOpenAI, index: int) -> str:
        messages = [{"role": "user", "content": f"Count from {index}."}]
        options = {"model": model, "messages": messages, "max_tokens": 30, "temperature": 0}
        if index % 2:
            answer = await client.chat.completions.create(**options)
            return answer.choices[0].message.content
        stream = await client.chat.completions.create(**options, stream=True)
        return "".join([c.choices[0].delta.content or "" async for c in stream if c.choices])

    async def main() -> list[list[str]]:
        async with AsyncOpenAI(
            base_url=pool.url + "/v1", api_key=pool.api_key, max_retries=0
        ) as client:
            return [
                await asyncio.gather(*(one(client, index) for index in range(20))) for _ in range(2)
            ]

    first, second = asyncio.run(main())
    assert all(first)
    assert first == second


def in_flight(pool: RunningPool) -> int:
    nodes = pool.get("/nodes")["data"]
    return sum(replica["in_flight"] for node in nodes for replica in node["replicas"])
