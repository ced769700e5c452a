# SPDX-License-Identifier: Apache-2.0
"""The HTTP drafter: drafts of a request and of earlier ones, and sentences for wrong requests."""

import http.client
import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from specops.integrations.draft_server import PATH, Drafts, make_server

TEXT = [5, 6, 7, 8, 9, 5, 6, 7]


def ask(drafts: Drafts, prefix: list[int], request_id: int = 1, **more: Any) -> list[int]:
    return drafts.draft({"request_id": request_id, "prefix": prefix, **more})


def test_text_of_a_request_is_continued() -> None:
    drafts = Drafts(max_draft_tokens=3)
    assert ask(drafts, TEXT) == [8, 9, 5]
    assert ask(drafts, [*TEXT, 8, 9]) == [5, 6, 7]


@pytest.mark.parametrize(
    "more, expected",
    [
        ({"max_draft_tokens": 1}, [8]),
        ({"max_draft_tokens": 99}, [8, 9, 5]),
        ({"max_sequence_length": 10}, [8, 9]),
        ({"max_sequence_length": 8}, []),
        ({"end_id": 9}, [8, 9]),
        ({"end_id": None}, [8, 9, 5]),
    ],
)
def test_drafts_end_with_the_text(more: dict[str, Any], expected: list[int]) -> None:
    assert ask(Drafts(max_draft_tokens=3), TEXT, **more) == expected


def test_later_requests_draft_from_earlier_ones() -> None:
    drafts = Drafts(max_draft_tokens=2, max_requests=1)
    ask(drafts, [1, 2])
    ask(drafts, [1, 2, 30, 31, 32, 33])
    assert ask(drafts, [9, 30, 31], request_id=2) == [32, 33]


def test_other_text_under_the_same_id_is_another_request() -> None:
    drafts = Drafts(max_draft_tokens=2)
    ask(drafts, TEXT)
    assert ask(drafts, [1, 2, 3, 1, 2]) == [3, 1]


@pytest.mark.parametrize(
    "body, sentence",
    [
        ([], "the body must be an object, got []"),
        ({"prefix": [1]}, "request_id must be an integer or a string, got None"),
        ({"request_id": True, "prefix": [1]}, "request_id must be an integer or a string"),
        ({"request_id": 1, "prefix": [1, -1]}, "prefix must be a list of token ids"),
        ({"request_id": 1, "prefix": "1"}, "prefix must be a list of token ids"),
        ({"request_id": 1, "prefix": [1], "k": 2}, "got k"),
        ({"request_id": 1, "prefix": [1], "end_id": "2"}, "end_id must be an integer or null"),
        (
            {"request_id": 1, "prefix": [1], "max_sequence_length": -1},
            "max_sequence_length must be an integer of at least 0, got -1",
        ),
    ],
)
def test_wrong_bodies_are_refused(body: Any, sentence: str) -> None:
    with pytest.raises(ValueError) as error:
        Drafts().draft(body)
    assert sentence in str(error.value)


@pytest.fixture
def connection() -> Iterator[http.client.HTTPConnection]:
    server = make_server(Drafts(max_draft_tokens=3), "127.0.0.1", 0)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    made = http.client.HTTPConnection("127.0.0.1", int(server.server_address[1]))
    yield made
    made.close()
    server.shutdown()
    thread.join()
    server.server_close()


def test_route_answers_and_survives_wrong_requests(
    connection: http.client.HTTPConnection,
) -> None:
    def post(path: str, body: str) -> tuple[int, Any]:
        connection.request("POST", path, body)
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read())

    assert post(PATH, "{")[0] == 400
    assert post(PATH, "[" * 100_000)[0] == 400
    assert post(PATH, json.dumps({"prefix": TEXT})) == (
        400,
        {"error": "request_id must be an integer or a string, got None"},
    )
    good = json.dumps({"request_id": 3, "prefix": TEXT, "end_id": 0, "max_sequence_length": 99})
    assert post(PATH, good) == (200, {"draft_tokens": [8, 9, 5]})
