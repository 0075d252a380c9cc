"""Bounds, keys, clients that leave, signals: what a server does under what it should not have to bear."""

import concurrent.futures
import json
import signal
import socket
import time

import httpx
import pytest

from tests.serving.made import events_of, serving

HELLO = [{"role": "user", "content": "hello"}]
KEY = "s3cret"


def body(**fields):
    return {"messages": HELLO, "max_tokens": 4} | fields


@pytest.fixture(scope="module")
def server(folder):
    limits = (
        "server.max_concurrent=4",
        "server.max_queue=2",
        "server.max_body=0.01",
        "server.max_messages=5",
    )
    with serving(folder, *limits, "server.shutdown_s=20") as server:
        yield server


def wait_until(true, seconds=20):
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def active(server) -> float:
    return server.numbers()["mlxft_requests_active"]


def refused(answer, status, said):
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert said in error["message"] and error["type"] and "Traceback" not in answer.text


def test_only_the_key_opens_and_health_is_open(folder):
    with serving(folder, f"server.api_key={KEY}", "server.allow_mount=false") as server:
        paths = ["/v1/models", "/v1/adapters", "/metrics", "/openapi.json", "/nothing"]
        for path in paths:
            for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": f"Basic {KEY}"},
                            {"x-api-key": KEY + "x"}, {"authorization": b"Bearer \xff"}):  # fmt: skip
                answer = httpx.get(server.url + path, headers=headers)
                refused(answer, 401, "API key")
        for headers in ({"authorization": f"Bearer {KEY}"}, {"x-api-key": KEY}):
            assert httpx.get(f"{server.url}/v1/models", headers=headers).status_code == 200
        assert httpx.get(f"{server.url}/health").json()["status"] == "ok"
        mount = {"id": "x", "path": "/"}
        answer = httpx.post(f"{server.url}/v1/adapters", headers={"x-api-key": KEY}, json=mount)
        refused(answer, 405, "Method Not Allowed")
        assert KEY not in "".join(server.said)


@pytest.mark.parametrize("chunked", [False, True])
def test_a_body_that_is_too_large_is_not_read(server, chunked):
    data = json.dumps(body(messages=[{"role": "user", "content": "x" * 20_000}])).encode()
    content = (data[at : at + 1000] for at in range(0, len(data), 1000)) if chunked else data
    headers = {"content-type": "application/json"}
    answer = httpx.post(f"{server.url}/v1/chat/completions", content=content, headers=headers)
    refused(answer, 413, "10000 bytes")


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"{", "JSON"),
        (b"[]", ""),
        (b"\xff\xfe", ""),
        (b'{"messages": NaN}', "messages"),
        (json.dumps(body(messages=HELLO * 6)).encode(), "more than the 5 allowed"),
        (json.dumps(body(temperature=0)).replace("0}", "NaN}").encode(), "temperature"),
        (b'{"messages": [{"role": "user", "content": "\\ud800"}]}', ""),
        (b'{"model": "\\ud800", "messages": [{"role": "user", "content": "a"}]}', ""),
        (json.dumps(body(chat_template_kwargs={"tokenize": False})).encode(), "tokenize"),
        (json.dumps(body(seed=2**70)).encode(), "seed"),
        (b"[" * 5000, ""),
    ],
)
def test_what_is_no_request_is_refused_and_never_a_fault(server, data, said):
    headers = {"content-type": "application/json"}
    answer = httpx.post(f"{server.url}/v1/chat/completions", content=data, headers=headers)
    assert answer.status_code in (400, 404), answer.text
    refused(answer, answer.status_code, said)


def test_more_requests_than_places_get_429_and_the_others_their_answers(server):
    def post(_):
        answer = httpx.post(f"{server.url}/v1/chat/completions", json=body(max_tokens=200), timeout=60)
        return answer.status_code, answer.headers.get("retry-after")

    with concurrent.futures.ThreadPoolExecutor(12) as pool:
        answers = list(pool.map(post, range(12)))
    assert {status for status, _ in answers} == {200, 429}
    assert sum(status == 200 for status, _ in answers) >= 6
    assert all(after for status, after in answers if status == 429)
    assert active(server) == 0


@pytest.mark.parametrize("streams", [True, False])
def test_a_client_that_leaves_frees_its_place(server, streams):
    before = server.numbers().get('mlxft_requests_total{reason="cancelled"}', 0)
    data = json.dumps(body(max_tokens=480, stream=streams)).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n" \
        f"Content-Length: {len(data)}\r\n\r\n".encode()  # fmt: skip
    port = int(server.url.rpartition(":")[2])
    clients = [socket.create_connection(("127.0.0.1", port)) for _ in range(4)]
    for client in clients:
        client.sendall(head + data)
    wait_until(lambda: active(server) == 4)
    for client in clients:
        client.close()
    wait_until(lambda: active(server) == 0, 10)
    assert server.numbers()['mlxft_requests_total{reason="cancelled"}'] == before + 4
    assert httpx.post(f"{server.url}/v1/chat/completions", json=body()).status_code == 200


def test_adapters_are_mounted_and_unmounted_while_it_serves(server, adapters, tmp_path):
    url = f"{server.url}/v1/adapters"
    base = httpx.post(f"{server.url}/v1/completions", json={"prompt": "abc", "max_tokens": 8}).json()
    mounted = httpx.post(url, json={"id": "a", "path": str(adapters["a"])})
    assert mounted.status_code == 200 and mounted.json()["rank"] == 4
    refused(httpx.post(url, json={"id": "a", "path": str(adapters["a"])}), 409, "mounted already")
    refused(httpx.post(url, json={"id": "b", "path": str(tmp_path / "none")}), 400, "cannot be read")
    refused(httpx.post(url, json={"id": "b", "path": "x" * 3000}), 400, "cannot be read: File name too long")
    refused(httpx.post(url, json={"id": "none", "path": str(adapters["b"])}), 400, "another name")
    assert [each["id"] for each in httpx.get(url).json()["data"]] == ["a"]
    fields = {"prompt": "abc", "max_tokens": 8, "adapter": "a"}
    adapted = httpx.post(f"{server.url}/v1/completions", json=fields).json()
    assert adapted["choices"][0]["text"] != base["choices"][0]["text"]
    assert httpx.delete(f"{url}/a").json()["deleted"]
    refused(httpx.delete(f"{url}/a"), 404, "no adapter")
    refused(httpx.post(f"{server.url}/v1/completions", json=fields), 404, "no adapter")
    after = httpx.post(f"{server.url}/v1/completions", json={"prompt": "abc", "max_tokens": 8}).json()
    assert after["choices"] == base["choices"]


def test_many_streams_at_once_are_all_whole(folder):
    with serving(folder) as server:

        def stream(number):
            fields = body(max_tokens=20 + number, stream=True, stream_options={"include_usage": True})
            return httpx.post(f"{server.url}/v1/chat/completions", json=fields, timeout=60).text

        with concurrent.futures.ThreadPoolExecutor(32) as pool:
            texts = list(pool.map(stream, range(32)))
        for number, text in enumerate(texts):
            assert text.endswith("data: [DONE]\n\n")
            assert events_of(text)[-1]["usage"]["completion_tokens"] == 20 + number


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_under_load_lets_answers_end_and_takes_no_more(folder, number):
    with serving(folder, "server.shutdown_s=60") as server:
        url = f"{server.url}/v1/chat/completions"
        with concurrent.futures.ThreadPoolExecutor(6) as pool:
            streams = [
                pool.submit(httpx.post, url, json=body(max_tokens=150, stream=True), timeout=60)
                for _ in range(6)
            ]
            wait_until(lambda: active(server) == 6)
            assert server.stop(number) == 128 + number
            texts = [stream.result().text for stream in streams]
        assert all(text.endswith("data: [DONE]\n\n") for text in texts)
        assert all(events_of(text)[-1]["choices"][0]["finish_reason"] == "length" for text in texts)
        assert not any("Traceback" in line for line in server.said)


def test_answers_that_take_longer_than_the_grace_end_with_an_error_not_in_the_middle(folder):
    with serving(folder, "server.shutdown_s=0.2") as server:
        url = f"{server.url}/v1/chat/completions"
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            stream = pool.submit(httpx.post, url, json=body(max_tokens=450, stream=True), timeout=60)
            wait_until(lambda: active(server) == 1)
            assert server.stop() == 128 + signal.SIGTERM
            last = events_of(stream.result().text)[-1]
        assert "shutting down" in last["error"]["message"]
